"""Learning curves of runs, averaged over seeds, alone or over the published ones.

    python benchmark/plot.py data/sac-mujoco --reference --out sac.png
    python benchmark/plot.py data/ppo data/trpo --legend PPO TRPO --smooth 11 --est iqm

A logdir is a directory that holds runs, at any depth, or the beginning of such names: `data/ppo`
stands for every directory in data/ whose name starts with "ppo", unless one is called just that;
`data/ppo/` is that one directory and no other. Runs with the same `exp_name` (in config.json) are
seeds of one experiment. Each environment gets a panel of its own. A line is thin, and without a
band, where only some of its seeds have come so far.

Options are those of Spinning Up's plotter. `get_datasets`, `get_all_datasets` and `make_plots` are
the same from Python.
"""

import argparse
import csv
import os
import sys
from pathlib import Path

import numpy as np
import pandas as pd

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that any directory will do
from common.serialization import printable, read_json, read_text

REFERENCE = Path(__file__).parent / "reference" / "spinning_up_2020_curves.csv"
ALGORITHMS = ("vpg", "trpo", "ppo", "ddpg", "td3", "sac")
# Okabe and Ito's palette, which colour-blind readers tell apart too, without its pale yellow.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
LARGEST = 1e100  # of a number that can be drawn beside others
AXIS_LABELS = {
    "TotalEnvInteracts": "environment steps",
    "AverageEpRet": "average return",
    "AverageTestEpRet": "average test return",
    "Performance": "average return",
    "Time": "seconds",
    "Epoch": "epoch",
}


def warn(message):
    print(f"plot.py: {printable(message, 1000)}", file=sys.stderr)


# ---------------------------------------------------------------------------------------- reading


def read_progress(path):
    """progress.txt as a DataFrame, one row an epoch; raises ValueError if there is nothing to plot.

    A run in progress may be in the middle of a line: what follows the last newline is not read.
    """
    text = read_text(path)
    lines = [line.split("\t") for line in text[: text.rfind("\n") + 1].splitlines() if line]
    if not lines:
        raise ValueError("progress.txt is empty")
    header, rows = lines[0], lines[1:]
    if not rows:
        raise ValueError("progress.txt has no finished epoch yet")
    if len(set(header)) < len(header) or any(len(row) != len(header) for row in rows):
        raise ValueError("progress.txt is not a table: its lines differ in length")
    try:
        # Spinning Up's own logger writes an empty string where a column has no value.
        values = [[float(v or "nan") for v in row] for row in rows]
    except ValueError as e:
        raise ValueError(f"progress.txt: {e}") from None
    return pd.DataFrame(values, columns=header)


def read_config(run_dir):
    """config.json as a dict, {} where there is none; raises ValueError if it cannot be read."""
    try:
        return read_json(Path(run_dir) / "config.json")
    except FileNotFoundError:
        return {}


def find_runs(logdir, select=None, exclude=None):
    """Directories of runs below `logdir`, sorted: those with a file that a run or grid.py writes.

    `select`: keep those whose path contains all of these strings; `exclude`: drop those whose path
    contains any.
    """
    runs = []
    for root, dirs, files in os.walk(logdir):
        dirs.sort()
        if {"progress.txt", "config.json", "status.json", "launch.log"} & set(files):
            runs.append(root)
    runs = [run for run in runs if all(part in run for part in select or ())]
    return [run for run in runs if not any(part in run for part in exclude or ())]


