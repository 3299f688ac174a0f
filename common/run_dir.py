"""A run's directory: who may write there, config.json, status.json, and what a resumed run finds.

Functions that read or write are called on rank 0.
"""

import contextlib
import fcntl
import importlib.metadata
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import numpy as np

from common import UsageError, cpu
from common.mpi_tools import broadcast, num_procs
from common.serialization import check_inside, printable, read_json, write_atomically, write_json

# What a run leaves in its directory; --overwrite deletes these and nothing else.
RUN_DIRS = ["torch_save", "tf1_save", "checkpoint"]
RUN_FILES = ["config.json", "progress.txt", "status.json", "policy*.npz", "events.out.tfevents.*"]
HALF_WRITTEN = [".*.tmp", "torch_save/.*.tmp"]  # by a process that was killed
MAX_NAME = 200  # bytes of an experiment's name; a date and a seed are added to it
STATUSES = ("running", "finished", "interrupted", "failed")
# Flags that may change when a run is resumed: they do not affect its numbers.
FREE_TO_CHANGE = {"epochs", "save_freq", "snapshots", "data_dir", "resume", "overwrite"}
FREE_TO_CHANGE |= {"datestamp", "num_cpu"}


def setup_logger_kwargs(exp_name, seed=None, data_dir="data", datestamp=False):
    """Arguments of an `EpochLogger` whose directory follows Spinning Up's convention.

    Returns:
        dict(output_dir, exp_name), where output_dir is `<data_dir>/<exp_name>`, and below it
        `<exp_name>_s<seed>` if a seed is given; with a datestamp,
        `<data_dir>/YYYY-MM-DD_<exp_name>/YYYY-MM-DD_HH-MM-SS-<exp_name>_s<seed>`.

    Raises:
        UsageError: the name cannot be that of a directory, or a link leads out of `data_dir`.
    """
    plain = exp_name not in ("", ".", "..") and "/" not in exp_name and exp_name.isprintable()
    if not plain or len(exp_name.encode()) > MAX_NAME:
        text = f"--exp-name must be a plain name of at most {MAX_NAME} bytes"
        raise UsageError(f"{text}, not {printable(ascii(exp_name))}")
    # A sweep sets the time, since it has to know the directories of its runs.
    now = os.environ.get("SWEEP_DATESTAMP") or f"{datetime.now():%Y-%m-%d_%H-%M-%S}"
    now = broadcast(now)
    path = Path(data_dir, f"{now[:10]}_{exp_name}" if datestamp else exp_name)
    if seed is not None:
        path /= f"{now}-{exp_name}_s{seed}" if datestamp else f"{exp_name}_s{seed}"
    check_inside(data_dir, path)
    return {"output_dir": str(path), "exp_name": exp_name}


def find(directory, patterns):
    """Paths in a directory that match any of some patterns."""
    return [path for pattern in patterns for path in directory.glob(pattern)]


def claim(directory, resume, overwrite):
    """Make a run directory and lock it for this process.

    Returns:
        the open lock file. The kernel drops the lock when it is closed or its holder dies.

    Raises:
        UsageError: see `EpochLogger`. Nothing was changed then.
    """
    if resume and overwrite:
        raise UsageError("--resume and --overwrite exclude each other")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for path in find(directory, [*RUN_FILES, *RUN_DIRS, ".lock", "checkpoint/journal"]):
            if path.is_symlink():  # what is written there would land elsewhere
                raise ValueError(f"{path.name} is a symbolic link")
        lock = open(directory / ".lock", "a+b")  # noqa: SIM115 - held while we run
    except (OSError, ValueError) as e:
        reason = getattr(e, "strerror", None) or e
        raise UsageError(f"cannot write to {printable(directory)}: {reason}") from e
    error = None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if find(directory, RUN_FILES + RUN_DIRS) and not (resume or overwrite):
            error = f"{directory} holds a run: --resume continues it, --overwrite replaces it"
    except OSError:
        lock.seek(0)
        error = f"{directory} is in use by {printable(lock.read(200).decode('utf-8', 'replace'))}"
    if error:
        lock.close()
        raise UsageError(error)
    lock.truncate(0)
    lock.write(f"process {os.getpid()} on {socket.gethostname()}\n".encode())
    lock.flush()
    for path in find(directory, HALF_WRITTEN + (RUN_FILES + RUN_DIRS if overwrite else [])):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return lock


def describe(args, exp_name, script):
    """config.json's content: arguments `args`, and what else the numbers of a run depend on."""
    config = {**args, "exp_name": exp_name, "script": Path(script).name, "ranks": num_procs()}
    config |= {"versions": _versions(), "git_commit": _git_commit()}
    config |= {"host": socket.gethostname(), "command": sys.argv}
    return config | {"start_time": datetime.now().astimezone().isoformat(timespec="seconds")}


def _versions():
    """Versions of what the numbers of a run depend on."""
    versions = {"python": platform.python_version(), "cpu": cpu.cpu_name()}
    for name in ("torch", "tensorflow", "gymnasium", "mujoco", "numpy", "mpi4py"):
        if name in sys.modules:
            versions[name] = importlib.metadata.version(name)
    if mpi := sys.modules.get("mpi4py.MPI"):
        versions["MPI"] = " ".join(mpi.Get_library_version().split("\n")[0].split())[:60]
    return versions | ({"mkl": cpu.mkl} if cpu.mkl else {})


