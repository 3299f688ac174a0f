"""Runs every combination of a grid of arguments: a sweep.

    python benchmark/grid.py sweeps/sac.toml
    python benchmark/grid.py sweeps/sac.toml --workers 4 --dry-run
    python benchmark/grid.py algos/ppo_torch.py --env-id Hopper-v4 HalfCheetah-v4 --seed 0 1 2
    python benchmark/grid.py algos/ppo_torch.py --env Hopper-v4 --hid[h] [32,32] [64,32] --cpu 4
    python benchmark/grid.py my_module:my_train --lr 1e-3 3e-4 --seed 0 1 2
    python benchmark/grid.py sweeps/benchmark_on_policy.toml --slurm

A sweep file:

    name = "sac-mujoco"                # the experiments' names begin with it; default: the file's
    script = "algos/sac_torch.py"      # or "my_module:my_train", or a list of these
    num_cpu = 1                        # MPI ranks of each run, or "auto"
    workers = 2                        # runs at a time; they share the cores out
    data_dir = "data"
    datestamp = false                  # true: new runs, with date and time in their directories

    [params]                           # scalars are fixed, lists are the grid
    env_id = ["HalfCheetah-v4", "Hopper-v4"]
    seed = [0, 1, 2]
    hidden_sizes = [[64, 64], [256, 256]]  # values that are lists themselves: a list of lists
    "env_kwargs:ctrl_cost_weight" = [0.1, 0.2]  # colons reach into a table

    [params.alpha]                     # long form: ExperimentGrid.add's arguments
    vals = [0.1, 0.2]
    shorthand = "a"
    in_name = true

    [slurm]                            # for --slurm: options of sbatch
    partition = "cpu"
    time = "4:00:00"

With several scripts, each gets the arguments that it has. Run again, a sweep skips what is finished
and resumes what was interrupted; failed runs are tried again with --retry-failed. A directory that
holds a run with other arguments is left as it is: give the sweep another name. More epochs make a
run longer, if it still has its checkpoints. Ctrl-C stops all runs at the end of their epochs, a
second one at once. Scripts are resumed, functions start anew.

From Python, `ExperimentGrid` and `call_experiment` are Spinning Up's.
"""

import ast
import dataclasses
import difflib
import functools
import itertools
import json
import operator
import os
import re
import shlex
import sys
import time
import tomllib
from collections import Counter
from dataclasses import field
from pathlib import Path
from typing import Literal, get_type_hints

from pydantic.dataclasses import dataclass
from tyro.conf import Positional

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # to find benchmark and common from any directory
from benchmark import flags, launch, slurm
from benchmark.reading import flag, printable
from common import UsageError
from common.args import PosInt, parse_args
from common.mpi import cores, find_mpirun

# What Spinning Up calls some options and flags.
OTHER_NAMES = {"cpu": "num_cpu", "dt": "datestamp", "exp_name": "name", "h": "help"}
SHORT_FLAGS = {"env": "env_id", "hid": "hidden_sizes", "act": "activation"}


@dataclass
class Options:
    """How to run a sweep: the top of its file, or the command line."""

    what: Positional[tuple[str, ...]] = ()  # a sweep file, or scripts and functions
    name: str | None = None  # what the experiments' names begin with (--exp-name)
    num_cpu: PosInt | Literal["auto"] = 1  # MPI ranks of each run (--cpu)
    workers: PosInt = 1  # runs at a time, which share the cores out
    data_dir: str = "data"  # where the runs go
    datestamp: bool = False  # new runs, with date and time in their directories (--dt)
    retry_failed: bool = False  # run failed runs again, from their checkpoints
    dry_run: bool = False  # print the commands and run nothing
    slurm: bool = False  # submit the runs as a Slurm job array

    def __post_init__(self):
        self.data_dir = os.path.expanduser(self.data_dir)  # a shell expands only the command line's


HINTS = get_type_hints(Options)

# Grids --------------------------------------------------------------------------------------------


def valid_str(v):
    """A value as part of a file name: lower case; all but letters, digits, - and _ become -."""
    if hasattr(v, "__name__"):
        return valid_str(v.__name__)
    if isinstance(v, list | tuple):
        return "-".join(valid_str(x) for x in v)
    return re.sub(r"[^-\w]", "-", str(v).lower(), flags=re.ASCII)


def default_shorthand(key):
    """The first three letters of each colon-separated part: env_kwargs:speed -> env-spe."""
    return "-".join(re.sub(r"[^A-Za-z0-9]", "", part[:3]) for part in key.split(":"))


