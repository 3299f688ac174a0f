"""Hostile files and names: refused in one line, never executed, nothing lost, nothing made outside.

A pickle, a bomb, damage or a link wherever the project reads, and each program that reads there:
a script with --resume, test_policy.py, plot.py and grid.py.
"""

import functools
import io
import json
import os
import shutil
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, Planted, contents, load_script, read_status, run, run_dir

from benchmark import flags, grid, launch, plot, slurm
from benchmark import test_policy as tp
from common import UsageError, logger
from common.args import parse_args
from common.checkpoint import Checkpointer, CheckpointError

FAKE = ROOT / "tests" / "fake_script.py"
FLAGS = ["--env-id", "CartPole-v1", "--steps-per-epoch", "200", "--train-pi-iters", "2"]
FLAGS += ["--train-v-iters", "2", "--save-freq", "1", "--exp-name", "run"]


@pytest.fixture(scope="module")
def torch_run(tmp_path_factory):
    """The data directory of a run of two epochs, with everything that a run leaves."""
    data = tmp_path_factory.mktemp("torch")
    module = ppo()
    module.train(parse_args(module.Args, [*FLAGS, "--epochs", "2", "--data-dir", str(data)]))
    return data


def copy(data, tmp_path):
    """A copy of a data directory, and the run in it."""
    target = tmp_path / "data"
    shutil.copytree(data, target)
    return target, run_dir(target, "run")


@functools.cache
def ppo():
    return load_script("ppo_torch")


def resume(data, *flags, epochs=3):
    """`ppo_torch.py --resume`, in this process: what main() turns into a line and exit code 2."""
    words = [*FLAGS, "--data-dir", str(data), "--epochs", str(epochs), "--resume", *flags]
    return ppo().train(parse_args(ppo().Args, words))


def stopped(call, *args):
    """Call a program's main(); returns its exit code."""
    with pytest.raises(SystemExit) as e:
        call(list(map(str, args)))
    return e.value.code


def assert_one_line(said, program):
    assert said.startswith(f"{program}: error: ") and said.count("\n") == 1, said
    assert said.strip().isprintable()


# ----------------------------------------------------------------------------------------- pickles


OUTCOMES = {
    "config.json": "config.json is damaged",
    "progress.txt": "progress.txt is damaged",
    "status.json": None,
    "policy.npz": None,
    ".lock": None,
    "torch_save/model.pt": None,
    "checkpoint/epoch_000002/rank_0.npz": None,
    "checkpoint/*/rank_0.npz": "no usable checkpoint",
}


@pytest.mark.parametrize("name", OUTCOMES)
def test_a_pickle_under_one_name_of_a_run(torch_run, tmp_path, name, planted):
    """Refused, and nothing changed; or not needed, and the run goes on to the right end."""
    data, directory = copy(torch_run, tmp_path)
    for path in directory.glob(name):
        path.write_bytes(planted)
    before = contents(directory)
    if OUTCOMES[name]:
        with pytest.raises(UsageError, match=OUTCOMES[name]):
            resume(data)
        after = contents(directory)
        assert all(after[k] == before[k] for k in before if k not in ("config.json", "status.json"))
        assert name != "config.json" or after == before
    else:
        assert resume(data)
        assert len((directory / "progress.txt").read_text().splitlines()) == 4
        tp.read_policy(directory / "policy.npz")


