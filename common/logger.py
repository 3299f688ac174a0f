"""Where a run is written down: its directory, progress.txt, TensorBoard events, the terminal.

`Logger` and `EpochLogger` have Spinning Up's methods and write its file formats, so that its
readers' own tools read ours. All methods are called by all ranks together; rank 0 writes.
"""

import contextlib
import fcntl
import importlib.metadata
import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path

import numpy as np
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter
from tqdm import tqdm

from common import UsageError, cpu
from common.checkpoint import Checkpointer, CheckpointError
from common.mpi_tools import (
    broadcast,
    check_finite,
    mpi_statistics_scalar,
    mpi_sum,
    num_procs,
    proc_id,
)
from common.serialization import (
    check_inside,
    convert_json,
    printable,
    read_json,
    write_atomically,
    write_json,
)
from common.signals import stop_requested

COLORS = {"gray": 30, "red": 31, "green": 32, "yellow": 33, "blue": 34, "magenta": 35, "cyan": 36}
# What a run leaves in its directory; --overwrite deletes these and nothing else.
RUN_FILES = ["config.json", "progress.txt", "status.json", "policy.npz", "torch_save", "tf1_save"]
RUN_FILES += ["checkpoint", "events.out.tfevents.*"]
RUN_DIRS = ["torch_save", "tf1_save", "checkpoint", "checkpoint/journal"]
MAX_NAME = 200  # bytes of an experiment's name; a date and a seed are added to it
STATUSES = ("running", "finished", "interrupted", "failed")
# Flags that may change when a run is resumed: they do not touch its numbers.
FREE_TO_CHANGE = {"epochs", "save_freq", "data_dir", "resume", "overwrite", "num_cpu"}
TAGS = {"AverageEpRet": "charts/episodic_return", "EpLen": "charts/episodic_length"}
TAGS |= {"AverageTestEpRet": "eval/episodic_return", "TestEpLen": "eval/episodic_length"}

_open_logger = None  # the logger whose run `mark` speaks of


def colorize(text, color="green", bold=False):
    """`text` in a terminal's colour escapes."""
    return f"\x1b[{'1;' if bold else ''}{COLORS[color]}m{text}\x1b[0m"


def setup_logger_kwargs(exp_name, seed=None, data_dir="data", datestamp=False):
    """Arguments of a `Logger` whose directory follows Spinning Up's convention.

    Returns:
        dict(output_dir, exp_name), where output_dir is `<data_dir>/<exp_name>`, and below it
        `<exp_name>_s<seed>` if a seed is given; with a datestamp,
        `<data_dir>/YYYY-MM-DD_<exp_name>/YYYY-MM-DD_HH-MM-SS-<exp_name>_s<seed>`.

    Raises:
        UsageError: the name is none of a directory in `data_dir`, or a link leads out of it.
    """
    if exp_name in ("", ".", "..") or exp_name != Path(exp_name).name or not exp_name.isprintable():
        raise UsageError(f"--exp-name must be a plain name, not {printable(ascii(exp_name))}")
    if len(exp_name.encode()) > MAX_NAME:
        raise UsageError(f"--exp-name must have at most {MAX_NAME} bytes: {printable(exp_name)}")
    now = broadcast(datetime.now())
    outer = f"{now:%Y-%m-%d}_{exp_name}" if datestamp else exp_name
    path = Path(data_dir, outer)
    if seed is not None:
        path /= (
            f"{now:%Y-%m-%d_%H-%M-%S}-{exp_name}_s{seed}" if datestamp else f"{exp_name}_s{seed}"
        )
    check_inside(data_dir, path)
    return {"output_dir": str(path), "exp_name": exp_name}


