"""Runs of a sweep as processes: where each stands on disk, starting, watching and stopping them."""

import ctypes
import dataclasses
import fcntl
import hashlib
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import psutil
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column

from benchmark.flags import Function
from common import UsageError
from common.mpi_tools import find_mpirun
from common.run_dir import FREE_TO_CHANGE
from common.serialization import check_inside, printable, read_json

RUN_FILES = ("config.json", "progress.txt", "status.json", "checkpoint", "call.json")
OUTCOMES = ("finished", "finished before", "failed", "failed before", "in use", "interrupted")
LOG_HEAD = "--- "  # begins the line that a launch adds to a log
LOG_LINES = 6  # last lines of a failed run's log in the summary
FULL_REPORTS = 5  # failed runs whose logs are quoted there
POLL = 0.05  # seconds between looks at the processes
REFRESH = 0.5  # seconds between updates of the overview

# ------------------------------------------------------------------------------------ runs on disk


@dataclasses.dataclass(eq=False)
class Run:
    """One run of a script or function, and what became of it."""

    thunk: object  # flags.Script or flags.Function
    exp_name: str
    seed: int
    params: dict  # the arguments that the sweep sets, without the seed
    settings: dict  # all arguments
    num_cpu: int
    data_dir: str
    stamp: str = ""  # date and time in the directory's name
    outcome: str = "not started"  # or one of OUTCOMES
    detail: str = ""

    @property
    def directory(self):
        name = f"{self.exp_name}_s{self.seed}"
        if self.stamp:
            return Path(self.data_dir, f"{self.stamp[:10]}_{self.exp_name}", f"{self.stamp}-{name}")
        return Path(self.data_dir, self.exp_name, name)

    @property
    def log(self):
        return self.directory / "launch.log"

    @property
    def epochs(self):
        epochs = self.settings.get("epochs")
        return epochs if isinstance(epochs, int) else None

    def fixed(self):
        """What the run's numbers depend on, as its config.json or call.json records it."""
        if isinstance(self.thunk, Function):
            return {**self.settings, "script": self.thunk.label, "ranks": self.num_cpu}
        free = FREE_TO_CHANGE | {"exp_name"}  # which follows from the directory
        fixed = {name: value for name, value in self.settings.items() if name not in free}
        return {**fixed, "script": self.thunk.label, "ranks": self.num_cpu}

    def read_config(self):
        """Arguments of the run that the directory holds. OSError: none; ValueError: damaged."""
        if not isinstance(self.thunk, Function):
            return read_json(self.directory / "config.json")
        config = read_json(self.directory / "call.json").get("config")
        if not isinstance(config, dict):
            raise ValueError(f"{self.directory / 'call.json'} is damaged")
        return config

    def read_state(self):
        """status.json, or what call.json says of it; {} if it cannot be read."""
        name = "call.json" if isinstance(self.thunk, Function) else "status.json"
        try:
            state = read_json(self.directory / name)
        except (OSError, ValueError):
            return {}
        return state if type(state.get("epoch")) is int else {}


def command(run, launcher=None):
    """The run as a command line. `launcher`: the words before python; by default mpirun's."""
    if launcher is None:
        mpirun = find_mpirun()
        if mpirun is None and run.num_cpu > 1:
            raise UsageError(f"num_cpu = {run.num_cpu} needs mpirun, and there is none on PATH")
        launcher = [mpirun, "-np", str(run.num_cpu)] if mpirun else []
    return [*launcher, sys.executable, *run.thunk.command(run)]


def place(run):
    """Give the run another directory if its own holds a run that it cannot continue.

    That is one with other arguments, or one that is finished, shorter, and without its checkpoints
    (the off-policy scripts delete theirs in the end). The other directory's name ends in a digest
    of the arguments, so that the next sweep finds it again.

    Returns:
        what differs, as text, or "".

    Raises:
        UsageError: a symbolic link leads the directory, or the log in it, out of data_dir.
    """
    changed = _place(run)
    check_inside(run.data_dir, run.log)
    return changed


