"""What a long run meets: bad numbers, dead ranks, full disks, closed pipes."""

import json
import shutil
import subprocess
import time

import pytest
from conftest import command, progress, run, run_dir

ODD = """
import os
import resource
import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box

class Odd(gym.Env):
    observation_space, action_space = Box(-np.inf, np.inf, (3,), np.float64), Box(-1, 1, (2,))

    def __init__(self, kind, at=0):
        self.kind, self.at, self.steps, self.len = kind, at, 0, 0

    def obs(self):
        o = self.np_random.normal(size=3)
        if self.kind == "nan observation" and self.steps >= self.at:
            o[1] = np.nan
        return {"ints": np.arange(3), "list": [0, 1, 2]}.get(self.kind, o)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.len = 0
        return self.obs(), {}

    def step(self, action):
        self.steps, self.len = self.steps + 1, self.len + 1
        late = self.steps >= self.at
        if self.kind == "raise" and late:
            raise RuntimeError("the robot fell apart")
        if self.kind == "kill" and late:
            os.kill(os.getpid(), 9)
        if self.kind == "full disk" and late:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, -1))
        bad = {"nan reward": np.nan, "infinite reward": np.inf, "huge reward": 1e38}
        r = bad.get(self.kind, -1.0) if late else -1.0
        return self.obs(), r, self.len >= {"short": 1, "endless": 1e9}.get(self.kind, 50), False, {}

gym.register("Odd-v0", Odd)
"""
FLAGS = ["--steps-per-epoch", 400, "--train-pi-iters", 3, "--train-v-iters", 3, "--save-freq", 1]


