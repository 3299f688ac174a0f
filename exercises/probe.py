"""Run a script on the probes that fit it, and say which answers differ from those of theory.

    python exercises/exercise.py probe my_project/ppo_torch.py
    python exercises/probe.py my_project/ppo_torch.py Two Acts    # those whose names begin so

probes.toml has the probes. The answers are read from what runs leave, progress.txt and policy.npz,
so a script that was changed needs nothing else. The exit code is 1 if an answer is wrong.
"""

import contextlib
import importlib
import json
import os
import re
import resource
import runpy
import signal
import sys
import tempfile
import tomllib
import traceback
import warnings
from pathlib import Path

import numpy as np
import pandas as pd

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
from benchmark.test_policy import load_policy
from common import UsageError
from common.mpi import cores, find_mpirun

TABLE = tomllib.loads((HERE / "probes.toml").read_text())
LIMIT = 60  # seconds of a core that a run may take
TOO_SLOW = signal.SIGKILL, signal.SIGXCPU  # what ends it after these
NO_REASON = "Abort(", "For full helptext"  # what mpirun's and tyro's last lines begin with
VALUES = ("VVals", "QVals", "Q1Vals", "Q2Vals")


def probes_for(text, names=()):
    """The probes that fit a script: {label: (probe, words of the command line)}.

    Args:
        text: the script's.
        names: beginnings of the labels that are wanted; all if empty.
    """
    arguments = set(re.findall(r"^    (\w+): ", text, flags=re.M))
    family, fitting = "off" if "polyak" in arguments else "on", {}
    if not arguments & {"lam", "polyak"}:  # of neither family
        return fitting
    for probe in TABLE["probe"]:
        needs, own = probe.get("needs", {}), probe.get("flags", {}).get(family, {})
        fits = probe.get("for", family) == family and probe.get("has", "") in text
        if not fits or not needs.keys() <= arguments:
            continue
        for kind in probe.get("actions", ["Box"]):
            label = probe["name"] + f" {kind}" * (kind != "Box")
            if kind not in text or not label.startswith(tuple(names) or ""):
                continue
            flags = {**TABLE["flags"], **TABLE[family], **own, **needs}
            kwargs = {**probe.get("env_kwargs", {}), "discrete": kind != "Box"}
            flags |= {"env_id": f"probes:{probe.get('env', probe['name'])}-v0"}
            flags |= {"env_kwargs": json.dumps(kwargs)}
            words = [word for key in flags.keys() & arguments for word in to_words(key, flags[key])]
            fitting[label] = {"family": family, **probe}, words
    return fitting


def to_words(name, x):
    """A flag and its value as words of a command line."""
    name = name.replace("_", "-")
    if isinstance(x, bool):
        return [f"--{name}" if x else f"--no-{name}"]
    return [f"--{name}", *map(str, x if isinstance(x, list) else [x])]


# Runs ---------------------------------------------------------------------------------------------


def run_all(script, probes, folder):
    """Run a script on `probes`, as `probes_for` returns them, as many at once as there are cores.

    To load the libraries takes longer than most runs. So this process loads them, once, and each
    run is a fork of it.

    Yields:
        (label, exit code), in the order in which the runs end; each has left `folder`/label.
    """
    preload(script.read_text("utf-8"))
    warnings.filterwarnings("ignore", ".*use of fork", DeprecationWarning)  # no thread is at work
    running, waiting = {}, list(probes.items())
    try:
        while waiting or running:
            while waiting and len(running) < cores():
                label, (probe, words) = waiting.pop(0)
                words = [str(script), *words, "--data-dir", str(folder), "--exp-name", label]
                if (pid := os.fork()) == 0:
                    run_here(words, probe.get("ranks", 1), folder / f"{label}.txt")
                running[pid] = label
            pid, status = os.wait()
            yield running.pop(pid), os.waitstatus_to_exitcode(status)
    finally:
        for pid in running:
            os.kill(pid, signal.SIGKILL)


def preload(text):
    """Load what a script will need."""
    os.environ |= {"TF_CPP_MIN_LOG_LEVEL": "3", "GOMP_SPINCOUNT": "3000", "COLUMNS": "1000"}
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    framework = "torch" if re.search("^import torch", text, flags=re.M) else "tensorflow.compat.v1"
    stderr = os.dup(2)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # TensorFlow writes to it as it loads
    for name in ("probes", "tensorboard.summary.writer.record_writer", framework):
        with contextlib.suppress(Exception):  # the script says what is missing
            importlib.import_module(name)
    os.dup2(stderr, 2)