def npz_of(data, compression=zipfile.ZIP_STORED):
    """An archive of one array, as bytes."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as archive:
        archive.writestr("array_0.npy", data)
    return file.getvalue()


def test_a_pickle_in_a_checkpoint_with_the_right_checksums(tmp_path, planted):
    """An object array, where checksums are those of the forged file; other arrays do load."""
    Checkpointer(tmp_path).save(1, {"w": np.zeros(2)})
    path = tmp_path / "epoch_000001" / "rank_0.npz"
    outline = np.load(path)["outline"]
    for array, good in ((np.ones(3), True), (np.array([Planted()]), False)):
        np.savez(path, outline=outline, array_0=array)
        if good:
            assert Checkpointer(tmp_path).load()[1]["w"].tolist() == [1, 1, 1]
        else:
            with pytest.raises(CheckpointError, match="no usable checkpoint"):
                Checkpointer(tmp_path).load()


def test_pickles_for_the_plotter_the_tester_and_the_sweep(torch_run, tmp_path, capsys, planted):
    """Every file of a run is a pickle, and so is the sweep: a line each."""
    data, directory = copy(torch_run, tmp_path)
    for path in directory.rglob("*"):
        if path.is_file():
            path.write_bytes(planted)
    (directory / "launch.log").write_bytes(planted)
    before = contents(tmp_path)
    assert stopped(tp.main, directory) == 2
    assert_one_line(capsys.readouterr().err, "test_policy.py")
    assert stopped(plot.main, data, "--out", tmp_path / "x.png") == 2
    first, second = capsys.readouterr().err.splitlines(keepends=True)
    assert "left out" in first
    assert_one_line(second, "plot.py")
    words = [ROOT / "algos" / "ppo_torch.py", "--name", "run", "--data-dir", data]
    assert stopped(grid.main, *words) == 1
    said = capsys.readouterr()
    assert "failed before" in said.out and "config.json is damaged" in said.out and not said.err
    Path(tmp_path, "sweep.toml").write_bytes(planted)
    assert stopped(grid.main, tmp_path / "sweep.toml") == 2
    assert_one_line(capsys.readouterr().err, "grid.py")
    Path(tmp_path, "sweep.toml").unlink()
    Path(tmp_path, "script.py").write_bytes(planted)
    assert stopped(grid.main, tmp_path / "script.py") == 2
    assert_one_line(capsys.readouterr().err, "grid.py")
    Path(tmp_path, "script.py").unlink()
    assert contents(tmp_path) == before


# ------------------------------------------------------------------------------------------- bombs


def header(shape, dtype="<f4"):
    text = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\1\0" + struct.pack("<H", len(text)) + text


def claiming(data, size):
    """An archive whose directory claims another size of its last member."""
    data, at = bytearray(data), data.rindex(b"PK\1\2")
    data[at + 20 : at + 28] = struct.pack("<LL", size, size)
    return bytes(data)


def test_bombs_are_refused_before_memory_is_taken(tmp_path):
    """By what reads policies and checkpoints, within 32 MiB for all of them."""
    zeros = header((20_000_000,)) + bytes(80_000_000)
    deflated, npy = npz_of(zeros, zipfile.ZIP_DEFLATED), header((2**31,)) + bytes(64)
    made = {
        "deflated": deflated,
        "deflated, its sizes made alike": claiming(deflated, 2**32 - 2),
        "claims 4 GB": claiming(npz_of(npy), 2**32 - 2),
        "shape of 8 GiB": npz_of(npy),
        "shape of 4 TB": npz_of(header((10**12,)) + bytes(64)),
        "shape that wraps around": npz_of(header((2**32, 2**32)) + bytes(64)),
        "negative shape": npz_of(header((-4, -4)) + bytes(64)),
        "huge item": npz_of(header((), "<U500000000")),
        "long header": npz_of(b"\x93NUMPY\2\0\xff\xff\xff\xff" + bytes(100)),
    }
    for name, data in made.items():
        (tmp_path / name).write_bytes(data)
    source = f"""
import resource, sys
sys.path.insert(0, {str(ROOT)!r})
from common.serialization import read_npz
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for path in sys.argv[1:]:
    try:
        print(read_npz(path))
    except ValueError as e:
        print("refused:", e)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    words = [sys.executable, "-c", source, *(tmp_path / name for name in made)]
    done = subprocess.run(words, capture_output=True, text=True)
    said = done.stdout.splitlines()
    assert len(said) == len(made) + 1, done.stderr
    assert all(line.startswith("refused: ") for line in said[:-1]), said
    assert int(said[-1]) < 32 * 1024


# ------------------------------------------------------------------------------------------ damage

RUBBISH = {
    "empty": b"",
    "cut": b'{"status": "fin',
    "not UTF-8": b"\xff\xfe\x00{",
    "list": b"[1, 2]",
    "number": b"3",
    "null": b"null",
    "other": b'{"x": 1}',
    "types": b'{"status": 3, "epoch": "two", "env_id": 5, "versions": [], "exp_name": {}}',
    "NaN": b'{"status": "finished", "epoch": NaN, "epochs": NaN, "versions": NaN}',
    "unknown": b'{"status": "fknished", "epoch": 2, "epochs": 2, "error": null}',
    "deep": b"[" * 100_000,
    "long integer": b"1" * 10_000,
    "directory": None,
}


def damage(path, kind):
    path.unlink()
    path.mkdir() if RUBBISH[kind] is None else path.write_bytes(RUBBISH[kind])


