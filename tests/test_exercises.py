"""Exercises fit the scripts, their tests tell right from wrong, and wrong answers are explained;
experiments are judged by the learner's own runs."""

import ast
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import tomllib
from types import SimpleNamespace
from unittest import mock

import forked
import numpy as np
import pandas as pd
import pytest
from conftest import NO_TENSORFLOW, ROOT, processes, run, wait_for

sys.path.insert(0, str(ROOT / "exercises"))
import exercise as program
import experiment

from common import UsageError

ALL = program.exercises()
ANSWERS = tomllib.loads((ROOT / "tests" / "answers.toml").read_text())


def answered(exercise, answer, text=None):
    """An exercise's file, in a function to be written with an answer; a mistake stays in it."""
    line = rf'( *)raise NotImplementedError\("{program.TO_DO}"\)'
    text = program.unsolved(exercise, text)
    return re.sub(line, lambda found: textwrap.indent(answer.strip(), found[1]), text)


def judge(exercise, text, *tests, limit=600):
    with mock.patch.object(program, "run_for", forked.run_for):
        said = program.judge(exercise, text, tests or None, limit)
    if NO_TENSORFLOW and "needs TensorFlow" in (said or ""):
        pytest.skip("needs TensorFlow")
    return said


def test_exercises_fit_the_scripts():
    """Each changes its script into one that compiles; its tests, hints and place in the course are
    there."""
    tables = [ROOT / "exercises" / "exercises.toml", ROOT / "tests" / "bugs.toml"]
    fill_ins, bugs = (tomllib.loads(path.read_text()) for path in tables)
    assert len(ALL) == len(fill_ins["exercise"]) + sum("exercise" in bug for bug in bugs["bug"])
    course = (ROOT / "exercises" / "README.md").read_text()
    places = [course.find(f"| `{name}` |") for name in ALL]
    assert -1 not in places and places == sorted(places)
    for name, exercise in ALL.items():
        text = program.unsolved(exercise)
        compile(text, name, "exec")
        assert text != program.original(exercise) and len(exercise["hints"]) == 2
        assert exercise.get("source", "") if "old" in exercise else program.TO_DO in text
        for test in exercise["tests"]:
            path, _, function = test.partition("::")
            tree = ast.parse((ROOT / path).read_text())
            assert function.split("[")[0] in {getattr(node, "name", "") for node in tree.body}


@pytest.fixture
def learner(tmp_path, monkeypatch):
    """The program's `main`, with files in a folder of the test's own beside which is common/."""
    (tmp_path / "common").symlink_to(ROOT / "common")
    monkeypatch.setattr(program, "MINE", tmp_path / "my_exercises")
    return lambda words: program.main(words.split())


def test_a_learners_way(learner, capsys):
    """Start, a hint, a wrong answer, a right one, and an edit after it."""
    learner("start policy-gradient")
    path = program.solution("policy-gradient")
    stub = path.read_text()
    assert path.samefile(re.search(r"wrote (\S+):", capsys.readouterr().out)[1])
    with pytest.raises(SystemExit, match="2"):
        learner("start policy-gradient")
    said = capsys.readouterr()
    assert "exists" in said.err and path.read_text() == stub
    for hint in program.exercises()["policy-gradient"]["hints"]:
        learner("check policy-gradient --hint")
        assert capsys.readouterr().out.strip() == hint
    learner("check policy-gradient --hint")
    assert capsys.readouterr().out == f"{hint}\nThis was the last hint: there are two.\n"

    line = f'raise NotImplementedError("{program.TO_DO}")'
    path.write_text(stub.replace(line, "return logp.mul_(adv).mean()"))  # changes what it is given
    with pytest.raises(SystemExit, match="1"):
        learner("check policy-gradient --limit 600")
    said = capsys.readouterr().out
    assert "policy-gradient is not right yet" in said and "compute_loss_pi(logp=[" in said
    found, wanted = re.search(r"result is (\S+), should be (\S+)", said).groups()
    assert float(found) == -float(wanted) and "Traceback" not in said
    assert len(said.splitlines()) <= 4

    path.write_text(stub.replace(line, "return -(adv * logp).sum() / len(adv)"))
    learner("check policy-gradient --limit 600")
    assert capsys.readouterr().out == "policy-gradient is right.\n"
    learner("list")
    assert "done    policy-gradient " in capsys.readouterr().out
    path.write_text(path.read_text() + "\n")
    learner("list")
    assert "started policy-gradient " in capsys.readouterr().out


