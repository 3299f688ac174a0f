"""Whatever lies in a file, or is asked for: the right answer or a refusal, nothing in between.

The examples are the same in every run. `FUZZ=10 pytest tests/test_fuzz.py` tries ten times as many
and new ones each time.
"""

import copy
import dataclasses
import io
import json
import os
import re
import shutil
import struct
import tempfile
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, Args
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from benchmark import flags, grid, launch, plot
from benchmark import test_policy as tp
from common import UsageError, logger, run_dir
from common.checkpoint import Checkpointer, CheckpointError, tree_from_bytes, tree_to_bytes
from common.serialization import convert_json, printable, read_json, read_npz, write_json

TIMES = int(os.environ.get("FUZZ", "1"))


def examples(n):
    """Settings of a test of `n` examples."""
    return settings(
        max_examples=n * TIMES,
        derandomize=TIMES == 1,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


@pytest.fixture(autouse=True, scope="module")
def quick(tmp_path_factory):
    """Without git and without waiting for the disk, and in an empty directory."""
    before, run_dir._git_commit = run_dir._git_commit, lambda: None
    fsync, os.fsync = os.fsync, lambda fd: None
    here = Path.cwd()
    os.chdir(tmp_path_factory.mktemp("empty"))
    yield
    assert not list(Path.cwd().iterdir())
    os.chdir(here)
    run_dir._git_commit, os.fsync = before, fsync


def files_in(directory):
    """{path: bytes} of all files in a directory, except the lock."""
    paths = [p for p in sorted(Path(directory).rglob("*")) if p.is_file() and p.name != ".lock"]
    return {str(p.relative_to(directory)): p.read_bytes() for p in paths}


# ------------------------------------------------------------------------------------------ damage


@st.composite
def damage(draw, data, others=()):
    """Bytes made of `data` by up to three flips, cuts, insertions, repetitions, replacements."""
    data = bytearray(data)
    for _ in range(draw(st.integers(1, 3))):
        kind = draw(st.sampled_from(["flip", "cut", "drop", "insert", "repeat", "zero", "swap"]))
        at = draw(st.integers(0, max(0, len(data) - 1)))
        n = draw(st.integers(1, 64))
        if kind == "flip" and data:
            data[at] ^= 1 << draw(st.integers(0, 7))
        elif kind == "cut":
            del data[at:]
        elif kind == "drop":
            del data[at : at + n]
        elif kind == "insert":
            data[at:at] = draw(st.binary(max_size=16))
        elif kind == "repeat":
            data[at:at] = data[at : at + n]
        elif kind == "zero":
            data[at : at + n] = bytes(len(data[at : at + n]))
        elif kind == "swap" and others:
            data = bytearray(draw(st.sampled_from(list(others))))
    return bytes(data)


# -------------------------------------------------------------------------------------------- JSON


@dataclasses.dataclass
class Config:
    value: object
    sizes: tuple = (64, 64)


class Plain:
    def __init__(self, value):
        self.value = value


class Rude:
    """Raises at every question."""

    def __getattr__(self, name):
        raise RuntimeError(name)

    def __repr__(self):
        raise RuntimeError("no")


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([1, -1]).map(lambda sign: sign * 10**5000),
    st.sampled_from([2**64, 1e308, -0.0, float("nan"), float("inf")]),
    st.floats(),
    st.text(),
    st.text(st.characters(categories=["Cs", "Cc"])),
    st.binary(max_size=8),
    st.complex_numbers(),
    st.builds(Rude),
    st.datetimes(),
    st.builds(np.float16, st.floats(width=16)),
    st.builds(np.float32, st.floats(width=32)),
    st.builds(np.longdouble, st.floats()),
    st.builds(np.uint64, st.integers(0, 2**64 - 1)),
    st.builds(np.str_, st.text()),
    st.sampled_from([np.timedelta64("NaT"), np.timedelta64(3, "s"), np.datetime64("NaT"), np.pi]),
    st.sampled_from([print, Config, np, lambda: 0, Path("a"), object(), ..., range(3)]),
    npst.arrays(npst.scalar_dtypes(), npst.array_shapes(min_dims=0, min_side=0, max_side=3)),
)
KEYS = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.tuples(st.text())


def object_array(value):
    array = np.empty(1, dtype=object)
    array[0] = [value]
    return array


