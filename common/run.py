"""What surrounds a run: the command line, the environment, the exit code.

Exit codes: 0 finished (or nothing left to do), 1 failed, 2 bad input, 128 + signal interrupted.
"""

import contextlib
import functools
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

from common import UsageError, files, mpi
from common.args import check_args, parse_args
from common.logger import EpochLogger

_logger = None  # of the run, which `abandon` is about
stop_signal = None  # the signal that asked this process to stop

# The run ----------------------------------------------------------------------------------------


def main(train, Args):
    """Run a script: read its flags, relaunch under mpirun if asked, train, set the exit code."""
    global stop_signal
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # it was closed, as by `>&-`
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    sys.stdout.reconfigure(errors="backslashreplace")  # as stderr does: any path can be printed
    sys.path.append("")  # so that --env-id finds modules in the current directory
    script, args = os.path.basename(sys.argv[0]), None
    try:
        args = parse_args(Args)
        mpi.fork(args.num_cpu)
        catch_signals()
        finished = train(args)
    except UsageError as e:
        all_agree = mpi.barrier(timeout=5)
        if mpi.proc_id() == 0 or not all_agree:
            tell(f"{script}: error: {e}")
        if not all_agree:
            mpi.abort(2)
        sys.exit(2)
    except BaseException:
        if args is None:  # --help
            raise
        # Without an abort the other ranks would wait forever, even if an environment called
        # sys.exit.
        where = f" on rank {mpi.proc_id()} of {mpi.num_procs()}" if mpi.num_procs() > 1 else ""
        tell(f"{script}: failed{where}\n{traceback.format_exc()}")
        mpi.abort(1)
    signum, stop_signal = stop_signal, None  # a later run of this process is not to stop
    if not finished:
        sys.exit(128 + (signum or signal.SIGTERM))


def experiment(train):
    """Decorate a script's `train(args)`, which is called from its command line or from Python.

    The arguments are checked before anything else happens. However `train` is left, status.json
    says how, and the run directory is free for the next run.
    """

    @functools.wraps(train)
    def checked_train(args):
        check_args(args)
        if args.num_cpu not in (1, "auto") and mpi.num_procs() == 1:
            raise UsageError(f"--num-cpu {args.num_cpu}: start Python with mpirun for more ranks")
        try:
            return train(args)
        except BaseException as e:
            status = "interrupted" if isinstance(e, KeyboardInterrupt) else "failed"
            abandon(status, str(e) if isinstance(e, UsageError) else f"{type(e).__name__}: {e}")
            raise

    return checked_train


def start(args, script):
    """Open the run directory of a script's `Args` and write its config.json.

    Args:
        args: the script's `Args`.
        script: its `__file__`; the experiment is called `<script>_<env-id>` if `args` has no name.

    Returns:
        an EpochLogger.

    Raises:
        UsageError: see `EpochLogger` and `EpochLogger.save_config`.
    """
    global _logger
    exp_name = args.exp_name or re.sub(r"[^\w.-]", "_", f"{Path(script).stem}_{args.env_id}")
    kwargs = files.setup_logger_kwargs(exp_name, args.seed, args.data_dir, args.datestamp)
    if not isinstance(args.resume, bool):
        kwargs["output_dir"] = str(args.resume)
    elif args.datestamp and args.resume:
        raise UsageError("--datestamp makes a new directory: give --resume the directory itself")
    logger = EpochLogger(**kwargs, resume=args.resume, overwrite=args.overwrite)
    try:
        logger.save_config(args, script)
    except UsageError:
        logger.release()
        raise
    _logger = logger
    return logger


def abandon(status, error):
    """Write down how the open run ended, from any rank, and close it, if one is open."""
    if _logger is not None and not _logger.closed:
        # The disk may be what failed: then the way out must not fail too.
        with contextlib.suppress(Exception):
            _logger.write_status(status, error)
        _logger.release()


def catch_signals():
    """From now on SIGINT, SIGTERM and SIGUSR1 end the run at the end of its epoch; twice, at once.

    A terminal's Ctrl-C comes twice, from the terminal and from mpirun: that is one request.
    """
    first = math.inf  # when the run was asked to stop

    def on_signal(signum, frame):
        nonlocal first
        global stop_signal
        if time.monotonic() > first + 1:
            abandon("interrupted", f"signal {signum}, twice")
            os._exit(128 + signum)
        if stop_signal is None and mpi.proc_id() == 0:
            name = signal.Signals(signum).name
            tell(f"\n{name}: stopping at the end of this epoch; once more stops at once")
        stop_signal, first = signum, min(first, time.monotonic())

    mpi.proc_id()  # MPI installs a SIGUSR1 handler of its own when it starts: ours comes after it
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(signum, on_signal)


def stop_requested():
    """Whether any rank was asked to stop by a signal; the same answer on all ranks."""
    return mpi.reduce(stop_signal is not None) > 0


def tell(text):
    """Write a line to stderr. That nobody reads it is no error."""
    with contextlib.suppress(OSError):  # no print: a signal's handler could interrupt another one
        os.write(2, f"{text}\n".encode(errors="backslashreplace"))


# The environment --------------------------------------------------------------------------------


