"""JSON of anything that a configuration may hold, files that are written whole or not at all, and
readers for files of unknown origin, which execute nothing and refuse what would fill the memory.
"""

import dataclasses
import json
import os
import zipfile
from pathlib import Path

import numpy as np
from numpy.lib.format import read_array

from common import UsageError

MAX_TEXT = 64 << 20  # bytes of a text file that is read: a run's largest is its progress.txt


def convert_json(obj):
    """Turn an object into what `json.dumps(..., allow_nan=False)` accepts.

    Numbers, strings, None, lists and dicts stay (keys become strings; tuples as keys are left out);
    NumPy scalars and arrays become numbers and lists; NaN and infinities become None, since JSON
    has neither; dataclasses become dicts, functions and classes their names, and any other object
    its string.
    """

    def plain(x):
        if isinstance(x, np.generic | np.ndarray):
            return x.tolist()
        if isinstance(x, set | frozenset):
            return list(x)
        if dataclasses.is_dataclass(x) and not isinstance(x, type):
            return vars(x)
        return getattr(x, "__name__", None) or str(x)

    text = json.dumps(obj, default=plain, skipkeys=True)
    return json.loads(text, parse_constant=lambda name: None)


def check_inside(data_dir, path):
    """Raise UsageError if `path` is not valid, or a symbolic link leads it out of `data_dir`."""
    try:
        inside = Path(path).resolve().is_relative_to(Path(data_dir).resolve())
        Path(path).exists()
    except (OSError, RuntimeError, ValueError) as e:  # too long, a loop of links, a NUL
        raise UsageError(f"cannot write to {printable(path)}: {printable(e)}") from e
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
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path, obj):
    """Write `convert_json(obj)` to a file, atomically."""
    text = json.dumps(convert_json(obj), indent=2, allow_nan=False)
    write_atomically(path, lambda f: f.write(text.encode() + b"\n"))


def read_text(path):
    """The UTF-8 text of a file.

    Raises:
        OSError: there is no such file, or it cannot be read.
        ValueError: it is not a plain file, is too large, or is not UTF-8.
    """
    path = Path(path)
    if path.exists() and not (path.is_file() and path.stat().st_size <= MAX_TEXT):
        raise ValueError(f"is not a plain file of at most {MAX_TEXT >> 20} MiB")
    return path.read_text(encoding="utf-8")


def read_json(path):
    """The dict in a JSON file.

    Raises:
        OSError: there is no such file.
        ValueError: it cannot be read, or holds anything but a JSON object. The message names it.
    """
    try:
        value = json.loads(read_text(path))
        if not isinstance(value, dict):
            raise ValueError("it holds no object")
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} is missing") from None
    except (PermissionError, ValueError, RecursionError) as e:
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
    that are compressed, which may fill the memory, and wrong checksums.

    Args:
        file: a path, or a seekable binary file.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no such file.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            if any(member.compress_type != zipfile.ZIP_STORED for member in archive.infolist()):
                raise ValueError("its arrays are compressed")
            if damaged := archive.testzip():
                raise ValueError(f"{damaged} does not match its checksum")
            members = {name.removesuffix(".npy"): archive.open(name) for name in archive.namelist()}
            return {name: read_array(f, allow_pickle=False) for name, f in members.items()}
    except OSError:
        raise
    except Exception as e:  # zipfile and NumPy raise many kinds of them
        raise ValueError(printable(e) or type(e).__name__) from e
