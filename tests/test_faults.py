"""What a long run meets: bad numbers, dead ranks, full disks, closed pipes, odd environments.

Most of it happens to four scripts: an on-policy and an off-policy one of each framework.
"""

import contextlib
import itertools
import json
import os
import pty
import random
import re
import shlex
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
    command,
    contents,
    flip_a_bit,
    kill_all,
    load_script,
    mpi,
    processes,
    progress,
    rank_state,
    read_status,
    run,
    run_dir,
    saved_epochs,
    slow,
    truncate,
    wait_for,
)

import common.run
from common import UsageError, logger
from common.mpi_tf1 import tf


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
FAILED, STOPPING = "failed on rank {rank} of 2", "stopping at the end of this epoch"
SEEN = {
    "raises": ("failed", f"{FAILED}\nTraceback", "the robot fell apart"),
    "exits": ("failed", f"{FAILED}\nTraceback", "SystemExit"),
    "kill": ("running",),  # nobody was left to say otherwise
    "kill_mpirun": ("running",),
    "nan_observation": ("failed", FAILED, "observation is NaN or infinite"),
    "full_disk": ("failed", FAILED, "File too large"),
    "sigterm": ("interrupted", f"SIGTERM: {STOPPING}"),
    "sigint": ("interrupted", f"SIGINT: {STOPPING}"),
    "sigusr1": ("interrupted", f"SIGUSR1: {STOPPING}"),
    "sigterm_twice": ("interrupted", f"SIGTERM: {STOPPING}"),
}
# (rank, where, how), and what is done to which rank's newest checkpoint before the run is resumed.
SAC_TORCH = [
    (0, "rollout", "raises", flip_a_bit, 1),
    (1, "update", "exits"),
    (0, "save", "raises", truncate, 1),
    (1, "save", "kill"),
    (0, "rollout", "kill_mpirun"),
    (1, "rollout", "nan_observation", Path.unlink, 1),
    (1, "rollout", "full_disk"),
    (0, "save", "sigterm"),
    (1, "save", "sigterm_twice"),
    (0, "rollout", "sigusr1"),
    (0, "reset", "sigint"),
]
TRPO_TF1 = [
    (1, "reset", "raises", Path.unlink, 0),
    (0, "update", "kill", flip_a_bit, 1),
    (1, "save", "raises"),
    (0, "rollout", "full_disk"),
    (0, "save", "sigusr1"),
    (0, "rollout", "sigterm_twice"),
]
TD3_TF1 = [
    (0, "save", "sigint", truncate, 0),
    (0, "save", "sigterm_twice"),
    (0, "rollout", "full_disk"),
    (0, "rollout", "sigusr1"),
]
CAREERS = [("sac_torch", 2, SAC_TORCH), slow("trpo_tf1", 2, TRPO_TF1), slow("td3_tf1", 1, TD3_TF1)]


@pytest.mark.parametrize("script, ranks, career", CAREERS, ids=["sac_torch", "trpo_tf1", "td3_tf1"])
def test_one_fault_after_another(tmp_path, script, ranks, career):
    """Whatever befalls the run: all ranks are gone within 10 seconds, the exit code is not 0, the
    line names the rank, the status tells; every attempt goes forward, over damaged checkpoints too;
    and in the end the run is the same, to the letter, as one that nothing happened to."""
    words = flags(script, data_dir=tmp_path, epochs=3 * len(career) + 1)
    run(script, *words, "--exp-name", "whole", ranks=ranks)
    directory, told, warning = run_dir(tmp_path, "unlucky"), tmp_path / "told", None
    words += ["--exp-name", "unlucky", "--resume"]
    for rank, where, how, *damage in career:
        before = saved_epochs(directory)
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
            text = text if ranks == 2 else text.replace(" on rank {rank} of 2", "")
            assert text.format(rank=rank) in result.stderr, seen
        if how == "full_disk":
            assert not list(directory.glob(".*.tmp")), seen  # it would take up room
        if word == "interrupted" and not how.endswith("twice"):
            assert saved_epochs(directory)[-1] == status["epoch"] == len(progress(directory)), seen
        assert (warning is None) or warning in result.stderr, seen
        assert saved_epochs(directory)[-1] > before[-1 if warning is None else -2], seen

        warning = None
        if damage:
            (spoil, other), newest = damage, saved_epochs(directory)[-1]
            spoil(directory / "checkpoint" / f"epoch_{newest:06d}_rank_{other}.npz")
            warning = f"WARNING: checkpoint epoch_{newest:06d} is damaged"
    run(script, *words, ranks=ranks)
    assert_same_run(run_dir(tmp_path, "whole"), directory)
    assert read_status(directory)["status"] == "finished"
    assert not list(directory.rglob(".*.tmp"))  # nothing half-written is left


