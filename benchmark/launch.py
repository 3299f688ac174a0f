"""Runs of a sweep as processes: where each stands on disk, starting, watching and stopping them."""

import ctypes
import dataclasses
import fcntl
import hashlib
import itertools
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from common import UsageError
from common.run_dir import FREE_TO_CHANGE
from common.serialization import check_inside, printable, read_json

RUN_FILES = ("config.json", "progress.txt", "status.json", "checkpoint")
LOG_NAME = "launch.log"
LOG_HEAD = "--- "  # begins the line that a launch adds to a log
LOG_LINES = 6  # last lines of a failed run's log in the summary
FULL_REPORTS = 5  # failed runs whose logs are quoted there
POLL = 0.05  # seconds between looks at the processes
REFRESH = 0.5  # seconds between updates of the overview

# ------------------------------------------------------------------------------------ runs on disk


@dataclasses.dataclass
class Run:
    """One run of a script: its arguments, and the directory that follows from them."""

    script: str  # path
    exp_name: str
    seed: int
    params: dict  # field name -> value, without seed
    fields: dict  # the script's, from flags.read_fields
    num_cpu: int
    data_dir: str

    @property
    def directory(self):
        return Path(self.data_dir, self.exp_name, f"{self.exp_name}_s{self.seed}")

    @property
    def log(self):
        return self.directory / LOG_NAME

    @property
    def epochs(self):
        field = self.fields.get("epochs")
        return self.params.get("epochs", field.default if field else None)

    def settings(self):
        """What the run's numbers depend on: {argument: value}, as config.json records it."""
        settings = {n: f.default for n, f in self.fields.items() if f.has_default}
        settings |= self.params | {"seed": self.seed}
        free = FREE_TO_CHANGE | {"exp_name"}  # which follows from the directory
        settings = {n: v for n, v in settings.items() if n not in free}
        settings |= {"script": Path(self.script).name, "ranks": self.num_cpu}
        return json.loads(json.dumps(settings))  # tuples become lists

    def flags(self):
        """The words of its command line after the script."""
        words = self.fields["exp_name"].words(self.exp_name)
        words += self.fields["seed"].words(self.seed)
        words += self.fields["data_dir"].words(str(self.data_dir))
        for name, value in self.params.items():
            words += self.fields[name].words(value)
        return [*words, "--resume"]  # starts the run where there is nothing to resume


def command(run, launcher=None):
    """The run as a command line. `launcher`: the words before python; by default mpirun's."""
    if launcher is None:
        mpirun = find_mpirun()
        if mpirun is None and run.num_cpu > 1:
            raise UsageError(f"num_cpu = {run.num_cpu} needs mpirun, and there is none on PATH")
        launcher = [mpirun, "-np", str(run.num_cpu)] if mpirun else []
    return [*launcher, sys.executable, run.script, *run.flags()]


def find_mpirun():
    """The mpirun beside this python, activated or not, else that on PATH, else None."""
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])
    return shutil.which("mpirun", path=path)


def place(run):
    """Give the run another directory if its own holds a run that it cannot continue.

    That is one with other arguments, or one that is finished, shorter, and without its checkpoints
    (the off-policy scripts delete theirs in the end). It stays as it is. The other directory's name
    ends in a digest of the arguments, so the next sweep finds it again. Returns what differs, as
    text, or "". UsageError if a symbolic link leads its directory, or its log, out of data_dir.
    """
    changed = _place(run)
    check_inside(run.data_dir, run.log)
    return changed


