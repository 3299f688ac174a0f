"""What surrounds a run: the command line, the environment, the exit code.

Exit codes: 0 finished (or nothing left to do), 1 failed, 2 bad input, 128 + signal interrupted.
"""

import contextlib
import math
import os
import random
import re
import signal
import sys
import time
import traceback
import warnings
from pathlib import Path

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from common import UsageError, mpi
from common.args import parse_args
from common.logger import EpochLogger, setup_logger_kwargs

_logger = None  # of the run that is open
stop_signal = None  # the signal that asked this process to stop

# The run ----------------------------------------------------------------------------------------


def main(train, Args):
    """Run a script: read its flags, relaunch under mpirun if asked, train, set the exit code."""
    global _logger, stop_signal
    _logger = args = None
    sys.path.append("")  # so that --env-id finds modules in the current directory
    try:
        args = parse_args(Args)
        mpi.fork(args.num_cpu)
        catch_signals()
        finished = train(args)
    except BaseException as e:
        if isinstance(e, SystemExit) and args is None:  # after --help, or a wrong flag
            raise
        fail(e)
    signum, stop_signal = stop_signal, None  # a later run of this process is not to stop
    if not finished:
        sys.exit(128 + (signum or signal.SIGTERM))


def fail(e):
    """Say why on stderr and in status.json, and end all ranks: the others would wait forever."""
    status, code = "failed", 1
    text = f"failed on rank {mpi.proc_id()} of {mpi.num_procs()}\n"
    text += "".join(traceback.format_exception(e))
    if isinstance(e, KeyboardInterrupt):
        status, text, code = "interrupted", str(e), 128 + (stop_signal or signal.SIGINT)
    elif isinstance(e, UsageError) or (isinstance(e, MemoryError) and str(e)):  # NumPy says why
        text, code = f"error: {' '.join(str(e).split())}", 2
    if _logger and not isinstance(e, UsageError):
        with contextlib.suppress(Exception):  # the disk may be what failed
            _logger.close(status, f"{type(e).__name__}: {e}")
    time.sleep(2 if mpi.proc_id() else 0)  # where all fail alike, rank 0 reports it
    text = "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in text)
    print(f"{os.path.basename(sys.argv[0])}: {text}", file=sys.stderr)
    mpi.abort(code)


def start(args, script):
    """Open the run directory of a script's `Args` and write its config.json.

    Args:
        args: the script's `Args`.
        script: its `__file__`; the experiment is called `<script>_<env-id>` if `args` has no name.

    Returns:
        an EpochLogger.

    Raises:
        UsageError: see `EpochLogger`; or `num_cpu` is more than the ranks that there are.
    """
    global _logger
    if args.num_cpu not in (1, "auto") and mpi.num_procs() == 1:
        raise UsageError(f"--num-cpu {args.num_cpu}: start Python with mpirun for more ranks")
    if args.resume is True and args.datestamp:
        raise UsageError("--datestamp makes a new directory: --resume DIR goes on with a run")
    if _logger:  # of a run in this process that ended with an exception
        _logger.release()
    exp_name = args.exp_name or re.sub(r"[^\w.-]", "_", f"{Path(script).stem}_{args.env_id}")
    kwargs = setup_logger_kwargs(exp_name, args.seed, args.data_dir, args.datestamp)
    if isinstance(args.resume, str):
        kwargs["output_dir"] = args.resume
    _logger = EpochLogger(**kwargs, resume=bool(args.resume), overwrite=args.overwrite)
    _logger.save_config(args, script)
    return _logger


def catch_signals():
    """From now on SIGINT, SIGTERM or SIGUSR1 ends the run after this epoch, a second one at once.

    A terminal's Ctrl-C comes twice, from the terminal and from mpirun: that is one request.
    """
    first = math.inf  # when the run was asked to stop

    def on_signal(signum, frame):
        nonlocal first
        global stop_signal
        name = signal.Signals(signum).name
        if time.monotonic() > first + 1:
            raise KeyboardInterrupt(f"{name}, twice")
        if stop_signal is None and mpi.proc_id() == 0:  # not print: it may have been interrupted
            text = f"\n{name}: stopping at the end of this epoch; once more stops at once\n"
            os.write(2, text.encode())
        stop_signal, first = signum, min(first, time.monotonic())

    mpi.proc_id()  # MPI installs a SIGUSR1 handler of its own when it starts: ours comes after it
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(signum, on_signal)


def stop_requested():
    """Whether any rank was asked to stop by a signal; the same answer on all ranks."""
    return mpi.reduce(stop_signal is not None) > 0


# The environment --------------------------------------------------------------------------------