FIRST = [("save", "raises"), slow("rollout", "full_disk"), slow("save", "kill")]
FIRST += [slow("save", "sigterm_twice")]


@pytest.mark.parametrize("where, how", FIRST)
def test_a_fault_in_the_first_save(tmp_path, where, how):
    """Not all ranks have left a checkpoint, and none was there before: the run starts anew."""
    words = flags("ppo_torch", data_dir=tmp_path, epochs=2, save_freq=2)
    run("ppo_torch", *words, "--exp-name", "whole", ranks=2)
    words += ["--exp-name", "unlucky", "--resume"]
    fault = {"rank": 1, "where": where, "how": how, "at": 5, "told": str(tmp_path / "told")}
    run("ppo_torch", *words, ranks=2, env={"FAULT": json.dumps(fault)}, check=False)
    directory = run_dir(tmp_path, "unlucky")
    assert (tmp_path / "told").exists() and not list(directory.glob("checkpoint/epoch_*_rank_1*"))
    words[words.index("--save-freq") + 1] = 1  # which the first process did not have
    run("ppo_torch", *words, ranks=2)
    assert_same_run(run_dir(tmp_path, "whole"), directory)


KILLED = [("ppo_torch", 2), slow("ppo_torch", 1), slow("ppo_tf1", 1), slow("sac_torch", 2)]


@pytest.mark.parametrize("script, ranks", KILLED)
def test_killed_at_random_until_finished(tmp_path, script, ranks):
    """kill -9 at random moments until the run gets through; every attempt goes forward."""
    words = flags(script, data_dir=tmp_path, epochs=40, steps_per_epoch=200)
    run(script, *words, "--exp-name", "whole", ranks=ranks)
    rng, kills, directory = random.Random(1), 0, run_dir(tmp_path, "killed")
    while True:
        process = start(script, *words, "--exp-name", "killed", "--resume", ranks=ranks)
        goal = saved_epochs(directory)[-1] + rng.randint(2, 8)
        while process.poll() is None and saved_epochs(directory)[-1] < goal:
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