def _place(run):
    try:
        config = read_json(run.directory / "config.json")
    except (OSError, ValueError):
        return ""  # none, or damaged: `status` says so
    settings = run.settings()
    checkpoints = any((run.directory / "checkpoint").glob("epoch_*"))
    if status(run)[0] == "too short" and not checkpoints:
        settings["epochs"] = run.epochs
    if all(config.get(k) == v for k, v in settings.items()):
        return ""
    changed = [k for k, v in settings.items() if config.get(k) != v]
    text = [f"{k} was {printable(config.get(k))}, is {settings[k]}" for k in changed[:3]]
    text = ", ".join(text)
    text += f" and {len(changed) - 3} more" if len(changed) > 3 else ""
    # The seed has a place of its own in the name: seeds of one change stay together.
    del settings["seed"]
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
    run.exp_name += f"_{digest[:8]}"
    return text


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
        read_json(run.directory / "config.json")
    except OSError:
        return "interrupted", ""
    except ValueError as e:
        return "failed", printable(e)
    try:
        state = read_json(run.directory / "status.json")
    except (OSError, ValueError):
        state = {}
    if type(state.get("epoch")) is not int:
        return "interrupted", ""  # damaged: the run itself says so, or goes by its checkpoints
    if state.get("status") == "failed":
        return "failed", printable(state.get("error"))
    if state.get("status") != "finished":
        return "interrupted", ""
    if isinstance(run.epochs, int) and state["epoch"] < run.epochs:
        return "too short", f"has {state['epoch']} of now {run.epochs} epochs"
    return "finished", ""


def in_use(directory):
    """Whether a living process holds the lock of a run directory."""
    try:
        with open(directory / ".lock") as f:
            fcntl.flock(f, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


def read_progress(run):
    """(finished epochs, last return or None) by progress.txt."""
    try:
        text = (run.directory / "progress.txt").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0, None
    lines = text[: text.rfind("\n") + 1].splitlines()
    if len(lines) < 2:
        return 0, None
    row = dict(zip(lines[0].split("\t"), lines[-1].split("\t"), strict=False))
    value = row.get("AverageTestEpRet", row.get("AverageEpRet"))
    try:
        return len(lines) - 1, float(value)
    except (TypeError, ValueError):
        return len(lines) - 1, None


# --------------------------------------------------------------------------------------- processes


def core_shares(workers):
    """Disjoint sets of cores, one for each worker; None where cores cannot be assigned.

    A run's threads follow from the cores that it may use (common/mpi_tools.py, threads_per_rank).
    With more workers than cores, several workers share one.
    """
    if workers == 1 or not hasattr(os, "sched_getaffinity"):
        return [None] * workers
    cores = sorted(os.sched_getaffinity(0))
    if workers >= len(cores):
        return [{cores[i % len(cores)]} for i in range(workers)]
    ends = [len(cores) * i // workers for i in range(workers + 1)]
    return [set(cores[a:b]) for a, b in itertools.pairwise(ends)]


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
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )


def kill_tree(pid):
    """SIGKILL a process and all its descendants; MPI's ranks are in sessions of their own."""
    listing = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True)
    children = {}
    for line in listing.stdout.splitlines():
        child, parent = map(int, line.split())
        children.setdefault(parent, []).append(child)
    doomed = [pid]
    for p in doomed:
        doomed += children.get(p, [])
    for p in doomed:
        try:
            os.kill(p, signal.SIGKILL)
        except ProcessLookupError:
            continue


@dataclasses.dataclass
class Active:
    """A run that is going: its process, its worker, and where it stood when it was started."""

    run: Run
    process: subprocess.Popen
    worker: int
    started: float
    first_epoch: int
    epoch: int = 0
    ret: float | None = None

    def seconds_left(self, now):
        """Seconds until it is finished, at the speed of its epochs so far; None if unknown."""
        done = self.epoch - self.first_epoch
        if done <= 0 or not isinstance(self.run.epochs, int):
            return None
        return max(0, self.run.epochs - self.epoch) * (now - self.started) / done


@dataclasses.dataclass
class Result:
    """How a run of the sweep ended, or why it was not started.

    outcome: finished, finished before, failed, failed before, in use, interrupted, not started.
    """

    run: Run
    outcome: str
    detail: str = ""


