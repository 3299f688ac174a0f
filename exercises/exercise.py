"""Exercises: write a function of an algorithm, find the one mistake in a script, or experiment.

    python exercises/exercise.py                   list them: what is done, what is next
    python exercises/exercise.py start gae         write my_exercises/gae.py, to be completed
    python exercises/exercise.py check gae         run the project's tests on it, in seconds
    python exercises/exercise.py check gae --train train it on a small task after that
    python exercises/exercise.py check gae --hint  a hint; the next time, a second one
    python exercises/exercise.py curve bug-truncation  train original and yours, draw both
    python exercises/exercise.py start clip-ratio  write a question and a sweep that answers it
    python exercises/exercise.py probe my_project/ppo_torch.py  run any script on tiny tasks

README.md beside this file has the course. The exercises are made from the scripts in algos/ when
they are started: exercises.toml says which functions are taken out, and tests/bugs.toml which lines
are changed. The solutions are the scripts. Experiments are in experiment.py.
"""

import ast
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Literal

import psutil
from pydantic.dataclasses import dataclass
from tyro.conf import Positional

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "exercises")]
import experiment

from common import UsageError
from common.args import PosInt, parse_args
from common.files import write_atomically

MINE = ROOT / "my_exercises"
ALGORITHMS = ["vpg", "ppo", "trpo", "ddpg", "td3", "sac"]  # the order of the course
ON_POLICY = ("vpg", "ppo", "trpo")
TO_DO = "your code goes here"
# What every answer has to pass after its own tests: no other part of the script may have changed.
WHOLE = [
    "tests/test_actors.py::test_numpy_acts_as_the_framework[{}]",
    "tests/test_actors.py::test_to_env[{}]",
    "tests/test_replay.py::test_one_rank[{}-False]",
]


@dataclass
class Args:
    command: Positional[Literal["list", "start", "check", "curve", "probe"]] = "list"  # what to do
    name: Positional[str] = ""  # an exercise; probe: a script
    hint: bool = False  # check: give a hint in place of running the tests
    train: bool = False  # check: after an exercise's tests, train on a small task
    limit: PosInt = 120  # check: seconds after which the tests are stopped


# The exercises ------------------------------------------------------------------------------------


def exercises():
    """{name: exercise} in the order of the course. An exercise is a dict:

    name, script, about, minutes, hints [2], tests [...]; of functions to be written `function` and
    perhaps `statement`, see exercises.toml; of bugs what bugs.toml says.
    """
    found = tomllib.loads((ROOT / "exercises" / "exercises.toml").read_text())["exercise"]
    for bug in tomllib.loads((ROOT / "tests" / "bugs.toml").read_text())["bug"]:
        if "exercise" in bug:
            scripts = [Path(file).stem for file in bug["files"]]
            script = next((s for s in scripts if s in bug["test"]), scripts[0])
            more = {"name": bug["exercise"], "script": script, "tests": [bug["test"]]}
            more |= {"hints": [bug["seen"], bug["hint"]], "minutes": 20}
            found.append({**bug, **more, "about": "find what is wrong"})
    for e in found:
        e["tests"] += [x for test in WHOLE if (x := test.format(e["script"])) not in e["tests"]]
    found.sort(key=lambda e: (ALGORITHMS.index(e["script"].split("_")[0]), "old" in e))
    return {e["name"]: e for e in found}


def everything():
    """All exercises and, after them, all experiments: {name: dict}."""
    return exercises() | experiment.ALL


def original(exercise):
    return (ROOT / "algos" / f"{exercise['script']}.py").read_text()


def unsolved(exercise, text=None):
    """The script, or a version of it, as the learner gets it; an error if it does not fit."""
    text = text or original(exercise)
    if "old" in exercise:
        for old, new in [(exercise["old"], exercise["new"]), *exercise.get("also", [])]:
            assert text.count(old) == 1, f"{exercise['name']}: {old}"
            text = text.replace(old, new)
        return text
    lines, node = text.splitlines(keepends=True), ast.parse(text)
    for name in exercise["function"].split("."):
        (node,) = [n for n in ast.walk(node) if getattr(n, "name", None) == name]
    docstring, *_, last = node.body
    start, end, indent = docstring.end_lineno, last.end_lineno, last.col_offset
    if "statement" in exercise:
        nodes = [n for n in ast.walk(node) if isinstance(n, ast.stmt)]
        begins = exercise["statement"]
        (node,) = [n for n in nodes if lines[n.lineno - 1].strip().startswith(begins)]
        start, end, indent = node.lineno - 1, node.end_lineno, node.col_offset
    lines[start:end] = [f'{" " * indent}raise NotImplementedError("{TO_DO}")\n']
    return "".join(lines)


def line_to_do(text):
    return text[: text.index(TO_DO)].count("\n") + 1


