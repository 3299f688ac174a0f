"""Make the tables and figures of benchmark/results/, but for speed.md, from the CSV files there.

    python benchmark/report.py                                      # make them anew
    python benchmark/report.py --collect data/benchmark_on_policy   # take in runs first
    python benchmark/report.py --verify ppo_torch HalfCheetah-v4 3  # make a run again and compare
    python benchmark/report.py --publish data/my-sac/my-sac_s3      # its policy, to policies/

`--collect` reads runs, finished or not, and adds them to two files of benchmark/results/: runs.csv
has one row for each run, curves.csv the points of its curve. A run replaces the one with the same
script, environment, settings and seed; `--setting "plain, Zen 3"` gives its settings another name.

`--verify` starts the run of a row of runs.csv again (a random plain one if none is named), with one
core for each rank, ends it after `--epochs`, and compares its returns with curves.csv. Where these
differ, but CPU and versions are those of the row, the exit code is 1.

`--publish` copies the policies of runs to benchmark/policies/, in place of the one with the same
algorithm and task. A file there also has what the table of that folder says of it, in `config`.

A table goes between two lines of a page, `<!-- results: NAME -->` and `<!-- results: end -->`; NAME
is a key of `tables` in `make`. Returns are smoothed as the published curves are: each seed by
itself, over 11 epochs of 4000 steps, centered.
"""

import contextlib
import io
import json
import os
import re
import shlex
import sys
import time
from pathlib import Path
from subprocess import DEVNULL, Popen
from tempfile import TemporaryDirectory

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from pydantic.dataclasses import dataclass
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run from any directory
from benchmark import flags, plot, test_policy
from benchmark.intervals import bootstrap, improvement, interval, iqm, welch
from benchmark.reading import printable, read_npz, read_status
from common.args import PosInt, parse_args

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmark" / "results"
POLICIES = ROOT / "benchmark" / "policies"
ENVS = ["HalfCheetah", "Hopper", "Walker2d", "Swimmer", "Ant"]
FAMILIES = {"on-policy": ["vpg", "trpo", "ppo"], "off-policy": ["ddpg", "td3", "sac"]}
ALGOS = [algo for family in FAMILIES.values() for algo in family]
FRAMEWORKS = {"torch": "PyTorch", "tf1": "TensorFlow 1"}
# What is shown, as (framework, settings); figures show those that have a color.
KINDS = {"PyTorch": ("torch", "plain"), "TensorFlow 1": ("tf1", "plain")}
KINDS |= {"TensorFlow 1, Zen 3": ("tf1", "plain, Zen 3")}  # where rounding differs
KINDS |= {kind: ("torch", kind) for kind in ("normalized", "strong")}
KINDS |= {"strong for Swimmer": ("torch", "strong, gamma 0.9999, lam 0.99")}
TYPES = dict.fromkeys(("commit", "cpu", "arguments", "versions"), str)  # 12e4567 is no number
# Runs of PPO that compare versions: a title, the suffix of the task, the settings.
MUJOCO = "3.2.7"  # of the tables
VERSIONS = [(f"-v4, MuJoCo {MUJOCO}", "", "plain"), (f"-v5, MuJoCo {MUJOCO}", "-v5", "plain")]
VERSIONS += [("-v4, MuJoCo 4.0.0", "", "plain, MuJoCo 4.0.0")]
MAX_ROWS = 300  # of one run in curves.csv
MARKS = (100_000, 300_000, 500_000, 1_000_000)  # steps at which returns are compared
# What the published settings change of a script's defaults; arguments that numbers do not depend
# on, or that have a column of their own.
PLAIN = {"on-policy": {"hidden_sizes": [64, 32]}, "off-policy": {}}
OWN = [*flags.RESERVED, "save_freq", "snapshots", "seed", "env_id"]
# Colors that are legible on white and on GitHub's dark background.
COLORS = {"PyTorch": "#e8590c", "TensorFlow 1": "#1c7ed6", "published": "#868e96"}
COLORS |= {"normalized": "#ae3ec9", "strong": "#2f9e44", "strong for Swimmer": "#e64980"}
INK = "#7a7f87"
DASHES = {"torch": (0, (4, 1.5)), "tf1": (0, (1, 1))}  # of the published curves


@dataclass
class Args:
    collect: tuple[str, ...] = ()  # directories of runs, or prefixes of their names, to take in
    verify: tuple[str, ...] | None = None  # script, task and seed of a run; none: any
    setting: str = ""  # of that run, if not plain; of runs to take in, if not what flags say
    epochs: PosInt = 20  # of that run to make
    publish: tuple[str, ...] = ()  # directories of runs whose policies to publish


