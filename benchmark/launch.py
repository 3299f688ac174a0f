"""Runs of a sweep as processes: their state on disk; starting, watching and stopping them."""

import contextlib
import csv
import ctypes
import dataclasses
import fcntl
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from pathlib import Path

import psutil
from tqdm import tqdm

from benchmark.reading import printable, read_json, read_status
from common.files import RUN_FILES, find, write_atomically, write_json

POLL = 0.05  # seconds between looks at the processes
PLOT = Path(__file__).with_name("plot.py")
REFRESH = 0.5  # seconds between updates of the bar
# tqdm's own lock is one between processes. Python 3.14 starts a process to watch over it, which
# writes a warning to stderr if this one is killed.
tqdm.set_lock(threading.RLock())

# Runs on disk -------------------------------------------------------------------------------------


@dataclasses.dataclass(eq=False)
class Run:
    """One run of a script or function, and what became of it."""

    directory: Path
    command: list  # the words that start it
    fixed: dict  # what its numbers depend on, as its config.json records it
    epochs: int | None = None
    call: bytes | None = None  # for a function: the pickles that call.py reads
    stamp: str = ""  # date and time in the directory's name
    outcome: str = "not started"
    detail: str = ""
    began: float = 0.0
    usual: dict = dataclasses.field(default_factory=dict)  # for what config.json does not have

    @property
    def record(self):
        """Where its config.json, status.json and .lock are: a function's logger has its own."""
        return self.directory / "call" if self.call else self.directory

    @property
    def log(self):
        return self.directory / "launch.log"


def status(run):
    """The state of a run, read from its directory: (word, detail).

    finished. interrupted: never started, stopped or killed, or finished with fewer epochs than now
    asked for. failed: detail is the error. in use: a process is at work on it. another run: it has
    other arguments.
    """
    if in_use(run):
        return "in use", "another process is at work on it"
    try:
        config = read_json(run.record / "config.json")
    except OSError:
        if run.call and find(run.directory, RUN_FILES):
            return "another run", "it is not one of a function"
        return "interrupted", ""
    except ValueError as e:
        return "failed", printable(e)
    before = {**run.usual, **config}
    now = {**dict.fromkeys(config if run.call else ()), **run.fixed}
    changed = [f"{k} was {before.get(k)}, is {v}" for k, v in now.items() if before.get(k) != v]
    if changed:
        return "another run", printable(", ".join(changed))
    try:
        state = read_status(run.record)
    except (OSError, ValueError):
        return "interrupted", ""  # the run itself says so, or goes by its checkpoints
    if state["status"] == "failed":
        return "failed", printable(state.get("error"))
    if state["status"] == "finished" and state["epoch"] >= (run.epochs or 0):
        return "finished", ""
    return "interrupted", ""