def start_run(args, script):
    """Open the run directory of a script's `Args` and write its config.json.

    Args:
        args: the script's `Args`.
        script: its `__file__`; the experiment is called `<script>_<env-id>` if `args` has no name.

    Returns:
        an EpochLogger.

    Raises:
        UsageError: see `Logger` and `Logger.save_config`.
    """
    exp_name = args.exp_name or re.sub(r"[^\w.-]", "_", f"{Path(script).stem}_{args.env_id}")
    logger_kwargs = setup_logger_kwargs(exp_name, args.seed, args.data_dir, args.datestamp)
    if args.datestamp and args.resume:
        raise UsageError("--datestamp makes a new directory: there is nothing to --resume in it")
    logger = EpochLogger(**logger_kwargs, resume=args.resume, overwrite=args.overwrite)
    try:
        logger.save_config(args, script)
    except UsageError:
        logger.close_lock()
        raise
    return logger


def mark(status, error=None):
    """Write down how the open run ended, from any rank; nothing happens if none is open."""
    if _open_logger is not None:
        # The disk may be what failed: then the way out must not fail too.
        with contextlib.suppress(Exception):
            _open_logger.write_status(status, error)


def release():
    """Close the open run's files and let other processes have its directory."""
    if _open_logger is not None:
        _open_logger.close_lock()


