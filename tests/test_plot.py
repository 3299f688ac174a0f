"""benchmark/plot.py: what is read, what is averaged, what is drawn, what is refused."""

import json
import re
import shutil
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import numpy as np
import pandas as pd
import pytest
from conftest import ROOT, run

from benchmark import intervals, launch, plot

STEPS = "TotalEnvInteracts"


def write_run(data_dir, exp_name, seed, returns, env="Hopper-v4", script="ppo_torch.py", **more):
    steps, column = more.get("steps", 1000), more.get("column", "AverageEpRet")
    path = data_dir / exp_name / f"{exp_name}_s{seed}"
    path.mkdir(parents=True)
    config = {"exp_name": exp_name, "env_id": env, "seed": seed, "script": script}
    (path / "config.json").write_text(json.dumps(config))
    lines = [f"Epoch\t{column}\tCutEpRet\t{STEPS}\tTime"]
    lines += [f"{i}\t{r}\t-5\t{i * steps}\t{i * 2.5 + seed}" for i, r in enumerate(returns, 1)]
    (path / "progress.txt").write_text("\n".join(lines) + "\n")
    return path


def curve_of(tmp_path, xaxis=STEPS, **options):
    datasets = plot.get_datasets(str(tmp_path))
    (curve,) = plot.collect_curves(datasets, xaxis, "Performance", **options)
    return curve


def test_datasets_have_spinning_ups_columns(tmp_path):
    write_run(tmp_path, "ppo", 0, [1, 2])
    with open(write_run(tmp_path, "ppo", 1, [3, 4]) / "progress.txt", "a") as f:
        f.write("3\t17")  # a line that is being written is not read
    write_run(tmp_path, "sac", 0, [5], column="AverageTestEpRet", script="algos/sac_tf1.py")
    a, b, c = plot.get_datasets(str(tmp_path))
    assert (a["Unit"][0], b["Unit"][0], c["Unit"][0]) == (0, 1, 0)
    assert (a["Condition1"][0], b["Condition2"][0], c["Condition2"][0]) == ("ppo", "ppo-1", "sac-0")
    assert (b["Performance"].tolist(), c["Performance"].tolist()) == ([3, 4], [5])
    assert [c.attrs[k] for k in ("algo", "framework", "env")] == ["sac", "tf1", "Hopper-v4"]
    assert plot.get_datasets(str(tmp_path), "named")[2]["Condition1"][0] == "named"
    # Without test episodes, the return is that of training.
    path = write_run(tmp_path / "b", "td3", 0, [5], column="AverageEpRet\tAverageTestEpRet")
    table = (path / "progress.txt").read_text().replace("\t5\t", "\t5\tnan\t")
    (path / "progress.txt").write_text(table)
    (curve,) = plot.make_plots([str(tmp_path / "b")]).axes
    assert curve.lines[0].get_ydata().tolist() == [5] and "test" not in curve.get_ylabel().lower()
    assert launch.progress_words(launch.Run(path, [], {}))[2] == "return 5.0"


def test_broken_runs_are_named_and_left_out(tmp_path, capsys, planted):
    whole = write_run(tmp_path, "good", 0, [1, 2])
    broken = {
        "empty": b"", "header": b"Epoch\tAverageEpRet\n", "words": b"Epoch\tRet\n1\tmany\n",
        "ragged": b"Epoch\tRet\n1\t2\t3\n", "pickle": planted,
    }  # fmt: skip
    for name, content in broken.items():
        (write_run(tmp_path, name, 0, [1]) / "progress.txt").write_bytes(content)
    (write_run(tmp_path, "config", 0, [1]) / "config.json").write_text('{"exp_name": ')
    (write_run(tmp_path, "never", 0, [1]) / "progress.txt").unlink()
    (tmp_path / "launched").mkdir()
    (tmp_path / "launched" / "launch.log").write_text("Killed\n")
    assert [d.attrs["run_dir"] for d in plot.get_datasets(str(tmp_path))] == [str(whole)]
    said = capsys.readouterr().err.splitlines()
    assert len(said) == len(broken) + 3
    for name in [*broken, "config", "never", "launched"]:
        assert any(f"{tmp_path / name}" in line for line in said), name


