"""The record of a run: its table on the terminal and in progress.txt, TensorBoard events, saves.

    logger = EpochLogger("my_run")
    for epoch in range(10):
        logger.store(EpRet=3.5)
        logger.log_tabular("Epoch", epoch)
        logger.log_tabular("EpRet", with_min_and_max=True)
        logger.dump_tabular()

`EpochLogger` has the methods of Spinning Up's, and tools made for Spinning Up can read progress.txt
and config.json. All methods are called by all ranks together, and rank 0 writes.
"""

import contextlib
import functools
import json
import os
import socket
import sys
import threading
import time
import zlib
from datetime import datetime
from pathlib import Path

import numpy as np
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter
from tqdm import tqdm

from common import UsageError, files, mpi

TAGS = {"AverageEpRet": "charts/episodic_return", "EpLen": "charts/episodic_length"}
TAGS |= {"AverageTestEpRet": "eval/episodic_return", "TestEpLen": "eval/episodic_length"}
LOSSES = ("Loss", "DeltaLoss", "KL", "Entropy", "ClipFrac", "StopIter", "Alpha")
tqdm.set_lock(threading.RLock())  # its own lock spans processes; killed ones would not free it


def setup_logger_kwargs(exp_name, seed=None, data_dir="data", datestamp=False):
    """Arguments of an `EpochLogger` whose directory follows Spinning Up's convention.

    Returns:
        dict(output_dir, exp_name), where output_dir is `<data_dir>/<exp_name>`, and below it
        `<exp_name>_s<seed>` if a seed is given; with a datestamp,
        `<data_dir>/YYYY-MM-DD_<exp_name>/YYYY-MM-DD_HH-MM-SS-<exp_name>_s<seed>`.

    Raises:
        UsageError: the name cannot be that of a directory.
    """
    if exp_name in ("", ".", "..") or "/" in exp_name:
        raise UsageError(f"--exp-name must be a plain name, not {exp_name!r}")
    # A sweep sets the time, since it has to know the directories of its runs.
    now = os.environ.get("SWEEP_DATESTAMP") or f"{datetime.now():%Y-%m-%d_%H-%M-%S}"
    now = mpi.broadcast(now)
    # bash does not expand ~ in --data-dir=~/runs.
    path = Path(os.path.expanduser(data_dir))
    path /= f"{now[:10]}_{exp_name}" if datestamp else exp_name
    if seed is not None:
        path /= f"{now}-{exp_name}_s{seed}" if datestamp else f"{exp_name}_s{seed}"
    return {"output_dir": str(path), "exp_name": exp_name}


