"""benchmark/grid.py: names, checks, and what becomes of runs that end well, fail, or are killed.

The runs are those of tests/fake_script.py, which takes milliseconds; one test is of a real script.
"""

import json
import os
import pickle
import pty
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from benchmark import flags, grid, launch
from common import UsageError

FAKE = ROOT / "tests" / "fake_script.py"
GRID = ROOT / "benchmark" / "grid.py"


def write_sweep(path, params="", top=""):
    # An absolute data_dir: every process of the sweep names it in its command line.
    top = f'name = "sweep"\nscript = "{FAKE}"\ndata_dir = "{path.parent / "data"}"\n{top}'
    path.write_text(f"{top}\n[params]\n{params}\n")
    return path


def run_grid(cwd, *args, **kwargs):
    return subprocess.run(
        [sys.executable, str(GRID), *map(str, args)],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=120,
        **kwargs,
    )


def start_grid(cwd, *args):
    return subprocess.Popen(
        [sys.executable, str(GRID), *map(str, args)],
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def wait_until(condition, seconds=30):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def processes_of(directory):
    """Processes whose command line names a directory."""
    listing = subprocess.run(["ps", "-Aww", "-o", "pid=,args="], capture_output=True, text=True)
    return [line for line in listing.stdout.splitlines() if str(directory) in line]


def progress(run_dir, without_time=True):
    rows = [line.split("\t") for line in (run_dir / "progress.txt").read_text().splitlines()]
    return [row[:-1] for row in rows] if without_time else rows


def status(run_dir):
    return json.loads((run_dir / "status.json").read_text())["status"]


# ------------------------------------------------------------------------------------------- names


def test_valid_str_is_spinning_ups():
    assert grid.valid_str("HalfCheetah-v4") == "halfcheetah-v4"
    assert grid.valid_str([64, (32, "A b")]) == "64-32-a-b"
    assert grid.valid_str(0.1) == "0-1"
    assert grid.valid_str(1e-5) == "1e-05"
    assert grid.valid_str(print) == "print"
    assert grid.valid_str("../Ä(x)") == "----(x)"


def test_default_shorthand():
    assert grid.default_shorthand("env_id") == "env"
    assert grid.default_shorthand("ac_kwargs:hidden_sizes") == "ac-hid"


def test_variants_and_their_names():
    g = grid.ExperimentGrid("ppo")
    g.add("env_id", ["Hopper-v4", "Ant-v4"])
    g.add("env_kwargs:reset_noise_scale", [0.1, 0.2])
    g.add("hidden_sizes", [[32], [64, 64]], shorthand="hid")
    g.add("compile", [True, False])
    g.add("gamma", 0.9, in_name=True)
    g.add("lam", 0.95)
    g.add("seed", [0, 1])
    variants = g.variants()
    assert len(variants) == len(g) == 32
    first = {
        "env_id": "Hopper-v4",
        "env_kwargs": {"reset_noise_scale": 0.1},
        "hidden_sizes": [32],
        "compile": True,
        "gamma": 0.9,
        "lam": 0.95,
        "seed": 0,
    }
    assert variants[0] == first
    assert variants[1] == {**first, "seed": 1}
    assert variants[-1]["env_id"] == "Ant-v4" and variants[-1]["compile"] is False
    assert g.variant_name(variants[0]) == "ppo_envhopper-v4_env-res0-1_hid32_com_gam0-9"
    assert g.variant_name(variants[1]) == g.variant_name(variants[0])
    assert g.variant_name(variants[-1]) == "ppo_envant-v4_env-res0-2_hid64-64_gam0-9"


def test_print_counts_variants(capsys):
    g = grid.ExperimentGrid("ppo")
    g.add("env_id", ["Hopper-v4", "Ant-v4"])
    g.add("seed", [0, 1, 2])
    g.print()
    text = capsys.readouterr().out
    assert "ExperimentGrid [ppo]" in text and "Hopper-v4  Ant-v4" in text
    assert re.search(r"Variants, counting seeds: +6\n", text)
    assert re.search(r"Variants, not counting seeds: +2\n", text)


@pytest.mark.parametrize("key", ["env_kwargs", "env_kwargs:a", "env_kwargs:a:b"])
def test_a_key_cannot_reach_into_another(key):
    g = grid.ExperimentGrid("x")
    g.add("env_kwargs:a", [1])
    with pytest.raises(ValueError, match="env_kwargs:a"):
        g.add(key, [2])


# ------------------------------------------------------------------------------------------- flags


SCRIPTS = sorted((ROOT / "algos").glob("*.py"))


@pytest.fixture(scope="module")
def true_defaults():
    """{script name: {flag: default}}, by importing all scripts, in one process of its own."""
    code = """
import dataclasses, importlib.util, json, pathlib, sys
truth = {}
for path in map(pathlib.Path, sys.argv[1:]):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    truth[path.name] = dataclasses.asdict(module.Args())
print(json.dumps(truth))
"""
    words = [sys.executable, "-c", code, *SCRIPTS]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda p: p.name)
