"""What surrounds a run: the command line, the environment, the exit code.

Exit codes: 0 finished (or nothing left to do), 1 failed, 2 bad input, 128 + signal interrupted.
"""

import contextlib
import functools
import math
import os
import signal
import sys
import time
import traceback
import warnings

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from common import UsageError, logger
from common.args import check_args, parse_args
from common.mpi_tools import barrier, mpi_abort, mpi_fork, num_procs, proc_id
from common.serialization import printable

OBSERVATIONS = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)
OBSERVATIONS += (spaces.Tuple, spaces.Dict)  # of those above


class CheckedEnv(gym.Wrapper):
    """Refuses NaN and infinity, and results of another form, type or shape than promised.

    NumPy would broadcast some of these without an error: one number fills a whole row. Observations
    are copies, since an environment may write the next one into the same array.
    """

    def __init__(self, env):
        super().__init__(env)
        self.shape = env.observation_space.shape

    def reset(self, **kwargs):
        try:
            o, info = self.env.reset(**kwargs)
            if not isinstance(info, dict):  # the second of an old-style observation's two numbers
                raise ValueError(f"cannot unpack {printable(repr(info), 80)} as info")
        except (TypeError, ValueError) as e:
            self.explain(e, "reset", "observation, info")
            raise
        return self.checked(o), info

    def step(self, action):
        check_numbers("action", action)
        try:
            o, r, terminated, truncated, info = self.env.step(action)
        except (TypeError, ValueError) as e:
            self.explain(e, "step", "observation, reward, terminated, truncated, info")
            raise
        if isinstance(r, np.ndarray | list | tuple):
            if np.size(r) != 1:
                raise ValueError(f"{self.spec.id} gave a reward of shape {np.shape(r)}")
            r = np.asarray(r).item()
        o = self.checked(o)
        check_numbers("reward", r)
        return o, r, terminated, truncated, info

    def checked(self, o):
        o = np.array(o)
        if o.shape != self.shape:
            wrong = f"gave an observation of shape {o.shape}, not {self.shape}"
            raise ValueError(f"{self.spec.id} {wrong} as its observation_space says")
        check_numbers("observation", o)
        return o

    def explain(self, error, method, wanted):
        """Raise ValueError if `error` is that a method's results could not be told apart."""
        if "unpack" in str(error):  # here, or in one of gymnasium's wrappers
            text = f"{self.spec.id}: {method} must return ({wanted}): {error}"
            raise ValueError(text) from error


def check_numbers(name, x):
    """Raise FloatingPointError if a number or an array holds a NaN or an infinity.

    Raises TypeError if it holds something else than numbers.
    """
    # One product is quicker than looking at each element, and is finite if all of them are, unless
    # it overflows.
    try:
        finite = math.isfinite(np.vdot(x, x)) or np.isfinite(x).all()
    except (AttributeError, TypeError, ValueError) as e:
        raise TypeError(f"{name} must be numeric, not {printable(repr(x), 80)}") from e
    if not finite:
        raise FloatingPointError(f"{name} is NaN or infinite")


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
    except Exception as e:  # whatever the environment's own code raises on its arguments
        raise UsageError(f"cannot make {env_id}: {type(e).__name__}: {printable(e)}") from e
    for space in _parts(env.observation_space):
        _check_space(f"{env_id} has {{}} observations", space, OBSERVATIONS)
        if isinstance(space, spaces.Box) and space.dtype == np.uint8 and len(space.shape) > 1:
            raise UsageError(f"{env_id} has images as observations: these networks take vectors")
    space = env.action_space
    _check_space(f"{env_id} has {{}} actions", space, action_spaces)
    if bounded and not space.is_bounded():
        raise UsageError(f"{env_id} has actions without bounds: there is no scale to act on")
    if isinstance(space, spaces.Box) and space.dtype.kind != "f":
        raise UsageError(f"{env_id} has integer actions in a Box; supported: real numbers")
    if not isinstance(env.observation_space, spaces.Box) or len(env.observation_space.shape) != 1:
        env = gym.wrappers.FlattenObservation(env)
    if env.observation_space.shape == (0,):
        raise UsageError(f"{env_id} has empty observations: there is nothing to learn from")
    return CheckedEnv(env)


def _parts(space):
    """The spaces that a Dict or Tuple space consists of, however deeply; any other space itself."""
    if not isinstance(space, spaces.Dict | spaces.Tuple):
        return [space]
    parts = space.values() if isinstance(space, spaces.Dict) else space
    return [inner for part in parts for inner in _parts(part)]


def _check_space(text, space, supported):
    if not isinstance(space, supported):
        names = ", ".join(kind.__name__ for kind in supported)
        raise UsageError(f"{text.format(type(space).__name__)}; supported: {names}")


def experiment(train):
    """Decorate a script's `train(args)`, which is called from its command line or from Python.

    The arguments are checked before anything else happens. However `train` is left, status.json
    says how, and the run directory is free for the next run.
    """

    @functools.wraps(train)
    def checked_train(args):
        check_args(args)
        try:
            return train(args)
        except BaseException as e:
            status = "interrupted" if isinstance(e, KeyboardInterrupt) else "failed"
            text = str(e) if isinstance(e, UsageError) else f"{type(e).__name__}: {e}"
            logger.abandon(status, text)
            raise

    return checked_train


def catch_signals():
    """From now on SIGINT, SIGTERM and SIGUSR1 end the run at the end of its epoch; twice, at once.

    A terminal's Ctrl-C comes twice, from the terminal and from mpirun: that is one request.
    """
    first = math.inf  # when the run was asked to stop

    def on_signal(signum, frame):
        nonlocal first
        if time.monotonic() > first + 1:
            logger.abandon("interrupted", f"signal {signum}, twice")
            os._exit(128 + signum)
        if logger.stop_signal is None and proc_id() == 0:
            name = signal.Signals(signum).name
            tell(f"\n{name}: stopping at the end of this epoch; once more stops at once")
        logger.stop_signal, first = signum, min(first, time.monotonic())

    proc_id()  # MPI installs a SIGUSR1 handler of its own when it starts: ours comes after it
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(signum, on_signal)


def tell(text):
    """Write a line to stderr. That nobody reads it is no error."""
    with contextlib.suppress(OSError):  # no print: a signal's handler could interrupt another one
        os.write(2, f"{text}\n".encode(errors="backslashreplace"))


def main(train, Args):
    """Run a script: read its flags, relaunch under mpirun if asked, train, set the exit code."""
    sys.stdout.reconfigure(errors="backslashreplace")  # as stderr does: any path can be printed
    sys.path.append("")  # so that --env-id finds modules in the current directory
    script, args = os.path.basename(sys.argv[0]), None
    try:
        args = parse_args(Args)
        mpi_fork(args.num_cpu)
        catch_signals()
        finished = train(args)
    except UsageError as e:
        all_agree = barrier(timeout=5)
        if proc_id() == 0 or not all_agree:
            tell(f"{script}: error: {e}")
        if not all_agree:
            mpi_abort(2)
        sys.exit(2)
    except BaseException:
        if args is None:  # --help
            raise
        # Without an abort the other ranks would wait forever, even if an environment called
        # sys.exit.
        where = f" on rank {proc_id()} of {num_procs()}" if num_procs() > 1 else ""
        tell(f"{script}: failed{where}\n{traceback.format_exc()}")
        mpi_abort(1)
    if not finished:
        sys.exit(128 + (logger.stop_signal or signal.SIGTERM))