def make_env(env_id, env_kwargs, action_spaces, bounded=False):
    """Make the environment. Observations of all supported spaces are flattened to vectors.

    Gymnasium checks the first reset and step, and warns of what does not fit the spaces.

    Args:
        env_id: a Gymnasium id, `package:Name-v0` to import a package first.
        env_kwargs: dict of arguments for the environment.
        action_spaces: tuple of the space classes that the script can act in.
        bounded: whether Box actions need bounds, to be scaled to.

    Raises:
        UsageError: there is no such environment, it cannot be made with these arguments, or its
            spaces are not supported.
    """
    try:
        with warnings.catch_warnings():  # that v4 is out of date: our results are of v4
            warnings.filterwarnings("ignore", ".*is out of date.*")
            env = gym.make(env_id, **env_kwargs)
    except Exception as e:  # whatever a constructor raises
        raise UsageError(f"cannot make {env_id}: {type(e).__name__}: {e}") from e
    space = env.action_space
    fits = isinstance(space, action_spaces) and env.observation_space.is_np_flattenable
    if fits and isinstance(space, spaces.Box):
        limits = np.float64([space.low, space.high])
        fits = space.dtype.kind == "f" and (not bounded or (np.abs(limits) < 1e30).all())
    fits = fits and spaces.flatdim(env.observation_space) > 0
    if not fits:
        names = " or ".join(kind.__name__ for kind in action_spaces)
        actions = f"{names} actions of real numbers{', with bounds' if bounded else ''}"
        text = f"{env_id} has {env.observation_space} and {space}"
        raise UsageError(f"{text}; supported: observations that a vector can hold, and {actions}")
    return RepeatableEnv(gym.wrappers.FlattenObservation(env))


class RepeatableEnv(gym.Wrapper):
    """An environment whose reset with a seed also seeds `random`, `np.random` and the spaces.

    An environment may draw from any of these generators, so each has numbers of its own. Rewards
    and end flags become Python numbers, also from arrays of one element.
    """

    def reset(self, seed=None, **kwargs):
        if seed is not None:
            random.seed(seed)
            np.random.seed(seed % 2**32)  # noqa: NPY002
            with contextlib.suppress(AttributeError):  # spaces that only a wrapper has
                self.env.unwrapped.action_space.seed(seed + 1)
                self.env.unwrapped.observation_space.seed(seed + 2)
        return self.env.reset(seed=seed, **kwargs)

    def step(self, action):
        o, r, terminated, truncated, info = self.env.step(action)
        return o, np.float64(r).item(), bool(terminated), bool(truncated), info


class RunningMeanStd:
    """Mean and standard deviation of all rows so far, over all ranks.

    Attributes:
        mean, std: [dim] float32, 0 and 1 before the first row; std is at least 1e-4.
    """

    def __init__(self, dim):
        self.sums = np.zeros((3, dim))  # of x^0, x^1 and x^2
        self.mean, self.std = np.zeros(dim, np.float32), np.ones(dim, np.float32)

    def update(self, x):
        """Take in this rank's new rows, x [N, dim], N may be 0; the ranks exchange one message."""
        x = np.float64(x).reshape(-1, len(self.mean))
        self.load(self.sums + mpi.reduce([np.sum(x**k, axis=0) for k in range(3)]))

    def load(self, sums):
        """Restore saved `sums`."""
        self.sums = sums
        n, total, squares = sums
        if n.any():
            mean = total / n
            std = np.sqrt(np.maximum(squares / n - mean**2, 0) + 1e-8)
            self.mean, self.std = np.float32(mean), np.float32(std)


class NormalizedEnv(gym.Wrapper):
    """Normalizes observations, and collects the statistics that rewards are normalized by.

    Observations become (o - mean) / std, by the statistics of all epochs before this one: a policy
    acts on the same scale for a whole epoch. They are clipped to [-10, 10], which is all that is
    done in the first epoch. The statistics are over all ranks, and are part of checkpoints and,
    those of observations, of policy.npz.
    """

    def __init__(self, env, norm_obs, norm_rew, gamma):
        super().__init__(env)
        self.norm_obs, self.norm_rew, self.gamma = norm_obs, norm_rew, gamma
        self.obs_stats = RunningMeanStd(env.observation_space.shape[0])
        self.ret_stats = RunningMeanStd(1)
        self.obs, self.rets, self.ret = [], [], 0.0  # of this epoch; of this episode so far

    def reset(self, **kwargs):
        o, info = self.env.reset(**kwargs)
        self.ret = 0.0
        return self._normalize(o), info

    def step(self, action):
        o, r, terminated, truncated, info = self.env.step(action)
        if self.norm_rew:
            self.ret = r + self.gamma * self.ret
            self.rets.append([self.ret])
        return self._normalize(o), r, terminated, truncated, info

    def _normalize(self, o):
        if not self.norm_obs:
            return o
        self.obs.append(o)
        return ((np.float32(o) - self.obs_stats.mean) / self.obs_stats.std).clip(-10, 10)

    def update_statistics(self):
        """Take in what this epoch has seen, on all ranks."""
        self.obs_stats.update(self.obs)
        self.ret_stats.update(self.rets)
        self.obs, self.rets = [], []

    def normalize_rewards(self, rew):
        """An epoch's rewards [N], divided by the deviation of an episode's discounted sum so far.

        Call it after `update_statistics`: returns can grow by half in an epoch, the deviation of
        the epochs before would be too small, and V would be fitted to targets that are too large.
        The quotients are clipped to [-10, 10].
        """
        return (rew / self.ret_stats.std).clip(-10, 10) if self.norm_rew else rew

    def policy_arrays(self):
        """What a policy needs to act on plain observations, for policy.npz."""
        if not self.norm_obs:
            return {}
        return {"obs_mean": self.obs_stats.mean, "obs_std": self.obs_stats.std}

    def state_dict(self):
        """The sums behind the statistics, for checkpoints."""
        return {"obs": self.obs_stats.sums, "ret": self.ret_stats.sums}

    def load_state_dict(self, arrays):
        """Go back to what `state_dict` returned."""
        self.obs_stats.load(arrays["obs"])
        self.ret_stats.load(arrays["ret"])
