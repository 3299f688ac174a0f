"""JSON of anything, files that are written whole or not at all, and readers that trust no file."""

import dataclasses
import io
import math
import zipfile
from pathlib import Path

import numpy as np
import pytest
from conftest import Planted

from common.serialization import convert_json, read_json, read_npz, write_atomically, write_json


@dataclasses.dataclass
class Config:
    lr: float = 0.1
    sizes: tuple = (64, 64)


def test_convert_json():
    cases = [
        (np.int64(3), 3),
        (np.bool_(True), True),
        (np.arange(4).reshape(2, 2), [[0, 1], [2, 3]]),
        ([float("nan"), -math.inf, np.float32("inf"), np.nan], [None] * 4),
        (Config(), {"lr": 0.1, "sizes": [64, 64]}),
        (math.sqrt, "sqrt"),
        (Config, "Config"),
        (1j, "1j"),
        (Path("a") / "b", "a/b"),
        ({1: 2, 0.5: 3, None: {4}}, {"1": 2, "0.5": 3, "null": [4]}),
    ]
    for obj, expected in cases:
        assert convert_json(obj) == expected


def test_write_json(tmp_path):
    write_json(tmp_path / "a.json", {"é": float("nan"), "bad surrogate": "\ud800"})
    assert read_json(tmp_path / "a.json")["é"] is None
    (tmp_path / "b.json").write_text("{")
    with pytest.raises(ValueError, match=r"b\.json is damaged"):
        read_json(tmp_path / "b.json")


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "file"
    write_atomically(path, lambda f: f.write(b"old"))

    def fail(f):
        f.write(b"half of the new")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_atomically(path, fail)
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


ARRAYS = {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "name": np.array("tanh")}


def npz(save=np.savez, **arrays):
    file = io.BytesIO()
    save(file, **(arrays or ARRAYS))
    return file.getvalue()


def member(data):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("w.npy", data)
    return file.getvalue()


def test_arrays_come_back(tmp_path):
    path = tmp_path / "a.npz"
    path.write_bytes(npz())
    for loaded in (read_npz(path), read_npz(io.BytesIO(npz()))):
        assert loaded.keys() == ARRAYS.keys() and str(loaded["name"]) == "tanh"
        np.testing.assert_array_equal(loaded["w"], ARRAYS["w"])


SHORT = b"\x93NUMPY\1\0\x46\0{'descr': '<f4', 'fortran_order': False, 'shape': (9,), }     \n"
REFUSED = {
    "pickle in an array": lambda planted: npz(w=np.array([Planted()], dtype=object)),
    "pickle": lambda planted: planted,
    "pickle in an archive": member,
    "text": lambda planted: member(b"no array"),
    "compressed": lambda planted: npz(np.savez_compressed),
    "cut": lambda planted: npz()[:-9],
    "empty": lambda planted: b"",
    # Another shape, with which NumPy reads a part of the array and misses the checksum.
    "other shape": lambda planted: npz(w=np.zeros(9000)).replace(b"(9000,)", b"(1000,)"),
    "short": lambda planted: member(SHORT),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_anything_else_is_refused(planted, kind):
    with pytest.raises(ValueError, match=r"\w"):
        read_npz(io.BytesIO(REFUSED[kind](planted)))