# Collecting ---------------------------------------------------------------------------------------


def arguments(config, usual, *others):
    """A run's arguments as flags, but for OWN, `others`, and what is the default or `usual`."""
    script = flags.Script(ROOT / "algos" / config["script"])
    usual = script.parse({}) | usual
    names = [name for name in config if name in usual and name not in (*OWN, *others)]
    changed = {x: config[x] for x in names if config[x] != usual[x]}
    words = (word.split("=", 1) for word in flags.to_words(script.hints, changed))
    return shlex.join(part for parts in words for part in parts)


def settings_of(config):
    """A run's settings: "plain", "normalized", or the flags that differ from the published ones.

    Those of sweeps/strong_*.toml are "strong", with gamma and lambda where these are others.
    Another MuJoCo than that of the tables is named.
    """
    words = arguments(config, PLAIN[family_of(config["script"])], "epochs", "device", "compile")
    words += f" --num-cpu {config.get('ranks', 1)}" * (config.get("ranks", 1) > 1)
    names = {"": "plain", "--norm-obs --norm-rew": "normalized", "--gamma 0.9999": "gamma 0.9999"}
    words = names.get(words, words.strip())
    if re.match("(swimmer_)?strong_", str(config.get("exp_name"))):
        usual = {"gamma": 0.99, "lam": 0.95}.items()
        changed = [f", {name} {config[name]}" for name, x in usual if config.get(name, x) != x]
        words = "strong" + "".join(changed)
    mujoco = (config.get("versions") or {}).get("mujoco", MUJOCO)
    return words + f", MuJoCo {mujoco}" * (mujoco != MUJOCO)


def family_of(script):
    return next(name for name, algos in FAMILIES.items() if script.split("_")[0] in algos)


def read_run(frame, setting=""):
    """A run's row of runs.csv, and the points of its curve, an epoch each."""
    config, path = frame.attrs["config"], Path(frame.attrs["run_dir"])
    table = pd.DataFrame({"steps": frame["TotalEnvInteracts"].astype(int)})
    table["return"] = frame["AverageEpRet"]
    table["test_return"] = frame.get("AverageTestEpRet", np.nan)
    status = read_status(path)["status"] if (path / "status.json").exists() else "unknown"
    versions = {"cpu": "unknown", "threads": 1} | (config.get("versions") or {})
    names = sorted(versions.keys() - {"cpu", "python", "mpi4py", "MPI"})
    row = {"script": Path(config["script"]).stem, "env": config["env_id"]}
    row |= {"settings": setting or settings_of(config), "seed": config["seed"]}
    row |= {"ranks": config.get("ranks", 1), "status": status}
    row |= {"steps": table["steps"].iloc[-1], "seconds": round(frame["Time"].iloc[-1])}
    row |= {"commit": (config.get("git_commit") or "unknown")[:10], "cpu": versions["cpu"]}
    row |= {"arguments": arguments(config, {"epochs": None})}
    row |= {"versions": ", ".join(f"{name} {versions[name]}" for name in names)}
    label = re.sub(r" -(?=[\d.])", " minus", row["settings"])  # -1 and 1 are two settings
    label = re.sub(r"\W+", "-", label).strip("-")
    run = f"{row['script']}_{row['env']}_{label}_s{row['seed']}".replace("_plain_", "_")
    return {"run": run, **row}, table


def without_noise(run, seed, episodes=10):
    """Returns of a run's final policy without noise; [NaN] if policy.npz is not there."""
    if not (run / "policy.npz").exists():
        return [np.nan]
    get_action = test_policy.load_policy(run, deterministic=True)
    how = test_policy.read_config(run)["max_ep_len"], episodes, seed
    quiet = contextlib.redirect_stdout(io.StringIO())  # not a line for each episode
    with contextlib.closing(test_policy.load_env(run)) as env, quiet:
        return test_policy.run_policy(env, get_action, *how)[0]