def test_flags_read_from_the_source_are_those_of_the_script(script, true_defaults):
    """Name, default and type of every flag, against the dataclass itself."""
    truth = true_defaults[script.name]
    fields = flags.read_fields(script)
    assert {name: json.loads(json.dumps(f.default)) for name, f in fields.items()} == truth
    for name, f in fields.items():
        assert f.has_default and "any" not in f.kinds, name
        f.check(truth[name])
    assert fields["gamma"].high == 1 and fields["hidden_sizes"].low == 1


def test_words_of_a_command_line():
    fields = flags.read_fields(FAKE)
    assert fields["hidden_sizes"].words([64, 32]) == ["--hidden-sizes", "64", "32"]
    assert fields["compile"].words(False) == ["--no-compile"]
    assert fields["env_kwargs"].words({"a": 1}) == ["--env-kwargs", '{"a": 1}']
    assert fields["fail_at"].words(-1) == ["--fail-at=-1"]


def test_values_from_a_command_line():
    fields = flags.read_fields(FAKE)
    assert fields["hidden_sizes"].parse("64,32") == [64, 32]
    assert fields["hidden_sizes"].parse("[64]") == [64]
    assert fields["alpha"].parse("auto") == "auto"
    assert fields["alpha"].parse(".5") == 0.5
    assert fields["exp_name"].parse("5") == "5"
    assert fields["compile"].parse("True") is True
    assert fields["env_kwargs"].parse('{"a": 1}') == {"a": 1}
    for name, word in (("epochs", "1.5"), ("epochs", "many"), ("env_kwargs", "[1]")):
        with pytest.raises(UsageError):
            fields[name].parse(word)


# ------------------------------------------------------------------------------------ our sweeps


@pytest.mark.parametrize("path", sorted((ROOT / "sweeps").glob("*.toml")), ids=lambda p: p.stem)
def test_the_sweeps_fit_their_scripts(path):
    runs = grid.plan(grid.read_sweep(path))
    scripts = {Path(run.script).stem for run in runs}
    if path.stem == "smoke":
        assert scripts == {script.stem for script in SCRIPTS} and len(runs) == 12
    if path.stem.startswith("spinning_up"):  # the published settings, of 3 million steps
        assert len(runs) == 300 and len(scripts) == 6
        sizes = [64, 32] if "on_policy" in path.stem else [256, 256]
        for run in runs:
            settings = run.settings()
            assert settings["steps_per_epoch"] * run.epochs == 3_000_000
            assert settings["hidden_sizes"] == sizes
            assert settings["activation"] == ("tanh" if sizes == [64, 32] else "relu")
        assert len({run.params["env_id"] for run in runs}) == 5
        assert {run.seed for run in runs} == set(range(10))


# ------------------------------------------------------------------------------------------ checks

