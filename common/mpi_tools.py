"""Data-parallel training over MPI, free of any learning framework.

Every function works the same with one rank, with or without mpi4py installed: `num_procs()` is then
1 and the reductions return what they were given. Statistics are reduced in float64, since float32
sums lose counts above 2**24. MPI starts at the first call that needs it, never at import, so that
`mpi_fork` can still replace the process.
"""

import contextlib
import functools
import math
import os
import shutil
import sys
import time

import numpy as np

from common import UsageError

RNG_USES = ("weights", "rollout", "test")  # each draws random numbers of its own; see make_rng
FORK_MARKER = "MPI_FORKED"  # set by mpi_fork for its children alone, who delete it
MAX_THREADS = 4  # more threads than this do not speed up networks of this size


@functools.cache
def _mpi():
    """The module mpi4py.MPI, initialised by its import, or None where it is not installed."""
    try:
        from mpi4py import MPI

        return MPI
    except (ImportError, RuntimeError) as e:  # RuntimeError: mpi4py found no MPI library to load
        launched = [os.environ.get(v, "1") for v in ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE")]
        if launched != ["1", "1"]:
            # Without this every rank would take itself for rank 0 and write over the others.
            raise RuntimeError(f"started under mpirun, but mpi4py does not work here: {e}") from e
        return None


def proc_id():
    """Rank of this process, from 0."""
    return _mpi().COMM_WORLD.Get_rank() if _mpi() else 0


def num_procs():
    """Number of ranks."""
    return _mpi().COMM_WORLD.Get_size() if _mpi() else 1


def make_rng(seed, use, *key):
    """The random number generator of one use of a run, independent of all others.

    Every epoch makes its generators anew, so a resumed run needs no saved ones. The spawn key of
    NumPy's SeedSequence keeps them apart; a list would not: `default_rng(3)` and
    `default_rng([3, 0])` are the same generator, since NumPy pads a seed with zeros.

    Args:
        seed: the run's seed.
        use: "weights", "rollout" or "test".
        key: ints that tell generators of one use apart: the rank, the epoch, the test episode.
    """
    return np.random.default_rng(
        np.random.SeedSequence(seed, spawn_key=(RNG_USES.index(use), *key))
    )


def allreduce(x, op="SUM"):
    """Reduce array `x` over all ranks, elementwise, in its own dtype; `op` is SUM, MIN or MAX."""
    out = np.array(x)
    if num_procs() > 1:
        _mpi().COMM_WORLD.Allreduce(_mpi().IN_PLACE, out, op=getattr(_mpi(), op))
    return out


def mpi_op(x, op):
    """Reduce a number or array over all ranks in float64: a float for a number, else an array."""
    x = np.asarray(x, dtype=np.float64, order="C")
    return allreduce(x, op) if x.ndim else float(allreduce(x, op))


def mpi_sum(x):
    """Sum of `x` over all ranks, elementwise, in float64."""
    return mpi_op(x, "SUM")


def mpi_avg(x):
    """Mean of `x` over all ranks, elementwise, in float64."""
    return mpi_sum(x) / num_procs()


def average(x):
    """Mean of array `x` over all ranks, elementwise, in its own dtype."""
    return allreduce(x) / x.dtype.type(num_procs())


def broadcast(x):
    """Rank 0's value of `x` (any small Python object or array), on every rank."""
    return x if num_procs() == 1 else _mpi().COMM_WORLD.bcast(x)


def allgather(x):
    """List of every rank's `x` (any small Python object), in order of rank, on every rank."""
    return [x] if num_procs() == 1 else _mpi().COMM_WORLD.allgather(x)


def on_rank_0(call, *args):
    """Call a function on rank 0 alone, and return on all ranks what it returns there.

    Raises:
        UsageError: on all ranks, if the function raised it.
    """
    result = error = None
    if proc_id() == 0:
        try:
            result = call(*args)
        except UsageError as e:
            error = e
    result, error = broadcast((result, error))
    if error:
        raise error
    return result


def barrier(timeout=math.inf):
    """Wait for all ranks, for `timeout` seconds at most. Returns whether all arrived."""
    if num_procs() == 1:
        return True
    request, deadline = _mpi().COMM_WORLD.Ibarrier(), time.monotonic() + timeout
    while not request.Test():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.001)
    return True


