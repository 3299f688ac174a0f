"""The record of a run: its table on the terminal and in progress.txt, TensorBoard events, saves.

    logger = EpochLogger()
    for epoch in range(10):
        logger.store(EpRet=3.5)
        logger.log_tabular("Epoch", epoch)
        logger.log_tabular("EpRet", with_min_and_max=True)
        logger.dump_tabular()

`EpochLogger` has the methods and file formats of Spinning Up's, so tools made for Spinning Up can
read them. All methods are called by all ranks together; rank 0 writes.
"""

import contextlib
import os
import re
import shutil
import socket
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path

import numpy as np
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter
from tqdm import tqdm

from common import UsageError, run_dir
from common.checkpoint import Checkpointer
from common.mpi_tools import check_finite, mpi_op, mpi_statistics_scalar, on_rank_0, proc_id
from common.run_dir import setup_logger_kwargs
from common.serialization import convert_json, write_atomically, write_json

COLORS = ["gray", "red", "green", "yellow", "blue", "magenta", "cyan"]
TAGS = {"AverageEpRet": "charts/episodic_return", "EpLen": "charts/episodic_length"}
TAGS |= {"AverageTestEpRet": "eval/episodic_return", "TestEpLen": "eval/episodic_length"}
LOSSES = ("Loss", "DeltaLoss", "KL", "Entropy", "ClipFrac", "StopIter", "Alpha")

_open_logger = None  # the logger of the script's run, which `abandon` is about
stop_signal = None  # the signal that asked this process to stop


def start_run(args, script):
    """Open the run directory of a script's `Args` and write its config.json.

    Args:
        args: the script's `Args`.
        script: its `__file__`; the experiment is called `<script>_<env-id>` if `args` has no name.

    Returns:
        an EpochLogger.

    Raises:
        UsageError: see `EpochLogger` and `EpochLogger.save_config`.
    """
    global _open_logger
    exp_name = args.exp_name or re.sub(r"[^\w.-]", "_", f"{Path(script).stem}_{args.env_id}")
    kwargs = setup_logger_kwargs(exp_name, args.seed, args.data_dir, args.datestamp)
    if isinstance(args.resume, str):
        kwargs["output_dir"] = args.resume
    elif args.datestamp and args.resume:
        raise UsageError("--datestamp makes a new directory: give --resume the directory itself")
    logger = EpochLogger(**kwargs, resume=args.resume, overwrite=args.overwrite)
    try:
        logger.save_config(args, script)
    except UsageError:
        logger.close_lock()
        raise
    _open_logger = logger
    return logger


def abandon(status, error):
    """Write down how the open run ended, from any rank, and close it, if one is open."""
    if _open_logger is not None:
        # The disk may be what failed: then the way out must not fail too.
        with contextlib.suppress(Exception):
            _open_logger.write_status(status, error)
        _open_logger.close_lock()


def stop_requested():
    """Whether any rank was asked to stop; the same answer on all ranks."""
    return mpi_op(stop_signal is not None, "MAX") > 0