def test_a_bug_to_be_found(learner, capsys):
    """It is told by what the run prints, not by the line; and the curves of both are drawn."""
    exercise = ALL["bug-truncation"]
    learner("start bug-truncation")
    said = judge(exercise, program.solution("bug-truncation").read_text())
    assert " is " in said and ", should be " in said and len(said.splitlines()) <= 2
    assert exercise["new"] not in said and "finish_path" not in said
    exercise = {**exercise, "curve": "--env-id CartPole-v1 --epochs 2 --steps-per-epoch 200"}
    program.curve(exercise)
    with pytest.raises(UsageError, match="use check"):
        program.curve(ALL["bug-wrong-credit"])
    assert "this takes some seconds" in capsys.readouterr().out
    assert (program.MINE / "bug-truncation.png").stat().st_size > 10000


def test_files_that_cannot_run():
    """What is not written, no Python, raises an error, or never ends is met in one line or two."""
    exercise = ALL["policy-gradient"]
    stub = program.unsolved(exercise)
    line = f'raise NotImplementedError("{program.TO_DO}")'
    number = stub[: stub.index(line)].count("\n") + 1
    assert program.judge(exercise, stub) == f"Line {number} is still to be written."
    said = program.judge(exercise, stub.replace(line, "return (logp"))
    assert said == f"Line {number} is no Python: '(' was never closed."
    said = program.judge(exercise, "return 1")  # which Python parses, and does not compile
    assert said == "Line 1 is no Python: 'return' outside function."
    said = judge(exercise, stub.replace(line, "return logp @ advantages"))
    assert f"NameError: name 'advantages' is not defined (line {number})" in said
    assert len(said.splitlines()) == 2
    said = judge(exercise, stub.replace(line, "while True:\n        pass"), limit=12)
    assert said.startswith("Still running after 12 seconds")


@pytest.mark.parametrize("words", ["start nothing", "check gae", "curve gae", "start", "stop gae"])
def test_bad_commands(learner, words, capsys):
    """One line on stderr, or a box about a wrong word; exit code 2."""
    with pytest.raises(SystemExit, match="2"):
        learner(words)
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1 or "invalid choice 'stop'" in said
    assert ("such as rewards-to-go" in said) == (words == "start")


def test_a_file_that_is_not_utf_8(learner, capsys):
    """It is named with the line, and `list` goes on; a byte order mark is no part of the text."""
    learner("start gae")
    path = program.solution("gae")
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert program.read("gae") == program.unsolved(ALL["gae"])
    path.write_bytes(b"# Fran\xc3\xa7ois\n# Fran\xe7ois\n")
    with pytest.raises(SystemExit, match="2"):
        learner("check gae")
    assert f"line 2 of {path} is not UTF-8" in capsys.readouterr().err
    learner("list")
    assert "started gae " in capsys.readouterr().out


def test_what_is_nearly_right_is_said_to_be(monkeypatch, tmp_path):
    """And a test without a docstring, or an error without words, leaves no empty ones."""
    monkeypatch.setenv("EXERCISE", json.dumps(["vpg_torch", "", str(tmp_path / "report.txt")]))
    import explain

    right = np.array([1.0, -20.0])
    said = explain.difference("result", right + 0.003, right)
    assert said.endswith("(off by 0.003: rounding, or a slightly different formula)")
    assert "off by" not in explain.difference("result", right + 0.03, right)
    row = {"KL": 1.0, "Entropy": 2.0}
    with pytest.raises(AssertionError) as error:
        assert row == pytest.approx({**row, "KL": 1.0001})
    assert explain.said(error.value).startswith("KL is 1, should be 1.0001 (off by 0.0001: ")
    node = SimpleNamespace(name="test_x", function=lambda: 0)
    explain.pytest_exception_interact(node, SimpleNamespace(excinfo=error))
    assert (tmp_path / "report.txt").read_text().endswith("\nThe test, test_x, has failed.")


def test_ctrl_c_ends_the_runs(learner, tmp_path):
    learner("start bug-flat-return")
    source = f"""
import pathlib, signal, sys
sys.path.insert(0, {str(ROOT / "exercises")!r})
import exercise
exercise.MINE = pathlib.Path({str(tmp_path)!r}, "my_exercises")
signal.signal(signal.SIGINT, signal.default_int_handler)
table = exercise.exercises()
table["bug-flat-return"]["curve"] = "--env-id CartPole-v1 --epochs 100000 --steps-per-epoch 200"
exercise.exercises = lambda: table
exercise.main(["curve", "bug-flat-return"])"""
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    process = subprocess.Popen([sys.executable, "-c", source], env=env, stderr=subprocess.PIPE)
    wait_for(lambda: len(list(tmp_path.glob("*/*/*/config.json"))) == 2)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60)[1] == b"" and process.returncode == 130
    assert not processes(tmp_path)


