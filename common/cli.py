"""What surrounds a run: the command line and exit code, the environment, requests to stop.

Exit codes: 0 finished (or nothing left to do), 1 failed, 2 bad input, 128 + signal interrupted.
"""

import contextlib
import os
import signal
import sys
import time
import traceback
import warnings

import gymnasium as gym
import numpy as np

from common import UsageError, logger
from common.args import parse_args
from common.mpi_tools import barrier, mpi_abort, mpi_fork, mpi_op, num_procs, proc_id


class CheckedEnv(gym.Wrapper):
    """Refuses observations and rewards of another shape than promised.

    NumPy stores some of them all the same: one number fills a whole row.
    """

    def __init__(self, env):
        super().__init__(env)
        self.shape = env.observation_space.shape

    def reset(self, **kwargs):
        o, info = self.env.reset(**kwargs)
        self.check(o)
        return o, info

    def step(self, action):
        o, r, terminated, truncated, info = self.env.step(action)
        self.check(o)
        if isinstance(r, np.ndarray | list | tuple):
            if np.size(r) != 1:
                raise ValueError(f"{self.spec.id} gave a reward of shape {np.shape(r)}")
            r = np.asarray(r).item()
        return o, r, terminated, truncated, info

    def check(self, o):
        if np.shape(o) != self.shape:
            wrong = f"gave an observation of shape {np.shape(o)}, not {self.shape}"
            raise ValueError(f"{self.spec.id} {wrong} as its observation_space says")


def make_env(env_id, env_kwargs, action_spaces):
    """Make the environment, with vector observations.

    Args:
        env_id: a Gymnasium id, `package:Name-v0` to import a package first.
        env_kwargs: dict of arguments for the environment.
        action_spaces: tuple of the space classes that the script can act in.

    Raises:
        UsageError: there is no such environment, it cannot be made with these arguments, or its
            spaces are not supported.
    """
    try:
        with warnings.catch_warnings():  # that v4 is not the newest: results compare with v4's
            warnings.filterwarnings("ignore", ".*is out of date.*")
            # gymnasium's checker is for those who write environments, and slows every step.
            env = gym.make(env_id, disable_env_checker=True, **env_kwargs)
    except (gym.error.Error, ImportError, TypeError, ValueError) as e:
        raise UsageError(f"cannot make {env_id}: {' '.join(str(e).split())}") from e
    spaces = (("observations", env.observation_space, (gym.spaces.Box,)),)
    for what, space, supported in (*spaces, ("actions", env.action_space, action_spaces)):
        if not isinstance(space, supported):
            names = " and ".join(kind.__name__ for kind in supported)
            raise UsageError(f"{env_id} has {type(space).__name__} {what}; supported: {names}")
    env = CheckedEnv(env)
    if len(env.observation_space.shape) != 1:
        env = gym.wrappers.FlattenObservation(env)
    return env


_stop_signal = None  # the signal that asked this process to stop
_stop_time = 0.0


def _on_signal(signum, frame):
    global _stop_signal, _stop_time
    # A terminal's Ctrl-C comes twice, from the terminal and from mpirun: that is one request.
    if _stop_signal is not None and time.monotonic() - _stop_time > 1:
        logger.mark("interrupted", f"signal {signum}, twice")
        os._exit(128 + signum)
    if _stop_signal is None:
        _stop_signal, _stop_time = signum, time.monotonic()
        if proc_id() == 0:
            name = signal.Signals(signum).name
            text = f"\n{name}: stopping at the end of this epoch; once more stops at once\n"
            with contextlib.suppress(OSError):  # where nobody reads any more
                os.write(2, text.encode())  # a print here could interrupt another one


def catch_signals():
    """From now on SIGINT, SIGTERM and SIGUSR1 ask for a stop at the end of the epoch."""
    proc_id()  # MPI installs a SIGUSR1 handler of its own when it starts: ours comes after it
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(signum, _on_signal)


def stop_requested():
    """Whether any rank was asked to stop; the same answer on all ranks."""
    return mpi_op(float(_stop_signal is not None), "MAX") > 0


def tell(text):
    """Print a line on stderr, also where nobody reads any more: the way out must not fail."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def main(train, Args):
    """Run a script: read its flags, relaunch under mpirun if asked, train, set the exit code."""
    sys.stdout.reconfigure(errors="backslashreplace")  # as stderr does: any path can be printed
    script, args = os.path.basename(sys.argv[0]), None
    try:
        args = parse_args(Args)
        try:
            mpi_fork(args.num_cpu)
        except RuntimeError as e:
            raise UsageError(str(e)) from e
        catch_signals()
        finished = train(args)
    except UsageError as e:
        all_agree = barrier(timeout=5)
        if proc_id() == 0 or not all_agree:
            tell(f"{script}: error: {e}")
            logger.mark("failed", str(e))
        if not all_agree:
            mpi_abort(2)
        sys.exit(2)
    except BaseException as e:
        if args is None:  # --help
            raise
        # Without an abort the other ranks would wait for this one for ever, even if an environment
        # called sys.exit.
        where = f" on rank {proc_id()} of {num_procs()}" if num_procs() > 1 else ""
        tell(f"{script}: failed{where}\n{traceback.format_exc()}")
        logger.mark("failed", f"{type(e).__name__}: {e}")
        mpi_abort(1)
    if not finished:
        sys.exit(128 + (_stop_signal or signal.SIGTERM))
