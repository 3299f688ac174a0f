"""Files and checkpoints: written whole or not at all, read without trust.

What was saved comes back, or one line refuses it. The damage is drawn by Hypothesis, the same in
every run; `pytest -m slow` draws ten times as much, and with more than that, as in
`FUZZ=50 pytest tests/test_files.py`, it is drawn anew each time.
"""

import dataclasses
import io
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
from conftest import FAKE, ROOT, Args, Buffer, Planted, contents, flip_a_bit, mpi, truncate
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from benchmark import grid, launch, plot
from benchmark import test_policy as tp
from benchmark.reading import read_json, read_npz
from common import UsageError, run
from common.files import convert_json, write_atomically, write_json, write_npz
from common.logger import EpochLogger

TIMES = int(os.environ.get("FUZZ", "1"))


def examples(n):
    """Settings of a test of `n` examples."""
    quick = {"phases": [Phase.generate], "deadline": None}  # to shrink what fails takes minutes
    quick |= {"database": None, "suppress_health_check": list(HealthCheck)}
    return settings(max_examples=n * TIMES, derandomize=TIMES <= 10, **quick)


@pytest.fixture(autouse=True, scope="module")
def quick(tmp_path_factory):
    """In an empty directory, and without waiting for the disk."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda fd: None)
        patch.chdir(tmp_path_factory.mktemp("empty"))
        yield


# JSON, atomic writes, .npz ------------------------------------------------------------------------


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
        ([np.float32, np.ndarray], ["float32", "ndarray"]),
        (1j, "1j"),
        (object(), "<object object>"),
        (Path("a") / "b", "a/b"),
        ({1: 2, 0.5: 3, None: {4}}, {"1": 2, "0.5": 3, "None": [4]}),
    ]
    for obj, expected in cases:
        assert convert_json(obj) == expected


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary()
SCALARS |= npst.arrays(npst.scalar_dtypes(), npst.array_shapes(min_dims=0, min_side=0, max_side=3))
SCALARS |= st.sampled_from([np.float16("nan"), print, Path, Path("a"), 1j, ...])
KEYS = st.none() | st.floats() | st.text()


@examples(25)
@given(st.recursive(SCALARS, lambda x: st.lists(x) | st.tuples(x, x) | st.dictionaries(KEYS, x)))
def test_any_configuration_is_strict_json(obj):
    """That reads back as it was, and converts to itself."""
    converted = convert_json(obj)
    assert json.loads(json.dumps(converted, allow_nan=False)) == converted
    assert convert_json(converted) == converted


def test_write_json(tmp_path):
    write_json(tmp_path / "a.json", {"é": float("nan")})
    assert read_json(tmp_path / "a.json")["é"] is None
    (tmp_path / "b.json").write_text("{")
    with pytest.raises(ValueError, match=r"b\.json is damaged"):
        read_json(tmp_path / "b.json")


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    """And a new one is on the disk, whole, before it takes the old one's place."""
    path, sizes = tmp_path / "file", []
    monkeypatch.setattr(os, "fsync", lambda fd: sizes.append(os.fstat(fd).st_size))
    write_atomically(path, lambda f: f.write(b"old"))
    assert sizes == [3]

    def fail(f):
        f.write(b"half of the new")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_atomically(path, fail)
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


def npz(**arrays):
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


def member(data):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("weight_0.npy", data)
    return file.getvalue()


def test_arrays_come_back(tmp_path):
    """Names with slashes, dtypes, shapes without elements or dimensions included."""
    arrays = {"a/b/w": np.arange(6.0).reshape(2, 3), "name": np.array("tanh"), "n": np.array(7)}
    arrays |= {"empty": np.zeros((2, 0), bool), "nan": np.float32([[1, np.nan]])}
    write_npz(tmp_path / "a.npz", arrays)
    assert repr(read_npz(tmp_path / "a.npz")) == repr(arrays)


