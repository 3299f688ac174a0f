"""A run's directory: who may write there, config.json, status.json, and what a resumed run finds.

Functions that read or write are called on rank 0.
"""

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

from common import UsageError, cpu
from common.mpi_tools import broadcast, num_procs
from common.serialization import check_inside, printable, read_json, write_atomically, write_json

# What a run leaves in its directory; --overwrite deletes these and nothing else.
RUN_DIRS = ["torch_save", "tf1_save", "checkpoint"]
RUN_FILES = ["config.json", "progress.txt", "status.json", "policy*.npz", "events.out.tfevents.*"]
MAX_NAME = 200  # bytes of an experiment's name; a date and a seed are added to it
STATUSES = ("running", "finished", "interrupted", "failed")
# Flags that may change when a run is resumed: they do not touch its numbers.
FREE_TO_CHANGE = {"epochs", "save_freq", "snapshots", "data_dir", "resume", "overwrite"}
FREE_TO_CHANGE |= {"datestamp", "num_cpu"}


def setup_logger_kwargs(exp_name, seed=None, data_dir="data", datestamp=False):
    """Arguments of a `Logger` whose directory follows Spinning Up's convention.

    Returns:
        dict(output_dir, exp_name), where output_dir is `<data_dir>/<exp_name>`, and below it
        `<exp_name>_s<seed>` if a seed is given; with a datestamp,
        `<data_dir>/YYYY-MM-DD_<exp_name>/YYYY-MM-DD_HH-MM-SS-<exp_name>_s<seed>`.

    Raises:
        UsageError: the name cannot be that of a directory, or a link leads out of `data_dir`.
    """
    if exp_name in ("", ".", "..") or exp_name != Path(exp_name).name or not exp_name.isprintable():
        raise UsageError(f"--exp-name must be a plain name, not {printable(ascii(exp_name))}")
    if len(exp_name.encode()) > MAX_NAME:
        raise UsageError(f"--exp-name must have at most {MAX_NAME} bytes: {printable(exp_name)}")
    # A sweep sets the time, since it has to know the directories of its runs.
    now = os.environ.get("SWEEP_DATESTAMP") or f"{datetime.now():%Y-%m-%d_%H-%M-%S}"
    now = broadcast(now)
    path = Path(data_dir, f"{now[:10]}_{exp_name}" if datestamp else exp_name)
    if seed is not None:
        path /= f"{now}-{exp_name}_s{seed}" if datestamp else f"{exp_name}_s{seed}"
    check_inside(data_dir, path)
    return {"output_dir": str(path), "exp_name": exp_name}


def claim(directory, resume, overwrite):
    """Make a run directory and lock it for this process.

    Returns:
        the open lock file. The kernel drops the lock when it is closed or its holder dies.

    Raises:
        UsageError: see `Logger`. Nothing was changed then.
    """
    if resume and overwrite:
        raise UsageError("--resume and --overwrite exclude each other")
    made = []
    try:
        made = [path for path in (directory, *directory.parents) if not path.exists()]
        directory.mkdir(parents=True, exist_ok=True)
        for pattern in (*RUN_FILES, *RUN_DIRS, ".lock", "checkpoint/journal"):
            for path in directory.glob(pattern):
                is_plain = path.is_dir() == ("." not in path.name) and not path.is_symlink()
                if not is_plain:  # what is written to a link would land elsewhere
                    raise ValueError(f"{path.name} is a symbolic link or of the wrong kind")
        lock = open(directory / ".lock", "a+b")  # noqa: SIM115 - held while we run
    except (OSError, ValueError) as e:
        for path in made:  # leave no empty directories behind
            if path.exists():
                path.rmdir()
        reason = getattr(e, "strerror", None) or e
        raise UsageError(f"cannot write to {printable(directory)}: {reason}") from e
    error = None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if holds_run(directory) and not (resume or overwrite):
            error = f"{directory} holds a run: --resume continues it, --overwrite replaces it"
    except OSError:
        lock.seek(0)
        holder = printable(lock.read(200).decode("utf-8", "replace"))
        error = f"{directory} is in use by {holder or 'a process'}"
    if error:
        lock.close()
        raise UsageError(error)
    lock.truncate(0)
    lock.write(f"process {os.getpid()} on {socket.gethostname()}\n".encode())
    lock.flush()
    half_written = [".*.tmp", "torch_save/.*.tmp"]  # by a process that was killed
    for pattern in half_written + (RUN_FILES + RUN_DIRS if overwrite else []):
        for path in directory.glob(pattern):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    return lock


def holds_run(directory):
    """Whether a run has left anything in its directory."""
    patterns = [*RUN_FILES[:-1], *RUN_DIRS]
    return any(path for pattern in patterns for path in directory.glob(pattern))


def has_checkpoint(directory):
    """Whether a run has left a checkpoint, damaged or not."""
    return any(directory.glob("checkpoint/epoch_*"))


