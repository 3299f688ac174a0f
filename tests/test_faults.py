"""What a long run meets: bad numbers, dead ranks, full disks, closed pipes, odd environments.

Most of it happens to four scripts: an on-policy and an off-policy one of each framework.
"""

import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import (
    ON_POLICY,
    ROOT,
    SCRIPTS,
    assert_same_run,
    checkpoint,
    command,
    contents,
    flip_a_bit,
    kill_all,
    load_script,
    mpi,
    processes,
    progress,
    read_status,
    run,
    run_dir,
    saved_epoch,
    slow,
    truncate,
    wait_for,
)

import common.run
from common import UsageError, logger


def settings(script, **more):
    """Arguments of a run that is as quick as can be, on the odd environment."""
    args = {"env_id": "odd_env:Odd-v0", "hidden_sizes": (8,), "steps_per_epoch": 40}
    args |= {"max_ep_len": 20, "save_freq": 1}
    if script in ON_POLICY:
        args |= {"train_v_iters": 2} | ({"train_pi_iters": 2} if "ppo" in script else {})
    else:
        args |= {"start_steps": 30, "update_after": 20, "update_every": 10, "batch_size": 4}
        args |= {"replay_size": 400, "num_test_episodes": 1}
        args |= {"compile": False} if script.endswith("torch") else {}
    return args | more


def flags(script, **more):
    """The same as words of a command line."""
    words = []
    for name, value in settings(script, **more).items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            value = json.dumps(value) if isinstance(value, dict) else value
            words += [f"--{flag}", *(value if isinstance(value, tuple) else [value])]
    return words


def train(script, **more):
    """Train in this process, which spares the start."""
    module = load_script(script)
    return module.train(module.Args(**settings(script, **more)))


def start(script, *words, **options):
    """Start a script in a process of its own."""
    options = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL} | options
    return subprocess.Popen(command(script, *words, ranks=options.pop("ranks", 1)), **options)