# The tests ----------------------------------------------------------------------------------------


def judge(exercise, text, tests=None, limit=120):
    """Run an exercise's tests, or others, on a solution, `text`.

    Returns None if it is right, and otherwise why not, in a few lines.
    """
    try:
        compile(text, exercise["name"], "exec")
    except SyntaxError as e:
        return f"Line {e.lineno} is no Python: {e.msg}."
    if TO_DO in text:
        return f"Line {line_to_do(text)} is still to be written."
    with tempfile.TemporaryDirectory() as folder:
        copy, report = Path(folder, "copy"), Path(folder, "report.txt")
        left_out = shutil.ignore_patterns("results", "reference", "__pycache__")
        for part in ("algos", "benchmark", "common", "exercises", "tests"):
            shutil.copytree(ROOT / part, copy / part, ignore=left_out)
        shutil.copy(ROOT / "pyproject.toml", copy)
        (copy / "algos" / "original.py").write_text(original(exercise))
        (copy / "algos" / f"{exercise['script']}.py").write_text(text, "utf-8")
        note = [exercise["script"], exercise.get("function", ""), str(report)]
        env = {**os.environ, "PYTHONPATH": "exercises", "EXERCISE": json.dumps(note)}
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-m", "", "--tb=no"]
        command += ["-p", "explain", "-p", "no:cacheprovider", f"--basetemp={folder}/tmp"]
        command += ["-o", f"faulthandler_timeout={0.5 * limit}", *(tests or exercise["tests"])]
        code, output = run_for(command, limit, cwd=copy, env=env)
        if code == 0 and " passed" in output:
            return None
        if code is None:
            where = re.search(rf'{exercise["script"]}\.py", line ([0-9]+) in (\w+)', output)
            where = f" in line {where[1]}, in {where[2]}" if where else ""
            told = f"Still running after {limit} seconds{where}. Is there an endless loop?"
            return f"{told} On a busy machine, try --limit {5 * limit}."
        if "needs TensorFlow" in output:
            return "The test needs TensorFlow: `pip install -r requirements.txt` installs it."
        return report.read_text() if report.exists() else f"No test ran:\n{output[-2000:]}"


def run_for(command, limit, **options):
    """Run a program. Returns (code, output); code is None if it was killed for its time."""
    options |= {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, **options) as process:
        try:
            output, _ = process.communicate(timeout=limit)
            return process.returncode, output
        except subprocess.TimeoutExpired:
            for child in (*psutil.Process(process.pid).children(recursive=True), process):
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
            return None, process.communicate()[0]


# What the learner has done ------------------------------------------------------------------------


def records(name=None, **changes):
    """my_exercises/.progress.json: {name: {"done": what was right, "hints": how many}}."""
    path = MINE / ".progress.json"
    found = json.loads(path.read_text()) if path.exists() else {}
    if name:
        found.setdefault(name, {}).update(changes)
        write_atomically(path, lambda f: f.write(json.dumps(found, indent=1).encode()))
    return found


def solution(name):
    """The learner's file of an exercise."""
    return MINE / f"{name}{'.toml' if name in experiment.ALL else '.py'}"


def read(name):
    """The text of the learner's file; an error if it is not UTF-8, with or without a BOM."""
    try:
        return solution(name).read_text("utf-8-sig")
    except UnicodeDecodeError as e:
        line = e.object[: e.start].count(b"\n") + 1
        path = shown(solution(name))
        raise UsageError(f"line {line} of {path} is not UTF-8; save the file as UTF-8") from None


def state(name):
    """Whether an exercise is "done", as its file is now, "started", or ""."""
    if not solution(name).exists():
        return ""
    text = solution(name).read_text("utf-8-sig", errors="replace")
    return "done" if records().get(name, {}).get("done") == text else "started"


def following():
    """The name of the first exercise that is not done, or None."""
    return next((name for name in everything() if state(name) != "done"), None)


