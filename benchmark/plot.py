"""Plot learning curves, averaged over seeds, alone or over Spinning Up's published ones.

    python benchmark/plot.py data/sac_ --reference --out sac.png
    python benchmark/plot.py data/ppo data/trpo --legend PPO TRPO --smooth 11 --est median
    python benchmark/plot.py data/mine data/baseline --smooth 11 --compare

A logdir is a directory that contains runs, at any depth. If there is no such directory, it is a
prefix: `data/ppo` then means every directory in data/ whose name starts with "ppo". An
existing directory always wins over a prefix; `data/ppo_` leaves out data/ppo.

Runs with the same `exp_name` (in config.json) are seeds of one experiment and make one curve. Each
environment gets its own panel. Options are those of Spinning Up's plotter; `get_datasets`,
`get_all_datasets` and `make_plots` can be called from Python.
"""

import functools
import glob
import io
import itertools
import os
import re
import sys
import textwrap
from collections import Counter
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import pandas as pd
from pydantic.dataclasses import dataclass
from tyro.conf import Positional, arg

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run from any directory
from benchmark import intervals
from benchmark.reading import printable, read_json
from common import UsageError
from common.args import PosInt, parse_args

REFERENCE = Path(__file__).parent / "reference" / "spinning_up_2020_curves.csv"
ALGORITHMS = ("vpg", "trpo", "ppo", "ddpg", "td3", "sac")
# Okabe and Ito's palette without its pale yellow: color-blind readers can tell its colors apart.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
GRAYS = ("#555555", "#999999", "#222222")
LARGEST = 1e100  # values beyond this cannot be drawn
AXIS_LABELS = {"TotalEnvInteracts": "environment steps", "Performance": "average return"}
AXIS_LABELS |= {"AverageEpRet": "average return", "AverageTestEpRet": "average test return"}
AXIS_LABELS |= {"CutEpRet": "return so far of cut episodes", "Time": "seconds"}
CAPTION = (
    "Dashed: Spinning Up's published curves (2020), -v3 tasks: mean and standard deviation of "
)
CAPTION += "10 seeds, smoothed over 11 epochs."
NO_EPISODE = "no episode finished within an epoch: use a larger --steps-per-epoch, or plot CutEpRet"


@dataclass
class Args:
    """The command line; all but `logdir` are also `make_plots`' keyword arguments."""

    logdir: Positional[tuple[str, ...]]  # directories of runs, or prefixes of their names
    legend: Annotated[tuple[str, ...], arg(aliases=["-l"])] = ()  # names, one for each logdir
    xaxis: Annotated[str, arg(aliases=["-x"])] = "TotalEnvInteracts"  # column of progress.txt
    # Columns, one panel each; Performance is the test return where there is one, else AverageEpRet.
    value: Annotated[tuple[str, ...], arg(aliases=["-y"])] = ("Performance",)
    count: Annotated[bool, arg(aliases=["-c"])] = False  # one line per run, not per experiment
    smooth: Annotated[PosInt, arg(aliases=["-s"])] = 1  # average over a window of so many epochs
    select: tuple[str, ...] = ()  # keep runs whose path contains all of these
    exclude: tuple[str, ...] = ()  # drop runs whose path contains one of these
    # Statistic over the seeds; with the mean, the band is one standard deviation to either side.
    est: Literal["mean", "median", "min", "max"] = "mean"
    reference: bool = False  # overlay Spinning Up's published curves
    out: Annotated[str | None, arg(aliases=["-o"])] = None  # .png, .svg, .pdf; default plot.png
    csv: str | None = None  # write the aggregated numbers to this file; no picture but with --out
    compare: bool = False  # print how the first of two logdirs differs from the second
    show: bool = False  # open a window


def warn(message):
    print(f"plot.py: {printable(message, 1000)}", file=sys.stderr)


# Reading ------------------------------------------------------------------------------------------


def read_progress(path):
    """progress.txt as a DataFrame of floats, one row an epoch; ValueError if it has no such table.

    A run in progress may be writing a line: text after the last newline is ignored.
    """
    text = Path(path).read_text(encoding="utf-8")
    text = text[: text.rfind("\n") + 1]
    lines = text.splitlines()
    if len(lines) < 2:
        raise ValueError("progress.txt has no finished epoch yet")
    if len({line.count("\t") for line in lines}) > 1:
        raise ValueError("progress.txt is not a table: its lines differ in length")
    try:  # 3: no quoting; Spinning Up's own logger writes an empty string for a missing value
        return pd.read_csv(io.StringIO(text), sep="\t", dtype=float, quoting=3, index_col=False)
    except ValueError as e:
        raise ValueError(f"progress.txt: {e}") from None