@pytest.fixture(autouse=True)
def surroundings(tmp_path, monkeypatch):
    """Every process finds odd_env.py; a test that fails leaves no endless run behind."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests"))
    yield
    for pid in processes(tmp_path):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


# One fault after another --------------------------------------------------------------------------


# What is seen of a fault: the word in status.json, and what stands on stderr.
FAILED, STOPPING = "failed on rank {rank} of {ranks}", "stopping at the end of this epoch"
SEEN = {
    "raises": ("failed", f"{FAILED}\nTraceback", "the robot fell apart"),
    "exits": ("failed", f"{FAILED}\nTraceback", "SystemExit: 0"),
    "kill": ("running",),  # nobody was left to say otherwise
    "kill_mpirun": ("running",),
    "nan_observation": ("failed", "is NaN or infinite on rank"),
    "full_disk": ("failed", FAILED, "File too large"),
    "sigterm": ("interrupted", f"SIGTERM: {STOPPING}"),
    "sigint": ("interrupted", f"SIGINT: {STOPPING}"),
    "sigusr1": ("interrupted", f"SIGUSR1: {STOPPING}"),
    "sigterm_twice": ("interrupted", "SIGTERM, twice"),  # rank 0 may wait in MPI at the first
}
# (rank, where, how), and what is done to the checkpoint before the run is resumed.
SAC_TORCH = [
    (0, "rollout", "raises", flip_a_bit),
    (1, "update", "exits"),
    (0, "save", "raises", truncate),
    (1, "save", "kill"),
    (0, "rollout", "kill_mpirun"),
    (1, "rollout", "nan_observation", Path.unlink),
    (0, "rollout", "full_disk"),
    (0, "save", "sigterm"),
    (1, "save", "sigterm_twice"),
    (0, "rollout", "sigusr1"),
    (0, "reset", "sigint"),
]
TRPO_TF1 = [
    (1, "reset", "raises", Path.unlink),
    (0, "update", "kill", flip_a_bit),
    (1, "save", "raises"),
    (0, "rollout", "full_disk"),
    (0, "save", "sigusr1"),
    (0, "rollout", "sigterm_twice"),
]
TD3_TF1 = [
    (0, "save", "sigint", truncate),
    (0, "save", "sigterm_twice"),
    (0, "rollout", "full_disk"),
    (0, "rollout", "sigusr1"),
]
CAREERS = [("sac_torch", 2, SAC_TORCH[:4]), slow("sac_torch", 2, SAC_TORCH[4:])]
CAREERS += [slow("trpo_tf1", 2, TRPO_TF1), slow("td3_tf1", 1, TD3_TF1)]


@pytest.mark.parametrize("script, ranks, career", CAREERS)
def test_one_fault_after_another(tmp_path, script, ranks, career):
    """Whatever befalls the run: all ranks are gone within 10 seconds, the exit code is not 0, the
    line names the rank, the status tells; every attempt goes forward; a damaged checkpoint is
    refused, and without it the one before is used; and in the end the run is the same, to the
    letter, as one that nothing happened to."""
    words = flags(script, data_dir=tmp_path, epochs=5 * len(career))  # 3 each, and signals are late
    run(script, *words, "--exp-name", "whole", ranks=ranks)
    directory, told = run_dir(tmp_path, "unlucky"), tmp_path / "told"
    words += ["--exp-name", "unlucky", "--resume"]
    for rank, where, how, *damage in career:
        before = saved_epoch(directory)
        # In the third epoch of this process: two are saved before.
        fault = {"rank": rank, "where": where, "how": how, "at": 2 * (40 // ranks) + 5}
        env = {"FAULT": json.dumps({**fault, "told": str(told)})}
        result = run(script, *words, ranks=ranks, env=env, check=False)
        seen = f"{fault}\n{result.stdout}\n{result.stderr}"
        assert told.exists(), seen
        wait_for(lambda: not processes(tmp_path), float(told.read_text()) + 10 - time.time())
        told.unlink()

        status, (word, *texts) = read_status(directory), SEEN[how]
        assert result.returncode and status["status"] == word, seen
        for text in texts:
            assert text.format(rank=rank, ranks=ranks) in result.stderr, seen
        if how == "full_disk":
            assert not list(directory.glob(".*.tmp")), seen  # it would take up room
        if word == "interrupted" and not how.endswith("twice"):
            assert saved_epoch(directory) == status["epoch"] == len(progress(directory)), seen
        assert saved_epoch(directory) > before, seen

        if damage:
            damage[0](directory / "checkpoint.npz")
        if damage and damage[0] is not Path.unlink:
            result = run(script, *words, ranks=ranks, check=False)
            assert result.returncode == 2 and "checkpoint.npz is damaged" in result.stderr
            (directory / "checkpoint.npz").unlink()
    run(script, *words, ranks=ranks)
    assert_same_run(run_dir(tmp_path, "whole"), directory)
    assert read_status(directory)["status"] == "finished"


FIRST = [(0, "save", "raises"), slow(0, "rollout", "full_disk"), slow(0, "save", "kill")]
FIRST += [slow(0, "save", "sigterm_twice")]


@pytest.mark.parametrize("rank, where, how", FIRST)
def test_a_fault_in_the_first_save(tmp_path, rank, where, how):
    """The run starts anew, whatever was written already."""
    words = flags("ppo_torch", data_dir=tmp_path, epochs=2, save_freq=2)
    run("ppo_torch", *words, "--exp-name", "whole", ranks=2)
    words += ["--exp-name", "unlucky", "--resume"]
    fault = {"rank": rank, "where": where, "how": how, "at": 5, "told": str(tmp_path / "told")}
    run("ppo_torch", *words, ranks=2, env={"FAULT": json.dumps(fault)}, check=False)
    directory = run_dir(tmp_path, "unlucky")
    assert (tmp_path / "told").exists() and saved_epoch(directory) == 0
    words[words.index("--save-freq") + 1] = 1  # which the first process did not have
    run("ppo_torch", *words, ranks=2)
    assert_same_run(run_dir(tmp_path, "whole"), directory)


KILLED = [("ppo_torch", 1), slow("ppo_torch", 2), slow("ppo_tf1", 1), slow("sac_torch", 2)]


@pytest.mark.parametrize("script, ranks", KILLED)
def test_killed_at_random_until_finished(tmp_path, script, ranks):
    """kill -9 at random moments until the run gets through; every attempt goes forward."""
    words = flags(script, data_dir=tmp_path, epochs=60 // ranks, steps_per_epoch=100)
    run(script, *words, "--exp-name", "whole", ranks=ranks)
    rng, kills, directory = random.Random(1), 0, run_dir(tmp_path, "killed")
    while True:
        process = start(script, *words, "--exp-name", "killed", "--resume", ranks=ranks)
        goal = saved_epoch(directory) + rng.randint(2, 6)
        while process.poll() is None and saved_epoch(directory) < goal:
            time.sleep(0.01)
        time.sleep(rng.uniform(0, 0.1))
        if process.poll() is None and kills < 3:
            kill_all(process.pid)
            kills += 1
        if process.wait(timeout=120) == 0:
            break
    assert kills >= 2
    assert_same_run(run_dir(tmp_path, "whole"), directory)
    assert read_status(directory)["status"] == "finished"


# Bad numbers --------------------------------------------------------------------------------------

# What goes bad in the second epoch, and what the line about it names. On a reward of 1e38 the
# square of V's error is infinite.
BAD = {
    "nan observation": "(Loss\\w+|a parameter)",
    "nan reward": "EpRet",
    "infinite reward": "EpRet",
    "nan action": "(Loss\\w+|a parameter)",
    "nan loss": "LossPi",
    "nan parameter": "a parameter",
    "huge reward": "(Loss\\w+|a parameter)",
}
QUICK = [(script, kind) for script in ("ppo_torch", "sac_torch") for kind in BAD]
QUICK += [("td3_tf1", "nan parameter")]
BY_SCRIPT = [(script, kind) for script in SCRIPTS for kind in BAD]
BY_SCRIPT = [case if case in QUICK else slow(*case) for case in BY_SCRIPT]


def spoil(monkeypatch, module, kind):
    """Let the second epoch go bad where it is not the environment that does it."""
    actions, saves = itertools.count(1), itertools.count(1)

    def get_action(policy, o, rng=None, real=module.get_action):
        return real(policy, o, rng) * (np.nan if next(actions) > 50 else 1)

    def store(self, real=logger.EpochLogger.store, **values):
        bad = {"LossPi": np.float32("nan")} if self.epoch == 1 and "LossPi" in values else {}
        real(self, **{**values, **bad})

    def save_state(self, state, *args, real=logger.EpochLogger.save_state, **kwargs):
        networks = state["networks"]
        if next(saves) == 2:
            arrays = networks.state_dict()
            next(iter(arrays.values())).fill(np.nan)
            networks.load_state_dict(arrays)
        real(self, state, *args, **kwargs)

    if kind == "nan action":
        monkeypatch.setattr(module, "get_action", get_action)
    elif kind == "nan loss":
        monkeypatch.setattr(logger.EpochLogger, "store", store)
    elif kind == "nan parameter":
        monkeypatch.setattr(logger.EpochLogger, "save_state", save_state)


@pytest.mark.parametrize("script, kind", BY_SCRIPT)
def test_no_policy_of_nans_is_saved(tmp_path, script, kind, monkeypatch):
    """A line says what and where, and all that is saved, for NumPy, for the framework and to resume
    from, is of the first epoch and one and the same."""
    module = load_script(script)
    spoil(monkeypatch, module, kind)
    args = settings(script, data_dir=str(tmp_path), exp_name="run", epochs=5)
    args["env_kwargs"] = {"kind": kind, "at": 50}
    line = f"^{BAD[kind]} is NaN or infinite on rank 0, after [12] epochs$"
    with pytest.raises(FloatingPointError, match=line), np.errstate(all="ignore"):
        module.train(module.Args(**args))
    directory = run_dir(tmp_path, "run")
    arrays, of_torch = checkpoint(directory), script.endswith("torch")
    assert arrays["epoch"] == 1
    start = "networks/ac/" if of_torch else "networks/"
    saved = {k.removeprefix(start): x for k, x in arrays.items() if k.startswith(start)}
    if of_torch:
        state = torch.load(directory / "torch_save" / "model.pt", weights_only=True)
        model = {name: x.numpy() for name, x in state.items()}
    else:
        from common.mpi_tf1 import tf

        reader = tf.train.load_checkpoint(str(directory / "tf1_save/variables/variables"))
        model = {name: reader.get_tensor(name) for name in saved}
    assert len(saved) > 4
    for name, x in saved.items():
        assert np.isfinite(x).all() and (model[name] == x).all(), name
    with np.load(directory / "policy.npz") as policy:
        assert policy["epoch"] == 1 and np.isfinite(policy["weight_0"]).all()


# Odd environments ---------------------------------------------------------------------------------

FOUR = ["ppo_torch", "sac_torch", slow("trpo_tf1"), slow("td3_tf1")]
WRONG = {
    "one number": "matmul|broadcast",
    "too short": "matmul|broadcast",
    "a number": "matmul|broadcast",
    "two rewards": "array of size 1",
    "no reward": "EpRet is NaN",
    "a word": "could not convert string",
    "words": "could not convert string",
    "old reset": "values to unpack|must be a tuple|returned by `reset",
    "old step": "values to unpack|returned by `step",
}


@pytest.mark.parametrize("script", FOUR)
def test_wrong_results_are_errors(tmp_path, script):
    """From the first reset on, or from some step on; no run goes on with them."""
    for kind, text in WRONG.items():
        for at in (0, 7):
            args = {"data_dir": str(tmp_path), "exp_name": f"{kind} {at}", "epochs": 1}
            with pytest.raises(Exception, match=text), np.errstate(all="ignore"):
                train(script, env_kwargs={"kind": kind, "at": at}, **args)


@pytest.mark.parametrize("script", FOUR)
def test_odd_but_usable_environments(tmp_path, script):
    """Observations of other types or all in one array, all else in arrays, episodes of one step and
    without end; actions of other types, within their bounds, or without bounds where they are
    clipped."""
    tables = {}
    kinds = ["", "one array", "in arrays", "ints", "list", "short", "float16", "float64"]
    for kind in kinds:
        args = {"data_dir": str(tmp_path), "exp_name": f"run {kind}", "epochs": 2}
        assert train(script, env_kwargs={"kind": kind}, **args)
        tables[kind] = progress(run_dir(tmp_path, f"run {kind}"))
    for kind in ("one array", "in arrays"):
        pd.testing.assert_frame_equal(tables[""], tables[kind], check_exact=True)
    pd.testing.assert_frame_equal(tables["ints"], tables["list"], check_exact=True)
    assert (tables["ints"].EpLen == 20).all() and (tables["short"].EpLen == 1).all()
    args = {"data_dir": str(tmp_path), "epochs": 2}
    if script in ON_POLICY:
        assert train(script, env_kwargs={"kind": "no bounds"}, exp_name="no bounds", **args)
    else:
        args["num_test_episodes"] = 0  # a test episode would have no end
    assert train(script, env_kwargs={"kind": "endless"}, exp_name="run", max_ep_len=10**6, **args)
    assert progress(run_dir(tmp_path, "run")).EpLen.isna().all()  # nobody knows a return


# Checkpoints and directories ----------------------------------------------------------------------


def test_killed_at_every_step_of_a_save(tmp_path):
    """kill -9 before each call that changes the disk: the run goes on from the save before or from
    the new one, and its next save works."""
    source = """