def sort_out(runs, retry_failed):
    """Which runs are left to do: (their indices, {index: Result} of the others)."""
    results, todo = {}, []
    patience = time.monotonic() + 3  # the ranks of a sweep that was just killed are still dying
    for i, run in enumerate(runs):
        word, detail = status(run)
        while word == "in use" and time.monotonic() < patience:
            time.sleep(POLL)
            word, detail = status(run)
        if word == "failed" and not retry_failed:
            results[i] = Result(run, "failed before", detail)
        elif word == "finished":
            results[i] = Result(run, "finished before")
        elif word == "in use":
            results[i] = Result(run, "in use", "another process is at work on it")
        else:
            todo.append(i)
    return todo, results


def run_all(runs, workers=1, retry_failed=False, name=""):
    """Run those of `runs` that are not finished, `workers` at a time.

    SIGINT and SIGTERM stop all of them at the end of their epochs, a second one at once; they can
    be resumed either way. Returns (a Result for each run, in order; the signal or None).
    """
    todo, results = sort_out(runs, retry_failed)
    workers = max(1, min(workers, len(todo)))
    shares, free, active = core_shares(workers), list(range(workers)), {}
    overview = (Live if sys.stdout.isatty() else Plain)(name, len(runs))
    stops, handled, kill_time = [], 0, None  # signals received, acted upon, and the last resort

    def on_signal(signum, frame):
        stops.append(signum)

    signals = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # not under nohup
        signals.append(signal.SIGHUP)
    before = {s: signal.signal(s, on_signal) for s in signals}
    try:
        overview.open(results, todo)
        shown = 0.0
        while active or (todo and not stops):
            while todo and free and not stops:
                i, worker = todo.pop(0), free.pop(0)
                first, ret = read_progress(runs[i])
                try:
                    process = start(runs[i], shares[worker])
                except OSError as e:
                    results[i] = Result(runs[i], "failed", str(e))
                    free.append(worker)
                    overview.ended(results[i], None, len(results))
                    continue
                active[i] = Active(runs[i], process, worker, time.monotonic(), first, first, ret)
                overview.started(active[i])

            # The first signal is handed on to the runs; so is a second, and then they are killed.
            if len(stops) > handled:
                handled = len(stops)
                for a in active.values():
                    if a.process.poll() is None:
                        os.kill(a.process.pid, signal.SIGTERM)  # mpirun hands it on to all ranks
                if handled > 1:
                    kill_time = time.monotonic() + 3
                overview.stopping(stops[-1], at_once=handled > 1)
            if kill_time and time.monotonic() > kill_time:
                for a in active.values():
                    kill_tree(a.process.pid)
                kill_time = None

            for i, a in list(active.items()):
                if a.process.poll() is not None:
                    del active[i]
                    free.append(a.worker)
                    a.epoch, a.ret = read_progress(a.run)
                    results[i] = ended(a, bool(stops))
                    overview.ended(results[i], a, len(results))
            if time.monotonic() - shown > REFRESH:
                shown = time.monotonic()
                for a in active.values():
                    a.epoch, a.ret = read_progress(a.run)
                overview.refresh(list(active.values()), results, todo)
            if active:
                time.sleep(POLL)
        overview.refresh([], results, todo)
    finally:
        for a in active.values():  # only after an error of our own
            kill_tree(a.process.pid)
        overview.close()
        for s, handler in before.items():
            signal.signal(s, handler)
    for i in todo:
        results[i] = Result(runs[i], "not started")
    return [results[i] for i in range(len(runs))], stops[0] if stops else None


def ended(active, stopping):
    """The Result of a process that has ended."""
    code = active.process.returncode
    word, detail = status(active.run)
    deadline = time.monotonic() + 5
    while word == "in use" and time.monotonic() < deadline:  # mpirun died before its ranks
        time.sleep(POLL)
        word, detail = status(active.run)
    if code == 0 and word == "finished":
        return Result(active.run, "finished")
    if word == "interrupted" and (stopping or code in (128 + signal.SIGTERM, 128 + signal.SIGINT)):
        return Result(active.run, "interrupted")
    if stopping and word == "new":
        return Result(active.run, "interrupted")
    how = f"exit code {code}" if code >= 0 else f"killed by signal {-code}"
    return Result(active.run, "failed", f"{how}{': ' + detail if detail else ''}")


