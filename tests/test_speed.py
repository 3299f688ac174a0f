"""speed.py: in a tiny mode, with a peer that is made up. No time is asserted."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from conftest import ROOT, run

from benchmark import speed

SPEED = ROOT / "benchmark" / "speed.py"
TINY = ["--env-id", "CartPole-v1", "--epochs", 2, "--pairs", 1]

PEER = """
import time
class PPO:
    def __init__(self, policy, env_id, seed, device):
        self.num_timesteps = 0
    def learn(self, steps, reset_num_timesteps=True):
        self.num_timesteps += steps
        time.sleep(0.01)
"""


def test_table_is_well_formed(tmp_path):
    """Rows are added to what was measured before, here or elsewhere; each is measured once."""
    (tmp_path / "stable_baselines3.py").write_text(PEER)
    page, numbers = tmp_path / "speed.md", tmp_path / "speed.csv"
    other = {"speed.py": "sb3 ppo_torch", "cpu": "8 cores of Other", "first": 3.0, "second": 2.0}
    again = {**other, "ratio": 1.5, "range": "1.50 to 1.50", "ms/step": 333.3, "products": 1.25}
    pd.DataFrame([again]).to_csv(numbers, index=False)
    env = {"PYTHONPATH": str(tmp_path)}
    flags = " ".join(map(str, TINY))
    sb3, pair = f"sb3 ppo_torch {flags}", f"pair ppo_torch ppo_torch {flags}"
    for rows in ([sb3, pair], [sb3]):
        result = run(SPEED, "table", *rows, "--out", page, env=env)
    table = pd.read_csv(numbers)
    mine = table[table.cpu != "8 cores of Other"].set_index("speed.py")
    assert sorted(mine.index) == [pair, sb3] and len(table) == 3
    row = mine.loc[sb3]
    assert row.ratio == pytest.approx(row["first"] / row.second, rel=1e-3)
    assert row["ms/step"] == pytest.approx(1000 / row["first"], rel=1e-3)
    lines = [line for line in page.read_text().splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in lines}) == 1 and len(lines) == 3 + 4
    assert "| 1.50 | 1.50 to 1.50 | 333.300 |  | 1.250 |" in page.read_text()
    assert page.read_text().count("\n## ") == 2 and not result.stderr


def test_every_flag_reaches_what_is_measured(tmp_path, monkeypatch, capsys):
    """In place of scripts and peers, processes whose rates depend on all that they are told."""
    runs = []

    def fake(command, **_):
        runs.append(command)
        if command[1] == "-c":
            env_id, *_, kwargs, switched = command[5:]
            rate = json.loads(kwargs).get("batch_size", 1) + len(env_id) + 1000 * bool(switched)
            return subprocess.CompletedProcess(command, 0, f"rate {rate}", "")
        given = dict(zip(command[::-1][1::2], command[::-1][::2], strict=False))
        path = Path(given["--data-dir"], "speed", "speed_s0")
        path.mkdir(parents=True)
        # The first epoch takes 100 s, those after it 1, 2, 3, 4 and 5.
        epochs = np.arange(int(given["--epochs"]))
        rate = len(given["--env-id"]) * int(given.get("--batch-size", 400)) / 400
        rate *= int(given["--num-cpu"]) * (3 if given.get("--device") == "cuda" else 1)
        table = {"TotalEnvInteracts": 60 * rate * epochs, "Time": 100 + epochs * (epochs + 1) / 2}
        pd.DataFrame(table).to_csv(path / "progress.txt", sep="\t", index=False)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(speed.subprocess, "run", fake)
    for line, first, second, count in [
        ("pair ppo_torch sac_torch", 280, 70, 6),  # 14 letters times 300 steps in 15 s
        ("pair ppo_torch sac_torch --epochs 3 --pairs 1", 560, 140, 2),
        ("pair ppo_torch sac_torch --env-id Ant-v4 --batch-size 200", 120, 60, 6),
        ("ranks ppo_torch --pairs 2", 560, 280, 4),
        ("gpu ppo_torch --pairs 1", 840, 280, 2),
        ("sb3 ppo_torch", 280, 15, 6),
        ("sbx sac_torch --batch-size 200 --env-id Ant-v4", 60, 206, 6),
        ("sb3 sac_torch --peer-switched --peer-python other", 70, 1114, 6),
    ]:
        monkeypatch.setattr(sys, "argv", ["speed.py", *line.split()])
        runs.clear()
        speed.main()
        said = capsys.readouterr().out
        assert f"first: {first}\nsecond: {second}\nratio: {first / second:.2f}\n" in said, line
        assert len(runs) == count
    assert {command[0] for command in runs} == {sys.executable, "other"}
    # The rows of a new page; a wrong one is said once.
    page = str(tmp_path / "new.md")
    argv = ["speed.py", "table", "pair", "ranks ppo_torch", "--out", page]
    monkeypatch.setattr(sys, "argv", argv)
    speed.main()
    assert "| ranks ppo_torch | 560 | 280 |" in Path(page).read_text()
    assert capsys.readouterr().err == "pair takes two scripts, all others take one\n"


def test_what_is_committed_is_what_the_command_makes():
    assert speed.page(pd.read_csv(speed.PAGE.with_suffix(".csv"))) == speed.PAGE.read_text()


def test_a_peer_that_cannot_be_imported_is_one_line(tmp_path):
    no_python = run(SPEED, "sb3", "ppo_torch", *TINY, "--peer-python", "/no/python", check=False)
    assert no_python.returncode == 2 and "Traceback" not in no_python.stderr
    (tmp_path / "sbx.py").write_text("raise ValueError('wants tf_keras')")
    env = {"PYTHONPATH": str(tmp_path)}
    result = run(SPEED, "sbx", "ppo_torch", *TINY, check=False, env=env)
    assert result.returncode == 2 and "Traceback" not in result.stderr
    line = f"speed.py: error: sbx does not run in {sys.executable}: ValueError: wants tf_keras"
    assert result.stderr.strip().splitlines()[-1] == line
    result = run(SPEED, "sb3", "ppo_torch", *TINY, "--peer-python", "false", check=False)
    assert result.stderr.strip().endswith("does not run in false: exit code 1")


def test_bad_input_is_one_line():
    cases = [
        (["pair", "nosuch", "ppo_torch", *TINY], "nosuch.py failed"),
        (["ranks", "ppo_torch", "--epochs", 1], "--epochs must be at least 2: the first one warms"),
        (["ranks", "ppo_torch", "--env-id", "Nope-v0"], "ppo_torch.py failed"),
    ]
    for words, message in cases:
        result = run(SPEED, *words, check=False)
        assert result.returncode == 2 and "Traceback" not in result.stderr
        assert result.stderr.splitlines()[-1].startswith(f"speed.py: error: {message}")
