"""Whatever lies in a file, or is asked for: the right answer or a refusal, nothing in between.

The examples are the same in every run, and few; `FUZZ=10 pytest tests/test_fuzz.py` tries ten times
as many, and new ones each time. The last test does that.
"""

import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, Args, contents
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
    assert {path.name for path in Path.cwd().iterdir()} <= {".hypothesis"}  # its tables of Unicode
    os.chdir(here)
    run_dir._git_commit, os.fsync = before, fsync


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


class Plain:
    def __init__(self, value):
        self.value = value


SCALARS = st.one_of(
    st.none() | st.booleans() | st.integers() | st.floats() | st.binary(max_size=8),
    st.text() | st.text(st.characters(categories=["Cs", "Cc"])),
    st.sampled_from([2**64, -0.0, np.float16("nan"), np.datetime64("NaT"), np.str_("a")]),
    st.sampled_from([print, Plain, np, lambda: 0, Path("a"), object(), ..., 1j]),
    npst.arrays(npst.scalar_dtypes(), npst.array_shapes(min_dims=0, min_side=0, max_side=3)),
)
OBJECTS = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4) | st.tuples(inner, inner) | st.builds(Plain, inner),
        st.dictionaries(st.none() | st.floats() | st.text(), inner),
    ),
    max_leaves=12,
)


@examples(25)
@given(OBJECTS)
def test_convert_json_of_any_object(obj):
    """Strict JSON that reads back as it was, and converts to itself."""
    converted = convert_json(obj)
    assert json.loads(json.dumps(converted, allow_nan=False)) == converted
    assert convert_json(converted) == converted
    with tempfile.TemporaryDirectory() as directory:
        write_json(Path(directory, "a.json"), {"object": obj})
        assert read_json(Path(directory, "a.json")) == convert_json({"object": obj})


@examples(15)
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


@examples(10)
@given(st.text() | st.text(st.characters(categories=["Cc", "Cs", "Zl", "Cf"])), st.integers(3, 50))
def test_printable_is_one_line(text, length):
    said = printable(text, length)
    assert len(said) <= length and (not said or said.isprintable())


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


@examples(40)
@given(sweep_texts())
def test_any_sweep_is_planned_inside_data_dir_or_refused(text):
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "sweep.toml")
        path.write_bytes(text)
        try:
            sweep = grid.read_sweep(str(path))
            runs = grid.plan(sweep)
        except UsageError as e:
            assert str(e)
        else:
            inside = os.path.abspath(sweep.data_dir)
            for run in runs:
                assert os.path.dirname(os.path.dirname(os.path.abspath(run.directory))) == inside
                assert re.fullmatch(r"[\w.()-]+", run.directory.name, re.ASCII)
                assert all(
                    isinstance(word, str) and "\0" not in word for word in run.thunk.command(run)
                )
            assert len({run.directory for run in runs}) == len(runs)
        assert [p.name for p in Path(directory).iterdir()] == ["sweep.toml"]


# ------------------------------------------------------------------------------------- checkpoints


def state_of(epoch):
    rng = np.random.default_rng(epoch)
    return {"w": rng.normal(size=(3, 4)), "t": epoch, "steps": [np.int64(epoch), None, "é"]}