def get_datasets(logdir, condition=None, select=None, exclude=None):
    """Every run below `logdir`, as a list of DataFrames: its progress.txt with added columns.

    Unit (int, counts the seeds of one Condition1), Condition1 (`condition`, or the run's exp_name),
    Condition2 (Condition1-<number of the run>), Performance (AverageTestEpRet where the run has it,
    else AverageEpRet), and Env, Algo, Framework ("" where unknown). The run's path is in
    `frame.attrs["run_dir"]`. Runs that cannot be read are named on stderr and left out.
    """
    datasets, units = [], {}
    for run in find_runs(logdir, select, exclude):
        try:
            frame = read_progress(os.path.join(run, "progress.txt"))
            config = read_config(run)
        except FileNotFoundError:
            warn(f"left out {run}: no progress.txt in it")
            continue
        except (ValueError, OSError) as e:
            warn(f"left out {run}: {e}")
            continue
        exp_name = config.get("exp_name")
        name = condition or (printable(exp_name, 200) if isinstance(exp_name, str) else "")
        if not name:
            name = printable(os.path.basename(os.path.abspath(run)), 200)
            warn(f"{run}: no exp_name in config.json, plotted as {name}")
        algo, _, framework = Path(str(config.get("script", ""))).stem.partition("_")
        env = config.get("env_id") or config.get("env_name")
        units[name] = units.get(name, -1) + 1
        performance = "AverageTestEpRet" if "AverageTestEpRet" in frame else "AverageEpRet"
        if performance in frame:
            frame["Performance"] = frame[performance]
        frame["Unit"] = units[name]
        frame["Condition1"] = name
        frame["Condition2"] = f"{name}-{units[name]}"
        frame["Env"] = printable(env, 200) if isinstance(env, str) else ""
        frame["Algo"], frame["Framework"] = (algo, framework) if algo in ALGORITHMS else ("", "")
        frame.attrs["run_dir"] = run
        datasets.append(frame)
    return datasets


def expand_logdirs(logdirs):
    """What `logdirs`, directories or beginnings of their names, stand for: directories, in order.

    Raises ValueError for a logdir that stands for nothing.
    """
    found = []
    for logdir in logdirs:
        if os.path.isdir(logdir):
            matches = [logdir]
        else:
            base, prefix = os.path.split(logdir)
            base = base or "."
            names = sorted(os.listdir(base)) if os.path.isdir(base) and prefix else []
            matches = [os.path.join(base, name) for name in names if name.startswith(prefix)]
            matches = [match for match in matches if os.path.isdir(match)]
        if not matches:
            raise ValueError(f"no directory is called {logdir} or starts with it")
        found += [match for match in matches if match not in found]
    return found


def get_all_datasets(all_logdirs, legend=None, select=None, exclude=None):
    """The runs below all of `all_logdirs`; `legend` names the directories they expand to, in order.

    `select` and `exclude` choose among the runs by parts of their paths; a directory that they
    leave without any has no name in the legend. Returns a list of DataFrames as `get_datasets`
    does. Raises ValueError for a logdir that does not exist and a legend of the wrong length.
    """
    logdirs = []
    for logdir in expand_logdirs(all_logdirs):
        if find_runs(logdir, select, exclude):
            logdirs.append(logdir)
        elif not find_runs(logdir):
            warn(f"left out {logdir}: no run in it")
    if legend and len(legend) != len(logdirs):
        raise ValueError(
            f"--legend has {len(legend)} names for {len(logdirs)} directories: {' '.join(logdirs)}"
        )
    datasets, seen = [], set()
    for i, logdir in enumerate(logdirs):
        for frame in get_datasets(logdir, legend[i] if legend else None, select, exclude):
            path = os.path.realpath(frame.attrs["run_dir"])
            if path not in seen:  # data/ and data/ppo given together: a run counts once
                seen.add(path)
                datasets.append(frame)
    return datasets


# ------------------------------------------------------------------------------------ aggregating


def smooth_values(values, width):
    """Average of each value and its neighbours, `width` in all (fewer at both ends)."""
    if width <= 1 or len(values) < 2:
        return values
    kernel = np.ones(min(width, 2 * len(values) - 1))
    # numpy's "same" takes the longer operand's length; pad so that it is that of the values.
    half = len(kernel) // 2
    total = np.convolve(values, kernel, "full")[half : half + len(values)]
    count = np.convolve(np.ones(len(values)), kernel, "full")[half : half + len(values)]
    return total / count