def natural_key(path):
    """What to sort paths by: a2 comes before a10, and 0-05, as grid.py writes 0.05, before 0-1."""
    parts = re.split(r"((?<![0-9])0-[0-9]+|[0-9]+)", path)  # text and numbers in turn
    parts[1::2] = [float(x.replace("-", ".")) for x in parts[1::2]]
    return parts, path  # never in the order of the file system


def find_runs(logdir, select=(), exclude=()):
    """Sorted directories of runs below `logdir`: those with a file that a run or grid.py writes.

    `select`: keep those whose path contains all of these strings; `exclude`: drop those whose path
    contains any.
    """
    names = {"progress.txt", "config.json", "status.json", "launch.log"}
    runs = [root for root, _, files in os.walk(logdir) if names & set(files)]
    runs = [run for run in runs if os.path.basename(run) != "call"]  # grid.py's, of a function
    runs = [run for run in runs if all(part in run for part in select)]
    runs = [run for run in runs if not any(part in run for part in exclude)]
    return sorted(runs, key=natural_key)


def get_datasets(logdir, condition=None, select=(), exclude=(), units=None):
    """Every run below `logdir`, as a list of DataFrames: its progress.txt with added columns.

    Unit (int, counts the seeds of one Condition1, on from `units`, a dict, if there is one),
    Condition1 (`condition`, or the run's exp_name), Condition2 (Condition1-<Unit>), and Performance
    (AverageTestEpRet where the run has it, else AverageEpRet). `frame.attrs` holds the path,
    "run_dir", the content of config.json, "config", and "env", "algo", "framework", "" where
    unknown. Runs that cannot be read are named on stderr and left out.
    """
    datasets, units = [], {} if units is None else units
    for run in find_runs(logdir, select, exclude):
        try:
            frame = read_progress(os.path.join(run, "progress.txt"))
            path = os.path.join(run, "config.json")
            config = read_json(path) if os.path.exists(path) else {}
        except (ValueError, OSError) as e:
            missing = "it has no progress.txt" if isinstance(e, FileNotFoundError) else e
            warn(f"left out {run}: {missing}")
            continue
        name = condition or config.get("exp_name") or os.path.basename(os.path.abspath(run))
        name = printable(name, 200)
        units[name] = units.get(name, -1) + 1
        tested = "AverageTestEpRet" in frame and bool(frame["AverageTestEpRet"].notna().any())
        performance = "AverageTestEpRet" if tested else "AverageEpRet"
        if performance in frame:
            frame["Performance"] = frame[performance]
        frame["Unit"] = units[name]
        frame["Condition1"] = name
        frame["Condition2"] = f"{name}-{units[name]}"
        algo, _, framework = Path(str(config.get("script", ""))).stem.partition("_")
        algo, framework = (algo, framework) if algo in ALGORITHMS else ("", "")
        frame.attrs = {"run_dir": run, "config": config, "algo": algo, "framework": framework}
        env = config.get("env_id") or config.get("env_name") or ""
        frame.attrs |= {"env": printable(env, 200), "tested": tested}
        datasets.append(frame)
    return datasets


def expand_logdirs(logdirs):
    """The directories that `logdirs`, directories or prefixes, stand for.

    Raises ValueError for one that matches nothing. A prefix of several directories is reported
    on stderr, so that nothing is averaged unnoticed.
    """
    found = []
    for logdir in logdirs:
        names = [logdir] if os.path.isdir(logdir) else glob.glob(glob.escape(logdir) + "*")
        matches = sorted(filter(os.path.isdir, names), key=natural_key)
        if not matches:
            raise ValueError(f"no directory is called {logdir} or starts with it")
        if len(matches) > 1:
            warn(f"{logdir} stands for {' '.join(matches)}")
        found += [match for match in matches if match not in found]
    return found