def test_a_directory_wins_over_a_prefix_and_a_prefix_is_spelt_out(tmp_path, monkeypatch, capsys):
    for name in ("ppo", "ppo_wide", "sac"):
        write_run(tmp_path, name, 0, [1])
    monkeypatch.chdir(tmp_path)
    assert plot.expand_logdirs(["ppo"]) == ["ppo"]
    assert plot.expand_logdirs(["ppo_", "sac/"]) == ["ppo_wide", "sac/"]
    assert plot.expand_logdirs([str(tmp_path / "s")]) == [str(tmp_path / "sac")]
    assert not capsys.readouterr().err
    assert plot.expand_logdirs(["pp"]) == ["ppo", "ppo_wide"]
    assert capsys.readouterr().err == "plot.py: pp stands for ppo ppo_wide\n"
    with pytest.raises(ValueError, match="ddpg"):
        plot.expand_logdirs(["ddpg"])


def test_select_exclude_and_legend(tmp_path):
    for name in ("ppo_10", "ppo_2", "sac_a"):  # in natural order, 2 comes before 10
        write_run(tmp_path, name, 0, [1])

    def names(*logdirs, **kwargs):
        found = plot.get_all_datasets([f"{tmp_path}/{x}" for x in logdirs], **kwargs)
        return [d["Condition1"][0] for d in found]

    assert names("p", "s") == names("", "p") == ["ppo_2", "ppo_10", "sac_a"]
    assert names("p", "s", select=["ppo", "_10"]) == ["ppo_10"]
    assert names("p", "s", exclude=["ppo_10", "sac"]) == ["ppo_2"]
    assert names("p", "s", exclude=["ppo_10"], legend=["P", "S"]) == ["P", "S"]
    rates = [f"lr0-{x}" for x in ("001", "01", "25", "3")]  # as grid.py writes 0.001
    for name in rates[::-1]:
        write_run(tmp_path, name, 0, [1])
    assert names("lr") == rates
    with pytest.raises(ValueError, match="2 names for 3"):
        names("p", "s", legend=["P", "S"])


def test_one_curve_of_two_directories_is_named(tmp_path, capsys):
    """Of the same name and environment: a sweep of a script and one of its copy, say."""
    folders = [f"{tmp_path}/{x}" for x in "abc"]
    for seed, env in enumerate(["Hopper-v4", "Hopper-v4", "Ant-v4"]):
        write_run(Path(folders[seed]), "ppo", seed, [seed], env)
    plot.get_all_datasets(folders, legend=["A", "B", "C"])
    assert not capsys.readouterr().err
    plot.get_all_datasets(folders)
    said = f"plot.py: the runs called ppo in {folders[0]} and {folders[1]} make one curve; "
    assert capsys.readouterr().err == said + "with --legend, each directory has its own\n"


def test_a_copy_of_a_run_is_named(tmp_path, capsys):
    """It counts as another seed: the same numbers from the same seed, whatever time they took."""
    first = write_run(tmp_path, "ppo", 0, [1, 2])
    write_run(tmp_path, "ppo", 1, [1, 2])  # another seed; its returns may be the same
    write_run(tmp_path, "sac", 0, [1, 2])  # another experiment
    plot.get_all_datasets([str(tmp_path)])
    assert not capsys.readouterr().err
    copy = shutil.copytree(first, tmp_path / "ppo" / "copy")
    table = (copy / "progress.txt").read_text()
    (copy / "progress.txt").write_text(table.replace("\t2.5\n", "\t3.5\n"))  # Time
    assert len(plot.get_all_datasets([str(tmp_path)])) == 4
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"plot.py: {first} has the seed and the first epoch of {copy}, ")
    plot.get_all_datasets([str(first), str(first.parent / "ppo_s0")])  # one run, named twice
    assert not capsys.readouterr().err


# Aggregating --------------------------------------------------------------------------------------


def test_smoothing_is_the_mean_of_a_centered_window():
    values = np.array([1.0, 2.0, 6.0, 4.0, 7.0])
    np.testing.assert_allclose(plot.smooth_values(values, 3), [1.5, 3.0, 4.0, 17 / 3, 5.5])
    np.testing.assert_allclose(plot.smooth_values(values, 99), np.full(5, 4.0))
    np.testing.assert_array_equal(plot.smooth_values(values, 1), values)


