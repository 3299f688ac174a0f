"""What a sweep runs, a script or a function: the arguments that it takes, and how it is started.

A script is not imported, since that would load torch or tensorflow. Only its class `Args`, which
checks the arguments of a run, is executed, and its imports from the standard library, pydantic and
common.args.
"""

import ast
import dataclasses
import functools
import importlib
import inspect
import json
import os
import pickle
import re
import sys
import types
import typing
import warnings
from pathlib import Path

import cloudpickle
from pydantic import ValidationError

from benchmark.reading import flag, printable
from common import UsageError
from common.files import FREE_TO_CHANGE, convert_json

ROOT = Path(__file__).resolve().parent.parent
CALL = Path(__file__).with_name("call.py")
KNOWN = {"pydantic", *sys.stdlib_module_names}  # what `Args` may use, beside common.args
# Flags that [params] cannot set: grid.py does, from the top of the sweep or by itself.
RESERVED = ("exp_name", "data_dir", "num_cpu", "datestamp", "resume", "overwrite")


def find(thunk):
    """The Script or Function for a path, a "module:function" name or a function.

    Raises:
        UsageError: there is none.
    """
    if isinstance(thunk, str) and re.fullmatch(r"[\w.-]+:[\w.]+", thunk, re.ASCII):
        module, name = thunk.split(":")
        sys.path.insert(0, os.getcwd())
        try:
            thunk = functools.reduce(getattr, name.split("."), importlib.import_module(module))
        except Exception as e:  # whatever a module raises
            raise UsageError(f"script: cannot import {thunk}: {e}") from e
    if callable(thunk):
        return Function(thunk)
    for base in (Path.cwd(), ROOT):
        if os.path.isfile(base / str(thunk)):
            return Script(base / str(thunk))
    raise UsageError(f"script: there is no file {thunk}")


@functools.cache
def check_env(env_id, env_kwargs="{}"):
    """Make an environment, with arguments in JSON, and close it. UsageError if that fails."""
    import gymnasium

    sys.path.append("")  # its package may be in the current directory, as for the scripts
    try:
        with warnings.catch_warnings(action="ignore"):
            gymnasium.make(env_id, **json.loads(env_kwargs)).close()
    except Exception as e:  # a package may raise anything
        raise UsageError(f"cannot make {env_id}: {printable(e, 1000)}") from e


def checked(Args, params):
    """`Args(**params)`. A UsageError of one line names the flags that are wrong."""
    try:
        return Args(**params)
    except ValidationError as e:
        wrong = {}  # a value that may have one of several types gives several errors
        for error in e.errors():
            where = flag(str(error["loc"][0])) if error["loc"] else "arguments"
            wrong.setdefault(where, {})[error["msg"]] = None
        lines = (f"{name}: {' or '.join(why)}" for name, why in wrong.items())
        raise UsageError("; ".join(lines)) from e


def to_words(hints, params):
    """The words of a command line that set `params`, given the types of all flags."""
    words = []
    for name, value in params.items():
        option, many = flag(name), isinstance(value, list | tuple)
        if name in hints and (hints[name] is bool) != isinstance(value, bool):
            wanted = "true or false" if hints[name] is bool else "a value"
            raise UsageError(f"{option}: expected {wanted}, got {value!r}")
        if isinstance(value, bool):
            words.append(option if value else "--no-" + option[2:])
            continue
        if many != takes_list(hints, name):
            hint = f"a list; in a sweep file, a list of lists: [[{value!r}, ...]]"
            raise UsageError(f"{option}: expected {'one value' if many else hint}")
        if isinstance(value, dict):
            value = json.dumps(value, allow_nan=False, default=plain)
        values = [str(word(v)) for v in (value if many else [value])]
        # After a =, since a word that begins with a dash would look like a flag.
        words += [f"{option}={values[0]}", *values[1:]] if values else [option]
    return words


def word(x):
    """A function or class, such as nn.Tanh, is its name in lower case; anything else is itself."""
    return getattr(x, "__name__", "").lower() or x


def plain(x):
    """NumPy's numbers and arrays as Python's; anything else as text."""
    return x.tolist() if hasattr(x, "tolist") and not isinstance(x, type) else str(x)


def takes_list(hints, name):
    """Whether one value of a flag is several words."""
    hint = hints.get(name)
    return any(typing.get_origin(h) in (tuple, list) for h in (hint, *typing.get_args(hint)))


