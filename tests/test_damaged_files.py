"""Damaged files, pickles and bad names: what was saved comes back, or one line refuses it.

The damage is drawn by Hypothesis, the same and little in every run; `pytest -m slow` draws ten
times as much, and anew each time.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from conftest import FAKE, ROOT, Args, Buffer, contents
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from benchmark import flags, grid, launch, plot
from benchmark import test_policy as tp
from common import UsageError, logger
from common.serialization import convert_json

TIMES = int(os.environ.get("FUZZ", "1"))


def examples(n):
    """Settings of a test of `n` examples."""
    quick = {"phases": [Phase.generate], "deadline": None}  # to shrink what fails takes minutes
    quick |= {"database": None, "suppress_health_check": list(HealthCheck)}
    return settings(max_examples=n * TIMES, derandomize=TIMES == 1, **quick)


@pytest.fixture(autouse=True, scope="module")
def quick(tmp_path_factory):
    """In an empty directory, and without waiting for the disk."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda fd: None)
        patch.chdir(tmp_path_factory.mktemp("empty"))
        yield


@pytest.fixture(scope="module")
def run_on_disk(tmp_path_factory):
    """A run of three rows, the last of them after the newest checkpoint."""
    run = logger.start_run(Args(data_dir=str(tmp_path_factory.mktemp("run")), exp_name="r"), "x.py")
    policy = {"weights": [(np.ones((3, 4)), np.ones(4)), (np.ones((4, 2)), np.ones(2))]}
    policy |= {"distribution": "gaussian", "activation": "tanh", "log_std": np.zeros(2)}
    policy |= {"act_low": -np.ones(2), "act_high": np.ones(2)}
    for epoch in (1, 2, 3):
        run.log_tabular("Epoch", epoch - 1)
        run.log_tabular("AverageEpRet", 10.5 * epoch)
        run.log_tabular("TotalEnvInteracts", 100 * epoch)
        run.log_tabular("Time", 1.0)
        run.dump_tabular()
        if epoch < 3:
            run.save_state(dict(policy), {"w": np.full(3, epoch)}, Buffer(4, 3 * epoch))
    run.close_lock()
    return run.output_dir


def copy(run_on_disk, data_dir, name="r"):
    return Path(shutil.copytree(run_on_disk, Path(data_dir, name, f"{name}_s3")))


def resume(data_dir, **more):
    """(state, epoch, replay buffer) that a run with --resume starts from."""
    args = Args(**{"data_dir": str(data_dir), "exp_name": "r", "resume": True, "epochs": 5} | more)
    run, buffer = logger.start_run(args, "x.py"), Buffer(4)
    try:
        return run.load_state(buffer), run.epoch, buffer
    finally:
        run.close_lock()


# Damage -------------------------------------------------------------------------------------------


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
    hurt = rng.sample(names, rng.randint(1, 2))
    with tempfile.TemporaryDirectory() as directory:
        target = copy(run_on_disk, directory)
        for name in hurt:
            (target / name).unlink()
            others = [files[other] for other in names if Path(other).suffix == Path(name).suffix]
            if rng.random() < 0.9:
                (target / name).write_bytes(damaged(rng, files[name], others))
        before = contents(target)
        try:
            state, epoch, buffer = resume(directory)
        except UsageError as e:
            assert str(e).isprintable() and len(str(e)) < 1000
            assert contents(target) == before
        else:
            assert epoch in (1, 2) and (state["w"] == epoch).all()
            assert buffer.count == 3 * epoch and (buffer.data == Buffer(4, 3 * epoch).data).all()
            if "progress.txt" not in hurt:
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
        run = launch.Run(flags.find(FAKE), "bad", 3, {}, {}, 1, directory)
        word, detail = launch.status(run)
        assert word in ("finished", "interrupted", "failed", "another run")
        assert detail == "" or detail.isprintable()
        launch.read_progress(run)
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


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary()
SCALARS |= npst.arrays(npst.scalar_dtypes(), npst.array_shapes(min_dims=0, min_side=0, max_side=3))
SCALARS |= st.sampled_from(["\ud800", np.float16("nan"), print, Path, Path("a"), 1j, ...])
KEYS = st.none() | st.floats() | st.text()