@pytest.mark.parametrize("kind", RUBBISH)
def test_a_damaged_config_is_refused_everywhere(torch_run, tmp_path, capsys, kind):
    data, directory = copy(torch_run, tmp_path)
    shutil.copytree(directory, tmp_path / "data" / "good" / "good_s0")
    damage(directory / "config.json", kind)
    before = contents(directory)
    with pytest.raises(UsageError, match=r"config\.json"):
        resume(data)
    capsys.readouterr()
    assert stopped(tp.main, directory) == 2
    assert_one_line(capsys.readouterr().err, "test_policy.py")
    plot.main([str(data), "--csv", str(tmp_path / "x.csv")])
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1 and str(directory) in said[0]  # the other run is plotted
    words = [ROOT / "algos" / "ppo_torch.py", "--name", "run", "--data-dir", data]
    assert stopped(grid.main, *words, "--dry-run") == 0
    out = capsys.readouterr()
    assert "Traceback" not in out.err + out.out
    assert contents(directory) == before


@pytest.mark.parametrize("kind", RUBBISH)
def test_a_damaged_status(torch_run, tmp_path, capsys, kind):
    """With a checkpoint the run goes on, and says so; without one its table is left as it is."""
    data, directory = copy(torch_run, tmp_path)
    damage(directory / "status.json", kind)
    script = flags.find(ROOT / "algos" / "ppo_torch.py")
    run_of_grid = launch.Run(script, "run", 0, {}, {}, 1, str(data))
    assert launch.status(run_of_grid)[0] == "interrupted"
    shutil.copytree(data, tmp_path / "bare")
    bare = run_dir(tmp_path / "bare", "run")
    if kind != "directory":
        assert resume(data)
        assert "WARNING" in capsys.readouterr().out
        assert len((directory / "progress.txt").read_text().splitlines()) == 4
        assert read_status(directory)["status"] == "finished"
    shutil.rmtree(bare / "checkpoint")
    before = contents(bare)
    with pytest.raises(UsageError, match=r"status\.json"):
        resume(tmp_path / "bare")
    assert contents(bare) == before


def test_an_error_in_status_is_one_line_of_the_summary(tmp_path):
    run_of_grid = launch.Run(flags.find(FAKE), "run", 0, {}, {}, 1, str(tmp_path))
    run_of_grid.directory.mkdir(parents=True)
    error = {"status": "failed", "epoch": 1, "error": "a\nb\x1b[31m\ud800" * 1000}
    for name in ("config.json", "status.json"):
        (run_of_grid.directory / name).write_text(json.dumps(error))
    word, detail = launch.status(run_of_grid)
    assert word == "failed" and detail.isprintable() and len(detail) <= 300


def test_a_script_that_cannot_be_read(tmp_path, capsys):
    """A line, however long the script."""
    for source in ("class Args:\n    x: int = " + 5000 * "(", "\0", "class Args:"):
        (tmp_path / "script.py").write_text(source)
        assert stopped(grid.main, tmp_path / "script.py") == 2
        assert_one_line(capsys.readouterr().err, "grid.py")


TABLES = {
    "empty": b"",
    "cut": b"Epoch\tAverageEpRet\tTotalEnvInteracts\n0\t1",
    "not UTF-8": b"Epoch\tAverageEpRet\tTotalEnvInteracts\n0\t\xff\t200\n1\t2\t400\n",
    "ragged": b"Epoch\tAverageEpRet\tTotalEnvInteracts\n0\t1\t200\n1\t2\n",
    "words": b"Epoch\tAverageEpRet\tTotalEnvInteracts\n0\tmany\t200\n1\t2\t400\n",
    "infinite": b"Epoch\tAverageEpRet\tTotalEnvInteracts\n0\t1\t200\n1\t2\tinf\n",
    "directory": None,
}


@pytest.mark.parametrize("kind", TABLES)
def test_a_damaged_table(torch_run, tmp_path, capsys, kind):
    """--resume leaves it as it is; plot.py leaves that run out and plots the other."""
    data, directory = copy(torch_run, tmp_path)
    shutil.copytree(directory, tmp_path / "data" / "good" / "good_s0")
    path = directory / "progress.txt"
    path.unlink()
    path.mkdir() if TABLES[kind] is None else path.write_bytes(TABLES[kind])
    before = contents(directory)
    with pytest.raises(UsageError, match=r"progress\.txt"):
        resume(data)
    after = contents(directory)
    assert all(after[k] == before[k] for k in before if k not in ("config.json", "status.json"))
    capsys.readouterr()
    plot.main([str(data), "--csv", str(tmp_path / "x.csv")])
    said = capsys.readouterr().err.splitlines()
    assert len(said) <= 1 and ",run," in (tmp_path / "x.csv").read_text()
    assert kind == "infinite" or str(directory) in said[0]
    launch.read_progress(launch.Run(flags.find(FAKE), "run", 0, {}, {}, 1, str(data)))