def get_all_datasets(all_logdirs, legend=(), select=(), exclude=()):
    """The runs below all of `all_logdirs`; `legend` names the directories they expand to, in order.

    A directory that `select` and `exclude` leave without runs needs no name. Returns a list of
    DataFrames as `get_datasets` does. Raises ValueError for a logdir that does not exist, for none
    with a run, and for a legend of the wrong length.
    """
    logdirs = [d for d in expand_logdirs(all_logdirs) if find_runs(d, select, exclude)]
    if not logdirs:
        raise ValueError(f"there is no run in {' '.join(all_logdirs)}")
    if legend and len(legend) != len(logdirs):
        text = f"--legend has {len(legend)} names for {len(logdirs)} directories"
        raise ValueError(f"{text}: {' '.join(logdirs)}")
    datasets, units = {}, {}  # by path: a run that is below two logdirs counts once
    homes = {}  # of each curve: the logdirs
    for i, logdir in enumerate(logdirs):
        name = legend[i] if legend else None
        for frame in get_datasets(logdir, name, select, exclude, units):
            if datasets.setdefault(os.path.realpath(frame.attrs["run_dir"]), frame) is frame:
                curve = frame["Condition1"].iloc[0], frame.attrs["env"]
                homes.setdefault(curve, {})[logdir] = None
    for (name, _), found in homes.items():
        if len(found) > 1 and not legend:
            text = f"the runs called {name} in {' and '.join(found)} make one curve"
            warn(f"{text}; with --legend, each directory has its own")
    firsts = {}  # a copy of a run, or the same seed run again, is no other sample
    for frame in datasets.values():
        # The first epoch tells: one of the two may have been interrupted later.
        row = frame.iloc[0].drop(["Unit", "Condition2", "Time"], errors="ignore").to_json()
        run, seed = frame.attrs["run_dir"], frame.attrs["config"].get("seed")
        first = firsts.setdefault((row, str(seed)), run)
        if first != run:
            warn(f"{run} has the seed and the first epoch of {first}, and counts as another run")
    return list(datasets.values())


# Aggregating --------------------------------------------------------------------------------------


def smooth_values(values, width):
    """The mean of each value and its neighbors, `width` in all, fewer at both ends."""
    return pd.Series(values).rolling(width, center=True, min_periods=1).mean()


def stack_runs(runs, xaxis, value, smooth=1):
    """Runs on a common x axis: a DataFrame [T, runs], NaN outside a run's own range.

    Epochs without a value are skipped. Runs whose epochs differ are interpolated linearly between
    their own points.
    """
    curves = []
    for run in runs:
        usable = run[[xaxis, value]].abs().lt(LARGEST).all(axis=1)  # neither NaN nor infinite
        points = run[usable].groupby(xaxis)[value].mean()  # in order, each x once
        curves.append(smooth_values(points, smooth))
    return pd.concat(curves, axis=1).sort_index().interpolate("index", limit_area="inside")


@functools.cache
def read_reference():
    return pd.read_csv(REFERENCE)


def reference_curve(algo, framework, env_id):
    """Published curve as (framework, steps [T], mean [T], std [T]), or None where there is none.

    Environments are matched without their version: the published ones are -v3. A copy, whose
    `framework` is "tf1_mine", say, has tf1's; "mine" has torch's. TRPO was published for tf1 alone.
    """
    table = read_reference()
    table = table[(table.algo == algo) & (table.env == env_id.split("/")[-1].rsplit("-v", 1)[0])]
    if table.empty:
        return None
    framework = next((x for x in {*table.framework} if framework.startswith(x)), "")
    framework = framework or table.framework.max()
    table = table[table.framework == framework]
    return framework, *table[["steps", "mean", "std"]].to_numpy(float).T


# Comparing ----------------------------------------------------------------------------------------


