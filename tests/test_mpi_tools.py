"""The MPI helpers, with real ranks."""

import os
import sys

import pytest
import torch
from conftest import mpi, needs_compiler, slow

from common import UsageError, mpi_tools
from common.mpi_pytorch import mpi_compile

STATISTICS = """
import numpy as np
from common.mpi_tools import *
data = np.random.default_rng(0).normal(1000, 1, 37)
mine = np.array_split(data, num_procs())[proc_id()]
mean, std, low, high = mpi_statistics_scalar(mine, with_min_and_max=True)
np.testing.assert_allclose([mean, std], [data.mean(), data.std()], rtol=1e-12)
assert (low, high) == (data.min(), data.max())
# Only one rank holds a number; then nobody does.
one = mpi_statistics_scalar([5.0] if proc_id() == num_procs() - 1 else [], with_min_and_max=True)
assert one == (5.0, 0.0, 5.0, 5.0), one
assert np.isnan(mpi_statistics_scalar([], with_min_and_max=True)).all()
n = num_procs()
assert mpi_sum(proc_id() + 1) == n * (n + 1) / 2 and mpi_avg(proc_id()) == (n - 1) / 2
np.testing.assert_array_equal(mpi_sum(np.full((2, 3), 0.5)), np.full((2, 3), 0.5 * n))
assert mpi_op(proc_id(), "MAX") == n - 1 and mpi_op(proc_id(), "MIN") == 0
assert mpi_sum(2.0**24 + 1) == n * (2.0**24 + 1)  # more than float32 can count
assert broadcast({"from": proc_id()}) == {"from": 0}
assert allgather(proc_id()) == list(range(n))
out = allreduce(np.full(3, 1.5, np.float32))
assert out.dtype == np.float32 and (out == 1.5 * n).all()
assert rank_share("--steps", 12) == 12 // n
assert barrier(timeout=5)
print("all well", flush=True)
"""


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_reductions_and_statistics(tmp_path, ranks):
    assert mpi(tmp_path, STATISTICS, ranks).stdout.count("all well") == ranks


def test_without_mpi4py(tmp_path):
    source = "sys.modules['mpi4py'] = None\n" + STATISTICS
    assert "all well" in mpi(tmp_path, source, 1).stdout
    # Under mpirun each would take itself for rank 0 and write over the others: that is an error.
    result = mpi(tmp_path, source, 2, check=False)
    assert result.returncode and "mpi4py does not work here" in result.stderr


def test_check_finite_stops_all_ranks(tmp_path):
    source = """
import numpy as np
from common.mpi_tools import *
fine = {"w": np.ones(3)}
check_finite("epoch 1", reward=1.0, parameter=fine)
bad = np.array([1, np.nan]) if proc_id() == 1 else np.ones(2)
try:
    check_finite("epoch 2", reward=1.0, observation=bad, parameter=fine)
except FloatingPointError as e:
    print(e, flush=True)
"""
    text = "observation is NaN or infinite on rank 1 in epoch 2"
    assert mpi(tmp_path, source, 2).stdout.count(text) == 2


FORK = """
import os
from common.mpi_tools import *
mpi_fork(3)
assert "MPI_FORKED" not in os.environ  # or a grandchild would take itself for forked
print(f"rank {proc_id()} of {num_procs()}, flags {sys.argv[1:]}", flush=True)
"""


def test_fork_relaunches_the_same_command(tmp_path):
    out = mpi(tmp_path, FORK, 1, "--name", "two words", "-x").stdout
    for rank in range(3):
        assert f"rank {rank} of 3, flags ['--name', 'two words', '-x']" in out


def test_fork_under_mpirun(tmp_path):
    assert mpi(tmp_path, FORK, 3).stdout.count("of 3") == 3
    result = mpi(tmp_path, FORK, 2, check=False)
    assert result.returncode and "--num-cpu 3, but MPI counts 2 ranks" in result.stderr


def test_fork_without_mpirun(monkeypatch):
    monkeypatch.setattr(mpi_tools.shutil, "which", lambda *args, **kwargs: None)
    with pytest.raises(UsageError, match="needs mpirun"):
        mpi_tools.mpi_fork(2)


def test_threads_are_shared_out(tmp_path):
    source = "from common.mpi_tools import *\nprint(f'threads={threads_per_rank()};', flush=True)\n"
    cores = len(os.sched_getaffinity(0))
    for ranks in (1, 2, 4):
        expected = max(1, min(mpi_tools.MAX_THREADS, cores // ranks))
        out = mpi(tmp_path, source, ranks).stdout
        assert out.count(f"threads={expected};") == ranks


ADAM = """
import torch
from common.mpi_pytorch import *
from common.mpi_tools import *
x = torch.randn(20, 8, 4, generator=torch.Generator().manual_seed(0))
ours, theirs = torch.nn.Linear(4, 3), torch.nn.Linear(4, 3)
with torch.no_grad():
    for p, q in zip(ours.parameters(), theirs.parameters()):
        q.copy_(torch.linspace(-1, 1, p.numel()).view_as(p))
        p.copy_(q + proc_id())
sync_params(ours)
optimizer = MpiAdamOptimizer(ours.parameters(), 1e-2, beta1=0.8)
adam = torch.optim.Adam(theirs.parameters(), 1e-2, betas=(0.8, 0.999))
def gradients(batch):
    return optimizer.compute_gradients((ours(batch) ** 4).mean())
def update(batch):
    optimizer.apply_gradients(gradients(batch))
update = mpi_compile(update) if sys.argv[1:] else update
for i, batch in enumerate(x):
    mine = batch[proc_id() * 8 // num_procs() : (proc_id() + 1) * 8 // num_procs()]
    adam.zero_grad()
    (theirs(batch) ** 4).mean().backward()
    for g, q in zip(gradients(mine), theirs.parameters()):  # Adam forgives a wrong scale
        torch.testing.assert_close(g, q.grad, rtol=1e-4, atol=1e-4)
    update(mine)
    adam.step()
    if i == 9 and not sys.argv[1:]:
        saved = state_dicts({"adam": optimizer})
        optimizer = MpiAdamOptimizer(ours.parameters(), 1e-2, beta1=0.8)
        load_state_dicts({"adam": optimizer}, saved)
for p, q in zip(ours.parameters(), theirs.parameters()):
    torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-5)
"""


@pytest.mark.parametrize("ranks, words", [(1, []), (2, []), slow(2, ["compiled"])])
def test_adam_takes_the_steps_of_torch(tmp_path, ranks, words):
    """On ranks with a part of the batch each; stopped and restored in the middle, or compiled. The
    ranks start from rank 0's parameters."""
    if words:
        needs_compiler()
    mpi(tmp_path, ADAM, ranks, *words)


def test_denormal_numbers_are_flushed(tmp_path):
    """Adam's moments of dead units come to 1e-40, where every operation is slow."""
    source = """
import torch
from common.mpi_pytorch import setup_pytorch_for_mpi
setup_pytorch_for_mpi()
tiny = torch.full((100_000,), 2e-38)  # enough that all threads take part
assert (tiny > 0).all() and (tiny / 4 == 0).all()
"""
    mpi(tmp_path, source, 1)


def test_not_compiled_where_a_path_holds_a_space(monkeypatch):
    """Inductor would fail there; the function goes on as it is, and a line says so."""
    monkeypatch.setenv("CXX", sys.executable)  # any program: this machine may have no compiler
    monkeypatch.setattr(torch, "__file__", "/a place/torch/__init__.py")
    with pytest.warns(UserWarning, match="not compiled, and slower: /a place/torch"):
        assert mpi_compile(abs) is abs