def containers(inner):
    return st.one_of(
        st.lists(inner, max_size=4),
        st.tuples(inner, inner),
        st.dictionaries(KEYS, inner, max_size=4),
        st.builds(Config, inner),
        st.builds(Plain, inner),
        st.builds(object_array, inner),
    )


OBJECTS = st.recursive(SCALARS, containers, max_leaves=12)


@examples(250)
@given(OBJECTS, st.sampled_from(["", "cycle", "deep"]))
def test_convert_json_of_any_object(obj, twist):
    """Strict JSON that reads back as it was, and converts to itself."""
    if twist == "cycle":
        cycle = [obj]
        cycle += [{"again": cycle}, Plain(cycle)]
        obj = cycle
    for i in range(3000 if twist == "deep" else 0):
        obj = [obj] if i % 2 else {"a": obj}
    converted = convert_json(obj)
    assert json.loads(json.dumps(converted, allow_nan=False)) == converted
    assert convert_json(converted) == converted
    path = Path(tempfile.gettempdir(), f"fuzz_{os.getpid()}.json")
    write_json(path, {"object": obj})
    assert read_json(path) == convert_json({"object": obj})
    path.unlink()


@examples(150)
@given(st.data())
def test_read_json_of_any_bytes(data):
    """A dict or a ValueError that names the file."""
    valid = b'{"status": "running", "epoch": 3, "x": [1.5, null, "\\u00e9"]}'
    text = data.draw(damage(valid) | st.binary(max_size=40))
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "a.json")
        path.write_bytes(text)
        try:
            assert isinstance(read_json(path), dict)
        except ValueError as e:
            assert str(path) in str(e)


@examples(100)
@given(st.text() | st.text(st.characters(categories=["Cc", "Cs", "Zl", "Cf"])), st.integers(3, 50))
def test_printable_is_one_line(text, length):
    said = printable(text, length)
    assert len(said) <= length and (not said or said.isprintable())


# ------------------------------------------------------------------------------------------- names

NAMES = st.one_of(
    st.text(max_size=12),
    st.lists(
        st.sampled_from(["..", ".", "/", "\\", "~", "\0", "\n", "a", " ", "-", "é", "\ud800"]),
        max_size=6,
    ).map("".join),
    st.sampled_from(["a" * 200, "a" * 201, "é" * 101, "x" * 5000, "$HOME", "`id`", ".lock"]),
)


@examples(200)
@given(NAMES, NAMES, st.integers(0, 2**64), st.booleans())
def test_a_run_is_made_inside_data_dir_or_not_at_all(exp_name, env_id, seed, datestamp):
    with tempfile.TemporaryDirectory() as directory:
        data = Path(directory, "data")
        args = Args(env_id, exp_name, seed, str(data), datestamp)
        try:
            run = logger.start_run(args, "algos/some_script.py")
        except UsageError as e:
            assert str(e).isprintable()
            assert not list(Path(directory).iterdir())
            return
        run.close_lock()
        assert run.output_dir.parent.parent == data
        assert {p.name for p in Path(directory).iterdir()} == {"data"}
        assert {p.parent for p in data.glob("*/*/*")} == {run.output_dir}
        assert read_json(run.output_dir / "config.json")["exp_name"] == run.exp_name


# ------------------------------------------------------------------------------------------ sweeps

FAKE = ROOT / "tests" / "fake_script.py"
SWEEPS = [(ROOT / "sweeps" / name).read_text() for name in ("ppo.toml", "sac.toml")]
WORDS = st.text(max_size=8) | st.sampled_from(
    ["Hopper-v4", "auto", "../..", "tanh", "\0", "a/b", "/tmp", "~", "x" * 300, "fake*", str(FAKE)]
)
VALUES = st.recursive(
    st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=6,
)
TOP = st.sampled_from(["name", "script", "num_cpu", "workers", "data_dir", "params", "slurm"])
PARAMS = st.sampled_from(
    ["env_id", "seed", "gamma", "hidden_sizes", "alpha", "env_kwargs", "env_kwargs:a", "compile"]
)
LONG = st.fixed_dictionaries(
    {"vals": VALUES}, optional={"shorthand": WORDS, "in_name": VALUES, "scripts": VALUES}
)