def test_missing_files_of_a_run(torch_run, tmp_path):
    """A table without a config, or without a status and checkpoints, is not begun anew."""
    data, directory = copy(torch_run, tmp_path)
    (directory / "config.json").rename(tmp_path / "config.json")
    before = contents(directory)
    with pytest.raises(UsageError, match=r"config\.json is missing"):
        resume(data)
    (tmp_path / "config.json").rename(directory / "config.json")
    (directory / "status.json").unlink()
    shutil.rmtree(directory / "checkpoint")
    with pytest.raises(UsageError, match=r"status\.json is missing, and there is no checkpoint"):
        resume(data)
    del before["status.json"]
    assert (directory / "progress.txt").read_bytes() == before["progress.txt"]


def test_config_cannot_make_test_policy_raise(torch_run, tmp_path, capsys):
    """Values of the right type that no environment can be made of."""
    _, directory = copy(torch_run, tmp_path)
    config = json.loads((directory / "config.json").read_text())
    for change in (
        {"env_id": "\ud800\n\x1b[31m"},
        {"env_id": "nowhere:CartPole-v1"},
        {"env_id": "x" * 10_000},
        {"env_id": ""},
        {"env_kwargs": {"max_episode_steps": "many"}},
        {"env_kwargs": {"no_such": 1}},
        {"env_kwargs": [1]},
        {"max_ep_len": "long"},
        {"max_ep_len": -1},
        {"max_ep_len": 1e400},
    ):
        (directory / "config.json").write_text(json.dumps({**config, **change}))
        assert stopped(tp.main, directory, "--episodes", 1) == 2, change
        assert_one_line(capsys.readouterr().err, "test_policy.py")
    script = {"script": ["\ud800", "\x1b[31m"]}
    (directory / "config.json").write_text(json.dumps({**config, **script}))
    tp.main([str(directory), "--episodes", "1"])


def test_names_and_numbers_cannot_stop_a_plot(torch_run, tmp_path, capsys):
    """Names that mean something to Matplotlib or a terminal, and numbers at the end of floats."""
    data, directory = copy(torch_run, tmp_path)
    names = ["$\\frac{$", "_hidden", "\ud800", "\x1b[31mred\nline", "x" * 10_000, "", "$HOME", "__"]
    for i, name in enumerate(names):
        target = tmp_path / "data" / f"odd{i}" / "r"
        shutil.copytree(directory, target)
        config = json.loads((target / "config.json").read_text())
        config |= {"exp_name": name, "env_id": name, "script": [name]}
        (target / "config.json").write_text(json.dumps(config))
        if i >= 5:
            table = "Epoch\tAverageEpRet\tTotalEnvInteracts\n0\t1e308\t-1e308\n1\t-1e308\t1e308\n"
            (target / "progress.txt").write_text(table)
    out = tmp_path / "x.png"
    plot.main([str(data), "--out", str(out), "--reference"])
    assert out.stat().st_size > 10_000
    capsys.readouterr()
    plot.main([str(tmp_path / "data" / "odd1"), "--out", str(out)])
    said = capsys.readouterr()
    assert (said.out + said.err).replace("\n", "").isprintable()


# --------------------------------------------------------------------------------- names and links

BAD_NAMES = ["..", ".", "../up", "/abs", "a/b", "a/../..", "a\nb", "a\x1b[31m", "\udcff"]
BAD_NAMES += ["x" * 201, "é" * 150, "a\u202eb", "x" * 5000]


def test_names_cannot_leave_data_dir(tmp_path, monkeypatch, capsys):
    """--exp-name of a script and --name of a sweep: one line, nothing made."""
    monkeypatch.chdir(tmp_path)
    module = ppo()
    for name in BAD_NAMES:
        words = [*FLAGS[:-2], "--exp-name", name, "--data-dir", "data"]
        with pytest.raises(UsageError) as e:
            module.train(parse_args(module.Args, words))
        assert str(e.value).isprintable() and len(str(e.value)) < 500
        assert stopped(grid.main, FAKE, "--name", name, "--epochs", "1") == 2
        assert_one_line(capsys.readouterr().err, "grid.py")
    assert not os.listdir()
    result = run("ppo_torch", *FLAGS[:-2], "--exp-name", "..", cwd=tmp_path, check=False)
    assert result.returncode == 2 and result.stderr.count("\n") == 1
    assert not os.listdir()


def toml(text):
    return json.dumps(text, ensure_ascii=True)