def thin(table, k):
    """The means of k rows each, at the steps of the last of them; those without a return go."""
    table = table.groupby(np.arange(len(table)) // k)
    table = table.agg({"steps": "last", "return": "mean", "test_return": "mean"})
    return table.dropna(subset=["return", "test_return"], how="all")


def collect(logdirs, results=RESULTS, setting=""):
    """Take the runs below `logdirs` into runs.csv and curves.csv; returns the number of runs.

    A run takes the place of one of the same script, task, settings and seed with as many steps or
    fewer. Raises ValueError if there is no run, or for a logdir that does not exist.
    """
    runs, curves, path = {}, {}, results / "runs.csv"
    steps = pd.read_csv(path, index_col="run")["steps"].to_dict() if path.exists() else {}
    for frame in plot.get_all_datasets(logdirs):
        if frame.attrs["framework"] in FRAMEWORKS and "Time" in frame:
            row, table = read_run(frame, setting)
            if row["steps"] < steps.get(row["run"], 0):
                plot.warn(f"left out {frame.attrs['run_dir']}: there is a longer run of its kind")
                continue
            points = thin(table, -(-len(table) // MAX_ROWS))
            if points.empty:
                plot.warn(f"left out {frame.attrs['run_dir']}: {plot.NO_EPISODE}")
                continue
            steps[row["run"]] = row["steps"]
            noiseless = np.mean(without_noise(Path(frame.attrs["run_dir"]), row["seed"]))
            runs[row["run"]] = {**row, "without_noise": noiseless}
            curves[row["run"]] = points.assign(run=row["run"])
        else:
            plot.warn(f"left out {frame.attrs['run_dir']}: not a run of one of the twelve scripts")
    if not runs:
        raise ValueError(f"no run to collect in {' '.join(logdirs)}")
    curves = pd.concat(curves.values())[["run", "steps", "return", "test_return"]]
    for name, new in ("curves", curves), ("runs", pd.DataFrame(runs.values())):
        path = results / f"{name}.csv"
        old = pd.read_csv(path, dtype=TYPES) if path.exists() else new[:0]
        new = pd.concat([old[~old.run.isin(runs)], new])[list(new)]
        new = new.sort_values(["run", "steps"], kind="stable")
        new.to_csv(path, index=False, float_format="%.6g")
    return len(runs)


def publish(logdirs, folder=POLICIES):
    """Copy the policies of the runs below `logdirs` to `folder`, as <algorithm>_<task>.npz.

    A file also gets `config`: what test_policy.py needs to make the environment, and the numbers of
    its row in the table, of which mean and deviation are over 100 episodes without noise.
    """
    for frame in plot.get_all_datasets(logdirs):
        run = Path(frame.attrs["run_dir"])
        if frame.attrs["framework"] not in FRAMEWORKS:
            raise ValueError(f"{run} is not a run of one of the twelve scripts")
        row, table = read_run(frame)
        arrays, config = read_npz(run / "policy.npz"), test_policy.read_config(run)
        returns = without_noise(run, 0, 100)
        keys = "env_id", "env_kwargs", "max_ep_len", "script", "seed"
        about = {key: config[key] for key in keys} | {"settings": row["settings"]}
        about["steps"] = int(table["steps"][arrays["epoch"] - 1])  # it may not be the last epoch
        about |= {"mean": np.mean(returns), "deviation": np.std(returns)}
        task = re.sub(r"[^\w.-]", "-", row["env"].rsplit("-v", 1)[0].lower())
        name = f"{frame.attrs['algo']}_{task}.npz"
        np.savez(folder / name, **{**arrays, "config": json.dumps(about)})
        print(f"{run}: {name}, {about['mean']:.0f} ± {about['deviation']:.0f}", flush=True)


# Run again ----------------------------------------------------------------------------------------


def verify(words, setting, epochs, results):
    """Make a run again for some epochs and compare it with its row; whether all is as it should be.

    words: script, task and seed; none of them for a random row of `setting`. Raises ValueError if
    there is no such row, or if its run fails.
    """
    if len(words) > 3:
        raise ValueError("--verify takes script, task and seed; --setting names their settings")
    runs, keys = results.runs, ["settings", "script", "env", "seed"][: len(words) + 1]
    for key, word in zip(keys, (setting, *words), strict=True):
        there, runs = runs[key].unique(), runs[runs[key].astype(str) == word]
        if runs.empty:
            text = f"runs.csv has no {setting} run of {' '.join(words)}"
            raise ValueError(f"{text}; there is only {key} {', '.join(map(str, there))}")
    row = runs.sample().iloc[0]
    command = [f"algos/{row.script}.py", "--env-id", row.env, "--seed", str(row.seed)]
    command += [*shlex.split(row.arguments), "--num-cpu", str(row.ranks)]
    print("python", shlex.join(command))
    rate = 4000 * row.seconds / row.steps
    print(f"{epochs} epochs; 4000 steps took {rate:.1f} s when it was recorded", flush=True)
    if hasattr(os, "sched_setaffinity"):  # a core a rank: rounding depends on the threads
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-row.ranks :])
    with TemporaryDirectory() as folder:
        command = [sys.executable, *command, "--data-dir", folder, "--exp-name", "again"]
        run = Popen(command, cwd=ROOT, stdout=DEVNULL, stderr=DEVNULL)
        table = Path(folder, "again", f"again_s{row.seed}", "progress.txt")
        # It is ended, not made shorter: --epochs decides how fast a learning rate falls.
        with tqdm(total=epochs, unit="epoch") as bar:
            while run.poll() is None:
                done = table.read_text().count("\n") - 1 if table.exists() else 0
                if done > bar.n:
                    bar.update(min(done, epochs) - bar.n)
                if done >= epochs:
                    run.terminate()
                time.sleep(0.2)
        frames = plot.get_datasets(folder)
    if not frames:
        raise ValueError("the run ended without an epoch; the command above says why")
    return compare(row, frames[0][:epochs], results)


def compare(row, frame, results):
    """Print what a run made again has in common with its row; whether that is as it should be."""
    now, table = read_run(frame)
    k = -(-row.steps // table["steps"][0] // MAX_ROWS)  # epochs a point
    new = thin(table[: len(table) // k * k], k)
    if new.empty:
        raise ValueError(f"nothing to compare: a point of curves.csv has {k} epochs with a return")
    new = new.map(lambda x: float(f"{x:.6g}") if x % 1 else x)  # as in curves.csv
    old = results.points[row.run].query(f"steps <= {new['steps'].max()}")
    both = old.merge(new, "outer", "steps").fillna(np.inf)
    same = (both.return_x == both.return_y) & (both.test_return_x == both.test_return_y)
    lines = [f"{same.sum() * k} of {len(same) * k} epochs equal to the digit"]
    if not same.all():
        lines[0] += f"; the numbers part at {both.steps[~same].iloc[0]} steps"
        same_kind = results.groups[row.script, row.env.removesuffix("-v4"), row.settings].run
        seeds = [results.points[run].query(f"steps <= {new['steps'].max()}") for run in same_kind]
        mean, *means = (x["test_return"].fillna(x["return"]).mean() for x in [new, *seeds])
        where = "within" if min(means) <= mean <= max(means) else "outside"
        text = f"mean return {mean:.0f}, {where} the range of the {len(means)} seeds"
        lines.append(f"{text}, {min(means):.0f} to {max(means):.0f}")
    others = [key for key in ("cpu", "versions") if row[key] != now[key]]
    lines += [f"{x} in runs.csv: {row[x]}; here: {now[x]}" for x in [*others, "commit"]]
    print("\n".join(lines))
    return bool(others or (len(same) and same.all()))


# Numbers ------------------------------------------------------------------------------------------


class Results:
    """The collected runs, what is computed from each of them, and the best published elsewhere.

    runs: the rows of runs.csv. points, curves: of each run, its rows of curves.csv, and (steps [T],
    smoothed return [T]). groups: {(script, task, settings): rows of runs, with columns for the
    return at each of MARKS, NaN if it has not come so far}; task is the -v4 one's name without that
    suffix. cells: see make_cells.
    """

    def __init__(self, results=RESULTS):
        self.runs = pd.read_csv(results / "runs.csv", dtype=TYPES)
        points = pd.read_csv(results / "curves.csv")
        points["performance"] = points["test_return"].fillna(points["return"])
        self.points = dict(list(points.groupby("run")))
        self.curves = {run: smooth(table) for run, table in self.points.items()}
        runs = self.runs.assign(task=self.runs.env.str.removesuffix("-v4"))
        for mark in MARKS:
            runs[mark] = [np.interp(mark, *self.curves[run], right=np.nan) for run in runs.run]
        self.groups = dict(list(runs.groupby(["script", "task", "settings"])))
        best = pd.read_csv(plot.REFERENCE.with_name("published_at_1m_steps.csv")).query(
            "source != 'SpinningUp bench 2020' and steps == 1_000_000"
        )
        best = best[~best.note.str.contains("MAX over training", na=False)]
        best = best.assign(algo=best.algo.str.lower().str.split("/").str[0])
        self.best = best.assign(task=best.env.str.split("-v").str[0]).sort_values("mean")
        self.cells = self.make_cells()

    def make_cells(self):
        """What the tables show, a row for each group, or two if some seeds went further than half.

        Columns: script, task, settings, mark, n; of plain settings, also the difference from the
        published mean, the half width of its 95 % interval (NaN for a single seed), and the
        published standard deviation; ours and more: these in words; and in words without_noise, and
        above_best: the difference, without noise where that is known, from the best elsewhere.
        """
        rows = []
        for (script, task, settings), runs in self.groups.items():
            tested = family_of(script) == "off-policy"  # without noise, as it is
            best = self.best_of(script.split("_")[0])
            reached = [m for m in MARKS if runs[m].notna().any()]
            half = [m for m in reached if 2 * runs[m].notna().sum() >= len(runs)]
            for mark in sorted({*half[-1:], *reached[-1:]}):
                values, note = runs[mark].dropna(), ""
                ours = values.mean(), values.std(), len(values)
                late = "" if mark == MARKS[-1] else f" at {plot.step_label(mark)}"
                row = {"script": script, "task": task, "settings": settings, "n": len(values)}
                row |= {"more": None, "without_noise": None, "above_best": None}
                known = task in ENVS and settings == "plain"  # published for -v3, close to -v4
                if known and (band := reference(script, task, mark)):
                    x, width = welch((ours, band))
                    note = arrow(x, width)
                    row |= {"difference": x, "half": width, "std": band[1]}
                    more = f"{estimate(x, width, '+', band[1])}{note}{late}"
                    row["more"] = f"{estimate(*interval(*band))}, {more}"
                row["ours"] = f"{with_interval(*ours)}{note}{late}"
                if len(x := runs.without_noise.dropna()) and mark == reached[-1] and not tested:
                    ours = x.mean(), x.std(), len(x)
                    row["without_noise"] = with_interval(*ours)
                if task in best.index and mark == MARKS[-1]:
                    theirs = best.loc[task, ["mean", "std_or_ci", "seeds"]]
                    x, width = welch((ours, theirs))
                    row["above_best"] = estimate(x, width, "+", theirs.std_or_ci) + arrow(x, width)
                rows.append(row)
        return pd.DataFrame(rows)

    def best_of(self, algo, single=False):
        """The highest mean published at 1M steps, of several seeds or of single runs, by task."""
        best = self.best[(self.best.algo == algo) & ((self.best.seeds == 1) == single)]
        return best.groupby("task").tail(1).set_index("task")

    def scores(self, settings, pairs):
        """Returns as shares of the best published, for the (framework, setting)s that are compared.

        pairs: (algorithm, task). Returns (scores, tasks, mark): a list of arrays [seeds] for each
        of `settings`, an array for each pair for which all have three seeds; these tasks; and the
        last of MARKS for which there are any. 1 is the highest mean of several seeds at 1M steps
        published for a task by an algorithm of the family. None if there is nothing to compare.
        """
        for mark in MARKS[::-1]:
            found = {}
            for algo, task in pairs:
                keys = [(f"{algo}_{framework}", task, setting) for framework, setting in settings]
                groups = [self.groups[key][mark].dropna() for key in keys if key in self.groups]
                if len(groups) == len(keys) and min(map(len, groups)) >= 3:
                    best = self.best[self.best.algo.isin(FAMILIES[family_of(algo)])]
                    best = best["mean"][(best.task == task) & (best.seeds != 1)].max()
                    found[algo, task] = [group.to_numpy() / best for group in groups]
            if found:
                tasks = ", ".join(dict.fromkeys(task for _, task in found))
                return list(zip(*found.values(), strict=True)), tasks, mark


def smooth(table):
    """(steps [T], smoothed return [T]) of a run's points."""
    steps = table["steps"].to_numpy(float)
    spacing = np.median(np.diff(steps, prepend=0))
    width = 2 * round((11 * 4000 / spacing - 1) / 2) + 1
    return steps, plot.smooth_values(table["performance"], max(width, 1))


def reference(script, task, mark):
    """Spinning Up's published (mean, standard deviation, seeds) at `mark` steps, or None.

    TRPO was published for TensorFlow alone, which stands in for PyTorch. The published bands are
    deviations of ten seeds as of a population (np.std in seaborn's tsplot); ours are of a sample.
    """
    if found := plot.reference_curve(*script.split("_"), task):
        mean, std = (np.interp(mark, found[1], y) for y in found[2:])
        return mean, std * np.sqrt(10 / 9), 10


# Tables -------------------------------------------------------------------------------------------


def markdown(header, rows):
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def estimate(value, half, sign="", std=None):
    """1300 ± 210: to the second digit of the half width; else of `std`, else of the value."""
    size = next(x for x in (half, std, abs(value)) if pd.notna(x))
    place = 1 - int(np.log10(max(size, 10)))  # units at the finest
    text = f"{round(value, place) + 0.0:{sign}.0f}"  # no -0
    return text if np.isnan(half) else f"{text} ± {round(half, place):.0f}"


def with_interval(mean, std, n):
    """1300 ± 210 (5): a mean, its 95 % interval, and of how many numbers it is."""
    return f"{estimate(*interval(mean, std, n))} ({n})"


def arrow(difference, half):
    """The mark of a difference whose interval excludes 0: " ↑" or " ↓", else ""."""
    return "" if not abs(difference) > half else " ↑" if difference > 0 else " ↓"


def by_task(cells, script, settings="plain", column="ours"):
    cells = cells[(cells.script == script) & (cells.settings == settings)]
    return ["; ".join(cells[column][cells.task == task].dropna()) or "–" for task in ENVS]


def returns(results, algos):
    """Ours beside Spinning Up's and the best published, a row for each of them."""
    rows, cells = [], results.cells
    for algo in algos:
        name = algo.upper()
        for kind, (framework, settings) in KINDS.items():
            key = f"{algo}_{framework}", settings
            rows.append([f"**{name}, {kind}**", *by_task(cells, *key)])
            rows.append([f"{name}, {kind}, without noise", *by_task(cells, *key, "without_noise")])
        for framework, title in FRAMEWORKS.items():
            theirs = FRAMEWORKS[plot.reference_curve(algo, framework, ENVS[0])[0]]
            texts = by_task(cells, f"{algo}_{framework}", column="more")
            rows.append([f"Spinning Up's {name}, {theirs}; our difference, {title}", *texts])
        for title, single in ((f"best {name} elsewhere", False), (f"best single {name} run", True)):
            best = results.best_of(algo, single)
            means = map(estimate, best["mean"], best.std_or_ci)
            best["text"] = [f"{x.split()[0]}, " for x in means] + best.framework + ", " + best.env
            rows.append([f"{title}, 1M", *best.text.reindex(ENVS, fill_value="–")])
        there = set(cells.settings[cells.script == f"{algo}_torch"])
        strong = [kind for kind in KINDS if "strong" in kind and KINDS[kind][1] in there]
        for kind in strong or ["normalized" if "normalized" in there else "PyTorch"]:
            texts = by_task(cells, f"{algo}_torch", KINDS[kind][1], "above_best")
            rows.insert(-1, [f"our difference from it, {kind}", *texts])  # above the single runs
    return markdown(["", *ENVS], [row for row in rows if set(row[1:]) != {"–"}])


def differences(results, algos):
    """The cells with a published mean, at the steps that half of the seeds have reached."""
    cells = results.cells.dropna(subset="difference").drop_duplicates(["script", "task"])
    return cells[cells.script.str.split("_").str[0].isin(algos)]


def verdict(results, algos):
    """In how many cells, and in which, the interval of the difference lies below or above 0."""
    cells, texts = differences(results, algos), []
    several = cells[cells.n > 1]
    for sign in (-1, 1):
        beyond = several[sign * several.difference > several.half]
        names = "; ".join(f"{s} on {', '.join(x.task)}" for s, x in beyond.groupby("script"))
        texts.append(f"{len(beyond)} of {len(several)} cells" + f" ({names})" * bool(names))
    text = f"The 95 % interval of our difference from the published mean lies below 0 in {texts[0]}"
    text += f", above 0 in {texts[1]}. These cells have {span(several.n)} seeds"
    return text + f"; {sum(cells.n == 1)} more have one, and no interval" * any(cells.n == 1) + "."


def span(numbers):
    return " to ".join(map(str, sorted({min(numbers), max(numbers)})))


def comparisons(results):
    """The other framework, and other settings, against PyTorch with the plain ones."""
    rows, there = [], {key[::2] for key in results.groups}  # scripts and settings
    for kind, (framework, settings) in list(KINDS.items())[1:]:
        for algos in [*([algo] for algo in ALGOS), FAMILIES["on-policy"]]:
            algos = [algo for algo in algos if (f"{algo}_{framework}", settings) in there]
            pairs, names = [(algo, env) for algo in algos for env in ENVS], ", ".join(algos).upper()
            found = results.scores((KINDS[kind], KINDS["PyTorch"]), pairs)
            if found and [kind, names] not in [row[:2] for row in rows]:
                (x, y), tasks, mark = found
                row = [kind, names, f"{tasks} at {plot.step_label(mark)}"]
                row.append(span([len(runs) for runs in x + y]))
                for values in ((improvement, x, y), (iqm, x), (iqm, y)):
                    row.append("{:.2f} ({:.2f} to {:.2f})".format(*bootstrap(*values)))
                rows.append(row)
    header = ["", "of", "tasks", "seeds", "probability of improvement", "IQM", "IQM, PyTorch plain"]
    return markdown(header, rows)


def versions(results):
    """PPO in PyTorch at 1M steps with other versions of tasks and MuJoCo, and what that changes."""
    ends, rows = {}, []
    for (script, *key), runs in results.groups.items():
        x = runs[MARKS[-1]].dropna()
        if script == "ppo_torch" and len(x):
            ends[tuple(key)] = x.mean(), x.std(), len(x)
    for title, suffix, settings in VERSIONS:
        row, changes = [title], ["difference"]
        for task in ENVS:
            ours, usual = ends.get((task + suffix, settings)), ends.get((task, "plain"))
            row.append(with_interval(*ours) if ours else "–")
            change = welch((ours, usual)) if ours and usual else None
            changes.append(estimate(*change, "+") + arrow(*change) if change else "–")
        rows += [row, changes] if rows else [row]
    return markdown(["", *ENVS], [row for row in rows if set(row[1:]) != {"–"}])


def summary(results):
    """The scripts' speeds by speed.py's newest rows of pairs, and returns."""
    speeds, rows = {}, []
    table = pd.read_csv(RESULTS / "speed.csv")[["speed.py", "first", "second"]]
    for line, *rates in table[::-1].itertuples(index=False):  # the newest is the last to be seen
        if line.startswith("pair "):
            speeds |= dict(zip(line.split()[1:3], map("{:.0f}".format, rates), strict=True))
    for script in [f"{algo}_{framework}" for algo in ALGOS for framework in FRAMEWORKS]:
        row = [f"[{script}.py](../../algos/{script}.py)", speeds.get(script, "–")]
        rows.append(row + by_task(results.cells, script))
    return markdown(["", "steps/s", *ENVS], rows)


def trained(folder):
    """The published policies, a row for each file."""
    rows = []
    for path in sorted(folder.glob("*.npz")):
        x = test_policy.read_config(path)
        rows.append([f"[{path.name}]({path.name})", x["script"], x["settings"], x["seed"]])
        rows[-1] += [plot.step_label(x["steps"]), f"{x['mean']:.0f}", f"{x['deviation']:.0f}"]
    header = ["policy", "script", "settings", "seed", "steps", "mean return", "standard deviation"]
    return markdown(header, rows)


def cost(results):
    """What the runs took, by family, settings and CPU."""
    runs = results.runs.assign(scripts=results.runs.script.map(family_of), runs=1)
    table = runs.groupby(["scripts", "settings", "cpu"], as_index=False).agg(
        runs=("runs", "sum"),
        steps=("steps", lambda x: plot.step_label(round(x.sum(), -5))),
        hours=("seconds", lambda x: f"{(x * runs.ranks[x.index]).sum() / 3600:.1f}"),
        commits=("commit", lambda x: " ".join(sorted(set(x)))),
    )
    return markdown([*table], table.to_numpy())


# Figures ------------------------------------------------------------------------------------------


def draw_band(ax, x, mean, std, color, label, **style):
    ax.plot(x, mean, color=COLORS[color], label=label, **style)
    ax.fill_between(x, mean - std, mean + std, color=COLORS[color], alpha=0.2, lw=0)


def panels(draw, shape, height, xlabel, share=True):
    """An SVG as text: `draw(axes)` fills its panels; the legend is the longest of them."""
    style = {**plot.STYLE, "svg.hashsalt": "report", "svg.fonttype": "path", "font.size": 8}
    style |= dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "grid.color"), INK)
    style |= {"xtick.color": INK, "ytick.color": INK, "path.simplify": False, "grid.alpha": 0.25}
    style |= {"savefig.transparent": True, "axes.titleweight": "bold", "axes.labelweight": "bold"}
    with matplotlib.rc_context(style):
        fig = Figure(figsize=(10, 0.75 + height * shape[0]), layout="constrained")
        axes = fig.subplots(*shape, squeeze=False, sharex=share, sharey=share is True)
        draw(axes)
        legend = max((ax.get_legend_handles_labels() for ax in axes.flat), key=lambda x: len(x[0]))
        fig.legend(*legend, loc="outside upper center", ncols=6, columnspacing=1.2)
        fig.supxlabel(xlabel, fontsize=8)
        fig.savefig(text := io.StringIO(), format="svg", metadata={"Date": None, "Creator": None})
    # Hundredths of a point are enough in a path, and make the file half as large.
    return re.sub(r"(?<=[MLQC ])(-?\d+\.\d\d)\d+", r"\1", text.getvalue())


def learning_curves(results, algos, kinds, height):
    """A figure with a row for each environment, a column for each algorithm."""

    def draw(axes):
        for ax, (env, algo) in zip(axes.flat, [(e, a) for e in ENVS for a in algos], strict=True):
            end = results.runs.steps[results.runs.script.str.startswith(algo)].max()
            x = np.linspace(0, end, 61)
            for framework, dashes in DASHES.items():
                published, *curve = plot.reference_curve(algo, framework, env)
                if published == framework:
                    mean, std = (np.interp(x, curve[0], y, left=np.nan) for y in curve[1:])
                    label = f"Spinning Up (2020), {FRAMEWORKS[framework]}"
                    draw_band(ax, x, mean, std, "published", label, lw=1, ls=dashes)
            for kind in kinds:
                framework, settings = KINDS[kind]
                if (key := (f"{algo}_{framework}", env, settings)) in results.groups:
                    curves = [results.curves[run] for run in results.groups[key].run]
                    y = np.array([np.interp(x, *xy, left=np.nan, right=np.nan) for xy in curves])
                    half = 2 * (~np.isnan(y)).sum(axis=0) >= len(y)  # of the seeds are so far
                    ax.plot(x, y[~np.isnan(y[:, ~half]).all(axis=1)].T, color=COLORS[kind], lw=0.7)
                    mean, std = np.nanmean(y[:, half], axis=0), np.nanstd(y[:, half], axis=0)
                    draw_band(ax, x[half], mean, std, kind, f"ours, {kind}", lw=1.4)
            for name, axis, ticks in (("x", ax.xaxis, 2), ("y", ax.yaxis, 3)):
                ax.locator_params(name, nbins=ticks, steps=[1, 2, 5, 10])
                axis.set_major_formatter(plot.step_label)
            ax.set(xlim=(0, end), ylabel=env if algo == algos[0] else "")
            ax.set_title(algo.upper() if env == ENVS[0] else "")

    return panels(draw, (len(ENVS), len(algos)), height, "environment steps", share="col")


def forest(results):
    """A figure of our differences from the published means, a panel for each algorithm."""

    def draw(axes):
        for ax, algo in zip(axes.flat, ALGOS, strict=True):
            ax.axvline(0, color=INK, lw=0.8)
            for cell in differences(results, [algo]).itertuples():
                i = cell.script.endswith("tf1")
                kind, y = list(KINDS)[i], ENVS.index(cell.task) + (-0.15, 0.15)[i]
                style = {"color": COLORS[kind], "fmt": "o", "ms": 4}
                style["label"] = f"ours, {kind}" if cell.task == ENVS[0] else ""
                ax.errorbar(cell.difference / cell.std, y, xerr=cell.half / cell.std, **style)
            ax.set(xlim=(-12, 12), ylim=(len(ENVS) - 0.5, -0.5), title=algo.upper())
            ax.set_yticks(range(len(ENVS)), ENVS)

    return panels(draw, (2, 3), 1.7, "our difference, in published standard deviations")


# Pages --------------------------------------------------------------------------------------------


def fill(text, tables):
    """A page with its tables put in."""
    pattern = r"(<!-- results: (?!end )(\S+) -->).*?(<!-- results: end -->)"
    return re.sub(pattern, lambda m: f"{m[1]}\n\n{tables[m[2]]}\n\n{m[3]}", text, flags=re.S)


def make(root=ROOT):
    """All figures and pages: {path: text}."""
    folder = root / "benchmark" / "results"
    results, files = Results(), {}
    tables = {"summary": summary(results), "cost": cost(results)}
    tables |= {"verdict": verdict(results, ALGOS), "comparisons": comparisons(results)}
    tables |= {"versions": versions(results), "policies": trained(POLICIES)}
    for family, algos in FAMILIES.items():
        tables |= {family: returns(results, algos), f"verdict-{family}": verdict(results, algos)}
        svg = learning_curves(results, algos, [kind for kind in KINDS if kind in COLORS], 1.7)
        files[folder / f"{family.replace('-', '_')}.svg"] = svg
    files[folder / "all.svg"] = learning_curves(results, ALGOS, list(KINDS)[:2], 1.35)
    files[folder / "forest.svg"] = forest(results)
    pages = [*sorted(folder.glob("*.md")), POLICIES / "README.md"]
    return files | {path: fill(path.read_text(), tables) for path in pages}


def main(argv=None):
    try:
        args = parse_args(Args, argv)
        if args.verify is not None:
            sys.exit(not verify(args.verify, args.setting or "plain", args.epochs, Results()))
        if args.collect:
            print(f"collected {collect(args.collect, setting=args.setting)} runs")
        if args.publish:
            publish(args.publish)
        for path, text in make().items():
            if not path.exists() or path.read_text() != text:
                path.write_text(text)
                print(f"wrote {path.relative_to(ROOT)}")
    except (ValueError, OSError) as e:
        sys.exit(f"report.py: error: {printable(e, 1000)}")


if __name__ == "__main__":
    main()
