"""Command-line flags from a dataclass, with the bounds of each number in its annotation."""

import contextlib
import dataclasses
import io
import json
import math
import sys
import typing
from typing import Annotated, Literal

import tyro

from common import UsageError
from common.mpi_tools import proc_id


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


PosInt = Annotated[int, Range(low=1)]
NonNegInt = Annotated[int, Range(low=0)]
PosFloat = Annotated[float, Range(low=0, open_low=True)]
NonNegFloat = Annotated[float, Range(low=0)]
Unit = Annotated[float, Range(low=0, high=1)]
NonNegFloatOrAuto = Annotated[float | Literal["auto"], Range(low=0)]
Sizes = Annotated[tuple[int, ...], Range(low=1)]
JsonDict = Annotated[
    dict,
    tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="JSON",
        instance_from_str=lambda words: _json_dict(words[0]),
        is_instance=lambda x: isinstance(x, dict),
        str_from_instance=lambda x: [json.dumps(x)],
    ),
]


def _json_dict(text):
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError(f"expected a JSON object, got {text}")
    return value


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
    argv = sys.argv[1:] if argv is None else argv
    show_help = not {"-h", "--help"} & set(argv) or proc_id() == 0
    box = io.StringIO()
    try:
        with contextlib.redirect_stderr(box):
            description = (sys.modules[Args.__module__].__doc__ or "").strip()
            args = tyro.cli(Args, args=argv, description=description, console_outputs=show_help)
    except SystemExit as e:
        if not e.code:
            raise
        raise UsageError(_first_words(box.getvalue())) from None
    check_args(args)
    return args


def _first_words(box):
    """tyro's message, without its frame and the advice below its rule, in one line."""
    lines = [line.strip("│╭╮╰╯ ") for line in box.splitlines()]
    lines = [line for line in lines if line and not line.endswith("─")]
    words, advice = lines[:1], " ".join(lines)
    if "Perhaps you meant:" in advice:
        words.append("(perhaps " + advice.split("Perhaps you meant:")[1].split()[0] + "?)")
    return " ".join(words) or "cannot read the command line"


def check_args(args):
    """Raise UsageError if a field of a dataclass lies outside the `Range` of its annotation."""
    hints = typing.get_type_hints(type(args), include_extras=True)
    for field in dataclasses.fields(args):
        bounds = [m for m in getattr(hints[field.name], "__metadata__", ()) if type(m) is Range]
        value = getattr(args, field.name)
        for x in value if isinstance(value, tuple) else [value]:
            if bounds and not isinstance(x, str) and not bounds[0].holds(x):
                raise UsageError(f"{flag(field.name)} must be {bounds[0]}, not {x}")