SHORT = b"\x93NUMPY\1\0\x46\0{'descr': '<f4', 'fortran_order': False, 'shape': (9,), }     \n"
REFUSED = {
    "pickle in an array": lambda planted: npz(w=np.array([Planted()], dtype=object)),
    "pickle": lambda planted: planted,
    "pickle in an archive": member,
    "text": lambda planted: member(b"no array"),
    "cut": lambda planted: npz(w=np.ones(6))[:-9],
    "empty": lambda planted: b"",
    # Another shape, with which NumPy reads a part of the array and misses the checksum.
    "other shape": lambda planted: npz(w=np.zeros(9000)).replace(b"(9000,)", b"(1000,)"),
    "short": lambda planted: member(SHORT),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_anything_else_is_refused(tmp_path, planted, kind):
    path = tmp_path / "policy.npz"
    path.write_bytes(REFUSED[kind](planted))
    with pytest.raises(ValueError, match=r"\w"):
        read_npz(path)
    with pytest.raises(UsageError, match="is no policy"):
        tp.read_policy(path)


# Checkpoints --------------------------------------------------------------------------------------


class Part:
    """A part of a run's state."""

    def __init__(self, w=0.0):
        self.w = np.full(3, w)

    def state_dict(self):
        return {"w": self.w}

    def load_state_dict(self, arrays):
        self.w = arrays["w"]


def resumed(directory, epochs=9, part=None, buffer=None):
    """A logger on a run that goes on, if there is one, and the epoch that it goes on from."""
    logger = EpochLogger(directory, resume=True)
    logger.save_config({"epochs": epochs})
    try:
        return logger, logger.load_state({"part": part or Part()}, buffer)
    except UsageError:
        logger.release()
        raise


def epoch(logger, part, buffer=None):
    """One epoch of a run, saved."""
    logger.log_tabular("Epoch", logger.epoch)
    logger.dump_tabular()
    logger.save_state({"part": part}, {"w": part.w}, buffer=buffer)


def test_the_last_two_are_kept(tmp_path):
    """Without the last, the run goes on from the one before; without both, it is refused."""
    logger, _ = resumed(tmp_path)
    for i in (1, 2, 3):
        epoch(logger, Part(i))
    logger.release()
    for left in (3, 2):
        part = Part()
        logger, n = resumed(tmp_path, part=part)
        logger.release()
        assert n == left and part.w.tolist() == [n, n, n]
        names = ["checkpoint.npz", "checkpoint_previous.npz"][3 - left :]
        assert sorted(path.name for path in tmp_path.glob("check*")) == names
        (tmp_path / names[0]).unlink()
    with pytest.raises(UsageError, match=r"without checkpoint\.npz: .*--overwrite replaces it"):
        resumed(tmp_path)


@pytest.mark.parametrize("name", ["checkpoint", "progress.txt"])
def test_a_checkpoint_of_an_older_version(tmp_path, name):
    """Or of another program, which keeps only a table: it is not written over."""
    (tmp_path / name).touch()
    with pytest.raises(UsageError, match="it cannot be resumed"):
        resumed(tmp_path)


@pytest.mark.parametrize("damage", [flip_a_bit, truncate])
def test_damage_is_noticed(tmp_path, damage):
    """The line says what to do; once it is done, the run goes on from the checkpoint before."""
    logger, _ = resumed(tmp_path)
    for i in (1, 2):
        epoch(logger, Part(i))
    logger.release()
    damage(tmp_path / "checkpoint.npz")
    before = contents(tmp_path)
    text = r"checkpoint.npz is damaged \(.*\); delete it, and --resume goes on from checkpoint_prev"
    with pytest.raises(UsageError, match=text):
        resumed(tmp_path)
    assert contents(tmp_path) == before
    (tmp_path / "checkpoint.npz").unlink()
    logger, n = resumed(tmp_path)
    logger.release()
    assert n == 1


class Others(Part):
    """A part with another array, or with one that NumPy would broadcast to."""

    def __init__(self, name, shape):
        self.name, self.w = name, np.zeros(shape)

    def state_dict(self):
        return {self.name: self.w}


def test_a_checkpoint_of_another_program(tmp_path):
    """Names and shapes are those of the run that goes on, to the letter; nothing is changed."""
    logger, _ = resumed(tmp_path)
    buffer = Buffer(5, 2)
    epoch(logger, Part(), buffer)
    logger.release()
    before = contents(tmp_path)
    wide = Buffer(5)
    wide.data = np.zeros((5, 3))
    for part, other in ((Others("v", 3), buffer), (Others("w", (2, 3)), buffer), (Part(), wide)):
        with pytest.raises(UsageError, match=r"checkpoint has no \w+/\w that fits"):
            resumed(tmp_path, part=part, buffer=other)
    assert contents(tmp_path) == before
    path = tmp_path / "checkpoint.npz"
    head, name, tail = path.read_bytes().rpartition(b"buffer/0")  # its entry in the zip's directory
    path.write_bytes(head + b"buffer/2" + tail)
    with pytest.raises(UsageError, match="checkpoint has no buffer/0 that fits"):
        resumed(tmp_path, buffer=buffer)
    path.write_bytes(head + name + tail)
    resumed(tmp_path, buffer=buffer)[0].release()


@pytest.mark.parametrize("steps", [[3, 3, 3, 3, 3, 3], [4, 0, 10, 1], [25, 7, 7], [10, 10, 1, 30]])
def test_the_replay_buffer_comes_back(tmp_path, steps):
    """Row by row, whether it was full or not; every save is by a new process."""
    whole = Buffer(10)
    for i, n in enumerate(steps):
        buffer = Buffer(10)
        logger, done = resumed(tmp_path, buffer=buffer)
        assert done == i and buffer.count == whole.count
        np.testing.assert_array_equal(buffer.data, whole.data)
        buffer.store(n)
        whole.store(n)
        epoch(logger, Part(), buffer)
        logger.release()


def test_a_finished_run_keeps_no_buffer(tmp_path):
    """Nor the checkpoint before the last: it can be opened again, and not be made longer."""
    logger, _ = resumed(tmp_path, 2)
    for i in (1, 2):
        epoch(logger, Part(i), Buffer(5, 3))
    assert logger.close()
    assert [path.name for path in tmp_path.glob("check*")] == ["checkpoint.npz"]
    assert not [name for name in read_npz(tmp_path / "checkpoint.npz") if "buffer" in name]
    before = contents(tmp_path)
    logger, n = resumed(tmp_path, 2, buffer=Buffer(5))
    assert n == 2 and logger.close() and contents(tmp_path) == before
    with pytest.raises(UsageError, match="it is finished, and its replay buffer is gone"):
        resumed(tmp_path, 3, buffer=Buffer(5))
    assert contents(tmp_path) == before


def test_several_ranks(tmp_path):
    """Each gets its own replay buffer back, and rank 0's state: a warning says what is different.
    Buffers that do not hold as much are refused."""
    source = """
import numpy as np
from conftest import Buffer
from common.mpi import proc_id, reduce
from test_files import Part, epoch, resumed
for i in range(3):
    part, buffer = Part(), Buffer(4)
    logger, n = resumed("run", part=part, buffer=buffer)
    assert n == i and part.w.tolist() == [n] * 3
    saved = Buffer(4, 3)
    saved.data[:3] *= proc_id() + 1
    assert i == 0 or (buffer.count == 3 and (buffer.data == saved.data).all())
    epoch(logger, Part(i + 1), saved)
    logger.release()
    reduce(0)  # until rank 0 has written
logger, _ = resumed("run", part=part)
epoch(logger, Part(proc_id()), saved)
try:
    epoch(logger, Part(), Buffer(4, 3 + proc_id()))
except ValueError:
    print("all well", flush=True)
"""
    said = mpi(tmp_path, source, 2, cwd=tmp_path).stdout
    assert said.count("all well") == 2
    assert said.count("WARNING") == said.count("WARNING: the ranks have different part/w\n") == 1


# Damage -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run_on_disk(tmp_path_factory):
    """A run of three rows, the last of them after the newest checkpoint."""
    args = Args(data_dir=str(tmp_path_factory.mktemp("run")), exp_name="r", epochs=5)
    logger = run.start(args, "x.py")
    policy = {"weights": [(np.ones((3, 4)), np.ones(4)), (np.ones((4, 2)), np.ones(2))]}
    policy |= {"distribution": "gaussian", "activation": "tanh", "log_std": np.zeros(2)}
    policy |= {"act_low": -np.ones(2), "act_high": np.ones(2)}
    part, buffer = Part(), Buffer(4)
    logger.load_state({"part": part}, buffer)
    for epoch in (1, 2, 3):
        logger.log_tabular("Epoch", epoch - 1)
        logger.log_tabular("AverageEpRet", 10.5 * epoch)
        logger.log_tabular("TotalEnvInteracts", 100 * epoch)
        logger.log_tabular("Time", 1.0)
        logger.dump_tabular()
        if epoch < 3:
            part.w = np.full(3, epoch)
            buffer.store(3)
            logger.save_state({"part": part}, policy, buffer=buffer)
    logger.release()
    return logger.output_dir


def copy(run_on_disk, data_dir, name="r"):
    return Path(shutil.copytree(run_on_disk, Path(data_dir, name, f"{name}_s3")))


def resume(data_dir):
    """(weights, epoch, replay buffer) that a run with --resume starts from."""
    args = Args(data_dir=str(data_dir), exp_name="r", resume=True, epochs=5)
    logger, part, buffer = run.start(args, "x.py"), Part(), Buffer(4)
    try:
        epoch = logger.load_state({"part": part}, buffer)
        return part.w, epoch, buffer
    finally:
        logger.release()


RANDOM = st.randoms(use_true_random=True)  # random.Random(seed), which a failure names


def damaged(rng, data, others=()):
    """Bytes made of `data` or of another file by up to three flips, cuts, insertions or zeros."""
    data = bytearray(rng.choice([data, data, *others]))
    for kind in rng.choices(["flip", "cut", "drop", "insert", "zero"], k=rng.randint(0, 3)):
        at, n = rng.randint(0, len(data)), rng.randint(1, 64)
        if kind == "flip":
            data[at : at + 1] = bytes(x ^ 1 << n % 8 for x in data[at : at + 1])
        elif kind == "cut":
            del data[at:]
        elif kind == "drop":
            del data[at : at + n]
        elif kind == "insert":
            data[at:at] = rng.randbytes(n)
        else:
            data[at : at + n] = bytes(len(data[at : at + n]))
    return bytes(data)


@examples(60)
@given(RANDOM)
def test_a_damaged_run_is_resumed_or_left_alone(run_on_disk, capsys, rng):
    """From what was saved, to the bit; or refused, all files as they were."""
    files = contents(run_on_disk)
    names = [name for name in files if re.search(r"json|progress|checkpoint", name)]
    hurt = rng.sample(names, rng.randint(1, 3))
    with tempfile.TemporaryDirectory() as directory:
        target = copy(run_on_disk, directory)
        for name in hurt:
            (target / name).unlink()
            others = [files[other] for other in names if Path(other).suffix == Path(name).suffix]
            if rng.random() < 0.9:
                (target / name).write_bytes(damaged(rng, files[name], others))
        before = contents(target)
        try:
            w, epoch, buffer = resume(directory)
        except UsageError as e:
            assert any("checkpoint" in name for name in hurt) and "checkpoint" in str(e)
            assert contents(target) == before
        else:
            assert epoch in (1, 2) and (w == epoch).all()
            assert buffer.count == 3 * epoch and (buffer.data == Buffer(4, 3 * epoch).data).all()
            rows = files["progress.txt"].splitlines(keepends=True)
            assert (target / "progress.txt").read_bytes() == b"".join(rows[: epoch + 1])
    capsys.readouterr()


@examples(15)
@given(RANDOM)
def test_a_damaged_run_keeps_no_other_from_being_plotted(run_on_disk, capsys, rng):
    """Nor from being counted by grid.py's overview."""
    with tempfile.TemporaryDirectory() as directory:
        copy(run_on_disk, directory, "good")
        target = copy(run_on_disk, directory, "bad")
        for name in ("config.json", "status.json", "progress.txt"):
            (target / name).write_bytes(damaged(rng, (target / name).read_bytes()))
        datasets = plot.get_datasets(directory)
        good = [d for d in datasets if d.attrs["run_dir"].endswith("good_s3")]
        assert len(good) == 1 and good[0]["AverageEpRet"].tolist() == [10.5, 21, 31.5]
        for curve in plot.collect_curves(datasets, "TotalEnvInteracts", "Performance"):
            assert curve.attrs["label"].isprintable()
        found = launch.Run(target, [], {})
        word, detail = launch.status(found)
        assert word in ("finished", "interrupted", "failed", "another run")
        assert detail == "" or detail.isprintable()
        assert all(word.isprintable() for word in launch.progress_words(found))
    capsys.readouterr()


@examples(30)
@given(RANDOM)
def test_a_damaged_policy_is_the_one_saved_or_refused(run_on_disk, rng):
    path = run_on_disk / "policy.npz"
    with tempfile.TemporaryDirectory() as directory:
        other = Path(directory, "policy.npz")
        other.write_bytes(damaged(rng, path.read_bytes()))
        try:
            np.testing.assert_equal(tp.read_policy(other), tp.read_policy(path))
        except UsageError as e:
            assert "is no policy" in str(e)


# Sweeps -------------------------------------------------------------------------------------------

WORDS = st.text(max_size=8) | st.sampled_from(
    ["../..", "\0", "a/b", "/tmp", "~", "x" * 300, "fake*"]
)
VALUES = st.recursive(
    st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | WORDS | st.just("Hopper-v4"),
    lambda x: st.lists(x, max_size=3) | st.dictionaries(WORDS, x, max_size=3),
    max_leaves=6,
)
LONG = {"shorthand": WORDS, "in_name": st.booleans(), "scripts": VALUES}
LONG = st.fixed_dictionaries({"vals": VALUES}, optional=LONG)
TOP = st.sampled_from(["name", "script", "num_cpu", "workers", "data_dir", "slurm"])
PARAMS = st.sampled_from(["env_id", "seed", "gamma", "hidden_sizes", "alpha", "env_kwargs:a"])


@st.composite
def sweeps(draw):
    """A sweep with any keys and values, or a real one with damage."""
    if draw(st.booleans()):
        return damaged(draw(RANDOM), (ROOT / "sweeps" / "sac.toml").read_bytes())
    top = {"script": str(FAKE), **draw(st.dictionaries(TOP | WORDS, VALUES | WORDS, max_size=3))}
    top["params"] = draw(st.dictionaries(PARAMS | WORDS, VALUES | LONG, max_size=4))
    lines = (json.dumps({key: value}, separators=(", ", " = "))[1:-1] for key, value in top.items())
    return "\n".join(lines).encode()


@examples(40)
@given(sweeps())
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
            inside = Path(sweep.options.data_dir).absolute()
            assert all(run.directory.absolute().parents[1] == inside for run in runs)
            assert all(re.fullmatch(r"[\w.()-]+", run.directory.name, re.ASCII) for run in runs)
            assert len({run.directory for run in runs}) == len(runs)
        assert [p.name for p in Path(directory).iterdir()] == ["sweep.toml"]


@pytest.mark.slow
def test_in_bulk():
    """All of the above with ten times the examples."""
    words = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-m", "not slow", __file__]
    done = subprocess.run(words, env={**os.environ, "FUZZ": "10"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-10_000:]


# Pickles, names ---------------------------------------------------------------------------------


def one_line(capsys, main, *words):
    """What a program of benchmark/ says on stderr as it refuses."""
    with pytest.raises(SystemExit) as stopped:
        main([str(word) for word in words])
    said = capsys.readouterr().err
    assert stopped.value.code == 2 and re.match(r"\w+\.py: error: ", said.splitlines()[-1])
    assert said.replace("\n", "").isprintable()
    return said


def test_a_pickle_is_never_loaded(run_on_disk, tmp_path, planted):
    """In place of the checkpoint it is refused; all else of a run is written anew from that."""
    target = copy(run_on_disk, tmp_path)
    for name in ("config.json", "progress.txt", "status.json", "policy.npz"):
        (target / name).write_bytes(planted)
    assert resume(tmp_path)[1] == 2
    assert (target / "progress.txt").read_text().count("\n") == 3
    (target / "checkpoint.npz").write_bytes(planted)
    with pytest.raises(UsageError, match=r"checkpoint\.npz is damaged"):
        resume(tmp_path)


def test_pickles_for_the_programs(run_on_disk, tmp_path, planted, capsys):
    """Every file of a run is a pickle, and so are a sweep and a script: a line each."""
    target = copy(run_on_disk, tmp_path)
    files = [target / name for name in contents(target)]
    for path in (*files, tmp_path / "sweep.toml", tmp_path / "script.py"):
        path.write_bytes(planted)
    assert one_line(capsys, tp.main, target).count("\n") == 1
    assert "left out" in one_line(capsys, plot.main, tmp_path, "--out", "x.png")
    for name in ("sweep.toml", "script.py"):
        assert one_line(capsys, grid.main, tmp_path / name).count("\n") == 1


@pytest.mark.parametrize("name", ["..", "../up", "/abs", "a/b", "a\0b", "x" * 256], ids=ascii)
def test_names_cannot_leave_data_dir(tmp_path, monkeypatch, capsys, name):
    """--exp-name of a script and --name of a sweep: one line, nothing made."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"--exp-name must be a plain name|cannot write to"):
        run.start(Args(exp_name=name), "x.py")
    assert one_line(capsys, grid.main, FAKE, "--name", name, "--epochs", 1).count("\n") == 1
    assert not list(Path().rglob("*/*"))