def stack_runs(runs, xaxis, value, smooth=1):
    """Runs on a common x axis: x [T] and y [runs, T], NaN outside a run's own range.

    Epochs without a value (nobody finished an episode) are skipped. Runs whose epochs differ are
    interpolated between their own points, never beyond them.
    """
    curves = []
    for run in runs:
        x, y = run[xaxis].to_numpy(float), run[value].to_numpy(float)
        keep = (np.abs(x) < LARGEST) & (np.abs(y) < LARGEST)  # and neither is NaN
        x, y = x[keep], y[keep]
        order = np.argsort(x, kind="stable")
        if len(x):
            curves.append((x[order], smooth_values(y[order], smooth)))
    if not curves:
        return np.zeros(0), np.zeros((0, 0))
    grid = np.unique(np.concatenate([x for x, _ in curves]))
    longest = max(len(x) for x, _ in curves)
    if len(grid) > 2 * longest:  # for instance wall time, where no two runs share a point
        grid = np.linspace(grid[0], grid[-1], longest)
    y = [np.interp(grid, x, y, left=np.nan, right=np.nan) for x, y in curves]
    return grid, np.array(y)


def iqm(y, axis=0):
    """Interquartile mean: the mean without the lowest and the highest quarter, rounded down."""
    y = np.moveaxis(np.sort(y, axis=axis), axis, 0)  # NaNs sort to the end
    count = np.sum(~np.isnan(y), axis=0)
    cut = count // 4
    rank = np.arange(len(y)).reshape(-1, *[1] * (y.ndim - 1))
    kept = (rank >= cut) & (rank < count - cut)
    with np.errstate(invalid="ignore"):
        return np.where(kept, y, 0).sum(axis=0) / kept.sum(axis=0)


ESTIMATORS = {
    "mean": np.nanmean,
    "median": np.nanmedian,
    "iqm": iqm,
    "min": np.nanmin,
    "max": np.nanmax,
}


def aggregate(y, est="mean", band=None, resamples=1000, seed=0):
    """Estimate over runs and its band at each x: (center [T], low [T], high [T], n [T]).

    y: [runs, T], NaN where a run has no value. band: "std" (one population standard deviation to
    either side), "ci" (95 % percentile bootstrap over runs), "none"; by default std for the mean,
    ci for median and iqm, none for min and max. The bootstrap draws whole runs, from a fixed seed.
    """
    if band is None:
        band = {"mean": "std", "median": "ci", "iqm": "ci"}.get(est, "none")
    estimator = ESTIMATORS[est]
    n = np.sum(~np.isnan(y), axis=0)
    center = estimator(y, axis=0)
    low, high = center.copy(), center.copy()
    if band == "std":
        std = np.nanstd(y, axis=0)
        low, high = center - std, center + std
    elif band == "ci" and len(y) > 1:
        rng = np.random.default_rng(seed)
        draws = rng.integers(len(y), size=(resamples, len(y)))
        for start in range(0, y.shape[1], 64):  # 64 columns at a time: memory stays small
            part = slice(start, start + 64)
            sample = y[draws, part]  # [resamples, runs, <=64]
            empty = np.isnan(sample).all(axis=1)
            with np.errstate(all="ignore"):
                sample[np.broadcast_to(empty[:, None], sample.shape)] = 0.0
                stat = np.where(empty, np.nan, estimator(sample, axis=1))
            low[part], high[part] = np.nanpercentile(stat, [2.5, 97.5], axis=0)
    return center, low, high, n


# -------------------------------------------------------------------------------------- reference


def reference_curve(algo, framework, env_id):
    """Published curve as (framework, steps [T], mean [T], std [T]), or None where there is none.

    Environments are matched without their version: the published ones are -v3. There was no TRPO in
    torch: the tf1 curve stands in.
    """
    env = env_id.split("/")[-1].rsplit("-v", 1)[0]
    with open(REFERENCE, newline="") as f:
        rows = [r for r in csv.DictReader(f) if r["algo"] == algo and r["env"] == env]
    names = {row["framework"] for row in rows}
    if not names:
        return None
    framework = framework if framework in names else sorted(names)[0]
    rows = [r for r in rows if r["framework"] == framework]
    columns = [np.array([float(r[c]) for r in rows]) for c in ("steps", "mean", "std")]
    return framework, *columns


# --------------------------------------------------------------------------------------- plotting


