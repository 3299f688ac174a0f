"""JSON of anything that a configuration may hold, files that are whole or not there, and readers
that trust no file: nothing in it is executed, and none takes more memory than it has bytes.
"""

import contextlib
import dataclasses
import json
import math
import os
import re
import stat
import struct
import zipfile
from pathlib import Path

import numpy as np

from common import UsageError

MAX_DEPTH = 100  # of nested lists and dicts in JSON; Python's own reader gives up at about 1000
MAX_INT = 10**4000  # Python refuses to write larger ones in decimal
MAX_TEXT = 64 << 20  # bytes of a text file that is read: a run's largest is its progress.txt
MAX_DIRECTORY = 1 << 20  # bytes of an .npz file's directory: that of 17,000 arrays
# The header of a plain array, to the letter as np.save writes it: no objects, no structures.
NPY_HEADER = re.compile(
    r"\{'descr': '([<|](?:b1|[iu][1248]|f[248]|U[1-9]\d{0,7}))', "
    r"'fortran_order': (True|False), 'shape': \(((?:\d+,)?|\d+(?:, \d+)+)\), \} *\n"
)


def convert_json(obj, _parents=()):
    """Turn any object into what `json.dumps(..., allow_nan=False)` accepts.

    Numbers, strings, None, lists and dicts stay (keys become strings); NumPy scalars and arrays
    become numbers and lists; NaN and infinities become None, since JSON has neither; dataclasses
    become dicts, paths strings, functions and classes their names; any other object becomes its
    class name and attributes, or its repr if it has none. A cycle ends in "...", and so does what
    is nested deeper than MAX_DEPTH.
    """
    if obj is None or isinstance(obj, bool):
        return obj
    if isinstance(obj, str | Path):
        return _text(str(obj))
    if isinstance(obj, int | np.integer) and not isinstance(obj, np.timedelta64):
        return int(obj) if abs(int(obj)) < MAX_INT else hex(obj)
    if isinstance(obj, np.bool_):
        return bool(obj)
    if isinstance(obj, float | np.floating):
        return float(obj) if math.isfinite(obj) else None
    if id(obj) in _parents or len(_parents) >= MAX_DEPTH:
        return "..."
    parents = (*_parents, id(obj))
    if isinstance(obj, np.ndarray):
        return convert_json(obj.tolist(), parents)
    if isinstance(obj, dict):
        return {_key(k): convert_json(v, parents) for k, v in obj.items()}
    if isinstance(obj, list | tuple | set | frozenset):
        return [convert_json(v, parents) for v in obj]
    try:
        if isinstance(getattr(obj, "__name__", None), str):  # functions, classes, modules
            return _text(obj.__name__)
        if dataclasses.is_dataclass(obj):
            fields = {f.name: getattr(obj, f.name) for f in dataclasses.fields(obj)}
            return convert_json(fields, parents)
        if getattr(obj, "__dict__", None):
            return convert_json({type(obj).__name__: vars(obj)}, parents)
    except Exception:  # an object may raise at any question
        return f"<{type(obj).__name__}>"
    return _repr(obj)


def _key(key):
    return _text(key) if isinstance(key, str) else _repr(key)


def _repr(obj):
    try:
        return _text(repr(obj))
    except Exception:  # a config must be written even if one object in it cannot print itself
        return f"<{type(obj).__name__}>"


def _text(text):
    """A string that can be written as UTF-8: half characters, as file names may have, spelt out."""
    return str(text).encode("utf-8", "backslashreplace").decode()


def check_inside(data_dir, path):
    """Raise UsageError if `path` cannot be one, or a symbolic link leads it out of `data_dir`."""
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
        ValueError: it cannot be read, is no plain file, too large, or no UTF-8.
    """
    try:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("is not a plain file")
        if status.st_size > MAX_TEXT:
            raise ValueError(f"is larger than {MAX_TEXT >> 20} MiB")
        return Path(path).read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        raise
    except OSError as e:
        raise ValueError(e.strerror) from e


def read_json(path):
    """The dict in a JSON file. Raises as `read_text`; ValueError, too, if it holds anything else.

    The ValueError names the file.
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

    Sizes are held against those of the file before memory is taken: np.savez compresses nothing,
    so that the arrays of a file are never larger than it. Each array's CRC is checked.

    Args:
        file: a path, or a seekable binary file.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no such file.
    """
    if isinstance(file, str | Path):
        with open(file, "rb") as f:
            return read_npz(f)
    size = file.seek(0, os.SEEK_END)
    _check_directory(file, size)
    arrays = {}
    try:
        with zipfile.ZipFile(file) as archive:
            members = archive.infolist()
            if sum(member.file_size for member in members) > size:
                raise ValueError("its arrays claim to be larger than the file")
            for member in members:
                name = member.filename.removesuffix(".npy")
                if name in arrays or name == member.filename:
                    raise ValueError(f"member {printable(name)!r} is not one array")
                if member.compress_type != zipfile.ZIP_STORED or member.flag_bits & 1:
                    raise ValueError(f"member {printable(name)!r} is compressed or encrypted")
                with archive.open(member) as f:
                    arrays[name] = _read_npy(f, member.file_size)
    except (zipfile.BadZipFile, RuntimeError, EOFError, OverflowError, struct.error) as e:
        raise ValueError(str(e) or "it ends too early") from e
    return arrays


def _check_directory(file, size):
    """Raise ValueError if a zip file's directory is too large to be read, or not at its end."""
    file.seek(max(0, size - 98))
    tail = file.read(98).rjust(98, b"\0")
    large, locator, end = tail[:56], tail[56:76], tail[76:]
    length = struct.unpack("<L", end[12:16])[0]
    if locator.startswith(b"PK\6\7"):  # of a file above 4 GiB
        length = struct.unpack("<Q", large[40:48])[0]
        if large[:4] != b"PK\6\6" or struct.unpack("<Q", locator[8:16])[0] != size - 98:
            raise ValueError("it is no .npz file")
    if end[:4] != b"PK\5\6" or end[20:] != b"\0\0":
        raise ValueError("it is no .npz file")
    if length > MAX_DIRECTORY:
        raise ValueError("it has too many members")


def _read_npy(f, size):
    """The array in an .npy file of `size` bytes. Raises ValueError if it is anything else."""
    start = f.read(10)
    if start[:8] != b"\x93NUMPY\1\0" or len(start) < 10:
        raise ValueError("a member is no array")
    length = int.from_bytes(start[8:], "little")
    header = NPY_HEADER.fullmatch(f.read(length).decode("latin1"))
    if not header:
        raise ValueError("a member is no plain array")
    dtype, shape = np.dtype(header[1]), tuple(int(n) for n in header[3].split(",") if n)
    size -= 10 + length
    # In Python's integers, which do not wrap around.
    if math.prod(shape) * dtype.itemsize != size:
        raise ValueError(f"an array of shape {shape} and type {dtype} in {size} bytes")
    data = f.read(size)
    if len(data) < size:
        raise EOFError
    order = "F" if header[2] == "True" else "C"
    return np.frombuffer(data, dtype).reshape(shape, order=order).copy(order="K")
