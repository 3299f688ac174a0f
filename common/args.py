"""Command-line flags from a dataclass: its annotations say which types and which range to accept.

    @dataclass
    class Args:
        lr: PosFloat = 1e-3  # step size

gives the flag `--lr`, explains it in `--help`, and refuses `--lr 0`.
"""

import dataclasses
import difflib
import json
import math
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

import tyro
from tyro.constructors import PrimitiveConstructorSpec

from common import UsageError
from common.mpi_tools import proc_id, under_mpirun
from common.serialization import printable, read_json


class Range(NamedTuple):
    """Which numbers a field accepts: in words, and as a function."""

    text: str
    holds: Callable


def _json_dict(words):
    value = json.loads(words[0])
    if not isinstance(value, dict):
        raise ValueError(f"expected a JSON object, got {words[0]}")
    return value


PosInt = Annotated[int, Range("an integer of at least 1", lambda x: x >= 1)]
NonNegInt = Annotated[int, Range("an integer of at least 0", lambda x: x >= 0)]
PosFloat = Annotated[float, Range("above 0", lambda x: 0 < x < math.inf)]
NonNegFloat = Annotated[float, Range("at least 0", lambda x: 0 <= x < math.inf)]
Unit = Annotated[float, Range("between 0 and 1", lambda x: 0 <= x <= 1)]
Sizes = tuple[PosInt, ...]
_IS_DICT, _TO_JSON = lambda x: isinstance(x, dict), lambda x: [json.dumps(x)]
JsonDict = Annotated[
    dict, PrimitiveConstructorSpec(1, "JSON", _json_dict, _IS_DICT, str_from_instance=_TO_JSON)
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
        about = sys.modules[Args.__module__].__doc__
        tyro.cli(Args, args=["--help"], description=about, console_outputs=proc_id() == 0)
    for i, (word, value) in enumerate(zip(argv, [*argv[1:], "-"], strict=False)):
        if word == "--resume" and value.startswith("-"):  # its directory may be left out
            argv = [*argv[: i + 1], "True", *argv[i + 1 :]]
    args = _parse(Args, argv)
    if isinstance(getattr(args, "resume", None), str):
        args = _parse(Args, argv, default=_args_of_run(Args, args.resume))
    check_args(args)
    return args


def _parse(Args, argv, **options):
    """tyro's parser; a UsageError of one line where it would draw a box and exit.

    The hook for it is no public part of tyro, which has no other: requirements.txt has its version.
    """

    def refuse(event):
        text = getattr(event, "message", "missing value").partition("\n")[0]
        match event:
            case tyro._errors.MissingArgs(missing_arguments=missing):
                text = f"missing {', '.join(x.arg.display_name() for x in missing)}; see --help"
            case tyro._errors.InvalidChoice(value=value, choices=choices):
                text = f"expected one of {', '.join(choices)}, not {value}"
            case tyro._errors.UnrecognizedArgs(tokens=words):
                near = difflib.get_close_matches(words[0], map(flag, get_type_hints(Args)), 1, 0.7)
                meant = "".join(f" (perhaps {name}?)" for name in near)
                text = f"Unrecognized options: {', '.join(words)}{meant}"
        argument = getattr(event, "argument", None)
        raise UsageError(f"{argument.display_name()}: {text}" if argument else text)

    with tyro._errors.on_parse_error(refuse):
        return tyro.cli(Args, args=argv, add_help=False, **options)


def _args_of_run(Args, directory):
    """The arguments that config.json in a run directory holds."""
    try:
        config = read_json(Path(directory, "config.json"))
    except (OSError, ValueError) as e:
        raise UsageError(f"cannot resume {directory}: {printable(e)}") from e
    names = {field.name for field in dataclasses.fields(Args)} & config.keys()
    values = {name: config[name] for name in names - {"resume", "overwrite", "datestamp"}}
    if "num_cpu" in names:  # as many ranks as it had, however they were started
        values["num_cpu"] = 1 if under_mpirun() else config.get("ranks", 1)
    args = Args(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})
    check_args(args)
    return args


def check_args(args):
    """Raise UsageError if a field of a dataclass is not of its type, or out of its range."""
    for name, hint in get_type_hints(type(args), include_extras=True).items():
        value = getattr(args, name)
        if not _fits(hint, value):
            text = f"{flag(name)} must be {_words(hint)}, not"
            raise UsageError(f"{text} {printable(repr(value))}")


def _fits(hint, value):
    """Whether a value is of an annotated type. A bool is no int here, and an int is a float."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _fits(inner[0], value) and (not isinstance(inner[1], Range) or inner[1].holds(value))
    if origin in (Union, types.UnionType):
        return any(_fits(part, value) for part in inner)
    if origin is Literal:
        return isinstance(value, str) and value in inner
    if origin is tuple:
        return isinstance(value, tuple | list) and all(_fits(inner[0], x) for x in value)
    if isinstance(value, bool):
        return hint is bool
    return isinstance(value, int | float if hint is float else hint)


def _words(hint):
    """What values an annotated type has, for a message."""
    inner = get_args(hint)
    if get_origin(hint) is Annotated:
        return inner[1].text if isinstance(inner[1], Range) else _words(inner[0])
    if get_origin(hint) is tuple:
        return f"a list, each {_words(inner[0])}"
    return " or ".join(map(_words, inner)) or getattr(hint, "__name__", repr(hint))