def toml(value):
    """A value as TOML."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        escaped = (c if c.isascii() and c.isalnum() else f"\\U{ord(c):08x}" for c in value)
        return '"' + "".join(escaped) + '"'
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{toml(k)} = {toml(v)}" for k, v in value.items()) + "}"
    return repr(value)


@st.composite
def sweep_texts(draw):
    """A whole sweep with any keys and values, a real one with damage, or any text at all."""
    kind = draw(st.sampled_from(["built", "built", "damaged", "text"]))
    if kind == "text":
        return draw(st.text(st.sampled_from('[]{}=."\n#_-09aé\0\\ ') | st.characters())).encode(
            "utf-8", "surrogatepass"
        )
    if kind == "damaged":
        return draw(damage(draw(st.sampled_from(SWEEPS)).encode()))
    top = {"script": str(FAKE), **draw(st.dictionaries(TOP | WORDS, VALUES, max_size=3))}
    top["params"] = draw(st.dictionaries(PARAMS | WORDS, VALUES | LONG, max_size=4))
    return "\n".join(f"{toml(key)} = {toml(value)}" for key, value in top.items()).encode()


@examples(400)
@given(sweep_texts())
def test_any_sweep_is_planned_inside_data_dir_or_refused(text):
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "sweep.toml")
        path.write_bytes(text)
        try:
            sweep = grid.read_sweep(str(path))
            runs = grid.plan(sweep)
            [launch.place(run) for run in runs]
        except UsageError as e:
            assert str(e)
        else:
            inside = os.path.abspath(sweep.data_dir)
            for run in runs:
                assert os.path.dirname(os.path.dirname(os.path.abspath(run.directory))) == inside
                assert re.fullmatch(r"[\w.()-]+", run.directory.name, re.ASCII)
                assert all(isinstance(word, str) and "\0" not in word for word in run.flags())
            assert len({run.directory for run in runs}) == len(runs)
        assert [p.name for p in Path(directory).iterdir()] == ["sweep.toml"]


@examples(150)
@given(st.data())
def test_flags_of_any_script_are_read_or_refused(data):
    """A script is read, never imported: whatever its text, there are fields or one line."""
    source = FAKE.read_bytes()
    start = source.index(b"@dataclass")
    part = source[start : source.index(b"def parse_args")]
    text = data.draw(damage(part).map(lambda part: source[:start] + part) | st.binary(max_size=60))
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "script.py")
        path.write_bytes(text)
        try:
            fields = flags.read_fields(path)
        except UsageError as e:
            assert str(path) in str(e)
        else:
            assert all(isinstance(field, flags.Field) for field in fields.values())


# ------------------------------------------------------------------------------------- checkpoints


def state_of(epoch):
    rng = np.random.default_rng(epoch)
    return {"w": rng.normal(size=(3, 4)), "t": epoch, "steps": [np.int64(epoch), None, "é"]}


def journal_of(epoch):
    return {"count": epoch, "rows": np.full((2, 3), epoch, np.float32)}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Two checkpoints and a journal of three parts."""
    directory = tmp_path_factory.mktemp("saved")
    saver = Checkpointer(directory)
    for epoch in (1, 2, 3):
        saver.save(epoch, state_of(epoch), journal_of(epoch))
    return directory, files_in(directory)


def assert_is_epoch(loaded):
    """What `Checkpointer.load` returned is what was saved after that epoch, to the bit."""
    epoch, state, journal = loaded
    assert epoch in (2, 3)
    assert tree_to_bytes(state) == tree_to_bytes(tree_from_bytes(tree_to_bytes(state_of(epoch))))
    assert [part["count"] for part in journal] == list(range(1, epoch + 1))
    for part in journal:
        np.testing.assert_array_equal(part["rows"], journal_of(part["count"])["rows"])


def edited(manifest, where, value):
    """A manifest with one value changed, or left out; its checksum is left as it was."""
    manifest = copy.deepcopy(manifest)
    table = manifest["files"] if where in manifest["files"] else manifest
    table[where] = value
    if value == "gone":
        del table[where]
    return json.dumps(manifest).encode()


@examples(500)
@given(st.data())
def test_a_damaged_checkpoint_is_never_mistaken_for_another(saved, capsys, data):
    """It loads what was saved, or what was saved before it, or CheckpointError is raised."""
    original, contents = saved
    with tempfile.TemporaryDirectory() as directory:
        directory = Path(directory, "checkpoint")
        shutil.copytree(original, directory)
        for _ in range(data.draw(st.integers(1, 2))):
            name = data.draw(st.sampled_from(sorted(contents)))
            if name.endswith("manifest.json") and data.draw(st.booleans()):
                manifest = json.loads(contents[name])
                where = data.draw(st.sampled_from([*manifest, *manifest["files"]]))
                values = st.sampled_from(["gone", None, 0, 1, 2, 3, [], {}, "a" * 64])
                hurt = edited(manifest, where, data.draw(values))
            else:
                hurt = data.draw(damage(contents[name], contents.values()))
            (directory / name).write_bytes(hurt)
        try:
            assert_is_epoch(Checkpointer(directory).load())
        except CheckpointError as e:
            assert "no usable checkpoint" in str(e) or "ranks" in str(e)
    capsys.readouterr()