class Logger:
    """The record of one run.

    Args:
        output_dir: the run directory; made here.
        output_fname: the table's file name.
        exp_name: the experiment's name, for plots.
        resume: continue the run that the directory holds; start one if it holds none.
        overwrite: delete the run that the directory holds.

    Raises:
        UsageError: the directory cannot be made or written, holds a run and neither `resume` nor
            `overwrite` is set, or another process has it open. Nothing was changed then.
    """

    def __init__(
        self, output_dir, output_fname="progress.txt", exp_name=None, resume=False, overwrite=False
    ):
        self.output_dir = Path(output_dir)
        self.progress_path = self.output_dir / output_fname
        self.exp_name = exp_name
        self.resume, self.overwrite = resume, overwrite
        if resume and overwrite:
            raise UsageError("--resume and --overwrite exclude each other")
        self.headers, self.row = [], {}
        self.epoch = self.epochs = 0  # epochs done, epochs to do
        self.save_freq = 1  # epochs between checkpoints
        self.stopping = False  # whether the run was asked to stop
        self.finished = False  # whether the run that is resumed has no epoch left to do
        self.elapsed = 0.0  # seconds before this process took the run up
        self.start_time = time.time()
        self.progress_file = self.events = None
        self._last_charted = None
        self._lock = None
        error = broadcast(self._claim() if proc_id() == 0 else None)
        if error:
            raise UsageError(error)
        self.checkpointer = Checkpointer(self.output_dir / "checkpoint")
        global _open_logger
        _open_logger = self

    # Run directory ------------------------------------------------------------------------------

    def _claim(self):
        """Take the run directory for this process. Returns why not, or None."""
        try:
            made = [p for p in (self.output_dir, *self.output_dir.parents) if not p.exists()]
        except (OSError, ValueError) as e:  # no name of a directory
            return f"cannot write to {printable(self.output_dir)}: {e}"
        try:
            self.output_dir.mkdir(parents=True, exist_ok=True)
            for pattern in (*RUN_FILES, ".lock", "checkpoint/journal"):
                for path in self.output_dir.glob(pattern):
                    kind = "directory" if pattern in RUN_DIRS else "file"
                    # What is written to a link would land elsewhere.
                    if path.is_symlink() or path.is_dir() != (kind == "directory"):
                        return f"cannot write to {path}: it is no plain {kind}"
            self._lock = open(self.output_dir / ".lock", "a+b")  # noqa: SIM115 - held while we run
        except OSError as e:
            for path in made:  # leave no empty directories behind
                if path.exists():
                    path.rmdir()
            return f"cannot write to {self.output_dir}: {e.strerror}"
        try:
            # The kernel drops the lock when its holder dies, however it dies.
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.seek(0)
            holder = printable(self._lock.read(200).decode("utf-8", "replace"))
            return f"{self.output_dir} is in use by {holder or 'a process'}"
        if self._holds_run() and not (self.resume or self.overwrite):
            self.close_lock()
            return f"{self.output_dir} holds a run: --resume continues it, --overwrite replaces it"
        self._lock.truncate(0)
        self._lock.write(f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        self._lock.flush()
        half_written = [".*.tmp", "torch_save/.*.tmp"]  # by a process that was killed
        for pattern in half_written + (RUN_FILES if self.overwrite else []):
            for path in self.output_dir.glob(pattern):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        return None

    def _holds_run(self):
        return any((self.output_dir / name).exists() for name in RUN_FILES[:-1])

    def _has_checkpoint(self):
        return any(self.checkpointer.directory.glob("epoch_*"))

    def close_lock(self):
        """Let other processes have the directory."""
        global _open_logger
        _open_logger = None
        for file in (self.progress_file, self.events):
            if file:
                file.close()
        if self._lock:
            self._lock.close()
            self._lock = None

    def save_config(self, config, script=None):
        """Write config.json: the arguments, and the versions that the numbers depend on.

        Args:
            config: the script's `Args`, or a dict.
            script: the script's path; that of the running program, if None.

        Raises:
            UsageError: the run that is resumed had other arguments, or another number of ranks.
        """
        args = convert_json(config)
        self.epochs = args.get("epochs", 0)
        self.save_freq = args.get("save_freq", 1)
        config = {**args, "exp_name": self.exp_name, "script": Path(script or sys.argv[0]).name}
        config |= {"ranks": num_procs(), "versions": _versions(), "git_commit": _git_commit()}
        config |= {"host": socket.gethostname(), "command": sys.argv}
        config |= {"start_time": datetime.now().astimezone().isoformat(timespec="seconds")}
        path = self.output_dir / "config.json"
        if self.resume and self._holds_run():
            old, status = self._read_old_config(path) or config, self._read_old_status()
            self.finished = status["status"] == "finished" and self.epochs <= status["epoch"]
            self.epoch = status["epoch"]
            fixed = (set(args) | {"script", "ranks"}) - FREE_TO_CHANGE
            changed = sorted(k for k in fixed if old.get(k) != config.get(k))
            if changed:
                text = [f"{k} was {printable(old.get(k))}, is {config.get(k)}" for k in changed]
                raise UsageError(f"cannot resume {self.output_dir}: {', '.join(text)}")
            if status["status"] == "finished" and not (self.finished or self._has_checkpoint()):
                text = "it is finished, and its checkpoints, replay buffer and all, are deleted"
                raise UsageError(f"cannot extend {self.output_dir}: {text}")
            versions = config["versions"]
            for name in sorted(k for k, v in versions.items() if old["versions"].get(k) != v):
                was, now = printable(old["versions"].get(name)), versions[name]
                self.log(f"WARNING: resuming with {name} {now}; the run began with {was}", "yellow")
        if proc_id() == 0 and not self.finished:
            write_json(path, config)
            self.write_status("running")
            self.log(f"Logging to {self.output_dir}", "green")

    def _read_old_config(self, path):
        """config.json of the run that is resumed; None if it stopped before it wrote one."""
        try:
            old = read_json(path)
            if not isinstance(old.get("versions"), dict):
                raise ValueError(f"{path} is damaged: it has no versions")
        except FileNotFoundError:
            if self.progress_path.exists() or self._has_checkpoint():
                raise UsageError(f"cannot resume: {path} is missing") from None
            return None
        except ValueError as e:
            raise UsageError(f"cannot resume: {e}") from e
        return old

    def _read_old_status(self):
        """status.json of the run that is resumed; what can be said without it, loudly."""
        path = self.output_dir / "status.json"
        try:
            status = read_json(path)
            if status.get("status") not in STATUSES or type(status.get("epoch")) is not int:
                raise ValueError(f"{path} is damaged: it has no status or no epoch")
            return status
        except FileNotFoundError:
            error = f"{path} is missing"
        except ValueError as e:
            error = str(e)
        # A checkpoint knows where the run stands. A run without any is one that was killed before
        # its first one, or one that is finished: then its table must not be begun anew.
        if not self._has_checkpoint() and self.progress_path.exists():
            raise UsageError(f"cannot resume: {error}, and there is no checkpoint")
        if self.progress_path.exists():
            self.log(f"WARNING: {printable(error)}; going by the checkpoints", "yellow")
        return {"status": "running", "epoch": 0}

    def write_status(self, status, error=None):
        """Write status.json: running, finished, interrupted or failed."""
        state = {"status": status, "epoch": self.epoch, "epochs": self.epochs, "error": error}
        path = self.output_dir / "status.json"
        try:
            write_json(path, state)
        except OSError:  # without room for a new file, write over the old one
            if not path.exists():
                raise
            with open(path, "r+") as f:
                f.write(json.dumps(state))
                f.truncate()

    def close(self, clear=False):
        """The end of the run: `finished`, or `interrupted` if epochs are left.

        Args:
            clear: delete the checkpoints of a finished run: a replay buffer is large.

        Returns:
            whether the run is finished.
        """
        done = self.epoch >= self.epochs
        if proc_id() == 0:
            if self.finished:
                self.log(f"{self.output_dir} is finished: {self.epoch} epochs", "green")
            else:
                self.write_status("finished" if done else "interrupted")
            if done and clear:
                shutil.rmtree(self.checkpointer.directory, ignore_errors=True)
        self.close_lock()
        return done

    # Terminal and tables ------------------------------------------------------------------------

    def log(self, message, color=None):
        """Print a line, on rank 0."""
        if proc_id() == 0:
            tty = sys.stdout.isatty()
            try:
                tqdm.write(colorize(message, color) if color and tty else message, file=sys.stdout)
                sys.stdout.flush()
            except OSError:  # the reader or the terminal is gone; the run goes on unseen
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    def epochs_left(self):
        """Iterate over the numbers of the epochs that are left; a request to stop ends it early."""
        while self.epoch < self.epochs and not self.stopping:
            yield self.epoch

    def progress(self, steps):
        """Iterate over `range(steps)`, with a bar on rank 0 where there is a terminal."""
        hide = proc_id() != 0 or not sys.stderr.isatty()
        name = f"epoch {self.epoch} of {self.epochs}"
        return tqdm(range(steps), name, disable=hide, leave=False, unit="step")

    def log_tabular(self, key, value):
        """Set one column of this epoch's row. Every epoch sets the same columns."""
        if self.headers and key not in self.headers:
            raise KeyError(f"column {key} was not in the first row")
        if key in self.row:
            raise KeyError(f"column {key} is set already in this row")
        self.row[key] = value.item() if isinstance(value, np.generic) else value

    def dump_tabular(self):
        """End this epoch's row: print it, add it to progress.txt and to the TensorBoard events."""
        self.headers = self.headers or list(self.row)
        missing = [key for key in self.headers if key not in self.row]
        if missing:
            raise KeyError(f"columns {missing} were not set")
        if proc_id() == 0:
            self.log(_table(self.row))
            if self.progress_file is None:
                self.progress_file = open(self.progress_path, "a")  # noqa: SIM115
                if self.progress_file.tell() == 0:
                    self.progress_file.write("\t".join(self.headers) + "\n")
            values = [self.row[key] for key in self.headers]
            self.progress_file.write("\t".join(map(str, values)) + "\n")
            self.progress_file.flush()
            self._write_events()
        self.epoch += 1
        self.row = {}

    def time(self):
        """Seconds that the run has taken, those before it was resumed included."""
        return self.elapsed + time.time() - self.start_time

    def _write_events(self):
        """The row as TensorBoard scalars, over environment steps."""
        step = int(self.row.get("TotalEnvInteracts", self.epoch))
        scalars = {_tag(k): v for k, v in self.row.items() if isinstance(v, int | float)}
        if self._last_charted:
            old_step, old_time = self._last_charted
            scalars["charts/SPS"] = (step - old_step) / max(self.time() - old_time, 1e-9)
        self._last_charted = step, self.time()
        if self.events is None:
            self._open_events()
        values = [Summary.Value(tag=tag, simple_value=v) for tag, v in scalars.items()]
        self._add_event(Event(step=step, summary=Summary(value=values)))

    def _open_events(self, first_step=None):
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}"
        self.events = RecordWriter(open(self.output_dir / name, "ab"))  # noqa: SIM115
        self._add_event(Event(file_version="brain.Event:2"))
        if first_step is not None:  # what an earlier process wrote from this step on is void
            start = SessionLog(status=SessionLog.START)
            self._add_event(Event(step=first_step, session_log=start))

    def _add_event(self, event):
        event.wall_time = time.time()
        self.events.write(event.SerializeToString())
        self.events.flush()

    # Saving and resuming ------------------------------------------------------------------------

    def save_due(self):
        """Whether a checkpoint is due: every `save_freq` epochs, at the last, and before a stop."""
        self.stopping = stop_requested()
        return self.stopping or self.epoch % self.save_freq == 0 or self.epoch == self.epochs

    def save_state(self, policy, state, buffer=None):
        """Save the policy for NumPy, and all that an exact continuation needs.

        Args:
            policy: dict for policy.npz: all that it takes to act with NumPy alone. `weights` is a
                list of layers (W [in, out], b [out]); the rest arrays, numbers and strings.
            state: this rank's tree for `Checkpointer.save`.
            buffer: the replay buffer, likewise.

        Raises:
            FloatingPointError: on all ranks, if the state holds a NaN or an infinity on any.
        """
        check_finite(f"epoch {self.epoch - 1}", parameter=state)
        if proc_id() == 0:
            os.fsync(
                self.progress_file.fileno()
            )  # a checkpoint never knows more rows than there are
            policy = {**policy, "epoch": self.epoch}
            for i, (W, b) in enumerate(policy.pop("weights")):
                policy |= {f"weight_{i}": W, f"bias_{i}": b}
            write_atomically(self.output_dir / "policy.npz", lambda f: np.savez(f, **policy))
        state = {"script": state, "headers": self.headers, "time": self.time()}
        self.checkpointer.save(self.epoch, state, buffer)
        if proc_id() == 0:
            self.write_status("running")

    def load_state(self, buffer=None):
        """Go back to the newest checkpoint, if the run is resumed and has one.

        Args:
            buffer: the replay buffer, which is filled again.

        Returns:
            the state that `save_state` was given; None for a run that starts.

        Raises:
            CheckpointError: all checkpoints are damaged, or progress.txt is shorter than they say.
        """
        if not self.resume:
            return None
        epoch, saved = self.checkpointer.load(buffer)
        error = broadcast(self._cut_progress(epoch) if proc_id() == 0 else None)
        if error:
            raise CheckpointError(error)
        self.epoch = epoch
        if saved is None:
            self.log("Nothing to resume: starting from the beginning", "yellow")
            return None
        self.headers, self.elapsed = saved["headers"], saved["time"]
        self.log(f"Resuming after epoch {epoch}", "yellow")
        return saved["script"]

    def _cut_progress(self, epoch):
        """Drop the rows that no checkpoint covers: they will be computed again."""
        if not self.progress_path.exists():
            return f"{self.progress_path} is missing" if epoch else None
        kept, step = [], 0
        try:
            lines = self.progress_path.read_bytes().splitlines(keepends=True)
            whole = [line for line in lines if line.endswith(b"\n")]
            if len(whole) < epoch + 1:
                return f"{self.progress_path} has fewer rows than the checkpoint of epoch {epoch}"
            if epoch:
                kept = whole[: epoch + 1]
                header, *rows = (line.decode().rstrip("\n").split("\t") for line in kept)
                table = [dict(zip(header, map(float, row), strict=True)) for row in rows]
                step = int(table[-1].get("TotalEnvInteracts", epoch)) + 1
        except (OSError, ValueError, OverflowError) as e:
            return f"{self.progress_path} is damaged: {printable(e)}"
        write_atomically(self.progress_path, lambda f: f.writelines(kept))
        if kept or any(self.output_dir.glob("events.out.tfevents.*")):
            self._open_events(step)
        return None


