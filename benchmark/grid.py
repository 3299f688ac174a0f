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
    scripts = ["sac_*"]                # only for these of the sweep's scripts

    [slurm]                            # for --slurm, see benchmark/slurm.py
    partition = "cpu"
    time = "4:00:00"

Of several scripts, each gets those arguments that it has. Run again, a sweep skips what is finished
and resumes what was interrupted; failed runs are tried again with --retry-failed. A run whose
arguments were changed since is a new run, in a directory of its own; more epochs make a run longer,
if it still has its checkpoints. Ctrl-C stops all runs at the end of their epochs, a second one at
once. Functions are started anew where scripts resume.

From Python, `ExperimentGrid` and `call_experiment` are Spinning Up's.
"""

import ast
import fnmatch
import itertools
import json
import math
import os
import re
import shlex
import sys
import time
import tomllib
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # to find benchmark and common from any directory
from rich.console import Console
from rich.table import Table

from benchmark import flags, launch, slurm
from common import UsageError
from common.args import PosInt, check_args, flag, parse_args
from common.mpi_tools import cores
from common.serialization import printable, read_text

MAX_RUNS = 10_000
# What Spinning Up calls some options and flags.
OTHER_NAMES = {"cpu": "num_cpu", "dt": "datestamp", "exp_name": "name"}
SHORT_FLAGS = {"env": "env_id", "hid": "hidden_sizes", "act": "activation"}

# ------------------------------------------------------------------------------------------- grids


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
        self.keys, self.vals, self.shs, self.in_names = [], [], [], []

    def add(self, key, vals, shorthand=None, in_name=False):
        """Add a key.

        Args:
            key: an argument's name; colons reach into a table ("env_kwargs:speed").
            vals: its values, a list; anything else, a tuple too, is the only value.
            shorthand: what stands for it in names; by default its first three letters.
            in_name: name it even if it has one value. (seed is never in a name.)

        Raises:
            ValueError: no values, a key that is there already, or one that reaches into another.
        """
        if not isinstance(key, str) or not all(key.split(":")):
            raise ValueError(f"a key must be words joined by colons, got {key!r}")
        for other in self.keys:
            if f"{key}:".startswith(f"{other}:") or f"{other}:".startswith(f"{key}:"):
                raise ValueError(f"{key} and {other} set the same argument")
        vals = list(vals) if isinstance(vals, list) else [vals]
        if not vals:
            raise ValueError("an empty list")
        self.keys.append(key)
        self.vals.append(vals)
        self.shs.append(default_shorthand(key) if shorthand is None else shorthand)
        self.in_names.append(in_name)

    def rows(self):
        """(key, values, shorthand, in_name) of each key."""
        return list(zip(self.keys, self.vals, self.shs, self.in_names, strict=True))

    def __len__(self):
        return math.prod(map(len, self.vals))

    def variants(self):
        """All combinations, as nested dicts; the first key varies slowest."""
        variants = []
        for values in itertools.product(*self.vals):
            variant = {}
            for key, value in zip(self.keys, values, strict=True):
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
        for key, vals, sh, in_name in self.rows():
            if (len(vals) > 1 or in_name) and key != "seed":
                value = variant
                for part in key.split(":"):
                    value = value[part]
                if not all(isinstance(v, bool) for v in vals):
                    name += f"_{valid_str(sh)}{valid_str(value)}"
                elif value:
                    name += f"_{valid_str(sh)}"
        return name.lstrip("_")

    def print(self, scripts=(), counts=None):
        """Print keys, values and the number of variants.

        scripts, counts: of a sweep of several scripts, their names, and the numbers of its runs
        and of its experiments.
        """
        seeds = len(self.vals[self.keys.index("seed")]) if "seed" in self.keys else 1
        total, seedless = counts or (len(self), len(self) // seeds)
        table = Table(
            title=f"ExperimentGrid [{self.name}]", title_justify="left", title_style="bold"
        )
        for name in ("parameter", "shorthand", "values"):
            table.add_column(name, overflow="fold")
        for key, vals, sh, _ in [("script", scripts, "", 0)] * bool(scripts) + self.rows():
            values = [getattr(v, "__name__", str(v)) for v in vals]
            table.add_row(*map(printable, (key, sh, ", ".join(values))))
        console = Console(markup=False, highlight=False)
        with console.capture() as text:  # say() knows about closed pipes
            console.print(table)
        launch.say(f"{text.get()}{total} variants, counting seeds; {seedless} without seeds\n")

    def run(self, thunk, num_cpu=1, data_dir=None, datestamp=False, workers=1, retry_failed=False):
        """Run all variants.

        Args:
            thunk: a script's path, a function or its "module:name", the key of the grid whose
                values are such, or a list of scripts or functions.
            num_cpu: MPI ranks of each run; "auto" for as many as there are cores.
            data_dir: where the runs go; None for "data".
            datestamp: make new runs, with date and time in their directories' names.
            workers: runs at a time.
            retry_failed: run failed runs again.

        Returns:
            whether all runs are finished.

        Raises:
            UsageError: an argument is wrong; nothing was started.
        """
        data_dir = "data" if data_dir is None else str(data_dir)
        sweep = Sweep(self, thunk, num_cpu, workers, data_dir, datestamp)
        return run_sweep(sweep, retry_failed=retry_failed) == 0


def call_experiment(
    exp_name,
    thunk,
    seed=0,
    num_cpu=1,
    data_dir=None,
    datestamp=False,
    retry_failed=False,
    **kwargs,
):
    """Run one experiment: `<data_dir>/<exp_name>/<exp_name>_s<seed>/`.

    kwargs: arguments of the script or function; a list is one value here. For the others, and what
    is returned and raised, see `ExperimentGrid.run`.
    """
    grid = ExperimentGrid(exp_name)
    for key, value in {"seed": seed, **kwargs}.items():
        grid.add(key, [value])
    return grid.run(thunk, num_cpu, data_dir, datestamp, retry_failed=retry_failed)


# ------------------------------------------------------------------------------------------ sweeps


@dataclass
class Sweep:
    """A grid, the scripts or functions it is for, and how to run them."""

    grid: ExperimentGrid
    script: object  # see `thunk` in ExperimentGrid.run
    num_cpu: PosInt | Literal["auto"] = 1
    workers: PosInt = 1
    data_dir: str = "data"
    datestamp: bool = False
    slurm: dict = field(default_factory=dict)
    only: dict = field(default_factory=dict)  # key -> patterns of the scripts that take it
    source: str = ""  # the file it came from, for messages
    notes: list = field(default_factory=list)  # of `plan`, for the user


def plan(sweep):
    """All runs of a sweep, checked against the arguments of its scripts and functions.

    Raises:
        UsageError: naming the file and what is wrong in it.
    """
    try:
        return _plan(sweep)
    except UsageError as e:
        raise UsageError(f"{sweep.source}: {e}" if sweep.source else str(e)) from e


def _plan(sweep):
    grid = sweep.grid
    if not isinstance(grid.name, str) or not re.fullmatch(r"[^\W_][\w.()-]*", grid.name, re.ASCII):
        raise UsageError(f"name: a letter or digit, then letters, digits, -_.(), got {grid.name!r}")
    check_args(sweep)
    if "\0" in sweep.data_dir:
        raise UsageError("data_dir: a path must not hold a NUL character")
    if "GRID_IMPORTING" in os.environ:
        raise UsageError('a sweep must not start on import: put it under if __name__ == "__main__"')
    sweep.slurm = slurm.check(sweep.slurm)
    stamp = time.strftime("%Y-%m-%d_%H-%M-%S") if sweep.datestamp else ""

    by_key = isinstance(sweep.script, str) and sweep.script in grid.keys
    scripts = sweep.script if isinstance(sweep.script, list) else [sweep.script]
    scripts = grid.vals[grid.keys.index(sweep.script)] if by_key else scripts
    if not scripts:
        raise UsageError("script: an empty list")
    thunks = [flags.find(script) for script in scripts]
    _check_keys(sweep, thunks)
    runs = []
    for script, thunk in zip(scripts, thunks, strict=True):
        own = ExperimentGrid(grid.name)
        for key, vals, sh, in_name in grid.rows():
            if by_key and key == sweep.script:
                own.add(key, [script], sh, in_name or len(vals) > 1)
            elif _is_meant(sweep, key, thunk) and thunk.takes(key.split(":")[0]):
                own.add(key, vals, sh, in_name)
        if len(runs) + len(own) > MAX_RUNS:
            raise UsageError(f"params: more than {MAX_RUNS} runs")
        for variant in own.variants():
            name = own.variant_name(variant)
            if len(thunks) > 1 and not by_key:  # then the script is the first thing that varies
                name = f"{own.name}_{valid_str(thunk.name)}{name[len(own.name) :]}"
            if by_key:
                del variant[sweep.script]
            try:
                settings = thunk.parse(variant)
            except (UsageError, ValueError, RecursionError) as e:
                raise UsageError(f"params: {e}") from e
            seed = variant.pop("seed", settings.get("seed", 0))
            if not str(seed).isdecimal():  # it becomes a part of a path
                raise UsageError(f"params: seed: expected an int of at least 0, got {seed!r}")
            run = launch.Run(thunk, name, seed, variant, settings, 1, sweep.data_dir, stamp)
            if len(run.directory.name) > 200:
                raise UsageError(
                    f"params: {run.directory.name[:60]}... is too long for a file name"
                )
            run.num_cpu = _ranks(sweep, run)
            runs.append(run)

    seen = set()
    for run in runs:
        key = str(run.directory).lower()  # some file systems do not tell case apart
        if key in seen:
            raise UsageError(f"params: two runs would share the directory {run.directory}")
        seen.add(key)
    return runs


def _is_meant(sweep, key, thunk):
    """Whether a key of the sweep is meant for a script or function, by its `scripts`."""
    return any(fnmatch.fnmatchcase(thunk.name, p) for p in sweep.only.get(key, ["*"]))


def _check_keys(sweep, thunks):
    """Refuse keys that none of the scripts takes, and note which do not."""
    for key in sweep.grid.keys:
        name, meant = key.split(":")[0], [t for t in thunks if _is_meant(sweep, key, t)]
        if not meant:
            patterns = " ".join(sweep.only[key])
            raise UsageError(f"params.{key}: scripts: {patterns} is none of the sweep's scripts")
        lack = [thunk for thunk in meant if not thunk.takes(name)]
        if key == sweep.script or not lack:
            continue
        if lack == meant:
            lack[0].parse({name: None})  # says what is wrong with it
        names = ", ".join(thunk.name for thunk in lack)
        sweep.notes.append(f"{name} is left out where there is no such argument: {names}")


def _ranks(sweep, run):
    """Ranks of a run. "auto": this worker's share of the cores, as far as it divides the work."""
    if sweep.num_cpu != "auto":
        return sweep.num_cpu
    try:
        ranks = run.read_config().get("ranks")
    except (OSError, ValueError):
        ranks = None
    if type(ranks) is int and ranks > 0:
        return ranks  # a run that was begun on other cores goes on with as many ranks
    n = max(1, cores() // sweep.workers)
    while any(run.settings.get(name, 0) % n for name in ("steps_per_epoch", "batch_size")):
        n -= 1
    return n


def read_sweep(path):
    """A sweep from a TOML file. UsageError if its keys are not those of a sweep."""
    try:
        found = Path(path) if Path(path).exists() else ROOT / path
        data = tomllib.loads(read_text(found if found.exists() else path))
    except (OSError, ValueError, RecursionError) as e:
        raise UsageError(f"{path}: {e.strerror if isinstance(e, OSError) else e}") from e
    known = ("name", "script", "num_cpu", "workers", "data_dir", "datestamp", "params", "slurm")
    try:
        check_table(data, known, params=dict, slurm=dict)
        if "script" not in data:
            raise ValueError("script: missing")
        grid, only = ExperimentGrid(data.pop("name", Path(path).stem)), {}
        for key, value in data.pop("params", {}).items():
            _add_param(grid, only, key, value)
    except ValueError as e:
        raise UsageError(f"{path}: {e}") from e
    return Sweep(grid, source=str(path), only=only, **data)


def check_table(table, known, **types):
    """Raise ValueError if a table has an unknown key, or a value of another type than given."""
    for key, value in table.items():
        if key not in known:
            raise ValueError(f"unknown key {key}; there are {', '.join(known)}")
        if key in types and not isinstance(value, types[key]):
            raise ValueError(f"{key}: expected a {types[key].__name__}, got {value!r}")


def _add_param(grid, only, key, value):
    """Add a key of [params], a value or in the long form, to the grid; its scripts to `only`."""
    try:
        if not isinstance(value, dict) or "vals" not in value:
            grid.add(key, [value] if isinstance(value, dict) else value)
            return
        known = ("vals", "shorthand", "in_name", "scripts")
        check_table(value, known, shorthand=str, in_name=bool, scripts=list)
        if "scripts" in value:
            only[key] = [str(pattern) for pattern in value.pop("scripts")]
        grid.add(key, **value)
    except ValueError as e:
        raise ValueError(f"params.{key}: {e}") from e


def run_sweep(sweep, retry_failed=False, dry_run=False, use_slurm=False):
    """Run a sweep, or submit it to Slurm. Returns the exit code: 0 if all runs are finished."""
    runs = plan(sweep)
    name = sweep.grid.name
    if use_slurm and sweep.datestamp:
        raise UsageError("datestamp: a job that Slurm starts again could not find its run")
    if not dry_run:
        try:
            Path(sweep.data_dir).mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise UsageError(f"cannot write to {sweep.data_dir}: {e.strerror}") from e
        if not os.access(sweep.data_dir, os.W_OK):
            raise UsageError(f"cannot write to {sweep.data_dir}")
        scripts = sorted({run.thunk.name for run in runs})
        counts = len(runs), len({run.exp_name for run in runs})
        sweep.grid.print(scripts if len(scripts) > 1 else (), counts)
    for note in sweep.notes:
        launch.say(f"# {note}")
    for run in runs:
        if not use_slurm:
            launch.command(run)  # raises where there is no mpirun
        old = run.directory
        changed = launch.place(run)
        if changed and not dry_run:
            launch.say(f"{old} holds another run ({changed}); this one goes to {run.directory}")
    if use_slurm:
        launch.say(slurm.submit(runs, name, sweep.slurm, sweep.data_dir, retry_failed, dry_run))
        return 0
    if dry_run:
        for run in runs:
            word, detail = launch.status(run)
            skipped = word in ("finished", "in use") or (word == "failed" and not retry_failed)
            launch.say(f"# {run.directory}: {word}{' (' + detail + ')' if detail else ''}")
            launch.say(f"{'# ' if skipped else ''}{shlex.join(launch.command(run))}")
        return 0

    began = time.monotonic()
    signum = launch.run_all(runs, sweep.workers, retry_failed, name)
    launch.say(f"\n{launch.summary(runs, name, time.monotonic() - began, signum)}")
    if not all(run.outcome.startswith("finished") for run in runs):
        return 128 + signum if signum else 1
    here = os.path.relpath(Path(__file__).parent)
    launch.say(f"\nPlot it:  {shlex.join(['python', f'{here}/plot.py', *logdirs(runs, name)])}")
    if isinstance(runs[0].thunk, flags.Script):
        words = ["python", f"{here}/test_policy.py", str(runs[0].directory)]
        launch.say(f"Watch it: {shlex.join(words)}")
    return 0


def logdirs(runs, name):
    """What to give to plot.py: a beginning of names if it stands for these runs and no others."""
    own = {run.directory.parent for run in runs}
    start = next(iter(own)).parent / f"{name}_"
    if set(start.parent.glob(f"{start.name}*")) == own:
        return [str(start)]
    return sorted(map(str, own))


# ------------------------------------------------------------------------------------ command line


def read_words(argv):
    """A command line as ([sweep or scripts], {flag: (words, shorthand or None)})."""
    heads, found = [], {}
    words = heads
    for word in argv:
        match = re.fullmatch(r"--?([A-Za-z][\w:-]*)(?:\[([\w()-]*)\])?(?:=(.*))?", word, re.S)
        if not match:
            words.append(word)
            continue
        key = match[1].replace("-", "_")
        key = OTHER_NAMES.get(key, key)
        if key in found:
            raise UsageError(f"{word} is given twice; a grid is --flag VALUE VALUE ...")
        words = [] if match[3] is None else [match[3]]
        found[key] = words, match[2]
    return heads, found


@dataclass
class Options:
    # Options, beside the flags of the script
    workers: int | None = None  # runs at a time, which share the cores out; 1 if not given
    num_cpu: int | Literal["auto"] | None = None  # ranks of each run (--cpu); 1 if not given
    data_dir: str | None = None  # where the runs go; data if not given
    name: str | None = None  # what the experiments' names begin with (--exp-name)
    datestamp: bool | None = None  # new runs, with date and time in their directories (--dt)
    retry_failed: bool = False  # run failed runs again, from their checkpoints
    dry_run: bool = False  # print the commands and run nothing
    slurm: bool = False  # submit the runs as a Slurm job array


def take_options(found):
    """Take grid.py's own options out of {flag: (words, shorthand)}."""
    words = []
    for option in fields(Options):
        if option.name in found:
            given = found.pop(option.name)[0]
            words += [flag(option.name), *(given or ["True"] * (option.name == "datestamp"))]
    return parse_args(Options, words)


def sweep_from_words(scripts, found, named):
    """A sweep from a command line: scripts and {flag: (words, shorthand)}."""
    thunks = [flags.find(script) for script in scripts]
    grid = ExperimentGrid(valid_str(thunks[0].name) if len(thunks) == 1 else "grid")
    for key, (words, shorthand) in found.items():
        name = key.split(":")[0]
        if key in SHORT_FLAGS and not any(t.takes(key) for t in thunks):
            key = name = SHORT_FLAGS[key]
        values = [read_value(word) for word in words] or [True]
        if not words and name.startswith("no_") and any(t.takes(name[3:]) for t in thunks):
            key, values = key[3:], [False]
        if name == "activation":  # torch.nn.Tanh, as in Spinning Up
            values = [str(value).rpartition(".")[2].lower() for value in values]
        if any(t.takes_list(name) for t in thunks) and not any(
            isinstance(value, list | tuple) for value in values
        ):
            values = [values]  # --hidden-sizes 64 64
        try:
            # The name that the script gives holds the environment: another grid has another.
            grid.add(key, values, shorthand, in_name=key == "env_id" and not named)
        except ValueError as e:
            raise UsageError(f"{flag(key)}: {e}") from e
    return Sweep(grid, [str(script) for script in scripts])


def read_value(word):
    """A word of a command line as JSON or a Python literal, or as it is."""
    for read in (json.loads, ast.literal_eval):
        try:
            return read(word)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
    return word


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    if {"-h", "--help"} & set(argv):
        parse_args(Options, ["--help"])
    try:
        heads, found = read_words(argv)
        options = take_options(found)
        if not heads:
            raise UsageError("expected a sweep file, a script or a function; see --help")
        if str(heads[0]).endswith(".toml"):
            if len(heads) > 1:
                raise UsageError(f"one sweep at a time, got {' '.join(heads)}")
            if found:
                raise UsageError(
                    f"{flag(next(iter(found)))} belongs into {heads[0]}: it is no option"
                )
            sweep = read_sweep(heads[0])
        else:
            sweep = sweep_from_words(heads, found, options.name)
        sweep.grid.name = sweep.grid.name if options.name is None else options.name
        for name in ("workers", "num_cpu", "data_dir", "datestamp"):
            if getattr(options, name) is not None:
                setattr(sweep, name, getattr(options, name))
        sys.exit(run_sweep(sweep, options.retry_failed, options.dry_run, options.slurm))
    except UsageError as e:
        print(f"grid.py: error: {printable(e, 1000)}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:  # before any run was started
        sys.exit(130)


if __name__ == "__main__":
    main()