def in_use(run):
    """Whether a living process holds the lock of a run."""
    try:
        with open(run.record / ".lock") as f:
            fcntl.flock(f, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except OSError as e:
        return isinstance(e, BlockingIOError)


def settle(run, retry_failed):
    """Whether a run is left to do and free to be started. Sets its outcome by its state on disk."""
    word, run.detail = status(run)
    left = word == "interrupted" or (word == "failed" and retry_failed)
    ended = word in ("finished", "failed")
    run.outcome = "not started" if left else f"{word} before" if ended else word
    return left


# Processes ----------------------------------------------------------------------------------------


def core_shares(workers):
    """Sets of cores, one for each worker; None where cores cannot be assigned.

    A run's threads follow from the cores that it may use (common/mpi.py, threads_per_rank), and its
    rounding from its threads. So all sets are of one size, and a few cores may be left over. With
    more workers than cores, several workers share one.
    """
    if workers == 1 or not hasattr(os, "sched_getaffinity"):
        return [None] * workers
    cores = sorted(os.sched_getaffinity(0))
    size = max(1, len(cores) // workers)
    return [set(cores[i % len(cores) :: workers][:size]) for i in range(workers)]


def prepare(run):
    """Make a run's directory and, for a function, the files that call.py reads."""
    run.record.mkdir(parents=True, exist_ok=True)
    if run.call:
        write_json(run.record / "config.json", run.fixed)
        write_atomically(run.record / "function.pkl", lambda f: f.write(run.call))


def start(run, cores=None):
    """Start a run in a session of its own, its output in its log. Returns the Popen.

    Raises:
        OSError: its directory or log cannot be written, or the program not started.
        ValueError: a word of its command holds a NUL character.
    """
    prepare(run)
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    parent = os.getpid()

    def in_child():
        if cores:
            os.sched_setaffinity(0, cores)
        if libc:  # if we are killed, the kernel kills mpirun, and mpirun's proxies their ranks
            libc.prctl(1, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(1)

    with open(run.log, "a", encoding="utf-8") as log:
        log.write(f"--- {time.strftime('%Y-%m-%d %H:%M:%S')} {shlex.join(run.command)}\n")
        log.flush()
        more = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": subprocess.STDOUT}
        more["env"] = {**os.environ, "PYTHONUNBUFFERED": "1", "SWEEP_DATESTAMP": run.stamp}
        return subprocess.Popen(run.command, start_new_session=True, preexec_fn=in_child, **more)


def kill_tree(process):
    """SIGKILL a process and all its descendants; MPI's ranks are in sessions of their own."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
    process.kill()


def run_all(runs, workers=1, retry_failed=False, name=""):
    """Run those of `runs` that are not finished, `workers` at a time, and set their outcomes.

    A run that another process is at work on is left to it. SIGINT and SIGTERM stop all of them at
    the end of their epochs, a second one at once; they can be resumed either way. Returns the first
    such signal, or None.
    """
    todo = deque(run for run in runs if settle(run, retry_failed))
    free = core_shares(max(1, min(workers, len(runs))))  # len(todo) shrinks; a share must not grow
    active, stops, handled, shown = {}, [], 0, 0.0  # active: run -> (its process, its cores)
    signals = (signal.SIGINT, signal.SIGTERM)
    before = {s: signal.signal(s, lambda signum, frame: stops.append(signum)) for s in signals}
    tqdm.monitor_interval = 0  # a thread would make forking unsafe
    bar = tqdm(total=len(todo), unit="run", leave=False, disable=None)  # None: without a terminal
    say(f"{name}: {len(todo)} of {len(runs)} runs to do")
    try:
        while active or (todo and not stops):
            if todo and free and not stops:
                run = todo.popleft()
                run.began = time.monotonic()
                if settle(run, retry_failed):
                    try:
                        process = start(run, free[0])
                        active[run] = process, free.pop(0)
                    except (OSError, ValueError) as e:
                        run.outcome, run.detail = "failed", str(e)
                say(f"started   {run.directory}" if run in active else ended_line(run, runs))

            # mpirun hands the first signal on to all ranks; the second kills them.
            if len(stops) > handled:
                handled = len(stops)
                for process, _ in active.values():
                    process.terminate() if handled == 1 else kill_tree(process)
                first = "runs stop at the end of their epochs; once more kills them"
                say(first if handled == 1 else "runs are killed")

            for run, (process, cores) in list(active.items()):
                if process.poll() is not None:
                    del active[run]
                    free.append(cores)
                    run.outcome, run.detail = ended(run, process.returncode, bool(stops))
                    say(ended_line(run, runs))
                    bar.update()
            if not bar.disable and time.monotonic() - shown > REFRESH:
                shown = time.monotonic()
                words = [f"{run.directory.name} {progress_words(run)[0]}" for run in active]
                bar.set_postfix_str(", ".join(words))
            time.sleep(POLL)
    finally:
        for process, _ in active.values():  # only after an error of our own
            kill_tree(process)
        bar.close()
        for s, handler in before.items():
            signal.signal(s, handler)
    return stops[0] if stops else None


def ended(run, code, stopping):
    """(outcome, detail) of a run whose process has ended."""
    deadline = time.monotonic() + 5  # ranks of an mpirun that was just killed may be at work
    while code != 2 and in_use(run) and time.monotonic() < deadline:
        time.sleep(POLL)
    word, detail = status(run)
    if word in ("in use", "finished"):  # by another process, if this one came too late
        return word, detail
    if word == "interrupted" and (stopping or code in (128 + signal.SIGTERM, 128 + signal.SIGINT)):
        return word, ""
    how = f"exit code {code}" if code >= 0 else f"killed by signal {-code}"
    return "failed", f"{how}{': ' + detail if detail else ''}"


# Output -------------------------------------------------------------------------------------------


def say(text):
    """Print a line. A closed pipe (`| head -1`) or terminal is no error: the runs go on."""
    try:
        with tqdm.external_write_mode():
            print(text, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def progress_words(run):
    """What a line says of a run's progress, by progress.txt: (epoch, time, return)."""
    rows, ret = [], ""
    # No table yet, for instance, or no return in it, or no whole line.
    with contextlib.suppress(OSError, ValueError, IndexError, TypeError, csv.Error):
        with open(run.directory / "progress.txt", encoding="utf-8", errors="replace") as f:
            rows = list(csv.DictReader(f, delimiter="\t"))
        keys = "AverageTestEpRet", "AverageEpRet"
        values = [float(rows[-1][key]) for key in keys if key in rows[-1]]
        value = next((x for x in values if x == x), values[-1])
        ret = f"return {value:.1f}" if value == value else "no return: no episode ended"
    count = f"epoch {len(rows)}/{run.epochs or '?'}"
    return count, tqdm.format_interval(time.monotonic() - run.began), ret


def ended_line(run, runs):
    words = [f"{run.outcome:<9} {run.directory}", *progress_words(run), run.detail]
    n = Counter(run.outcome.split()[0] for run in runs)
    counts = f"[{n['finished']} of {len(runs)} finished, {n['failed']} failed]"
    return "  ".join(filter(None, [*words, counts]))


def counts(runs):
    """How many runs there are, and how many of each outcome, in words."""
    found = Counter(run.outcome for run in runs)
    return ", ".join([f"{len(runs)} runs", *(f"{n} {word}" for word, n in sorted(found.items()))])


def summary(runs, name, seconds):
    """What became of a sweep, as text; failed runs with the last lines of their logs."""
    lines = [f"{name}: {counts(runs)}, in {tqdm.format_interval(seconds)}"]
    for run in runs:
        if not run.outcome.startswith(("finished", "interrupted", "not started")):
            lines += ["", f"{run.outcome}: {run.directory}{': ' * bool(run.detail)}{run.detail}"]
        if run.outcome.startswith("failed") and run.log.exists():
            text = run.log.read_text(encoding="utf-8", errors="replace")
            lines += [f"    {x.rstrip()}" for x in text.splitlines() if x.strip()][-6:]
            lines.append(f"    log: {run.log}")
    if not all(run.outcome.startswith(("finished", "another run")) for run in runs):
        again = "The same command goes on; with --retry-failed, also with what failed."
        later = "The same command would begin anew: --resume DIR goes on with a run of a script."
        lines += ["", later if runs[0].stamp else again]
    if any((run.directory / "progress.txt").exists() for run in runs):
        folder, *others = {run.directory.parent for run in runs}
        if others:  # a star, since a prefix that is also a directory would stand for it alone
            folder = folder.with_name(f"{runs[0].stamp[:10]}_{name}".lstrip("_"))
        names = shlex.quote(str(folder)) + "*" * bool(others)
        lines.append(f"python {shlex.quote(os.path.relpath(PLOT))} {names} plots the curves")
    return "\n".join(lines)