def curve_labels(datasets, by):
    """Name of each dataset's curve: its condition without the environment, which the panel names.

    So that one experiment has one colour in all panels. Where dropping the environment would make
    two experiments of one panel the same, they keep their full names.
    """
    shorter, users = [], {}
    for data in datasets:
        condition, env = data[by].iloc[0], data["Env"].iloc[0]
        label = condition
        if env:
            valid = "".join(c if c.isalnum() or c in "-_()" else "-" for c in env.lower())
            for part in (f"_env{valid}", f"_{valid}", f"_{env}", f"-{env}"):
                if part in label:
                    label = label.replace(part, "", 1)
                    break
        label = label or condition
        shorter.append(label)
        users.setdefault((label, env), set()).add(condition)
    clash = {label for (label, _), conditions in users.items() if len(conditions) > 1}
    labels = [
        data[by].iloc[0] if label in clash else label
        for data, label in zip(datasets, shorter, strict=True)
    ]
    # Matplotlib leaves labels that begin with _ out of legends.
    return [f" {label}" if label.startswith("_") else label for label in labels]


def axis_name(runs, value):
    """What the y axis says: Performance is the test return if all runs measure one."""
    if value == "Performance" and all("AverageTestEpRet" in run for run in runs):
        value = "AverageTestEpRet"
    return AXIS_LABELS.get(value, value)


def collect_curves(datasets, xaxis, value, count=False, smooth=1, est="mean", band=None):
    """One dict for each curve: env, label, algo, framework, value, name of the y axis, and
    x, center, low, high, n, arrays of shape [T]."""
    by = "Condition2" if count else "Condition1"
    groups = {}
    for data, label in zip(datasets, curve_labels(datasets, by), strict=True):
        missing = [column for column in (xaxis, value) if column not in data]
        if missing:
            warn(f"left out {data.attrs['run_dir']}: no column {missing[0]}")
            continue
        groups.setdefault((data["Env"].iloc[0], label), []).append(data)
    curves = []
    for (env, label), runs in groups.items():
        x, y = stack_runs(runs, xaxis, value, smooth)
        if not len(x):
            warn(f"left out {label}: {value} has no value in any epoch yet")
            continue
        inside = ~np.isnan(y).all(axis=0)  # a gap between runs that do not overlap
        center, low, high, n = aggregate(y[:, inside], est, band)
        kinds = {(run["Algo"].iloc[0], run["Framework"].iloc[0]) for run in runs}
        algo, framework = kinds.pop() if len(kinds) == 1 else ("", "")
        curves.append(
            {
                "env": env,
                "label": label,
                "algo": algo,
                "framework": framework,
                "value": value,
                "name": axis_name(runs, value),
                "x": x[inside],
                "center": center,
                "low": low,
                "high": high,
                "n": n,
            }
        )
    return curves


def step_label(x, _=None):
    """1500000 -> 1.5M, 200000 -> 200k."""
    for size, unit in ((1e6, "M"), (1e3, "k")):
        if abs(x) >= size:
            return f"{x / size:.10g}{unit}"
    return f"{x:.10g}"


def draw_curve(ax, curve, color):
    """The curve as far as all its runs go; thinner and without a band where only some have come."""
    x, center, n = curve["x"], curve["center"], curve["n"]
    full = np.flatnonzero(n == n.max())[-1] + 1
    marker = "o" if len(x) == 1 else None
    ax.plot(x[:full], center[:full], color=color, lw=1.8, marker=marker, ms=4, label=curve["label"])
    if (curve["high"] > curve["low"]).any():
        ax.fill_between(
            x[:full], curve["low"][:full], curve["high"][:full], color=color, alpha=0.18, lw=0
        )
    if full < len(x):
        ax.plot(x[full - 1 :], center[full - 1 :], color=color, lw=0.9, alpha=0.7)


