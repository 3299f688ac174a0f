"""Runs every combination of a grid of arguments: a sweep.

    python benchmark/grid.py sweeps/sac.toml
    python benchmark/grid.py sweeps/sac.toml --workers 4 --dry-run
    python benchmark/grid.py algos/ppo_torch.py --env-id Hopper-v4 HalfCheetah-v4 --seed 0 1 2
    python benchmark/grid.py sweeps/benchmark_on_policy.toml --slurm

A sweep file:

    name = "sac-mujoco"                # the experiments' names begin with it; default: the file's
    script = "algos/sac_torch.py"      # or a list of scripts
    num_cpu = 1                        # MPI ranks of each run, or "auto"
    workers = 2                        # runs at a time; they share the cores out
    data_dir = "data"

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

Run again, it skips what is finished and resumes what was interrupted; failed runs are tried again
with --retry-failed. A run whose arguments were changed since is a new run, in a directory of its
own; more epochs make a run longer, if it still has its checkpoints. Ctrl-C stops all runs at the
end of their epochs, a second one at once.

From Python, `ExperimentGrid` and `call_experiment` are Spinning Up's.
"""

import argparse
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
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # so that any directory will do
from benchmark import launch, slurm
from benchmark.flags import find_field, read_fields
from common import UsageError
from common.serialization import printable, read_text

MAX_RUNS = 100_000
# Arguments of every script that the sweep itself sets.
RESERVED = {
    "exp_name": "the sweep's name makes it",
    "data_dir": "it goes to the top of the file",
    "num_cpu": "it goes to the top of the file",
    "datestamp": "a sweep finds its runs again by their names",
    "resume": "a sweep resumes by itself",
    "overwrite": "a sweep never deletes a run",
}

# ------------------------------------------------------------------------------------------- grids


def valid_str(v):
    """A value as part of a file name: lower case; all but letters, digits, -, _ and () become -."""
    if hasattr(v, "__name__"):
        return valid_str(v.__name__)
    if isinstance(v, list | tuple):
        return "-".join(valid_str(x) for x in v)
    return "".join(c if re.match(r"[-\w()]", c, re.ASCII) else "-" for c in str(v).lower())


def default_shorthand(key):
    """The first three letters of each colon-separated part: env_kwargs:speed -> env-spe."""
    parts = [re.sub(r"[^A-Za-z0-9]", "", part[:3]) for part in key.split(":")]
    return "-".join(parts)