def set_up(learner, name, values, **filled_in):
    """Start an experiment, fill in its file, and write finished runs whose columns have the values
    {setting: [one for each seed]}. Returns the runs."""
    learner(f"start {name}")
    fill_in(name, **filled_in)
    e = experiment.ALL[name]
    runs = experiment.plan(e, program.MINE / f"{name}-sweep.toml")
    for one in runs if values else []:
        one.directory.mkdir(parents=True)
        (one.directory / "config.json").write_text(json.dumps(one.fixed))
        status = {"status": "finished", "epoch": one.epochs}
        (one.directory / "status.json").write_text(json.dumps(status))
        x = values[experiment.word(one.fixed[e["setting"]])][one.fixed["seed"]]
        rows = [dict.fromkeys(e["columns"], -9e9)] * (one.epochs - e["last"])
        rows += [dict.fromkeys(e["columns"], x)] * e["last"]
        pd.DataFrame(rows).to_csv(one.directory / "progress.txt", sep="\t", index=False)
    return runs


def fill_in(name, **words):
    path = program.solution(name)
    for key, word in words.items():
        text, found = re.subn(rf"(?m)^{key} = .*", f"{key} = {word!r}", path.read_text())
        assert path.write_text(text) and found == 1


def checked(learner, capsys, name, code):
    """What `check` says, which has to end with an exit code."""
    capsys.readouterr()
    with pytest.raises(SystemExit, match=str(code)) if code else contextlib.nullcontext():
        learner(f"check {name}")
    return "".join(capsys.readouterr())


EXPECTED = {name: e["expected"] for name, e in experiment.ALL.items() if "choices" in e}


def test_experiments_fit_the_scripts(learner, capsys):
    """Their sweeps can be run and vary the setting; each is in the course and in the list."""
    learner("list")
    listed, course = capsys.readouterr().out, (ROOT / "exercises" / "README.md").read_text()
    for name, e in experiment.ALL.items():
        assert f" {name} " in listed and f"| `{name}` |" in course
        assert name not in ALL and len(e["hints"]) == 2 and e["asked"] and e["told"]
        if "sweep" in e:
            runs = set_up(learner, name, None)
            settings = {experiment.word(one.fixed[e["setting"]]) for one in runs}
            assert settings >= {*e.get("choices", [e.get("at")])} and len(settings) == 3
            assert f"grid.py my_exercises/{name}-sweep.toml" in e["question"]


def test_an_experiment_from_prediction_to_answer(learner, capsys):
    """Each step is asked for in turn; all runs have to be there, finished, and of the sweep."""
    values = {"0.05": [30, 31, 32], "0.2": [99, 90, 95], "5": [70, 60, 50]}
    runs = set_up(learner, "clip-ratio", values)
    assert "Write down your prediction first: 0.05 or 0.2 or 5." in checked(
        learner, capsys, "clip-ratio", 1
    )
    fill_in("clip-ratio", prediction="50")
    assert "prediction first" in checked(learner, capsys, "clip-ratio", 1)
    fill_in("clip-ratio", prediction=5.0)  # a number will do
    said = checked(learner, capsys, "clip-ratio", 1)
    assert said.endswith("Write down your answer: 0.05 or 0.2 or 5.\n") and "KL" not in said

    fill_in("clip-ratio", answer="5")
    said = checked(learner, capsys, "clip-ratio", 1)
    assert "not right yet" in said and "5 is not the clip ratio with the lowest" in said
    assert re.search(r"0\.2 +94\.7 .* 99 90 95\n", said)
    learner("list")
    assert "started clip-ratio " in capsys.readouterr().out
    fill_in("clip-ratio", answer="0.05")
    said = checked(learner, capsys, "clip-ratio", 0)
    assert "clip-ratio is right.\n" in said and "You predicted 5.\n" in said
    assert experiment.ALL["clip-ratio"]["told"].strip() in said
    learner("list")
    assert "done    clip-ratio " in capsys.readouterr().out

    config, status, table = (
        runs[4].directory / file for file in ("config.json", "status.json", "progress.txt")
    )
    for path, old, new, code, message in [
        (config, '"pi_lr": 0.0003', '"pi_lr": 0.001', 1, "pi_lr was 0.001, is 0.0003"),
        (config, '"seed": 1', '"seed": 2', 1, "seed was 2, is 1"),
        (status, "finished", "interrupted", 1, "1 of 9 runs are not finished"),
        (status, '"epoch": 12', '"epoch": 11', 1, "clip-ratio_cli0-2_s1"),
        (table, "90", "word", 2, "progress.txt is damaged"),
        (table, "KL", "LK", 2, "progress.txt is damaged"),
    ]:
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))
        assert message in checked(learner, capsys, "clip-ratio", code)
        path.write_text(text)
    lines = table.read_text().splitlines(keepends=True)
    table.write_text("".join(lines[:-1]))
    assert "progress.txt is damaged" in checked(learner, capsys, "clip-ratio", 2)
    table.unlink()
    assert "progress.txt is damaged" in checked(learner, capsys, "clip-ratio", 2)