BAD = {
    "colour = 1": "colour",
    "name = 5": "name",
    'name = "../up"': "name",
    'name = ""': "name",
    'name = ".."': "name",
    "workers = 0": "workers",
    "workers = true": "workers",
    "workers = 1.5": "workers",
    'num_cpu = "all"': "num_cpu",
    "data_dir = 3": "data_dir",
    "script = []": "script",
    "script = 3": "script",
    'script = "algos/dqn_torch.py"': "algos/dqn_torch.py",
    "[params]\ngama = 0.9": "params.gama",
    "[params]\ngamma = 2": "params.gamma",
    "[params]\ngamma = nan": "params.gamma",
    "[params]\ngamma = 1979-05-27": "params.gamma",
    "[params]\nenv_kwargs = {a = nan}": "params.env_kwargs",
    "[params]\nenv_kwargs = {a = 07:32:00}": "params.env_kwargs",
    '[params]\n"env_kwargs:a" = inf': "env_kwargs",
    "[params]\ngamma = []": "params.gamma",
    '[params]\ngamma = ["high"]': "params.gamma",
    "[params]\nepochs = 2.5": "params.epochs",
    "[params]\nepochs = 0": "params.epochs",
    "[params]\ncompile = 1": "params.compile",
    "[params]\nhidden_sizes = [64, 64]": "params.hidden_sizes",
    "[params]\nhidden_sizes = [[64, 1.5]]": "params.hidden_sizes",
    '[params]\nactivation = "gelu"': "params.activation",
    '[params]\nenv_id = "a\\u0000b"': "params.env_id",
    '[params]\nexp_name = "x"': "params.exp_name",
    "[params]\nresume = true": "params.resume",
    "[params]\nnum_cpu = 2": "params.num_cpu",
    '[params]\n"gamma:x" = 1': "params.gamma:x",
    '[params]\n"env_kwargs:" = 1': "params.env_kwargs:",
    "[params]\nseed = [0, 0]": "directory",
    '[params]\nenv_id = ["Ant-v4", "ant-v4"]': "directory",
    "[params]\nseed = [-1]": "params.seed",
    "[params.gamma]\nvals = [0.9]\nshort = 1": "params.gamma",
    "[params.gamma]\nvals = []": "params.gamma",
    "[params.gamma]\nvals = [0.9]\nshorthand = 1": "params.gamma",
    "[params.gamma]\nvals = [0.9]\nin_name = 1": "params.gamma",
    "[params.gamma]\nvalues = [0.9]": "params.gamma",
    f"[params]\nseed = {list(range(1001))}\nepochs = {list(range(1, 101))}": "runs",
    f'[params]\nenv_id = ["{"x" * 300}", "y"]': "too long",
    '[params.gamma]\nvals = [0.9]\nscripts = "fake*"': "params.gamma",
    '[params.gamma]\nvals = [0.9]\nscripts = ["sac_*"]': "params.gamma",
    "params = 3": "params",
    "[slurm]\nqueue = 'x'": "slurm",
    "[slurm]\ntime = [1]": "slurm.time",
    "[slurm]\npartition = 'a b; rm'": "slurm.partition",
    "[slurm]\nlauncher = 'ssh'": "slurm.launcher",
    "[slurm]\ndirectives = ['x\\ny']": "slurm.directives",
    "[slurm]\nsignal = 0": "slurm.signal",
    "= 3": "",
    "a = " + "[" * 5000: "",
}


@pytest.mark.parametrize("text", BAD)
def test_bad_sweeps_are_one_line_and_launch_nothing(tmp_path, monkeypatch, capsys, text):
    monkeypatch.chdir(tmp_path)
    head = "" if text.startswith("script") else f'script = "{FAKE}"\n'
    Path("bad.toml").write_text(head + text)
    monkeypatch.setattr(launch, "start", lambda *_: pytest.fail("launched"))
    with pytest.raises(SystemExit) as stopped:
        grid.main(["bad.toml"])
    assert stopped.value.code == 2
    said = capsys.readouterr()
    assert said.err.startswith("grid.py: error: bad.toml: ") and said.err.count("\n") == 1
    assert BAD[text] in said.err
    assert os.listdir() == ["bad.toml"]


@pytest.mark.parametrize(
    ("args", "word"),
    [
        (["missing.toml"], "missing.toml"),
        (["missing.py"], "missing.py"),
        ([FAKE, "--gama", "1"], "gamma"),
        ([FAKE, "--gamma", "2"], "--gamma"),
        ([FAKE, "--gamma"], "--gamma"),
        ([FAKE, "--gamma", "0.9", "--gamma", "0.8"], "--gamma"),
        ([FAKE, "--workers", "0"], "workers"),
        ([FAKE, "--workers", "x"], "--workers"),
        ([FAKE, "--num-cpu", "x"], "--num-cpu"),
        ([FAKE, "--dry-run", "x"], "x"),
        ([FAKE, "--name", "a/b"], "name"),
        (["--gamma", "1"], "--gamma"),
        ([], "sweep"),
    ],
)
def test_bad_command_lines(tmp_path, args, word):
    done = run_grid(tmp_path, *args)
    assert done.returncode == 2
    assert done.stderr.startswith("grid.py: error: ") and done.stderr.count("\n") == 1
    assert word in done.stderr
    assert not os.listdir(tmp_path)


def test_unwritable_data_dir(tmp_path):
    (tmp_path / "file").write_text("")
    done = run_grid(tmp_path, FAKE, "--data-dir", "file/data")
    assert done.returncode == 2
    assert done.stderr.startswith("grid.py: error: cannot write to file/data")