def test_mean_and_std_of_runs_of_different_length(tmp_path):
    for seed, returns in enumerate(([1, 5], [2], [6, 8])):
        write_run(tmp_path, "ppo", seed, returns)
    mean = curve_of(tmp_path)[[STEPS, "mean", "low", "high", "n"]].to_numpy()
    std = np.std([1, 2, 6])
    np.testing.assert_allclose(mean, [[1000, 3, 3 - std, 3 + std, 3], [2000, 6.5, 5, 8, 2]])
    others = {est: curve_of(tmp_path, est=est) for est in ("median", "min", "max")}
    centers = {est: curve[est].tolist() for est, curve in others.items()}
    assert centers == {"median": [2, 6.5], "min": [1, 5], "max": [6, 8]}
    assert (others["max"]["low"] == others["max"]["high"]).all()


def test_runs_with_other_epochs_are_interpolated_inside_their_range(tmp_path):
    """Epochs without an episode are skipped."""
    write_run(tmp_path, "ppo", 0, [0, "nan", 20, ""], steps=1000)
    write_run(tmp_path, "ppo", 1, [7, 9], steps=1500)
    table = plot.stack_runs(plot.get_datasets(str(tmp_path)), STEPS, "Performance")
    assert table.index.tolist() == [1000, 1500, 3000]
    np.testing.assert_allclose(table, [[0, np.nan], [5, 7], [20, 9]])


def test_a_run_whose_episodes_never_end_is_explained(tmp_path, capsys):
    """Instead of an empty figure: the reason and the cure, beside a run that can be plotted too."""
    write_run(tmp_path, "never", 0, ["nan", "nan"])
    write_run(tmp_path, "some", 0, [1, 2])
    write_run(tmp_path, "other", 0, [1], column="Loss")
    assert len(plot.make_plots([str(tmp_path)]).axes[0].lines) == 1
    said = capsys.readouterr().err
    assert "left out never: no episode finished within an epoch" in said and "plot CutEpRet" in said
    has = f"no column Performance of numbers, only Epoch, Loss, CutEpRet, {STEPS}, Time\n"
    assert f"left out {tmp_path}/other/other_s0: {has}" in said
    (curve,) = plot.make_plots([f"{tmp_path}/never"], value=("CutEpRet",)).axes[0].lines
    assert curve.get_ydata().tolist() == [-5, -5]


# Comparing ----------------------------------------------------------------------------------------


def test_two_directories_are_compared(tmp_path, monkeypatch, capsys):
    """Against scipy, at the last step that all runs of an environment have reached."""
    from scipy import stats

    mine, base = np.array([230.0, 310, 250]), np.array([120.0, 240, 100, 130])
    for env, *both in (("Hopper-v4", mine, base), ("Ant-v4", -base / 100, -mine / 100)):
        for name, values in zip(("mine", "mine_base"), both, strict=True):
            for seed, x in enumerate(values):
                write_run(tmp_path / name, f"x_{env}", seed, [0, x, *[999] * (seed > 0)], env)
    monkeypatch.chdir(tmp_path)

    def rows(*flags):
        plot.main(["mine", f"{tmp_path}//mine_base", "--compare", *flags])
        said, _, printed = capsys.readouterr().out.partition("P(A > B)\n")
        assert said.startswith(f"A: mine\nB: {tmp_path}/mine_base\n")
        return {line.split()[0]: line for line in printed.partition("\n\n")[0].splitlines()}

    def wanted(x, y, digits):
        test = stats.ttest_ind(x, y, equal_var=False)
        half = np.diff(test.confidence_interval())[0] / 2
        parts = [rf"\{x.mean() - y.mean():+.{digits}f} ± {half:.{digits}f}"]
        parts += [rf"{stats.trim_mean(v, 0.25):.{digits}f} \(\S+ to \S+\)" for v in (x, y)]
        better = stats.mannwhitneyu(x, y).statistic / x.size / y.size
        return " +".join([*parts, rf"{better:.2f} \(\S+ to \S+\)$"])

    found = rows()
    assert re.search(rf"Hopper-v4 +2k +3, 4 +{wanted(mine, base, 0)}", found["Hopper-v4"])
    assert re.search(rf"2k +4, 3 +{wanted(-base / 100, -mine / 100, 2)}", found["Ant-v4"])
    low, high = intervals.bootstrap(intervals.improvement, [mine], [base])[1:]
    assert found["Hopper-v4"].endswith(f" ({low:.2f} to {high:.2f})")
    # Over both, as shares of the base's mean, 147.5 and -2.633.
    scaled = [[mine / 147.5, -base / 263.33], [base / 147.5, -mine / 263.33]]
    both = [[(v.mean(), v.std(ddof=1), len(v)) for v in group] for group in scaled]
    parts = [r"\{:+.2f} ± {:.2f}".format(*intervals.welch(*zip(*both, strict=True)))]
    parts += [rf"{stats.trim_mean(np.concatenate(group), 0.25):.2f} \(.*\)" for group in scaled]
    assert re.search(" +".join([*parts, r"0\.92 \("]), found["all"])
    # At the end of an average there is no epoch that only some have reached: no 999.
    assert re.search(wanted(mine / 2, base / 2, 1), rows("--smooth", "3")["Hopper-v4"])
    cut = rows("--value", "CutEpRet", "--xaxis", "Epoch")["Hopper-v4"]
    assert re.search(r"Hopper-v4 +2 +3, 4 +\+0\.00 ± 0\.00 +-5\.00 ", cut)
    (one,) = rows("--select", "Hopper", "_s0").values()
    assert re.fullmatch(r" *Hopper-v4 +2k +1, 1 +\+110 +230 +120 +1.00", one)
    write_run(tmp_path / "mine", "only", 0, [1], "Swimmer-v4")
    write_run(tmp_path / "mine", "x_Hopper-v4", 3, ["nan"])
    assert [*rows()] == ["Ant-v4"]
    write_run(tmp_path / "mine", "y", 0, [1], "Ant-v4")
    for words, text in [
        (["mine", "mine_base"], "Ant-v4 has more than two experiments, x_Ant-v4, y, x_Ant-v4: "),
        (["mine", "mine_base", "--select", "/y/"], "nothing to compare"),
        (["mine"], "--compare takes two directories"),
    ]:
        with pytest.raises(SystemExit):
            plot.main([*words, "--compare"])
        assert f"plot.py: error: {text}" in capsys.readouterr().err


