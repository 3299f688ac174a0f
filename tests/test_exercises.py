"""Exercises fit the scripts, their tests tell right from wrong, and wrong answers are explained."""

import ast
import os
import re
import signal
import subprocess
import sys
import tomllib

import pytest
from conftest import NO_TENSORFLOW, ROOT, processes, wait_for

sys.path.insert(0, str(ROOT / "exercises"))
import exercise as program

ALL = program.exercises()


def judge(exercise, text, *tests, limit=600):
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
    with pytest.raises(SystemExit, match="2"):
        learner("start policy-gradient")
    said = capsys.readouterr()
    assert "exists" in said.err and path.read_text() == stub
    for hint in program.exercises()["policy-gradient"]["hints"]:
        learner("check policy-gradient --hint")
        assert capsys.readouterr().out.strip() == hint

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
    said = judge(exercise, stub.replace(line, "return logp @ advantages"))
    assert f"NameError: name 'advantages' is not defined (line {number})" in said
    assert len(said.splitlines()) == 2
    said = judge(exercise, stub.replace(line, "while True:\n        pass"), limit=12)
    assert said.startswith("Still running after 12 seconds")


@pytest.mark.parametrize("words", ["start nothing", "check gae", "curve gae", "start", "stop gae"])
def test_bad_commands(learner, words, capsys):
    """One line on stderr, exit code 2."""
    with pytest.raises(SystemExit, match="2"):
        learner(words)
    assert len(capsys.readouterr().err.splitlines()) == 1


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


@pytest.mark.slow
@pytest.mark.parametrize("script", sorted({e["script"] for e in ALL.values()}))
def test_the_originals_are_right(script):
    """In one run for all exercises of a script."""
    exercises = [e for e in ALL.values() if e["script"] == script]
    tests = dict.fromkeys(test for e in exercises for test in e["tests"])
    assert judge(exercises[0], program.original(exercises[0]), *tests) is None


@pytest.mark.slow
@pytest.mark.parametrize("exercise", ALL.values(), ids=ALL)
def test_an_unsolved_exercise_is_wrong(exercise):
    """Also where the missing part is left out without an error."""
    text = program.unsolved(exercise)
    said = judge(exercise, text.replace(f'raise NotImplementedError("{program.TO_DO}")', "pass"))
    assert said and not said.startswith(("No test ran", "Still running", "Line"))


@pytest.mark.slow
def test_training_after_the_tests(learner, capsys):
    learner("start policy-gradient")
    program.solution("policy-gradient").write_text(program.original(ALL["policy-gradient"]))
    learner("check policy-gradient --train --limit 600")
    assert "It has solved CartPole-v1." in capsys.readouterr().out