class Planted:
    """Unpickling it creates a file."""

    def __reduce__(self):
        return (Path.touch, (Path(os.environ["PLANTED"]),))


def test_planted_pickles_are_not_executed(tmp_path, monkeypatch):
    monkeypatch.setenv("PLANTED", str(tmp_path / "executed"))
    planted = pickle.dumps(Planted())
    (tmp_path / "bad.toml").write_bytes(planted)
    done = run_grid(tmp_path, "bad.toml")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    sweep = write_sweep(tmp_path / "a.toml")
    for name in ("config.json", "status.json", "progress.txt"):
        assert run_grid(tmp_path, sweep).returncode in (0, 1)
        (tmp_path / "data/sweep/sweep_s0" / name).write_bytes(planted)
        done = run_grid(tmp_path, sweep, "--retry-failed")
        assert "Traceback" not in done.stderr, done.stderr
    assert not (tmp_path / "executed").exists()


TOML_VALUES = st.recursive(
    st.one_of(
        st.booleans(),
        st.integers(-(2**70), 2**70),
        st.floats(),
        st.text(max_size=8),
        st.sampled_from(["Hopper-v4", "auto", "../..", "tanh", "\0"]),
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)
TOML_KEYS = st.sampled_from(
    ["name", "script", "num_cpu", "workers", "data_dir", "params", "slurm"]
) | st.text(max_size=6)
PARAM_KEYS = st.sampled_from(
    ["env_id", "seed", "gamma", "hidden_sizes", "alpha", "env_kwargs", "env_kwargs:a", "compile"]
) | st.text(max_size=8)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    top=st.dictionaries(TOML_KEYS, TOML_VALUES, max_size=3),
    params=st.dictionaries(PARAM_KEYS, TOML_VALUES, max_size=4),
)
def test_any_sweep_is_planned_inside_data_dir_or_refused(top, params):
    def read(text):
        return {"script": str(FAKE), "params": params, **top}

    original, grid.tomllib.loads = grid.tomllib.loads, read
    try:
        sweep = grid.read_sweep(__file__)
        sweep.data_dir = "data" if isinstance(sweep.data_dir, str) else sweep.data_dir
        runs = grid.plan(sweep)
    except UsageError as e:
        assert str(e).startswith(__file__)
        return
    finally:
        grid.tomllib.loads = original
    inside = os.path.abspath("data")
    for run in runs:
        path = os.path.abspath(run.directory)
        assert os.path.dirname(os.path.dirname(path)) == inside
        assert re.fullmatch(r"[\w.()-]+", run.directory.name, re.ASCII)
        shlex.join(launch.command(run)).encode("utf-8", "strict")
        assert all("\0" not in word for word in run.flags())
    assert len({run.directory for run in runs}) == len(runs)


# ------------------------------------------------------------------------------------------ running


def test_a_sweep_runs_all_and_a_second_time_none(tmp_path):
    params = 'env_id = ["Hopper-v4", "Ant-v4"]\nseed = [0, 1]\nhidden_sizes = [[8, 4]]\n'
    write_sweep(tmp_path / "a.toml", params + '"env_kwargs:x" = -1.5', "workers = 2")
    done = run_grid(tmp_path, "a.toml")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "sweep: 4 runs, 4 finished, in" in done.stdout
    for env in ("hopper-v4", "ant-v4"):
        for seed in (0, 1):
            run = tmp_path / "data" / f"sweep_env{env}" / f"sweep_env{env}_s{seed}"
            assert [row[1] for row in progress(run)[1:]] == [str(100 * seed + k) for k in (1, 2, 3)]
            config = json.loads((run / "config.json").read_text())
            assert config["hidden_sizes"] == [8, 4] and config["env_kwargs"] == {"x": -1.5}
            assert "mpirun" in (run / "launch.log").read_text().splitlines()[0]
    logs = [path.read_text() for path in tmp_path.glob("data/*/*/launch.log")]
    done = run_grid(tmp_path, "a.toml")
    assert done.returncode == 0
    assert "sweep: 4 runs, 4 finished before, in" in done.stdout
    assert logs == [path.read_text() for path in tmp_path.glob("data/*/*/launch.log")]