@pytest.mark.parametrize(
    "old, new, message",
    [
        ("epochs = 12", "epochs = 2", "only workers may change, and seeds (at least 3)"),
        ("seed = [0, 1, 2]", "seed = [0, 1]", "only workers may change, and seeds (at least 3)"),
        ("seed = [0, 1, 2]", "seed = 0", "only workers may change, and seeds (at least 3)"),
        ("[params]", "datestamp = true\n[params]", "only workers may change"),
        ("[params]", "[params", "clip-ratio-sweep.toml: "),
        ("[params]", "[slurm]", "only workers may change"),
        ("workers = 2\n", "", ""),
        ("seed = [0, 1, 2]", "seed = [2, 1, 0]", ""),
    ],
)
def test_what_may_change_in_a_sweep(learner, capsys, old, new, message):
    values = {"0.05": [30, 31, 32], "0.2": [99, 90, 95], "5": [70, 60, 50]}
    set_up(learner, "clip-ratio", values, prediction="5", answer="0.05")
    path = program.MINE / "clip-ratio-sweep.toml"
    path.write_text(path.read_text().replace(old, new, 1))
    assert message in checked(learner, capsys, "clip-ratio", 2 if message else 0)
    program.solution("clip-ratio").rename(program.MINE / "kept")
    with pytest.raises(SystemExit, match="2"):
        learner("start clip-ratio")
    assert "clip-ratio-sweep.toml exists; to start again" in capsys.readouterr().err
    (program.MINE / "kept").rename(program.solution("clip-ratio"))
    path.unlink()
    assert f"{path}: No such file" in checked(learner, capsys, "clip-ratio", 2)


@pytest.mark.parametrize("name", EXPECTED)
def test_the_lowest_of_the_learners_own_runs_is_right(learner, capsys, name):
    """Whatever ours have; what contradicts them is told, and so is what decides nothing."""
    low, *others = sorted(experiment.ALL[name]["choices"], key=lambda x: x != EXPECTED[name])
    values = {low: [1, 2, 3], others[0]: [7, 8, 9], others[1]: [4, 3.5, 6]}
    runs = set_up(learner, name, values, prediction=low, answer=low)
    assert experiment.ALL[name]["told"].strip() in checked(learner, capsys, name, 0)
    fill_in(name, answer=others[0])
    assert "is not the" in checked(learner, capsys, name, 1)
    for setting, change, code in [(others[0], -20, 0), (others[0], 15, 1)]:
        for one in runs:
            path = one.directory / "progress.txt"
            if experiment.word(one.fixed[experiment.ALL[name]["setting"]]) == setting:
                (pd.read_csv(path, sep="\t") + change).to_csv(path, sep="\t", index=False)
        said = checked(learner, capsys, name, code)
        if change < 0:
            assert f"contradict ours, where it is {low}" in said
            assert experiment.ALL[name]["told"].strip() not in said
        else:  # 2, 3 and 4 against 1, 2 and 3
            assert "The runs do not decide it" in said


def test_a_number_is_right_within_its_tolerance(learner, capsys):
    values = {"0": [15, 15], "0.2": [1.2, 1.1], "auto": [0.9, 1.1]}
    set_up(learner, "temperature", values, prediction="-1")
    for answer, code in [("1.1", 0), ("0.9", 0), ("1.3", 1), ("-1", 1), ("one", 1), ("", 1)]:
        fill_in("temperature", answer=answer)
        said = checked(learner, capsys, "temperature", code)
        assert ("You predicted -1." in said) == (code == 0)
        assert ("Write down your answer: a number." in said) == (answer in ("one", ""))
    program.solution("temperature").write_text("prediction = minus one")
    assert "temperature.toml: " in checked(learner, capsys, "temperature", 2)


