"""An environment that misbehaves, for tests/test_faults.py: `--env-id odd_env:Odd-v0`.

`kind` says what is always wrong with it, from the step `at` on. What befalls one process, and not
the next that resumes the run, is in the environment variable FAULT, a JSON object:

    rank    the rank that it befalls
    at      after so many steps of this process
    where   "rollout": in this very step; "reset", "update" or "save": in the next of those
    how     what happens: a signal, or a name of `Fault`'s methods
    told    a file to write the time to as it happens
"""

import json
import os
import resource
import signal
import sys
import time
from pathlib import Path

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box

from common import logger, mpi, run


class Fault:
    """What FAULT asks for; nothing, if it asks for nothing or of another rank."""

    def __init__(self):
        wanted = json.loads(os.environ.get("FAULT", "null")) or {"rank": -1, "at": -1}
        self.at = wanted["at"] if wanted["rank"] == mpi.proc_id() else -1
        self.env = None  # the environment that it lies in wait in: the first, not the one for tests
        self.where, self.how = wanted.get("where"), wanted.get("how")
        self.told = wanted.get("told")
        self.nan = False

    def step(self, env):
        self.env = self.env or env
        if env is self.env and env.steps == self.at:
            if self.where == "rollout":
                self.happen()
            elif self.where == "update":
                script = sys.modules["__main__"]
                if hasattr(script, "GAEBuffer"):
                    script.GAEBuffer.get = self.happen
                else:
                    script.ReplayBuffer.sample = self.happen
            elif self.where == "save" and mpi.proc_id() == 0:
                os.fsync = self.fsync
            elif self.where == "save":
                logger.EpochLogger.save_state = self.happen

    def reset(self, env):
        if env is self.env and env.steps >= self.at > 0 and self.where == "reset":
            self.happen()

    def fsync(self, fd, real=os.fsync):
        """In the middle of a save: the checkpoint is written and has no name yet."""
        if ".checkpoint.npz" in os.readlink(f"/proc/self/fd/{fd}"):
            os.fsync = real
            self.happen()
        real(fd)

    def happen(self, *args, **kwargs):
        Path(self.told).write_text(str(time.time()))
        if self.how.startswith("sig"):
            self.signal(*self.how.split("_"))
        else:
            getattr(self, self.how)()

    def raises(self):
        raise RuntimeError("the robot fell apart")

    def exits(self):
        sys.exit(0)

    def kill(self):
        os.kill(os.getpid(), signal.SIGKILL)

    def kill_mpirun(self):
        os.kill(launcher(), signal.SIGKILL)

    def full_disk(self):
        resource.setrlimit(resource.RLIMIT_FSIZE, (1024, -1))

    def nan_observation(self):
        self.nan = True

    def signal(self, name, twice=None):
        os.kill(launcher(), getattr(signal, name.upper()))
        if twice:
            while run.stop_signal is None:  # not arrived yet
                time.sleep(0.01)
            time.sleep(1.5)  # within a second it would count as one
            self.signal(name)
            time.sleep(30)  # it takes a moment to arrive, and nothing more may happen before


def launcher():
    """Whom the user would send a signal: mpirun, two generations up, or this process alone."""
    if mpi.num_procs() == 1:
        return os.getpid()
    proxy = Path(f"/proc/{os.getppid()}/stat").read_text()
    return int(proxy.rpartition(")")[2].split()[1])


fault = Fault()


class Odd(gym.Env):
    observation_space, action_space = Box(-np.inf, np.inf, (3,), np.float64), Box(-1, 1, (2,))

    def __init__(self, kind="", at=0):
        self.kind, self.at, self.steps, self.len = kind, at, 0, 0
        self.array = np.zeros(3)
        if kind == "no bounds":
            self.action_space = Box(-np.inf, np.float32([np.inf, 1]))
        elif kind in ("float16", "float64"):  # in which 0.3 is not what it is in float32
            self.action_space = Box(-0.3, 0.3, (2,), kind)

    def obs(self):
        o = self.np_random.normal(size=3)
        late = self.steps >= self.at
        if fault.nan or (self.kind == "nan observation" and late):
            o[1] = np.nan
        shapes = {"one number": o[:1], "too short": o[:2], "a column": o[:, None], "a number": o[0]}
        if self.kind in shapes and late:
            return shapes[self.kind]
        if self.kind == "one array":  # for all observations
            self.array[:] = o
            return self.array
        return {"ints": np.arange(3), "list": [0, 1, 2], "words": ["a"] * 3}.get(self.kind, o)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        fault.reset(self)
        self.len = 0
        return self.obs() if self.kind == "old reset" else (self.obs(), {})

    def step(self, action):
        assert self.action_space.contains(action) or np.isnan(action).any(), action
        self.steps, self.len = self.steps + 1, self.len + 1
        fault.step(self)
        rewards = {"nan reward": np.nan, "infinite reward": np.inf, "huge reward": 1e38}
        rewards |= {"in arrays": np.array([-1.0]), "two rewards": np.ones(2)}
        rewards |= {"no reward": None, "a word": "high", "rising": self.steps}
        r = rewards.get(self.kind, -1.0) if self.steps >= self.at else -1.0
        end = {"short": 1, "endless": 10**9}.get(self.kind, 50)
        ends = self.len >= end, False
        if self.kind == "in arrays":
            ends = np.array(ends).reshape(2, 1)
        late, result = self.steps >= self.at, (self.obs(), r, *ends, {})
        return result[:4] if self.kind == "old step" and late else result


gym.register("Odd-v0", Odd)