def test_more_epochs_make_a_run_longer_and_fewer_leave_it(tmp_path):
    sweep = tmp_path / "a.toml"
    assert run_grid(tmp_path, write_sweep(sweep, "epochs = 3")).returncode == 0
    first = progress(tmp_path / "data/sweep/sweep_s0", without_time=False)
    assert run_grid(tmp_path, write_sweep(sweep, "epochs = 5")).returncode == 0
    longer = progress(tmp_path / "data/sweep/sweep_s0", without_time=False)
    assert len(longer) == 6 and longer[:4] == first
    done = run_grid(tmp_path, write_sweep(sweep, "epochs = 4"))
    assert "1 finished before" in done.stdout
    assert progress(tmp_path / "data/sweep/sweep_s0", without_time=False) == longer


def test_a_finished_run_without_checkpoints_is_not_made_longer_but_run_anew(tmp_path):
    sweep = tmp_path / "a.toml"
    assert run_grid(tmp_path, write_sweep(sweep, "epochs = 3\nforget = true")).returncode == 0
    first = progress(tmp_path / "data/sweep/sweep_s0", without_time=False)
    done = run_grid(tmp_path, write_sweep(sweep, "epochs = 5\nforget = true"))
    assert done.returncode == 0 and "epochs was 3, is 5" in done.stdout
    assert progress(tmp_path / "data/sweep/sweep_s0", without_time=False) == first
    assert len(progress(next(tmp_path.glob("data/sweep_*/*")))) == 6
    assert "1 finished before" in run_grid(tmp_path, sweep).stdout


def test_a_changed_argument_is_a_new_run_beside_the_old(tmp_path):
    sweep = tmp_path / "a.toml"
    assert run_grid(tmp_path, write_sweep(sweep, "gamma = 0.9\nseed = [0, 1]")).returncode == 0
    old = {p: p.read_text() for p in tmp_path.glob("data/*/*/*.json")}
    done = run_grid(tmp_path, write_sweep(sweep, "gamma = 0.8\nseed = [0, 1]"))
    assert done.returncode == 0
    assert "gamma was 0.9, is 0.8" in done.stdout and "2 runs, 2 finished, in" in done.stdout
    assert {p: p.read_text() for p in old} == old
    new = [p for p in tmp_path.glob("data/*/*/config.json") if p not in old]
    assert len(new) == 2 and len({p.parent.parent for p in new}) == 1
    assert {json.loads(p.read_text())["gamma"] for p in new} == {0.8}
    # Both are found again, and so is the default when the line goes.
    assert "2 finished before" in run_grid(tmp_path, sweep).stdout
    assert (
        "2 finished before"
        in run_grid(tmp_path, write_sweep(sweep, "gamma = 0.9\nseed = [0, 1]")).stdout
    )
    assert "gamma was 0.9, is 0.99" in run_grid(tmp_path, write_sweep(sweep)).stdout
    # Another number of ranks is another run as well.
    done = run_grid(tmp_path, write_sweep(sweep, "gamma = 0.9"), "--num-cpu", "2")
    assert "ranks was 1, is 2" in done.stdout and done.returncode == 0


def test_a_failed_run_stops_no_other_and_is_retried_on_request(tmp_path):
    sweep = write_sweep(tmp_path / "a.toml", "fail_at = [-1, 1]\nseed = [0, 1]")
    done = run_grid(tmp_path, sweep)
    assert done.returncode == 1
    assert "4 runs, 2 finished, 2 failed, in" in done.stdout
    run = tmp_path / "data/sweep_fai1/sweep_fai1_s1"
    part = done.stdout[done.stdout.index(f"failed: {run}") :]
    assert "exit code 1: RuntimeError: it broke" in part.splitlines()[0]
    assert "    RuntimeError: it broke" in part and f"    log: {run}/launch.log" in part

    done = run_grid(tmp_path, sweep)
    assert done.returncode == 1
    assert "2 finished before, 2 failed before" in done.stdout and "--retry-failed" in done.stdout
    assert (run / "launch.log").read_text().count("--- ") == 1

    (tmp_path / "data" / "fixed").write_text("")
    done = run_grid(tmp_path, sweep, "--retry-failed")
    assert done.returncode == 0, done.stdout
    assert "2 finished, 2 finished before" in done.stdout
    assert [row[1] for row in progress(run)[1:]] == ["101", "102", "103"]


def test_a_run_that_refuses_its_arguments_is_a_failure_with_its_words(tmp_path):
    done = run_grid(tmp_path, write_sweep(tmp_path / "a.toml", "refuse = [true, false]"))
    assert done.returncode == 1
    assert "1 finished, 1 failed" in done.stdout
    assert "    fake_script.py: error: refused" in done.stdout
    assert "exit code 2" in done.stdout


