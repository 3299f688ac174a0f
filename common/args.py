"""Command-line flags from a dataclass: its annotations say which types and which range to accept.

    @dataclass
    class Args:
        # Training
        lr: PosFloat = 1e-3  # step size

gives the flag `--lr`, refuses `--lr 0`, and lists it under "Training" in `--help`.
"""

import contextlib
import dataclasses
import inspect
import io
import json
import math
import os
import re
import shutil
import sys
import textwrap
import types
import typing
from pathlib import Path
from typing import Annotated, Literal
from unittest import mock

import tyro
from tyro.constructors import PrimitiveConstructorSpec

from common import UsageError
from common.mpi_tools import proc_id
from common.serialization import printable, read_json


@dataclasses.dataclass(frozen=True)
class Range:
    """Bounds of a number, for the annotation of a field of a script's `Args`."""

    low: float = -math.inf
    high: float = math.inf
    open_low: bool = False  # whether `low` itself is out

    def __str__(self):
        if self.high < math.inf:
            return f"between {self.low:g} and {self.high:g}"
        return f"above {self.low:g}" if self.open_low else f"at least {self.low:g}"

    def holds(self, x):
        """Whether `x` lies within the bounds and is finite."""
        above = x > self.low if self.open_low else x >= self.low
        return math.isfinite(x) and above and x <= self.high


def _json_dict(text):
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError(f"expected a JSON object, got {text}")
    return value


PosInt = Annotated[int, Range(low=1)]
NonNegInt = Annotated[int, Range(low=0)]
PosFloat = Annotated[float, Range(low=0, open_low=True)]
NonNegFloat = Annotated[float, Range(low=0)]
Unit = Annotated[float, Range(low=0, high=1)]
Sizes = Annotated[tuple[int, ...], Range(low=1)]
JsonDict = Annotated[
    dict,
    PrimitiveConstructorSpec(
        nargs=1,
        metavar="JSON",
        instance_from_str=lambda words: _json_dict(words[0]),
        is_instance=lambda x: isinstance(x, dict),
        str_from_instance=lambda x: [json.dumps(x)],
    ),
]


def flag(name):
    """The flag of a field: `env_id` -> `--env-id`."""
    return "--" + name.replace("_", "-")


def parse_args(Args, argv=None):
    """Read a script's command line into its `Args`.

    Args:
        Args: a dataclass; the comment behind a field is its help text.
        argv: the words; those the program was called with, if None.

    Raises:
        UsageError: an unknown flag, a value of the wrong type or out of range.
        SystemExit: help was asked for, and printed by rank 0.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    if {"-h", "--help"} & set(argv):
        if proc_id() == 0:
            print(help_text(Args))
        sys.exit()
    args = _parse(Args, argv)
    if isinstance(getattr(args, "resume", None), str):
        args = _parse(Args, argv, default=_args_of_run(Args, args.resume))
    check_args(args)
    return args


def _parse(Args, argv, **options):
    """tyro's parser. Its message, without frame and advice, becomes a UsageError of one line."""
    for i, (word, value) in enumerate(zip(argv, [*argv[1:], "-"], strict=False)):
        if word == "--resume" and value.startswith("-"):  # its directory may be left out
            argv = [*argv[: i + 1], "True", *argv[i + 1 :]]
    box = io.StringIO()
    try:  # in a terminal wide enough for any message
        with contextlib.redirect_stderr(box), mock.patch.dict(os.environ, COLUMNS="10000"):
            return tyro.cli(Args, args=argv, add_help=False, **options)
    except SystemExit:
        lines = [line.strip("│╭╮╰╯ ") for line in box.getvalue().splitlines()]
        lines = [line for line in lines if line and not line.endswith("─")]
        if len(lines) > 1 and not lines[1].strip("-"):  # a title, on a terminal without UTF-8
            lines = lines[2:]
        _, found, advice = " ".join(lines).partition("Perhaps you meant:")
        hint = f" (perhaps {advice.split()[0].rstrip(',')}?)" if found else ""
        raise UsageError(" ".join(lines[:1]) + hint) from None


def _args_of_run(Args, directory):
    """The arguments that config.json in a run directory holds."""
    try:
        config = read_json(Path(directory, "config.json"))
    except (OSError, ValueError) as e:
        raise UsageError(f"cannot resume {directory}: {printable(e)}") from e
    names = {field.name for field in dataclasses.fields(Args)} & config.keys()
    values = {name: config[name] for name in names - {"resume", "overwrite", "datestamp"}}
    args = Args(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})
    check_args(args)
    return args


def _types_and_bounds(Args):
    """{field name: (its type, its Range or None)} of a dataclass."""
    kinds, found = typing.get_type_hints(Args), {}
    for name, hint in typing.get_type_hints(Args, include_extras=True).items():
        extras = [x for h in (hint, *typing.get_args(hint)) for x in getattr(h, "__metadata__", ())]
        found[name] = kinds[name], next((x for x in extras if isinstance(x, Range)), None)
    return found


def _is_of(kind, value):
    """Whether a value is of an annotated type. A bool is no int here, and an int is a float."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return any(_is_of(part, value) for part in inner)
    if origin is Literal:
        return isinstance(value, str) and value in inner
    if origin is tuple:
        return isinstance(value, tuple | list) and all(_is_of(inner[0], x) for x in value)
    return isinstance(value, kind | int if kind is float else kind) and (
        kind is bool or not isinstance(value, bool)
    )


def check_args(args):
    """Raise UsageError if a field of a dataclass is not of its type, or not in its `Range`."""
    for name, (kind, bounds) in _types_and_bounds(type(args)).items():
        value = getattr(args, name)
        if not _is_of(kind, value):
            kind = inspect.formatannotation(kind).replace("typing.", "")
            raise UsageError(f"{flag(name)} must be of type {kind}, not {printable(repr(value))}")
        for x in value if isinstance(value, tuple | list) else [value]:
            if bounds and not isinstance(x, str) and not bounds.holds(x):
                raise UsageError(f"{flag(name)} must be {bounds}, not {x}")


def help_text(Args):
    """The script's docstring and its flags, in the groups that the comments in `Args` make."""
    text = [(sys.modules[Args.__module__].__doc__ or "").strip()]
    kinds, width = _types_and_bounds(Args), max(60, shutil.get_terminal_size().columns)
    for line in inspect.getsource(Args).splitlines():
        if group := re.fullmatch(r"    # (.+)", line):
            text += ["", f"{group[1]}:"]
        elif field := re.fullmatch(r"    (\w+): .+ = .+  # (.+)", line):
            kind, bounds = kinds[field[1]]
            choices = " or ".join(x for x in typing.get_args(kind) if isinstance(x, str))
            default = getattr(Args(), field[1])
            shown = " ".join(map(str, default)) if isinstance(default, tuple) else default
            notes = [choices, bounds and str(bounds), default is not None and f"default {shown}"]
            notes = "; ".join(filter(None, notes))
            left = f"  {flag(field[1])}" + (
                f", --no-{flag(field[1])[2:]}" if default is True else ""
            )
            left, right = f"{left:<26}  ", field[2] + (f" ({notes})" if notes else "")
            text.append(textwrap.fill(left + right, width, subsequent_indent=" " * 28))
    return "\n".join(text)
