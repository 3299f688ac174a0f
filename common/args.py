"""Command-line flags from a dataclass: tyro reads them, and pydantic checks their values.

    from pydantic.dataclasses import dataclass

    @dataclass
    class Args:
        lr: PosFloat = 1e-3  # step size

gives the flag `--lr`, explains it in `--help`, and refuses `--lr 0` as well as `Args(lr=0)`.
"""

import contextlib
import dataclasses
import io
import json
import os
import sys
from pathlib import Path
from typing import Annotated

os.environ.setdefault("PYDANTIC_ERRORS_INCLUDE_URL", "0")  # no link in every message

import tyro
from pydantic import AfterValidator, Field
from tyro.constructors import PrimitiveConstructorSpec

from common import UsageError, mpi


def _only_json(value):
    json.dumps(value, allow_nan=False, default=str)  # ValueError for NaN, which JSON does not have
    return value


PosInt = Annotated[int, Field(ge=1)]
NonNegInt = Annotated[int, Field(ge=0)]
PosFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Unit = Annotated[float, Field(ge=0, le=1)]
Sizes = tuple[PosInt, ...]
_FROM_JSON, _TO_JSON = lambda words: json.loads(words[0]), lambda x: [json.dumps(x)]
_IS_DICT = lambda x: isinstance(x, dict)  # noqa: E731
_JSON = PrimitiveConstructorSpec(1, "JSON", _FROM_JSON, _IS_DICT, str_from_instance=_TO_JSON)
JsonDict = Annotated[dict, _JSON, AfterValidator(_only_json)]


def parse_args(Args, argv=None):
    """Read a program's command line into its `Args`.

    Args:
        Args: a dataclass of pydantic's; the comment behind a field is its help text.
        argv: list of words; those the program was called with, if None.

    Raises:
        SystemExit: rank 0 printed help (exit code 0), or what is wrong with a flag (2).
        UsageError: `--resume DIR` names a directory whose arguments cannot be read.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    for i, (word, value) in enumerate(zip(argv, [*argv[1:], "-"], strict=False)):
        if word == "--resume" and value.startswith("-"):  # its directory may be left out
            argv = [*argv[: i + 1], "True", *argv[i + 1 :]]
    options = {"args": argv, "description": sys.modules[Args.__module__].__doc__}
    first = not mpi.launched() or mpi.proc_id() == 0  # MPI must not start before mpi.fork
    with contextlib.nullcontext() if first else contextlib.redirect_stderr(io.StringIO()):
        args = tyro.cli(Args, console_outputs=first, **options)
    if isinstance(getattr(args, "resume", None), str):
        args = tyro.cli(Args, default=_args_of_run(Args, args.resume), **options)
    return args


def _args_of_run(Args, directory):
    """The arguments that config.json in a run directory holds."""
    names = {field.name for field in dataclasses.fields(Args)}
    names -= {"resume", "overwrite", "datestamp"}
    try:
        config = json.loads(Path(directory, "config.json").read_text(encoding="utf-8"))
        values = {name: config[name] for name in names & config.keys()}
        if "num_cpu" in names:  # as many ranks as it had, however they are started
            values["num_cpu"] = 1 if mpi.launched() else config.get("ranks", 1)
        return Args(**values)
    except (OSError, ValueError, AttributeError) as e:
        raise UsageError(f"cannot resume {directory}: {e}") from e
