"""benchmark/plot.py: what is read, what is averaged, what is drawn, what is refused."""

import csv
import json
import pickle
import subprocess
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from benchmark import plot


def write_run(
    data_dir,
    exp_name,
    seed,
    returns,
    env="Hopper-v4",
    script="algos/ppo_torch.py",
    steps=1000,
    column="AverageEpRet",
):
    run = data_dir / exp_name / f"{exp_name}_s{seed}"
    run.mkdir(parents=True)
    config = {"exp_name": exp_name, "env_id": env, "seed": seed, "script": script}
    (run / "config.json").write_text(json.dumps(config))
    lines = [f"Epoch\t{column}\tTotalEnvInteracts\tTime"]
    lines += [f"{i}\t{r}\t{i * steps}\t{i * 2.5 + seed}" for i, r in enumerate(returns, 1)]
    (run / "progress.txt").write_text("\n".join(lines) + "\n")
    return run


def read_csv(path):
    with open(path, newline="") as f:
        return list(csv.DictReader(f))


def command_line(*args, cwd):
    return subprocess.run(
        [sys.executable, str(ROOT / "benchmark" / "plot.py"), *map(str, args)],
        cwd=cwd,
        capture_output=True,
        text=True,
    )


def test_datasets_have_spinning_ups_columns(tmp_path):
    write_run(tmp_path, "ppo", 0, [1, 2])
    write_run(tmp_path, "ppo", 1, [3, 4])
    write_run(tmp_path, "sac", 0, [5], column="AverageTestEpRet", script="algos/sac_tf1.py")
    a, b, c = plot.get_datasets(str(tmp_path))
    assert (a["Unit"][0], b["Unit"][0], c["Unit"][0]) == (0, 1, 0)
    assert (a["Condition1"][0], b["Condition2"][0], c["Condition2"][0]) == ("ppo", "ppo-1", "sac-0")
    assert b["Performance"].tolist() == [3, 4]
    assert c["Performance"].tolist() == [5]
    assert (c["Algo"][0], c["Framework"][0], c["Env"][0]) == ("sac", "tf1", "Hopper-v4")
    assert plot.get_datasets(str(tmp_path), "named")[2]["Condition1"][0] == "named"


def test_a_line_being_written_is_not_read(tmp_path):
    run = write_run(tmp_path, "ppo", 0, [1, 2, 3])
    whole = (run / "progress.txt").read_text()
    (run / "progress.txt").write_text(whole + "4\t17")
    assert plot.get_datasets(str(tmp_path))[0]["AverageEpRet"].tolist() == [1, 2, 3]


def test_broken_runs_are_named_and_left_out(tmp_path, capsys):
    class Planted:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "executed",))

    whole = write_run(tmp_path, "good", 0, [1, 2])
    broken = {
        "empty": b"",
        "header": b"Epoch\tAverageEpRet\n",
        "words": b"Epoch\tAverageEpRet\n1\tmany\n",
        "ragged": b"Epoch\tAverageEpRet\n1\t2\t3\n",
        "pickle": pickle.dumps(Planted()),
    }
    for name, content in broken.items():
        (write_run(tmp_path, name, 0, [1]) / "progress.txt").write_bytes(content)
    (write_run(tmp_path, "config", 0, [1]) / "config.json").write_text('{"exp_name": ')
    (write_run(tmp_path, "nested", 0, [1]) / "config.json").write_text("[" * 100_000)
    (write_run(tmp_path, "never", 0, [1]) / "progress.txt").unlink()
    (tmp_path / "launched").mkdir()
    (tmp_path / "launched" / "launch.log").write_text("Killed\n")

    datasets = plot.get_datasets(str(tmp_path))
    assert [d.attrs["run_dir"] for d in datasets] == [str(whole)]
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 9
    for name in [*broken, "config", "nested", "never", "launched"]:
        assert any(f"{tmp_path / name}" in line for line in said), name
    assert not (tmp_path / "executed").exists()


def test_a_run_without_config_is_called_by_its_directory(tmp_path, capsys):
    run = write_run(tmp_path, "old", 3, [1])
    (run / "config.json").unlink()
    assert plot.get_datasets(str(tmp_path))[0]["Condition1"][0] == "old_s3"
    assert str(run) in capsys.readouterr().err


def test_prefixes_and_bare_names(tmp_path, monkeypatch):
    for name in ("ppo", "ppo_wide", "sac"):
        write_run(tmp_path, name, 0, [1])
    monkeypatch.chdir(tmp_path)
    assert plot.expand_logdirs(["ppo"]) == ["ppo"]
    assert plot.expand_logdirs(["pp"]) == ["./ppo", "./ppo_wide"]
    assert plot.expand_logdirs(["ppo_", "sac/"]) == ["./ppo_wide", "sac/"]
    assert plot.expand_logdirs([str(tmp_path / "s")]) == [str(tmp_path / "sac")]
    with pytest.raises(ValueError, match="ddpg"):
        plot.expand_logdirs(["ddpg"])