def compare(datasets, logdirs, xaxis, value, smooth=1):
    """How the runs below the first of two logdirs do against those below the second, as text.

    On each environment, curves are cut at the last x that all its runs have reached, smoothed, and
    compared there. Over all environments, returns are shares of the second's mean, without its
    sign, so that more is always better; that mean counts as exact.

    Raises:
        ValueError: these logdirs cannot be compared.
    """
    if len(set(logdirs)) != 2:
        raise ValueError("--compare takes two directories of runs, or two prefixes of their names")
    tasks, groups, rows = {}, ([], []), []
    for data in datasets:
        if {xaxis, value} <= {*data}:
            tasks.setdefault(data.attrs["env"], []).append(data)
    for env, runs in tasks.items():
        # The path of a run begins with the directory, or the prefix, that it was found by.
        below = [[x for x in logdirs if run.attrs["run_dir"].startswith(x)] for run in runs]
        side = np.array([logdirs.index(max(found, key=len)) for found in below])
        names = sorted({(i, run["Condition1"].iloc[0]) for i, run in zip(side, runs, strict=True)})
        if len(names) > len(set(side)):
            text = f"{env or 'one task'} has more than two experiments"
            names = ", ".join(name for _, name in names)
            raise ValueError(f"{text}, {names}: choose with --select or --exclude")
        # Cut before smoothing: longer runs would average later epochs in, and shorter ones cannot.
        end = stack_runs(runs, xaxis, value).dropna().index.max()
        cut = [run[run[xaxis] <= end] for run in runs]
        table = stack_runs(cut, xaxis, value, smooth).dropna()
        if len(set(side)) < 2 or table.empty:
            none = f"no {xaxis} at which all its runs have a {value}"
            none = none if len(set(side)) == 2 else "runs of only one of the two"
            warn(f"{env or 'a task'} is left out: it has {none}")
            continue
        last = table.iloc[-1].to_numpy()
        x, y = last[side == 0], last[side == 1]
        at, seeds = step_label(table.index[-1]), f"{len(x)}, {len(y)}"
        rows.append([env, at, seeds, *differences([x], [y])])
        for group, values in zip(groups, (x, y), strict=True):
            group.append(values / (abs(y.mean()) or 1))
    if not rows:
        raise ValueError("nothing to compare: no environment is left")
    if len(rows) > 1:
        rows.append(["all", "", "", *differences(*groups)])
    header = [value, "at", "seeds", "A - B", "IQM of A", "IQM of B", "P(A > B)"]
    table = pd.DataFrame(rows, columns=header).to_string(index=False)
    return "A: {}\nB: {}\n\n{}\n\n{}\n".format(*logdirs, table, LEGEND)


LEGEND = """\
All intervals are of 95 %; those in brackets hold the truth in about 75 % of cases with three seeds,
in 90 % with five. IQM is the mean of the middle half of the runs (of three or fewer, of all),
P(A > B) how likely a run of A beats one of B. In the row of all, returns are shares of B's mean."""


def differences(xs, ys):
    """What tells two groups of runs apart, see intervals.py, in words."""
    scale = np.mean([abs(y.mean()) for y in ys]) or 1
    digits = max(0, 2 - int(np.floor(np.log10(scale))))
    several = min(map(len, xs + ys)) > 1  # there is no interval of a single seed
    both = [[(v.mean(), pd.Series(v).std(), len(v)) for v in group] for group in (xs, ys)]
    difference, half = intervals.welch(*zip(*both, strict=True))
    texts = [f"{difference:+.{digits}f}" + f" ± {half:.{digits}f}" * several]
    whats = [(digits, intervals.iqm, group) for group in (xs, ys)]
    for n, *what in [*whats, (2, intervals.improvement, xs, ys)]:
        center, low, high = intervals.bootstrap(*what)
        texts.append(f"{center:.{n}f}" + f" ({low:.{n}f} to {high:.{n}f})" * several)
    return texts


# Plotting -----------------------------------------------------------------------------------------


def curve_label(condition, env):
    """A curve's name: its condition without the environment, which the panel names."""
    pattern = "[_-](env)?" + re.sub(r"\W", ".", env)  # of its name, also as grid.py writes it
    label = re.sub(pattern, "", condition, count=1, flags=re.I) if env else ""
    label = label or condition
    return f" {label}" if label.startswith("_") else label  # Matplotlib hides _names


def short_label(run, count):
    """The name of the curve of a run and others of its experiment or, if `count`, of it alone."""
    label, seed = curve_label(run["Condition1"].iloc[0], run.attrs["env"]), run["Unit"].iloc[0]
    return f"{label}, seed {run.attrs['config'].get('seed', seed)}" if count else label