class EpochLogger(Logger):
    """A logger that gathers numbers through an epoch and logs their statistics over all ranks."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.stored = {}
        self._no_episode_told = False

    def store(self, **values):
        """Add numbers to this epoch's lists, one by key."""
        for key, value in values.items():
            self.stored.setdefault(key, []).append(value)

    def log_tabular(self, key, value=None, with_min_and_max=False, average_only=False):
        """Set a column to a value, or columns to the statistics of what was stored under `key`.

        Args:
            value: the value; if None, statistics are logged: `Average<key>` and `Std<key>`, with
                `with_min_and_max` also `Max<key>` and `Min<key>`, with `average_only` just the
                mean, under `key` itself. NaN where no rank stored anything.

        Raises:
            FloatingPointError: on all ranks, if a loss or a return is NaN or infinite on any.
        """
        if value is not None:
            super().log_tabular(key, value)
            return
        if "Loss" in key or "EpRet" in key:
            check_finite(f"epoch {self.epoch}", **{key: self.stacked(key)})
        if key == "EpRet":
            self._explain_no_episode()
        mean, std, low, high = self.get_stats(key)
        super().log_tabular(key if average_only else f"Average{key}", mean)
        if not average_only:
            super().log_tabular(f"Std{key}", std)
        if with_min_and_max:
            super().log_tabular(f"Max{key}", high)
            super().log_tabular(f"Min{key}", low)
        self.stored[key] = []

    def _explain_no_episode(self):
        """Say so, once, if no episode ended on any rank in this epoch."""
        if mpi_sum(len(self.stored.get("EpRet", []))) == 0 and not self._no_episode_told:
            self._no_episode_told = True
            text = (
                f"WARNING: no episode ended in epoch {self.epoch}, so EpRet is nan; CutEpRet is "
                "the return of the episodes that the end of the epoch cut. Raise "
                "--steps-per-epoch, which the ranks share, lower --max-ep-len, or use fewer ranks"
            )
            self.log(text, "yellow")

    def get_stats(self, key):
        """(mean, std, min, max) over all ranks of what was stored under `key` in this epoch."""
        return mpi_statistics_scalar(self.stacked(key), with_min_and_max=True)

    def stacked(self, key):
        """This rank's numbers under `key` in this epoch, an array [N]."""
        values = [np.ravel(v) for v in self.stored.get(key, [])]
        return np.concatenate(values) if values else np.zeros(0)