def get_value(variant, key):
    """The value of a colon-separated key in a nested variant."""
    for part in key.split(":"):
        variant = variant[part]
    return variant


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
            vals: its values, a list; anything else is the only value.
            shorthand: what stands for it in names; by default its first three letters.
            in_name: name it even if it has one value. (seed is never in a name.)

        Raises:
            ValueError: no values, a key that is there already, or one that reaches into another.
        """
        if not isinstance(key, str) or not all(key.split(":")):
            raise ValueError(f"a key must be words joined by colons, got {key!r}")
        for other in self.keys:
            if other == key:
                raise ValueError(f"{key} is in the grid already")
            if f"{key}:".startswith(f"{other}:") or f"{other}:".startswith(f"{key}:"):
                raise ValueError(f"{key} and {other} set the same argument")
        vals = list(vals) if isinstance(vals, list | tuple) else [vals]
        if not vals:
            raise ValueError("an empty list")
        self.keys.append(key)
        self.vals.append(vals)
        self.shs.append(valid_str(default_shorthand(key) if shorthand is None else shorthand))
        self.in_names.append(in_name)

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
        for key, vals, sh, in_name in zip(
            self.keys, self.vals, self.shs, self.in_names, strict=True
        ):
            if (len(vals) > 1 or in_name) and key != "seed":
                value = get_value(variant, key)
                if all(isinstance(v, bool) for v in vals):
                    name += f"_{sh}" if value else ""
                else:
                    name += f"_{sh}{valid_str(value)}"
        return name.lstrip("_")

    def print(self, scripts=(), counts=None):
        """Print keys, values and the number of variants.

        scripts, counts: of a sweep of several scripts, their names, and the numbers of its runs
        and of its experiments.
        """
        seeds = len(self.vals[self.keys.index("seed")]) if "seed" in self.keys else 1
        total, seedless = counts or (len(self), len(self) // seeds)
        text = ["=" * 80, f"ExperimentGrid [{self.name}] runs over parameters:", ""]
        rows = list(zip(self.keys, self.vals, self.shs, strict=True))
        for key, vals, sh in [("script", scripts, "")] * bool(scripts) + rows:
            values = [str(v) for v in vals]
            lines = ["  ".join(values)] if len("  ".join(values)) <= 50 else values
            for i, line in enumerate(lines):
                head = f" {key:<20} {f'[{sh}]' if sh else ''}" if i == 0 else ""
                text.append(f"{head:<30}{line}")
        text += ["", f" Variants, counting seeds:       {total:>8}"]
        text += [f" Variants, not counting seeds:   {seedless:>8}", "=" * 80]
        launch.say("\n".join(text))

    def run(self, script, num_cpu=1, data_dir="data", workers=1, retry_failed=False):
        """Run all variants of a script, or of each of a list of scripts.

        Returns True if all are finished. Raises UsageError before anything starts if an argument
        is wrong.
        """
        sweep = Sweep(self, script, num_cpu, workers, data_dir)
        return run_sweep(sweep, retry_failed=retry_failed) == 0


def call_experiment(
    exp_name, script, seed=0, num_cpu=1, data_dir="data", retry_failed=False, **kwargs
):
    """Run one experiment: `<data_dir>/<exp_name>/<exp_name>_s<seed>/`.

    num_cpu: MPI ranks; "auto" for as many as there are cores. kwargs: the script's arguments; a
    list is a value here, not a grid. Returns True if the run is finished at the end.
    """
    grid = ExperimentGrid(exp_name)
    grid.add("seed", seed)
    for key, value in kwargs.items():
        grid.add(key, [value])
    return grid.run(script, num_cpu, data_dir, retry_failed=retry_failed)


# ------------------------------------------------------------------------------------------ sweeps


@dataclass
class Sweep:
    """A grid, the scripts it is for, and how to run them."""

    grid: ExperimentGrid
    script: str | list
    num_cpu: int | str = 1
    workers: int = 1
    data_dir: str = "data"
    slurm: dict = field(default_factory=dict)
    only: dict = field(default_factory=dict)  # key -> patterns of the scripts that take it
    source: str = ""  # the file it came from, for messages


def plan(sweep):
    """All runs of a sweep, checked against the flags of its scripts.

    Raises:
        UsageError: naming the file and the key that is wrong.
    """
    try:
        return _plan(sweep)
    except UsageError as e:
        raise UsageError(f"{sweep.source}: {e}" if sweep.source else str(e)) from e


def _plan(sweep):
    grid = sweep.grid
    if not isinstance(grid.name, str) or not re.fullmatch(r"[\w.()-]*", grid.name, re.ASCII):
        raise UsageError(f"name: letters, digits, and - _ . ( ) only, got {grid.name!r}")
    if not grid.name or grid.name[0] in ".-":
        raise UsageError(f"name: must begin with a letter or digit, got {grid.name!r}")
    if sweep.num_cpu != "auto" and not _is_count(sweep.num_cpu):
        raise UsageError(f'num_cpu: expected a positive int or "auto", got {sweep.num_cpu!r}')
    if not _is_count(sweep.workers):
        raise UsageError(f"workers: expected a positive int, got {sweep.workers!r}")
    if not isinstance(sweep.data_dir, str | Path) or "\0" in str(sweep.data_dir):
        raise UsageError(f"data_dir: expected a string, got {sweep.data_dir!r}")
    scripts = sweep.script if isinstance(sweep.script, list) else [sweep.script]
    if not scripts:
        raise UsageError("script: an empty list")
    sweep.slurm = slurm.check(sweep.slurm)

    paths = [_find_script(script) for script in scripts]
    for key, patterns in sweep.only.items():
        for pattern in patterns:
            if not any(fnmatch.fnmatchcase(path.stem, pattern) for path in paths):
                raise UsageError(f"params.{key}: scripts: {pattern} is none of the sweep's scripts")

    runs = []
    for path in paths:
        fields = read_fields(path)
        for name in ("exp_name", "seed", "data_dir", "resume"):
            if name not in fields:
                raise UsageError(f"script: {path} has no flag --{name.replace('_', '-')}")
        own = _grid_of_script(sweep, path)
        if len(runs) + len(own) > MAX_RUNS:
            raise UsageError(f"params: more than {MAX_RUNS} runs")
        _check_params(own, path, fields)
        for variant in own.variants():
            # With several scripts, the script is the first thing that varies.
            exp_name = own.variant_name(variant)
            if len(scripts) > 1:
                exp_name = f"{own.name}_{valid_str(path.stem)}{exp_name[len(own.name) :]}"
            params = {name: fields[name].check(value) for name, value in variant.items()}
            seed = params.pop("seed", fields["seed"].default or 0)
            run = launch.Run(str(path), exp_name, seed, params, fields, 1, str(sweep.data_dir))
            if len(run.directory.name) > 200:
                name = run.directory.name[:60]
                raise UsageError(f"params: {name}... is too long for a file name")
            run.num_cpu = _ranks(sweep, run)
            runs.append(run)

    seen = {}
    for run in runs:
        key = str(run.directory).lower()  # some file systems do not tell case apart
        if key in seen:
            raise UsageError(f"params: two runs would share the directory {run.directory}")
        seen[key] = run
    return runs


def _grid_of_script(sweep, path):
    """The sweep's grid without the keys that are for other scripts."""
    grid = ExperimentGrid(sweep.grid.name)
    for key, vals, sh, in_name in zip(
        sweep.grid.keys, sweep.grid.vals, sweep.grid.shs, sweep.grid.in_names, strict=True
    ):
        if any(fnmatch.fnmatchcase(path.stem, p) for p in sweep.only.get(key, ["*"])):
            grid.add(key, vals, sh, in_name)
    return grid