def collect_curves(datasets, xaxis, value, count=False, smooth=1, est="mean"):
    """One DataFrame for each curve, with columns `xaxis`, `est`, low, high (the band), n (runs).

    `attrs` has env, label, algo, framework, value and ylabel, the name of the y axis.
    """
    groups, without, curves = {}, {}, []
    for data in datasets:
        numbers = data.drop(columns="Unit").select_dtypes("number")
        if missing := [column for column in (xaxis, value) if column not in numbers]:
            without.setdefault(missing[0], []).append((data.attrs["run_dir"], [*numbers]))
            continue
        condition = data["Condition2" if count else "Condition1"].iloc[0]
        groups.setdefault((data.attrs["env"], condition), []).append(data)
    for column, ((run, columns), *others) in without.items():
        more = f" and {len(others)} more" * bool(others)
        warn(f"left out {run}{more}: no column {column} of numbers, only {', '.join(columns)}")
    short = {key: short_label(runs[0], count) for key, runs in groups.items()}
    alike = Counter((env, short[env, condition]) for env, condition in groups)
    for (env, condition), runs in groups.items():
        table = stack_runs(runs, xaxis, value, smooth)
        if table.empty:
            empty = value in ("Performance", "AverageEpRet")
            warn(f"left out {condition}: {NO_EPISODE if empty else f'{value} has no value yet'}")
            continue
        center = table.agg(est, axis=1)
        std = table.std(axis=1, ddof=0) if est == "mean" else 0
        curve = pd.DataFrame({est: center, "low": center - std, "high": center + std})
        curve = curve.assign(n=table.count(axis=1)).rename_axis(xaxis).reset_index()
        tested = value == "Performance" and all(run.attrs["tested"] for run in runs)
        label = short[env, condition]
        if alike[env, label] > 1:  # the environment, or more than the seed, tells two apart
            label = curve_label(condition, "")
        curve.attrs = {"env": env, "label": label, "value": value}
        curve.attrs["ylabel"] = AXIS_LABELS.get("AverageTestEpRet" if tested else value, value)
        for key in ("algo", "framework"):
            kinds = {run.attrs[key] for run in runs}
            curve.attrs[key] = kinds.pop() if len(kinds) == 1 else ""
        curves.append(curve)
    return curves


def step_label(x, _=None):
    """1500000 -> 1.5M, 200000 -> 200k."""
    for size, unit in ((1e6, "M"), (1e3, "k")):
        if abs(x) >= size:
            return f"{x / size:.10g}{unit}"
    return f"{x:.10g}"


def draw_references(ax, curves, colors):
    """Dashed published curves of a panel's algorithms, as far as ours go.

    A published curve that is there for one of ours has its color; for several, a gray. Its band is
    gray, so that it is not taken for ours.
    """
    end, found = max(curve.iloc[-1, 0] for curve in curves), {}
    for curve in curves:
        algo, framework, env = (curve.attrs[key] for key in ("algo", "framework", "env"))
        published, *points = reference_curve(algo, framework, env) or ("",)
        found.setdefault((algo, published), (points, []))[1].append(curve.attrs["label"])
    for i, ((algo, published), (points, labels)) in enumerate(found.items()):
        if not points or end <= points[0][0]:
            late = f" before {points[0][0]:.0f} steps" if points else ""
            name = f"{algo or 'an unknown algorithm'} on {env or '?'}"
            warn(f"there is no published curve of {name}{late}")
            continue
        x, *band = points
        inside = np.append(x[x < end], end)
        mean, std = (np.interp(inside, x, y) for y in band)
        gray = GRAYS[i % len(GRAYS)]
        color = colors[labels[0]] if len(labels) == 1 else gray
        label = f"published {algo.upper()} ({published})"
        ax.plot(inside, mean, ls=(0, (4, 2)), lw=1.3, color=color, zorder=1.5, label=label)
        ax.fill_between(inside, mean - std, mean + std, color=gray, alpha=0.15, zorder=1.5, lw=0)


