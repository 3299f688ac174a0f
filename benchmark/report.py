"""Make every table and figure of README.md and benchmark/results/ from the CSV files beside them.

    python benchmark/report.py                                      # make them anew
    python benchmark/report.py --collect data/benchmark_on_policy   # take in runs first

`--collect` reads runs, finished or not, and adds them to two files of benchmark/results/: runs.csv
has one row for each run, curves.csv the points of its curve. A run replaces the one with the same
script, environment, settings and seed.

A table goes between two lines of a page, `<!-- results: NAME -->` and `<!-- results: end -->`; NAME
is an algorithm, on-policy, off-policy, summary or cost. Returns are smoothed as the published
curves are: each seed by itself, over 11 epochs of 4000 steps, centred. A link to a function,
[`name`](algos/script.py#L1), gets the number of its line.
"""

import contextlib
import dataclasses
import io
import re
import sys
from pathlib import Path

import numpy as np
import pandas as pd

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run from any directory
from benchmark import plot
from common.args import parse_args
from common.run_dir import read_status
from common.serialization import printable

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmark" / "results"
PUBLISHED = ROOT / "benchmark" / "reference" / "published_at_1m_steps.csv"
ENVS = ("HalfCheetah", "Hopper", "Walker2d", "Swimmer", "Ant")
FAMILIES = {"on-policy": ("vpg", "trpo", "ppo"), "off-policy": ("ddpg", "td3", "sac")}
FRAMEWORKS = {"torch": "PyTorch", "tf1": "TensorFlow 1"}
PLAIN_RUNS = [(framework, "plain") for framework in FRAMEWORKS]
RUN_COLUMNS = ["run", "script", "env", "settings", "seed", "ranks", "status", "steps", "seconds"]
RUN_COLUMNS += ["commit", "cpu"]
TYPES = {"commit": str, "cpu": str}  # 12e4567 is no number
MAX_ROWS = 300  # of one run in curves.csv
MARKS = (100_000, 300_000, 500_000, 1_000_000)  # steps at which returns are compared
WINDOW = 11 * 4000  # steps
# Half the width of a 95 % interval of a mean of n values, in standard errors (Student's t).
T95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
# The published benchmark's settings; a run's label names what it has otherwise.
PLAIN = {
    "on-policy": {"hidden_sizes": [64, 32], "activation": "tanh", "lam": 0.97, "clip_ratio": 0.2}
    | {"pi_lr": 3e-4, "vf_lr": 1e-3, "train_pi_iters": 80, "train_v_iters": 80}
    | {"target_kl": 0.01, "delta": 0.01, "minibatch_size": 0, "anneal_lr": False},
    "off-policy": {"hidden_sizes": [256, 256], "activation": "relu", "batch_size": 100}
    | {"lr": 1e-3, "pi_lr": 1e-3, "q_lr": 1e-3, "polyak": 0.995, "start_steps": 10_000}
    | {"update_after": 1000, "update_every": 50, "alpha": 0.2},
    "both": {"steps_per_epoch": 4000, "gamma": 0.99, "max_ep_len": 1000, "ranks": 1},
}
# Colours that are legible on white and on GitHub's dark background.
COLORS = {"torch": "#e8590c", "tf1": "#1c7ed6", "published": "#868e96"}
COLORS |= {"normalised": "#ae3ec9", "strong": "#2f9e44"}
INK = "#7a7f87"


@dataclasses.dataclass
class Args:
    collect: tuple[str, ...] = ()  # directories of runs, or prefixes of their names, to take in


# ------------------------------------------------------------------------------------- collecting


def settings_of(config):
    """A run's settings in words: "plain", "normalised", or what differs from the published ones.

    Those of sweeps/strong_*.toml are "strong".
    """
    if str(config.get("exp_name")).startswith("strong_"):
        return "strong"
    plain = PLAIN[family_of(Path(config["script"]).stem)] | PLAIN["both"]
    norms = [key for key in ("norm_obs", "norm_rew") if config.get(key)]
    words = ["normalised"] if len(norms) == 2 else norms
    for key, value in plain.items():
        if key in config and config[key] != value:
            words.append(f"{key} {config[key]}".replace(",", ""))
    return ", ".join(words) or "plain"


def family_of(script):
    return next(name for name, algos in FAMILIES.items() if script.split("_")[0] in algos)