def test_select_exclude_and_legend(tmp_path):
    for name in ("ppo_a", "ppo_b", "sac_a"):
        write_run(tmp_path, name, 0, [1])

    def names(**kwargs):
        found = plot.get_all_datasets([f"{tmp_path}/p", f"{tmp_path}/s"], **kwargs)
        return [d["Condition1"][0] for d in found]

    assert names() == ["ppo_a", "ppo_b", "sac_a"]
    assert names(select=["ppo", "_b"]) == ["ppo_b"]
    assert names(exclude=["ppo_b", "sac"]) == ["ppo_a"]
    assert names(exclude=["ppo_b"], legend=["P", "S"]) == ["P", "S"]
    with pytest.raises(ValueError, match="2 names for 3"):
        names(legend=["P", "S"])
    twice = plot.get_all_datasets([str(tmp_path), f"{tmp_path}/p"])
    assert len(twice) == 3


def test_smoothing_is_the_mean_of_a_centred_window():
    values = np.array([1.0, 2.0, 6.0, 4.0, 7.0])
    expected = [1.5, 3.0, 4.0, 17 / 3, 5.5]
    np.testing.assert_allclose(plot.smooth_values(values, 3), expected)
    np.testing.assert_allclose(plot.smooth_values(values, 99), np.full(5, 4.0))
    assert plot.smooth_values(values, 1) is values


def test_mean_and_std_of_runs_of_different_length(tmp_path):
    write_run(tmp_path, "ppo", 0, [1, 2, 3])
    write_run(tmp_path, "ppo", 1, [3, 6])
    curves = plot.collect_curves(
        plot.get_datasets(str(tmp_path)), "TotalEnvInteracts", "Performance"
    )
    (curve,) = curves
    assert curve["x"].tolist() == [1000, 2000, 3000]
    assert curve["center"].tolist() == [2, 4, 3]
    assert (curve["center"] - curve["low"]).tolist() == [1, 2, 0]
    assert curve["n"].tolist() == [2, 2, 1]


def test_runs_with_other_epochs_are_interpolated_inside_their_range(tmp_path):
    write_run(tmp_path, "ppo", 0, [0, 10, 20], steps=1000)
    write_run(tmp_path, "ppo", 1, [7, 9], steps=1500)
    x, y = plot.stack_runs(plot.get_datasets(str(tmp_path)), "TotalEnvInteracts", "Performance")
    assert x.tolist() == [1000, 1500, 2000, 3000]
    np.testing.assert_allclose(y, [[0, 5, 10, 20], [np.nan, 7, 7 + 2 / 3, 9]])


def test_epochs_without_an_episode_are_skipped(tmp_path):
    write_run(tmp_path, "ppo", 0, ["nan", 2, "", 4])
    x, y = plot.stack_runs(plot.get_datasets(str(tmp_path)), "Epoch", "Performance")
    assert x.tolist() == [2, 4]
    assert y.tolist() == [[2, 4]]


def test_estimators():
    y = np.array([[1.0, 5], [2, np.nan], [3, 7], [4, 6], [100, 8]])
    # A quarter of 5 runs rounds down to 1: the lowest and highest go; of 4 likewise.
    np.testing.assert_allclose(plot.iqm(y), [3, 6.5])
    np.testing.assert_allclose(plot.iqm(np.arange(8.0).reshape(8, 1) ** 2), [(4 + 9 + 16 + 25) / 4])
    center, low, high, n = plot.aggregate(y, "median")
    np.testing.assert_allclose(center, [3, 6.5])
    assert n.tolist() == [5, 4]
    assert (low <= center).all() and (center <= high).all()
    np.testing.assert_allclose(plot.aggregate(y, "max")[0], [100, 8])


def test_bootstrap_interval_of_the_mean_is_that_of_the_normal_distribution():
    y = np.random.default_rng(1).normal(5, 2, size=(400, 3))
    center, low, high, _ = plot.aggregate(y, "mean", "ci", resamples=2000)
    half = 1.96 * y.std(axis=0) / np.sqrt(400)
    np.testing.assert_allclose(high - center, half, rtol=0.1)
    np.testing.assert_allclose(center - low, half, rtol=0.1)


def test_bootstrap_where_some_resamples_have_no_run():
    y = np.array([[1.0, 2.0], [3.0, np.nan], [5.0, np.nan]])
    _, low, high, n = plot.aggregate(y, "iqm")
    assert n.tolist() == [3, 1]
    assert (low[1], high[1]) == (2, 2)
    assert 1 <= low[0] < 3 < high[0] <= 5