def draw_figure(panels, xaxis, reference=False):
    """A figure with one panel for each list of curves in `panels`, {(environment, value): list}.

    With several environments and several values, each value has a row.
    """
    import matplotlib
    import matplotlib.pyplot as plt

    labels = [curve.attrs["label"] for curves in panels.values() for curve in curves]
    labels = list(dict.fromkeys(labels))
    palette = COLORS
    if len(labels) > len(COLORS):
        palette = matplotlib.colormaps["turbo"](np.linspace(0.03, 0.97, len(labels)))
    colors = dict(zip(labels, palette, strict=False))
    envs, values = (list(dict.fromkeys(names)) for names in zip(*panels, strict=True))
    cells, columns = list(panels), 2 if len(panels) == 4 else min(len(panels), 3)
    if len(envs) > 1 and len(values) > 1:
        cells, columns = [(env, value) for value in values for env in envs], len(envs)
    rows = -(-len(cells) // columns)
    size = (4.6, 3.4) if len(panels) == 1 else (3.3 * columns, 2.7 * rows)
    figure, axes = plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
    handles = {}
    for ax, cell in itertools.zip_longest(axes.flat, cells):
        if not (curves := panels.get(cell)):
            ax.axis("off")
            continue
        for curve in curves:
            x, center, low, high, _ = curve.to_numpy().T
            label, fmt = curve.attrs["label"], "o" if len(x) == 1 else "-"
            ax.plot(x, center, fmt, color=colors[label], lw=1.8, label=label, clip_on=fmt == "-")
            ax.fill_between(x, low, high, color=colors[label], alpha=0.18, lw=0)
        if reference:
            draw_references(ax, curves, colors)
        left, right = min(0, *(c.iloc[0, 0] for c in curves)), max(c.iloc[-1, 0] for c in curves)
        ax.set_xlim(left, right if right > left else None)
        ax.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
        ax.xaxis.set_major_formatter(step_label)
        title = textwrap.fill(curves[0].attrs["env"], int(10 * size[0] / columns))
        ax.set(title=title, xlabel=AXIS_LABELS.get(xaxis, xaxis))
        ax.set_ylabel(" / ".join(dict.fromkeys(c.attrs["ylabel"] for c in curves)))
        handles |= {label: h for h, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    # Ours first, then the published ones.
    handles = dict(sorted(handles.items(), key=lambda item: item[0] not in labels))
    # The figure grows by the legend's rows, so that the panels keep their size.
    wide = max(1, int(size[0] / (0.07 * max(map(len, handles)) + 0.6)))
    figure.set_size_inches(size[0], size[1] + 0.2 * -(-len(handles) // wide))
    figure.legend(handles.values(), handles, loc="outside upper center", ncols=wide)
    if set(handles) - set(labels):
        figure.supxlabel(textwrap.fill(CAPTION, int(size[0] * 18)), fontsize=7, color="#555555")
    return figure


STYLE = {"pdf.fonttype": 42, "svg.fonttype": "none", "font.size": 9, "axes.titlesize": 10}
STYLE |= {"axes.spines.top": False, "axes.spines.right": False, "axes.linewidth": 0.8}
STYLE |= {"axes.grid": True, "grid.color": "#e6e6e6", "axes.axisbelow": True}
STYLE |= {"legend.frameon": False, "xtick.major.size": 3, "ytick.major.size": 3}
STYLE |= {"text.parse_math": False}  # a $ in a name is a $


def make_plots(all_logdirs, **options):
    """Plot the runs below `all_logdirs`; `options` are the other fields of `Args`.

    Returns the Matplotlib figure, closed. Raises ValueError when there is nothing to plot or an
    argument is wrong.
    """
    import matplotlib
    import matplotlib.pyplot as plt

    args = Args(tuple(re.sub("/+", "/", str(x)) for x in all_logdirs), **options)  # as glob
    datasets = get_all_datasets(args.logdir, args.legend, args.select, args.exclude)
    panels = {}
    for value in args.value:
        if args.compare:
            print(compare(datasets, args.logdir, args.xaxis, value, args.smooth))
        for curve in collect_curves(datasets, args.xaxis, value, args.count, args.smooth, args.est):
            panels.setdefault((curve.attrs["env"], value), []).append(curve)
    if not panels:
        raise ValueError(f"nothing to plot: no run has {' and '.join((args.xaxis, *args.value))}")
    if args.reference and (args.xaxis, *args.value) != ("TotalEnvInteracts", "Performance"):
        raise ValueError("--reference needs --xaxis TotalEnvInteracts and --value Performance")
    if args.csv:
        names = ["env", "label", "algo", "framework", "value"]
        tables = [c.assign(**c.attrs)[[*names, *c]] for curves in panels.values() for c in curves]
        pd.concat(tables).to_csv(args.csv, index=False, float_format="%.8g")
    with matplotlib.rc_context(STYLE):
        figure = draw_figure(panels, args.xaxis, args.reference)
        if args.out:
            figure.savefig(args.out, dpi=200)
        if args.show:
            if plt.get_backend().lower() == "agg":
                warn("no window: there is no display; --out FILE writes the picture")
            plt.show()
    plt.close(figure)
    return figure


def main(argv=None):
    import matplotlib.pyplot as plt

    try:
        args = parse_args(Args, argv)
        if not args.logdir:
            raise UsageError("name a directory of runs; --help explains")
        if not args.show:
            plt.switch_backend("agg")
            args.out = args.out or (None if args.csv else "plot.png")
        if args.out and not Path(args.out).suffix:
            args.out += ".png"  # as Matplotlib does
        make_plots(args.logdir, **{k: v for k, v in vars(args).items() if k != "logdir"})
    except (ValueError, OSError, ImportError) as e:
        print(f"plot.py: error: {printable(e, 1000)}", file=sys.stderr)
        sys.exit(2)
    for path in filter(None, (args.out, args.csv)):
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