def thin(table):
    """At most MAX_ROWS rows: each is the mean of k neighbours, at the steps of the last of them."""
    group = np.arange(len(table)) // -(-len(table) // MAX_ROWS)
    return table.groupby(group).agg(dict.fromkeys(table, "mean") | {"steps": "last"})


def collect(logdirs, results=RESULTS):
    """Take the runs below `logdirs` into runs.csv and curves.csv; returns the number of runs.

    Runs that are there already are replaced. Raises ValueError if there is no run, or for a logdir
    that does not exist.
    """
    runs, curves = {}, {}
    for frame in plot.get_all_datasets(logdirs):
        config, directory = frame.attrs["config"], Path(frame.attrs["run_dir"])
        if not frame.attrs["algo"]:
            plot.warn(f"left out {directory}: not a run of one of the twelve scripts")
            continue
        table = pd.DataFrame({"steps": frame["TotalEnvInteracts"].astype(int)})
        table["return"] = frame["AverageEpRet"]
        table["test_return"] = frame.get("AverageTestEpRet", np.nan)
        cpu = (config.get("versions") or {}).get("cpu") or "unknown"
        row = {"script": Path(config["script"]).stem, "env": config["env_id"], "cpu": cpu}
        row |= {"settings": settings_of(config), "seed": config["seed"]}
        row |= {"ranks": config.get("ranks", 1), "status": "unknown"}
        with contextlib.suppress(OSError, ValueError):
            row["status"] = read_status(directory)["status"]
        row |= {"commit": (config.get("git_commit") or "unknown")[:10]}
        row |= {"steps": table["steps"].iloc[-1], "seconds": round(frame["Time"].iloc[-1])}
        extra = "" if row["settings"] == "plain" else "_" + re.sub(r"\W+", "-", row["settings"])
        name = f"{row['script']}_{row['env']}{extra}_s{row['seed']}"
        runs[name] = {"run": name, **row}
        table = thin(table.dropna(subset=["return", "test_return"], how="all"))
        curves[name] = table.assign(run=name)
    if not runs:
        raise ValueError(f"no run to collect in {' '.join(logdirs)}")
    for name, new in ("runs", pd.DataFrame(runs.values())), ("curves", pd.concat(curves.values())):
        path = results / f"{name}.csv"
        if path.exists():
            old = pd.read_csv(path, dtype=TYPES)
            new = pd.concat([old[~old.run.isin(runs)], new])
        columns = RUN_COLUMNS if name == "runs" else ["run", "steps", "return", "test_return"]
        new = new.sort_values(["run", "steps"], kind="stable")[columns]
        new.to_csv(path, index=False, float_format="%.6g")
    return len(runs)


# ----------------------------------------------------------------------------------------- numbers