def summary(results, name, seconds, stopped=None):
    """What became of a sweep, as text; failed runs with the last lines of their logs."""
    counts = {}
    for result in results:
        counts[result.outcome] = counts.get(result.outcome, 0) + 1
    order = ["finished", "finished before", "failed", "failed before", "in use"]
    order += ["interrupted", "not started"]
    parts = [f"{counts[word]} {word}" for word in order if word in counts]
    lines = [f"{name}: {len(results)} runs, {', '.join(parts)}, in {clock(seconds)}"]
    quoted = 0
    for result in results:
        if result.outcome in ("failed", "failed before", "in use"):
            detail = f": {result.detail}" if result.detail else ""
            lines += ["", f"{result.outcome}: {result.run.directory}{detail}"]
            quoted += result.outcome == "failed"
            if result.outcome == "failed" and quoted <= FULL_REPORTS:
                lines += [f"    {line}" for line in last_lines(result.run.log)]
            lines += [f"    log: {result.run.log}"] * (result.outcome != "in use")
    if "failed before" in counts:
        lines += ["", "Failed runs are run again with --retry-failed."]
    if stopped:
        lines += ["", "Run the same command again to go on."]
    return "\n".join(lines)


def last_lines(log):
    """The last lines of a log that are not empty, of its last launch."""
    try:
        with open(log, "rb") as f:
            f.seek(max(0, os.path.getsize(log) - 20_000))
            lines = f.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return []
    heads = [i for i, line in enumerate(lines) if line.startswith(LOG_HEAD)]
    lines = lines[heads[-1] + 1 :] if heads else lines
    return [line.rstrip() for line in lines if line.strip()][-LOG_LINES:]


# ---------------------------------------------------------------------------------------- overview


def clock(seconds):
    """Seconds as 0:07, 12:05 or 3:00:59."""
    if seconds is None:
        return ""
    seconds = int(seconds)
    hours, minutes, seconds = seconds // 3600, seconds // 60 % 60, seconds % 60
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def progress_text(active):
    epochs = active.run.epochs
    return f"{active.epoch}/{epochs}" if epochs else f"{active.epoch}"


def return_text(ret):
    return "" if ret is None else f"{ret:.1f}"