def make_env(env_id, env_kwargs, action_spaces, bounded=False):
    """Make the environment. Observations of all supported spaces are flattened to vectors.

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
        with warnings.catch_warnings():  # that v4 is not the newest: results compare with v4's
            warnings.filterwarnings("ignore", ".*is out of date.*")
            # gymnasium's checker is for those who write environments, and slows every step.
            env = gym.make(env_id, disable_env_checker=True, **env_kwargs)
    except Exception as e:  # whatever a constructor raises
        why = f"{type(e).__name__}: {files.printable(e)}"
        raise UsageError(f"cannot make {env_id}: {why}") from e
    obs_space, space, wrong = env.observation_space, env.action_space, None
    if not obs_space.is_np_flattenable:
        wrong = f"{type(obs_space).__name__} observations, which no vector can hold"
    elif len(obs_space.shape or ()) > 1 and obs_space.dtype == np.uint8:
        wrong = "images as observations: these networks take vectors"
    elif not spaces.flatdim(obs_space):
        wrong = "empty observations: expected at least one number"
    elif not isinstance(space, action_spaces):
        names = ", ".join(kind.__name__ for kind in action_spaces)
        wrong = f"{type(space).__name__} actions; supported: {names}"
    elif bounded and not (np.abs(np.float64([space.low, space.high])) < 1e30).all():
        wrong = "actions without bounds: there is no scale to act on"
    elif isinstance(space, spaces.Box) and space.dtype.kind != "f":
        wrong = "integer actions in a Box; supported: real numbers"
    if wrong:
        raise UsageError(f"{env_id} has {wrong}")
    if not isinstance(obs_space, spaces.Box) or len(obs_space.shape) != 1:
        env = gym.wrappers.FlattenObservation(env)
    return CheckedEnv(env)


class CheckedEnv(gym.Wrapper):
    """Refuses NaN and infinity, observations of another shape than promised, and what is no number.

    NumPy would broadcast some of these without an error: one number fills a whole row. Observations
    are copies, since an environment may write the next one into the same array. A reset with a seed
    also seeds `random`, `np.random` and the spaces, which an environment may draw from.
    """

    def __init__(self, env):
        super().__init__(env)
        self.shape = env.observation_space.shape

    def reset(self, seed=None, **kwargs):
        if seed is not None:
            random.seed(seed)
            np.random.seed(seed)  # noqa: NPY002
            with contextlib.suppress(AttributeError):  # spaces that only a wrapper has
                self.env.unwrapped.action_space.seed(seed)
                self.env.unwrapped.observation_space.seed(seed)
        o, info = self.env.reset(seed=seed, **kwargs)
        return self.checked(o), info

    def step(self, action):
        check_numbers("action", action)
        o, r, terminated, truncated, info = self.env.step(action)
        o = self.checked(o)
        check_numbers("reward", r)
        if not isinstance(r, float):  # an integer, or an array of one number
            r = np.asarray(r, dtype=float).item()
        return o, r, bool(terminated), bool(truncated), info

    def checked(self, o):
        o = np.array(o)
        if o.shape != self.shape:
            wrong = f"gave an observation of shape {o.shape}, not {self.shape}"
            raise ValueError(f"{self.spec.id} {wrong} as its observation_space says")
        check_numbers("observation", o)
        return o


def check_numbers(name, x):
    """Raise FloatingPointError if a number or an array holds a NaN or an infinity.

    Raises TypeError if it holds something else than numbers.
    """
    # One product is quicker than looking at each element, and is finite if all of them are, unless
    # it overflows.
    try:
        finite = math.isfinite(np.vdot(x, x)) or np.isfinite(x).all()
    except (AttributeError, TypeError, ValueError) as e:
        raise TypeError(f"{name} must be numeric, not {files.printable(repr(x), 80)}") from e
    if not finite:
        raise FloatingPointError(f"{name} is NaN or infinite")


class RunningMeanStd:
    """Mean and standard deviation of all rows so far, over all ranks.

    Attributes:
        mean, std: [dim] float32, 0 and 1 before the first row; std is at least 1e-4.
    """

    def __init__(self, dim):
        self.sums = np.zeros((3, dim))  # of x^0, x^1 and x^2
        self.mean, self.std = np.zeros(dim, np.float32), np.ones(dim, np.float32)

    def update(self, x):
        """Take in this rank's new rows, x [N, dim]; the ranks exchange one message."""
        x = np.asarray(x, dtype=np.float64)
        self.load(self.sums + mpi.reduce([np.sum(x**k, axis=0) for k in range(3)]))

    def load(self, sums):
        """Go back to the `sums` of before."""
        self.sums = sums
        n, total, squares = sums
        if n.any():
            mean = total / n
            std = np.sqrt(np.maximum(squares / n - mean**2, 0) + 1e-8)
            self.mean, self.std = np.float32(mean), np.float32(std)


class NormalizedEnv(gym.Wrapper):
    """Normalizes observations, and collects the statistics that rewards are normalized by.

    Observations become (o - mean) / std, by the statistics of all epochs before this one: a policy
    acts on the same scale for a whole epoch. The statistics are over all ranks, and are part of
    checkpoints and, those of observations, of policy.npz.
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
        if self.norm_obs:
            self.obs_stats.update(self.obs)
        if self.norm_rew:
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
