"""Means and differences of groups of runs, with their 95 % intervals.

A group is a list of arrays [seeds], one for each task. `bootstrap` adds a leading axis of samples
to them, so `iqm` and `improvement` take arrays [..., seeds]. Its intervals are too narrow for few
seeds: with normally distributed returns, they hold the truth in about 75 % of cases with three
seeds, in 90 % with five, and in 94 % with ten.
"""

import numpy as np
from scipy import stats


def interval(mean, std, n):
    """(mean, half width of its 95 % interval); std is NaN for a single value."""
    return mean, stats.t.ppf(0.975, n - 1) * std / np.sqrt(n)


def welch(*pairs):
    """(difference, half width of its 95 % interval), by Welch's t-test; the mean over `pairs`.

    pairs: ((mean, standard deviation, n), the same of the other group), one for each task. A
    standard deviation that is NaN, of a single seed, makes the half width NaN.
    """
    (mean, std, n), (mean2, std2, n2) = np.moveaxis(np.array(pairs, float), 0, -1)
    a, b = std**2 / n, std2**2 / n2
    if not (a + b).any():  # all seeds are equal
        return (mean - mean2).mean(), 0.0
    df = (a + b).sum() ** 2 / (a**2 / (n - 1).clip(1) + b**2 / (n2 - 1).clip(1)).sum()
    half = stats.t.ppf(0.975, df) * np.sqrt((a + b).sum()) / len(pairs)
    return (mean - mean2).mean(), half


def iqm(tasks):
    """Mean of the middle half of all runs."""
    return stats.trim_mean(np.concatenate(tasks, axis=-1), 0.25, axis=-1)


def improvement(tasks, others):
    """How likely a run is above one of the others on the same task; the mean over tasks."""
    signs = [np.sign(x[..., None] - y[..., None, :]) for x, y in zip(tasks, others, strict=True)]
    return np.mean([0.5 + sign.mean(axis=(-2, -1)) / 2 for sign in signs], axis=0)


def bootstrap(statistic, *groups):
    """(statistic, low, high) with its 95 % interval; seeds are drawn anew within each task.

    groups: the arguments of `statistic`.
    """
    rng = np.random.default_rng(0)
    drawn = [[x[rng.integers(len(x), size=(5000, len(x)))] for x in tasks] for tasks in groups]
    return statistic(*groups), *np.percentile(statistic(*drawn), [2.5, 97.5], axis=0)
