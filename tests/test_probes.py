"""Probes find what is wrong with a script, and nothing with ours.

    python tests/test_probes.py [NAME ...]

makes the table of exercises/PROBES.md, which probe sees which bug of bugs.toml: a line for each
bug, or for those named. It takes about half a minute a bug.
"""

import re
import shutil
import sys
import tempfile
import tomllib
from pathlib import Path

import forked
import gymnasium as gym
import numpy as np
import pytest
from conftest import ROOT, SCRIPTS, run, skip_without_tensorflow, slow

sys.path.insert(0, str(ROOT / "exercises"))
import exercise
import probe as program

BUGS = tomllib.loads((ROOT / "tests" / "bugs.toml").read_text())["bug"]
BUGS = [bug for bug in BUGS if not bug["files"][0].startswith("benchmark/")]
PROBES = {probe["name"]: probe for probe in program.TABLE["probe"]}


def judge(script, *names):
    """The names of the probes that are right and of those that are wrong, and what was printed."""
    skip_without_tensorflow(script)
    command = [sys.executable, ROOT / "exercises" / "probe.py", script, *names]
    code, output = forked.run_for(command, 1200)
    lines = re.findall("^(.{22}) (ok|WRONG)$", output, flags=re.M)
    right, wrong = ([name.strip() for name, how in lines if how == x] for x in ("ok", "WRONG"))
    assert lines and code == bool(wrong), output
    return right, wrong, output


def plant(bug, folder):
    """Copy algos/ and common/, one file with a bug; returns the path of a script that has it."""
    for part in ("algos", "common"):
        shutil.copytree(ROOT / part, folder / part)
    for path in map(folder.joinpath, bug["files"]):
        path.write_text(path.read_text().replace(bug["old"], bug["new"]))
    if bug["files"][0].startswith("common/"):
        return folder / "algos" / f"ppo_{'tf1' if 'tf1' in bug['files'][0] else 'torch'}.py"
    return folder / next((x for x in bug["files"] if Path(x).stem in bug["test"]), bug["files"][0])


def row(bug):
    """The line about a bug in the table."""
    with tempfile.TemporaryDirectory() as folder:
        script = plant(bug, Path(folder))
        _, wrong, _ = judge(script)
        names = [name for name in program.probes_for(script.read_text()) if name in wrong]
        return f"| {bug['name']} | {script.stem} | {', '.join(names) or '-'} |"


def test_names_and_environments():
    """Exercises that are named are there, and probes keep to Gymnasium's rules."""
    named = re.findall(r"bug-[\w-]+", (ROOT / "exercises" / "probes.toml").read_text())
    assert named and set(named) <= exercise.exercises().keys()
    for name, probe in PROBES.items():
        env_id, kwargs = f"probes:{probe.get('env', name)}-v0", probe.get("env_kwargs", {})
        for kind in probe.get("actions", ["Box"]):
            env = gym.make(env_id, **kwargs, discrete=kind != "Box")  # with Gymnasium's checker
            assert env.observation_space.contains(env.reset(seed=0)[0])
            assert env.observation_space.contains(env.step(env.action_space.sample())[0])


@pytest.mark.parametrize("name", ["OneStep", "Sees", "TwoSteps", "TimeLimit", "Changes"])
def test_values_are_discounted_sums(name):
    """Of the rewards that follow an observation, if no time limit ends them."""
    env = gym.make(f"probes:{PROBES[name].get('env', name)}-v0", disable_env_checker=True)
    gamma, sums = program.TABLE["flags"]["gamma"], {}
    for episode in range(500):
        (o, _), terminated, path = env.reset(seed=0 if episode == 0 else None), False, []
        while not terminated and len(path) < 50:
            seen = float(o[0])
            o, r, terminated, *_ = env.step(env.action_space.sample())
            path.append((seen, r))
        for t, (seen, _) in enumerate(path[:2] if episode >= 400 else []):
            ret = sum(gamma**k * r for k, (_, r) in enumerate(path[t:]))
            sums.setdefault(seen, []).append(ret)
    values = [np.mean(x) for x in sums.values()]
    answers = {"Average value": np.mean, "Max value": np.max, "Min value": np.min}
    for answer in PROBES[name]["answer"]:
        if answer["what"] in answers:
            assert answers[answer["what"]](values) == pytest.approx(answer["is"], abs=0.05)


QUICK = [(s, ("TwoSteps", "SeesAndActs")) for s in SCRIPTS[::4] + SCRIPTS[3::4]]


