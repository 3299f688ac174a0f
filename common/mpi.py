"""Data-parallel training over MPI, free of any learning framework.

Every function works the same with one rank, with or without mpi4py installed: `num_procs()` is then
1, and reductions return what they were given. Statistics are reduced in float64, since float32 sums
lose counts above 2**24. MPI starts at the first call that needs it, never at import, so that `fork`
can still replace the process.
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
MAX_THREADS = 4  # more threads than this do not speed up networks of this size


@functools.cache
def _mpi():
    """The module mpi4py.MPI, initialized by its import, or None where it is not installed.

    Raises:
        SystemExit: mpirun started several processes, but mpi4py does not see them: each would take
            itself for rank 0 and overwrite the files of the others.
    """
    sizes = [os.environ[k] for k in ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE") if k in os.environ]
    try:
        from mpi4py import MPI

        size, why = MPI.COMM_WORLD.Get_size(), "it belongs to another MPI than mpirun"
    except (ImportError, RuntimeError) as e:  # RuntimeError: mpi4py found no MPI library to load
        MPI, size, why = None, 1, e
    if size == 1 and sizes not in ([], ["1"]):
        sys.exit(f"started under mpirun, but mpi4py does not work here: {why}")
    return MPI


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
    sequence = np.random.SeedSequence(seed, spawn_key=(RNG_USES.index(use), *key))
    return np.random.default_rng(sequence)


def allreduce(x, op="SUM"):
    """Reduce array `x` over all ranks, elementwise, in its own dtype; `op` is SUM, MIN or MAX."""
    out = np.array(x)
    if num_procs() > 1:
        _mpi().COMM_WORLD.Allreduce(_mpi().IN_PLACE, out, op=getattr(_mpi(), op))
    return out


def reduce(x, op="SUM"):
    """Reduce a number or array over all ranks in float64: a float for a number, else an array."""
    x = np.asarray(x, dtype=np.float64, order="C")
    return allreduce(x, op) if x.ndim else float(allreduce(x, op))


def avg(x):
    """Mean of a number or array over all ranks, elementwise, in float64."""
    return reduce(x) / num_procs()


def avg_float32(x):
    """Mean of a float32 array over all ranks, elementwise, in float32: of gradients."""
    return allreduce(x) / np.float32(num_procs())


def broadcast(x):
    """Rank 0's value of `x` (any small Python object or array), on every rank."""
    return x if num_procs() == 1 else _mpi().COMM_WORLD.bcast(x)


def gather(x):
    """The arrays `x` of all ranks, alike in shape and dtype, [ranks, ...]; only on rank 0."""
    if num_procs() == 1:
        return x[None]
    out = np.empty((num_procs() if proc_id() == 0 else 0, *x.shape), x.dtype)
    _mpi().COMM_WORLD.Gather(x, out)
    return out


def abort(code):
    """End every rank at once with exit code `code`; with a single rank, end this process."""
    with contextlib.suppress(OSError):  # a full disk
        sys.stdout.flush()
    if num_procs() > 1:
        time.sleep(0.5)  # Abort makes mpirun drop output that it has not yet passed on
        _mpi().COMM_WORLD.Abort(code)
    os._exit(code)


def statistics(x, with_min_and_max=False):
    """Mean and standard deviation (and min and max) of the numbers that all ranks hold together.

    Args:
        x: numbers of this rank, any shape; may be empty on some ranks.

    Returns:
        (mean, std) or (mean, std, min, max), floats; all NaN where no rank holds a number.
    """
    x = np.asarray(x, dtype=np.float64).ravel()
    total, n = reduce([x.sum(), x.size])
    if n == 0:
        return (math.nan,) * (4 if with_min_and_max else 2)
    mean = float(total / n)
    std = math.sqrt(reduce(np.sum((x - mean) ** 2)) / n)
    if not with_min_and_max:
        return mean, std
    return mean, std, reduce(x.min(initial=np.inf), "MIN"), reduce(x.max(initial=-np.inf), "MAX")


def share(name, total, limit=math.inf):
    """This rank's share of a total over all ranks, an int.

    Raises:
        UsageError: it is not a multiple of the number of ranks (a remainder would be lost
            silently), or it is more than `limit`, the steps of an epoch.
    """
    if total > limit:
        raise UsageError(f"{name} {total} is above --steps-per-epoch, {limit}")
    if total % num_procs():
        raise UsageError(f"{name} {total} is not a multiple of the {num_procs()} ranks")
    return total // num_procs()


def cores():
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def threads_per_rank():
    """This rank's fair share of the cores that it may use on its machine, at most MAX_THREADS."""
    ranks_here = 1
    if num_procs() > 1:
        ranks_here = _mpi().COMM_WORLD.Split_type(_mpi().COMM_TYPE_SHARED).Get_size()
    return max(1, min(MAX_THREADS, cores() // ranks_here))


def find_mpirun():
    """The mpirun beside this interpreter, else that on PATH; None if there is none."""
    return shutil.which("mpirun", path=os.path.dirname(sys.executable)) or shutil.which("mpirun")


def launched():
    """Whether mpirun started this process."""
    return any(name in os.environ for name in ("PMI_RANK", "OMPI_COMM_WORLD_RANK"))


def fork(n):
    """Relaunch this very command line under `mpirun -np n`, unless mpirun has started it.

    The process is replaced, so signals and the exit code need no forwarding.

    Args:
        n: number of ranks; "auto" for as many as there are cores.

    Raises:
        UsageError: there is no mpirun, it has started another number of ranks, or `n` is more than
            100 ranks a core.
    """
    if launched():
        if n not in (1, "auto", num_procs()):
            raise UsageError(f"--num-cpu {n} under mpirun with {num_procs()} ranks: leave it out")
        return
    n = cores() if n == "auto" else n
    if n == 1:
        return
    if n > 100 * cores():
        raise UsageError(f"--num-cpu {n} is too many for {cores()} cores")
    mpirun = find_mpirun()
    if mpirun is None:
        raise UsageError(f"--num-cpu {n} needs mpirun, and there is none on PATH")
    sys.stdout.flush()
    os.execv(mpirun, [mpirun, "-np", str(n), sys.executable, *sys.orig_argv[1:]])