def test_a_damaged_config_is_reported_and_left_alone(tmp_path):
    sweep = write_sweep(tmp_path / "a.toml")
    assert run_grid(tmp_path, sweep).returncode == 0
    config = tmp_path / "data/sweep/sweep_s0/config.json"
    config.write_text("{")
    done = run_grid(tmp_path, sweep)
    assert done.returncode == 1 and "config.json is damaged" in done.stdout
    assert config.read_text() == "{"


def test_ranks(tmp_path):
    done = run_grid(tmp_path, write_sweep(tmp_path / "a.toml", "", "num_cpu = 3"))
    assert done.returncode == 0
    assert json.loads((tmp_path / "data/sweep/sweep_s0/config.json").read_text())["ranks"] == 3


def test_auto_ranks_divide_the_work(monkeypatch):
    g = grid.ExperimentGrid("x")
    g.add("steps_per_epoch", [12, 10, 7])
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    ranks = [run.num_cpu for run in grid.plan(grid.Sweep(g, str(FAKE), num_cpu="auto"))]
    assert ranks == [6, 5, 7]
    ranks = [run.num_cpu for run in grid.plan(grid.Sweep(g, str(FAKE), "auto", workers=2))]
    assert ranks == [4, 2, 1]


def test_cores_are_shared_out(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    assert launch.core_shares(1) == [None]
    shares = launch.core_shares(3)
    assert sorted(c for share in shares for c in share) == list(range(8))
    assert sorted(map(len, shares)) == [2, 3, 3]
    assert launch.core_shares(9)[8] == {0}


def test_as_many_runs_at_a_time_as_there_are_workers(tmp_path):
    params = "seed = [0, 1, 2, 3, 4, 5]\nepoch_seconds = 0.1"
    assert (
        run_grid(tmp_path, write_sweep(tmp_path / "a.toml", params), "--workers", 3).returncode == 0
    )
    spans = []
    for path in tmp_path.glob("data/*/*"):
        times = [float(row[-1]) for row in progress(path, without_time=False)[1:]]
        spans.append((times[0] - 0.1, times[-1]))
    together = [sum(a <= start < b for a, b in spans) for start, _ in spans]
    assert max(together) == 3


def test_two_sweeps_at_once_do_not_share_a_run(tmp_path):
    sweep = write_sweep(tmp_path / "a.toml", "epoch_seconds = 2.0")
    first = start_grid(tmp_path, sweep)
    wait_until(lambda: (tmp_path / "data/sweep/sweep_s0/config.json").exists())
    second = run_grid(tmp_path, sweep)
    assert second.returncode == 1 and "1 in use" in second.stdout
    assert first.wait(30) == 0
    assert len(progress(tmp_path / "data/sweep/sweep_s0")) == 4


def test_spaces_other_letters_and_a_closed_pipe(tmp_path):
    directory = tmp_path / "my données"
    directory.mkdir()
    write_sweep(directory / "a b.toml", "seed = [0, 1]")
    words = [sys.executable, str(GRID), "a b.toml"]
    done = subprocess.run(
        f"set -o pipefail; {shlex.join(words)} | head -1",
        shell=True,
        executable="/bin/bash",
        cwd=directory,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert [status(directory / f"data/sweep/sweep_s{seed}") for seed in (0, 1)] == ["finished"] * 2


def test_dry_run_prints_commands_and_makes_nothing(tmp_path):
    sweep = write_sweep(tmp_path / "a.toml", "seed = [0, 1]\ncompile = true", "num_cpu = 2")
    done = run_grid(tmp_path, sweep, "--dry-run")
    assert done.returncode == 0
    commands = [shlex.split(line) for line in done.stdout.splitlines() if line[0] != "#"]
    assert len(commands) == 2
    words = commands[1]
    assert words[0].endswith("mpirun") and words[1:5] == ["-np", "2", sys.executable, str(FAKE)]
    assert "--compile" in words and words[words.index("--seed") + 1] == "1"
    assert os.listdir(tmp_path) == ["a.toml"]
    # And what it prints is what it runs.
    subprocess.run(commands[0], cwd=tmp_path, check=True)
    assert status(tmp_path / "data/sweep/sweep_s0") == "finished"
    done = run_grid(tmp_path, sweep, "--dry-run")
    assert "sweep_s0: finished\n# " in done.stdout
    assert re.search(r"sweep_s1: new\n['/]", done.stdout)  # quoted where the path holds a space


def test_command_line_grids(tmp_path):
    words = ["--env-id", "Hopper-v4", "Ant-v4", "--seed", "0", "1", "--hidden-sizes[hid]", "8,4"]
    words += ["--compile", "--workers", "2", "--env-kwargs", '{"a": 1}', "--alpha=auto"]
    done = run_grid(tmp_path, FAKE, *words, "--data-dir=out", "--name", "mine")
    assert done.returncode == 0, done.stdout + done.stderr
    names = sorted(p.name for p in (tmp_path / "out").iterdir())
    assert names == ["mine_envant-v4_hid8-4", "mine_envhopper-v4_hid8-4"]
    config = json.loads(next(tmp_path.glob("out/*/*_s1/config.json")).read_text())
    assert config["hidden_sizes"] == [8, 4] and config["compile"] is True
    assert config["env_kwargs"] == {"a": 1} and config["alpha"] == "auto"


def test_several_scripts_are_named_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    other = tmp_path / "other_script.py"
    other.write_text(FAKE.read_text())
    Path("a.toml").write_text(
        f'name = "both"\nscript = ["{FAKE}", "other_script.py"]\n[params]\ngamma = [0.9, 0.8]\n'
    )
    runs = grid.plan(grid.read_sweep("a.toml"))
    assert [run.exp_name for run in runs] == [
        *("both_fake_script_gam0-9", "both_fake_script_gam0-8"),
        *("both_other_script_gam0-9", "both_other_script_gam0-8"),
    ]


def test_parameters_for_some_of_the_scripts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("other_script.py").write_text(FAKE.read_text().replace("gamma", "discount"))
    Path("a.toml").write_text(
        f'name = "both"\nscript = ["{FAKE}", "other_script.py"]\n[params]\nseed = [0, 1]\n'
        '[params.gamma]\nvals = [0.9, 0.8]\nscripts = ["fake_*"]\n'
        '[params.discount]\nvals = [0.7]\nscripts = ["other_*"]\n'
    )
    runs = grid.plan(grid.read_sweep("a.toml"))
    assert [(run.exp_name, run.seed, run.params) for run in runs] == [
        ("both_fake_script_gam0-9", 0, {"gamma": 0.9}),
        ("both_fake_script_gam0-8", 0, {"gamma": 0.8}),
        ("both_fake_script_gam0-9", 1, {"gamma": 0.9}),
        ("both_fake_script_gam0-8", 1, {"gamma": 0.8}),
        ("both_other_script", 0, {"discount": 0.7}),
        ("both_other_script", 1, {"discount": 0.7}),
    ]


def test_from_python(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    g = grid.ExperimentGrid(name="mine")
    g.add("seed", [3])
    g.add("hidden_sizes", [(8, 4), (2,)], "hid")
    assert g.run(str(FAKE), data_dir="out")
    assert status(tmp_path / "out/mine_hid8-4/mine_hid8-4_s3") == "finished"
    assert grid.call_experiment("one", str(FAKE), seed=2, data_dir="out", hidden_sizes=[5, 5])
    assert json.loads(Path("out/one/one_s2/config.json").read_text())["hidden_sizes"] == [5, 5]
    assert not grid.call_experiment("two", str(FAKE), data_dir="out", fail_at=0)
    with pytest.raises(UsageError, match="gama"):
        grid.call_experiment("three", str(FAKE), data_dir="out", gama=0.9)


# ---------------------------------------------------------------------------------------- stopping


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_sweep_goes_on_where_it_was(tmp_path, signum):
    params = "seed = [0, 1, 2]\nepoch_seconds = 0.2\nepochs = 5"
    sweep = write_sweep(tmp_path / "a.toml", params, "workers = 2\nnum_cpu = 2")
    process = start_grid(tmp_path, sweep)
    runs = [tmp_path / f"data/sweep/sweep_s{seed}" for seed in range(3)]
    wait_until(
        lambda: all((r / "progress.txt").exists() and len(progress(r)) > 1 for r in runs[:2])
    )
    process.send_signal(signum)
    text, _ = process.communicate(timeout=30)
    assert process.returncode == 128 + signum
    assert "2 interrupted, 1 not started" in text and "Run the same command again" in text
    assert not processes_of(tmp_path)
    assert [status(run) for run in runs[:2]] == ["interrupted"] * 2
    assert not runs[2].exists()
    done = run_grid(tmp_path, sweep)
    assert done.returncode == 0 and "3 finished, in" in done.stdout
    for seed, run in enumerate(runs):
        assert [row[1] for row in progress(run)[1:]] == [str(100 * seed + k) for k in range(1, 6)]


def test_a_second_signal_stops_at_once(tmp_path):
    sweep = write_sweep(tmp_path / "a.toml", "epoch_seconds = 600", "num_cpu = 2")
    process = start_grid(tmp_path, sweep)
    wait_until(lambda: (tmp_path / "data/sweep/sweep_s0/progress.txt").exists())
    time.sleep(0.3)
    process.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    text, _ = process.communicate(timeout=20)
    assert process.returncode == 128 + signal.SIGTERM and "1 interrupted" in text
    assert not processes_of(tmp_path)


def test_a_killed_sweep_leaves_no_process_and_ends_with_the_same_numbers(tmp_path):
    params = "seed = [0, 1, 2]\nepoch_seconds = 0.2\nepochs = 4"
    sweep = write_sweep(tmp_path / "a.toml", params, "workers = 2\nnum_cpu = 2")
    process = start_grid(tmp_path, sweep)
    run = tmp_path / "data/sweep/sweep_s0"
    wait_until(lambda: (run / "progress.txt").exists() and len(progress(run)) > 2)
    assert len(processes_of(tmp_path)) >= 1 + 2 * 3  # grid.py, and of two runs mpirun and ranks
    process.kill()
    process.communicate()
    wait_until(lambda: not processes_of(tmp_path), seconds=10)
    assert status(run) == "running"  # nobody was left to say otherwise
    done = run_grid(tmp_path, sweep)
    assert done.returncode == 0 and "3 finished, in" in done.stdout, done.stdout
    for seed in range(3):
        rows = progress(tmp_path / f"data/sweep/sweep_s{seed}")
        assert [row[1] for row in rows[1:]] == [str(100 * seed + k) for k in range(1, 5)]


def test_the_overview_in_a_terminal(tmp_path):
    sweep = write_sweep(
        tmp_path / "a.toml", "seed = [0, 1]\nepoch_seconds = 0.4\nfail_at = [-1, 1]"
    )
    main, side = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, str(GRID), str(sweep)],
        cwd=tmp_path,
        stdout=side,
        stderr=side,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "24"},
    )
    os.close(side)
    seen = b""
    while True:
        try:
            part = os.read(main, 65536)
        except OSError:  # the other side is closed
            break
        if not part:
            break
        seen += part
    os.close(main)
    assert process.wait(30) == 1
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", seen.decode())
    assert re.search(r"fai-1_s0 +running +[0-3]/3 ", text)
    assert re.search(r"fai-1_s1 +finished +3/3 +103\.0", text)
    assert re.search(r"fai1_s0 +failed +1/3", text)
    assert "... 2 more to come" in text and "4 of 4 runs" in text
    assert "4 runs, 2 finished, 2 failed" in text