@examples(200)
@given(st.data())
def test_bytes_that_are_no_tree(data):
    valid = tree_to_bytes({"a": [np.ones(3), {"b": "text"}], "c": None})
    try:
        tree_from_bytes(data.draw(damage(valid) | st.binary(max_size=200)))
    except ValueError as e:
        assert printable(e)


# ------------------------------------------------------------------------------------------ policy


def policy_bytes():
    rng, file = np.random.default_rng(0), io.BytesIO()
    arrays = {"activation": "tanh", "distribution": "gaussian", "epoch": 7}
    arrays |= {"weight_0": rng.normal(size=(3, 4)), "bias_0": rng.normal(size=4)}
    arrays |= {"weight_1": rng.normal(size=(4, 2)), "bias_1": rng.normal(size=2)}
    arrays |= {"log_std": np.zeros(2), "act_low": -np.ones(2), "act_high": np.ones(2)}
    floats = {k: np.float32(v) if isinstance(v, np.ndarray) else v for k, v in arrays.items()}
    np.savez(file, **floats)
    return file.getvalue()


POLICY = policy_bytes()
HEADERS = st.builds(
    "{{'descr': {}, 'fortran_order': {}, 'shape': {}, }}".format,
    st.sampled_from(["'<f4'", "'|O'", "'<U0'", "'|V0'", "'<f8'", "[('a', '<f4')]", "'<M8[s]'"]),
    st.sampled_from(["False", "True", "1", "None"]),
    st.lists(st.sampled_from([0, 1, 2, 3, -1, 2**40, 2**63, 10**30]), max_size=3).map(tuple),
)
MEMBERS = st.tuples(
    st.sampled_from(["x.npy", "weight_0.npy", "activation.npy", "layers.npy", "x", "../x.npy"]),
    HEADERS,
    st.binary(max_size=64),
    st.sampled_from([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA]),
)


def archive_of(members, base):
    file = io.BytesIO(base)
    with zipfile.ZipFile(file, "a" if base else "w") as archive:
        for name, header, content, compression in members:
            head = header.encode() + b"\n"
            npy = b"\x93NUMPY\1\0" + struct.pack("<H", len(head)) + head + content
            archive.writestr(name, npy, compression)
    return file.getvalue()


@examples(300)
@given(st.data())
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_any_policy_file_is_the_one_saved_or_refused(data):
    """Damage never changes a policy unnoticed, and no file takes memory that it has not itself."""
    made = st.builds(archive_of, st.lists(MEMBERS, max_size=3), st.sampled_from([b"", POLICY]))
    built = data.draw(st.booleans())
    content = data.draw(made) if built else data.draw(damage(POLICY) | st.binary(max_size=200))
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "policy.npz")
        path.write_bytes(content)
        tracemalloc.start()
        try:
            policy = tp.read_policy(path)
        except UsageError as e:
            assert "is no policy" in str(e)
            policy = None
        finally:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        assert peak < 2**20
    if policy is not None:
        expected = read_npz(io.BytesIO(POLICY))
        layers = [(expected[f"weight_{i}"], expected[f"bias_{i}"]) for i in range(2)]
        for mine, theirs in zip(policy["layers"], layers, strict=True):
            np.testing.assert_array_equal(mine[0], theirs[0])
            np.testing.assert_array_equal(mine[1], theirs[1])
        assert policy["epoch"] == 7 and policy["activation"] == "tanh"


ARRAYS = npst.arrays(
    st.sampled_from(["<f4", "<f8", "<i8", "|b1", "|u1", "<f2", "<U3"]),
    npst.array_shapes(min_dims=0, min_side=0, max_dims=4),
)