class EpochLogger:
    """The record of one run, with statistics over all ranks of what is gathered in an epoch.

    Args:
        output_dir: the run directory; made here. A new one under the system's directory for
            temporary files, `/tmp/experiments/<time>`, if None.
        exp_name: the experiment's name, for plots.
        resume: continue the run that the directory holds; start one if it holds none.
        overwrite: delete the run that the directory holds.

    Raises:
        UsageError: the directory cannot be written, holds a run and neither `resume` nor
            `overwrite` is set, or another process has it open. No run was changed then.
    """

    def __init__(self, output_dir=None, exp_name=None, resume=False, overwrite=False):
        if output_dir is None:
            now = f"{on_rank_0(datetime.now):%Y-%m-%d_%H-%M-%S-%f}"
            output_dir = Path(tempfile.gettempdir(), "experiments", now)
        self.output_dir = Path(output_dir)
        self.progress_path = self.output_dir / "progress.txt"
        self.exp_name, self.resume = exp_name, resume
        self.stored = {}  # numbers of this epoch, a list by key
        self.headers, self.row, self.last_row = [], {}, {}
        self.epoch = self.epochs = 0  # epochs done, epochs to do
        self.save_freq, self.snapshots = 1, False  # epochs between saves; whether to keep policies
        self.best = -np.inf  # return of the best snapshot
        self.stopping = False  # whether the run was asked to stop
        self.finished = False  # whether the run that is resumed has no epoch left to do
        self.start_time = time.time()  # less what the run had taken before this process
        self.charted = 0, self.start_time  # steps and time of the last row for TensorBoard
        self.config = self.events = self._lock = None
        on_rank_0(self._claim, resume, overwrite)
        self.checkpointer = Checkpointer(self.output_dir / "checkpoint")

    def _claim(self, resume, overwrite):
        self._lock = run_dir.claim(self.output_dir, resume, overwrite)

    def save_config(self, config, script=None):
        """Write config.json: the arguments, and the versions that the numbers depend on.

        For a run that is resumed, `load_state` writes it, when all is found to be in order.

        Args:
            config: the script's `Args`, or a dict.
            script: the script's path; that of the running program, if None.

        Raises:
            UsageError: the run that is resumed had other arguments, or another number of ranks.
        """
        args = convert_json(config)
        self.epochs, self.save_freq = args.get("epochs", 0), args.get("save_freq", 1)
        self.snapshots = args.get("snapshots", False)
        self.config = config = run_dir.describe(args, self.exp_name, script or sys.argv[0])
        if not self.resume:
            self._write_config()
        else:
            fixed = {*args, "script", "ranks"} - run_dir.FREE_TO_CHANGE
            if args.get("anneal_lr"):  # the learning rate depends on how many epochs there are
                fixed |= {"epochs"}
            found = on_rank_0(run_dir.check_resume, self.output_dir, config, fixed)
            self.epoch, self.finished, warnings = found
            for text in warnings:
                self.log(f"WARNING: {text}", "yellow")

    def _write_config(self):
        if proc_id() == 0 and self.config:
            write_json(self.output_dir / "config.json", self.config)
            self.write_status("running")
            self.log(f"Logging to {self.output_dir}", "green")

    def write_status(self, status, error=None):
        """Write status.json: running, finished, interrupted or failed."""
        run_dir.write_status(self.output_dir, status, self.epoch, self.epochs, error)

    def close(self, clear=False):
        """End the run: mark it as finished, or as interrupted if epochs are left.

        Args:
            clear: delete the checkpoints of a run that this process finished: a replay buffer is
                large. A resume that found no epoch left to do deletes nothing.

        Returns:
            whether the run is finished.
        """
        done = self.epoch >= self.epochs
        if proc_id() == 0:
            if self.finished:
                self.log(f"{self.output_dir} is finished: {self.epoch} epochs", "green")
            else:
                self.write_status("finished" if done else "interrupted")
            if done and clear and self.last_row:
                shutil.rmtree(self.checkpointer.directory, ignore_errors=True)
        self.close_lock()
        return done

    def close_lock(self):
        """Close all files and let other processes have the directory."""
        global _open_logger
        _open_logger = None if _open_logger is self else _open_logger
        for file in (self.events, self._lock):
            if file:
                file.close()

    # Terminal and tables ------------------------------------------------------------------------

    def log(self, message, color=None):
        """Print a line, on rank 0."""
        if proc_id() == 0:
            if color and sys.stdout.isatty():
                message = f"\x1b[{30 + COLORS.index(color)}m{message}\x1b[0m"
            try:
                tqdm.write(message, file=sys.stdout)
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
        name = f"epoch {self.epoch}" + (f" of {self.epochs}" if self.epochs else "")
        return tqdm(range(steps), name, disable=hide, leave=False, unit="step")

    def store(self, **values):
        """Add numbers or arrays of numbers to this epoch's lists, one by key."""
        for key, value in values.items():
            self.stored.setdefault(key, []).append(value)

    def stacked(self, key):
        """This rank's numbers under `key` in this epoch, an array [N]."""
        return np.concatenate([np.zeros(0), *map(np.ravel, self.stored.get(key, []))])

    def get_stats(self, key):
        """(mean, std) over all ranks of what was stored under `key` in this epoch."""
        return mpi_statistics_scalar(self.stacked(key))

    def log_tabular(self, key, val=None, with_min_and_max=False, average_only=False):
        """Set a column to a value, or columns to the statistics of what was stored under `key`.

        Args:
            val: the value; if None, statistics are logged: `Average<key>` and `Std<key>`, with
                `with_min_and_max` also `Max<key>` and `Min<key>`, with `average_only` just the
                mean, under `key` itself. NaN where no rank stored anything.

        Raises:
            FloatingPointError: on all ranks, if a loss or a return is NaN or infinite on any.
        """
        if val is not None:
            self.row[key] = val.item() if isinstance(val, np.generic) else val
            return
        numbers = self.stacked(key)
        if "Loss" in key or "EpRet" in key:
            check_finite(f"epoch {self.epoch}", **{key: numbers})
        mean, std, low, high = mpi_statistics_scalar(numbers, with_min_and_max=True)
        if key == "EpRet" and np.isnan(mean) and not np.isnan(self.last_row.get("AverageEpRet", 0)):
            text = "so EpRet is nan, and CutEpRet is the return of what the end of the epoch cut"
            advice = "raise --steps-per-epoch, lower --max-ep-len, or use fewer ranks"
            text = f"WARNING: no episode ended in epoch {self.epoch}, {text}: {advice}"
            self.log(text, "yellow")
        self.row[key if average_only else f"Average{key}"] = mean
        if not average_only:
            self.row[f"Std{key}"] = std
        if with_min_and_max:
            self.row |= {f"Max{key}": high, f"Min{key}": low}
        self.stored[key] = []

    def dump_tabular(self):
        """End this epoch's row: print it, add it to progress.txt and to the TensorBoard events."""
        self.headers = self.headers or list(self.row)
        if odd := set(self.headers) ^ set(self.row):
            raise KeyError(f"columns {sorted(odd)} are not in every row")
        if proc_id() == 0:
            self.log(_table(self.row))
            with open(self.progress_path, "a") as f:
                if f.tell() == 0:
                    f.write("\t".join(self.headers) + "\n")
                f.write("\t".join(str(self.row[key]) for key in self.headers) + "\n")
                f.flush()
                os.fsync(f.fileno())  # a checkpoint never knows more rows than there are
            self._write_events()
        self.epoch += 1
        self.row, self.last_row = {}, self.row

    def time(self):
        """Seconds that the run has taken, those before it was resumed included."""
        return time.time() - self.start_time

    def _write_events(self):
        """The row as TensorBoard scalars, over environment steps."""
        (old_step, old_time), now = self.charted, time.time()
        step = int(self.row.get("TotalEnvInteracts", self.epoch))
        scalars = {_tag(k): v for k, v in self.row.items() if isinstance(v, int | float)}
        scalars["charts/SPS"] = (step - old_step) / max(now - old_time, 1e-9)
        self.charted = step, now
        values = [Summary.Value(tag=tag, simple_value=v) for tag, v in scalars.items()]
        self._add_event(step=step, summary=Summary(value=values))

    def _add_event(self, **event):
        if self.events is None:
            name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}"
            self.events = RecordWriter(open(self.output_dir / name, "ab"))  # noqa: SIM115
            self._add_event(file_version="brain.Event:2")
        self.events.write(Event(wall_time=time.time(), **event).SerializeToString())
        self.events.flush()

    # Saving and resuming ------------------------------------------------------------------------

    def save_due(self):
        """Whether a checkpoint is due: every `save_freq` epochs, at the last, and before a stop."""
        self.stopping = stop_requested()
        return self.stopping or self._regular_save()

    def _regular_save(self):
        return self.epoch % self.save_freq == 0 or self.epoch == self.epochs

    def save_state(self, policy, state=None, buffer=None, judged=None):
        """Save the policy for NumPy, and all that an exact continuation needs.

        Args:
            policy: dict for policy.npz, of arrays, numbers and strings; a state_dict, say. A list
                `weights` of layers (W [in, out], b [out]) is stored as weight_0, bias_0, weight_1,
                and so on.
            state: this rank's tree for `Checkpointer.save`; if None, no checkpoint is written.
            buffer: the replay buffer, likewise.
            judged: the policy that earned the return of the epoch, as `policy`, if that is not
                `policy` but the one before the epoch's update: policy_best.npz is one of those.

        Raises:
            FloatingPointError: on all ranks, if the state holds a NaN or an infinity on any.
        """
        check_finite(f"epoch {self.epoch - 1}", parameter=state)
        if proc_id() == 0:
            policy = {**policy, "epoch": self.epoch}
            judged = {**judged, "epoch": self.epoch - 1} if judged else policy
            self._save_policies(policy, judged)
        if state is not None:
            saved = {"script": state, "headers": self.headers, "time": self.time()}
            self.checkpointer.save(self.epoch, {**saved, "best": self.best}, buffer)
        # The ranks wait for it: one that fails right after this has the last word in status.json.
        on_rank_0(self.write_status, "running")

    def _save_policies(self, policy, judged):
        """Write policy.npz; its snapshots too, at the saves that an undisturbed run makes."""
        files = {"policy.npz": policy}
        if self.snapshots and self._regular_save():
            files[f"policy_{self.epoch}.npz"] = policy
            returns = self.last_row.get("AverageTestEpRet", self.last_row.get("AverageEpRet", 0))
            if returns > self.best:
                self.best = returns
                files["policy_best.npz"] = judged
        for name, policy in files.items():
            arrays = {key: value for key, value in policy.items() if key != "weights"}
            for i, (W, b) in enumerate(policy.get("weights", [])):
                arrays |= {f"weight_{i}": W, f"bias_{i}": b}
            write = lambda f, arrays=arrays: np.savez(f, allow_pickle=False, **arrays)  # noqa: E731
            write_atomically(self.output_dir / name, write)

    def load_state(self, buffer=None):
        """Go back to the newest checkpoint, if the run is resumed and has one.

        Args:
            buffer: the replay buffer, which is filled again.

        Returns:
            the state that `save_state` was given; None for a run that starts.

        Raises:
            UsageError: all checkpoints are damaged, or progress.txt is shorter than they say.
        """
        if not self.resume:
            return None
        try:
            epoch, saved = self.checkpointer.load(buffer)
            step = on_rank_0(run_dir.cut_progress, self.progress_path, epoch)
        except UsageError:  # the directory stays as it is, status.json too
            self.close_lock()
            raise
        self.epoch, self.charted = epoch, (step, time.time())
        self._write_config()
        if proc_id() == 0:  # what an earlier process wrote for TensorBoard from here on is void
            self._add_event(step=step + 1, session_log=SessionLog(status=SessionLog.START))
        if saved is None:
            self.log("Nothing to resume: starting from the beginning", "yellow")
            return None
        self.headers, self.best = saved["headers"], saved["best"]
        self.start_time -= saved["time"]
        self.log(f"Resuming after epoch {epoch}", "yellow")
        return saved["script"]


def _tag(column):
    """TensorBoard's name of a column: charts/, losses/ or eval/ and the name."""
    group = "losses" if column.startswith(LOSSES) else "charts"
    return TAGS.get(column, f"{'eval' if 'Test' in column else group}/{column}")


def _table(row):
    """A row as two aligned columns in a frame."""
    cells = {k: f"{v:.4g}" if isinstance(v, float) else str(v) for k, v in row.items()}
    lines = [f"| {k:>20} | {v:>12} |" for k, v in cells.items()]
    return "\n".join(["-" * 39, *lines, "-" * 39])