def shown(path):
    """A path as the learner can use it: relative only if it is below the working directory."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


# Commands -----------------------------------------------------------------------------------------


def show_list():
    algorithm = None
    for name, exercise in everything().items():
        if (now := exercise.get("script", "experiments").split("_")[0]) != algorithm:
            algorithm = now
            print(f"\n{algorithm.upper()}")
        print(f"  {state(name):8}{name:22} {exercise['minutes']:2} min  {exercise['about']}")
    name = following()
    step = "check" if name and state(name) else "start"
    print(f"\nNext: python {sys.argv[0]} {step} {name}" if name else "\nAll done.")


def start(exercise):
    path = solution(exercise["name"])
    sweep = path.with_name(f"{path.stem}-sweep.toml")
    for file in (path, sweep):
        if file.exists():
            raise UsageError(f"{shown(file)} exists; to start again, delete it first")
    MINE.mkdir(exist_ok=True)
    if "question" in exercise:
        path.write_text(exercise["question"], "utf-8")
        print(f"wrote {shown(path)}: a question. Write your prediction there first.")
        if "sweep" in exercise:
            sweep.write_text(exercise["sweep"], "utf-8")
            print(f"Then train on two cores for {exercise['training']} min, in the project's root:")
            print(f"    python benchmark/grid.py my_exercises/{sweep.name}")
        return
    text = unsolved(exercise)
    path.write_text(text, "utf-8")
    print(f"wrote {shown(path)}: algos/{exercise['script']}.py, ", end="")
    if "old" in exercise:
        print("with one mistake in it. `curve` shows what it does to a run, `check --hint` helps.")
    else:
        print(f"with line {line_to_do(text)} still to be written: {exercise['about']}.")


def check(exercise, train, limit):
    """Judge the learner's file; returns whether it is right."""
    name, text = exercise["name"], read(exercise["name"])
    if name in experiment.ALL:
        right, said = experiment.judge(exercise, text, shown(MINE / f"{name}-sweep.toml"))
        print(f"{name} is {'right' if right else 'not right yet'}.\n{said}")
        if right:
            records(name, done=text)
        return right
    if wrong := judge(exercise, text, limit=limit):
        print(f"{name} is not right yet.\n{wrong}")
        return False
    records(name, done=text)
    print(f"{name} is right.")
    if not train:
        return True
    test, task = "tests/test_off_policy.py::test_learns_pendulum[{}]", "Pendulum-v1"
    if exercise["script"].startswith(ON_POLICY):
        test, task = "tests/test_on_policy.py::test_learns[{}-CartPole-v1]", "CartPole-v1"
    print(f"Training on {task}, which takes about a minute ...", flush=True)
    wrong = judge(exercise, text, [test.format(exercise["script"])], limit=10 * limit)
    print(f"It has not solved {task}.\n{wrong}" if wrong else f"It has solved {task}.")
    return not wrong


def hint(exercise):
    given = records().get(exercise["name"], {}).get("hints", 0)
    last = "\nThis was the last hint: there are two."
    print(exercise["hints"][min(given, 1)] + last * (given > 1))
    records(exercise["name"], hints=given + 1)


def curve(exercise):
    """Train the original and the learner's file at the same time, and draw both."""
    from benchmark.plot import make_plots

    name, processes = exercise["name"], []
    if "curve" not in exercise:
        raise UsageError(f"{name} has no curve that would show anything; use check")
    flags, columns = exercise["curve"].split(), exercise.get("columns", [])
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    scripts = {"original": ROOT / "algos" / f"{exercise['script']}.py", "yours": solution(name)}
    takes = "some seconds" if exercise["script"].startswith(ON_POLICY) else "a minute or two"
    with tempfile.TemporaryDirectory() as folder:
        print(f"Training both: {' '.join(flags)}; this takes {takes} ...", flush=True)
        try:
            for i, (label, script) in enumerate(scripts.items()):
                words = [sys.executable, script, *flags, "--data-dir", folder, "--exp-name", label]
                processes.append(subprocess.Popen(words, stdout=subprocess.DEVNULL))
                if cores:  # one thread each, and a core if there are two
                    os.sched_setaffinity(processes[-1].pid, {cores[i % len(cores)]})
            if sum(process.wait() for process in processes):
                raise UsageError("a run has failed; its message is above")
        finally:
            for process in processes:  # they have ended, or Ctrl-C was pressed
                process.kill()
                process.wait()
        picture, folders = MINE / f"{name}.png", [f"{folder}/{label}" for label in scripts]
        make_plots(folders, legend=(*scripts,), value=("Performance", *columns), out=str(picture))
    print(f"wrote {shown(picture)}")


def main(argv=None):
    try:
        args = parse_args(Args, argv)
        if args.command == "list":
            return show_list()
        if not args.name:
            such = "algos/ppo_torch.py" if args.command == "probe" else following() or "gae"
            raise UsageError(f"{args.command} needs a name, such as {such}")
        if args.command == "probe":  # in a program of its own, which has loaded no common/
            sys.exit(subprocess.call([sys.executable, ROOT / "exercises" / "probe.py", args.name]))
        if args.name not in (known := everything()):
            raise UsageError(f"no exercise is called {args.name}; `list` names them")
        exercise = known[args.name]
        if args.command == "start":
            return start(exercise)
        if not solution(args.name).exists():
            raise UsageError(f"start it first: python {sys.argv[0]} start {args.name}")
        if args.command == "curve":
            curve(exercise)
        elif args.hint:
            hint(exercise)
        elif not check(exercise, args.train, args.limit):
            sys.exit(1)
    except UsageError as e:
        print(f"exercise.py: {e}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends this program without a word
    main()