# Figures ------------------------------------------------------------------------------------------


def test_labels_drop_the_environment():
    for condition in ("ppo_torch_Hopper-v4", "ppo_torch_envhopper-v4", "ppo_torch", "hopper-v4"):
        label = "hopper-v4" if condition == "hopper-v4" else "ppo_torch"
        assert plot.curve_label(condition, "Hopper-v4") == label
    assert plot.curve_label("x_my-pkg-env-v0_a", "my.pkg:Env-v0") == "x_a"


def test_experiments_that_the_environment_alone_tells_apart(tmp_path):
    for name in ("ppo_torch_Hopper-v4", "ppo_torch_envhopper-v4"):
        write_run(tmp_path, name, 0, [1, 2])
    curves = plot.collect_curves(plot.get_datasets(str(tmp_path)), STEPS, "Performance")
    assert {curve.attrs["label"] for curve in curves} == {
        "ppo_torch_Hopper-v4",
        "ppo_torch_envhopper-v4",
    }


def test_one_line_a_run_over_several_directories(tmp_path):
    """It is named by its seed, and by a number where two have the same."""
    for day, seed, ret in (("monday", 3, 0), ("tuesday", 3, 100), ("tuesday", 5, 7)):
        write_run(tmp_path / day, "ppo", seed, [ret])
    datasets = plot.get_all_datasets([str(tmp_path / "monday"), str(tmp_path / "tuesday")])
    curves = plot.collect_curves(datasets, STEPS, "Performance", count=True)
    labels = [(curve.attrs["label"], *curve["mean"]) for curve in curves]
    assert labels == [("ppo-0", 0), ("ppo-1", 100), ("ppo, seed 5", 7)]