def test_one_seed_against_ten(learner, capsys):
    """The share is that of a plain count in the recorded curves."""
    results = ROOT / "benchmark" / "results"
    curves, returns = pd.read_csv(results / "curves.csv"), {}
    for algorithm in ("ppo", "trpo"):
        names = [f"{algorithm}_torch_Hopper-v4_s{seed}" for seed in range(10)]
        rows = curves[curves.steps > 900000]
        returns[algorithm] = [rows[rows.run == name]["return"].mean() for name in names]
    count = sum(trpo > ppo for trpo in returns["trpo"] for ppo in returns["ppo"])
    learner("start one-seed")
    for prediction, answer, code in [("", "", 1), ("5", "", 1), ("5", "50", 1), ("5", count, 0)]:
        fill_in("one-seed", prediction=prediction, answer=str(answer))
        said = checked(learner, capsys, "one-seed", code)
    assert f"1: {count}.0 %" in said and experiment.ALL["one-seed"]["told"].strip() in said
    assert experiment.share([1, 2, 3, 4], [2.5, 2.5, 2.5], 3) == 50  # 2, 7/3, 8/3 and 3


@pytest.mark.slow
def test_an_experiment_comes_out_as_it_says(learner, tmp_path, capsys):
    learner("start clip-ratio")
    command = re.search(r"python (\S+ \S+)", capsys.readouterr().out)[1].split()
    run(ROOT / command[0], *command[1:], cwd=tmp_path, timeout=1200)
    fill_in("clip-ratio", prediction="5", answer="0.05")
    said = checked(learner, capsys, "clip-ratio", 0)
    assert experiment.ALL["clip-ratio"]["told"].strip() in said


RIGHT = {e["script"]: {} for e in ALL.values()}  # {script: {name of an exercise: right answers}}
for name, answers in ANSWERS.items():
    RIGHT[ALL[name]["script"]][name] = answers["right"]
TURNS = {script: max([1, *map(len, answers.values())]) for script, answers in RIGHT.items()}


@pytest.mark.slow
@pytest.mark.parametrize("script, turn", [(s, i) for s, n in TURNS.items() for i in range(n)])
def test_right_answers_are_right_however_they_are_written(script, turn):
    """One to each exercise of a script, all in one file; the next ones in the next turn. Where a
    bug is to be found, the answer is the script as it is."""
    exercises = [exercise for exercise in ALL.values() if exercise["script"] == script]
    text = program.original(exercises[0])
    for name, answers in RIGHT[script].items():
        text = answered(ALL[name], answers[turn % len(answers)], text)
    tests = dict.fromkeys(test for exercise in exercises for test in exercise["tests"])
    assert judge(exercises[0], text, *tests) is None


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_usual_mistakes_are_told(name):
    """In two or three lines; also where the missing part is left out without an error. One of each;
    ALL_ANSWERS=1 in the environment tries all, in a quarter of an hour."""
    wrong = ANSWERS.get(name, {"wrong": []})["wrong"]
    for answer in [*(wrong if "ALL_ANSWERS" in os.environ else wrong[:1]), "pass"]:
        said = judge(ALL[name], answered(ALL[name], answer)) or ""
        assert len(said.splitlines()) in (2, 3), f"{said}\n{answer}"
        assert not said.startswith(("No test ran", "Still running", "Line")), answer


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, old, new",
    [
        ("sac-policy", "np.exp(log_std.clip(-20, 2))", "np.exp(log_std.clip(-20, 1))"),
        ("finish-path", ".clip(space.low, space.high)", ""),
        ("alpha", "buf.store(o, a, r, o2, terminated)", "buf.store(o, a, r, o2, truncated)"),
        ("kl-divergence", "next_ret = rew[t] + gamma * next_ret", "next_ret = rew[t] + next_ret"),
    ],
)
def test_a_mistake_in_another_part_of_the_file_is_caught(name, old, new):
    text = program.original(ALL[name])
    assert text.count(old) == 1 and judge(ALL[name], text.replace(old, new))


@pytest.mark.slow
def test_training_after_the_tests(learner, capsys):
    learner("start policy-gradient")
    program.solution("policy-gradient").write_text(program.original(ALL["policy-gradient"]))
    learner("check policy-gradient --train --limit 600")
    assert "It has solved CartPole-v1." in capsys.readouterr().out
