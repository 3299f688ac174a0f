"""What a run leaves on disk: its directory and the lock on it, JSON, and the checkpoint.

Configurations, policies and checkpoints are written whole or not at all, and hold no pickles.
"""

import contextlib
import fcntl
import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import numpy as np
from pydantic_core import to_json

from common import UsageError, cpu, mpi

CHECKPOINT, PREVIOUS = "checkpoint.npz", "checkpoint_previous.npz"
SAVED = ["progress.txt", "policy*.npz", "torch_save", "tf1_save", "checkpoint*"]
# What a run leaves in its directory; --overwrite deletes these and nothing else.
RUN_FILES = ["config.json", "status.json", "events.out.tfevents.*", *SAVED]
# What may change in config.json when a run is resumed: it does not affect the numbers or, like
# versions, affects only their rounding, which causes a warning.
FREE_TO_CHANGE = {"epochs", "save_freq", "snapshots", "data_dir", "resume", "overwrite"}
FREE_TO_CHANGE |= {"datestamp", "num_cpu", "versions", "git_commit", "host", "start_time"}

# Files ------------------------------------------------------------------------------------------


def convert_json(obj):
    """Turn an object into what `json.dumps(..., allow_nan=False)` accepts.

    Numbers, strings, None, lists and dicts stay (keys become strings); NumPy scalars and arrays
    become numbers and lists; NaN and infinities become None, since JSON has neither; dataclasses
    become dicts, functions and classes their names, and any other object its string, without its
    address in memory.
    """

    def plain(x):
        text = re.sub(r" at 0x\w+", "", str(x))  # the address differs between processes
        return getattr(x, "__name__", None) or (x.tolist() if hasattr(x, "tolist") else text)

    return json.loads(to_json(obj, fallback=plain, inf_nan_mode="null", bytes_mode="hex"))


def write_atomically(path, write, keep=None):
    """Create or replace a file such that a reader, or a crash, finds the old or the new one.

    Args:
        path: the file.
        write: called with a binary file open for writing.
        keep: where to move the file that is replaced; None to delete it.
    """
    path = Path(path)
    # Ranks that fail together may write one file at once, so each uses its own temporary name.
    temporary = path.with_name(f".{path.name}.{mpi.proc_id()}.tmp")
    try:
        with open(temporary, "wb") as f:
            write(f)
            f.flush()
            os.fsync(f.fileno())
        if keep and path.exists():
            os.replace(path, keep)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path, obj):
    """Write `convert_json(obj)` to a file, atomically."""
    text = json.dumps(convert_json(obj), indent=2)
    write_atomically(path, lambda f: f.write(text.encode() + b"\n"))


def write_npz(path, arrays, keep=None):
    """Write {name: array} to an .npz file, atomically; names may hold slashes."""
    write_atomically(path, lambda f: np.savez(f, allow_pickle=False, **arrays), keep)


def read_checkpoint(directory):
    """What a run saved last.

    Returns:
        (about, arrays): a dict with the epoch, the config, the table and the like; the state and
        this rank's replay buffer, {name: array}. (None, {}) where nothing was ever saved.

    Raises:
        UsageError: the checkpoint is damaged, or it is missing and other saved files are there.
    """
    # A process that was killed between two renamings leaves only the checkpoint before the last.
    paths = [path for name in (CHECKPOINT, PREVIOUS) if (path := directory / name).exists()]
    if not paths:
        if find(directory, SAVED):
            text = f"{directory} holds a run without {CHECKPOINT}: it cannot be resumed"
            raise UsageError(f"{text}, --overwrite replaces it")
        return None, {}
    try:
        with np.load(paths[0], allow_pickle=False) as file:
            own = [f"buffer/{mpi.proc_id()}"]
            names = [x for x in file.files if x in own or not re.fullmatch(r"buffer/\d+", x)]
            # For a member that is not an array, NumPy returns bytes; bytes[...] raises TypeError.
            arrays = {name: file[name][...] for name in names}
        return json.loads(str(arrays.pop("about"))), arrays
    except Exception as e:  # zipfile and NumPy raise many kinds of them
        text = f"{paths[0]} is damaged ({type(e).__name__}: {e})"
        if paths[1:]:
            text += f"; delete it, and --resume goes on from {PREVIOUS}"
        raise UsageError(text) from e


# The run directory ------------------------------------------------------------------------------


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
    made = []
    try:
        made = [path for path in (directory, *directory.parents) if not path.exists()]
        directory.mkdir(parents=True, exist_ok=True)
        lock = open(directory / ".lock", "w")  # noqa: SIM115 - held while we run
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        print("The run that is at work here has locked this file.", file=lock, flush=True)
    except BlockingIOError as e:
        raise UsageError(f"{directory} is in use by another process") from e
    except (OSError, ValueError) as e:
        # The disk may be full: leave nothing behind but what another run has made meanwhile.
        removals = [(directory / ".lock").unlink, *(path.rmdir for path in made)]
        for remove in removals if made else []:
            with contextlib.suppress(OSError, ValueError):
                remove()
        raise UsageError(f"cannot write to {directory}: {e}") from e
    if find(directory, RUN_FILES) and not (resume or overwrite):
        lock.close()
        raise UsageError(f"{directory} holds a run: --resume continues it, --overwrite replaces it")
    for path in find(directory, RUN_FILES if overwrite else []):
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    return lock


def describe(args, exp_name, script):
    """config.json's content: arguments `args`, and what else the numbers of a run depend on.

    Called by all ranks together.
    """
    config = {**args, "exp_name": exp_name, "script": Path(script).name, "ranks": mpi.num_procs()}
    versions = {"python": platform.python_version(), "cpu": cpu.name()}
    versions["threads"] = mpi.threads_per_rank()  # rounding depends on it, and on MKL
    if cpu.mkl:
        versions["mkl"] = cpu.mkl
    for name in ("torch", "tensorflow", "gymnasium", "mujoco", "numpy", "mpi4py"):
        if name in sys.modules:
            versions[name] = str(sys.modules[name].__version__)
    if library := sys.modules.get("mpi4py.MPI"):
        versions["MPI"] = " ".join(library.Get_library_version().split("\n")[0].split())[:60]
    config |= {"versions": versions, "git_commit": None, "host": socket.gethostname()}
    # The commit of the project's checkout, with a + if files were changed; None outside git.
    git = ["git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        options = {"cwd": Path(__file__).parent, "stderr": subprocess.DEVNULL, "text": True}
        config["git_commit"] = subprocess.check_output(git, **options).strip()
    return config | {"start_time": datetime.now().astimezone().isoformat(timespec="seconds")}
