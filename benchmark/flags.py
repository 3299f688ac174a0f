"""What a sweep runs, a script or a function: the arguments that it takes, and its command line.

A script is not imported, which would load torch or tensorflow. The body of its `Args` is executed,
and nothing else; then `common.args.parse_args` checks the words that a run is started with.
"""

import ast
import dataclasses
import functools
import importlib
import inspect
import json
import os
import re
import sys
import types
import typing
import warnings
from pathlib import Path

from common import UsageError
from common.args import flag, parse_args
from common.run_dir import FREE_TO_CHANGE
from common.serialization import printable, read_text

ROOT = Path(__file__).resolve().parent.parent
CALL = Path(__file__).with_name("call.py")
# Flags that [params] cannot set: grid.py does, from the top of the sweep or by itself.
RESERVED = ("exp_name", "data_dir", "num_cpu", "datestamp", "resume", "overwrite")


def find(thunk):
    """The Script or Function for a path, a "module:function" name or a function.

    Raises:
        UsageError: there is none, or it cannot be imported by name.
    """
    if isinstance(thunk, str) and re.fullmatch(r"[\w.-]+:[\w.]+", thunk, re.ASCII):
        try:
            thunk = load(str(Path.cwd()), *thunk.split(":"))
        except Exception as e:  # whatever a module raises
            raise UsageError(f"script: cannot import {thunk}: {e}") from e
    if callable(thunk):
        return Function(thunk)
    if not isinstance(thunk, str | Path):
        raise UsageError(f"script: expected a path or a function, got {thunk!r}")
    for base in (Path.cwd(), ROOT):
        if os.path.isfile(base / thunk):
            return Script(base / thunk)
    raise UsageError(f"script: there is no file {thunk}")


def locate(thing):
    """[directory, module, name] to import a function or class by. UsageError if it has none."""
    name, module = getattr(thing, "__qualname__", ""), getattr(thing, "__module__", None)
    holder = sys.modules.get(module)
    file = getattr(holder, "__file__", None)
    if module == "__main__" and file:
        module = Path(file).stem
    found = functools.reduce(lambda x, part: getattr(x, part, None), name.split("."), holder)
    if found is not thing or module == "__main__":
        raise UsageError(
            f"{printable(thing)} cannot be imported by name, as every rank has to: "
            "define it at the top level of a module (no lambda, closure or notebook cell)"
        )
    depth = module.count(".") + (file is not None and Path(file).stem == "__init__")
    return [str(Path(file).resolve().parents[depth]) if file else "", module, name]


def load(directory, module, name):
    """Import what `locate` has located."""
    if directory and directory not in sys.path:
        sys.path.insert(0, directory)
    return functools.reduce(getattr, name.split("."), importlib.import_module(module))


@functools.cache
def check_env(env_id, env_kwargs="{}", make="gymnasium.make(args.env_id)"):
    """Make an environment and close it. UsageError if that fails; may import its package.

    Args:
        env_kwargs: JSON.
        make: an expression that makes it, a script's call of `common.cli.make_env`.
    """
    import gymnasium

    from common.cli import make_env

    sys.path.append("")  # the package may be in the current directory, as for the scripts
    args = types.SimpleNamespace(env_id=env_id, env_kwargs=json.loads(env_kwargs))
    names = {**vars(gymnasium.spaces), "gymnasium": gymnasium, "make_env": make_env, "args": args}
    try:
        with warnings.catch_warnings(action="ignore"):
            eval(make, names).close()
    except UsageError:
        raise
    except Exception as e:  # a package may raise anything
        raise UsageError(f"cannot make {env_id}: {printable(e, 1000)}") from e


class Script:
    """A script whose flags are the fields of its dataclass `Args`."""

    record = ""  # where in a run's directory its config.json, status.json and .lock are
    free = FREE_TO_CHANGE | {"exp_name"}  # arguments that a run's numbers do not depend on

    def __init__(self, path):
        self.path, self.name, self.label = Path(path), Path(path).stem, Path(path).name
        self.Args, self.hints, self.make_env = read_args(self.path)
        for name in ("exp_name", "seed", "data_dir", "resume"):
            if name not in self.hints:
                raise UsageError(f"script: {path} has no flag {flag(name)}")

    def takes(self, name):
        return name in self.hints

    def takes_list(self, name):
        """Whether one value of a flag is several words."""
        hint = self.hints.get(name)
        return any(typing.get_origin(h) in (tuple, list) for h in (hint, *typing.get_args(hint)))

    def parse(self, params):
        """All arguments of a run: {name: value}, as its config.json records them."""
        for name in params:
            if name in RESERVED:
                raise UsageError(f"{name} is no argument of a run: the sweep itself sets it")
        args = parse_args(self.Args, self.words(params))
        settings = json.loads(json.dumps(dataclasses.asdict(args)))
        if self.make_env:
            check_env(args.env_id, json.dumps(args.env_kwargs), self.make_env)
        elif "env_id" in params:
            check_env(args.env_id)
        return settings

    def words(self, params):
        """The words of a command line that set these arguments."""
        words = []
        for name, value in params.items():
            option, many = flag(name), isinstance(value, list | tuple)
            if self.hints[name] is bool and not isinstance(value, bool):
                raise UsageError(f"{option}: expected true or false, got {value!r}")
            if isinstance(value, bool):
                words.append(option if value else "--no-" + option[2:])
                continue
            if many != self.takes_list(name):
                hint = f"a list; in a sweep file, a list of lists: [[{value!r}, ...]]"
                raise UsageError(f"{option}: expected {'one value' if many else hint}")
            if isinstance(value, dict):
                value = to_json(option, value)
            values = [as_word(v) for v in (value if many else [value])]
            if any("\0" in word for word in values):
                raise UsageError(f"{option}: a string must not hold a NUL character")
            # A word that begins with a dash would look like a flag.
            dash = values and values[0].startswith("-")
            words += [f"{option}={values[0]}", *values[1:]] if dash else [option, *values]
        return words

    def command(self, run):
        """The words after `python` that start a run."""
        own = {"exp_name": run.exp_name, "seed": run.seed, "data_dir": str(run.data_dir)}
        words = [str(self.path), *self.words(own | run.params)]
        # --resume starts the run where there is nothing to resume.
        return [*words, "--datestamp" if run.stamp else "--resume"]