@pytest.mark.parametrize("script, names", QUICK + [slow(s, ()) for s in SCRIPTS])
def test_the_scripts_are_right(script, names):
    """A critic that bootstraps and a policy that follows what it sees, in every algorithm in one
    framework; all else is slow."""
    path = ROOT / "algos" / f"{script}.py"
    right, wrong, said = judge(path, *names)
    assert not wrong and right == [*program.probes_for(path.read_text(), names)], said


def test_a_bug_is_found_and_explained(tmp_path):
    """By the probe that is about it and by no other, with the exercise that shows it."""
    script = plant(next(bug for bug in BUGS if bug["name"] == "truncated-is-terminal"), tmp_path)
    right, wrong, said = judge(script, "OneStep", "TimeLimit")
    assert (right, wrong) == (["OneStep"], ["TimeLimit"]) and "bug-truncation" in said
    assert re.search(r"MaxVVals is 1\.\d+, should be 2", said)


def test_other_defaults_are_no_mistakes(tmp_path):
    """Of a copy: the probes set all flags that their answers depend on."""
    text = (ROOT / "algos" / "ppo_torch.py").read_text()
    for name, old, new in [
        ("minibatch_size: NonNegInt", "0", "64"),
        ("norm_obs: bool", "False", "True"),
        ("norm_rew: bool", "False", "True"),
        ("anneal_lr: bool", "False", "True"),
    ]:
        assert text.count(f"{name} = {old} ") == 1
        text = text.replace(f"{name} = {old} ", f"{name} = {new} ")
    for part in ("algos", "common"):
        shutil.copytree(ROOT / part, tmp_path / part)
    (script := tmp_path / "algos" / "ppo_torch.py").write_text(text)
    assert judge(script, "OneStep", "TwoSteps", "EpochEnd")[:2] == (
        ["OneStep", "TwoSteps", "EpochEnd"],
        [],
    )


def test_files_that_cannot_be_probed(tmp_path, capsys):
    """A run that fails shows its last line; the common/ is that beside the script."""
    script = plant(BUGS[0], tmp_path)
    (tmp_path / "common" / "args.py").write_text("raise RuntimeError('of its own')")
    assert "RuntimeError: of its own" in judge(script, "OneStep")[2]
    shutil.copy(ROOT / "common" / "args.py", tmp_path / "common")
    text = (ROOT / "algos" / "ppo_torch.py").read_text()
    script.write_text(text.replace("    device = ", "    raise ValueError('mine')\n    device = "))
    assert "ValueError: mine" in judge(script, "OneStep")[2]
    ends = {"": "code 0, without a progress.txt", "import os; os.abort()": "code -6"}
    for end, seen in (ends | {"raise SystemExit('mine: no')": "last line, mine: no"}).items():
        script.write_text(f"import torch\nclass Args:\n    lam: float  # Box\n{end}")
        assert seen in judge(script, "OneStep")[2]
    script.write_text(text.replace("gamma: Unit", "gamma: Literal[0.9]"))
    assert "last line, invalid choice '0.5' for argument '--gamma'" in judge(script, "OneStep")[2]
    script.write_text(text.replace("VVals", "Values"))
    assert "progress.txt has none of its columns" in judge(script, "TwoSteps")[2]
    script.write_text(text.replace("save_state(state, export_policy())", "save_state(state)"))
    assert "there is no policy.npz in " in judge(script, "Acts")[2]
    for wrong in ("def (", "print(1)", text.replace("    lam:", "    gae_lambda:"), "\udce9"):
        script.write_text(wrong, errors="surrogateescape")
        assert program.main(script) == 2
        assert re.search("cannot be run|no probe fits", capsys.readouterr().err)
    result = run(ROOT / "exercises" / "exercise.py", "probe", tmp_path / "nothing.py", check=False)
    assert result.returncode == 2 and result.stderr.count("\n") == 1


def test_the_environment_need_not_be_activated():
    """Its mpirun, which is not on PATH then, finds its own programs."""
    words = [ROOT / "exercises" / "probe.py", ROOT / "algos" / "vpg_torch.py", "Ranks"]
    done = run(*words, env={"PATH": "/usr/bin:/bin"}, timeout=100)
    assert "Ranks                  ok" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug["name"])
def test_the_table_of_bugs(bug, tmp_path):
    """Each has a row; the first probe that it names sees it, or the next ones: rounding differs."""
    page = (ROOT / "exercises" / "PROBES.md").read_text()
    (seen,) = re.findall(rf"\| {bug['name']} \| \w+ \| (.*) \|$", page, flags=re.M)
    if seen != "-":
        script = plant(bug, tmp_path)
        assert any(name in judge(script, name)[1] for name in seen.split(", ")[:3])


if __name__ == "__main__":
    for bug in BUGS:
        if not sys.argv[1:] or bug["name"] in sys.argv[1:]:
            print(row(bug), flush=True)
