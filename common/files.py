"""What a run leaves on disk: the lock on its directory, config.json, status.json and checkpoints.

Configurations, policies and checkpoints are written whole or not at all. Readers execute nothing,
and raise OSError where a file is missing and ValueError where it is damaged.

    checkpoint/
        epoch_000020_rank_0.npz   the state after 20 epochs: parameters, optimizers, replay buffer
        epoch_000010_rank_0.npz   the one before it, in case the newest is damaged
"""

import contextlib
import dataclasses
import fcntl
import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import zipfile
from collections import Counter
from datetime import datetime
from pathlib import Path

import numpy as np

from common import UsageError, mpi

# What a run leaves in its directory; --overwrite deletes these and nothing else.
RUN_FILES = ["config.json", "progress.txt", "status.json", "policy*.npz", "events.out.tfevents.*"]
RUN_FILES += ["torch_save", "tf1_save", "checkpoint"]
HALF_WRITTEN = [".*.tmp", "torch_save/.*.tmp", "checkpoint/.*.tmp"]  # by a process that was killed
STATUSES = ("running", "finished", "interrupted", "failed")
# Flags that may change when a run is resumed: they do not affect its numbers.
FREE_TO_CHANGE = {"epochs", "save_freq", "snapshots", "data_dir", "resume", "overwrite"}
FREE_TO_CHANGE |= {"datestamp", "num_cpu"}
KEEP = 2  # checkpoints kept
MAX_NAME = 200  # bytes of an experiment's name; a date and a seed are added to it

versions = {}  # more for config.json's `versions`

# Files ------------------------------------------------------------------------------------------


def convert_json(obj):
    """Turn an object into what `json.dumps(..., allow_nan=False)` accepts.

    Numbers, strings, None, lists and dicts stay (keys become strings; tuples as keys are left out);
    NumPy scalars and arrays become numbers and lists; NaN and infinities become None, since JSON
    has neither; dataclasses become dicts, functions and classes their names, and any other object
    its string.
    """

    def plain(x):
        if isinstance(x, np.generic | np.ndarray):
            return x.tolist()
        if isinstance(x, set | frozenset):
            return list(x)
        if dataclasses.is_dataclass(x) and not isinstance(x, type):
            return vars(x)
        return getattr(x, "__name__", None) or str(x)

    text = json.dumps(obj, default=plain, skipkeys=True)
    return json.loads(text, parse_constant=lambda name: None)


def write_atomically(path, write):
    """Create or replace a file such that a reader, or a crash, finds the old or the new one.

    Args:
        path: the file.
        write: called with a binary file open for writing.
    """
    path = Path(path)
    # Ranks that fail together may write one file at once: each has a temporary name of its own.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as f:
            write(f)
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path, obj):
    """Write `convert_json(obj)` to a file, atomically."""
    text = json.dumps(convert_json(obj), indent=2, allow_nan=False)
    write_atomically(path, lambda f: f.write(text.encode() + b"\n"))


def write_npz(path, arrays):
    """Write {name: array} to an .npz file, atomically; names may hold slashes."""
    write_atomically(path, lambda f: np.savez(f, allow_pickle=False, **arrays))


def read_json(path):
    """The dict in a JSON file. A ValueError names the file."""
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
        if not isinstance(value, dict):
            raise ValueError("it holds no object")
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} is missing") from None
    except (PermissionError, ValueError, RecursionError) as e:
        raise ValueError(f"{path} is damaged: {e}") from e
    return value


def read_npz(path):
    """The arrays of an .npz file, {name: array}: no pickles, and checksums that are right."""
    try:
        with zipfile.ZipFile(path) as archive:
            if damaged := archive.testzip():
                raise ValueError(f"{damaged} does not match its checksum")
        with np.load(path, allow_pickle=False) as arrays:
            # NumPy gives bytes for a member that is no array; bytes[...] raises TypeError.
            return {name: x[...] for name, x in arrays.items()}
    except OSError:
        raise
    except Exception as e:  # zipfile and NumPy raise many kinds of them
        raise ValueError(printable(e) or type(e).__name__) from e


