"""benchmark/report.py: what is collected and computed, and that the committed pages are current."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import pandas as pd
import pytest
from conftest import ROOT, contents

from benchmark import intervals, plot, report

PLAIN = {"hidden_sizes": [64, 32], "activation": "tanh", "steps_per_epoch": 4000, "gamma": 0.99}
VERSIONS = {"cpu": "B", "numpy": "2", "python": "3"}
COMMIT = "12e4567890abcdef"  # looks like a number once it is cut


def write_run(data_dir, seed, returns, script="ppo_torch.py", env="Hopper-v4", **config):
    run = data_dir / config.pop("folder", f"{script}_{env}/s{seed}")
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
    write_run(data, 0, [1.5, np.nan, 3], epochs=7, anneal_lr=False)
    write_run(data, 1, [4, 5], env="Ant-v4", versions=VERSIONS, norm_obs=True, norm_rew=True)
    off_policy = {"hidden_sizes": [256, 256], "activation": "relu", "gamma": 0.9, "ranks": 2}
    write_run(data, 2, [7], "sac_tf1.py", **off_policy)
    assert report.collect([str(data)], results) == 3
    runs, curves = read(results)
    columns = ["run", "settings", "cpu", "seed", "ranks", "steps", "arguments"]
    assert runs.commit.tolist() == ["12e4567890"] * 3
    assert runs[columns].to_numpy().tolist() == [
        [runs.run[0], "normalized", "B", 1, 1, 8000, "--hidden-sizes 64 32 --norm-obs --norm-rew"],
        [runs.run[1], "plain", "unknown", 0, 1, 12000, "--hidden-sizes 64 32 --epochs 7"],
        [runs.run[2], "--gamma 0.9 --num-cpu 2", "unknown", 2, 2, 4000, "--gamma 0.9"],
    ]
    names = ["ppo_torch_Ant-v4_normalized_s1", "ppo_torch_Hopper-v4_s0"]
    assert runs.run.tolist() == [*names, "sac_tf1_Hopper-v4_gamma-0-9-num-cpu-2_s2"]
    assert runs.versions[0] == "numpy 2, threads 1" and runs.seconds.tolist() == [4, 6, 2]
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
    report.collect([str(tmp_path / "later")], results, "plain, B")
    assert {"ppo_torch_Hopper-v4_s0", "ppo_torch_Hopper-v4_plain-B_s0"} < set(read(results)[0].run)
    for folder, w in (("a", 1), ("b", -1)):
        write_run(tmp_path / "signs", 0, [w], env_kwargs={"w": w}, folder=folder)
    assert report.collect([str(tmp_path / "signs")], results) == 2
    with pytest.raises(ValueError, match="starts with it"):
        report.collect([str(tmp_path / "nothing")], results)
    write_run(tmp_path / "mine", 0, [1], script="ppo_mine.py")
    write_run(tmp_path / "mine", 0, [1])  # of four epochs above
    write_run(tmp_path / "mine", 5, [np.nan])  # no episode ended
    with pytest.raises(ValueError, match="no run to collect"):
        report.collect([str(tmp_path / "mine")], results)


def test_final_policies_act_without_noise(tmp_path):
    """Ten episodes with the mean action, against Gymnasium; a column, and a row of the table."""
    write_run(tmp_path, 3, [100.0] * 250, max_ep_len=1000)
    mean, one = np.float32([0.9, -0.4, 0.1]), np.ones(3, "f")
    policy = {"weight_0": np.zeros((11, 3), "f"), "bias_0": mean, "log_std": one, "act_low": -one}
    policy |= {"act_high": one, "activation": "tanh", "distribution": "gaussian", "epoch": 250}
    np.savez(tmp_path / "ppo_torch.py_Hopper-v4" / "s3" / "policy.npz", **policy)
    report.collect([str(tmp_path)], tmp_path)
    env, rewards = gym.make("Hopper-v4"), []
    for i in range(10):
        env.reset(seed=None if i else 3)
        terminated = False
        while not terminated:
            _, r, terminated, *_ = env.step(mean)
            rewards.append(r)
    assert read(tmp_path)[0].without_noise.tolist() == pytest.approx([sum(rewards) / 10])
    table = report.returns(report.Results(tmp_path), ["ppo"])
    row = f"| PPO, PyTorch, without noise | – | {sum(rewards) / 10:.0f} (1) | – | – | – |"
    above = round(sum(rewards) / 10 - 2432.2, -1)  # Tianshou's, with a deviation of 782
    assert row in table and f"it, PyTorch | – | {above:.0f} |" in table


def test_long_runs_are_thinned_to_means(tmp_path):
    write_run(tmp_path / "data", 0, np.arange(750.0))
    report.collect([str(tmp_path / "data")], tmp_path)
    curve = read(tmp_path)[1]
    assert len(curve) == 250 <= report.MAX_ROWS
    assert curve["return"].head(3).tolist() == [1, 4, 7]  # of 0 1 2, 3 4 5, ...
    assert curve["steps"].tolist() == list(range(12_000, 3_000_001, 12_000))


def test_cells_are_smoothed_by_seed_and_compared_with_the_reference(tmp_path, monkeypatch):
    """Against np.convolve, scipy and published_at_1m_steps.csv, for seeds of different length."""
    from scipy import stats

    rng, ends = np.random.default_rng(0), []
    for seed, epochs in enumerate((260, 255, 251, 80)):
        y = rng.normal(size=epochs).cumsum()
        write_run(tmp_path / "data", seed, y, env="HalfCheetah-v4")
        if epochs > 250:
            ends.append(y[244:255].mean() if epochs > 254 else y[244:251].mean())
    for seed, epochs in enumerate((75, 75, 250)):
        write_run(tmp_path / "data", seed, [40.0] * epochs, env="Swimmer-v4")
    for seed in range(6):
        y, other = [1000.0 * seed] * 250, {"gamma": 0.9999, "lam": 0.99} if seed > 2 else {}
        other["exp_name"] = "strong_x"
        write_run(tmp_path / "data", seed, y, "vpg_torch.py", "Ant-v4", **other)
    report.collect([str(tmp_path / "data")], tmp_path)
    results = report.Results(tmp_path)
    cheetah, *swimmer = results.cells[results.cells.settings == "plain"].itertuples()
    published = np.mean(ends) - cheetah.difference
    np.testing.assert_allclose([published, cheetah.std], [1733.2, 520.6 * np.sqrt(10 / 9)], atol=10)
    low, high = stats.t.interval(0.95, 2, np.mean(ends), stats.sem(ends))
    assert cheetah.ours == f"{np.mean(ends):.0f} ± {(high - low) / 2:.0f} (3) ↓"
    assert cheetah.more.startswith("1730 ± 390, -17") and cheetah.more.endswith(" ↓")
    assert [cell.ours for cell in swimmer] == ["40 ± 0 (3) ↓ at 300k", "40 (1)"]
    tables = [report.returns(results, [algo]) for algo in ("ppo", "vpg")]
    cells = f"{cheetah.ours} | – | – | {swimmer[0].ours}; 40 (1) | – |"
    assert f"**PPO, PyTorch** | {cells}" in tables[0]
    assert "| 5700, tianshou-pytorch, HalfCheetah-v3 |" in tables[0] and "Flow 1**" not in tables[0]
    config = {"script": "vpg_torch.py", "exp_name": "swimmer_strong_x", "gamma": 0.5, "lam": 0.99}
    assert report.settings_of(config) == "strong, gamma 0.5, lam 0.99"
    # 1000 less Tianshou's 202.9; t(0.975, 2) sqrt(1000^2 / 3 + 35.5^2 / 5) is 4.303 x 577.6 = 2485.
    for kind, mean, more in (("", 1000, "+800 ± 2500"), (" for Swimmer", 4000, "+3800 ± 2500 ↑")):
        assert f"strong{kind}** | – | – | – | – | {mean} ± 2500 (3) |" in tables[1]
        assert f"difference from it, strong{kind} | – | – | – | – | {more} |" in tables[1]
    assert results.best_of("td3").loc["Hopper", "mean"] == 3400.06  # 3564.07 is at 970,000 steps
    text = report.verdict(results, ["ppo"])
    assert "below 0 in 2 of 2 cells (ppo_torch on HalfCheetah, Swimmer)" in text
    assert "above 0 in 0 of 2 cells. These cells have 3 seeds." in text
    lines = "sb3 ppo_torch,9,8\npair ppo_tf1 ppo_torch,6,7\npair ppo_tf1 ppo_torch --x,4,5"
    (tmp_path / "speed.csv").write_text(f"speed.py,first,second\n{lines}")
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    assert f"| 7 | {cells}" in report.summary(results)


def test_versions_of_tasks_and_mujoco_are_compared_with_each_other_alone(tmp_path):
    """Against scipy; the published means are of -v3, so no other version than -v4 has them."""
    from scipy import stats

    later = {"versions": {**VERSIONS, "mujoco": "4.0.0"}}
    for seed, x in enumerate((1000.0, 1200.0, 1400.0)):
        write_run(tmp_path, seed, [x] * 250, env="HalfCheetah-v4")
        write_run(tmp_path, seed, [x + 900] * 250, env="HalfCheetah-v5")
        write_run(tmp_path / "later", seed, [x / 2] * 250, env="HalfCheetah-v4", **later)
    write_run(tmp_path / "later", 3, [7.0] * 250, norm_obs=True, **later)
    report.collect([str(tmp_path)], tmp_path)
    results = report.Results(tmp_path)
    assert {"plain, MuJoCo 4.0.0", "--norm-obs, MuJoCo 4.0.0"} < set(results.runs.settings)
    assert "ppo_torch_HalfCheetah-v4_plain-MuJoCo-4-0-0_s2" in set(results.runs.run)
    test = stats.ttest_ind([500, 600, 700], [1000, 1200, 1400], equal_var=False)
    low, high = test.confidence_interval()
    header, _, *rows = report.versions(results).splitlines()
    column = [row.split(" | ")[1] for row in (header, *rows)]
    assert column[:4] == ["HalfCheetah", "1200 ± 500 (3)", "2100 ± 500 (3)", "+900 ± 450 ↑"]
    assert column[4:] == ["600 ± 250 (3)", f"-600 ± {round((high - low) / 2, -1):.0f} ↓"]
    assert "of 1 cells (ppo_torch on HalfCheetah)," in report.verdict(results, ["ppo"])


def test_numbers_have_no_more_digits_than_their_intervals():
    numbers = [(1234.5, 567, ""), (-0.4, 3.21, ""), (8580, np.nan, "+"), (99.6, 9.96, "")]
    texts = ["1230 ± 570", "0 ± 3", "+8600", "100 ± 10"]
    assert [report.estimate(*number) for number in numbers] == texts


def test_intervals_are_those_of_scipy():
    from scipy import stats

    rng = np.random.default_rng(1)
    x, y = rng.normal(0, 2, 3), rng.normal(1, 5, 10)
    wanted = stats.ttest_ind(x, y, equal_var=False).confidence_interval(0.95)
    pair = [(v.mean(), v.std(ddof=1), len(v)) for v in (x, y)]
    difference, half = intervals.welch(pair)
    np.testing.assert_allclose([difference - half, difference + half], wanted, rtol=1e-4)
    assert np.isnan(intervals.welch(((1, np.nan, 1), (2, 3, 10)))[1])
    assert intervals.welch(((1, 0, 3), (2, 0, 10))) == (-1, 0)
    # Two equal tasks: the mean of their differences has half the variance, and twice the freedom.
    df = stats.ttest_ind(x, y, equal_var=False).df
    wanted = half / np.sqrt(2) * stats.t.ppf(0.975, 2 * df) / stats.t.ppf(0.975, df)
    np.testing.assert_allclose(intervals.welch(pair, pair), [difference, wanted])

    def iqm(*tasks, axis=-1):
        return stats.trim_mean(np.concatenate(tasks, axis=axis), 0.25, axis=axis)

    np.testing.assert_allclose(intervals.iqm([x, y]), iqm(x, y))
    wanted = stats.mannwhitneyu(x, y).statistic / 30
    np.testing.assert_allclose(intervals.improvement([x], [y]), wanted)
    options = {"method": "percentile", "n_resamples": 20_000, "rng": rng}
    wanted = stats.bootstrap((x, y), iqm, **options).confidence_interval
    found = intervals.bootstrap(intervals.iqm, [x, y])[1:]
    np.testing.assert_allclose(found, wanted, atol=0.25)


def test_a_run_is_made_again():
    """Equal to the digit, or it is said what is different here."""
    words = ["benchmark/report.py", "--verify", "ppo_torch", "HalfCheetah-v4", "0", "--epochs", "2"]
    run = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    same = "2 of 2 epochs equal to the digit" in run.stdout
    assert same or re.search("(cpu|versions) in runs.csv: ", run.stdout)


def test_a_run_that_differs_is_told(tmp_path, capsys):
    for seed in range(2):
        write_run(tmp_path, seed, [10 / 3, 2, 7, 5 - 2 * seed], versions=VERSIONS)
    report.collect([str(tmp_path)], tmp_path)
    results = report.Results(tmp_path)
    again = plot.get_datasets(str(tmp_path))[0][:3]
    assert report.compare(results.runs.iloc[0], again, results)
    assert capsys.readouterr().out.startswith("3 of 3 epochs equal to the digit\ncommit")
    again.loc[1, "AverageEpRet"] = 22
    assert not report.compare(results.runs.iloc[0], again, results)
    text = "2 of 3 epochs equal to the digit; the numbers part at 8000 steps\n"
    text += "mean return 11, outside the range of the 2 seeds, 4 to 4\ncommit"
    assert capsys.readouterr().out.startswith(text)
    again.attrs["config"]["versions"]["cpu"] = "C"
    assert report.compare(results.runs.iloc[0], again, results)
    assert "cpu in runs.csv: B; here: C" in capsys.readouterr().out
    with pytest.raises(ValueError, match="nothing to compare: a point of curves"):
        report.compare(results.runs.iloc[0], again.assign(AverageEpRet=np.nan), results)
    with pytest.raises(ValueError, match=r"no plain run of ppo_torch Hopper-v4 7; .* seed 0, 1$"):
        report.verify(["ppo_torch", "Hopper-v4", "7"], "plain", 1, results)
    with pytest.raises(ValueError, match="--setting"):
        report.verify(["ppo_torch", "Hopper-v4", "1", "plain"], "plain", 1, results)


def test_a_long_run_made_again_is_compared_by_the_points_that_were_kept(tmp_path, capsys):
    """Of 750 epochs, a point is the mean of three: seven epochs are two points and a rest."""
    write_run(tmp_path, 0, np.arange(750.0) / 7, versions=VERSIONS)
    report.collect([str(tmp_path)], tmp_path)
    results = report.Results(tmp_path)
    again = plot.get_datasets(str(tmp_path))[0][:7]
    assert report.compare(results.runs.iloc[0], again, results)
    assert capsys.readouterr().out.startswith("6 of 6 epochs equal to the digit\n")
    again.loc[4, "AverageEpRet"] += 1
    assert not report.compare(results.runs.iloc[0], again, results)
    text = "3 of 6 epochs equal to the digit; the numbers part at 24000 steps\n"
    assert capsys.readouterr().out.startswith(text)
    with pytest.raises(ValueError, match=r"a point of .* has 3 epochs"):
        report.compare(results.runs.iloc[0], again[:2], results)


def test_a_run_is_made_again_with_its_ranks_arguments_and_setting(tmp_path, monkeypatch, capsys):
    """In place of the script, a process whose returns depend on all that it is told."""

    class Run:
        def __init__(self, command, **_):
            given = dict(re.findall(r"--(\S+?)[ =](\S+)", " ".join(command)))
            ranks, seed, name = int(given["num-cpu"]), int(given["seed"]), given["exp-name"]
            config = {"ranks": ranks, "gamma": float(given.get("gamma", 0.99))}
            config |= {"versions": VERSIONS, "folder": f"{name}/{name}_s{seed}"}
            returns = np.arange(9) * config["gamma"] + 10 * ranks + 100 * seed
            write_run(Path(given["data-dir"]), seed, returns, **config)
            self.code, self.polls = None, 0

        def poll(self):
            self.polls += 1
            return self.code if self.polls < 20 else 0  # it ends by itself, too

        def terminate(self):
            self.code = -15

    for ranks, gamma in ((1, 0.99), (1, 0.5), (2, 0.5)):
        words = f"python x --num-cpu {ranks} --gamma {gamma} --seed 1 --exp-name x{ranks}{gamma}"
        Run([*words.split(), "--data-dir", str(tmp_path)])
    report.collect([str(tmp_path)], tmp_path)
    results = report.Results(tmp_path)
    monkeypatch.setattr(report, "Results", lambda: results)
    monkeypatch.setattr(report, "Popen", Run)
    monkeypatch.setattr(os, "sched_setaffinity", lambda *_: None, raising=False)
    for setting, words in [
        ("plain", "64 32 --num-cpu 1"),
        ("--gamma 0.5", "64 32 --gamma 0.5 --num-cpu 1"),
        ("--gamma 0.5 --num-cpu 2", "64 32 --gamma 0.5 --num-cpu 2"),
    ]:
        with pytest.raises(SystemExit) as stopped:
            row = ["ppo_torch", "Hopper-v4", "1", f"--setting={setting}"]
            report.main(["--verify", *row, "--epochs", "4"])
        said = capsys.readouterr()
        assert said.out.splitlines()[0].endswith(words)
        assert stopped.value.code == 0 and "\n4 of 4 epochs equal to the digit\n" in said.out
        assert "4 epochs; 4000 steps took 2.0 s when" in said.out and "4/4" in said.err


def test_runs_are_taken_in_before_the_pages_are_made(monkeypatch, capsys):
    monkeypatch.setattr(report, "collect", lambda logdirs, setting: f"{setting} {len(logdirs)}")
    monkeypatch.setattr(report, "make", dict)
    report.main(["--collect", "data/a", "data/b", "--setting", "plain, Zen 3"])
    assert capsys.readouterr().out == "collected plain, Zen 3 2 runs\n"


def test_tables_go_between_their_marks():
    page = "a\n<!-- results: x -->\nold\n<!-- results: end -->\nb\n<!-- results: y -->\n"
    page += "<!-- results: end -->\n"
    filled = report.fill(page, {"x": "X", "y": "Y"})
    assert "old" not in filled and re.findall(r"^\w$", filled, flags=re.M) == ["a", "X", "b", "Y"]
    assert report.fill(filled, {"x": "X", "y": "Y"}) == filled


def test_what_is_committed_is_what_the_command_makes():
    """Pages to the letter; figures to hundredths of a point, since sums round by CPU."""
    files = report.make()
    assert {"README.md", "on_policy.md", "off_policy.md", "all.svg"} < {path.name for path in files}
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
