"""JSON of anything that a configuration may hold, files that are written whole or not at all, and
readers for files of unknown origin, which execute nothing and refuse what would fill the memory.
"""

import contextlib
import dataclasses
import json
import math
import os
import stat
import zipfile
from pathlib import Path

import numpy as np

from common import UsageError

MAX_DEPTH = 100  # of nested lists and dicts in JSON; Python's own reader gives up at about 1000
MAX_INT = 10**4000  # Python refuses to write larger ones in decimal
MAX_TEXT = 64 << 20  # bytes of a text file that is read: a run's largest is its progress.txt


def convert_json(obj, _parents=()):
    """Turn any object into what `json.dumps(..., allow_nan=False)` accepts.

    Numbers, strings, None, lists and dicts stay (keys become strings); NumPy scalars and arrays
    become numbers and lists; NaN and infinities become None, since JSON has neither; dataclasses
    become dicts, paths strings, functions and classes their names; any other object becomes its
    class name and attributes, or its repr if it has none. A cycle ends in "...", and so does what
    is nested deeper than MAX_DEPTH.
    """
    if isinstance(obj, float | np.floating):
        return float(obj) if math.isfinite(obj) else None
    if isinstance(obj, np.generic | np.ndarray):
        obj = obj.tolist()
    if obj is None or isinstance(obj, bool):
        return obj
    if isinstance(obj, int):
        return int(obj) if abs(obj) < MAX_INT else hex(obj)
    if isinstance(obj, str | Path):
        return _text(obj)
    if id(obj) in _parents or len(_parents) >= MAX_DEPTH:
        return "..."
    parents = (*_parents, id(obj))
    with contextlib.suppress(Exception):  # an object may raise at any question
        if isinstance(obj, dict):
            keys = (_text(key if isinstance(key, str) else repr(key)) for key in obj)
            return dict(zip(keys, (convert_json(x, parents) for x in obj.values()), strict=True))
        if isinstance(obj, list | tuple | set | frozenset):
            return [convert_json(x, parents) for x in obj]
        if isinstance(getattr(obj, "__name__", None), str):  # functions, classes, modules
            return _text(obj.__name__)
        if attributes := getattr(obj, "__dict__", None):
            named = (
                attributes if dataclasses.is_dataclass(obj) else {type(obj).__name__: attributes}
            )
            return convert_json(named, parents)
        return _text(repr(obj))
    return f"<{type(obj).__name__}>"


def _text(text):
    """A string that UTF-8 can encode: the lone surrogates of odd file names are spelt out."""
    return str(text).encode("utf-8", "backslashreplace").decode()


def check_inside(data_dir, path):
    """Raise UsageError if `path` is not valid, or a symbolic link leads it out of `data_dir`."""
    try:
        inside = Path(path).resolve().is_relative_to(Path(data_dir).resolve())
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            os.stat(path)
    except (OSError, RuntimeError, ValueError) as e:  # too long, a loop of links, a NUL
        reason = getattr(e, "strerror", None) or e
        raise UsageError(f"cannot write to {printable(path)}: {reason}") from e
    if not inside:
        raise UsageError(f"cannot write to {path}: a symbolic link leads out of {data_dir}")


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
    write_atomically(path, lambda f: f.write(text.encode() + b"\n"))


def read_text(path):
    """The UTF-8 text of a file.

    Raises:
        FileNotFoundError, NotADirectoryError: there is no such file.
        ValueError: it cannot be read, is not a plain file, is too large, or is not UTF-8.
    """
    try:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_TEXT:
            raise ValueError(f"is not a plain file of at most {MAX_TEXT >> 20} MiB")
        return Path(path).read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        raise
    except OSError as e:
        raise ValueError(e.strerror) from e


def read_json(path):
    """The dict in a JSON file.

    Raises:
        FileNotFoundError, NotADirectoryError: there is no such file.
        ValueError: it cannot be read, or holds anything but a JSON object. The message names it.
    """
    try:
        value = json.loads(read_text(path))
        if not isinstance(value, dict):
            raise ValueError("it holds no object")
    except (ValueError, RecursionError) as e:
        raise ValueError(f"{path} is damaged: {e}") from e
    return value


def printable(text, length=300):
    """Any object as text for one line of a terminal: without control characters, cut if long."""
    text = " ".join(str(text).split())
    text = "".join(c if c.isprintable() else "\ufffd" for c in text)
    return text if len(text) <= length else f"{text[: length - 3]}..."


def read_npz(file):
    """The arrays of an .npz file, as np.savez writes it: {name: array}.

    NumPy refuses pickles and short data itself. What it does not notice is checked here: members
    that are compressed or claim more bytes than the file has, which would fill the memory, and
    wrong checksums.

    Args:
        file: a path, or a seekable binary file.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no such file.
    """
    if isinstance(file, str | Path):
        with open(file, "rb") as f:
            return read_npz(f)
    try:
        size = file.seek(0, os.SEEK_END)
        with zipfile.ZipFile(file) as archive:
            members = archive.infolist()
            stored = all(member.compress_type == zipfile.ZIP_STORED for member in members)
            if not stored or sum(member.file_size for member in members) > size:
                raise ValueError("its arrays are compressed, or claim to be larger than the file")
            if damaged := archive.testzip():
                raise ValueError(f"{damaged} does not match its checksum")
        file.seek(0)
        arrays = dict(np.load(file, allow_pickle=False))
        if not all(isinstance(array, np.ndarray) for array in arrays.values()):
            raise ValueError("a member is no array")
        return arrays
    except OSError:
        raise
    except Exception as e:  # zipfile and NumPy raise many kinds of them
        raise ValueError(printable(e) or type(e).__name__) from e