def run_here(words, ranks, output):
    """Turn this process into a run of a script, with its output in a file."""
    try:
        resource.setrlimit(resource.RLIMIT_CPU, (LIMIT, LIMIT))
        for stream in (1, 2):
            os.dup2(os.open(output, os.O_CREAT | os.O_APPEND | os.O_WRONLY), stream)
        if ranks > 1:
            mpirun = find_mpirun()  # MPICH finds its own programs by this path
            os.execv(mpirun, [mpirun, "-np", str(ranks), sys.executable, *words])
        for name in [name for name in sys.modules if name.partition(".")[0] == "common"]:
            del sys.modules[name]  # the script may have one of its own
        sys.argv, sys.path[:1] = words, [os.path.dirname(words[0]), str(HERE)]
        runpy.run_path(words[0], run_name="__main__")
        os._exit(0)
    except SystemExit as e:
        if isinstance(e.code, str):  # sys.exit("why")
            print(e.code, file=sys.stderr)
        sys.stdout.flush()
        os._exit(e.code if isinstance(e.code, int) else int(e.code is not None))
    except BaseException:
        traceback.print_exc()
        os._exit(1)


# Answers ------------------------------------------------------------------------------------------


def found(directory, what, discrete):
    """What a run says about `what`, see probes.toml: {name: number or array}."""
    table = pd.read_csv(directory / "progress.txt", sep="\t")
    first, _, rest = what.partition(" ")
    if first == "action":
        act = load_policy(directory, deterministic=True)
        return {what: np.float64(act(json.loads(f"[{rest}]"))) - discrete}  # 0, 1, 2: -1, 0, 1
    columns = [x for x in VALUES if f"Average{x}" in table]
    if what == "rise value":
        values = table[[f"Average{x}" for x in columns]].mean(axis=1)
        return {"the mean of the values": values.iloc[-1] - values.iloc[0]}
    if rest == "value":
        return {first + x: table[first + x].iloc[-1] for x in columns}
    if rest:
        return {what: table[rest].agg(first)} if rest in table else {}
    return {what: table[what].iloc[-1]} if what in table else {}


def wrong_answers(probe, directory, discrete):
    """[(what is wrong, where to look), ...] of a run that has ended well."""
    wrong, seen = [], False
    for answer in probe["answer"]:
        if answer.get("for", probe["family"]) != probe["family"]:
            continue
        for name, x in found(directory, answer["what"], discrete).items():
            seen = True
            goal, within = np.float64(answer.get("is", 0)), answer.get("within", np.inf)
            goal = np.sign(goal) if discrete and "action" in name else goal
            low, high = answer.get("above", goal - within), answer.get("below", goal + within)
            if not (np.all(low <= x) and np.all(x <= high)):
                should = [f"{key} {answer[key]}" for key in ("above", "below") if key in answer]
                should = should or [f"{goal}, up to {within}"]
                look = answer["look"]
                look = look if isinstance(look, str) else look[probe["family"]]
                wrong.append((f"{name} is {np.round(x, 5)}, should be {should[0]}", look))
    if not seen:
        wrong = [("progress.txt has none of its columns", "the calls of logger.log_tabular")]
    return wrong


def main(script="", *names):
    """Probe a script, print a line for each probe; returns the exit code."""
    script = Path(script).resolve()
    try:
        compile(script.read_bytes(), script, "exec")
    except (OSError, SyntaxError, ValueError) as e:
        print(f"probe.py: {script.name} cannot be run: {e}", file=sys.stderr)
        return 2
    probes, failed = probes_for(script.read_text("utf-8"), names), 0
    if not probes:
        print(f"probe.py: no probe fits {' '.join([script.name, *names])}", file=sys.stderr)
        return 2
    if not find_mpirun():
        print("there is no mpirun: the probes of several ranks are left out")
        probes = {label: x for label, x in probes.items() if "ranks" not in x[0]}
    with tempfile.TemporaryDirectory() as folder:
        ended, codes = run_all(script, probes, Path(folder)), {}
        for label in probes:  # in their order, since each needs those before it
            while label not in codes:
                codes |= [next(ended)]
            code, table = codes[label], next(Path(folder, label).glob("*/progress.txt"), None)
            if code or not table:
                lines = Path(folder, f"{label}.txt").read_text().splitlines()
                lines = [x.strip("│ ") for x in lines if re.search(r"\w", x)]  # without tyro's box
                said = [x for x in lines if not x.startswith(NO_REASON)] or ["nothing"]
                why = f"ended with code {code}" + ", without a progress.txt" * (not code)
                why = f"took {LIMIT} seconds" if -code in TOO_SLOW else why
                wrong = [(f"the run {why}", f"its last line, {said[-1]}")]
            else:
                try:
                    wrong = wrong_answers(probes[label][0], table.parent, "Discrete" in label)
                except UsageError as e:
                    wrong = [(str(e), "the policy that save_state gets")]
            failed += bool(wrong)
            print(f"{label:22} {'WRONG' if wrong else 'ok'}", flush=True)
            for what, look in wrong:
                print(f"    {what}\n    look at {look}", flush=True)
    print(f"{len(probes) - failed} of {len(probes)} probes are right")
    return int(failed > 0)


if __name__ == "__main__":
    try:
        sys.exit(main(*sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
