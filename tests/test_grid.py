"""benchmark/grid.py: names, checks, and what becomes of runs that end well, fail, or are killed.

The runs are those of tests/fake_script.py, which learns nothing.
"""

import contextlib
import fcntl
import itertools
import json
import os
import pty
import re
import shlex
import shutil
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import numpy as np
import pytest
from conftest import FAKE, GRID, ROOT, contents, processes, read_status, run, wait_for
from pydantic.dataclasses import dataclass

from benchmark import flags, grid, launch
from common import UsageError, mpi

SCRIPTS = sorted((ROOT / "algos").glob("*.py"))


def write_sweep(path, params="", top=""):
    # An absolute data_dir: every process of the sweep names it in its command line.
    top = f'name = "sweep"\nscript = "{FAKE}"\ndata_dir = "{path.parent / "data"}"\n{top}'
    path.write_text(f"{top}\n[params]\n{params}\n")
    return path


@pytest.fixture
def main(tmp_path, monkeypatch, capsys):
    """grid.py in this process and an empty directory: (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)

    def call(*args):
        with pytest.raises(SystemExit) as stopped:
            grid.main([str(arg) for arg in args])
        return stopped.value.code, *capsys.readouterr()

    return call


def start_grid(cwd, *args, **options):
    words = [sys.executable, str(GRID), *map(str, args)]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, **options}
    return subprocess.Popen(words, cwd=cwd, text=True, start_new_session=True, **options)


def returns(run_dir):
    """Returns in progress.txt; [] before there is one."""
    path = run_dir / "progress.txt"
    lines = path.read_text().splitlines() if path.exists() else []
    return [int(line.split("\t")[1]) for line in lines[1:]]


def read(run_dir, name="config.json"):
    return json.loads((run_dir / name).read_text())


# Names --------------------------------------------------------------------------------------------


class Tanh:
    pass


# What Spinning Up's ExperimentGrid calls the variants of such grids, seeds left out.
# fmt: off
NAMES = [
    ("ppo", [("env_id", ["Hopper-v4", "Ant-v4"])], "ppo_envhopper-v4 ppo_envant-v4"),
    ("ppo", [("env_id", "Ant-v4", None, True), ("gamma", 0.99)], "ppo_envant-v4"),
    ("", [("lam", [0.9, 0.97]), ("gamma", 1, None, True)], "lam0-9_gam1 lam0-97_gam1"),
    ("lr", [("pi_lr", [1e-5, 0.00001234, 1e20])], "lr_pi1e-05 lr_pi1-234e-05 lr_pi1e-20"),
    ("n", [("hidden_sizes", [[32], [64, 64], []], "hid")], "n_hid32 n_hid64-64 n_hid"),
    ("n", [("hidden_sizes", (64, 64), None, True)], "n_hid64-64"),
    ("n", [("ac_kwargs:hidden_sizes", [[[8], (4, 2)], [[1]]])], "n_ac-hid8-4-2 n_ac-hid1"),
    ("k", [("a:bc:def_g", [1]), ("a:bc:_h", [2, 3])], "k_a-bc-h2 k_a-bc-h3"),
    ("k", [("env_kwargs", {"size": 5}, None, True)], "k_env--size---5-"),
    ("k", [("env_kwargs:seed", [0, 1]), ("seed", [0, 1], "sd", True)], "k_env-see0 k_env-see1"),
    ("b", [("compile", True, None, True), ("norm_obs", False, None, True)], "b_com"),
    ("no", [("target_kl", [None, 0.01]), ("device", "", "", True)], "no_tarnone_ no_tar0-01_"),
    ("sh", [("clip_ratio", [0.1, 0.2], "Clip(eps)")], "sh_clip-eps-0-1 sh_clip-eps-0-2"),
    ("str", [("note", ["A (b)/c", "x.y~z", "É_é"])], "str_nota--b--c str_notx-y-z str_not-_-"),
    ("f", [("ac", [[Tanh, max], (min,), "nn.Tanh"])], "f_actanh-max f_acmin f_acnn-tanh"),
    ("np", [("lam", [np.float64(0.5), np.int64(3), np.str_("X")])], "np_lam0-5 np_lam3 np_lamx"),
    ("o", [("z", [1, 2]), ("a", [True, False], "M")], "o_z1_m o_z1 o_z2_m o_z2"),
]
# fmt: on


@pytest.mark.parametrize(("name", "rows", "expected"), NAMES)
def test_variants_are_named_as_in_spinning_up(name, rows, expected):
    g = grid.ExperimentGrid(name)
    for row in rows:
        g.add(*row)
    names = [g.variant_name(variant) for variant in g.variants()]
    assert list(dict.fromkeys(names)) == expected.split(" ")


def test_variants_are_nested_and_the_first_key_varies_slowest(capsys):
    g = grid.ExperimentGrid("ppo")
    g.add("env_kwargs:a:b", [0.1, 0.2])
    g.add("env_kwargs:c", (1, 2))
    g.add("seed", [0, 1])
    tables = [{"env_kwargs": {"a": {"b": b}, "c": (1, 2)}} for b in (0.1, 0.2)]
    assert g.variants() == [{**t, "seed": seed} for t in tables for seed in (0, 1)]
    g.print()
    text = capsys.readouterr().out
    assert "[ppo]" in text and "0.1, 0.2" in text and "env-a-c" not in text and "env-c" in text
    assert "4 variants, counting seeds; 2 without seeds" in text
    for key in ("env_kwargs", "env_kwargs:a", "env_kwargs:a:b", "env_kwargs:a:b:c"):
        with pytest.raises(ValueError, match="set the same argument"):
            g.add(key, [2])


# Our sweeps ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted((ROOT / "sweeps").glob("*.toml")), ids=lambda p: p.stem)
def test_the_sweeps_fit_their_scripts(path):
    sweep = grid.read_sweep(path)
    runs = grid.plan(sweep)
    # `plot.py data/<name>` must not show another sweep or single runs beside it.
    names = [grid.read_sweep(p).grid.name for p in path.parent.glob("*.toml") if p != path]
    names += [script.stem for script in SCRIPTS]
    assert not [name for name in names if name.startswith(sweep.grid.name)]
    assert {*re.findall(r"plot.py data/(\S+)", path.read_text())} <= {sweep.grid.name}
    (row,) = re.findall(rf"\|.*/{path.name}\).*", (ROOT / "benchmark/README.md").read_text())
    assert re.findall(r"(\d+) runs", row) in ([], [str(len(runs))])  # the table of sweeps
    for planned in runs:  # every argument of a script is read
        text = (ROOT / "algos" / planned.fixed["script"]).read_text().split("# Networks")[0]
        names = re.findall(r"^    (\w+): .*= .*#", text, re.M)
        free = flags.Script.free - ({"epochs"} if planned.fixed.get("anneal_lr") else set())
        assert [*planned.fixed][:-2] == [name for name in names if name not in free]


def test_flags_are_read_without_importing_the_scripts():
    words = ["-X", "importtime", GRID, ROOT / "sweeps/smoke.toml", "--dry-run"]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True)
    assert {*re.findall(r"algos/(\w+.py)", done.stdout)} == {path.name for path in SCRIPTS}
    assert "common.args" in done.stderr and not re.search(r" (torch|tensorflow)\n", done.stderr)


# Checks -------------------------------------------------------------------------------------------


def test_a_check_of_several_arguments_is_told():
    @dataclass
    class Args:
        def __post_init__(self):
            raise ValueError("they do not go together")

    with pytest.raises(UsageError, match="arguments: Value error, they do not go together"):
        flags.checked(Args, {})


# fmt: off
BAD = {  # a word of the message: what is wrong, at the top of a sweep
    "": ["= 3", "a = " + "[" * 5000], "datestamp": ["datestamp = 1"],
    "name": ['name = "../up"', "name = [1]"], "params": ["params = 3"],
    "--workers": ["workers = 0", "workers = true"], "--num-cpu": ['num_cpu = "all"'],
    "unknown key worker (perhaps workers?)": ["worker = 2"], "belongs in [params]": ["seed = [0]"],
    "key what": ["what = 1"],
    "script": ["script = 3", "script = []"], "algos/x.py": ['script = "algos/x.py"'],
    "no_such": ['script = "no_such:function"', 'script = "math:no_such"'],
}
BAD_PARAMS = {  # the same, in [params]
    "params.gama: no such argument in fake_script (perhaps gamma?)": ["gama = 0.9"],
    "params.env: no such argument in fake_script (perhaps env_id?)": ["env = 1"],
    "--gamma": ["gamma = nan", 'gamma = ["high"]', '"gamma:x" = 1', "gamma = true"],
    "--gamma: Input should be less than": ["gamma = 2"], "--compile": ["compile = 1"],
    "JSON": ["env_kwargs = {a = nan}"], "keyword argument 'speed'": ['"env_kwargs:speed" = 3'],
    "--epochs": ["epochs = 2.5", "epochs = 0"], "[[64, ...]]": ["hidden_sizes = [64, 64]"],
    "no_package": ['env_id = "no_package:Env-v0"'],
    "NoSuch-v4": ['env_id = ["Ant-v4", "NoSuch-v4"]'], "num_cpu": ["num_cpu = 2"],
    "exp_name": ['exp_name = "x"'], "env_kwargs::": ['"env_kwargs:" = 1'],
    "a shorthand there twice?": ["seed = [0, 0]", "alpha = [1e20, 1e-20]"],
    "greater than or equal to 0 or Input should be 'auto'": ["alpha = -1"],
    "gamma: an empty list": ["gamma = []"], "'short'": ["gamma = {vals = [1], short = 1}"],
}
LINES = {  # the same, on a command line
    "missing.toml": ["missing.toml"], "missing.py": ["missing.py"], "sweep": ["--gamma 1", ""],
    "there may be options": ["bad.toml b.toml", "bad.toml --gamma 1"],
    "gama": [f"{FAKE} --gama 1"], "too long": [f"{FAKE} --gamma[{'x' * 300}] 0.9 1"],
    "gamma": [f"{FAKE} --gamma", f"{FAKE} --gamma {{[1]:2}}", f"{FAKE} --gamma 0.9 --gamma 0.8"],
    "workers": [f"{FAKE} --workers 0", f"{FAKE} --workers"], "x": [f"{FAKE} --dry-run x"],
}
# fmt: on
CASES = [(text, "bad.toml", word) for word, texts in BAD.items() for text in texts]
BAD_PARAMS = {word: [f"[params]\n{text}" for text in texts] for word, texts in BAD_PARAMS.items()}
CASES += [(text, "bad.toml", word) for word, texts in BAD_PARAMS.items() for text in texts]
CASES += [("", line, word) for word, lines in LINES.items() for line in lines]


@pytest.mark.parametrize("text, line, word", CASES, ids=range(len(CASES)))
def test_bad_sweeps_and_lines_are_one_line_and_launch_nothing(main, monkeypatch, text, line, word):
    head = "" if text.startswith("script") else f'script = "{FAKE}"\n'
    Path("bad.toml").write_text(head + text)
    monkeypatch.setattr(launch, "start", lambda *_: pytest.fail("launched"))
    code, _, said = main(*line.split())
    assert code == 2 and word in said and (not text or "bad.toml" in said)
    assert (
        said.startswith("grid.py: error: ") and said.count("\n") == 1
    ) or "full helptext" in said
    assert os.listdir() == ["bad.toml"]


# Command line -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line, expected",
    [
        ("--hidden-sizes 64 32", {"fake_script": {"hidden_sizes": [64, 32]}}),
        ("--hid [8,4] 2,4", {f"fake_script_hid{n}-4": {"hidden_sizes": [n, 4]} for n in (8, 2)}),
        ("--env-id Ant-v4", {"fake_script_envant-v4": {"env_id": "Ant-v4"}}),
        ("--exp-name x --env Ant-v4", {"x": {"env_id": "Ant-v4"}}),
        ("--no-compile --alpha=auto", {"fake_script": {"compile": False, "alpha": "auto"}}),
        ("--act torch.nn.Tanh --compile", {"fake_script": {"activation": "tanh", "compile": True}}),
        ("--gamma[g] .5 1", {f"fake_script_g{g}": {"gamma": x} for g, x in (("0-5", 0.5), (1, 1))}),
        ("--fail-at=-1 --seed 0 1", {"fake_script": {"fail_at": -1}}),
        ("""--env-kwargs '{"sutton_barto_reward": true}' --env CartPole-v1 --name x""",
            {"x": {"env_kwargs": {"sutton_barto_reward": True}}}),
        ("--env-kwargs:healthy_reward 1 2",
            {f"fake_script_env-hea{x}": {"env_kwargs": {"healthy_reward": x}} for x in (1, 2)}),
    ],
)  # fmt: skip
def test_command_lines(line, expected):
    words, found = grid.split_words(shlex.split(f"--cpu auto --dt {FAKE} --data_dir out {line}"))
    options = grid.parse_args(grid.Options, words)
    assert (options.num_cpu, options.datestamp, options.data_dir) == ("auto", True, "out")
    runs = grid.plan(grid.sweep_from_words(options, found))
    made = {r.directory.parent.name[11:]: r.fixed for r in runs}
    assert made.keys() == expected.keys()
    assert all(expected[name].items() <= fixed.items() for name, fixed in made.items())


def test_numbers_of_numpy_in_a_table_stay_numbers():
    script = flags.Script(FAKE)
    params = {"env_kwargs": {"sutton_barto_reward": np.bool_(False)}, "env_id": "CartPole-v1"}
    words = script.command({}, params, None, "")[0]
    assert '--env-kwargs={"sutton_barto_reward": false}' in words
    params = {"env_kwargs": {"a": np.bool_(False), "b": np.arange(2)}}
    assert flags.to_words(script.hints, params) == ['--env-kwargs={"a": false, "b": [0, 1]}']


def test_dry_run_prints_commands_and_makes_nothing(main, tmp_path):
    params = "seed = [0, 1]\ncompile = true\nepochs = 2e0"
    sweep = write_sweep(tmp_path / "a.toml", params, "num_cpu = 2")
    code, out, _ = main(sweep, "--dry-run")
    head, *lines = out.splitlines()
    commands = [shlex.split(line) for line in lines]
    assert code == 0 and len(commands) == 2 and os.listdir() == ["a.toml"]
    assert head == "# sweep: 2 runs, 2 not started"
    words = commands[1]
    assert words[0].endswith("mpirun") and words[1:5] == ["-np", "2", sys.executable, str(FAKE)]
    assert {"--compile", "--seed=1", "--epochs=2"} <= {*words}
    subprocess.run(commands[0], check=True)  # what it prints is what it runs
    head, first, second = main(sweep, "--dry-run")[1].splitlines()
    assert head == "# sweep: 2 runs, 1 finished before, 1 not started"
    assert first.endswith("sweep_s0: finished before") and shlex.split(second) == commands[1]


# Many scripts -------------------------------------------------------------------------------------


def test_arguments_go_to_the_scripts_that_have_them(main):
    other = FAKE.read_text().replace("gamma: Unit = ", "discount: Annotated[float, Field(le=1)] = ")
    other = f"from typing import Annotated\nfrom pydantic import Field\n{other}"
    Path("other_script.py").write_text(other)
    text = f'name = "both"\nscript = ["{FAKE}", "other_script.py"]\n[params]\ngamma = [0.9, 0.8]\n'
    Path("a.toml").write_text(text)
    runs = grid.plan(grid.read_sweep("a.toml"))
    assert [(run.directory.parent.name, run.fixed.get("gamma")) for run in runs] == [
        ("both_fake_script_gam0-9", 0.9),
        ("both_fake_script_gam0-8", 0.8),
        ("both_other_script", None),
    ]
    Path("algos").mkdir()
    Path("algos/vpg_torch.py").write_text(FAKE.read_text())
    assert flags.find("algos/vpg_torch.py").path == Path.cwd() / "algos/vpg_torch.py"  # not ours


# Running ------------------------------------------------------------------------------------------


def test_a_sweep_runs_all_and_a_second_time_none(main, tmp_path):
    params = 'env_id = ["Hopper-v4", "Ant-v4"]\nseed = [0, 1]\nhidden_sizes = [[8, 4]]\n'
    params += '"env_kwargs:ctrl_cost_weight" = -1.5'
    write_sweep(tmp_path / "a.toml", params, "workers = 2.0")
    code, out, _ = main("a.toml")
    assert code == 0 and "sweep: 4 runs, 4 finished, in" in out
    for env, seed in itertools.product(("hopper-v4", "ant-v4"), (0, 1)):
        directory = tmp_path / "data" / f"sweep_env{env}" / f"sweep_env{env}_s{seed}"
        assert returns(directory) == [100 * seed + k for k in (1, 2, 3)]
        config = read(directory)
        assert config["hidden_sizes"] == [8, 4] and config["env_kwargs"]["ctrl_cost_weight"] == -1.5
        assert "mpirun" in (directory / "launch.log").read_text().splitlines()[0]
    before = contents(tmp_path)
    code, out, _ = main("a.toml")
    assert code == 0 and "sweep: 4 runs, 4 finished before, in" in out
    assert contents(tmp_path) == before
    command = out.splitlines()[-1].removesuffix(" plots the curves")
    assert command.endswith("/data/sweep*")
    plotted = subprocess.run(f"{command} --csv a.csv", shell=True, capture_output=True, text=True)
    assert not plotted.returncode and Path("a.csv").read_text().count("-v4,sweep,") == 6, plotted


def test_more_epochs_make_a_run_longer_and_other_arguments_leave_it(main, tmp_path):
    sweep, table = tmp_path / "a.toml", tmp_path / "data/sweep/sweep_s0/progress.txt"
    assert main(write_sweep(sweep, "epochs = 3"))[0] == 0
    first = table.read_text()
    assert main(write_sweep(sweep, "epochs = 5"))[0] == 0
    longer = table.read_text()
    assert longer.startswith(first) and returns(table.parent) == [1, 2, 3, 4, 5]
    assert "1 finished before" in main(write_sweep(sweep, "epochs = 4"))[1]
    config = read(table.parent)
    del config["gamma"]  # of a script that did not have it yet: it is the default
    (table.parent / "config.json").write_text(json.dumps(config))
    assert "1 finished before" in main(write_sweep(sweep))[1]
    code, out, _ = main(write_sweep(sweep, "gamma = 0.8\nseed = [0, 1]"))
    assert code == 1 and "1 another run, 1 finished" in out and "gamma was 0.99, is 0.8" in out
    assert "The same command" not in out
    assert "ranks was 1, is 2" in main(write_sweep(sweep), "--num-cpu", 2)[1]
    out = main(write_sweep(sweep, '"env_kwargs:ctrl_cost_weight" = 2'))[1]
    assert "1 another run, in" in out and "env_kwargs was {}, is {'ctrl_cost_weight': 2}" in out
    assert table.read_text() == longer


def test_a_failed_run_stops_no_other_and_is_retried_on_request(main, tmp_path):
    sweep = write_sweep(tmp_path / "a.toml", "fail_at = [-1, 1]\nrefuse = [true, false]")
    code, out, _ = main(sweep)
    assert code == 1 and "4 runs, 3 failed, 1 finished, in" in out
    assert "exit code 2" in out and "    fake_script.py: error: refused" in out
    directory = tmp_path / "data/sweep_fai1/sweep_fai1_s0"
    part = out[out.index(f"failed: {directory}") :]
    assert "exit code 1: RuntimeError: it broke" in part.splitlines()[0]
    assert "    RuntimeError: it broke" in part and f"    log: {directory}/launch.log" in part
    (tmp_path / "data" / "fixed").write_text("")
    assert "failed before" in main(sweep)[1] and returns(directory) == [1]
    heads = [main(sweep, "--dry-run", *more)[1].split("\n")[0] for more in ([], ["--retry-failed"])]
    assert heads[0].endswith("1 failed before, 1 finished before, 2 not started")
    assert heads[1].endswith("1 finished before, 3 not started")
    assert "--retry-failed" in out and "finished" in main(sweep, "--retry-failed")[1]
    assert returns(directory) == [1, 2, 3]


def test_ranks_and_cores(main, tmp_path, monkeypatch):
    assert main(write_sweep(tmp_path / "a.toml", "", "num_cpu = 3"))[0] == 0
    assert read(tmp_path / "data/sweep/sweep_s0")["ranks"] == 3
    # The command line wins over the file.
    assert "ranks was 3, is 2" in main(tmp_path / "a.toml", "--num-cpu", 2, "--dry-run")[1]
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    sweep = grid.Sweep(grid.ExperimentGrid("x"), FAKE, grid.Options(num_cpu="auto", workers=2))
    assert grid.plan(sweep)[0].fixed["ranks"] == 4
    shares = launch.core_shares(3)
    assert [*map(len, [*shares, set.union(*shares)])] == [2, 2, 2, 6]
    assert launch.core_shares(1) == [None] and launch.core_shares(9)[8] == {0}


def test_as_many_runs_at_a_time_as_there_are_workers(main, tmp_path, monkeypatch):
    """With the same share of the cores, and thus of threads, where a sweep goes on with one run."""
    started, alive, shares, start = [], [], [], launch.start

    def count(run, cores):
        shares.append(len(cores))
        started.append(start(run, cores))
        alive.append(sum(process.poll() is None for process in started))
        return started[-1]

    monkeypatch.setattr(launch, "start", count)
    said = lambda _, cores: os.write(1, f"on {len(cores)} cores\n".encode())  # noqa: E731
    monkeypatch.setattr(os, "sched_setaffinity", said)
    sweep = write_sweep(tmp_path / "a.toml", "seed = [0, 1, 2, 3]\nepochs = 1\nepoch_seconds = 1.5")
    assert main(sweep, "--workers", 3)[0] == 0
    assert alive[:3] == [1, 2, 3] and max(alive) == 3 and len(alive) == 4
    (tmp_path / "data/sweep/sweep_s3").rename(tmp_path / "gone")
    assert main(sweep, "--workers", 3)[0] == 0
    assert shares == [max(1, mpi.cores() // 3)] * 5
    assert f"on {shares[0]} cores\n" in (tmp_path / "data/sweep/sweep_s0/launch.log").read_text()


def test_the_reason_why_a_run_has_no_return_is_said(main):
    text = FAKE.read_text().replace("100 * args.seed + epoch + 1", "float('nan')")
    Path("long.py").write_text(text.replace("Path(__file__).resolve().parents[1]", f"'{ROOT}'"))
    code, out, _ = main("long.py")
    assert code == 0 and "no return: no episode ended" in out and "nan" not in out


def test_two_sweeps_at_once_share_the_runs(tmp_path):
    """Each leaves what another process is at work on, and does not call it failed."""
    sweep = write_sweep(tmp_path / "a.toml", "seed = [0, 1, 2]\nepoch_seconds = 0.3")
    runs = [tmp_path / f"data/sweep/sweep_s{seed}" for seed in range(3)]
    runs[2].mkdir(parents=True)
    with open(runs[2] / ".lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        both = [start_grid(tmp_path, sweep) for _ in range(2)]
        texts = [process.communicate(timeout=120)[0] for process in both]
    assert [process.returncode for process in both] == [1, 1], texts
    assert all(f"in use: {runs[2]}: another" in text and "failed: " not in text for text in texts)
    assert [returns(run) for run in runs] == [[1, 2, 3], [101, 102, 103], []]
    assert os.listdir(runs[2]) == [".lock"]


def test_a_file_in_the_way_fails_and_is_not_waited_for(main, tmp_path):
    sweep = write_sweep(tmp_path / "a.toml", "seed = [0, 1]")
    (tmp_path / "data/sweep").mkdir(parents=True)
    (tmp_path / "data/sweep/sweep_s0").write_text("")
    code, said, _ = main(sweep)
    assert code == 1 and "1 failed, 1 finished" in said and "File exists" in said


def test_a_terminal_that_goes_away_ends_no_run(tmp_path):
    sweep, (ours, theirs) = write_sweep(tmp_path / "a.toml", "seed = [0, 1]"), pty.openpty()
    process = start_grid(tmp_path, sweep, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    wait_for(lambda: (tmp_path / "data/sweep/sweep_s0/launch.log").exists())
    os.close(ours)
    assert process.wait(timeout=60) == 0
    assert [len(returns(tmp_path / f"data/sweep/sweep_s{seed}")) for seed in (0, 1)] == [3, 3]


def test_spaces_other_letters_and_a_closed_pipe(tmp_path):
    directory = tmp_path / "my données"
    directory.mkdir()
    write_sweep(directory / "a b.toml", "seed = [0, 1]")
    line = f"set -o pipefail; {shlex.join([sys.executable, str(GRID), 'a b.toml'])} | head -1"
    done = subprocess.run(["bash", "-c", line], cwd=directory, capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert [len(returns(directory / f"data/sweep/sweep_s{seed}")) for seed in (0, 1)] == [3, 3]


def test_datestamp(main, tmp_path):
    """New runs every time, in directories named as Spinning Up names them."""
    sweep = write_sweep(tmp_path / "a.toml", "seed = [0, 1]", "datestamp = true\nworkers = 2")
    assert main(sweep)[0] == 0
    stamped = launch.Run(tmp_path, [], {}, stamp="2026-01-01_00-00-00")
    assert "would begin anew: --resume DIR" in launch.summary([stamped], "sweep", 1)
    time.sleep(1.1)
    assert "2 runs, 2 finished, in" in main(sweep)[1]
    pattern = r"(\d{4}-\d\d-\d\d)_sweep/\1_\d\d-\d\d-\d\d-sweep_s[01]"
    made = [str(p.relative_to(tmp_path / "data")) for p in tmp_path.glob("data/*/*")]
    assert len(made) == 4 and all(re.fullmatch(pattern, path) for path in made)


# Functions ----------------------------------------------------------------------------------------

MODULE = """
import json, os, sys, time
from pathlib import Path
sys.path.insert(0, "ROOT")
from common.logger import EpochLogger
from common.mpi import num_procs, proc_id