# What goes bad in the second epoch, and the line about it. On a reward of 1e38 the square of V's
# error is infinite; whether the parameters survive that depends on the algorithm.
BAD = {
    "nan observation": "observation is NaN or infinite",
    "nan reward": "reward is NaN or infinite",
    "infinite reward": "reward is NaN or infinite",
    "nan action": "action is NaN or infinite",
    "nan loss": "LossPi is NaN or infinite on rank 0 in epoch 1",
    "nan parameter": "parameter is NaN or infinite on rank 0 in epoch 1",
    "huge reward": "(action|parameter|Loss.*) is NaN or infinite.*",
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
    with pytest.raises(FloatingPointError, match=f"^{BAD[kind]}$"), np.errstate(all="ignore"):
        module.train(module.Args(**args))
    directory = run_dir(tmp_path, "run")
    assert saved_epochs(directory) == [0, 1]
    arrays, of_torch = rank_state(directory), script.endswith("torch")
    start = "networks/ac/" if of_torch else "networks/"
    saved = {k.removeprefix(start): x for k, x in arrays.items() if k.startswith(start)}
    if of_torch:
        state = torch.load(directory / "torch_save" / "model.pt", weights_only=True)
        model = {name: x.numpy() for name, x in state.items()}
    else:
        reader = tf.train.load_checkpoint(str(directory / "tf1_save/variables/variables"))
        model = {name: reader.get_tensor(name) for name in saved}
    assert len(saved) > 4
    for name, x in saved.items():
        assert np.isfinite(x).all() and (model[name] == x).all(), name
    with np.load(directory / "policy.npz") as policy:
        assert policy["epoch"] == 1 and np.isfinite(policy["weight_0"]).all()


# Odd environments ---------------------------------------------------------------------------------

FOUR = ["ppo_torch", "sac_torch", slow("trpo_tf1"), slow("td3_tf1")]
OBS = "Odd-v0 gave an observation of shape {}, not (3,) as its observation_space says"
WRONG = {
    "one number": OBS.format("(1,)"),
    "too short": OBS.format("(2,)"),
    "a column": OBS.format("(3, 1)"),
    "a number": OBS.format("()"),
    "two rewards": "can only convert an array of size 1",
    "no reward": "reward must be numeric, not None",
    "a word": "reward must be numeric, not 'high'",
    "words": "observation must be numeric, not array(['a', 'a', 'a'], dtype='<U1')",
    "old reset": "too many values to unpack (expected 2",
    "old step": "not enough values to unpack (expected 5, got 4)",
}


@pytest.mark.parametrize("script", FOUR)
def test_wrong_results_are_named(tmp_path, script):
    """From the first reset on, or from some step on: what was promised, and what came."""
    for kind, text in WRONG.items():
        for at in (0, 7):
            args = {"data_dir": str(tmp_path), "exp_name": f"{kind} {at}", "epochs": 1}
            with pytest.raises((TypeError, ValueError), match=re.escape(text)):
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
    """kill -9 before each call that changes the disk, cleaning up included: the checkpoint that
    loads is whole, the one before or the new one; the next save works."""
    source = """
import os, signal
from pathlib import Path
import numpy as np
from common.files import load_checkpoint, save_checkpoint

def save(directory, epoch):
    save_checkpoint(directory, epoch, {"t": np.full(9, epoch)})

def check(directory, *epochs):
    epoch, state = load_checkpoint(directory)
    assert epoch in epochs and (state["t"] == epoch).all(), epoch
    return epoch

def dying(real):
    def call(*args, **kwargs):
        calls.append(real)
        if len(calls) > deaths:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **kwargs)
    return call

deaths = 0
while True:
    directory, calls = Path(f"saves_{deaths}"), []
    for epoch in (1, 2, 3):
        save(directory, epoch)
    child = os.fork()
    if child == 0:
        for name in ("mkdir", "fsync", "replace", "rename", "unlink", "rmdir"):
            setattr(os, name, dying(getattr(os, name)))
        save(directory, 4)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if status == 0:
        break
    assert os.WTERMSIG(status) == signal.SIGKILL
    epoch = check(directory, 3, 4)
    save(directory, epoch + 1)
    check(directory, epoch + 1)
    deaths += 1
print("deaths:", deaths)
"""
    out = mpi(tmp_path, source, 1, cwd=tmp_path).stdout
    assert int(out.split("deaths:")[1]) >= 5


@pytest.mark.parametrize("script", ["sac_torch", slow("trpo_tf1")])
def test_resumed_for_longer_or_refused(tmp_path, script, monkeypatch):
    """A refusal changes no file, and a resume with nothing left to do deletes none; then the run
    goes on to the same numbers."""
    args = {"data_dir": str(tmp_path), "exp_name": "run"}
    train(script, **args | {"exp_name": "whole", "epochs": 4})
    with monkeypatch.context() as m:
        stops = iter([False, True])
        m.setattr(common.run, "stop_requested", lambda: next(stops))
        assert not train(script, **args, epochs=3)
    directory, aside = run_dir(tmp_path, "run"), tmp_path / "aside"
    args |= {"resume": True, "epochs": 4}

    def gone(path):
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    def other_ranks(path):
        path.write_text(path.read_text().replace('"ranks": 1', '"ranks": 2'))

    for epochs, name, damage, text in (
        (4, "config.json", other_ranks, "ranks was 2, is 1, start it with mpirun -np 2"),
        (4, "config.json", truncate, "config.json is damaged"),
        (1, "status.json", lambda path: None, "2 epochs are done, --epochs is 1"),
        (
            4,
            "progress.txt",
            lambda path: path.write_text(""),
            "txt is damaged: it does not have the",
        ),
        (4, "progress.txt", gone, "progress.txt is damaged: .*No such file"),
        (4, "checkpoint", gone, "2 epochs are done, and their checkpoints are gone; --overwrite"),
        (4, "checkpoint/epoch_*", truncate, "no usable checkpoint"),
    ):
        shutil.copytree(directory, aside)
        for path in list(directory.glob(name)):
            damage(path)
        before = contents(directory)
        with pytest.raises(UsageError, match=text):
            train(script, **args | {"epochs": epochs})
        assert contents(directory) == before, text
        shutil.rmtree(directory)
        aside.rename(directory)
    before = contents(directory / "checkpoint")
    assert train(script, **args | {"epochs": 2})
    assert contents(directory / "checkpoint") == before
    assert train(script, **args)
    assert_same_run(run_dir(tmp_path, "whole"), directory)


@pytest.mark.parametrize("script", ["sac_torch", slow("ppo_tf1")])
def test_two_processes_on_one_directory(tmp_path, script):
    """The second refuses in one line and changes nothing; when the first is dead, its lock is no
    hindrance."""
    words = flags(script, data_dir=tmp_path, exp_name="run")
    first = start(script, *words, "--epochs", 10**6)
    directory = run_dir(tmp_path, "run")
    wait_for(lambda: len(saved_epochs(directory)) == 3)
    for flag in ("resume", "overwrite"):
        with pytest.raises(UsageError, match=f"is in use by process {first.pid} on"):
            train(script, data_dir=str(tmp_path), exp_name="run", **{flag: True})
    assert first.poll() is None
    first.kill()
    first.wait()
    assert (directory / ".lock").read_text().startswith(f"process {first.pid} on")
    epochs = saved_epochs(directory)[-1] + 1
    assert train(script, data_dir=str(tmp_path), exp_name="run", resume=True, epochs=epochs)
    assert len(progress(directory)) == epochs
    assert (directory / ".lock").read_text().startswith(f"process {os.getpid()} on")


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


def piped_to_head(words, env):
    words = ["bash", "-o", "pipefail", "-c", '"$@" | head -1', "bash", *words]
    return subprocess.run(words, env={**os.environ, **env}, capture_output=True, timeout=100)


def test_a_closed_pipe(tmp_path):
    """`| head -1` takes the output away; the run goes on. So it does if the names that it prints
    are not in the output's encoding, and if there is no output at all."""
    here = tmp_path / "Übung №1"
    words = command("sac_torch", *flags("sac_torch", data_dir=here, exp_name="run", epochs=4))
    result = piped_to_head(words, {"PYTHONIOENCODING": "ascii"})
    assert result.returncode == 0 and not result.stderr
    assert result.stdout.endswith(b"run_s0\n")
    assert len(progress(run_dir(here, "run"))) == 4
    words = command("ppo_torch", *flags("ppo_torch", data_dir=here, exp_name="closed", epochs=2))
    done = subprocess.run(["sh", "-c", f"{shlex.join(words)} >&- 2>&-"], timeout=100)
    assert done.returncode == 0


@pytest.mark.slow
def test_a_closed_pipe_of_mpirun(tmp_path):
    """MPICH's mpirun itself dies of it: then no rank is left, and the run resumes."""
    words = flags("vpg_tf1", data_dir=tmp_path, exp_name="run", resume=True)
    result = piped_to_head(command("vpg_tf1", *words, "--epochs", 10**6, ranks=2), {})
    assert result.returncode
    wait_for(lambda: not processes(tmp_path), seconds=10)
    epochs = saved_epochs(run_dir(tmp_path, "run"))[-1] + 1
    run("vpg_tf1", *words, "--epochs", epochs, ranks=2)
    assert len(progress(run_dir(tmp_path, "run"))) == epochs


def test_a_terminal_that_goes_away(tmp_path):
    """After nohup or disown, the terminal is closed: the run goes on, bars and tables unseen."""
    words = flags("ppo_torch", data_dir=tmp_path, exp_name="run", epochs=30)
    main, side = pty.openpty()
    ignored = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # inherited, as nohup does it
    terminal = {"stdin": side, "stdout": side, "stderr": side, "start_new_session": True}
    process = start("ppo_torch", *words, **terminal)
    signal.signal(signal.SIGHUP, ignored)
    os.close(side)
    seen = b""
    while b"AverageEpRet" not in seen:
        seen += os.read(main, 4096)
    os.close(main)
    assert process.wait(timeout=100) == 0
    assert len(progress(run_dir(tmp_path, "run"))) == 30