def _tag(column):
    """TensorBoard's name of a column: charts/, losses/ or eval/ and the name."""
    if column in TAGS:
        return TAGS[column]
    if "Test" in column:
        return f"eval/{column}"
    if column.startswith(("Loss", "DeltaLoss", "KL", "Entropy", "ClipFrac", "StopIter", "Alpha")):
        return f"losses/{column}"
    return f"charts/{column}"


def _table(row):
    """A row as two aligned columns in a frame."""
    cells = {k: f"{v:.4g}" if isinstance(v, float) else str(v) for k, v in row.items()}
    left, right = (max(map(len, column)) for column in (cells, cells.values()))
    rule = "-" * (left + right + 7)
    lines = [f"| {k:>{left}} | {v:>{right}} |" for k, v in cells.items()]
    return "\n".join([rule, *lines, rule])


def _versions():
    """Versions of what the numbers of a run depend on."""
    names = ["torch", "tensorflow", "gymnasium", "mujoco", "numpy", "mpi4py"]
    versions = {"python": platform.python_version()}
    for name in names:
        if name in sys.modules:
            versions[name] = importlib.metadata.version(name)
    if "mpi4py.MPI" in sys.modules:
        library = sys.modules["mpi4py.MPI"].Get_library_version()
        versions["MPI"] = " ".join(library.split("\n")[0].split())[:60]
    versions["cpu"] = cpu.cpu_name()
    if cpu.mkl:
        versions["mkl"] = cpu.mkl
    return versions


def _git_commit():
    """The commit of the project's checkout, with a + if files were changed; None outside git."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        run = {"capture_output": True, "text": True, "timeout": 5, "check": True}
        commit = subprocess.run([*git, "rev-parse", "HEAD"], **run).stdout.strip()
        status = [*git, "status", "--porcelain", "--untracked-files=no"]
        return commit + ("+" if subprocess.run(status, **run).stdout else "")
    except (OSError, subprocess.SubprocessError):
        return None