def my_train(lr, seed=0, sizes=(64,), act=None, env_fn=None, fail=None, wait=0, logger_kwargs={}):
    logger = EpochLogger(**logger_kwargs)
    logger.save_config({"lr": lr})
    if proc_id() == fail:
        raise RuntimeError("it broke")
    logger.store(EpRet=seed)
    logger.log_tabular("EpRet", average_only=True)
    logger.dump_tabular()
    if proc_id() == 0:
        act = act(2) if callable(act) else act
        seen = [lr, seed, sizes, act, env_fn().spec.id, num_procs()]
        Path(logger_kwargs["output_dir"], "seen").write_text(json.dumps(seen))
    time.sleep(wait)

def plain(x): Path("plain").write_text(str(x))

if __name__ == "__main__":
    from benchmark.grid import ExperimentGrid, call_experiment
    from nearby import double
    import gymnasium

    def within(factor):
        grid = ExperimentGrid("fun")
        grid.add("lr", [0.1, 0.2])
        grid.add("sizes", (8, 4))
        grid.add("act", lambda x: factor * double(x))
        grid.add("env_fn", lambda: gymnasium.make("CartPole-v1"))
        return grid.run(lambda seed, **more: my_train(seed=seed, **more), num_cpu=2)

    assert within(5)
    assert call_experiment("one", plain, x=[1, 2])
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "my_module", raising=False)
    path = tmp_path / "my_module.py"
    path.write_text(MODULE.replace("ROOT", str(ROOT)))
    (tmp_path / "nearby.py").write_text("def double(x): return 2 * x")
    return path