def _place(run):
    try:
        config = run.read_config()
    except (OSError, ValueError):
        return ""  # none, or damaged: `status` says so
    fixed = run.fixed()
    if status(run)[0] == "too short" and not any((run.directory / "checkpoint").glob("epoch_*")):
        fixed["epochs"] = run.epochs
    changed = [name for name, value in fixed.items() if config.get(name) != value]
    if not changed:
        return ""
    text = ", ".join(f"{k} was {printable(config.get(k))}, is {fixed[k]}" for k in changed[:3])
    # The seed has a place of its own in the name: seeds of one change stay together.
    fixed.pop("seed", None)
    digest = hashlib.sha256(json.dumps(fixed, sort_keys=True).encode()).hexdigest()
    run.exp_name += f"_{digest[:8]}"
    return text + (f" and {len(changed) - 3} more" if len(changed) > 3 else "")


def status(run):
    """Where a run stands, by its directory: (word, detail).

    new: nothing there. finished. too short: finished, with fewer epochs than now asked for.
    interrupted: stopped or killed. failed: detail is the error. in use: a process is at work on it.
    """
    if not any((run.directory / name).exists() for name in RUN_FILES):
        return "new", ""
    if in_use(run.directory):
        return "in use", ""
    try:
        run.read_config()
    except OSError:
        return "interrupted", ""
    except ValueError as e:
        return "failed", printable(e)
    state = run.read_state()  # {}: the run itself says so, or goes by its checkpoints
    if state.get("status") == "failed":
        return "failed", printable(state.get("error"))
    if state.get("status") != "finished":
        return "interrupted", ""
    if run.epochs and state["epoch"] < run.epochs and not isinstance(run.thunk, Function):
        return "too short", f"has {state['epoch']} of now {run.epochs} epochs"
    return "finished", ""