@examples(100)
@given(st.dictionaries(st.text("abc_0", min_size=1, max_size=4), ARRAYS, max_size=4), st.booleans())
def test_arrays_round_trip(arrays, fortran):
    """What np.savez writes of plain arrays comes back as np.load has it, in its order, writable."""
    arrays = {k: np.asfortranarray(v) if fortran else v for k, v in arrays.items()}
    file = io.BytesIO()
    np.savez(file, **arrays)
    loaded = read_npz(file)
    assert list(loaded) == list(arrays)
    file.seek(0)
    for name, array in np.load(file, allow_pickle=False).items():
        mine = loaded[name]
        assert mine.dtype == array.dtype and mine.shape == array.shape and mine.flags.writeable
        assert mine.flags.f_contiguous == array.flags.f_contiguous
        assert mine.tobytes() == array.tobytes()


# ------------------------------------------------------------------------------- a run's text files


@pytest.fixture(scope="module")
def run_on_disk(tmp_path_factory):
    """A run of three rows, the last of them after the newest checkpoint."""
    run = logger.start_run(Args(data_dir=str(tmp_path_factory.mktemp("run")), exp_name="r"), "x.py")
    for epoch in range(3):
        run.log_tabular("Epoch", epoch)
        run.log_tabular("AverageEpRet", 10.5 * epoch)
        run.log_tabular("TotalEnvInteracts", 100 * (epoch + 1))
        run.log_tabular("Time", 1.0)
        run.dump_tabular()
        if epoch < 2:
            run.save_state({"weights": [(np.ones((2, 3)), np.zeros(3))]}, {"w": np.ones(3)})
    run.close_lock()
    return run.output_dir


@examples(300)
@given(st.data())
def test_a_run_with_damaged_files_is_resumed_or_left_alone(run_on_disk, capsys, data):
    """Refused, with not a byte changed, or taken up after the newest checkpoint."""
    names = ["config.json", "status.json", "progress.txt"]
    contents = {name: (run_on_disk / name).read_bytes() for name in names}
    name = data.draw(st.sampled_from(names))
    hurt = data.draw(damage(contents[name], contents.values()) | st.binary(max_size=60))
    with tempfile.TemporaryDirectory() as directory:
        target = Path(directory, "r", "r_s3")
        shutil.copytree(run_on_disk, target)
        (target / name).write_bytes(hurt)
        before = files_in(directory)
        args = Args(data_dir=directory, exp_name="r", resume=True, epochs=5)
        run = None
        try:
            run = logger.start_run(args, "x.py")
            before = {**before, **dict.fromkeys(("config.json", "status.json"))}
            epoch, state, _ = run.load_state()
        except UsageError as e:
            assert str(e).isprintable()
            after = files_in(directory)
            assert after.keys() == {k for k in before if before[k] is not None}
            assert after["r/r_s3/progress.txt"] == before["r/r_s3/progress.txt"]
            if run is None:
                assert after == before
        else:
            assert epoch == 2 and state["w"].tolist() == [1, 1, 1]
            rows = (target / "progress.txt").read_bytes().splitlines()
            assert len(rows) == 3
            if name != "progress.txt":
                assert b"\n".join(rows) + b"\n" == b"".join(
                    contents["progress.txt"].splitlines(keepends=True)[:3]
                )
        finally:
            if run:
                run.close_lock()
                if run.events:
                    run.events.close()
    capsys.readouterr()


@examples(150)
@given(st.data())
def test_a_damaged_run_keeps_no_other_from_being_plotted(run_on_disk, capsys, data):
    """Nor from being counted by grid.py's overview."""
    with tempfile.TemporaryDirectory() as directory:
        for name in ("good", "bad"):
            shutil.copytree(run_on_disk, Path(directory, name, f"{name}_s0"))
        target = Path(directory, "bad", "bad_s0")
        for name in ("config.json", "status.json", "progress.txt"):
            content = (target / name).read_bytes()
            (target / name).write_bytes(data.draw(damage(content) | st.binary(max_size=60)))
        datasets = plot.get_datasets(directory)
        good = [d for d in datasets if d.attrs["run_dir"].endswith("good_s0")]
        assert len(good) == 1 and good[0]["AverageEpRet"].tolist() == [0, 10.5, 21]
        for curve in plot.collect_curves(datasets, "TotalEnvInteracts", "Performance"):
            assert curve.attrs["label"].isprintable()
        run = launch.Run("x.py", "bad", 0, {}, {}, 1, directory)
        word, detail = launch.status(run)
        assert word in ("finished", "interrupted", "failed", "too short")
        assert detail == "" or detail.isprintable()
        launch.read_progress(run)
        changed = launch.place(run)
        assert changed == "" or changed.isprintable()
    capsys.readouterr()