def test_one_panel_an_environment_with_its_curves(tmp_path):
    for env in ("Hopper-v4", "Ant-v4"):
        for algo in ("ppo", "trpo"):
            for seed in range(3):
                returns = np.arange(40) * (2 if algo == "ppo" else 1) + seed
                name = f"x_{algo}_env{env.lower()}"
                write_run(tmp_path, name, seed, returns, env, f"algos/{algo}_torch.py")
    figure = plot.make_plots([str(tmp_path)], reference=True)
    assert sorted(ax.get_title() for ax in figure.axes) == ["Ant-v4", "Hopper-v4"]
    assert {ax.get_ylabel() for ax in figure.axes} == {"average return"}
    for ax in figure.axes:
        lines = {line.get_label(): line for line in ax.lines}
        assert set(lines) == {*("x_ppo", "x_trpo", "published PPO (torch)", "published TRPO (tf1)")}
        np.testing.assert_allclose(lines["x_ppo"].get_ydata(), np.arange(40) * 2 + 1)
        assert lines["x_ppo"].get_color() == lines["published PPO (torch)"].get_color()
        assert lines["published PPO (torch)"].get_xdata()[-1] == ax.get_xlim()[1] == 40_000
        bands = [tuple(band.get_facecolor()[0][:3]) for band in ax.collections]
        assert not {*bands[:2]} & {*bands[2:]}  # ours and the published ones are told apart
        # The bands reach one standard deviation to either side; ours is that of 0, 1 and 2.
        steps, mean, std = (x[0] for x in plot.reference_curve("ppo", "torch", ax.get_title())[1:])
        corners = [collection.get_paths()[0].vertices.tolist() for collection in ax.collections]
        for sign in (-1, 1):
            assert [1000, pytest.approx(1 + sign * np.sqrt(2 / 3))] in corners[0]
            assert [steps, pytest.approx(mean + sign * std)] in corners[2]
        ticks = [ax.xaxis.get_major_formatter()(x) for x in (500, 1000, 2500, 1_500_000)]
        assert ticks == ["500", "1k", "2.5k", "1.5M"]
    assert "-v3 tasks" in figure.get_supxlabel()
    colors = [{line.get_label(): line.get_color() for line in ax.lines} for ax in figure.axes]
    assert colors[0] == colors[1]


def test_a_published_curve_beyond_a_short_run_is_not_named(tmp_path, capsys):
    """Published curves start at 20k steps: neither legend nor axis knows them."""
    for seed in range(2):
        more = {"script": "sac_torch.py", "column": "AverageTestEpRet"}
        write_run(tmp_path, "sac", seed, [1, 2, 3], **more)
    figure = plot.make_plots([str(tmp_path)], reference=True, count=True)
    line, _ = figure.axes[0].lines
    assert line.get_label() == "sac, seed 0" and figure.axes[0].get_ylim()[1] < 4
    assert figure.axes[0].get_ylabel() == "average test return" and not figure.get_supxlabel()
    said = "plot.py: there is no published curve of sac on Hopper-v4"
    assert capsys.readouterr().err == f"{said} before 19999 steps\n"
    assert plot.reference_curve("ppo", "torch", "CartPole-v1") is None
    for name, its in {"mine": "torch", "torch_2": "torch", "tf1": "tf1", "tf1_mine": "tf1"}.items():
        assert plot.reference_curve("ppo", name, "Ant-v4")[0] == its
    assert plot.reference_curve("trpo", "torch", "Ant-v4")[0] == "tf1"
    write_run(tmp_path / "pole", "sac", 0, range(99), "CartPole-v1")
    plot.make_plots([str(tmp_path / "pole")], reference=True)
    assert capsys.readouterr().err == "plot.py: there is no published curve of ppo on CartPole-v1\n"


def test_a_published_curve_beside_several_and_a_long_title(tmp_path):
    """It has the color of none of them; the title is whole, in lines that fit."""
    env = "a_package_with_a_long_name.environments:TheHopperOfALongSeriesOfExperiments/Hopper-v4"
    for name in ("wide", "deep"):
        write_run(tmp_path, name, 0, range(40), env)
    (ax,) = plot.make_plots([str(tmp_path)], reference=True).axes
    assert len({line.get_color() for line in ax.lines}) == len(ax.lines) == 3
    assert ax.get_title().replace("\n", "") == env and max(map(len, ax.get_title().split())) < 50


def test_of_several_environments_and_values_each_value_has_a_row(tmp_path):
    for env in ("Hopper-v4", "Ant-v4"):
        write_run(tmp_path, f"x_env{env.lower()}", 0, [1, 2], env)
    write_run(tmp_path, "y", 0, [1], "Swimmer-v4", column="Loss")
    figure = plot.make_plots([str(tmp_path)], value=("CutEpRet", "AverageEpRet", STEPS))
    shown = [(ax.get_ylabel(), ax.get_title()) if ax.axison else () for ax in figure.axes]
    names = ("return so far of cut episodes", "average return", "environment steps")
    tasks = ("Ant-v4", "Hopper-v4", "Swimmer-v4")
    wanted = [(name, task) for name in names for task in tasks]
    wanted[5] = ()  # it has no such column
    assert shown == wanted and len({ax.get_position().y0 for ax in figure.axes}) == 3