def say(text):
    """Print, also where nobody reads any more (`| head -1`): the runs go on."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class Plain:
    """The overview where there is no terminal: a line when a run starts and when it ends."""

    def __init__(self, name, total):
        self.name, self.total = name, total

    def open(self, results, todo):
        before = len(results)
        skipped = f", {before} not to be run" if before else ""
        say(f"{self.name}: {len(todo)} of {self.total} runs to do{skipped}")

    def started(self, active):
        say(f"started   {active.run.directory}")

    def ended(self, result, active, done):
        text = f"{result.outcome:<9} {result.run.directory}"
        if active:
            text += f"  epoch {progress_text(active)}  {clock(time.monotonic() - active.started)}"
            text += f"  return {return_text(active.ret)}" if active.ret is not None else ""
        text += f"  {result.detail}" if result.detail else ""
        say(f"{text}  [{done}/{self.total}]")

    def stopping(self, signum, at_once):
        name = signal.Signals(signum).name
        how = "killing all runs" if at_once else "runs stop at the end of their epochs"
        say(f"{name}: {how}")

    def refresh(self, active, results, todo):
        pass

    def close(self):
        pass


class Live:
    """The overview in a terminal: a table of what runs, redrawn in place."""

    def __init__(self, name, total):
        import rich.console
        import rich.live

        self.name, self.total = name, total
        self.console = rich.console.Console()
        # No refresh thread: the kernel ties a run's life to the thread that started it.
        self.live = rich.live.Live(console=self.console, auto_refresh=False)
        self.began = time.monotonic()
        self.footer = ""
        self.recent = []  # (result, epoch text, return, seconds) of runs that ended

    def open(self, results, todo):
        self.to_do = len(todo)
        self.live.start()

    def started(self, active):
        pass

    def ended(self, result, active, done):
        took = time.monotonic() - active.started if active else None
        epoch, ret = (progress_text(active), active.ret) if active else ("", None)
        self.recent.append((result, epoch, ret, took))

    def stopping(self, signum, at_once):
        self.footer = (
            "Stopping at once."
            if at_once
            else "Stopping: runs end with their current epochs. Once more stops them at once."
        )

    def refresh(self, active, results, todo):
        self.live.update(self.draw(active, results, todo), refresh=True)

    def short(self, run):
        """A run's name without the sweep's, cut on the left to what fits."""
        name, room = run.directory.name.removeprefix(f"{self.name}_"), self.console.width - 46
        return name if len(name) <= max(room, 12) else f"…{name[1 - max(room, 12) :]}"

    def draw(self, active, results, todo):
        import rich.box
        import rich.console
        import rich.progress_bar
        import rich.table
        import rich.text

        now = time.monotonic()
        room = max(3, self.console.height - 9)
        table = rich.table.Table(box=rich.box.SIMPLE_HEAD, pad_edge=False, expand=True)
        table.add_column("run", ratio=1, no_wrap=True, overflow="ellipsis")
        table.add_column("status", no_wrap=True)
        for heading in ("epoch", "return", "time", "left"):
            table.add_column(heading, justify="right", no_wrap=True)
        keep = max(0, room - len(active) - bool(todo))
        # Failures stay in sight; of the others the latest are shown.
        failed = [r for r in self.recent if r[0].outcome == "failed"][-max(1, keep // 2) :]
        others = [r for r in self.recent if r[0].outcome != "failed"]
        others = others[max(0, len(others) - max(0, keep - len(failed))) :]
        styles = {"finished": "green", "failed": "red", "interrupted": "yellow"}
        for result, epoch, ret, took in failed + others:
            style = styles.get(result.outcome, "")
            table.add_row(
                self.short(result.run),
                rich.text.Text(result.outcome, style=style),
                epoch,
                return_text(ret),
                clock(took),
                "",
            )
        for a in active[:room]:
            table.add_row(
                self.short(a.run),
                rich.text.Text("running", style="bold cyan"),
                progress_text(a),
                return_text(a.ret),
                clock(now - a.started),
                clock(a.seconds_left(now)),
            )
        if len(active) > room:
            table.add_row(f"... {len(active) - room} more running", *[""] * 5, style="dim")
        if todo:
            table.add_row(f"... {len(todo)} more to come", *[""] * 5, style="dim")

        # A run that is going counts for the part of it that is done.
        ended = len(results) - (self.total - self.to_do)
        parts = [
            (a.epoch - a.first_epoch) / max(1, (a.run.epochs or 1) - a.first_epoch) for a in active
        ]
        done = ended + sum(min(1.0, part) for part in parts)
        left = (now - self.began) * (self.to_do - done) / done if done > 0 else None
        words = f"{len(results)} of {self.total} runs   {clock(now - self.began)}"
        words += f"   about {clock(left)} left" if left and (active or todo) else ""
        bar = rich.progress_bar.ProgressBar(total=max(1, self.to_do), completed=done, width=24)
        head = rich.table.Table.grid(padding=(0, 2))
        head.add_row(rich.text.Text(self.name, style="bold"), bar, words)
        lines = [head, table]
        if self.footer:
            lines.append(rich.text.Text(self.footer, style="yellow"))
        lines.append(rich.text.Text(""))  # where the terminal puts its ^C
        return rich.console.Group(*lines)

    def close(self):
        self.live.stop()