def test_reference_is_the_published_curve_without_version():
    framework, x, mean, std = plot.reference_curve("sac", "torch", "HalfCheetah-v4")
    assert framework == "torch"
    assert len(x) == len(mean) == len(std) == 150
    assert (np.diff(x) > 0).all() and x[-1] > 2.9e6
    # 1M steps, from published_at_1m_steps.csv beside it.
    rows = read_csv(ROOT / "benchmark/reference/published_at_1m_steps.csv")
    (row,) = [
        r
        for r in rows
        if (r["algo"], r["env"], r["framework"]) == ("SAC", "HalfCheetah-v3", "torch")
        and r["source"] == "SpinningUp bench 2020"
    ]
    assert abs(np.interp(1e6, x, mean) - float(row["mean"])) < 50
    assert plot.reference_curve("trpo", "torch", "Hopper-v4")[0] == "tf1"
    assert plot.reference_curve("ppo", "torch", "CartPole-v1") is None


def test_labels_drop_the_environment_unless_that_confuses(tmp_path):
    write_run(tmp_path, "ppo_torch_Hopper-v4", 0, [1])
    write_run(tmp_path, "grid_alp0-1_envhopper-v4", 0, [1])
    write_run(tmp_path, "grid_alp0-1_envant-v4", 0, [1], env="Ant-v4")
    write_run(tmp_path, "same", 0, [1])
    write_run(tmp_path, "same_envhopper-v4", 0, [1])
    datasets = plot.get_datasets(str(tmp_path))
    assert plot.curve_labels(datasets, "Condition1") == [
        *("grid_alp0-1", "grid_alp0-1", "ppo_torch", "same", "same_envhopper-v4")
    ]


def test_one_panel_an_environment_with_its_curves(tmp_path):
    for env in ("Hopper-v4", "Ant-v4"):
        for algo in ("ppo", "trpo"):
            for seed in range(3):
                returns = np.arange(40) * (2 if algo == "ppo" else 1) + seed
                name = f"x_{algo}_env{env.lower()}"
                write_run(tmp_path, name, seed, returns, env, f"algos/{algo}_torch.py")
    figure = plot.make_plots([str(tmp_path)], reference=True)
    first, second = figure.axes[:2]
    assert (first.get_title(), second.get_title()) == ("Hopper-v4", "Ant-v4") or (
        (first.get_title(), second.get_title()) == ("Ant-v4", "Hopper-v4")
    )
    for ax in (first, second):
        lines = {line.get_label(): line for line in ax.lines}
        assert set(lines) == {*("x_ppo", "x_trpo", "published PPO (torch)", "published TRPO (tf1)")}
        np.testing.assert_allclose(lines["x_ppo"].get_ydata(), np.arange(40) * 2 + 1)
        assert lines["x_ppo"].get_color() == lines["published PPO (torch)"].get_color()
        assert ax.get_xlim() == (0, 40_000)
    assert "-v3 tasks" in figure.get_supxlabel()
    colors = [{line.get_label(): line.get_color() for line in ax.lines} for ax in (first, second)]
    assert colors[0] == colors[1]


def test_command_line_writes_figures_and_numbers(tmp_path):
    write_run(tmp_path, "ppo", 0, [1, 2, 3, 4])
    write_run(tmp_path, "ppo", 1, [3, 4, 5])
    for kind, start in (("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")):
        done = command_line("ppo", "--out", f"a.{kind}", "--csv", "a.csv", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert (tmp_path / f"a.{kind}").read_bytes().startswith(start)
    rows = read_csv(tmp_path / "a.csv")
    got = [
        tuple(float(r[c]) for c in ("TotalEnvInteracts", "mean", "low", "high", "n")) for r in rows
    ]
    assert got == [(1000, 2, 1, 3, 2), (2000, 3, 2, 4, 2), (3000, 4, 3, 5, 2), (4000, 4, 4, 4, 1)]
    assert {r["algo"] + r["framework"] + r["env"] for r in rows} == {"ppotorchHopper-v4"}


@pytest.mark.parametrize(
    ("args", "word"),
    [
        (["nothing"], "nothing"),
        (["ppo", "--value", "Speed"], "Speed"),
        (["ppo", "--xaxis", "Steps"], "Steps"),
        (["ppo", "--smooth", "0"], "--smooth"),
        (["ppo", "--out", "a.jpeg"], "a.jpeg"),
        (["ppo", "--out", "no/a.png"], "no"),
        (["ppo", "--legend", "a", "b"], "--legend"),
        (["ppo", "--select", "sac"], "no run"),
        (["ppo", "--font-scale", "0"], "--font-scale"),
        (["ppo", "--est", "mode"], "--est"),
        (["hollow"], "no run"),
    ],
)
def test_bad_input_is_one_line(tmp_path, monkeypatch, capsys, args, word):
    write_run(tmp_path, "ppo", 0, [1])
    (tmp_path / "hollow").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        plot.main(args)
    assert stopped.value.code == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert said[-1].startswith("plot.py: error: ") and word in said[-1]
    assert "Traceback" not in "".join(said)
    assert not list(tmp_path.glob("*.png"))


def test_no_window_without_a_display(tmp_path):
    write_run(tmp_path, "ppo", 0, [1])
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmark" / "plot.py"), "ppo", "--show"],
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and "display" in done.stderr