def in_use(directory):
    """Whether a living process holds a lock of a run directory."""
    for name in (".lock", ".call.lock"):
        try:
            with open(directory / name) as f:
                fcntl.flock(f, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            continue
        except OSError:
            return True
    return False


def patient_status(run, seconds):
    """`status`, waiting for the ranks of a sweep or mpirun that has just died to die too."""
    deadline = time.monotonic() + seconds
    while (found := status(run))[0] == "in use" and time.monotonic() < deadline:
        time.sleep(POLL)
    return found


def read_progress(run):
    """(finished epochs, last return or None) by progress.txt."""
    try:
        text = (run.directory / "progress.txt").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0, None
    header, *rows = text[: text.rfind("\n") + 1].splitlines() or [""]
    row = dict(zip(header.split("\t"), rows[-1].split("\t") if rows else [], strict=False))
    try:
        return len(rows), float(row.get("AverageTestEpRet", row.get("AverageEpRet")))
    except (TypeError, ValueError):
        return len(rows), None


# --------------------------------------------------------------------------------------- processes


def core_shares(workers):
    """Sets of cores, one for each worker; None where cores cannot be assigned.

    A run's threads follow from the cores that it may use (common/mpi_tools.py, threads_per_rank).
    With more workers than cores, several workers share one.
    """
    if workers == 1 or not hasattr(os, "sched_getaffinity"):
        return [None] * workers
    cores = sorted(os.sched_getaffinity(0))
    return [set(cores[i::workers]) or {cores[i % len(cores)]} for i in range(workers)]


def start(run, cores=None):
    """Start a run in a session of its own, its output in its log; returns the Popen.

    Raises:
        OSError: its directory or log cannot be written, or the program not started.
    """
    words = command(run)
    run.directory.mkdir(parents=True, exist_ok=True)
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    parent = os.getpid()

    def prepare():
        if cores:
            os.sched_setaffinity(0, cores)
        if libc:  # if we are killed, the kernel kills mpirun, and mpirun's proxies their ranks
            libc.prctl(1, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(1)

    with open(run.log, "a", encoding="utf-8") as log:
        log.write(f"{LOG_HEAD}{time.strftime('%Y-%m-%d %H:%M:%S')} {shlex.join(words)}\n")
        log.flush()
        return subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=prepare,
            env={**os.environ, "PYTHONUNBUFFERED": "1", "SWEEP_DATESTAMP": run.stamp},
        )


def kill_tree(process):
    """SIGKILL a process and all its descendants; MPI's ranks are in sessions of their own."""
    try:
        tree = psutil.Process(process.pid)
        for p in [tree, *tree.children(recursive=True)]:
            p.kill()
    except psutil.NoSuchProcess:
        pass


def sort_out(runs, retry_failed):
    """The runs that are left to do; the outcome of the others is set."""
    todo = []
    for run in runs:
        word, run.detail = patient_status(run, 3)
        if word == "failed" and not retry_failed:
            run.outcome = "failed before"
        elif word == "finished":
            run.outcome = "finished before"
        elif word == "in use":
            run.outcome, run.detail = "in use", "another process is at work on it"
        else:
            todo.append(run)
    return todo


def run_all(runs, workers=1, retry_failed=False, name=""):
    """Run those of `runs` that are not finished, `workers` at a time, and set their outcomes.

    SIGINT and SIGTERM stop all of them at the end of their epochs, a second one at once; they can
    be resumed either way. Returns the first such signal, or None.
    """
    todo = sort_out(runs, retry_failed)
    free = core_shares(max(1, min(workers, len(todo))))
    active = {}  # run -> (its process, its cores)
    stops, handled, kill_time, shown = [], 0, math.inf, 0.0
    signals = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # not under nohup
        signals.append(signal.SIGHUP)
    before = {s: signal.signal(s, lambda signum, frame: stops.append(signum)) for s in signals}
    overview = Overview(name, runs)
    say(f"{name}: {len(todo)} of {len(runs)} runs to do")
    try:
        while active or (todo and not stops):
            while todo and free and not stops:
                run, cores = todo.pop(0), free.pop(0)
                try:
                    active[run] = start(run, cores), cores
                    overview.started(run)
                except OSError as e:
                    run.outcome, run.detail = "failed", str(e)
                    free.append(cores)
                    overview.ended(run)

            # The first signal is handed on to the runs; so is a second, and then they are killed.
            if len(stops) > handled:
                handled = len(stops)
                for process, _ in active.values():
                    if process.poll() is None:
                        os.kill(process.pid, signal.SIGTERM)  # mpirun hands it on to all ranks
                text = "runs stop at the end of their epochs; once more stops them at once"
                if handled > 1:
                    text, kill_time = "killing all runs", time.monotonic() + 3
                say(f"{signal.Signals(stops[-1]).name}: {text}")
            if time.monotonic() > kill_time:
                for process, _ in active.values():
                    kill_tree(process)
                kill_time = math.inf

            for run, (process, cores) in list(active.items()):
                if process.poll() is not None:
                    del active[run]
                    free.append(cores)
                    run.outcome, run.detail = ended(run, process.returncode, bool(stops))
                    overview.ended(run)
            if time.monotonic() - shown > REFRESH:
                shown = time.monotonic()
                overview.refresh(active)
            if active:
                time.sleep(POLL)
    finally:
        for process, _ in active.values():  # only after an error of our own
            kill_tree(process)
        overview.progress.stop()
        for s, handler in before.items():
            signal.signal(s, handler)
    return stops[0] if stops else None


def ended(run, code, stopping):
    """(outcome, detail) of a run whose process has ended."""
    word, detail = patient_status(run, 5)
    if code == 0 and word == "finished":
        return "finished", ""
    stopped = stopping or code in (128 + signal.SIGTERM, 128 + signal.SIGINT)
    if (word == "interrupted" and stopped) or (word == "new" and stopping):
        return "interrupted", ""
    how = f"exit code {code}" if code >= 0 else f"killed by signal {-code}"
    return "failed", f"{how}{': ' + detail if detail else ''}"


def summary(runs, name, seconds, stopped=None):
    """What became of a sweep, as text; failed runs with the last lines of their logs."""
    counts = Counter(run.outcome for run in runs)
    parts = [f"{counts[word]} {word}" for word in (*OUTCOMES, "not started") if counts[word]]
    lines = [f"{name}: {len(runs)} runs, {', '.join(parts)}, in {clock(seconds)}"]
    for run in runs:
        if run.outcome in ("failed", "failed before", "in use"):
            detail = f": {run.detail}" if run.detail else ""
            lines += ["", f"{run.outcome}: {run.directory}{detail}"]
            if run.outcome == "failed" and sum("    log:" in line for line in lines) < FULL_REPORTS:
                lines += [f"    {line}" for line in last_lines(run.log)]
            lines += [f"    log: {run.log}"] * (run.outcome != "in use")
    if counts["failed"] + counts["failed before"]:
        lines += ["", "The same command with --retry-failed runs failed runs again."]
    if stopped:
        lines += ["", "The same command again goes on."]
    return "\n".join(lines)


def last_lines(log):
    """The last lines of a log that are not empty, of its last launch."""
    try:
        with open(log, "rb") as f:
            f.seek(max(0, os.path.getsize(log) - 20_000))
            text = f.read().decode("utf-8", "replace")
    except OSError:
        return []
    lines = f"\n{text}".rpartition(f"\n{LOG_HEAD}")[2].splitlines()
    lines = lines[1:] if f"\n{LOG_HEAD}" in f"\n{text}" else lines
    return [line.rstrip() for line in lines if line.strip()][-LOG_LINES:]


# ---------------------------------------------------------------------------------------- overview


def clock(seconds):
    """Seconds as 0:07, 12:05 or 3:00:59."""
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def say(text):
    """Print, also where nobody reads any more (`| head -1`): the runs go on."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class Overview:
    """A line for each run that starts or ends; in a terminal, bars of those that run, too."""

    def __init__(self, name, runs):
        self.name, self.runs, self.tasks, self.began = name, runs, {}, {}
        console = Console()
        wide = console.width >= 60
        self.words = ("epoch ", "return ") if wide else ("", "")
        name_column = Column(ratio=1, no_wrap=True, overflow="ellipsis")
        self.progress = Progress(
            TextColumn("{task.description}", table_column=name_column, markup=False),
            *([BarColumn(12)] if wide else []),
            TextColumn("{task.fields[count]}", justify="right"),
            TextColumn("{task.fields[ret]}", justify="right"),
            *([TimeElapsedColumn()] if wide else []),
            TimeRemainingColumn(compact=True),
            console=console,
            expand=True,
            transient=True,
            disable=not console.is_terminal,
            auto_refresh=False,  # a thread that draws would make forking unsafe
            speed_estimate_period=1e9,  # an epoch may take minutes
        )
        self.total = self.progress.add_task(name, total=len(runs), count="", ret="")
        self.progress.start()

    def started(self, run):
        epoch, _ = read_progress(run)
        name = run.directory.name.removeprefix(f"{self.name}_")
        task = {"total": run.epochs, "completed": epoch, "count": "", "ret": ""}
        self.tasks[run] = self.progress.add_task(f"  {name}", **task)
        self.began[run] = time.monotonic()
        say(f"started   {run.directory}")

    def ended(self, run):
        text = f"{run.outcome:<9} {run.directory}"
        if run in self.tasks:
            self.progress.remove_task(self.tasks[run])
            epoch, ret = read_progress(run)
            text += f"  epoch {epoch}/{run.epochs or '?'}"
            text += f"  {clock(time.monotonic() - self.began[run])}"
            text += f"  return {ret:.1f}" if ret is not None else ""
        text += f"  {run.detail}" if run.detail else ""
        say(f"{text}  [{self.counts()}]")

    def counts(self):
        outcomes = Counter(run.outcome.split()[0] for run in self.runs)
        text = f"{outcomes['finished']} of {len(self.runs)} finished"
        return text + (f", {outcomes['failed']} failed" if outcomes["failed"] else "")

    def refresh(self, active):
        done = float(sum(run.outcome.startswith("finished") for run in self.runs))
        failed = sum(run.outcome in ("failed", "failed before", "in use") for run in self.runs)
        for run in active:
            epoch, ret = read_progress(run)
            done += min(1, epoch / run.epochs) if run.epochs else 0
            fields = {"count": f"{epoch}/{run.epochs or '?'}", "completed": epoch}
            self.progress.update(self.tasks[run], ret="" if ret is None else f"{ret:.1f}", **fields)
        fields = {"total": max(1, len(self.runs) - failed), "completed": done}
        self.progress.update(self.total, description=f"{self.name}: {self.counts()}", **fields)
        self.progress.refresh()