def test_functions_run_with_their_arguments_under_mpirun(module, tmp_path):
    """Lambdas and closures of the program that starts them, which call what they can import."""
    done = run(module, cwd=tmp_path)
    assert "2 runs, 2 finished, in" in done.stdout
    for lr in (0.1, 0.2):
        name = f"fun_lr{str(lr).replace('.', '-')}"
        directory = tmp_path / "data" / name / f"{name}_s0"
        assert read(directory, "seen") == [lr, 0, [8, 4], 20, "CartPole-v1", 2]
        assert read(directory)["exp_name"] == name
        assert read_status(directory / "call")["status"] == "finished"
    assert (tmp_path / "plain").read_text() == "[1, 2]"
    assert "2 runs, 2 finished before, in" in run(module, cwd=tmp_path).stdout


def test_a_function_whose_run_is_taken_ends_on_all_ranks(module, tmp_path):
    """No rank may go on without the one that found the lock: it would wait for ever."""
    (tmp_path / "call").mkdir()
    with open(tmp_path / "call/.lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        words = [str(mpi.find_mpirun()), "-np", "2", sys.executable, str(flags.CALL), str(tmp_path)]
        assert subprocess.run(words, timeout=60, capture_output=True).returncode == 2
    assert not (tmp_path / "call/status.json").exists()


def test_functions_by_name(module, main, tmp_path):
    """On the command line: failure, retry, another argument, interruption."""
    words = ["my_module:my_train", "--act", "x", "--env-name", "CartPole-v1", "--seed", "3"]
    fails = [*words, "--lr", 0.5, "--fail", 1, "--cpu", 2, "--name", "f"]
    code, out, _ = main(*fails)
    assert code == 1 and "RuntimeError: it broke" in out
    assert "on rank 1 of 2" in (tmp_path / "data/f/f_s3/launch.log").read_text()
    assert "1 failed before" in main(*fails)[1]
    text = module.read_text().replace("== fail", "is None")
    module.write_text(text)
    assert main(*fails, "--retry-failed")[0] == 0
    assert read(tmp_path / "data/f/f_s3", "seen") == [0.5, 3, [64], "x", "CartPole-v1", 2]
    assert "lr was 0.5, is 0.25" in main(*[0.25 if word == 0.5 else word for word in fails])[1]
    # An interrupted call starts anew.
    words += ["--lr", "1", "--wait", "600", "--name", "stop"]
    process = start_grid(tmp_path, *words)
    wait_for(lambda: (tmp_path / "data/stop/stop_s3/seen").exists())
    process.send_signal(signal.SIGTERM)
    assert "1 interrupted" in process.communicate(timeout=30)[0]
    module.write_text(text.replace("time.sleep(wait)", "").replace("logger.save_config", "print"))
    config = tmp_path / "data/stop/stop_s3/config.json"
    config.unlink()  # not every function calls save_config
    assert main(*words)[0] == 0 and not config.exists()
    shutil.rmtree(tmp_path / "data/stop/stop_s3/call")  # now it could be a script's
    assert "1 another run" in main(*words)[1] and (tmp_path / "data/stop/stop_s3/seen").exists()


def test_functions_that_cannot_be_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def train(lr=1, env_fn=None, seed=0):
        pytest.fail("called")

    for function, kwargs, word in [
        (train, {"gama": 2}, "gama"),
        (train, {"lr": iter(x for x in ())}, "cannot be pickled"),
        (train, {"env_name": "NoSuch-v0"}, "NoSuch-v0"),
        (lambda env_fn, **more: train(), {"env_name": "NoSuch-v0"}, "NoSuch-v0"),
        (train, {"seed": "../../x"}, "seed"),
        (train, {"num_cpu": 0}, "--num-cpu"),
    ]:
        with pytest.raises(UsageError, match=word):
            grid.call_experiment("x", function, **kwargs)
    assert not os.listdir()


def test_a_key_of_the_grid_holds_the_functions(tmp_path, monkeypatch):
    """As in Spinning Up: `run("algo")`. Its value is in the names of the runs."""
    monkeypatch.chdir(tmp_path)

    def plain(x):
        (tmp_path / f"plain{x}").touch()

    def other(x):
        (tmp_path / f"other{x}").touch()

    g = grid.ExperimentGrid("g")
    g.add("x", [1, 2])
    g.add("algo", [plain, other])
    assert g.run("algo")
    names = {f"{function}{x}" for x in (1, 2) for function in ("plain", "other")}
    assert {path.name for path in tmp_path.glob("[po]*")} == names
    assert {*os.listdir("data")} == {f"g_alg{name[:-1]}_x{name[-1]}" for name in names}


def test_scripts_from_python(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    on_ctrl_c = signal.getsignal(signal.SIGINT)
    g = grid.ExperimentGrid(name="mine")
    g.add("seed", [3])
    g.add("hidden_sizes", [(8, 4), (2,)], "hid")
    g.add("activation", Tanh)
    assert g.run(str(FAKE), data_dir="out") and signal.getsignal(signal.SIGINT) is on_ctrl_c
    config = read(Path("out/mine_hid8-4/mine_hid8-4_s3"))
    assert (config["hidden_sizes"], config["activation"]) == ([8, 4], "tanh")
    assert not grid.call_experiment("two", str(FAKE), data_dir="out", fail_at=0)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert grid.call_experiment("three", str(FAKE), 4, num_cpu=2, data_dir="~/home")
    config = read(Path("home/three/three_s4"))
    assert (config["ranks"], config["data_dir"]) == (2, f"{tmp_path}/home")
    assert grid.call_experiment("four", str(FAKE), datestamp=True)
    assert len([*Path("data").glob("2*_four/2*-four_s0/progress.txt")]) == 1
    capsys.readouterr()
    assert not grid.call_experiment("five", lambda **kwargs: False, lr=1, num_cpu=2)  # stopped
    assert "1 runs, 1 interrupted, in" in capsys.readouterr().out
    assert read_status(Path("data/five/five_s0/call"))["status"] == "interrupted"
    before = contents(Path("data/five"))
    for other in ({}, {"lr": 1, "batch": 2}):  # another run
        assert not grid.call_experiment("five", lambda **kwargs: None, **other)
    assert contents(Path("data/five")) == before

    def die():
        from common.mpi import proc_id

        if proc_id() == 1:
            time.sleep(0.5)
            os._exit(3)

    assert not grid.call_experiment("six", die, num_cpu=2)


def test_options_of_a_grid_are_those_of_its_sweep(monkeypatch):
    """What they do is tested with sweeps on the command line."""
    sweeps = []
    monkeypatch.setattr(grid, "run_sweep", lambda sweep: sweeps.append(sweep) or 1)
    g = grid.ExperimentGrid("x")
    assert not g.run(FAKE, 3, "there", True, 2, True)
    (sweep,) = sweeps
    options = grid.Options((), None, 3, 2, "there", True, retry_failed=True)
    assert (sweep.grid, sweep.script, sweep.options) == (g, FAKE, options)


def test_an_environment_of_ones_own_is_found(main, tmp_path):
    maker = "gymnasium.envs.classic_control:CartPoleEnv"
    text = f"from gymnasium import register\nregister('Mine-v0', '{maker}')\n"
    (tmp_path / "project").mkdir()
    (tmp_path / "project/my_envs.py").write_text(text)  # beside the script
    script = shutil.copy(FAKE, tmp_path / "project")
    assert main(script, "--env-id", "my_envs:Mine-v0", "--dry-run")[0] == 0
    code, _, said = main(script, "--env-id", "my_envs:Mine-v0", "my_envs:Other-v0", "--dry-run")
    assert code == 2 and "Other" in said


# Stopping -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_stopped_or_killed_sweep_leaves_no_process_and_goes_on(main, tmp_path, signum):
    params = "seed = [0, 1, 2]\nepoch_seconds = 0.2\nepochs = 15"
    sweep = write_sweep(tmp_path / "a.toml", params, "workers = 2\nnum_cpu = 2")
    process = start_grid(tmp_path, sweep)
    runs = [tmp_path / f"data/sweep/sweep_s{seed}" for seed in range(3)]
    wait_for(lambda: all(map(returns, runs[:2])))
    assert len(processes(tmp_path)) >= 1 + 2 * 3  # grid.py, and of two runs mpirun and ranks
    process.send_signal(signum)
    text, _ = process.communicate(timeout=30)
    if signum == signal.SIGKILL:
        wait_for(lambda: not processes(tmp_path), seconds=10)
    else:
        assert process.returncode == 128 + signum and not processes(tmp_path)
        assert "2 interrupted, 1 not started" in text and "The same command goes on" in text
        assert [read_status(r)["status"] for r in runs[:2]] == ["interrupted"] * 2
    assert not runs[2].exists() and "Warning" not in text
    code, out, _ = main(sweep)
    assert code == 0 and "3 finished, in" in out
    assert [returns(r) for r in runs] == [[100 * i + k for k in range(1, 16)] for i in range(3)]


def test_a_second_signal_stops_at_once(tmp_path):
    sweep = write_sweep(tmp_path / "a.toml", "epoch_seconds = 600", "num_cpu = 2")
    process = start_grid(tmp_path, sweep)
    wait_for(lambda: (tmp_path / "data/sweep/sweep_s0/status.json").exists())
    time.sleep(0.3)  # rank 1 may still be starting
    process.send_signal(signal.SIGTERM)
    log = tmp_path / "data/sweep/sweep_s0/launch.log"
    wait_for(lambda: "stopping at the end of this epoch" in log.read_text())
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    text, _ = process.communicate(timeout=20)
    assert process.returncode == 128 + signal.SIGTERM and "1 interrupted" in text
    assert not processes(tmp_path)


def test_the_bar_in_a_terminal(tmp_path):
    sweep = write_sweep(tmp_path / "a.toml", "seed = [0, 1]\nepoch_seconds = 0.6")
    main, side = pty.openpty()
    termios.tcsetwinsize(side, (24, 120))
    process = start_grid(tmp_path, sweep, stdout=side, stderr=side)
    os.close(side)
    seen = b""
    with contextlib.suppress(OSError):  # the other side is closed
        while part := os.read(main, 65536):
            seen += part
    os.close(main)
    assert process.wait(30) == 0
    assert re.search(rb" 1/2 \[.*, sweep_s1 epoch [12]/3\]", seen), seen
    assert b"\nsweep: 2 runs, 2 finished, in" in seen