import os, shutil, signal
from test_files import Part, epoch, resumed

def dying(real):
    def call(*args, **kwargs):
        calls.append(real)
        if len(calls) > deaths:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **kwargs)
    return call

def check(directory, *epochs):
    part = Part()
    logger, n = resumed(directory, part=part)
    assert n in epochs and (part.w == n).all(), n
    return logger, n

deaths = 0
while True:
    directory, calls = f"saves_{deaths}", []
    logger, _ = resumed(directory)
    for i in (1, 2, 3):
        epoch(logger, Part(i))
    child = os.fork()
    if child == 0:
        for name in ("mkdir", "fsync", "replace", "rename", "unlink", "rmdir"):
            setattr(os, name, dying(getattr(os, name)))
        epoch(logger, Part(4))
        os._exit(0)
    _, status = os.waitpid(child, 0)
    logger.release()
    if status == 0:
        break
    assert os.WTERMSIG(status) == signal.SIGKILL
    logger, n = check(directory, 3, 4)
    epoch(logger, Part(n + 1))
    logger.release()
    check(directory, n + 1)[0].release()
    deaths += 1
print("deaths:", deaths)
"""
    out = mpi(tmp_path, source, 1, cwd=tmp_path).stdout
    assert int(out.split("deaths:")[1]) >= 5


@pytest.mark.parametrize("script", ["sac_torch", slow("trpo_tf1")])
def test_resumed_for_longer_or_refused(tmp_path, script, monkeypatch):
    """A refusal changes no file; then the run goes on to the same numbers."""
    args = {"data_dir": str(tmp_path), "exp_name": "run"}
    train(script, **args | {"exp_name": "whole", "epochs": 4})
    with monkeypatch.context() as m:
        stops = iter([False, True])
        m.setattr(common.run, "stop_requested", lambda: next(stops))
        assert not train(script, **args, epochs=3)
    directory, aside = run_dir(tmp_path, "run"), tmp_path / "aside"
    args |= {"resume": True, "epochs": 4}
    for name, damage, changed, text in (
        ("", None, {"seed": 1}, "holds a run without|seed was 0, is 1"),
        ("", None, {"gamma": 0.5}, "gamma was 0.99, is 0.5"),
        ("", None, {"env_kwargs": {"at": 3}}, r"env_kwargs was {}, is {'at': 3}"),
        ("", None, {"epochs": 1}, "2 epochs are done, --epochs is 1"),
        ("checkpoint*", Path.unlink, {}, r"a run without checkpoint\.npz: it cannot"),
        ("checkpoint*", truncate, {}, r"checkpoint\.npz is damaged .* goes on from"),
    ):
        shutil.copytree(directory, aside)
        if "seed" in changed:  # another run's checkpoint in the place of this one's
            args["resume"] = str(directory)
        for path in directory.glob(name) if name else ():
            damage(path)
        before = contents(directory)
        with pytest.raises(UsageError, match=text):
            train(script, **args | changed)
        assert contents(directory) == before, text
        shutil.rmtree(directory)
        aside.rename(directory)
        args["resume"] = True
    assert train(script, **args | {"epochs": 2})
    assert train(script, **args)
    assert_same_run(run_dir(tmp_path, "whole"), directory)


def test_damage_that_only_one_rank_finds_changes_no_file(tmp_path):
    """Each rank reads its own replay buffer; the others wait for the one that then refuses."""
    source = """
