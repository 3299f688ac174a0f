"""JSON of anything that a configuration may hold, and files that are whole or not there."""

import dataclasses
import json
import math
import os
from pathlib import Path

import numpy as np


def convert_json(obj, _parents=()):
    """Turn any object into what `json.dumps(..., allow_nan=False)` accepts.

    Numbers, strings, None, lists and dicts stay (keys become strings); NumPy scalars and arrays
    become numbers and lists; NaN and infinities become None, since JSON has neither; dataclasses
    become dicts, paths strings, functions and classes their names; any other object becomes its
    class name and attributes, or its repr if it has none. A cycle ends in "...".
    """
    if obj is None or isinstance(obj, bool | str):
        return obj if type(obj) in (type(None), bool, str) else str(obj)
    if isinstance(obj, int | np.integer):
        return int(obj)
    if isinstance(obj, np.bool_):
        return bool(obj)
    if isinstance(obj, float | np.floating):
        return float(obj) if math.isfinite(obj) else None
    if isinstance(obj, Path):
        return str(obj)
    if id(obj) in _parents:
        return "..."
    parents = (*_parents, id(obj))
    if isinstance(obj, np.ndarray):
        return convert_json(obj.tolist(), parents)
    if isinstance(obj, dict):
        return {_key(k): convert_json(v, parents) for k, v in obj.items()}
    if isinstance(obj, list | tuple | set | frozenset):
        return [convert_json(v, parents) for v in obj]
    if isinstance(getattr(obj, "__name__", None), str):  # functions, classes, modules
        return obj.__name__
    if dataclasses.is_dataclass(obj):
        return {
            f.name: convert_json(getattr(obj, f.name), parents) for f in dataclasses.fields(obj)
        }
    if getattr(obj, "__dict__", None):
        attributes = {_key(k): convert_json(v, parents) for k, v in vars(obj).items()}
        return {type(obj).__name__: attributes}
    return _repr(obj)


def _key(key):
    return key if type(key) is str else _repr(key) if not isinstance(key, str) else str(key)


def _repr(obj):
    try:
        return repr(obj)
    except Exception:  # a config must be written even if one object in it cannot print itself
        return f"<{type(obj).__name__}>"


def write_atomically(path, write):
    """Create or replace a file such that a reader, or a crash, finds the old or the new one.

    Args:
        path: the file.
        write: called with a binary file open for writing.
    """
    path = Path(path)
    # Ranks that fail together may write one file at once: each has a temporary name of its own.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as f:
            write(f)
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def sync_directory(path):
    """Make renames in a directory durable: without this a power cut may undo them."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_json(path, obj):
    """Write `convert_json(obj)` to a file, atomically."""
    text = json.dumps(convert_json(obj), indent=2, allow_nan=False, ensure_ascii=False)
    write_atomically(path, lambda f: f.write(text.encode("utf-8", "backslashreplace") + b"\n"))


def read_json(path):
    """The object in a JSON file. Raises ValueError, naming the file, if it holds none."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as e:
        raise ValueError(f"{path} is not valid JSON: {e}") from e