def test_a_sweep_cannot_leave_data_dir(tmp_path, monkeypatch, capsys):
    """Its name, scripts, environments, patterns, shorthands: refused, or a name without teeth."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch, "start", lambda *_: pytest.fail("launched"))
    Path("data").mkdir()
    teeth = ["..", "../../up", "/etc/passwd", "a\nb", "a/../../b", "~root", "x" * 5000]
    texts = [f"name = {toml(t)}\nscript = {toml(str(FAKE))}" for t in teeth]
    texts += [f"script = {toml(t)}" for t in [*teeth, "", ".", "/", "/dev/zero", "/proc/kcore"]]
    top = f'name = "s"\nscript = {toml(str(FAKE))}\n'
    texts += [f"{top}[params]\nenv_id = [{toml(t)}, 'b']" for t in [*teeth, "a\0b"]]
    texts += [f"{top}[params]\nexp_name = {toml(t)}" for t in teeth]
    texts += [f"{top}[params]\ndata_dir = {toml(t)}" for t in teeth]
    texts += [f"{top}[params]\nseed = [{toml(t)}]" for t in teeth]
    texts += [f"{top}[params.gamma]\nvals = [0, 1]\nscripts = [{toml(t)}]" for t in teeth]
    texts += [f"{top}[params.gamma]\nvals = [0, 1]\nshorthand = {toml(t)}" for t in teeth]
    texts += [f"data_dir = {toml(t)}\n{top}" for t in ["a\0b", "x" * 5000, "x/" * 3000]]
    refused = 0
    for text in texts:
        Path("sweep.toml").write_text(text)
        code = stopped(grid.main, "sweep.toml", "--dry-run")
        said = capsys.readouterr()
        if code == 2:
            refused += 1
            assert_one_line(said.err, "grid.py")
        else:
            assert code == 0
            for line in said.out.splitlines():
                where = line.removeprefix("# ").split(":")[0]
                if line.startswith("# "):
                    assert os.path.abspath(where).startswith(str(tmp_path / "data" / "s"))
    assert refused > len(texts) / 2
    assert sorted(os.listdir()) == ["data", "sweep.toml"] and not os.listdir("data")


LINKS = ["run", "run/run_s0", "run/run_s0/progress.txt", "run/run_s0/config.json"]
LINKS += ["run/run_s0/.lock", "run/run_s0/checkpoint", "run/run_s0/checkpoint/journal"]
LINKS += ["run/run_s0/torch_save", "run/run_s0/policy.npz"]


@pytest.mark.parametrize("link", LINKS)
def test_links_cannot_lead_out_of_data_dir(torch_run, tmp_path, link):
    """A link in place of a file or directory of a run: refused, and what it points to is intact."""
    data, _ = copy(torch_run, tmp_path)
    (tmp_path / "data" / "run" / "run_s0" / "checkpoint" / "journal").mkdir(exist_ok=True)
    outside = tmp_path / "outside"
    (data / link).rename(outside)
    (data / link).symlink_to(outside)
    lock = outside if link.endswith(".lock") else None
    before = (contents(tmp_path), lock and lock.read_bytes())
    for words in (["--resume"], ["--overwrite"]):
        flags = [*FLAGS, "--data-dir", str(data), "--epochs", "3", *words]
        with pytest.raises(UsageError, match=r"link|no plain"):
            ppo().train(parse_args(ppo().Args, flags))
        assert (contents(tmp_path), lock and lock.read_bytes()) == before


@pytest.mark.parametrize("link", ["s", "s/s_s0", "s/s_s0/launch.log", "slurm_s"])
def test_links_cannot_lead_a_sweep_out_of_data_dir(tmp_path, monkeypatch, capsys, link):
    monkeypatch.chdir(tmp_path)
    Path("outside").mkdir()
    Path("data", link).parent.mkdir(parents=True)
    target = tmp_path / "outside" / ("log" if link.endswith("log") else "")
    Path("data", link).symlink_to(target)
    words = [FAKE, "--name", "s", "--epochs", "1"]
    if link.startswith("slurm"):
        monkeypatch.setattr(slurm, "_slurm", lambda *_: "")
        words.append("--slurm")
    assert stopped(grid.main, *words) == 2
    said = capsys.readouterr().err
    assert_one_line(said, "grid.py")
    assert "symbolic link" in said and not os.listdir("outside")


def test_data_dir_itself_may_be_a_link(tmp_path):
    """To a larger disk, say: that is the user's own choice."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "data").symlink_to(tmp_path / "disk")
    made = logger.setup_logger_kwargs("run", 0, str(tmp_path / "data"))
    logger.EpochLogger(**made).close_lock()
    assert (tmp_path / "disk" / "run" / "run_s0").is_dir()