import time, types
import numpy as np
from common import UsageError, logger, mpi
run = logger.EpochLogger("run", resume=True)
run.save_config({"epochs": 9})
buffer = types.SimpleNamespace(data=np.full((4, 2), 1 + mpi.proc_id(), np.float32), count=4)
try:
    run.load_state({}, buffer)
except UsageError as e:
    time.sleep(1)
    print(e)
    mpi.abort(2)
"""
    mpi(tmp_path, source, 2, cwd=tmp_path)
    path = tmp_path / "run" / "checkpoint.npz"
    row = np.float32([2, 2]).tobytes()
    path.write_bytes(path.read_bytes().replace(4 * row, 3 * row + np.float32([2, 3]).tobytes()))
    before = contents(tmp_path / "run")
    result = mpi(tmp_path, source, 2, cwd=tmp_path, check=False)
    assert result.returncode == 2 and "checkpoint.npz is damaged (BadZipFile" in result.stdout
    assert contents(tmp_path / "run") == before


@pytest.mark.parametrize("script", ["sac_torch", slow("ppo_tf1")])
def test_two_processes_on_one_directory(tmp_path, script):
    """The second refuses in one line and changes nothing; when the first is dead, its lock is no
    hindrance."""
    words = flags(script, data_dir=tmp_path, exp_name="run")
    first = start(script, *words, "--epochs", 10**6)
    directory = run_dir(tmp_path, "run")
    wait_for(lambda: saved_epoch(directory) >= 2)
    for flag in ("resume", "overwrite"):
        with pytest.raises(UsageError, match="is in use by another process"):
            train(script, data_dir=str(tmp_path), exp_name="run", **{flag: True})
    assert first.poll() is None
    first.kill()
    first.wait()
    epochs = saved_epoch(directory) + 1
    assert train(script, data_dir=str(tmp_path), exp_name="run", resume=True, epochs=epochs)
    assert len(progress(directory)) == epochs


# Surroundings -------------------------------------------------------------------------------------


@pytest.mark.parametrize("script", ["ppo_torch", slow("td3_tf1")])
def test_nothing_but_a_place_for_the_data(tmp_path, script):
    """No standard input, a working directory in which nobody can write, and a path of letters that
    are not in ASCII."""
    here = tmp_path / "Übung №1"
    words = command(script, *flags(script, data_dir=here, exp_name="run", epochs=2))
    subprocess.run(words, stdin=subprocess.DEVNULL, cwd="/proc", check=True, timeout=100)
    assert read_status(run_dir(here, "run"))["status"] == "finished"
    assert len(progress(run_dir(here, "run"))) == 2