# ------------------------------------------------------------------------------------- real script


def test_a_killed_sweep_of_a_real_script_ends_with_the_numbers_of_one_left_alone(tmp_path):
    """PPO on CartPole, 2 seeds: kill -9 to grid.py in the middle, then the same command again."""
    for name in ("alone", "killed"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.toml").write_text(
            f'name = "ppo"\nscript = "algos/ppo_torch.py"\ndata_dir = "{tmp_path / name}/data"\n'
            'workers = 2\n[params]\nenv_id = "CartPole-v1"\nseed = [0, 1]\nepochs = 12\n'
            "steps_per_epoch = 1000\nsave_freq = 3\n"
        )
    done = run_grid(tmp_path / "alone", "a.toml")
    assert done.returncode == 0, done.stdout
    process = start_grid(tmp_path / "killed", "a.toml")
    run = tmp_path / "killed/data/ppo/ppo_s0"
    wait_until(lambda: (run / "progress.txt").exists() and len(progress(run)) > 5)
    process.kill()
    process.communicate()
    wait_until(lambda: not processes_of(tmp_path / "killed"), seconds=10)
    assert status(run) == "running"
    done = run_grid(tmp_path / "killed", "a.toml")
    assert done.returncode == 0 and "2 finished, in" in done.stdout, done.stdout
    assert "Resuming after epoch" in (run / "launch.log").read_text()
    for seed in (0, 1):
        rows = [progress(tmp_path / name / f"data/ppo/ppo_s{seed}") for name in ("alone", "killed")]
        assert len(rows[0]) == 13 and rows[0] == rows[1]