def draw_references(ax, curves, colors):
    """Dashed published curves for the algorithms of a panel, each once; returns their count."""
    kinds = {}
    for curve in curves:
        kinds.setdefault((curve["algo"], curve["framework"]), []).append(curve)
    end = max(curve["x"][-1] for curve in curves)
    drawn = {}
    for (algo, framework), same in kinds.items():
        env = same[0]["env"]
        found = reference_curve(algo, framework, env) if algo and env else None
        if found is None:
            warn(f"no published curve for {algo or 'an unknown algorithm'} on {env or '?'}")
            continue
        published, x, mean, std = found
        if (algo, published) in drawn:
            continue
        drawn[algo, published] = True
        # One point beyond our end, so that the line reaches the edge of the panel.
        keep = slice(0, int(np.searchsorted(x, end)) + 1)
        color = colors[same[0]["label"]] if len(same) == 1 else "#555555"
        label = f"published {algo.upper()} ({published})"
        ax.plot(x[keep], mean[keep], color=color, lw=1.3, ls=(0, (4, 2)), label=label, zorder=1.5)
        ax.fill_between(
            x[keep], (mean - std)[keep], (mean + std)[keep], color=color, alpha=0.07, lw=0, zorder=1
        )
    return len(drawn)


def draw_figure(panels, xaxis, reference=False, font_scale=1.0):
    """A figure with one panel for each ((env, value), curves) of `panels`."""
    import matplotlib

    matplotlib.rcParams.update(
        {"pdf.fonttype": 42, "svg.fonttype": "none", "font.size": 9 * font_scale}
        | {"axes.spines.top": False, "axes.spines.right": False, "axes.linewidth": 0.8}
        | {"axes.grid": True, "grid.color": "#e6e6e6", "grid.linewidth": 0.8}
        | {"text.parse_math": False}  # a $ in a name is a $
        | {"axes.axisbelow": True, "legend.frameon": False, "figure.dpi": 100}
    )
    import matplotlib.pyplot as plt

    labels = list(dict.fromkeys(curve["label"] for _, curves in panels for curve in curves))
    palette = COLORS
    if len(labels) > len(COLORS):  # pairs of dark and light: ppo_tf1, ppo_torch, sac_tf1, ...
        palette = matplotlib.colormaps["tab20"].colors
    if len(labels) > len(palette):
        palette = [matplotlib.colormaps["turbo"](v) for v in np.linspace(0.03, 0.97, len(labels))]
    colors = dict(zip(labels, palette, strict=False))

    columns = min(len(panels), 2 if len(panels) in (2, 4) else 3)
    rows = -(-len(panels) // columns)
    size = (4.6, 3.4) if len(panels) == 1 else (3.3 * columns, 2.7 * rows)
    figure, axes = plt.subplots(
        rows, columns, figsize=np.array(size) * font_scale, squeeze=False, layout="constrained"
    )
    published = 0
    seeds = {int(curve["n"].max()) for _, curves in panels for curve in curves}
    for i, ((env, value), curves) in enumerate(panels):
        ax = axes.flat[i]
        for curve in curves:
            draw_curve(ax, curve, colors[curve["label"]])
        if reference:
            published += draw_references(ax, curves, colors)
        start, end = (min(c["x"][0] for c in curves), max(c["x"][-1] for c in curves))
        left = 0 if start >= 0 else start
        if end > left:
            ax.set_xlim(left, end)
        for axis in (ax.xaxis, ax.yaxis):
            axis.set_major_locator(matplotlib.ticker.MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
        ax.xaxis.set_major_formatter(matplotlib.ticker.FuncFormatter(step_label))
        if any(abs(t) >= 10_000 for t in ax.get_ylim()):
            ax.yaxis.set_major_formatter(matplotlib.ticker.FuncFormatter(step_label))
        ax.tick_params(length=3, width=0.8)
        ax.set_title(env, fontsize=10 * font_scale)
        if i >= len(panels) - columns:
            ax.set_xlabel(AXIS_LABELS.get(xaxis, xaxis))
        if i % columns == 0 or len({v for (_, v), _ in panels}) > 1:
            names = {curve["name"] for curve in curves}
            ax.set_ylabel(names.pop() if len(names) == 1 else AXIS_LABELS.get(value, value))
    for ax in axes.flat[len(panels) :]:
        ax.axis("off")

    handles = {}
    for ax in axes.flat[: len(panels)]:
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    # Ours first, the published ones after them.
    names = sorted(handles, key=lambda label: label not in labels)
    if len(panels) == 1 and len(names) <= 6 and max(map(len, names)) <= 34:
        ax = axes.flat[0]
        ax.legend([handles[n] for n in names], names, loc="best", fontsize=8 * font_scale)
    else:
        width, height = figure.get_size_inches()
        wide = max(1, int(width / font_scale / (0.07 * max(map(len, names)) + 0.6)))
        spare = axes.flat[len(panels) :]
        if len(spare) and len(names) <= 12 and max(map(len, names)) <= 34:
            spare[0].legend([handles[n] for n in names], names, loc="center left")
        else:
            # The figure grows by the legend's rows, so that the panels keep their size.
            figure.set_size_inches(width, height + 0.2 * font_scale * -(-len(names) // wide))
            figure.legend(
                [handles[n] for n in names], names, loc="outside upper center", ncols=wide
            )
    if published:
        width = int(figure.get_figwidth() / font_scale * 18)
        runs = f"{min(seeds)} to {max(seeds)}" if len(seeds) > 1 else f"{max(seeds)}"
        text = (
            f"Solid: {runs} seed{'s' if seeds != {1} else ''}. Dashed: Spinning Up's published "
            "curves (2020), on the -v3 tasks: mean and standard deviation of 10 seeds, smoothed "
            "over 11 epochs."
        )
        figure.supxlabel(wrap(text, width), fontsize=7 * font_scale, color="#555555")
    return figure


def wrap(text, width):
    import textwrap

    return "\n".join(textwrap.wrap(text, width))


def write_csv(path, curves, xaxis, est):
    """The aggregated curves: one row for each curve and x, with n, the number of runs behind it."""
    with open(path, "w", newline="") as f:
        writer = csv.writer(f)
        writer.writerow(
            ["env", "label", "algo", "framework", "value", xaxis, est, "low", "high", "n"]
        )
        for c in curves:
            for x, center, low, high, n in zip(
                c["x"], c["center"], c["low"], c["high"], c["n"], strict=True
            ):
                numbers = [f"{v:.8g}" for v in (x, center, low, high)]
                writer.writerow(
                    [c["env"], c["label"], c["algo"], c["framework"], c["value"], *numbers, n]
                )


def make_plots(
    all_logdirs,
    legend=None,
    xaxis="TotalEnvInteracts",
    values=None,
    count=False,
    font_scale=1.0,
    smooth=1,
    select=None,
    exclude=None,
    estimator="mean",
    band=None,
    reference=False,
    out=None,
    csv_out=None,
    show=False,
):
    """Plot the runs below `all_logdirs`; the arguments are the command line's, see --help.

    out, csv_out: paths to write, or None. Returns the matplotlib figure (closed if it was shown).
    Raises ValueError when there is nothing to plot or an argument is wrong.
    """
    if smooth < 1:
        raise ValueError(f"--smooth must be 1 or more, got {smooth}")
    values = values or ["Performance"]
    values = values if isinstance(values, list) else [values]
    datasets = get_all_datasets(all_logdirs, legend, select, exclude)
    if not datasets:
        raise ValueError(f"no run to plot in {' '.join(all_logdirs)}")
    known = list(dict.fromkeys(c for d in datasets for c in d.columns if c not in TEXT_COLUMNS))
    for column in [xaxis, *values]:
        if column not in known:
            raise ValueError(f"no run has a column {column}; there are {' '.join(known)}")
    panels, everything = {}, []
    for value in values:
        for curve in collect_curves(datasets, xaxis, value, count, smooth, estimator, band):
            panels.setdefault((curve["env"], value), []).append(curve)
            everything.append(curve)
    if not panels:
        raise ValueError("no run has a value to plot yet")
    if reference and (xaxis != "TotalEnvInteracts" or values != ["Performance"]):
        warn("--reference needs --xaxis TotalEnvInteracts and --value Performance: left out")
        reference = False
    if csv_out:
        write_csv(csv_out, everything, xaxis, estimator)
    figure = draw_figure(list(panels.items()), xaxis, reference, font_scale)
    if out:
        figure.savefig(out, dpi=200)
    import matplotlib.pyplot as plt

    if show:
        plt.show()
    plt.close(figure)
    return figure


TEXT_COLUMNS = ("Unit", "Condition1", "Condition2", "Env", "Algo", "Framework")


# ----------------------------------------------------------------------------------- command line


class Parser(argparse.ArgumentParser):
    def error(self, message):
        self.exit(2, f"{self.prog}: error: {printable(message, 1000)}\n")


def parse_args(argv=None):
    parser = Parser(
        prog="plot.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("logdir", nargs="+", help="directories of runs, or beginnings of their names")
    add("--legend", "-l", nargs="+", metavar="NAME", help="names of the logdirs, one for each")
    add("--xaxis", "-x", default="TotalEnvInteracts", metavar="COLUMN", help="default: %(default)s")
    add(
        *("--value", "-y"),
        default=["Performance"],
        nargs="+",
        metavar="COLUMN",
        help="columns of progress.txt, a panel each; Performance (the default) is the test return "
        "where the algorithm measures one, else the training return",
    )
    add("--count", action="store_true", help="a line for each run instead of one over its seeds")
    add(
        *("--smooth", "-s"),
        type=int,
        default=1,
        metavar="N",
        help="average over a window of N epochs (default: 1, none)",
    )
    add("--select", nargs="+", metavar="PART", help="only runs whose path contains all of these")
    add("--exclude", nargs="+", metavar="PART", help="no run whose path contains one of these")
    add(
        "--est",
        default="mean",
        choices=list(ESTIMATORS),
        help="what to draw of the seeds (default: mean; iqm is the interquartile mean)",
    )
    add(
        "--band",
        choices=["std", "ci", "none"],
        help="one standard deviation, or a 95%% bootstrap confidence interval "
        "(default: std for the mean, ci for median and iqm)",
    )
    add(
        "--reference",
        action="store_true",
        help="overlay Spinning Up's published curves of the same algorithms and environments",
    )
    add(
        "--out",
        "-o",
        metavar="FILE",
        help=".png, .svg or .pdf (default: plot.png)",
    )
    add("--csv", metavar="FILE", help="write the aggregated numbers")
    add("--show", action="store_true", help="open a window")
    add("--font-scale", type=float, default=1.0, metavar="X", help="default: 1")
    return parser, parser.parse_args(argv)


def main(argv=None):
    parser, args = parse_args(argv)
    out = args.out
    if out is None and not args.show and not args.csv:
        out = "plot.png"
    for path in (out, args.csv):
        if path and not os.path.isdir(os.path.dirname(path) or "."):
            parser.error(f"cannot write {path}: no directory {os.path.dirname(path)}")
    if out and not out.endswith((".png", ".svg", ".pdf")):
        parser.error(f"--out must end in .png, .svg or .pdf, got {out}")
    if not args.font_scale > 0:
        parser.error(f"--font-scale must be above 0, got {args.font_scale}")

    import matplotlib

    if not args.show:
        matplotlib.use("Agg")
    else:
        import matplotlib.pyplot as plt

        try:
            plt.close(plt.figure())  # asks for the window system, and falls back without one
        except ImportError as e:
            parser.error(f"--show needs a window system: {e}; use --out")
        if matplotlib.get_backend().lower() in ("agg", "pdf", "svg", "ps", "cairo"):
            parser.error("--show needs a display and a window toolkit (tkinter or PyQt); use --out")
    try:
        make_plots(
            args.logdir,
            legend=args.legend,
            xaxis=args.xaxis,
            values=args.value,
            count=args.count,
            font_scale=args.font_scale,
            smooth=args.smooth,
            select=args.select,
            exclude=args.exclude,
            estimator=args.est,
            band=args.band,
            reference=args.reference,
            out=out,
            csv_out=args.csv,
            show=args.show,
        )
    except (ValueError, OSError) as e:
        parser.error(str(e))
    for path in (out, args.csv):
        if path:
            print(f"wrote {path}")


if __name__ == "__main__":
    main()