class ExperimentGrid:
    """All combinations of values for some keys; Spinning Up's class of this name.

    grid = ExperimentGrid("ppo-nets")
    grid.add("env_id", "Hopper-v4", in_name=True)
    grid.add("hidden_sizes", [[32], [64, 64]], shorthand="hid")
    grid.add("seed", [0, 1, 2])
    grid.run("algos/ppo_torch.py", num_cpu=2)
    """

    def __init__(self, name=""):
        self.name = name
        self.rows = []  # (key, values, shorthand, in_name)

    def add(self, key, vals, shorthand=None, in_name=False):
        """Add a key.

        Args:
            key: an argument's name; colons reach into a table ("env_kwargs:speed").
            vals: its values, a list; anything else, a tuple too, is the only value.
            shorthand: its abbreviation in names; by default the first three letters.
            in_name: name it even if it has one value. (seed is never in a name.)

        Raises:
            ValueError: no values, a key that is there already, or one that reaches into another.
        """
        if not all(key.split(":")):
            raise ValueError(f"{key}: a key must be words joined by colons")
        for other, *_ in self.rows:
            if f"{key}:".startswith(f"{other}:") or f"{other}:".startswith(f"{key}:"):
                raise ValueError(f"{key} and {other} set the same argument")
        vals = list(vals) if isinstance(vals, list) else [vals]
        if not vals:
            raise ValueError(f"{key}: an empty list")
        shorthand = default_shorthand(key) if shorthand is None else shorthand
        self.rows.append((key, vals, shorthand, in_name))

    def variants(self):
        """All combinations, as nested dicts; the first key varies slowest."""
        variants = []
        for values in itertools.product(*(vals for _, vals, *_ in self.rows)):
            variant = {}
            for (key, *_), value in zip(self.rows, values, strict=True):
                *outer, last = key.split(":")
                inner = variant
                for part in outer:
                    inner = inner.setdefault(part, {})
                inner[last] = value
            variants.append(variant)
        return variants

    def variant_name(self, variant):
        """The grid's name, then shorthand and value of what varies or is `in_name`, never the seed.

        Keys with only booleans are named where they are true.
        """
        name = self.name
        for key, vals, sh, in_name in self.rows:
            if (len(vals) > 1 or in_name) and key != "seed":
                value = functools.reduce(operator.getitem, key.split(":"), variant)
                if not all(isinstance(v, bool) for v in vals):
                    name += f"_{valid_str(sh)}{valid_str(value)}"
                elif value:
                    name += f"_{valid_str(sh)}"
        return name.lstrip("_")

    def print(self):
        """Print keys, values and the number of variants."""
        total = len(self.variants())
        seeds = sum(len(vals) for key, vals, *_ in self.rows if key == "seed") or 1
        lines = [f"ExperimentGrid [{self.name}]"]
        for key, vals, sh, _ in self.rows:
            values = ", ".join(getattr(v, "__name__", str(v)) for v in vals)
            lines.append("  " + printable(f"{key} [{sh}]: {values}", 1000))
        lines.append(f"{total} variants, counting seeds; {total // seeds} without seeds\n")
        launch.say("\n".join(lines))

    def run(self, thunk, num_cpu=1, data_dir=None, datestamp=False, workers=1, retry_failed=False):
        """Run all variants.

        Args:
            thunk: a script's path, a function or its "module:name", or a list of these, or the key
                of the grid whose values they are. Functions and their arguments are pickled by
                cloudpickle: lambdas, closures and functions of a notebook work too.
            num_cpu: MPI ranks of each run; "auto" for all cores, shared out among the workers.
            data_dir: where the runs go; None for "data".
            datestamp: make new runs, with date and time in their directories' names.
            workers: runs at a time.
            retry_failed: run failed runs again.

        Returns:
            whether all runs are finished.

        Raises:
            UsageError: an argument is wrong; nothing was started.
        """
        options = {"num_cpu": num_cpu, "datestamp": datestamp, "workers": workers}
        options |= {"data_dir": str(data_dir or "data"), "retry_failed": retry_failed}
        return run_sweep(Sweep(self, thunk, flags.checked(Options, options))) == 0


def call_experiment(exp_name, thunk, seed=0, num_cpu=1, data_dir=None, datestamp=False, **kwargs):
    """Run one experiment: `<data_dir>/<exp_name>/<exp_name>_s<seed>/`.

    kwargs: arguments of the script or function; a list is one value here. For the others, and what
    is returned and raised, see `ExperimentGrid.run`.
    """
    grid = ExperimentGrid(exp_name)
    for key, value in {"seed": seed, **kwargs}.items():
        grid.add(key, [value])
    return grid.run(thunk, num_cpu, data_dir, datestamp)


# Sweeps -------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Sweep:
    """A grid, the scripts or functions it is for, and how to run them."""

    grid: ExperimentGrid
    script: object  # see `thunk` in ExperimentGrid.run
    options: Options = field(default_factory=Options)
    slurm: dict = field(default_factory=dict)  # options of sbatch