def _git_commit():
    """The commit of the project's checkout, with a + if files were changed; None outside git."""
    words = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--abbrev=40"]
    words += ["--exclude=*", "--dirty=+"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()


def check_resume(directory, config, fixed):
    """Compare a run's config.json and status.json with the config that is to continue it.

    Args:
        fixed: keys whose values must not have changed.

    Returns:
        (epoch, finished, warnings): epochs done; whether none is left to do; lines for the user.

    Raises:
        UsageError: the run cannot be continued with this config, or its files are damaged.
    """
    saved = [p.name[6:] for p in find(directory, ["checkpoint/epoch_*"])]
    has_checkpoint, epochs = bool(saved), config.get("epochs", 0)
    started = has_checkpoint or (directory / "progress.txt").exists()
    old, status, warnings = config, {"status": "running", "epoch": 0}, []
    try:
        old = read_json(directory / "config.json")
        if not isinstance(old.get("versions"), dict):
            raise ValueError(f"{directory / 'config.json'} is damaged: it has no versions")
    except (OSError, ValueError) as e:
        if started or isinstance(e, ValueError):  # else the run was stopped before it wrote one
            raise UsageError(f"cannot resume: {printable(e)}") from e
    changed = sorted(key for key in fixed if old.get(key) != config.get(key))
    if changed:
        text = [f"{k} was {printable(old.get(k))}, is {config.get(k)}" for k in changed]
        if "ranks" in changed:
            text.append(f"start it with mpirun -np {printable(old.get('ranks'))}")
        raise UsageError(f"cannot resume {directory}: {', '.join(text)}")
    try:
        status = read_status(directory)
    except (OSError, ValueError) as e:
        # A checkpoint says how far the run is. Without one, the run may be finished: then its
        # table must not be started anew.
        if started and not has_checkpoint:
            raise UsageError(f"cannot resume: {printable(e)}, and there is no checkpoint") from e
        warnings += [f"{printable(e)}; going by the checkpoints"] if started else []
    done = max([status["epoch"], *(int(epoch) for epoch in saved if epoch.isdecimal())])
    if 0 < epochs < done:
        raise UsageError(f"cannot resume {directory}: {done} epochs are done, --epochs is {epochs}")
    finished = status["status"] == "finished" and epochs <= status["epoch"]
    if status["status"] == "finished" and not finished and not has_checkpoint:
        text = "it is finished, and its checkpoints, replay buffer and all, are deleted"
        raise UsageError(f"cannot extend {directory}: {text}")
    # policy.npz is written at each save, just before the checkpoint.
    was_saved = status["epoch"] > 0 and (directory / "policy.npz").exists()
    if was_saved and not finished and not (directory / "checkpoint").exists():
        text = f"{done} epochs are done, and checkpoint/ is gone; --overwrite starts anew"
        raise UsageError(f"cannot resume {directory}: {text}")
    for name, now in sorted(config["versions"].items()):
        if now != (was := old["versions"].get(name)):
            warnings.append(f"resuming with {name} {now}; the run began with {printable(was)}")
    return status["epoch"], finished, warnings


def read_status(directory):
    """status.json of a run. Raises FileNotFoundError, or ValueError if it is damaged."""
    path = directory / "status.json"
    status = read_json(path)
    if status.get("status") not in STATUSES or type(status.get("epoch")) is not int:
        raise ValueError(f"{path} is damaged: it has no status or no epoch")
    return status


def write_status(directory, status, epoch, epochs, error=None):
    """Write status.json: running, finished, interrupted or failed, after `epoch` of `epochs`."""
    state = {"status": status, "epoch": epoch, "epochs": epochs, "error": error}
    try:
        write_json(directory / "status.json", state)
    except OSError:  # without room for a new file, write over the old one
        (directory / "status.json").write_text(json.dumps(state))


def cut_progress(path, epoch):
    """Drop the rows of progress.txt that no checkpoint covers: they will be computed again.

    Nothing is written if the file is refused.

    Returns:
        TotalEnvInteracts of the last row that is kept; 0 if none is.

    Raises:
        UsageError: the file is damaged, or has fewer than `epoch` rows.
    """
    if epoch == 0:
        path.unlink(missing_ok=True)
        return 0
    try:
        lines = path.read_bytes().splitlines(keepends=True)[: epoch + 1]
        rows = [x.decode()[:-1].split("\t") for x in lines if x.endswith(b"\n")]
        if len(rows) != epoch + 1 or len({len(row) for row in rows}) > 1:
            raise ValueError(f"it does not have the rows of {epoch} epochs")
        header, table = rows[0], np.array(rows[1:], dtype=float)
        step = int(dict(zip(header, table[-1], strict=True)).get("TotalEnvInteracts", epoch))
    except (OSError, ValueError, LookupError, OverflowError) as e:
        raise UsageError(f"{path} is damaged: {printable(e)}") from e
    write_atomically(path, lambda f: f.writelines(lines))
    return step