class Script:
    """A script whose flags are the fields of its dataclass `Args`."""

    free = FREE_TO_CHANGE | {"exp_name"}  # arguments that a run's numbers do not depend on

    def __init__(self, path):
        self.path, self.name, self.label = Path(path), Path(path).stem, Path(path).name
        self.Args, self.hints = read_args(self.path)
        sys.path.append(str(self.path.resolve().parent))  # where a script finds environments

    def takes(self, key):
        return key.split(":")[0] in self.hints

    def parse(self, params):
        """All arguments of a run: {name: value}, as its config.json records them."""
        for name in params:
            if name in RESERVED:
                raise UsageError(f"{name} is no argument of a run: the sweep itself sets it")
        to_words(self.hints, params)  # refuses what a command line cannot express
        args = checked(self.Args, {name: word(value) for name, value in params.items()})
        if "env_id" in params or "env_kwargs" in params:
            check_env(args.env_id, json.dumps(getattr(args, "env_kwargs", {}), default=plain))
        return json.loads(json.dumps(dataclasses.asdict(args), default=plain))

    def command(self, own, params, directory, stamp):
        """(words, None): words after `python` that start a run; `own`: exp_name, seed, data_dir."""
        # As checked: 1e6, which is a float in a sweep file, is the int 1000000.
        params = {name: value for name, value in self.parse(params).items() if name in params}
        words = [str(self.path), *to_words(self.hints, own | params)]
        # --resume starts the run where there is nothing to resume.
        return [*words, "--datestamp" if stamp else "--resume"], None


def read_args(path):
    """A script's (`Args`, {field: type}). UsageError if it has none."""
    try:
        tree = ast.parse(Path(path).read_text(encoding="utf-8"))
        known = lambda name: name == "common.args" or name.split(".")[0] in KNOWN  # noqa: E731
        body = [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and known(f"{n.module}")]
        body += [n for n in tree.body if isinstance(n, ast.Import) and known(n.names[0].name)]
        body += [n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "Args"]
        # dataclasses and tyro look a class's module up.
        module = types.ModuleType(f"arguments of {path}")
        module.__file__ = str(path)
        sys.modules[module.__name__] = module
        exec(compile(ast.Module(body, []), str(path), "exec"), vars(module))
        return module.Args, typing.get_type_hints(module.Args)
    except Exception as e:  # it is code: anything may be wrong with it
        text = "; of a script, only Args and its imports are executed"
        raise UsageError(f"cannot read the flags of {path}: {printable(e)}{text}") from e


class Function:
    """A function that every rank calls with keyword arguments."""

    free = frozenset()

    def __init__(self, function):
        self.function = function
        self.name = self.label = getattr(function, "__name__", type(function).__name__)
        self.parameters = inspect.signature(function).parameters.values()
        self.hints = dict.fromkeys(p.name for p in self.parameters)
        self.takes_env_fn = "env_fn" in self.hints and "env_name" not in self.hints

    def asks_for(self, name):
        return any(p.name == name or p.kind is p.VAR_KEYWORD for p in self.parameters)

    def takes(self, key):
        # A seed is in the directory's name, even if the function has no use for it.
        name = key.split(":")[0]
        as_env_fn = name == "env_name" and self.takes_env_fn
        return name == "seed" or as_env_fn or self.asks_for(name)

    def parse(self, params):
        """The arguments of a run and the function's defaults, as its config.json records them."""
        if "env_name" in params and self.takes_env_fn:
            check_env(params["env_name"])
        given = {p.name: p.default for p in self.parameters if p.default is not p.empty} | params
        return convert_json(given)

    def command(self, own, params, directory, stamp):
        """(words, call): words after `python` that start a run, and the pickles of call.py.

        The function gets seed and logger_kwargs if it takes them. As in Spinning Up, env_name
        becomes env_fn, a function that makes the environment.
        """
        logger_kwargs = {"output_dir": str(directory), "exp_name": own["exp_name"]}
        given = {"seed": own["seed"], "logger_kwargs": logger_kwargs}
        given = {name: value for name, value in given.items() if self.asks_for(name)} | params
        if "env_name" in given and self.takes_env_fn:
            import gymnasium

            given["env_fn"] = functools.partial(gymnasium.make, given.pop("env_name"))
        try:
            call = pickle.dumps(sys.path) + cloudpickle.dumps((self.function, given))
        except Exception as e:  # whatever an object raises
            raise UsageError(f"{self.name} cannot be pickled: {printable(e)}") from e
        return [str(CALL), str(directory)], call