def test_every_flag_has_its_effect(tmp_path, monkeypatch):
    """On the numbers that the command writes, worked by hand."""
    for seed, returns in enumerate(([1, 5, 3], [3, 1, 8], [8, 9, 4])):
        write_run(tmp_path, "ppo", seed, returns)
    write_run(tmp_path, "trpo", 0, [4, 4, 4])
    monkeypatch.chdir(tmp_path)

    def curves(flags):
        """{label: [x, centers, n]}"""
        plot.main(["p", "t", "--csv", "a.csv", *flags.split()])
        table = pd.read_csv("a.csv").groupby("label")
        return {k: [t.iloc[:, 5].tolist(), t.iloc[:, 6].tolist(), max(t.n)] for k, t in table}

    steps, trpo = [1000, 2000, 3000], [4, 4, 4]
    ppo, usual = [steps, [4, 5, 5], 3], {"trpo": [steps, trpo, 1]}
    usual["ppo"] = ppo
    for flags, changed in {
        "": {},
        "--smooth 3": {"ppo": [steps, pytest.approx([4.5, 14 / 3, 5]), 3]},
        "--est median": {"ppo": [steps, [3, 5, 4], 3]},
        "--value CutEpRet": {k: [steps, [-5, -5, -5], x[2]] for k, x in usual.items()},
        "--exclude ppo_s0 trpo": {"trpo": None, "ppo": [steps, [5.5, 5, 6], 2]},
        "--select _s0": {"ppo": [steps, [1, 5, 3], 1]},
        "--select trpo --xaxis Time": {"trpo": [[2.5, 5, 7.5], trpo, 1], "ppo": None},
        "--legend A B": {"ppo": None, "A": ppo, "trpo": None, "B": usual["trpo"]},
        "--select _s1 --count": {"trpo": None, "ppo": None, "ppo, seed 1": [steps, [3, 1, 8], 1]},
    }.items():
        wanted = {k: x for k, x in (usual | changed).items() if x}
        assert curves(flags) == wanted, flags
    assert not list(tmp_path.glob("plot.*"))
    shown = []
    monkeypatch.setattr("matplotlib.pyplot.show", lambda: shown.append(1))
    plot.main(["ppo", "--show"])
    assert shown and not list(tmp_path.glob("plot.*"))
    write_run(tmp_path, "long", 0, range(40))
    for flags in ([], ["--reference"]):
        plot.main(["long", "--out", "a.svg", *flags])
        assert ("published PPO" in Path("a.svg").read_text()) is bool(flags)


def test_command_line_writes_figures_and_numbers(tmp_path):
    write_run(tmp_path, "ppo", 0, [1, 2, 3, 4])
    write_run(tmp_path, "ppo", 1, [3, 4, 5])
    words = ["ppo", "--out", "a", "--csv", "a.csv", "-y", "Performance", "-s", "1"]
    done = run(ROOT / "benchmark" / "plot.py", *words, cwd=tmp_path)
    assert done.stdout == "wrote a.png\nwrote a.csv\n"
    rows = pd.read_csv(tmp_path / "a.csv")
    got = rows[[STEPS, "mean", "low", "high", "n"]].to_numpy().tolist()
    assert got == [[1000, 2, 1, 3, 2], [2000, 3, 2, 4, 2], [3000, 4, 3, 5, 2], [4000, 4, 4, 4, 1]]
    assert set(rows.algo + rows.framework + rows.env) == {"ppotorchHopper-v4"}
    for kind, start in (("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")):
        plot.make_plots([str(tmp_path / "ppo")], out=str(tmp_path / f"a.{kind}"))
        assert (tmp_path / f"a.{kind}").read_bytes().startswith(start)


@pytest.mark.parametrize(
    ("args", "word"),
    [
        ([], "directory"),
        (["nothing"], "nothing"),
        (["empty"], "there is no run in empty"),
        (["ppo", "--value", "Speed"], "Speed"),
        (["ppo", "--value", "Condition1"], "Condition1"),
        (["ppo", "--smooth", "0"], "smooth"),
        (["ppo", "--out", "a.docx"], "docx"),
        (["ppo", "-o", "no/a.png"], "no/a.png"),
        (["ppo", "-l", "a", "b"], "--legend"),
        (["ppo", "--select", "sac"], "no run"),
    ],
)
def test_bad_input_is_one_line(tmp_path, monkeypatch, capsys, args, word):
    write_run(tmp_path, "ppo", 0, [1])
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        plot.main(args)
    assert stopped.value.code == 2
    said = capsys.readouterr().err
    assert word in said and ("full helptext" in said or "plot.py: error: " in said.splitlines()[-1])
    assert not list(tmp_path.glob("*.png"))