class EpochLogger:
    """The record of one run, with statistics over all ranks of what is gathered in an epoch.

    Args:
        output_dir: the run directory; made here.
        exp_name: the experiment's name, for plots.
        resume: continue the run that the directory holds; start one if it holds none.
        overwrite: delete the run that the directory holds.

    Attributes:
        output_dir: the run directory, a Path.
        epoch: number of rows in the table.

    Raises:
        UsageError: on rank 0, if the directory cannot be written, holds a run and neither `resume`
            nor `overwrite` is set, or another process has it open. No run was changed then.
    """

    def __init__(self, output_dir, exp_name=None, resume=False, overwrite=False):
        self.output_dir = Path(output_dir)
        self.table_path, self.table = self.output_dir / "progress.txt", ""
        self.exp_name, self.resume, self.config = exp_name, resume, {}
        self.stored, self.row = {}, {}  # of this epoch: lists of numbers by key; columns
        self.epoch = self.epochs = 0  # rows of the table, epochs of the run
        self.start_time = time.time()  # minus what the run took before this process
        self.save_model = lambda: None  # see setup_pytorch_saver
        self.log_once = functools.cache(self.log)
        self.events = self.lock = None
        if mpi.proc_id() == 0:
            self.lock = files.claim(self.output_dir, resume, overwrite)

    # Terminal and tables ------------------------------------------------------------------------

    def log(self, message):
        """Print a line, on rank 0."""
        if mpi.proc_id() == 0:
            print(message, flush=True)

    def progress(self, steps):
        """Iterate over `range(steps)`, with a bar on rank 0 where there is a terminal."""
        hide = None if mpi.proc_id() == 0 else True  # None hides it where there is no terminal
        return tqdm(range(steps), f"epoch {self.epoch}", disable=hide, leave=False, unit="step")

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
            val: the value, rank 0's; if None, statistics are logged: `Average<key>` and `Std<key>`,
                with `with_min_and_max` also `Max<key>` and `Min<key>`, with `average_only` just the
                mean, under `key` itself. NaN where no rank stored anything.

        Raises:
            FloatingPointError: a loss or a return of this rank is NaN or infinite.
        """
        if val is not None:
            self.row[key] = val.item() if hasattr(val, "item") else val
            return
        numbers = self.stacked(key)
        if "Loss" in key or "EpRet" in key:
            self._check_finite(key, numbers)
        mean, std, low, high = mpi.statistics(numbers, with_min_and_max=True)
        if key == "EpRet" and np.isnan(mean):
            text = "so EpRet is nan, and CutEpRet is the return of what the end of the epoch cut"
            advice = "raise --steps-per-epoch, lower --max-ep-len, or use fewer ranks"
            self.log_once(f"WARNING: no episode ended in an epoch, {text}: {advice}")
        self.row[key if average_only else f"Average{key}"] = mean
        if not average_only:
            self.row[f"Std{key}"] = std
        if with_min_and_max:
            self.row |= {f"Max{key}": high, f"Min{key}": low}
        self.stored.pop(key, None)

    def dump_tabular(self):
        """End this epoch's row: print it, add it to progress.txt and to the TensorBoard events.

        Raises:
            KeyError: the row has other columns than those before it.
            UsageError: another process may be at work in the run directory.
        """
        header = self.table.partition("\n")[0].split("\t") if self.table else list(self.row)
        if odd := set(header) ^ set(self.row):
            raise KeyError(f"columns {sorted(odd)} are not in every row")
        for key in self.stored:
            self.log_once(f"WARNING: {key} was stored, and log_tabular({key!r}) was not called")
        if mpi.proc_id() == 0:
            self._write_status("running")
            text = "" if self.table else "\t".join(header) + "\n"
            text += "\t".join(str(self.row[key]) for key in header) + "\n"
            with open(self.table_path, "a" if self.table else "w") as f:
                f.write(text)
            self.table += text
            self.log(_frame(self.row))
            self._write_events()
        self.epoch += 1
        self.row, self.stored = {}, {}

    def time(self):
        """Seconds that the run has taken, those before it was resumed included."""
        return time.time() - self.start_time

    def _check_finite(self, name, *arrays):
        """A NaN or an infinity ends the run before it is saved."""
        if not all(np.isfinite(x).all() for x in arrays):
            where = f"on rank {mpi.proc_id()}, after {self.epoch} epochs"
            raise FloatingPointError(f"{name} is NaN or infinite {where}")

    def _write_events(self):
        """The row as TensorBoard scalars, over environment steps."""
        step = int(self.row.get("TotalEnvInteracts", self.epoch))
        scalars = {_tag(k): v for k, v in self.row.items() if isinstance(v, int | float)}
        scalars["charts/SPS"] = step / self.time()
        values = [Summary.Value(tag=tag, simple_value=v) for tag, v in scalars.items()]
        events = [Event(step=step, summary=Summary(value=values))]
        if self.events is None:
            name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}"
            self.events = RecordWriter(open(self.output_dir / name, "ab"))  # noqa: SIM115
            # This tells TensorBoard to drop what a killed process wrote from this step on.
            start = Event(step=step, session_log=SessionLog(status=SessionLog.START))
            events = [Event(file_version="brain.Event:2"), start, *events]
        for event in events:
            event.wall_time = time.time()
            self.events.write(event.SerializeToString())
        self.events.flush()

    # Saving and resuming ------------------------------------------------------------------------
    #
    # A resume reads one file, checkpoint.npz: the arguments, the table, the time, the state and the
    # replay buffers of all ranks. All other files are for people and their programs.

    def save_config(self, config, script=None):
        """Write config.json: the arguments, and the versions that the numbers depend on.

        For a resumed run, `load_state` writes it after comparing the arguments.

        Args:
            config: the script's `Args`, or a dict. `epochs`, `save_freq` and `snapshots` in it set
                how long the run is, the epochs between saves, and whether to keep policies.
            script: the script's path; that of the running program, if None.
        """
        args = files.convert_json(config)
        self.epochs = args.get("epochs", 0)
        self.config = files.describe(args, self.exp_name, script or sys.argv[0])
        if not self.resume:
            self._begin()

    def _begin(self):
        if mpi.proc_id() == 0:
            files.write_json(self.output_dir / "config.json", self.config)
            if self.table or self.table_path.exists():
                files.write_atomically(self.table_path, lambda f: f.write(self.table.encode()))
            self._write_status("running")
        self.log(f"Logging to {self.output_dir}")

    def load_state(self, state, buffer=None):
        """Go back to the checkpoint of a resumed run, or write the first one of a new run.

        Args:
            state, buffer: as in `save_state`; both are changed in place.

        Returns:
            the number of epochs done, from which the run goes on; all of them if it is finished.

        Raises:
            UsageError: the run cannot be resumed: it had other arguments or another number of
                ranks, it has done more epochs than `epochs`, or its checkpoint is damaged or of
                another program. No file was changed then.
        """
        about, arrays = files.read_checkpoint(self.output_dir) if self.resume else (None, {})
        if about:
            self._go_back(about, arrays, state, buffer)
        finished = about and 0 < self.epochs == self.epoch == about["config"].get("epochs")
        if self.resume and not finished:  # that one stays as it is
            mpi.reduce(0)  # every rank has found its part undamaged
            self._begin()
        if not about:
            self._write_checkpoint(self._arrays(state), buffer)
        return self.epoch

    def _go_back(self, about, arrays, state, buffer):
        """Take over what a checkpoint holds. UsageError if it is not one of this run."""
        epoch, count, old, now = about["epoch"], about["count"], about["config"], self.config
        may_change = files.FREE_TO_CHANGE - ({"epochs"} if now.get("anneal_lr") else set())
        keys = [k for k in sorted({*old, *now} - may_change) if old.get(k) != now.get(k)]
        wrong = [f"{k} was {old.get(k)}, is {now.get(k)}" for k in keys]
        if epoch > self.epochs > 0:
            wrong.append(f"{epoch} epochs are done, --epochs is {self.epochs}")
        own, own_rows = self._arrays(state), f"buffer/{mpi.proc_id()}"
        if buffer is not None and epoch != self.epochs:
            if count is None:
                wrong.append("it is finished, and its replay buffer is gone")
            own[own_rows] = buffer.data[:count]
        if not wrong:
            fits = lambda k: k in arrays and arrays[k].shape == np.shape(own[k])  # noqa: E731
            wrong = [f"its checkpoint has no {k} that fits" for k in own if not fits(k)]
        if wrong:
            raise UsageError(f"cannot resume {self.output_dir}: {', '.join(wrong)}")
        for key, version in now["versions"].items():
            if version != (was := old["versions"].get(key)):
                self.log(f"WARNING: resuming with {key} {version}; the run began with {was}")
        for name, part in state.items():
            part.load_state_dict({key: arrays[f"{name}/{key}"] for key in part.state_dict()})
        if own_rows in own:
            buffer.data[:count], buffer.count = arrays[own_rows], count
        self.epoch, self.table = epoch, about["table"]
        self.start_time -= about["time"]

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
        return self.epoch % self.config.get("save_freq", 1) == 0 or self.epoch == self.epochs

    def save_state(self, state, policy=None, buffer=None):
        """Save the networks, the policy for NumPy, and all that an exact continuation needs.

        Args:
            state: what a resumed run has to restore: {name: object}, each with `state_dict()`, a
                flat dict of arrays, and `load_state_dict(arrays)`. They are rank 0's: a warning
                names those that are not equal on all ranks.
            policy: dict for policy.npz, of arrays, numbers and strings. A list `weights` of layers
                (W [in, out], b [out]) is stored as weight_0, bias_0, weight_1, and so on.
            buffer: this rank's replay buffer, if there is one: `data` [size, width], whose row
                i % size has the i-th transition, and `count`, the transitions ever stored, equal
                on all ranks. It is left out after the last epoch, since it is large.

        Raises:
            FloatingPointError: the state of this rank holds a NaN or an infinity.
            ValueError: the ranks have stored different numbers of transitions.
            OSError: the disk is full, for example; the previous checkpoint is intact.
        """
        arrays = self._arrays(state)
        sums = [zlib.crc32(np.ascontiguousarray(x)) for x in arrays.values()]
        unequal = mpi.reduce(sums, "MIN") < mpi.reduce(sums, "MAX")
        if odd := [name for name, differs in zip(arrays, unequal, strict=True) if differs]:
            self.log_once(f"WARNING: the ranks have different {', '.join(odd)}")
        if mpi.proc_id() == 0:
            self.save_model()
            if policy is not None:
                policy = {**policy, "epoch": self.epoch}
                for i, (W, b) in enumerate(policy.pop("weights", [])):
                    policy |= {f"weight_{i}": W, f"bias_{i}": b}
                files.write_npz(self.output_dir / "policy.npz", policy)
                if self.config.get("snapshots") and self.save_due():
                    files.write_npz(self.output_dir / f"policy_{self.epoch}.npz", policy)
        self._write_checkpoint(arrays, buffer)

    def _arrays(self, state):
        """The arrays of a state by name. FloatingPointError if one holds a NaN or an infinity."""
        parts = {name: part.state_dict() for name, part in state.items()}
        arrays = {f"{name}/{key}": x for name, part in parts.items() for key, x in part.items()}
        self._check_finite("a parameter", *arrays.values())
        return arrays

    def _write_checkpoint(self, arrays, buffer):
        about = {"epoch": self.epoch, "config": self.config, "table": self.table}
        about |= {"time": self.time(), "count": None}
        last = 0 < self.epochs == self.epoch
        if buffer is not None and not last:
            about["count"] = buffer.count
            if mpi.reduce(buffer.count, "MIN") < mpi.reduce(buffer.count, "MAX"):
                raise ValueError("the ranks have stored different numbers of transitions")
            rows = mpi.gather(buffer.data[: buffer.count])
            arrays |= {f"buffer/{rank}": x for rank, x in enumerate(rows)}
        if mpi.proc_id() == 0:
            path, previous = self.output_dir / files.CHECKPOINT, self.output_dir / files.PREVIOUS
            arrays |= {"about": json.dumps(about)}
            files.write_npz(path, arrays, keep=None if last else previous)
            if last:
                previous.unlink(missing_ok=True)

    # The end ------------------------------------------------------------------------------------

    def close(self, status=None, error=None):
        """End the run, and let other processes have the directory.

        Args:
            status: for status.json; if None, "finished", or "interrupted" if epochs are left.
            error: why, if the run failed.

        Returns:
            whether the run is finished.
        """
        finished = self.epoch >= self.epochs
        status = status or ("finished" if finished else "interrupted")
        if mpi.proc_id() == 0 or error:
            self._write_status(status, error)
        self.release()
        if not error:
            then = " (to go on, --resume)"
            if finished:
                has_policy = (self.output_dir / "policy.npz").exists()
                then = " (to watch it, benchmark/test_policy.py)" if has_policy else ""
            self.log(f"{status.capitalize()} after {self.epoch} epochs: {self.output_dir}{then}")
        return finished

    def release(self):
        """Close all files and let other processes have the directory."""
        for file in filter(None, (self.events, self.lock)):
            with contextlib.suppress(OSError):  # a full disk
                file.close()

    def _write_status(self, status, error=None):
        """Write status.json, which tells people and sweeps how far the run is.

        Raises:
            UsageError: the file that was locked is not the one at its path any more.
        """
        path = self.output_dir / ".lock"
        if self.lock and not (path.exists() and os.path.samefile(path, self.lock.fileno())):
            raise UsageError(f"{path} was removed or replaced: another process may write this run")
        about = {"status": status, "epoch": self.epoch, "epochs": self.epochs, "error": error}
        files.write_json(self.output_dir / "status.json", about)


def _tag(column):
    """TensorBoard's name of a column: charts/, losses/ or eval/ and the name."""
    group = "losses" if column.startswith(LOSSES) else "charts"
    return TAGS.get(column, f"{'eval' if 'Test' in column else group}/{column}")


def _frame(row):
    """A row as two aligned columns in a frame."""
    cells = {k: f"{v:.4g}" if isinstance(v, float) else str(v) for k, v in row.items()}
    lines = [f"| {k:>20} | {v:>12} |" for k, v in cells.items()]
    return "\n".join(["-" * 39, *lines, "-" * 39])