def mpi_abort(code):
    """End every rank at once with exit code `code`; with a single rank, end this process."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # where nobody reads any more
            stream.flush()
    if num_procs() > 1:
        time.sleep(0.5)  # mpirun drops what it has not passed on by then
        _mpi().COMM_WORLD.Abort(code)
    os._exit(code)


def mpi_statistics_scalar(x, with_min_and_max=False):
    """Mean and standard deviation (and min and max) of the numbers that all ranks hold together.

    Args:
        x: numbers of this rank, any shape; may be empty on some ranks.

    Returns:
        (mean, std) or (mean, std, min, max), floats; all NaN where no rank holds a number.
    """
    x = np.asarray(x, dtype=np.float64).ravel()
    total, n = mpi_sum([x.sum(), x.size])
    if n == 0:
        return (float("nan"),) * (4 if with_min_and_max else 2)
    mean = float(total / n)
    std = float(np.sqrt(mpi_sum(np.sum((x - mean) ** 2)) / n))
    if not with_min_and_max:
        return mean, std
    low = mpi_op(x.min() if x.size else np.inf, "MIN")
    high = mpi_op(x.max() if x.size else -np.inf, "MAX")
    return mean, std, low, high


class RunningMeanStd:
    """Mean and standard deviation of all rows so far, over all ranks.

    Attributes:
        mean, std: [dim] float64, 0 and 1 before the first row; std is at least 1e-4.
    """

    def __init__(self, dim):
        self.sums = np.zeros((3, dim))  # of x^0, x^1 and x^2
        self.mean, self.std = np.zeros(dim), np.ones(dim)

    def update(self, x):
        """Take in this rank's new rows, x [N, dim]; the ranks exchange one message."""
        x = np.asarray(x, dtype=np.float64)
        sums = mpi_sum([np.sum(x**k, axis=0) for k in range(3)])
        self.load_state_dict({"sums": self.sums + sums})

    def state_dict(self):
        """What a checkpoint holds: the sums, from which the rest follows."""
        return {"sums": self.sums}

    def load_state_dict(self, state):
        """Go back to what `state_dict` returned."""
        self.sums = np.asarray(state["sums"])
        n, total, squares = self.sums
        if n.any():
            self.mean = total / n
            self.std = np.sqrt(np.maximum(squares / n - self.mean**2, 0) + 1e-8)


def rank_share(name, total, epoch=math.inf):
    """This rank's share of a total over all ranks, an int.

    Raises:
        UsageError: the ranks do not divide it, since a remainder would be lost silently; or it is
            more than `epoch`, the steps of an epoch.
    """
    if total > epoch:
        raise UsageError(f"{name} {total} is above --steps-per-epoch, {epoch}")
    if total % num_procs():
        raise UsageError(f"{name} {total} is not a multiple of the {num_procs()} ranks")
    return total // num_procs()


def check_finite(when, **values):
    """Stop all ranks at the same place if any rank holds a NaN or an infinity.

    Args:
        when: where in the run this is, for the message ("epoch 3").
        values: a number, an array, or nested dicts and lists of them, by name.

    Raises:
        FloatingPointError: on every rank. It names the first bad value, in the order given, and
            the first rank that holds it: one bad reward soon makes all ranks' parameters bad.
    """
    bad = [name for name, value in values.items() if not _all_finite(value)]
    if mpi_op(float(bool(bad)), "MAX"):
        by_rank = allgather(bad)
        name = next(name for name in values if any(name in names for names in by_rank))
        rank = next(rank for rank, names in enumerate(by_rank) if name in names)
        raise FloatingPointError(f"{name} is NaN or infinite on rank {rank} in {when}")


def _all_finite(tree):
    """Whether no array or number in nested dicts and lists is NaN or infinite."""
    if isinstance(tree, dict):
        return all(map(_all_finite, tree.values()))
    if isinstance(tree, list | tuple):
        return all(map(_all_finite, tree))
    return isinstance(tree, str | None) or bool(np.isfinite(tree).all())


def cores():
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def threads_per_rank():
    """This rank's fair share of the cores that it may use on its machine, at most MAX_THREADS."""
    ranks_here = 1
    if num_procs() > 1:
        local = _mpi().COMM_WORLD.Split_type(_mpi().COMM_TYPE_SHARED)
        ranks_here = local.Get_size()
        local.Free()
    return max(1, min(MAX_THREADS, cores() // ranks_here))


def find_mpirun():
    """The mpirun beside this interpreter, in an activated environment or not, else that on PATH.

    Returns:
        its path, or None.
    """
    return shutil.which("mpirun", path=os.path.dirname(sys.executable)) or shutil.which("mpirun")


def under_mpirun():
    """Whether an mpirun started this process, the user's or that of `mpi_fork`."""
    variables = (FORK_MARKER, "PMI_RANK", "OMPI_COMM_WORLD_RANK")
    return any(name in os.environ for name in variables)


def mpi_fork(n):
    """Relaunch this very command line under `mpirun -np n`, unless it runs there already.

    The process is replaced, so signals and the exit code need no forwarding.

    Args:
        n: number of ranks; "auto" for as many as there are cores.

    Raises:
        UsageError: there is no mpirun, or mpirun and mpi4py do not belong together, or the
            program runs under mpirun with a number of ranks other than 1 and `n`.
    """
    launched = under_mpirun()
    forked = os.environ.pop(FORK_MARKER, None)  # popped: grandchildren may fork for themselves
    if n == "auto":
        n = int(forked or 0) or (num_procs() if launched else cores())
    if n == 1 or (launched and n == num_procs()):
        return
    if launched:
        why = "leave the flag out; if you did not call mpirun, it is not of mpi4py's MPI"
        raise UsageError(f"--num-cpu {n}, but MPI counts {num_procs()} ranks under mpirun: {why}")
    mpirun = find_mpirun()
    if mpirun is None:
        raise UsageError(f"--num-cpu {n} needs mpirun, and there is none on PATH")
    sys.stdout.flush()
    command = [mpirun, "-np", str(n), sys.executable, *sys.orig_argv[1:]]
    os.execve(mpirun, command, {**os.environ, FORK_MARKER: str(n)})
