"""Command-line flags from a dataclass, whose annotations say which range of numbers to accept.

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
from collections.abc import Callable
from numbers import Integral, Real
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, get_args, get_origin, get_type_hints

import tyro
from tyro.constructors import PrimitiveConstructorSpec

from common import UsageError, files, mpi


class Range(NamedTuple):
    """Which numbers a field accepts: in words, and as a function."""

    text: str
    holds: Callable


def _json_dict(words):
    value = json.loads(words[0])
    if not isinstance(value, dict):
        raise ValueError(f"expected a JSON object, got {words[0]}")
    if files.convert_json(value) != value:
        raise ValueError("config.json cannot hold NaN and infinities")
    return value


def _is_number(x, kind):
    return isinstance(x, kind) and not isinstance(x, bool)


def _ints(text, holds):
    return Annotated[int, Range(text, lambda x: _is_number(x, Integral) and holds(x))]


def _floats(text, holds):
    return Annotated[float, Range(text, lambda x: _is_number(x, Real) and holds(x))]


PosInt = _ints("an integer of at least 1", lambda x: x >= 1)
NonNegInt = _ints("an integer of at least 0", lambda x: x >= 0)
PosFloat = _floats("above 0", lambda x: 0 < x < math.inf)
NonNegFloat = _floats("at least 0", lambda x: 0 <= x < math.inf)
Unit = _floats("between 0 and 1", lambda x: 0 <= x <= 1)
Sizes = tuple[PosInt, ...]
_IS_DICT, _TO_JSON = lambda x: isinstance(x, dict), lambda x: [json.dumps(x)]
JsonDict = Annotated[
    dict, PrimitiveConstructorSpec(1, "JSON", _json_dict, _IS_DICT, str_from_instance=_TO_JSON)
]


def flag(name):
    """The flag of a field: `env_id` -> `--env-id`."""
    return "--" + name.replace("_", "-")


def parse_args(Args, argv=None):
    """Read a program's command line into its `Args`.

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
        tyro.cli(Args, args=["--help"], description=about, console_outputs=mpi.proc_id() == 0)
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
                if words[0].lower() in ("true", "false"):
                    meant = " (a switch takes no value: --name sets it, --no-name clears it)"
                text = f"Unrecognized options: {', '.join(words)}{meant}"
        argument = getattr(event, "argument", None)
        raise UsageError(f"{argument.display_name()}: {text}" if argument else text)

    with tyro._errors.on_parse_error(refuse):
        return tyro.cli(Args, args=argv, add_help=False, **options)


def _args_of_run(Args, directory):
    """The arguments that config.json in a run directory holds."""
    try:
        config = files.read_json(Path(directory, "config.json"))
    except (OSError, ValueError) as e:
        raise UsageError(f"cannot resume {directory}: {files.printable(e)}") from e
    names = {field.name for field in dataclasses.fields(Args)} & config.keys()
    values = {name: config[name] for name in names - {"resume", "overwrite", "datestamp"}}
    if "num_cpu" in names:  # as many ranks as it had, however they were started
        values["num_cpu"] = 1 if mpi.launched() else config.get("ranks", 1)
    args = Args(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})
    check_args(args)
    return args


def check_args(args):
    """Raise UsageError if a value in a dataclass is not one that its annotation allows."""
    for name, hint in get_type_hints(type(args), include_extras=True).items():
        value = getattr(args, name)
        words = [word for part in get_args(hint) for word in get_args(part)]  # of Literal["auto"]
        is_list, of_many = isinstance(value, tuple | list), get_origin(hint) is tuple
        if hint is bool and not isinstance(value, bool):
            raise UsageError(f"{flag(name)} must be True or False, not {value!r}")
        if get_origin(hint) is Literal and value not in get_args(hint):
            choices = ", ".join(get_args(hint))
            raise UsageError(f"{flag(name)} must be one of {choices}, not {value!r}")
        for limit in _ranges(hint) if value not in words else ():
            numbers = value if is_list else [value]
            if of_many != is_list or not all(map(limit.holds, numbers)):
                each = "a list, each " if of_many else ""
                text = f"{flag(name)} must be {each}{limit.text}, not"
                raise UsageError(f"{text} {files.printable(repr(value))}")


def _ranges(hint):
    """The ranges in an annotation: its own, of a tuple's items, of a union's parts."""
    parts = [*getattr(hint, "__metadata__", ()), *get_args(hint)]
    own = [part for part in parts if isinstance(part, Range)]
    return own[:1] or [limit for part in parts for limit in _ranges(part)]