@examples(25)
@given(st.recursive(SCALARS, lambda x: st.lists(x) | st.tuples(x, x) | st.dictionaries(KEYS, x)))
def test_any_configuration_is_strict_json(obj):
    """That reads back as it was, and converts to itself."""
    converted = convert_json(obj)
    assert json.loads(json.dumps(converted, allow_nan=False)) == converted
    assert convert_json(converted) == converted


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
            inside = Path(sweep.data_dir).absolute()
            assert all(run.directory.absolute().parents[1] == inside for run in runs)
            assert all(re.fullmatch(r"[\w.()-]+", run.directory.name, re.ASCII) for run in runs)
            assert len({run.directory for run in runs}) == len(runs)
        assert [p.name for p in Path(directory).iterdir()] == ["sweep.toml"]


@pytest.mark.slow
def test_in_bulk():
    """All of the above with ten times the examples, drawn anew."""
    words = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-m", "not slow", __file__]
    done = subprocess.run(words, env={**os.environ, "FUZZ": "10"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-10_000:]


# Pickles, bombs, names, links ---------------------------------------------------------------------


def one_line(capsys, main, *words):
    """What a program of benchmark/ says on stderr as it refuses."""
    with pytest.raises(SystemExit) as stopped:
        main([str(word) for word in words])
    said = capsys.readouterr().err
    assert stopped.value.code == 2 and re.match(r"\w+\.py: error: ", said.splitlines()[-1])
    assert said.replace("\n", "").isprintable()
    return said


@pytest.mark.parametrize(
    "name, word",
    [
        ("config.json", "config.json is damaged"),
        ("progress.txt", "progress.txt is damaged"),
        ("checkpoint/*/rank_0.npz", "no usable checkpoint"),
        ("[!cp]*", None),  # status.json: the checkpoints say where the run stands
    ],
)
def test_a_pickle_is_never_loaded(run_on_disk, tmp_path, planted, name, word):
    for path in copy(run_on_disk, tmp_path).glob(name):
        path.write_bytes(planted)
    if word is None:
        assert resume(tmp_path)[1] == 2
    else:
        with pytest.raises(UsageError, match=word):
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


def test_a_bomb_is_refused_before_it_fills_the_memory(tmp_path):
    np.savez_compressed(tmp_path / "policy.npz", weight_0=np.zeros(10**7))
    tracemalloc.start()
    with pytest.raises(UsageError, match="is no policy"):
        tp.read_policy(tmp_path / "policy.npz")
    assert tracemalloc.get_traced_memory()[1] < 10**6
    tracemalloc.stop()


NAMES = ["..", "../up", "/abs", "a/b", "a\nb", "a\x1b[31m", "\udcff", "x" * 201]


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_names_cannot_leave_data_dir(tmp_path, monkeypatch, capsys, name):
    """--exp-name of a script and --name of a sweep: one line, nothing made."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError) as e:
        logger.start_run(Args(exp_name=name), "x.py")
    assert str(e.value).isprintable() and len(str(e.value)) < 500
    assert one_line(capsys, grid.main, FAKE, "--name", name, "--epochs", 1).count("\n") == 1
    assert not os.listdir()


@pytest.mark.parametrize("link", ["r", "r/r_s3/progress.txt", "r/r_s3/checkpoint"])
def test_links_cannot_lead_out_of_data_dir(run_on_disk, tmp_path, link):
    """What they point to stays as it is. `data_dir` itself may be a link, to a larger disk, say."""
    data = tmp_path / "data"
    data.symlink_to(tmp_path / "disk")
    copy(run_on_disk, tmp_path / "disk")
    assert resume(data)[1] == 2
    (data / link).rename(tmp_path / "outside")
    (data / link).symlink_to(tmp_path / "outside")
    before = contents(tmp_path)
    for words in ({}, {"resume": False, "overwrite": True}):
        with pytest.raises(UsageError, match=r"link|no plain"):
            resume(data, **words)
    assert contents(tmp_path) == before