def _is_count(n):
    return isinstance(n, int) and not isinstance(n, bool) and n >= 1


def _find_script(script):
    if not isinstance(script, str | Path) or not str(script) or "\0" in str(script):
        raise UsageError(f"script: expected a path, got {script!r}")
    for base in (Path.cwd(), ROOT):
        if os.path.isfile(base / script):  # False, too, for what cannot be a path
            return base / script
    raise UsageError(f"script: there is no file {script}")


def _check_params(grid, path, fields):
    """Check keys and single values first, so that a message can name the key as it was written."""
    for key, vals in zip(grid.keys, grid.vals, strict=True):
        name, *inner = key.split(":")
        try:
            if name in RESERVED:
                raise UsageError(f"cannot be set here: {RESERVED[name]}")
            arg = find_field(path, fields, name)
            if inner and not {"dict", "any"} & arg.kinds:
                raise UsageError(f"--{name.replace('_', '-')} is not a table")
            for value in vals:
                arg.check({":".join(inner): value} if inner else value)
        except UsageError as e:
            raise UsageError(f"params.{key}: {e}") from e


def _ranks(sweep, run):
    """Ranks of a run. "auto": this worker's share of the cores, as far as it divides the work."""
    if sweep.num_cpu != "auto":
        return sweep.num_cpu
    try:
        config = launch.read_json(run.directory / "config.json")
    except (OSError, ValueError):
        config = {}
    if _is_count(config.get("ranks")):
        return config["ranks"]  # a run that was begun on other cores goes on with as many ranks
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    n = max(1, cores // sweep.workers)
    defaults = {name: f.default for name, f in run.fields.items()} | run.params
    totals = [defaults.get("steps_per_epoch", 0), defaults.get("batch_size", 0)]
    while any(total % n for total in totals):
        n -= 1
    return n


def read_sweep(path):
    """A sweep from a TOML file. UsageError if its keys are not those of a sweep."""
    try:
        found = Path(path) if Path(path).exists() else ROOT / path
        data = tomllib.loads(read_text(found if found.exists() else path))
    except (OSError, ValueError, RecursionError) as e:
        raise UsageError(f"{path}: {e.strerror if isinstance(e, OSError) else e}") from e
    known = ("name", "script", "num_cpu", "workers", "data_dir", "params", "slurm")
    for key in data:
        if key not in known:
            raise UsageError(f"{path}: unknown key {key}; there are {', '.join(known)}")
    for key in ("params", "slurm"):
        if not isinstance(data.get(key, {}), dict):
            raise UsageError(f"{path}: {key}: expected a table")
    if "script" not in data:
        raise UsageError(f"{path}: script: missing")
    grid, only = ExperimentGrid(data.get("name", Path(path).stem)), {}
    for key, value in data.get("params", {}).items():
        try:
            _add_param(grid, only, key, value)
        except ValueError as e:
            raise UsageError(f"{path}: params.{key}: {e}") from e
    rest = {key: data[key] for key in ("num_cpu", "workers", "data_dir", "slurm") if key in data}
    return Sweep(grid, data["script"], source=str(path), only=only, **rest)


def _add_param(grid, only, key, value):
    """Add a key of [params], a value or in the long form, to the grid; its scripts to `only`."""
    if not isinstance(value, dict) or "vals" not in value:
        grid.add(key, [value] if isinstance(value, dict) else value)
        return
    known = ("vals", "shorthand", "in_name", "scripts")
    for name in value:
        if name not in known:
            raise ValueError(f"unknown key {name}; there are {', '.join(known)}")
    shorthand, in_name = value.get("shorthand"), value.get("in_name", False)
    if shorthand is not None and not isinstance(shorthand, str):
        raise ValueError(f"shorthand: expected a string, got {shorthand!r}")
    if not isinstance(in_name, bool):
        raise ValueError(f"in_name: expected true or false, got {in_name!r}")
    if "scripts" in value:
        patterns = value["scripts"]
        if not isinstance(patterns, list) or not all(isinstance(p, str) for p in patterns):
            raise ValueError(f"scripts: expected a list of names, got {patterns!r}")
        only[key] = patterns
    grid.add(key, value["vals"], shorthand, in_name)


def run_sweep(sweep, retry_failed=False, dry_run=False, use_slurm=False):
    """Run a sweep, or submit it to Slurm. Returns the exit code: 0 if all runs are finished."""
    runs = plan(sweep)
    name = sweep.grid.name
    if not dry_run:
        try:
            Path(sweep.data_dir).mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise UsageError(f"cannot write to {sweep.data_dir}: {e.strerror}") from e
        if not os.access(sweep.data_dir, os.W_OK):
            raise UsageError(f"cannot write to {sweep.data_dir}")
        scripts = sorted({Path(run.script).stem for run in runs})
        counts = len(runs), len({run.exp_name for run in runs})
        sweep.grid.print(scripts if len(scripts) > 1 else (), counts)
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
    results, signum = launch.run_all(runs, sweep.workers, retry_failed, name)
    launch.say(f"\n{launch.summary(results, name, time.monotonic() - began, signum)}")
    if all(result.outcome in ("finished", "finished before") for result in results):
        here = os.path.relpath(Path(__file__).parent)
        names = {run.exp_name for run in runs}
        logs = Path(sweep.data_dir, name if names == {name} else f"{name}_")
        plot, test = (shlex.join(["python", f"{here}/{p}.py"]) for p in ("plot", "test_policy"))
        launch.say(f"\nPlot it:  {plot} {shlex.quote(str(logs))}")
        launch.say(f"Watch it: {test} {shlex.quote(str(runs[0].directory))}")
        return 0
    return 128 + signum if signum else 1


# ------------------------------------------------------------------------------------ command line


class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise UsageError(message)


def parse_args(argv):
    """The options, and the words of the script's own flags: {flag: words}."""
    parser = Parser(
        prog="grid.py",
        usage="grid.py SWEEP.toml [options]\n"
        "       grid.py SCRIPT.py [SCRIPT.py ...] [--flag VALUE ...] [options]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("sweep", nargs="+", help=argparse.SUPPRESS)
    add("--workers", type=int, metavar="N", help="runs at a time (default: the file's, or 1)")
    add(
        "--num-cpu",
        metavar="N",
        help='MPI ranks of each run, or "auto" (default: the file\'s, or 1)',
    )
    add("--data-dir", metavar="DIR", help="where the runs go (default: the file's, or data)")
    add("--name", "--exp-name", metavar="NAME", help="name of the sweep")
    add("--retry-failed", action="store_true", help="run failed runs again, from their checkpoints")
    add("--dry-run", action="store_true", help="print the commands and run nothing")
    add("--slurm", action="store_true", help="submit the runs as a Slurm job array")

    # What is not an option of ours is a flag of the script's and takes the words that follow it.
    ours = {s: a.nargs for a in parser._actions for s in a.option_strings}
    own, flags, target = [], {}, None
    for i, word in enumerate(argv):
        if re.match(r"--?[A-Za-z]", word):
            flag = word.split("=", 1)[0]
            if flag in ours:
                own.append(word)
                target = own if "=" not in word and ours[flag] is None else None
                continue
            if i == 0:
                raise UsageError(f"expected a sweep file or a script, got {word}")
            if flag in flags:
                raise UsageError(f"{flag} is given twice; a grid is {flag} VALUE VALUE ...")
            flags[flag] = word.split("=", 1)[1:]
            target = flags[flag]
        elif target is own:
            own.append(word)
            target = None
        elif target is not None:
            target.append(word)
        elif flags or any(w.startswith("-") for w in own):
            raise UsageError(f"unexpected {word}")
        else:
            own.append(word)
    args = parser.parse_args(own)
    if args.num_cpu is not None and args.num_cpu != "auto":
        try:
            args.num_cpu = int(args.num_cpu)
        except ValueError:
            raise UsageError(f'--num-cpu: expected an int or "auto", got {args.num_cpu}') from None
    return args, flags


def sweep_from_words(scripts, flags):
    """A sweep from a command line: scripts and {flag: words}; --flag[sh] sets the shorthand."""
    paths = [_find_script(script) for script in scripts]
    fields = {}
    for path in reversed(paths):
        fields |= read_fields(path)
    grid = ExperimentGrid(valid_str(paths[0].stem) if len(paths) == 1 else "grid")
    for word, words in flags.items():
        match = re.fullmatch(r"--([\w:-]+?)(?:\[([\w()-]+)\])?", word)
        if not match:
            raise UsageError(f"cannot read {word}")
        key, shorthand = match[1].replace("-", "_"), match[2]
        name, *inner = key.split(":")
        try:
            if name not in fields and name.startswith("no_") and name[3:] in fields and not words:
                key, name, words = name[3:], name[3:], ["false"]
            arg = find_field(paths[0], fields, name)
            if not words and "bool" in arg.kinds:
                words = ["true"]
            if not words:
                raise UsageError("no value")
            if inner:
                arg = type(arg)(name, frozenset({"any"}))
                values = [_any_value(w) for w in words]
            else:
                values = [arg.parse(w) for w in words]
            # Its own environment in the name: another grid on this script will have another.
            grid.add(key, values, shorthand, in_name=key == "env_id" or shorthand is not None)
        except ValueError as e:
            raise UsageError(f"{word}: {e}") from e
    return Sweep(grid, [str(path) for path in paths])


def _any_value(word):
    """A word as JSON, or as it is."""
    try:
        return json.loads(word)
    except (ValueError, RecursionError):
        return word


def main(argv=None):
    try:
        args, flags = parse_args(sys.argv[1:] if argv is None else argv)
        if args.sweep[0].endswith(".toml"):
            if len(args.sweep) > 1:
                raise UsageError(f"one sweep at a time, got {' '.join(args.sweep)}")
            if flags:
                flag = next(iter(flags))
                raise UsageError(f"{flag} is no option; parameters of a sweep go into its file")
            sweep = read_sweep(args.sweep[0])
        else:
            sweep = sweep_from_words(args.sweep, flags)
        for name in ("workers", "num_cpu", "data_dir"):
            if getattr(args, name) is not None:
                setattr(sweep, name, getattr(args, name))
        if args.name is not None:
            sweep.grid.name = args.name
        sys.exit(run_sweep(sweep, args.retry_failed, args.dry_run, args.slurm))
    except UsageError as e:
        print(f"grid.py: error: {printable(e, 1000)}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:  # before any run was started
        sys.exit(130)


if __name__ == "__main__":
    main()