def printable(text, length=300):
    """Any object as text for one line of a terminal: without control characters, cut if long."""
    text = " ".join(str(text).split())
    text = "".join(c if c.isprintable() else "\ufffd" for c in text)
    return text if len(text) <= length else f"{text[: length - 3]}..."


# The run directory ------------------------------------------------------------------------------


def setup_logger_kwargs(exp_name, seed=None, data_dir="data", datestamp=False):
    """Arguments of an `EpochLogger` whose directory follows Spinning Up's convention.

    Returns:
        dict(output_dir, exp_name), where output_dir is `<data_dir>/<exp_name>`, and below it
        `<exp_name>_s<seed>` if a seed is given; with a datestamp,
        `<data_dir>/YYYY-MM-DD_<exp_name>/YYYY-MM-DD_HH-MM-SS-<exp_name>_s<seed>`.

    Raises:
        UsageError: the name cannot be that of a directory.
    """
    plain = exp_name not in ("", ".", "..") and "/" not in exp_name and exp_name.isprintable()
    if not plain or len(exp_name.encode()) > MAX_NAME:
        text = f"--exp-name must be a plain name of at most {MAX_NAME} bytes"
        raise UsageError(f"{text}, not {printable(ascii(exp_name))}")
    # A sweep sets the time, since it has to know the directories of its runs.
    now = os.environ.get("SWEEP_DATESTAMP") or f"{datetime.now():%Y-%m-%d_%H-%M-%S}"
    now = mpi.broadcast(now)
    # ~ is a home here: bash leaves it as it is in --data-dir=~/runs.
    path = Path(os.path.expanduser(data_dir))
    path /= f"{now[:10]}_{exp_name}" if datestamp else exp_name
    if seed is not None:
        path /= f"{now}-{exp_name}_s{seed}" if datestamp else f"{exp_name}_s{seed}"
    return {"output_dir": str(path), "exp_name": exp_name}


def find(directory, patterns):
    """Paths in a directory that match any of some patterns."""
    return [path for pattern in patterns for path in Path(directory).glob(pattern)]


def claim(directory, resume, overwrite):
    """Make a run directory and lock it for this process; on rank 0.

    Returns:
        the open lock file. The kernel drops the lock when it is closed or its holder dies.

    Raises:
        UsageError: it cannot be written, holds a run and neither `resume` nor `overwrite` is set,
            or another process has it open. Nothing was changed then.
    """
    if resume and overwrite:
        raise UsageError("--resume and --overwrite exclude each other")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = open(directory / ".lock", "a+b")  # noqa: SIM115 - held while we run
    except (OSError, ValueError) as e:
        reason = getattr(e, "strerror", None) or e
        raise UsageError(f"cannot write to {printable(directory)}: {reason}") from e
    error = None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if find(directory, RUN_FILES) and not (resume or overwrite):
            error = f"{directory} holds a run: --resume continues it, --overwrite replaces it"
    except BlockingIOError:
        lock.seek(0)
        error = f"{directory} is in use by {printable(lock.read(200).decode('utf-8', 'replace'))}"
    except OSError as e:
        error = f"cannot lock {directory}: {e.strerror}"
    if error:
        lock.close()
        raise UsageError(error)
    lock.truncate(0)
    lock.write(f"process {os.getpid()} on {socket.gethostname()}\n".encode())
    lock.flush()
    for path in find(directory, HALF_WRITTEN + (RUN_FILES if overwrite else [])):
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    return lock


