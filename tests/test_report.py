"""benchmark/report.py: what is collected and computed, and that the committed pages are current."""

import json
import re

import numpy as np
import pandas as pd
import pytest
from conftest import contents

from benchmark import report

PLAIN = {"hidden_sizes": [64, 32], "activation": "tanh", "steps_per_epoch": 4000, "gamma": 0.99}
COMMIT = "12e4567890abcdef"  # looks like a number once it is cut


def write_run(data_dir, seed, returns, script="ppo_torch.py", env="Hopper-v4", **config):
    run = data_dir / f"{script}_{env}" / f"s{seed}"
    run.mkdir(parents=True, exist_ok=True)
    config = {**PLAIN, "script": script, "env_id": env, "seed": seed, "exp_name": "x", **config}
    (run / "config.json").write_text(json.dumps({"git_commit": COMMIT, "ranks": 1, **config}))
    (run / "status.json").write_text('{"status": "finished", "epoch": 3}')
    table = pd.DataFrame({"Epoch": range(len(returns)), "AverageEpRet": returns})
    if script.startswith(("ddpg", "td3", "sac")):
        table["AverageTestEpRet"] = table["AverageEpRet"] + 1000
    table["TotalEnvInteracts"] = 4000 * (table["Epoch"] + 1)
    table["Time"] = 2.0 * (table["Epoch"] + 1)
    table.to_csv(run / "progress.txt", sep="\t", index=False, na_rep="nan")


def read(results):
    return [pd.read_csv(results / f"{name}.csv", dtype=report.TYPES) for name in ("runs", "curves")]


def test_collect_takes_runs_in_and_replaces_them(tmp_path):
    data, results = tmp_path / "data", tmp_path / "results"
    results.mkdir()
    write_run(data, 0, [1.5, np.nan, 3])
    write_run(data, 1, [4, 5], env="Ant-v4", versions={"cpu": "B"}, norm_obs=True, norm_rew=True)
    off_policy = {"hidden_sizes": [256, 256], "activation": "relu", "gamma": 0.9, "ranks": 2}
    write_run(data, 2, [7], "sac_tf1.py", **off_policy)
    assert report.collect([str(data)], results) == 3
    runs, curves = read(results)
    columns = ["run", "settings", "cpu", "seed", "ranks", "steps", "seconds"]
    assert runs.commit.tolist() == ["12e4567890"] * 3
    assert runs[columns].to_numpy().tolist() == [
        ["ppo_torch_Ant-v4_normalised_s1", "normalised", "B", 1, 1, 8000, 4],
        ["ppo_torch_Hopper-v4_s0", "plain", "unknown", 0, 1, 12000, 6],
        [runs.run[2], "gamma 0.9, ranks 2", "unknown", 2, 2, 4000, 2],
    ]
    assert runs.run[2] == "sac_tf1_Hopper-v4_gamma-0-9-ranks-2_s2"
    hopper = curves[curves.run == "ppo_torch_Hopper-v4_s0"]
    assert hopper[["steps", "return"]].to_numpy().tolist() == [[4000, 1.5], [12000, 3]]
    assert curves[curves.run.str.startswith("sac")].test_return.tolist() == [1007]

    before = contents(results)
    report.collect([str(data)], results)
    assert contents(results) == before
    write_run(tmp_path / "later", 0, [8, 9, 10, 11])
    (tmp_path / "later/ppo_torch.py_Hopper-v4/s0/status.json").unlink()
    report.collect([str(tmp_path / "later")], results)
    runs, curves = read(results)
    assert len(runs) == 3 and runs.status.tolist() == ["finished", "unknown", "finished"]
    assert curves[curves.run == "ppo_torch_Hopper-v4_s0"]["return"].tolist() == [8, 9, 10, 11]
    with pytest.raises(ValueError, match="starts with it"):
        report.collect([str(tmp_path / "nothing")], results)


def test_settings_in_words():
    config = {**PLAIN, "script": "ppo_torch.py", "exp_name": "benchmark_on_policy_x", "ranks": 1}
    assert report.settings_of(config) == "plain"
    assert report.settings_of({**config, "norm_obs": True}) == "norm_obs"
    assert report.settings_of({**config, "hidden_sizes": [8, 9]}) == "hidden_sizes [8 9]"
    assert report.settings_of({**config, "exp_name": "strong_ppo_x", "lam": 0.95}) == "strong"