class Results:
    """The collected runs and the published numbers."""

    def __init__(self, results=RESULTS):
        self.runs = pd.read_csv(results / "runs.csv", dtype=TYPES)
        points = pd.read_csv(results / "curves.csv")
        points["performance"] = points["test_return"].fillna(points["return"])
        self.points = dict(list(points.groupby("run")))
        published = pd.read_csv(PUBLISHED)
        self.published = published[published.source != "SpinningUp bench 2020"]

    def seeds(self, script, env, settings="plain"):
        """The curves of one script: [(steps [T], smoothed return [T]), ...], one for each seed."""
        runs, curves = self.runs, []
        names = runs[(runs.script == script) & (runs.env == f"{env}-v4")]
        for name in names[names.settings == settings].run:
            table = self.points[name]
            steps = table["steps"].to_numpy(float)
            spacing = np.median(np.diff(steps)) if len(steps) > 1 else WINDOW
            width = 2 * round((WINDOW / spacing - 1) / 2) + 1
            curves.append((steps, plot.smooth_values(table["performance"], max(width, 1))))
        return curves

    def marks(self, curves):
        """The last of MARKS that half of the seeds have reached, and the last that any has."""
        longest = sorted(x[-1] for x, _ in curves)[len(curves) // 2 :]  # half of them
        reached = [[m for m in MARKS if m <= end] for end in longest[:1] + longest[-1:]]
        return sorted({marks[-1] for marks in reached if marks})

    def at(self, curves, mark):
        """(mean, half width of its 95 % interval, number of seeds) at `mark` steps."""
        values = [np.interp(mark, x, y) for x, y in curves if x[-1] >= mark]
        return interval(np.mean(values), np.std(values, ddof=len(values) > 1), len(values))

    def reference(self, algo, framework, env, mark):
        """Spinning Up's published (mean, standard deviation) at `mark` steps, or None."""
        found = plot.reference_curve(algo, framework, env)
        if found is None or found[0] != framework:
            return None
        _, steps, mean, std = found
        return np.interp(mark, steps, mean), np.interp(mark, steps, std)

    def best(self, algo, env):
        """The best published elsewhere at 1M steps: its mean, framework and task; "" for none."""
        table = self.published
        algos, envs = table.algo.str.lower().str.split("/").str[0], table.env.str.split("-v").str[0]
        best = table[(algos == algo) & (envs == env)].nlargest(1, "mean").itertuples()
        return "".join(f"{row.mean:.0f}, {row.framework}, {row.env}" for row in best)


def interval(mean, std, n):
    """(mean, half width of its 95 % interval, n); the half width of one value is NaN."""
    return mean, T95.get(n, T95[10]) * std / np.sqrt(n) if n > 1 else np.nan, n


# ------------------------------------------------------------------------------------------ tables


def markdown(header, rows):
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def cell(mean, half, n, mark, note=""):
    """1303 ± 210 (5) ▲ at 300k"""
    spread = "" if np.isnan(half) else f" ± {half:.0f}"
    late = "" if mark == MARKS[-1] else f" at {plot.step_label(mark)}"
    return f"{mean:.0f}{spread} ({n}){note}{late}"


def our_cell(results, algo, framework, env, settings="plain"):
    """Our return, marked where it lies above (▲) or below (▼) the published band; "" for no run."""
    curves, find, texts = results.seeds(f"{algo}_{framework}", env, settings), results.reference, []
    for mark in results.marks(curves):
        mean, half, n = results.at(curves, mark)
        band, note = find(algo, framework, env, mark) or find(algo, "tf1", env, mark), ""
        if band and settings == "plain":
            note = " ▲" if mean > band[0] + band[1] else " ▼" if mean < band[0] - band[1] else ""
        texts.append(cell(mean, half, n, mark, note))
    return "; ".join(texts)


def published_cell(results, algo, framework, env):
    """Spinning Up's return, at the steps that ours have come to; "" where there is none."""
    ours = [results.seeds(f"{algo}_{f}", env) for f in FRAMEWORKS]
    marks = {mark for curves in ours for mark in results.marks(curves)} or {MARKS[-1]}
    found = [(results.reference(algo, framework, env, mark), mark) for mark in sorted(marks)]
    return "; ".join(cell(*interval(*band, 10), mark) for band, mark in found if band)


def returns(results, algos):
    """Ours beside Spinning Up's and the best published, a row for each of them."""
    rows = []
    for algo in algos:
        name, torch = algo.upper(), results.runs[results.runs.script == f"{algo}_torch"]
        others = sorted(set(torch.settings) - {"plain"})
        for framework, settings in [*PLAIN_RUNS, *(("torch", other) for other in others)]:
            title = f"**{name}, {FRAMEWORKS[framework]}**"
            title += f", {settings}" if settings != "plain" else ""
            rows.append([title, *(our_cell(results, algo, framework, e, settings) for e in ENVS)])
        for framework, title in FRAMEWORKS.items():
            cells = [published_cell(results, algo, framework, env) for env in ENVS]
            rows.append([f"Spinning Up's {name}, {title}", *cells])
        rows.append([f"best {name} elsewhere, 1M", *(results.best(algo, env) for env in ENVS)])
    rows = [row for row in rows if any(row[1:])]
    return markdown(["", *ENVS], [[c or "–" for c in row] for row in rows])


def summary(results):
    """The scripts' lengths, speeds by speed.py's newest rows of pairs, and returns."""
    speeds, rows = {}, []
    table = pd.read_csv(RESULTS / "speed.csv")[["speed.py", "first", "second"]]
    for line, *rates in table[::-1].itertuples(index=False):  # the newest is the last to be seen
        if line.startswith("pair "):
            speeds |= dict(zip(line.split()[1:3], map("{:.0f}".format, rates), strict=True))
    for algo, framework in [(a, f) for a in sum(FAMILIES.values(), ()) for f in FRAMEWORKS]:
        script = f"{algo}_{framework}"
        cells = [our_cell(results, algo, framework, env) or "–" for env in ENVS]
        lines = len((ROOT / "algos" / f"{script}.py").read_text().splitlines())
        rows.append([f"[{script}.py](algos/{script}.py)", lines, speeds.get(script, "–"), *cells])
    return markdown(["", "lines", "steps/s", *ENVS], rows)


def cost(results):
    """What the runs took, by family, settings and CPU."""
    runs = results.runs.assign(family=results.runs.script.map(family_of))
    runs = runs.assign(hours=runs.seconds * runs.ranks / 3600)
    rows = []
    for key, group in runs.groupby(["family", "settings", "cpu"], sort=True):
        hours = "unknown" if group.hours.isna().any() else f"{group.hours.sum():.1f}"
        steps = plot.step_label(round(group.steps.sum(), -5))
        unfinished, commits = (group.status != "finished").sum(), sorted(set(group.commit))
        rows.append([*key, len(group), unfinished, steps, hours, " ".join(commits)])
    header = ["scripts", "settings", "CPU", "runs", "unfinished", "steps", "core-hours", "commits"]
    return markdown(header, rows)


# ----------------------------------------------------------------------------------------- figures


def draw_band(ax, x, mean, std, color, style):
    keep = np.unique(np.linspace(0, len(x) - 1, 80).astype(int))
    x, mean, std = x[keep], mean[keep], std[keep]
    ax.plot(x, mean, color=color, **style)
    if std.any():
        ax.fill_between(x, mean - std, mean + std, color=color, alpha=0.2, lw=0)


def draw_panel(ax, results, algo, env, end, settings):
    """One algorithm in one environment: the published curves, ours over them."""
    for framework, dashes in (("torch", (4, 1.5)), ("tf1", (1, 1))):
        found = plot.reference_curve(algo, framework, env)
        if found and found[0] == framework:
            x = np.append(found[1][found[1] < end], end)
            mean, std = (np.interp(x, found[1], y) for y in found[2:])
            draw_band(ax, x, mean, std, COLORS["published"], {"lw": 1, "ls": (0, dashes)})
    empty = True
    for framework, label in [*PLAIN_RUNS, *(("torch", other) for other in settings[1:])]:
        curves = results.seeds(f"{algo}_{framework}", env, label)
        x, y = plot.stack_runs([pd.DataFrame({"x": x, "y": y}) for x, y in curves], "x", "y")
        if len(x):
            empty = False
            color = COLORS[framework if label == "plain" else label]
            half = 2 * (~np.isnan(y)).sum(axis=0) >= len(y)  # of the seeds have come so far
            for seed in y[~np.isnan(y[:, ~half]).all(axis=1)]:  # those that went further
                ax.plot(x, seed, color=color, lw=0.7)
            x, y = x[half], y[:, half]
            draw_band(ax, x, np.nanmean(y, axis=0), np.nanstd(y, axis=0), color, {"lw": 1.4})
    if empty:
        ax.text(0.04, 0.96, "no run yet", transform=ax.transAxes, va="top", color=INK)


def figure(results, algos, settings=("plain",), height=1.35):
    """An SVG as text: a row for each environment, a column for each algorithm.

    settings: labels of the runs to draw, "plain" first; the others in PyTorch alone.
    """
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt
    from matplotlib.lines import Line2D
    from matplotlib.ticker import MaxNLocator

    style = {**plot.STYLE, "svg.hashsalt": "report", "svg.fonttype": "path", "font.size": 8}
    style |= dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "grid.color"), INK)
    style |= {"xtick.color": INK, "ytick.color": INK, "axes.titlesize": 9, "path.simplify": False}
    style |= {"grid.alpha": 0.25, "savefig.transparent": True}
    ends = results.runs.groupby(results.runs.script.str.split("_").str[0]).steps.max()
    with matplotlib.rc_context(style):
        size = (10, 0.75 + height * len(ENVS))
        fig, axes = plt.subplots(len(ENVS), len(algos), figsize=size, sharex="col")
        margin = {"bottom": 0.42 / size[1], "top": 1 - 0.55 / size[1], "hspace": 0.2}
        fig.subplots_adjust(left=0.065, right=0.985, wspace=0.3, **margin)
        for ax, (env, algo) in zip(axes.flat, [(e, a) for e in ENVS for a in algos], strict=True):
            end = ends.get(algo, MARKS[-1])
            draw_panel(ax, results, algo, env, end, settings)
            ax.set_xlim(0, end)
            for axis, ticks in ((ax.xaxis, 2), (ax.yaxis, 3)):
                axis.set_major_locator(MaxNLocator(ticks, steps=[1, 2, 5, 10]))
                axis.set_major_formatter(plot.step_label)
            if env == ENVS[0]:
                ax.set_title(algo.upper(), fontweight="bold")
        for ax, env in zip(axes[:, 0], ENVS, strict=True):
            ax.set_ylabel(env, fontweight="bold")
        fig.align_ylabels(axes[:, 0])
        lines = {"ours, PyTorch": ("torch", "-"), "ours, TensorFlow 1": ("tf1", "-")}
        lines |= {f"ours, {other}": (other, "-") for other in settings[1:]}
        lines |= {"Spinning Up (2020), PyTorch": ("published", (0, (4, 1.5)))}
        lines |= {"Spinning Up (2020), TensorFlow 1": ("published", (0, (1, 1)))}
        handles = [Line2D([], [], color=COLORS[c], ls=ls, lw=1.4) for c, ls in lines.values()]
        more = {"ncols": len(lines), "fontsize": 8, "columnspacing": 1.2}
        fig.legend(handles, lines, loc="upper center", **more)
        fig.text(0.5, 0.04 / size[1], "environment steps", ha="center")
        text = io.StringIO()
        fig.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
        plt.close(fig)
    # Hundredths of a point are enough in a path, and make the file half as large.
    number = r"(?<=[MLQC ])-?\d+\.\d{3,}(?=[ \"]|$)"
    short = re.sub(number, lambda m: f"{float(m[0]):.2f}", text.getvalue(), flags=re.M)
    return re.sub(r" +$", "", short, flags=re.M)


