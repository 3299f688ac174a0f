"""What the programs here read of a run, whose files anybody may have written."""

import json
import zipfile
from pathlib import Path

import numpy as np

STATUSES = ("running", "finished", "interrupted", "failed")


def printable(text, length=300):
    """Any object as text for one line of a terminal: without control characters, cut if long."""
    text = " ".join(str(text).split())
    text = "".join(c if c.isprintable() else "\ufffd" for c in text)
    return text if len(text) <= length else f"{text[: length - 3]}..."


def flag(name):
    """The flag of a field: `env_id` -> `--env-id`."""
    return "--" + name.replace("_", "-")


def read_json(path):
    """The dict in a JSON file. Raises OSError where it is missing, ValueError where it is none."""
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
        if not isinstance(value, dict):
            raise ValueError("it holds no object")
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} is missing") from None
    except (PermissionError, ValueError, RecursionError) as e:
        raise ValueError(f"{path} is damaged: {e}") from e
    return value


def read_status(directory):
    """status.json of a run: a dict with `status` and `epoch`. Raises as `read_json` does."""
    path = Path(directory, "status.json")
    status = read_json(path)
    if status.get("status") not in STATUSES or type(status.get("epoch")) is not int:
        raise ValueError(f"{path} is damaged: it has no status or no epoch")
    return status


def read_npz(path):
    """The arrays of an .npz file, {name: array}: no pickles, and checksums that are right.

    Raises OSError where it is missing, ValueError where it is damaged.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            if damaged := archive.testzip():
                raise ValueError(f"{damaged} does not match its checksum")
        with np.load(path, allow_pickle=False) as arrays:
            # NumPy gives bytes for a member that is no array; bytes[...] raises TypeError.
            return {name: x[...] for name, x in arrays.items()}
    except OSError:
        raise
    except Exception as e:  # zipfile and NumPy raise many kinds of them
        raise ValueError(printable(e) or type(e).__name__) from e
