"""Experiments: predict an outcome, train, and answer from the runs. A part of exercise.py.

experiments.toml has them, with the files that `start` writes: the question, with room for a
prediction and an answer, and a sweep for benchmark/grid.py. The outcome is computed from the runs.
"""

import itertools
import re
import tomllib
from pathlib import Path

import numpy as np
import pandas as pd

from benchmark import grid, launch
from benchmark.intervals import improvement
from common import UsageError

ROOT = Path(__file__).resolve().parents[1]
TABLE = tomllib.loads((ROOT / "exercises" / "experiments.toml").read_text())["experiment"]
ALL = {e["name"]: e for e in TABLE}
SURE = 0.85  # share of pairs of runs in which the lowest setting has to be below another


def word(x):
    """A number or word as it is written: 5 and not 5.0."""
    return f"{x:g}" if isinstance(x, float) else x


def given(experiment, text):
    """[prediction, answer] in the learner's file: choices or floats, None where there is none.

    Raises:
        UsageError: the file is no TOML.
    """
    try:
        data = tomllib.loads(text)
    except ValueError as e:
        raise UsageError(f"{experiment['name']}.toml: {e}") from None
    words = [str(word(data.get(key, ""))).strip(" %") for key in ("prediction", "answer")]
    if "choices" in experiment:
        return [x if x in experiment["choices"] else None for x in words]
    return [float(x) if re.fullmatch(r"-?\d*\.?\d+", x) else None for x in words]


def plan(experiment, path):
    """The runs of the learner's sweep, as launch.Run; they are in runs/ beside its file, `path`.

    Raises:
        UsageError: other settings than the experiment's, or fewer seeds.
    """
    try:
        runs = grid.plan(grid.read_sweep(path, ["--data-dir", str(path.parent / "runs")]))
    except UsageError as e:
        raise UsageError(f"{path}: {e}") from None
    ours, theirs = (tomllib.loads(x) for x in (experiment["sweep"], path.read_text("utf-8")))
    seeds = [len({run.fixed["seed"] for run in runs}), len(ours["params"]["seed"])]
    for sweep in (ours, theirs):
        sweep.setdefault("params", {})["seed"] = sweep["workers"] = 0
    if theirs != ours or seeds[0] < seeds[1]:
        raise UsageError(f"{path}: only workers may change, and seeds (at least {seeds[1]})")
    return runs


def measured(experiment, run):
    """The means of a run's columns over its last epochs. UsageError if they are not there."""
    try:
        table = pd.read_csv(run.directory / "progress.txt", sep="\t")
        table = table.loc[range(run.epochs), experiment["columns"]].astype(float)
        return table.tail(experiment["last"]).mean()
    except (OSError, ValueError, KeyError) as e:
        raise UsageError(f"{run.directory}/progress.txt is damaged: {e}") from None


def by_setting(experiment, runs):
    """(a table of the runs' means as text, {setting: [seeds]} of the first column)."""
    name = experiment["setting"]
    labels = [word(run.fixed[name]) for run in runs]
    table = pd.DataFrame([measured(experiment, run) for run in runs], pd.Index(labels, name=name))
    first = table.columns[0]
    groups = {label: x[first].to_numpy() for label, x in table.groupby(level=0)}
    table = table.groupby(level=0).mean()
    table[f"{first} of each run"] = [" ".join(map("{:.3g}".format, x)) for x in groups.values()]
    return table.reset_index().to_string(index=False, float_format="{:.3g}".format), groups


def recorded(experiment):
    """Mean returns of our recorded runs over some of their steps: {label: [seeds]}."""
    results = ROOT / "benchmark" / "results"
    runs = pd.read_csv(results / "runs.csv", usecols=["run", "script", "env", "settings"])
    curves = pd.read_csv(results / "curves.csv").merge(runs)
    rows = {label: curves.query(which) for label, which in experiment.get("recorded", {}).items()}
    return {label: x.groupby("run")["return"].mean().to_numpy() for label, x in rows.items()}


def share(worse, better, seeds=1):
    """Percent of all choices of so many runs of each in which `worse` has the higher mean."""
    means = [np.mean([*itertools.combinations(x, seeds)], axis=1) for x in (worse, better)]
    return 100 * improvement(means[:1], means[1:])


def lowest(groups):
    """The label of the group with the lowest numbers; None if the runs do not agree on it."""
    low = min(groups, key=lambda x: groups[x].mean())
    shares = [improvement([groups[x]], [groups[low]]) for x in groups if x != low]
    return low if min(shares) >= SURE else None


def judge(experiment, text, path):
    """(whether the answer in `text` is right, what to tell the learner); path: of their sweep."""
    prediction, answer = given(experiment, text)
    wanted = " or ".join(experiment.get("choices", ["a number"]))
    if prediction is None:
        return False, f"Write down your prediction first: {wanted}."
    past, told = recorded(experiment), [experiment["told"].strip()]
    said = [f"recorded, {key}: {x.mean():.0f} ({len(x)} seeds)" for key, x in past.items()]
    if "sweep" in experiment:
        runs = plan(experiment, path)
        states = [(run.directory.name, *launch.status(run)) for run in runs]
        left = [f"\n  {name} {why}".rstrip() for name, state, why in states if state != "finished"]
        if left:
            todo = f"{len(left)} of {len(runs)} runs are not finished; in the project's root:"
            return False, f"{todo} python benchmark/grid.py my_exercises/{path.name}{''.join(left)}"
        table, groups = by_setting(experiment, runs)
        said.insert(0, table)
        found = lowest(groups) if "choices" in experiment else groups[experiment["at"]].mean()
    else:
        found = share(*past.values())
        shares = ", ".join(f"{k}: {share(*past.values(), k):.1f} %" for k in (1, 3, 5))
        told.insert(0, f"How often, by the number of seeds of each: {shares}")
    if answer is None:
        return False, f"Write down your answer: {wanted}."
    if found is None:
        return False, "\n".join([*said, "The runs do not decide it: add seeds to the sweep."])

    def same(x):
        return x == found if isinstance(x, str) else abs(x - found) <= experiment["tolerance"]

    right, usual = same(answer), same(experiment["expected"])
    said.append(f"{word(answer)} is {'' if right else 'not '}{experiment['asked']}.")
    if right:
        said += [f"You predicted {word(prediction)}.", *(told if usual else [])]
    if not usual:
        said.append(
            f"Your runs contradict ours, where it is {experiment['expected']}: try more seeds."
        )
    return right, "\n".join(said)