# ------------------------------------------------------------------------------------------- pages


def fill(text, tables):
    """A page with its tables put in."""

    def replace(match):
        return f"<!-- results: {match[1]} -->\n\n{tables[match[1]]}\n\n<!-- results: end -->"

    pattern = r"<!-- results: (?!end )(\S+) -->.*?<!-- results: end -->"
    return re.sub(pattern, replace, text, flags=re.S)


def link_functions(text):
    """A page whose links to functions, [`name`](algos/script.py#L1), lead to their lines."""

    def replace(match):
        before, *_ = re.split(rf"(?:def|class) {match[1]}\b", (ROOT / match[2]).read_text())
        return f"[`{match[1]}`]({match[2]}#L{before.count(chr(10)) + 1})"

    return re.sub(r"\[`(\w+)`\]\((algos/\w+\.py)#L\d+\)", replace, text)


def make(root=ROOT):
    """All figures and pages: {path: text}."""
    folder = root / "benchmark" / "results"
    results = Results(folder)
    tables = {"summary": summary(results), "cost": cost(results)}
    for family, algos in FAMILIES.items():
        tables |= {family: returns(results, algos)} | {a: returns(results, [a]) for a in algos}
    files = {folder / "all.svg": figure(results, [a for f in FAMILIES.values() for a in f])}
    settings = ["plain", *(x for x in ("normalised", "strong") if x in set(results.runs.settings))]
    files[folder / "on_policy.svg"] = figure(results, FAMILIES["on-policy"], settings, 1.7)
    files[folder / "off_policy.svg"] = figure(results, FAMILIES["off-policy"], height=1.7)
    for path in [root / "README.md", *sorted(folder.glob("*.md"))]:
        up = "../" * len(path.relative_to(root).parents[:-1])  # links are relative to the page
        text = link_functions(fill(path.read_text(), tables))
        files[path] = text.replace("](algos/", f"]({up}algos/")
    return files


def main(argv=None):
    try:
        args = parse_args(Args, argv)
        if args.collect:
            print(f"collected {collect(args.collect)} runs")
        for path, text in make().items():
            if not path.exists() or path.read_text() != text:
                path.write_text(text)
                print(f"wrote {path.relative_to(ROOT)}")
    except (ValueError, OSError) as e:
        sys.exit(f"report.py: error: {printable(e, 1000)}")


if __name__ == "__main__":
    main()
