"""speed.py: in a tiny mode, with a peer that is made up. No time is asserted."""

import sys

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


def test_what_is_committed_is_what_the_command_makes():
    assert speed.page(pd.read_csv(speed.PAGE.with_suffix(".csv"))) == speed.PAGE.read_text()


def test_a_peer_that_cannot_be_imported_is_one_line(tmp_path):
    (tmp_path / "sbx.py").write_text("raise ValueError('wants tf_keras')")
    env = {"PYTHONPATH": str(tmp_path)}
    result = run(SPEED, "sbx", "ppo_torch", *TINY, check=False, env=env)
    assert result.returncode == 2 and "Traceback" not in result.stderr
    line = f"speed.py: error: sbx does not run in {sys.executable}: ValueError: wants tf_keras"
    assert result.stderr.strip().splitlines()[-1] == line


def test_bad_input_is_one_line():
    cases = [
        (["pair", "nosuch", "ppo_torch", *TINY], "there is no script algos/nosuch.py"),
        (["ranks", "ppo_torch", "--epochs", 1], "--epochs must be at least 2: the first one warms"),
        (["ranks", "ppo_torch", "--env-id", "Nope-v0"], "ppo_torch.py failed"),
    ]
    for words, message in cases:
        result = run(SPEED, *words, check=False)
        assert result.returncode == 2 and "Traceback" not in result.stderr
        assert result.stderr.splitlines()[-1].startswith(f"speed.py: error: {message}")