def test_long_runs_are_thinned_to_means(tmp_path):
    write_run(tmp_path / "data", 0, np.arange(750.0))
    report.collect([str(tmp_path / "data")], tmp_path)
    curve = read(tmp_path)[1]
    assert len(curve) == 250 <= report.MAX_ROWS
    assert curve["return"].head(3).tolist() == [1, 4, 7]  # of 0 1 2, 3 4 5, ...
    assert curve["steps"].tolist() == list(range(12_000, 3_000_001, 12_000))


def test_returns_at_a_step_are_smoothed_by_seed_with_an_interval(tmp_path):
    """Against np.convolve and the interval worked by hand, for seeds of different length."""
    rng, ends = np.random.default_rng(0), []
    for seed, epochs in enumerate((260, 255, 251, 80)):
        y = rng.normal(size=epochs).cumsum()
        write_run(tmp_path / "data", seed, y, env="HalfCheetah-v4")
        if epochs > 250:
            ends.append(y[244:255].mean() if epochs > 254 else y[244:251].mean())
    report.collect([str(tmp_path / "data")], tmp_path)
    results = report.Results(tmp_path)
    curves = results.seeds("ppo_torch", "HalfCheetah")
    assert len(curves) == 4 and results.marks(curves) == [1_000_000]
    mean, half, n = results.at(curves, 1_000_000)
    np.testing.assert_allclose(mean, np.mean(ends), rtol=1e-5)
    np.testing.assert_allclose(half, 4.303 * np.std(ends, ddof=1) / np.sqrt(3), rtol=1e-4)
    assert n == 3 and results.marks(curves[3:]) == [300_000] and results.marks([]) == []
    cells = [report.our_cell(results, "ppo", f, "HalfCheetah") for f in ("torch", "tf1")]
    assert cells == [f"{mean:.0f} ± {half:.0f} (3) ▼", ""]  # 1733 ± 521 is published


def test_published_numbers_are_those_of_the_reference(tmp_path, monkeypatch):
    for seed, epochs in enumerate((75, 75, 250)):
        write_run(tmp_path / "data", seed, [0.0] * epochs, env="HalfCheetah-v4")
    report.collect([str(tmp_path / "data")], tmp_path)
    results = report.Results(tmp_path)
    band = results.reference("ppo", "torch", "HalfCheetah", 1_000_000)
    np.testing.assert_allclose(band, [1733.2, 520.6], atol=10)  # published_at_1m_steps.csv
    assert results.reference("trpo", "torch", "Hopper", 1) is None and not results.best("ppo", "No")
    cells = "0 ± 0 (3) ▼ at 300k; 0 (1) ▼"
    lines = "sb3 ppo_torch,9,8\npair ppo_tf1 ppo_torch,6,7\npair ppo_tf1 ppo_torch --x,4,5"
    (tmp_path / "speed.csv").write_text(f"speed.py,first,second\n{lines}")
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    assert f"| 7 | {cells} |" in report.summary(results)
    table = report.returns(results, ["ppo"])
    assert "| 5708, tianshou-pytorch, HalfCheetah-v3 |" in table
    assert f"**PPO, PyTorch** | {cells} | – | – | – | – |" in table and "Flow 1**" not in table
    assert re.search(r"PPO, PyTorch \| 5\d\d ± \d+ \(10\) at 300k; 1733 ± 372 \(10\) \|", table)


def test_tables_go_between_their_marks():
    page = "a\n<!-- results: x -->\nold\n<!-- results: end -->\nb\n<!-- results: y -->\n"
    page += "<!-- results: end -->\n"
    filled = report.fill(page, {"x": "X", "y": "Y"})
    assert "old" not in filled and re.findall(r"^\w$", filled, flags=re.M) == ["a", "X", "b", "Y"]
    assert report.fill(filled, {"x": "X", "y": "Y"}) == filled


def test_what_is_committed_is_what_the_command_makes():
    """Pages to the letter; figures to hundredths of a point, since sums round by CPU."""
    files = report.make()
    names = {path.name for path in files}
    assert names >= {"README.md", "on_policy.md", "off_policy.md", "all.svg"}
    number = r"-?\d+(?:\.\d+)?"
    for path, text in files.items():
        committed = path.read_text()
        hint = f"{path} is not what `python benchmark/report.py` makes"
        if path.suffix == ".svg":
            # Names of clip paths and markers are hashes of numbers.
            committed, text = (re.sub(r"\b[mp][0-9a-f]{10}\b", "", t) for t in (committed, text))
            a, b = (np.array(re.findall(number, t), float) for t in (committed, text))
            assert a.shape == b.shape and np.abs(a - b).max() < 0.03, hint
            committed, text = re.sub(number, "", committed), re.sub(number, "", text)
        assert committed == text, hint