class Buffer:
    """A replay buffer of four rows after `count` transitions."""

    def __init__(self, count=0):
        self.data, self.count = np.zeros((4, 1), np.float32), count
        for i in range(count):
            self.data[i % 4] = i


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Two checkpoints and a journal of three parts."""
    directory = tmp_path_factory.mktemp("saved")
    saver = Checkpointer(directory)
    for epoch in (1, 2, 3):
        saver.save(epoch, state_of(epoch), Buffer(2 * epoch))
    return directory, contents(directory)


def assert_is_epoch(epoch, state, buffer):
    """What `Checkpointer.load` returned is what was saved after that epoch, to the bit."""
    assert epoch in (2, 3)
    assert tree_to_bytes(state) == tree_to_bytes(tree_from_bytes(tree_to_bytes(state_of(epoch))))
    assert buffer.count == 2 * epoch and (buffer.data == Buffer(2 * epoch).data).all()


@examples(50)
@given(st.data())
def test_a_damaged_checkpoint_is_never_mistaken_for_another(saved, capsys, data):
    """It loads what was saved, or what was saved before it, or CheckpointError is raised."""
    original, files = saved
    with tempfile.TemporaryDirectory() as directory:
        directory = Path(directory, "checkpoint")
        shutil.copytree(original, directory)
        for _ in range(data.draw(st.integers(1, 2))):
            name = data.draw(st.sampled_from(sorted(files)))
            (directory / name).write_bytes(data.draw(damage(files[name], files.values())))
        try:
            buffer = Buffer()
            assert_is_epoch(*Checkpointer(directory).load(buffer), buffer)
        except CheckpointError as e:
            assert "no usable checkpoint" in str(e)
    capsys.readouterr()


@examples(20)
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
    arrays = {"weight_0": rng.normal(size=(3, 4)), "bias_0": rng.normal(size=4)}
    arrays |= {"weight_1": rng.normal(size=(4, 2)), "bias_1": rng.normal(size=2)}
    arrays |= {"log_std": np.zeros(2), "act_low": -np.ones(2), "act_high": np.ones(2)}
    arrays = {key: x.astype(np.float32) for key, x in arrays.items()}
    np.savez(file, **arrays, activation="tanh", distribution="gaussian", epoch=7)
    return file.getvalue()


POLICY = policy_bytes()


@examples(30)
@given(st.data())
def test_any_policy_file_is_the_one_saved_or_refused(data):
    """Damage never changes a policy unnoticed."""
    content = data.draw(damage(POLICY) | st.binary(max_size=200))
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "policy.npz")
        path.write_bytes(content)
        try:
            policy = tp.read_policy(path)
        except UsageError as e:
            assert "is no policy" in str(e)
            return
    expected = read_npz(io.BytesIO(POLICY))
    for i, (W, b) in enumerate(policy["layers"]):
        np.testing.assert_array_equal(W, expected[f"weight_{i}"])
        np.testing.assert_array_equal(b, expected[f"bias_{i}"])
    assert len(policy["layers"]) == 2
    assert policy["epoch"] == 7 and policy["activation"] == "tanh"


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


@examples(30)
@given(st.data())
def test_a_run_with_damaged_files_is_resumed_or_left_alone(run_on_disk, capsys, data):
    """Refused, with not a byte changed, or taken up after the newest checkpoint."""
    names = ["config.json", "status.json", "progress.txt"]
    originals = {name: (run_on_disk / name).read_bytes() for name in names}
    name = data.draw(st.sampled_from(names))
    hurt = data.draw(damage(originals[name], originals.values()) | st.binary(max_size=60))
    with tempfile.TemporaryDirectory() as directory:
        target = Path(directory, "r", "r_s3")
        shutil.copytree(run_on_disk, target)
        (target / name).write_bytes(hurt)
        before = contents(directory)
        args = Args(data_dir=directory, exp_name="r", resume=True, epochs=5)
        run = None
        try:
            run = logger.start_run(args, "x.py")
            before = {**before, **dict.fromkeys(("config.json", "status.json"))}
            state = run.load_state()
        except UsageError as e:
            assert str(e).isprintable()
            after = contents(directory)
            assert after.keys() == {k for k in before if before[k] is not None}
            assert after["r/r_s3/progress.txt"] == before["r/r_s3/progress.txt"]
            if run is None:
                assert after == before
        else:
            assert run.epoch == 2 and state["w"].tolist() == [1, 1, 1]
            rows = (target / "progress.txt").read_bytes().splitlines()
            assert len(rows) == 3
            if name != "progress.txt":
                assert b"\n".join(rows) + b"\n" == b"".join(
                    originals["progress.txt"].splitlines(keepends=True)[:3]
                )
        finally:
            if run:
                run.close_lock()
    capsys.readouterr()


@examples(15)
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
        run = launch.Run(flags.find(FAKE), "bad", 0, {}, {}, 1, directory)
        word, detail = launch.status(run)
        assert word in ("finished", "interrupted", "failed", "another run")
        assert detail == "" or detail.isprintable()
        launch.read_progress(run)
    capsys.readouterr()


@pytest.mark.slow
def test_in_bulk():
    """All of the above with ten times the examples, drawn anew."""
    words = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-m", "not slow", __file__]
    done = subprocess.run(words, env={**os.environ, "FUZZ": "10"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-10_000:]