def plan(sweep):
    """All runs of a sweep, checked against the arguments of its scripts and functions.

    Raises:
        UsageError: saying what is wrong.
    """
    grid = sweep.grid
    if not re.fullmatch(r"[^\W_][\w.()-]*", grid.name, re.ASCII):
        raise UsageError(f"name: a letter or digit, then letters, digits, -_.(), got {grid.name!r}")
    scripts = sweep.script if isinstance(sweep.script, list) else [sweep.script]
    by_key = [row for row in grid.rows if row[0] == sweep.script]
    _, scripts, sh, _ = by_key[0] if by_key else (None, scripts, "", None)
    thunks = [flags.find(script) for script in scripts]
    rows = [row for row in grid.rows if row not in by_key]
    for key, *_ in rows:
        if not any(t.takes(key) for t in thunks):
            names = ", ".join(t.name for t in thunks)
            hint = perhaps(SHORT_FLAGS.get(key, key), [name for t in thunks for name in t.hints])
            raise UsageError(f"params.{key}: no such argument in {names}{hint}")
    stamp = time.strftime("%Y-%m-%d_%H-%M-%S") if sweep.options.datestamp else ""
    runs = []
    for thunk in thunks:
        # With several scripts, the script is the first thing that varies.
        own = ExperimentGrid(grid.name + f"_{sh}{valid_str(thunk.name)}" * (len(thunks) > 1))
        own.rows = [row for row in rows if thunk.takes(row[0])]
        for variant in own.variants():
            try:
                name = own.variant_name(variant)
                runs.append(make_run(sweep.options, thunk, name, variant, stamp))
            except (ValueError, RecursionError) as e:
                raise UsageError(f"params: {thunk.name}: {e}") from e
    for directory, n in Counter(run.directory for run in runs).items():
        if n > 1:
            text = f"params: {n} runs would share the directory {directory}: is a script's name,"
            raise UsageError(f"{text} a value or a shorthand there twice? --norm-obs[obs] sets one")
    return runs