def describe(args, exp_name, script):
    """config.json's content: arguments `args`, and what else the numbers of a run depend on.

    Called by all ranks together.
    """
    config = {**args, "exp_name": exp_name, "script": Path(script).name, "ranks": mpi.num_procs()}
    found = {"python": platform.python_version(), "cpu": cpu_name()}
    found["threads"] = mpi.threads_per_rank()  # rounding depends on it
    for name in ("torch", "tensorflow", "gymnasium", "mujoco", "numpy", "mpi4py"):
        if name in sys.modules:
            found[name] = str(sys.modules[name].__version__)
    if library := sys.modules.get("mpi4py.MPI"):
        found["MPI"] = " ".join(library.Get_library_version().split("\n")[0].split())[:60]
    config |= {"versions": found | versions, "git_commit": None, "host": socket.gethostname()}
    # The commit of the project's checkout, with a + if files were changed; None outside git.
    git = ["git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        options = {"cwd": Path(__file__).parent, "stderr": subprocess.DEVNULL, "text": True}
        config["git_commit"] = subprocess.check_output(git, **options).strip()
    config["command"] = sys.argv
    return config | {"start_time": datetime.now().astimezone().isoformat(timespec="seconds")}


def cpuinfo():
    """Fields of the first CPU in /proc/cpuinfo; none where there is no such file."""
    with contextlib.suppress(OSError):
        text = Path("/proc/cpuinfo").read_text()
        return dict(re.findall(r"^(.+?)\s*: (.+)$", text.split("\n\n")[0], re.M))
    return {}


def cpu_name():
    """Maker, model and generation, such as "AuthenticAMD AMD EPYC (family 26, model 2)".

    "unknown" outside of Linux on x86.
    """
    name = "{vendor_id} {model name} (family {cpu family}, model {model})"
    with contextlib.suppress(KeyError):
        return name.format_map(cpuinfo())
    return "unknown"


def read_status(directory):
    """status.json of a run: a dict with `status` and `epoch`."""
    path = Path(directory, "status.json")
    status = read_json(path)
    if status.get("status") not in STATUSES or type(status.get("epoch")) is not int:
        raise ValueError(f"{path} is damaged: it has no status or no epoch")
    return status


def write_status(directory, status, epoch, epochs, error=None):
    """Write status.json: running, finished, interrupted or failed, after `epoch` of `epochs`."""
    path = Path(directory, "status.json")
    state = {"status": status, "epoch": epoch, "epochs": epochs, "error": error}
    try:
        write_json(path, state)
    except OSError:  # without room for a new file, write over the old one
        path.write_text(json.dumps(state))


# Resuming ---------------------------------------------------------------------------------------


def check_resume(directory, config, fixed):
    """Compare what a run left with the config that is to continue it; on rank 0.

    Args:
        fixed: keys whose values must not have changed.

    Returns:
        (epoch, finished, warnings): epochs done; whether none is left to do; lines for the user.

    Raises:
        UsageError: the run cannot be continued with this config, or its files are damaged.
    """
    ranks = saved_epochs(directory / "checkpoint")
    saved = [epoch for epoch, n in ranks.items() if n >= mpi.num_procs()]
    old, status, warnings = config, {"status": "running", "epoch": 0}, []
    try:
        if (directory / "config.json").exists() or saved:  # else it was stopped before it wrote one
            old = read_json(directory / "config.json")
            changed = sorted(key for key in fixed if old.get(key) != config[key])
            text = [f"{key} was {old.get(key)}, is {config[key]}" for key in changed]
            if "ranks" in changed:
                text.append(f"start it with mpirun -np {old['ranks']}")
            if changed:
                raise ValueError(", ".join(text))
            for name, now in sorted(config["versions"].items()):
                if now != (was := old["versions"].get(name)):
                    warnings.append(f"resuming with {name} {now}; the run began with {was}")
        try:
            status = read_status(directory)
        except (OSError, ValueError) as e:
            # A checkpoint says how far the run is. Without one, the run may be finished: then its
            # table must not be started anew.
            if saved:
                warnings.append(f"{e}; going by the checkpoints")
            elif (directory / "progress.txt").exists():
                raise ValueError(f"{e}, and there is no checkpoint") from e
        epoch, epochs = max([status["epoch"], *saved]), config.get("epochs", 0)
        finished = status["status"] == "finished" and epoch == epochs
        if 0 < epochs < epoch:
            raise ValueError(f"{epoch} epochs are done, --epochs is {epochs}")
        # Networks and policy are written at each save, just before the checkpoint. A run that
        # failed in its first save has no checkpoint yet, and starts anew: its status has an error.
        first = status.get("error") and epoch <= old.get("save_freq", 1)
        gone = not (saved or first) and find(directory, ["policy.npz", "torch_save", "tf1_save"])
        if epoch and not finished and gone:
            text = f"{epoch} epochs are done, and their checkpoints are gone"
            raise ValueError(f"{text}; --overwrite starts anew")
    except (OSError, ValueError, AttributeError, KeyError, TypeError) as e:  # a damaged file
        raise UsageError(f"cannot resume {directory}: {printable(e)}") from e
    return epoch, finished, [printable(text) for text in warnings]


def read_rows(path, epoch):
    """The header of progress.txt and its rows of the first `epoch` epochs, a list of bytes.

    Raises:
        UsageError: the file is damaged, or has fewer rows.
    """
    try:
        lines = path.read_bytes().splitlines(keepends=True)[: epoch + 1] if epoch else []
        rows = [line.decode().split("\t") for line in lines if line.endswith(b"\n")]
        if epoch and (len(rows) <= epoch or len({len(row) for row in rows}) > 1):
            raise ValueError(f"it does not have the rows of {epoch} epochs")
    except (OSError, ValueError) as e:
        raise UsageError(f"{path} is damaged: {printable(e)}") from e
    return lines


def saved_epochs(directory):
    """How many ranks have left a checkpoint: {epoch: ranks}. A killed save has those of some."""
    names = (path.name for path in directory.glob("epoch_*_rank_*.npz"))
    epochs = [name.split("_")[1] for name in names]
    return Counter(int(epoch) for epoch in epochs if epoch.isdigit())


def checkpoint_path(directory, epoch):
    """The file of this rank's state after `epoch` epochs."""
    return directory / f"epoch_{epoch:06d}_rank_{mpi.proc_id()}.npz"


def save_checkpoint(directory, epoch, arrays):
    """Save the state after `epoch` epochs; called by all ranks together.

    Args:
        directory: a Path, made if it does not exist.
        arrays: this rank's state, {name: array}.

    Raises:
        OSError: the disk is full, say; the checkpoints before this one are intact.
    """
    directory.mkdir(parents=True, exist_ok=True)
    path = checkpoint_path(directory, epoch)
    write_npz(path, {**arrays, "epoch": epoch})
    mpi.barrier()  # older ones are needed until all ranks have theirs
    saved = sorted(directory.glob(f"epoch_*_rank_{mpi.proc_id()}.npz"))
    kept = [old for old in saved if old <= path][-KEEP:]  # later ones are damaged
    for old in set(saved) - set(kept):
        old.unlink()


def load_checkpoint(directory):
    """The newest checkpoint that is intact on all ranks; called by all ranks together.

    Returns:
        (epoch, arrays): the number of finished epochs and this rank's state; (0, None) if no epoch
        was ever saved on all ranks.

    Raises:
        UsageError: there are checkpoints, and all are damaged.
    """
    ranks = mpi.on_rank_0(saved_epochs, directory)
    for epoch in sorted(ranks, reverse=True):
        error = None
        try:
            arrays = read_npz(checkpoint_path(directory, epoch))
            if (found := int(arrays["epoch"])) != epoch:
                raise ValueError(f"it is of epoch {found}")
        except (OSError, ValueError, LookupError) as e:
            error = printable(f"{type(e).__name__}: {e}")
        errors = [e for e in mpi.allgather(error) if e]
        if not errors:
            return epoch, arrays
        if mpi.proc_id() == 0:
            name = f"checkpoint epoch_{epoch:06d}"
            print(f"WARNING: {name} is damaged ({errors[0]})", file=sys.stderr)
    if max(ranks.values(), default=0) >= mpi.num_procs():  # else the first save was killed
        raise UsageError(f"no usable checkpoint in {directory}")
    return 0, None