def odd(tmp_path, kind, ranks=1, at=0, epochs=3):
    """Run PPO on the odd environment. Returns the finished process and status.json."""
    (tmp_path / "odd.py").write_text(ODD)
    flags = ["--env-id", "odd:Odd-v0", "--env-kwargs", json.dumps({"kind": kind, "at": at})]
    flags += [*FLAGS, "--epochs", epochs, "--data-dir", tmp_path, "--exp-name", "odd"]
    env = {"PYTHONPATH": str(tmp_path)}
    result = run("ppo_torch", *flags, ranks=ranks, env=env, check=False, timeout=100)
    return result, json.loads((run_dir(tmp_path, "odd") / "status.json").read_text())


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    "kind, what",
    [
        ("nan observation", "observation"),
        ("nan reward", "reward"),
        ("infinite reward", "reward"),
        ("huge reward", "parameter"),
    ],
)
def test_bad_numbers_stop_all_ranks(tmp_path, kind, what, ranks):
    """In the second epoch: the line names what and where, and the first checkpoint stays."""
    result, status = odd(tmp_path, kind, ranks, at=500 // ranks)
    text = f"FloatingPointError: {what} is NaN or infinite on rank 0 in epoch 1"
    assert result.returncode and text in result.stderr
    assert status["status"] == "failed" and status["error"] == text
    checkpoints = run_dir(tmp_path, "odd") / "checkpoint"
    assert [p.name for p in checkpoints.glob("epoch_*")] == ["epoch_000001"]


@pytest.mark.parametrize("kind", ["ints", "list", "short", "endless"])
def test_odd_but_usable_environments(tmp_path, kind):
    """Observations of other types, episodes of one step, episodes without end."""
    result, status = odd(tmp_path, kind)
    assert result.returncode == 0 and status["status"] == "finished", result.stderr
    table = progress(run_dir(tmp_path, "odd"))
    lengths = {"ints": 50, "list": 50, "short": 1}
    if kind == "endless":
        assert table.EpLen.isna().all()  # no episode ended: nobody knows a return
    else:
        assert (table.EpLen == lengths[kind]).all()


def test_a_killed_rank_takes_the_others_along(tmp_path):
    """And leaves a run that resumes."""
    result, status = odd(tmp_path, "kill", ranks=2, at=300)
    assert result.returncode and status["status"] == "running"
    assert not processes(str(tmp_path))


def test_a_killed_mpirun_leaves_no_process(tmp_path):
    flags = ["--env-id", "CartPole-v1", *FLAGS, "--epochs", 10**6, "--data-dir", tmp_path]
    process = subprocess.Popen(command("ppo_torch", *flags, ranks=4), stdout=subprocess.DEVNULL)
    directory = run_dir(tmp_path, "ppo_torch_CartPole-v1")
    wait_for(lambda: (directory / "checkpoint").is_dir())
    assert processes(str(tmp_path))
    process.kill()
    process.wait()
    wait_for(lambda: not processes(str(tmp_path)), seconds=10)


def processes(word):
    """Pids of the processes with a word in their command line."""
    out = subprocess.run(["ps", "-eww", "-o", "pid=,args="], capture_output=True, text=True).stdout
    return [line.split()[0] for line in out.splitlines() if word in line]


def wait_for(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.1)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_full_disk(tmp_path, ranks):
    """From the second epoch on no file may grow beyond 4 kB: an error, and nothing is lost."""
    result, status = odd(tmp_path, "full disk", ranks, at=500 // ranks)
    assert result.returncode and "OSError: [Errno 27] File too large" in result.stderr
    assert status["status"] == "failed" and "File too large" in status["error"]
    flags = ["--env-id", "odd:Odd-v0", "--env-kwargs", '{"kind": "full disk", "at": %d}']
    flags[-1] %= 500 // ranks
    assert len(list((run_dir(tmp_path, "odd") / "checkpoint").glob("epoch_*"))) == 1
    (tmp_path / "odd.py").write_text(ODD.replace("4096", "2**30"))  # there is room again
    flags += [*FLAGS, "--epochs", 3, "--data-dir", tmp_path, "--exp-name", "odd", "--resume"]
    run("ppo_torch", *flags, ranks=ranks, env={"PYTHONPATH": str(tmp_path)})
    assert progress(run_dir(tmp_path, "odd")).Epoch.tolist() == [0, 1, 2]


def test_a_closed_pipe(tmp_path):
    """`| head -1` takes the output away; the run goes on."""
    flags = ["--env-id", "CartPole-v1", *FLAGS, "--epochs", 4, "--data-dir", tmp_path]
    line = " ".join(f"'{word}'" for word in command("ppo_torch", *flags))
    subprocess.run(["bash", "-o", "pipefail", "-c", f"{line} | head -1"], check=True, timeout=100)
    assert len(progress(run_dir(tmp_path, "ppo_torch_CartPole-v1"))) == 4


def test_all_checkpoints_damaged(tmp_path):
    """Refused in one line, rather than started again in silence."""
    flags = ["--env-id", "CartPole-v1", *FLAGS, "--data-dir", tmp_path, "--exp-name", "damaged"]
    run("ppo_torch", *flags, "--epochs", 2)
    checkpoints = run_dir(tmp_path, "damaged") / "checkpoint"
    for path in checkpoints.glob("*/rank_0.npz"):
        path.write_bytes(path.read_bytes()[:-1])
    result = run("ppo_torch", *flags, "--epochs", 3, "--resume", check=False)
    assert result.returncode == 2 and "error: no usable checkpoint in" in result.stderr
    assert "Traceback" not in result.stderr
    shutil.rmtree(checkpoints)
    result = run("ppo_torch", *flags, "--epochs", 3, "--resume")
    assert "Nothing to resume: starting from the beginning" in result.stdout


def test_resume_with_other_ranks_is_refused(tmp_path):
    flags = ["--env-id", "CartPole-v1", *FLAGS, "--data-dir", tmp_path, "--exp-name", "ranks"]
    run("ppo_torch", *flags, "--epochs", 1)
    result = run("ppo_torch", *flags, "--epochs", 2, "--resume", ranks=2, check=False)
    assert result.returncode == 2 and "ranks was 1, is 2" in result.stderr
    flags += ["--epochs", 2, "--resume", "--gamma", 0.5]
    result = run("ppo_torch", *flags, check=False)
    assert result.returncode == 2 and "gamma was 0.99, is 0.5" in result.stderr