def make_run(options, thunk, exp_name, params, stamp):
    """One run: where it goes, and the command that starts it. UsageError if something is wrong."""
    settings = thunk.parse(params)
    seed = settings.get("seed", 0)
    if not isinstance(seed, int) or seed < 0:  # it becomes a part of a path
        raise UsageError(f"seed: expected an int of at least 0, got {seed!r}")
    if len(exp_name) > 200:  # the most that file systems take, less what is added to it
        raise UsageError(f"{exp_name[:60]}... is too long for a name")
    directory = Path(options.data_dir, exp_name, f"{exp_name}_s{seed}")
    if stamp:
        directory = Path(options.data_dir, f"{stamp[:10]}_{exp_name}", f"{stamp}-{directory.name}")
    own = {"exp_name": exp_name, "seed": seed, "data_dir": options.data_dir}
    params = {name: value for name, value in params.items() if name != "seed"}
    words, call = thunk.command(own, params, directory, stamp)

    ranks = max(1, cores() // options.workers) if options.num_cpu == "auto" else options.num_cpu
    mpirun = find_mpirun()
    if mpirun is None and ranks > 1:
        raise UsageError(f"num_cpu = {ranks} needs mpirun, and there is none on PATH")
    command = [*([mpirun, "-np", str(ranks)] if mpirun else []), sys.executable, *words]
    # Like the script's logger: with --anneal-lr, numbers depend on the epochs, too.
    free = thunk.free - ({"epochs"} if settings.get("anneal_lr") else set())
    fixed = {name: value for name, value in settings.items() if name not in free}
    fixed |= {"script": thunk.label, "ranks": ranks}
    usual, epochs = ({}, None) if call else (thunk.parse({}), settings.get("epochs"))
    return launch.Run(directory, command, fixed, epochs, call, stamp, usual=usual)


def run_sweep(sweep):
    """Run a sweep, or submit it to Slurm. Returns the exit code: 0 if all runs are finished."""
    runs, name, options = plan(sweep), sweep.grid.name, sweep.options
    if options.slurm and options.datestamp:
        raise UsageError("datestamp: a job that Slurm starts again could not find its run")
    if not options.dry_run:
        sweep.grid.print()
    if options.slurm:
        launch.say(slurm.submit(runs, name, sweep.slurm, options))
        return 0
    if options.dry_run:
        left = {run: launch.settle(run, options.retry_failed) for run in runs}
        launch.say(f"# {name}: {launch.counts(runs)}")
        for run in runs:
            detail = f"{run.directory}: {run.outcome}{': ' * bool(run.detail)}{run.detail}"
            launch.say(shlex.join(run.command) if left[run] else f"# {detail}")
        return 0
    began = time.monotonic()
    signum = launch.run_all(runs, options.workers, options.retry_failed, name)
    launch.say(f"\n{launch.summary(runs, name, time.monotonic() - began)}")
    if not all(run.outcome.startswith("finished") for run in runs):
        return 128 + signum if signum else 1
    return 0


# Sweep files and command lines --------------------------------------------------------------------


def read_sweep(path, words=()):
    """A sweep from a TOML file; `words` are options that come before the file's.

    Raises:
        UsageError: it cannot be read, or has other keys.
    """
    try:
        data = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        tables = {key: data.pop(key, {}) for key in ("params", "slurm")}
        script = data.pop("script", None)
        if not script or not all(isinstance(table, dict) for table in tables.values()):
            raise ValueError("it needs a script; params and slurm are tables")
        if unknown := data.keys() - (HINTS.keys() - {"what"}):
            hint = perhaps(min(unknown), ["script", "params", *HINTS])
            hint = hint or " (what the script takes belongs in [params])"
            raise ValueError(f"unknown key {min(unknown)}{hint}")
        given = flags.checked(Options, data)  # names the file if it is wrong; 2.0 becomes 2
        data = {k: getattr(given, k) if isinstance(x, float) else x for k, x in data.items()}
        options = parse_args(Options, [*flags.to_words(HINTS, data), *words])  # words win
        grid = ExperimentGrid(options.name or Path(path).stem)
        for key, value in tables["params"].items():
            long_form = isinstance(value, dict) and "vals" in value
            grid.add(key, **(value if long_form else {"vals": value}))
        return Sweep(grid, script, options, tables["slurm"])
    except (OSError, ValueError, TypeError, RecursionError) as e:
        raise UsageError(getattr(e, "strerror", None) or str(e)) from e


def perhaps(word, names):
    """What `word` may have been meant for, as the end of a message."""
    near = difflib.get_close_matches(word, names, 1, 0.7)
    return f" (perhaps {near[0]}?)" if near else ""


def split_words(argv):
    """A command line as (grid.py's own words, [(flag of a script, values, shorthand or None)])."""
    own, found = [], []
    words = own
    for word in argv:
        match = re.fullmatch(r"--?([A-Za-z][\w:-]*)(?:\[([\w()-]*)\])?(?:=(.*))?", word, re.S)
        if not match:
            words.append(word)
            continue
        key = match[1].replace("-", "_")
        key = OTHER_NAMES.get(key, key)
        if key.removeprefix("no_") in HINTS or key == "help":
            words = own
            words += [flag(key)] if match[3] is None else [flag(key), match[3]]
            continue
        words = [] if match[3] is None else [match[3]]
        found.append((key, words, match[2]))
    return own, found


def sweep_from_words(options, found):
    """A sweep from a command line, see `split_words`."""
    thunks = [flags.find(script) for script in options.what]
    name = valid_str(thunks[0].name) if len(thunks) == 1 else "grid"
    grid = ExperimentGrid(options.name or name)
    for key, words, shorthand in found:
        if key in SHORT_FLAGS and not any(t.takes(key) for t in thunks):
            key = SHORT_FLAGS[key]
        values = [read_value(word) for word in words] or [True]
        if not words and key.startswith("no_") and any(t.takes(key[3:]) for t in thunks):
            key, values = key[3:], [False]
        if key == "activation":  # torch.nn.Tanh, as in Spinning Up
            values = [str(value).rpartition(".")[2].lower() for value in values]
        nested = any(isinstance(value, list | tuple) for value in values)
        if not nested and any(flags.takes_list(t.hints, key) for t in thunks):
            values = [values]  # --hidden-sizes 64 64
        # The name that the script gives holds the environment: another grid has another.
        grid.add(key, values, shorthand, in_name=key == "env_id" and not options.name)
    return Sweep(grid, list(options.what), options)


def read_value(word):
    """A word of a command line as JSON or a Python literal, or as it is."""
    for read in (json.loads, ast.literal_eval):
        try:
            return read(word)
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            continue
    return word


def main(argv=None):
    source = ""
    try:
        words, found = split_words(sys.argv[1:] if argv is None else argv)
        options = parse_args(Options, words)
        if not options.what:
            raise UsageError("expected a sweep file, a script or a function; see --help")
        if options.what[0].endswith(".toml"):
            source = f"{options.what[0]}: "
            if options.what[1:] or found:
                raise UsageError("beside a sweep's file there may be options, see --help")
            sweep = read_sweep(options.what[0], words)
        else:
            sweep = sweep_from_words(options, found)
        sys.exit(run_sweep(sweep))
    except (OSError, ValueError) as e:
        print(f"grid.py: error: {printable(f'{source}{e}', 1000)}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