def describe(args, exp_name, script):
    """config.json's content: arguments `args`, and what else the numbers of a run depend on."""
    config = {**args, "exp_name": exp_name, "script": Path(script).name, "ranks": num_procs()}
    config |= {"versions": _versions(), "git_commit": _git_commit()}
    config |= {"host": socket.gethostname(), "command": sys.argv}
    return config | {"start_time": datetime.now().astimezone().isoformat(timespec="seconds")}


def check_resume(directory, config, fixed):
    """Compare a run's config.json and status.json with the config that is to continue it.

    Args:
        fixed: keys whose values must not have changed.

    Returns:
        (epoch, finished, warnings): epochs done; whether none is left to do; lines for the user.

    Raises:
        UsageError: the run cannot be continued with this config, or its files are damaged.
    """
    started = has_checkpoint(directory) or (directory / "progress.txt").exists()
    try:
        old = read_json(directory / "config.json")
        if not isinstance(old.get("versions"), dict):
            raise ValueError(f"{directory / 'config.json'} is damaged: it has no versions")
    except FileNotFoundError:  # the run was stopped before it wrote one
        old = config
        if started:
            raise UsageError(f"cannot resume: {directory / 'config.json'} is missing") from None
    except ValueError as e:
        raise UsageError(f"cannot resume: {printable(e)}") from e
    changed = sorted(key for key in fixed if old.get(key) != config.get(key))
    if changed:
        text = [f"{k} was {printable(old.get(k))}, is {config.get(k)}" for k in changed]
        raise UsageError(f"cannot resume {directory}: {', '.join(text)}")
    status, warnings = {"status": "running", "epoch": 0}, []
    try:
        status = read_status(directory)
    except (OSError, ValueError) as e:
        # A checkpoint knows where the run stands. Without one, the run may be finished: then its
        # table must not be started anew.
        if started and not has_checkpoint(directory):
            raise UsageError(f"cannot resume: {printable(e)}, and there is no checkpoint") from e
        if started:
            warnings.append(f"{printable(e)}; going by the checkpoints")
    finished = status["status"] == "finished" and config.get("epochs", 0) <= status["epoch"]
    if status["status"] == "finished" and not finished and not has_checkpoint(directory):
        text = "it is finished, and its checkpoints, replay buffer and all, are deleted"
        raise UsageError(f"cannot extend {directory}: {text}")
    for name, now in sorted(config["versions"].items()):
        if now != (was := old["versions"].get(name)):
            warnings.append(f"resuming with {name} {now}; the run began with {printable(was)}")
    return status["epoch"], finished, warnings


def read_status(directory):
    """status.json of a run. Raises FileNotFoundError, or ValueError if it is damaged."""
    path = directory / "status.json"
    try:
        status = read_json(path)
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} is missing") from None
    if status.get("status") not in STATUSES or type(status.get("epoch")) is not int:
        raise ValueError(f"{path} is damaged: it has no status or no epoch")
    return status


def write_status(directory, status, epoch, epochs, error=None):
    """Write status.json: running, finished, interrupted or failed, after `epoch` of `epochs`."""
    state = {"status": status, "epoch": epoch, "epochs": epochs, "error": error}
    path = directory / "status.json"
    try:
        write_json(path, state)
    except OSError:  # without room for a new file, write over the old one
        if not path.exists():
            raise
        with open(path, "r+") as f:
            f.write(json.dumps(state))
            f.truncate()


def cut_progress(path, epoch):
    """Drop the rows of progress.txt that no checkpoint covers: they will be computed again.

    Returns:
        TotalEnvInteracts of the last row that is kept; 0 if none is.

    Raises:
        UsageError: the file is damaged, or has fewer than `epoch` rows.
    """
    if not path.exists():
        if epoch:
            raise UsageError(f"{path} is missing")
        return 0
    kept, step = [], 0
    try:
        lines = path.read_bytes().splitlines(keepends=True)
        whole = [line for line in lines if line.endswith(b"\n")]
        if len(whole) < epoch + 1:
            raise ValueError(f"it has fewer rows than the checkpoint of epoch {epoch}")
        if epoch:
            kept = whole[: epoch + 1]
            header, *rows = (line.decode().rstrip("\n").split("\t") for line in kept)
            table = [dict(zip(header, map(float, row), strict=True)) for row in rows]
            step = int(table[-1].get("TotalEnvInteracts", epoch))
    except (OSError, ValueError, OverflowError) as e:
        raise UsageError(f"{path} is damaged: {printable(e)}") from e
    write_atomically(path, lambda f: f.writelines(kept))
    return step


def _versions():
    """Versions of what the numbers of a run depend on."""
    versions = {"python": platform.python_version(), "cpu": cpu.cpu_name()}
    for name in ("torch", "tensorflow", "gymnasium", "mujoco", "numpy", "mpi4py"):
        if name in sys.modules:
            versions[name] = importlib.metadata.version(name)
    if "mpi4py.MPI" in sys.modules:
        library = sys.modules["mpi4py.MPI"].Get_library_version()
        versions["MPI"] = " ".join(library.split("\n")[0].split())[:60]
    return versions | ({"mkl": cpu.mkl} if cpu.mkl else {})


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