def as_word(value):
    """A value as a word: a function or class, such as nn.Tanh, is its name in lower case."""
    return value.__name__.lower() if hasattr(value, "__name__") else str(value)


def read_args(path):
    """(`Args`, {field: type}, its call of make_env or "") of a script.

    Raises:
        UsageError: they cannot be read.
    """
    try:
        tree = ast.parse(read_text(path))
        known = {"common.args", *sys.stdlib_module_names}
        body = [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.module in known]
        body += [n for n in tree.body if isinstance(n, ast.Import) and n.names[0].name in known]
        body += [n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "Args"]
        # dataclasses and tyro look a class's module up.
        module = types.ModuleType(f"arguments of {path}")
        module.__file__ = str(path)
        sys.modules[module.__name__] = module
        exec(compile(ast.Module(body, []), str(path), "exec"), vars(module))
        calls = [ast.unparse(n) for n in ast.walk(tree) if isinstance(n, ast.Call)]
        make_env = next((text for text in calls if text.startswith("make_env(")), "")
        return module.Args, typing.get_type_hints(module.Args), make_env
    except Exception as e:  # it is code: anything may be wrong with it
        raise UsageError(f"cannot read the flags of {path}: {printable(e)}") from e


class Function:
    """A function that every rank imports by its name and calls with keyword arguments."""

    record = "call"  # separate from the files of the function's own logger
    free = frozenset()

    def __init__(self, function):
        self.where, self.name = locate(function), function.__name__
        self.label = f"{self.where[1]}:{self.where[2]}"
        self.signature = inspect.signature(function)

    def asks_for(self, name):
        parameters = self.signature.parameters.values()
        return any(p.name == name or p.kind is p.VAR_KEYWORD for p in parameters)

    def takes(self, name):
        # A seed is in the directory's name, even if the function has no use for it.
        names = (name, "env_fn") if name == "env_name" else (name,)
        return name == "seed" or any(map(self.asks_for, names))

    def takes_list(self, name):
        return False

    def arguments(self, given):
        """The arguments of a call; seed and logger_kwargs only if the function takes them.

        As in Spinning Up, env_name becomes env_fn, a function that makes the environment.
        """
        given = dict(given)
        if "env_name" in given and not self.asks_for("env_name"):
            given["env_fn"] = {"$make": given.pop("env_name")}
        optional = ("seed", "logger_kwargs")
        return {k: v for k, v in given.items() if k not in optional or self.asks_for(k)}

    def parse(self, params):
        """The arguments of a run and the function's defaults, as JSON."""
        if "env_name" in params and not self.asks_for("env_name"):
            check_env(params["env_name"])
        defaults = {p.name: p.default for p in self.signature.parameters.values()}
        simple = {k: v for k, v in defaults.items() if isinstance(v, int | float | str | None)}
        return simple | json.loads(to_json(self.label, params))

    def command(self, run):
        """The words after `python` that start a run."""
        logger_kwargs = {"output_dir": str(run.directory), "exp_name": run.exp_name}
        call = {"directory": str(run.directory), "function": self.where, "config": run.fixed()}
        given = {"seed": run.seed, "logger_kwargs": logger_kwargs, **run.params}
        return [str(CALL), to_json(self.label, {**call, "kwargs": self.arguments(given)})]


def to_json(what, value):
    """A value as JSON; functions and classes in it by their names."""
    try:
        default = lambda thing: {"$import": locate(thing)}  # noqa: E731
        return json.dumps(value, default=default, allow_nan=False, ensure_ascii=False)
    except (ValueError, TypeError) as e:
        raise UsageError(f"{what}: cannot be written as JSON: {e}") from e
