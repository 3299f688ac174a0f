"""The record of a run: its table on the terminal and in progress.txt, TensorBoard events, saves.

    logger = EpochLogger()
    for epoch in range(10):
        logger.store(EpRet=3.5)
        logger.log_tabular("Epoch", epoch)
        logger.log_tabular("EpRet", with_min_and_max=True)
        logger.dump_tabular()

`EpochLogger` has the methods of Spinning Up's, and tools made for Spinning Up can read progress.txt
and config.json. All methods are called by all ranks together. Rank 0 writes, but for checkpoints:
each rank has its own.
"""

import contextlib
import os
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

from common import files, mpi

COLORS = ["gray", "red", "green", "yellow", "blue", "magenta", "cyan"]
TAGS = {"AverageEpRet": "charts/episodic_return", "EpLen": "charts/episodic_length"}
TAGS |= {"AverageTestEpRet": "eval/episodic_return", "TestEpLen": "eval/episodic_length"}
LOSSES = ("Loss", "DeltaLoss", "KL", "Entropy", "ClipFrac", "StopIter", "Alpha")


class EpochLogger:
    """The record of one run, with statistics over all ranks of what is gathered in an epoch.

    Args:
        output_dir: the run directory; made here. A new one under the system's directory for
            temporary files, `/tmp/experiments/<time>`, if None.
        exp_name: the experiment's name, for plots.
        resume: continue the run that the directory holds; start one if it holds none.
        overwrite: delete the run that the directory holds.

    Attributes:
        output_dir: the run directory, a Path.
        epoch: number of rows in the table.

    Raises:
        UsageError: the directory cannot be written, holds a run and neither `resume` nor
            `overwrite` is set, or another process has it open. No run was changed then.
    """

    def __init__(self, output_dir=None, exp_name=None, resume=False, overwrite=False):
        if output_dir is None:
            now = f"{mpi.on_rank_0(datetime.now):%Y-%m-%d_%H-%M-%S-%f}"
            output_dir = Path(tempfile.gettempdir(), "experiments", now)
        self.output_dir = Path(output_dir)
        self.output_path = self.output_dir / "progress.txt"
        self.exp_name, self.resume, self.looked = exp_name, resume, not resume
        self.stored = {}  # numbers of this epoch, a list by key
        self.headers, self.row, self.last_row = [], {}, {}
        self.epoch = self.epochs = 0  # rows of the table, epochs of the run
        self.save_freq, self.snapshots = 1, False  # epochs between saves; whether to keep policies
        self.best = -np.inf  # return of the best snapshot
        self.start_time = time.time()  # less what the run had taken before this process
        self.charted = 0, self.start_time  # steps and time of the last row for TensorBoard
        self.saved = None  # the state that a resumed run goes on from
        self.save_model = lambda: None  # see setup_pytorch_saver
        self.events = self.lock = None
        self.closed = self.finished = False
        mpi.on_rank_0(self._claim, resume, overwrite)
        self.checkpoints = self.output_dir / "checkpoint"

    def _claim(self, resume, overwrite):
        self.lock = files.claim(self.output_dir, resume, overwrite)

    def save_config(self, config, script=None):
        """Write config.json: the arguments, and the versions that the numbers depend on.

        A run that is resumed is looked at first, its checkpoint and its table included.

        Args:
            config: the script's `Args`, or a dict.
            script: the script's path; that of the running program, if None.

        Raises:
            UsageError: the run cannot be resumed: it had other arguments or another number of
                ranks, it is damaged, or more epochs are done than `config` asks for. Nothing was
                changed then.
        """
        args = files.convert_json(config)
        self.epochs, self.save_freq = args.get("epochs", 0), args.get("save_freq", 1)
        self.snapshots = args.get("snapshots", False)
        config = files.describe(args, self.exp_name, script or sys.argv[0])
        fixed = {*args, "script", "ranks"} - files.FREE_TO_CHANGE
        if args.get("anneal_lr"):  # the learning rate depends on how many epochs there are
            fixed |= {"epochs"}
        self.looked = True
        if self.resume:
            self._look_at_run(config, fixed)
        if self.finished:
            self.log(f"{self.output_dir} is finished: {self.epoch} epochs", "green")
        elif mpi.proc_id() == 0:
            files.write_json(self.output_dir / "config.json", config)
            self.write_status("running")
            self.log(f"Logging to {self.output_dir}", "green")

    def _look_at_run(self, config, fixed):
        """Find out where a resumed run goes on, or that it is finished."""
        found = mpi.on_rank_0(files.check_resume, self.output_dir, config, fixed)
        self.epoch, self.finished, warnings = found
        if self.finished:
            return
        self.epoch, self.saved = files.load_checkpoint(self.checkpoints)
        lines = mpi.on_rank_0(files.read_rows, self.output_path, self.epoch)
        step = int(self.saved["logger/step"]) if self.saved else 0
        for text in warnings:
            self.log(f"WARNING: {text}", "yellow")
        if mpi.proc_id() == 0:
            # What an earlier process wrote from here on will be written again.
            if lines:
                files.write_atomically(self.output_path, lambda f: f.writelines(lines))
            else:
                self.output_path.unlink(missing_ok=True)
            self._add_event(step=step + 1, session_log=SessionLog(status=SessionLog.START))
        self.charted = step, time.time()

    def write_status(self, status, error=None):
        """Write status.json: running, finished, interrupted or failed."""
        files.write_status(self.output_dir, status, self.epoch, self.epochs, error)

    def close(self, clear=False):
        """End the run: mark it as finished, or as interrupted if epochs are left.

        Args:
            clear: delete the checkpoints of a run that this process finished: a replay buffer is
                large. A resume that found no epoch left to do deletes nothing.

        Returns:
            whether the run is finished.
        """
        done = self.epoch >= self.epochs
        mpi.barrier()  # until all ranks have saved, and tidied up their checkpoints
        if mpi.proc_id() == 0 and not self.finished:
            self.write_status("finished" if done else "interrupted")
            if done and clear and self.last_row:
                shutil.rmtree(self.checkpoints, ignore_errors=True)
        self.release()
        return done

    def release(self):
        """Close all files and let other processes have the directory."""
        self.closed = True
        for file in filter(None, (self.events, self.lock)):
            with contextlib.suppress(OSError):  # a full disk
                file.close()

    # Terminal and tables ------------------------------------------------------------------------

    def log(self, message, color=None):
        """Print a line, on rank 0."""
        if mpi.proc_id() == 0:
            if color and sys.stdout.isatty():
                message = f"\x1b[{30 + COLORS.index(color)}m{message}\x1b[0m"
            try:
                tqdm.write(message, file=sys.stdout)
                sys.stdout.flush()
            except OSError:  # the reader or the terminal is gone; the run goes on unseen
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    def progress(self, steps):
        """Iterate over `range(steps)`, with a bar on rank 0 where there is a terminal."""
        hide = mpi.proc_id() != 0 or not sys.stderr.isatty()
        name = f"epoch {self.epoch}" + (f" of {self.epochs}" if self.epochs else "")
        return tqdm(range(steps), name, disable=hide, leave=False, unit="step")

    def store(self, **values):
        """Add numbers or arrays of numbers to this epoch's lists, one by key."""
        for key, value in values.items():
            self.stored.setdefault(key, []).append(value)

    def stacked(self, key):
        """This rank's numbers under `key` in this epoch, an array [N]."""
        arrays = (x.cpu() if hasattr(x, "cpu") else x for x in self.stored.get(key, []))
        return np.concatenate([np.zeros(0), *map(np.ravel, arrays)])

    def get_stats(self, key):
        """(mean, std) over all ranks of what was stored under `key` in this epoch."""
        return mpi.statistics(self.stacked(key))

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
            mpi.check_finite(f"epoch {self.epoch}", **{key: numbers})
        mean, std, low, high = mpi.statistics(numbers, with_min_and_max=True)
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
        if mpi.proc_id() == 0:
            self.log(_table(self.row))
            with open(self.output_path, "a") as f:
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

    def setup_pytorch_saver(self, module):
        """Have `save_state` write a module's state_dict to torch_save/model.pt."""
        from common.mpi_pytorch import save_model

        self.save_model = lambda: save_model(module, self.output_dir)

    def setup_tf_saver(self, sess, inputs, outputs):
        """Have `save_state` write a SavedModel to tf1_save/; dicts of tensors by name."""
        from common.mpi_tf1 import save_model

        self.save_model = lambda: save_model(sess, inputs, outputs, self.output_dir)

    def save_due(self):
        """Whether an undisturbed run saves now: every `save_freq` epochs, and after the last."""
        return self.epoch % self.save_freq == 0 or self.epoch == self.epochs

    def save_state(self, state, policy=None, judged=None, buffer=None):
        """Save the networks, the policy for NumPy, and all that an exact continuation needs.

        Args:
            state: what a resumed run has to restore: {name: object}, each with `state_dict()`, a
                flat dict of this rank's arrays, and `load_state_dict(arrays)`.
            policy: dict for policy.npz, of arrays, numbers and strings. A list `weights` of layers
                (W [in, out], b [out]) is stored as weight_0, bias_0, weight_1, and so on.
            judged: the policy that earned the return of the last row, as `policy`, if that is not
                `policy` but the one before the epoch's update: policy_best.npz is one of those.
            buffer: the replay buffer, if there is one: `data` [size, width], whose row i % size has
                the i-th transition, and `count`, the transitions ever stored.

        Raises:
            FloatingPointError: on all ranks, if the state holds a NaN or an infinity on any.
        """
        parts = {name: part.state_dict() for name, part in state.items()}
        arrays = {f"{name}/{key}": x for name, part in parts.items() for key, x in part.items()}
        mpi.check_finite(f"epoch {self.epoch - 1}", parameter=arrays)
        if mpi.proc_id() == 0:
            self.save_model()
            if policy is not None:
                self._save_policies(policy, judged)
        about = {"headers": self.headers, "time": self.time(), "best": self.best}
        about["step"] = self.charted[0]
        arrays |= {f"logger/{key}": value for key, value in about.items()}
        if buffer is not None:
            arrays |= {"buffer/data": buffer.data[: buffer.count], "buffer/count": buffer.count}
        files.save_checkpoint(self.checkpoints, self.epoch, arrays)
        # The ranks wait for it: one that fails right after this has the last word in status.json.
        mpi.on_rank_0(self.write_status, "running")

    def _save_policies(self, policy, judged):
        """Write policy.npz; its snapshots too, at the saves that an undisturbed run makes."""
        policy = {**policy, "epoch": self.epoch}
        named = {"policy.npz": policy}
        if self.snapshots and self.save_due():
            named[f"policy_{self.epoch}.npz"] = policy
            keys = ("AverageTestEpRet", "AverageEpRet")
            test_ret, ret = (self.last_row.get(key, np.nan) for key in keys)
            ret = ret if np.isnan(test_ret) else test_ret
            if ret > self.best:
                self.best = ret
                named["policy_best.npz"] = {**judged, "epoch": self.epoch - 1} if judged else policy
        for name, arrays in named.items():
            for i, (W, b) in enumerate(arrays.get("weights", [])):
                arrays |= {f"weight_{i}": W, f"bias_{i}": b}
            flat = {key: x for key, x in arrays.items() if key != "weights"}
            files.write_npz(self.output_dir / name, flat)

    def load_state(self, state, buffer=None):
        """Go back to the checkpoint of a run that is resumed; nothing happens in a new run.

        Args:
            state, buffer: as in `save_state`; both are changed in place.

        Returns:
            the number of epochs done, from which the run goes on; all of them if it is finished.

        Raises:
            RuntimeError: the run is resumed, and `save_config` has not looked at it.
        """
        if not self.looked:
            raise RuntimeError("save_config comes before load_state")
        if self.saved is not None:
            for name, part in state.items():
                own = {k: x for k, x in self.saved.items() if k.startswith(f"{name}/")}
                part.load_state_dict({k.removeprefix(f"{name}/"): x for k, x in own.items()})
            self.headers = self.saved["logger/headers"].tolist()
            self.best = float(self.saved["logger/best"])
            self.start_time -= float(self.saved["logger/time"])
            if buffer is not None:
                rows, buffer.count = self.saved["buffer/data"], int(self.saved["buffer/count"])
                buffer.data[: len(rows)] = rows
            self.saved = None
            self.log(f"Resuming after epoch {self.epoch}", "yellow")
        return self.epoch


def _tag(column):
    """TensorBoard's name of a column: charts/, losses/ or eval/ and the name."""
    group = "losses" if column.startswith(LOSSES) else "charts"
    return TAGS.get(column, f"{'eval' if 'Test' in column else group}/{column}")


def _table(row):
    """A row as two aligned columns in a frame."""
    cells = {k: f"{v:.4g}" if isinstance(v, float) else str(v) for k, v in row.items()}
    lines = [f"| {k:>20} | {v:>12} |" for k, v in cells.items()]
    return "\n".join(["-" * 39, *lines, "-" * 39])
