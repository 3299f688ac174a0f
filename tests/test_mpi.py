"""The MPI helpers, with real ranks."""

import os
import subprocess
import sys
import sysconfig

import pytest
import torch
from conftest import ROOT, mpi, needs_compiler, slow

from common import UsageError, mpi_pytorch
from common import mpi as helpers

STATISTICS = """
import numpy as np
from common.mpi import *
data = np.random.default_rng(0).normal(1000, 1, 37)
mine = np.array_split(data, num_procs())[proc_id()]
mean, std, low, high = statistics(mine, with_min_and_max=True)
np.testing.assert_allclose([mean, std], [data.mean(), data.std()], rtol=1e-12)
assert (low, high) == (data.min(), data.max())
# Only one rank holds a number; then nobody does.
one = statistics([5.0] if proc_id() == num_procs() - 1 else [], with_min_and_max=True)
assert one == (5.0, 0.0, 5.0, 5.0), one
assert np.isnan(statistics([], with_min_and_max=True)).all()
n = num_procs()
assert reduce(proc_id() + 1) == n * (n + 1) / 2 and avg(proc_id()) == (n - 1) / 2
np.testing.assert_array_equal(reduce(np.full((2, 3), 0.5)), np.full((2, 3), 0.5 * n))
assert reduce(proc_id(), "MAX") == n - 1 and reduce(proc_id(), "MIN") == 0
assert reduce(2.0**24 + 1) == n * (2.0**24 + 1)  # more than float32 can count
assert broadcast({"from": proc_id()}) == {"from": 0}
assert gather(np.full(2, proc_id())).tolist() == [[r, r] for r in range(n)] * (proc_id() == 0)
out = allreduce(np.full(3, 1.5, np.float32))
assert out.dtype == np.float32 and (out == 1.5 * n).all()
assert share("--steps", 12) == share("--steps", 12, limit=12) == 12 // n
print("all well", flush=True)
"""


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_reductions_and_statistics(tmp_path, ranks):
    assert mpi(tmp_path, STATISTICS, ranks).stdout.count("all well") == ranks


ALONE = """
from types import SimpleNamespace as Namespace
sys.modules["mpi4py"] = Namespace(MPI=Namespace(COMM_WORLD=Namespace(Get_size=lambda: 1)))
"""


@pytest.mark.parametrize("mpi4py", ["sys.modules['mpi4py'] = None\n", ALONE], ids=["none", "alone"])
def test_ranks_that_mpi4py_does_not_see(tmp_path, mpi4py):
    """One rank does without mpi4py. Of several each would take itself for rank 0, and write over
    the others: that is an error, at once."""
    if mpi4py != ALONE:
        assert "all well" in mpi(tmp_path, mpi4py + STATISTICS, 1).stdout
    result = mpi(tmp_path, mpi4py + STATISTICS, 2, check=False)
    assert result.returncode and "all well" not in result.stdout
    assert result.stderr.count("started under mpirun, but mpi4py does not work here") == 2
    assert "Traceback" not in result.stderr


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_abort_where_the_output_cannot_be_written():
    words = [sys.executable, "-c", "from common.mpi import *; print(1); abort(3)"]
    env = {**os.environ, "PYTHONUNBUFFERED": ""}  # to meet it at the end
    with open("/dev/full", "w") as full:
        assert subprocess.run(words, stdout=full, cwd=ROOT, env=env).returncode == 3


FORK = """
from common.mpi import *
fork(3)
print(f"rank {proc_id()} of {num_procs()}, flags {sys.argv[1:]}", flush=True)
"""


def test_fork_relaunches_the_same_command(tmp_path):
    out = mpi(tmp_path, FORK, 1, "--name", "two words", "-x").stdout
    for rank in range(3):
        assert f"rank {rank} of 3, flags ['--name', 'two words', '-x']" in out


def test_fork_under_mpirun(tmp_path):
    assert mpi(tmp_path, FORK, 3).stdout.count("of 3") == 3
    result = mpi(tmp_path, FORK, 2, check=False)
    assert result.returncode and "--num-cpu 3 under mpirun with 2 ranks" in result.stderr


def test_fork_without_mpirun_or_with_more_ranks_than_any_machine_has(monkeypatch):
    with pytest.raises(UsageError, match="--num-cpu 100000000 is too many for"):
        helpers.fork(100_000_000)
    monkeypatch.setattr(helpers.shutil, "which", lambda *args, **kwargs: None)
    with pytest.raises(UsageError, match="needs mpirun"):
        helpers.fork(2)


def test_threads_are_shared_out(tmp_path):
    """And PyTorch takes no more."""
    source = "import torch\nfrom common import mpi, mpi_pytorch\n"
    source += "mpi.cores = lambda: int(sys.argv[1])\nmpi_pytorch.setup()\n"
    source += "print(f'{mpi.threads_per_rank()}, {torch.get_num_threads()};', flush=True)"
    for cores, ranks, threads in ((12, 1, 4), (12, 4, 3), (3, 4, 1)):
        out = mpi(tmp_path, source, ranks, cores).stdout
        assert out.count(f"{threads}, {threads};") == ranks


LAYERS = """
import torch
from common.mpi_pytorch import *
from common.mpi import *
x = torch.randn(20, 8, 4, generator=torch.Generator().manual_seed(0))
ours, theirs = torch.nn.Linear(4, 3), torch.nn.Linear(4, 3)
with torch.no_grad():
    for p, q in zip(ours.parameters(), theirs.parameters()):
        q.copy_(torch.linspace(-1, 1, p.numel()).view_as(p))
        p.copy_(q + proc_id())
sync_params(ours)
adam = torch.optim.Adam(theirs.parameters(), 1e-2, betas=(0.8, 0.999))
def step_of_torch(batch):
    adam.zero_grad()
    (theirs(batch) ** 4).mean().backward()
    adam.step()
"""

ADAM = """
optimizer = Adam(ours.parameters(), 1e-2, beta1=0.8)
def update(batch):
    optimizer.minimize((ours(batch) ** 4).mean())
    return {}
update = compile(update, torch.device("cpu")) if sys.argv[1:] else update
for i, batch in enumerate(x):
    update(torch.tensor_split(batch, num_procs())[proc_id()])
    step_of_torch(batch)
    for m, q in zip(optimizer.exp_avgs, theirs.parameters()):  # steps forgive a wrong scale
        torch.testing.assert_close(m, adam.state[q]["exp_avg"], rtol=1e-4, atol=1e-4)
    if i == 9 and not sys.argv[1:]:
        saved = State(adam=optimizer).state_dict()
        optimizer = Adam(ours.parameters(), 1e-2, beta1=0.8)
        State(adam=optimizer).load_state_dict(saved)
"""

ADAM_OF_TORCH = """
unused = torch.nn.Parameter(torch.ones(2))  # has no gradient
module = torch.nn.ParameterList([unused, *ours.parameters()])
optimizer = torch.optim.Adam(module.parameters(), 1e-2, betas=(0.8, 0.999))
for batch in x:
    optimizer.zero_grad()
    (ours(torch.tensor_split(batch, num_procs())[proc_id()]) ** 4).mean().backward()
    avg_grads(module)
    step_of_torch(batch)
    for p, q in zip(ours.parameters(), theirs.parameters()):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-4)
    optimizer.step()
assert unused.grad is None and (unused == 1).all()
"""

END = """
for p, q in zip(ours.parameters(), theirs.parameters()):
    torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-5)
    assert (reduce(p.detach(), "MAX") == p.detach().numpy()).all()  # on all ranks alike
"""


@pytest.mark.parametrize("ranks, words", [(1, []), (2, []), slow(2, ["compiled"])])
def test_adam_takes_the_steps_of_torch(tmp_path, ranks, words):
    """On ranks with a part of the batch each; stopped and restored in the middle, or compiled. The
    ranks start from rank 0's parameters."""
    if words:
        needs_compiler()
    mpi(tmp_path, LAYERS + ADAM + END, ranks, *words)


@pytest.mark.parametrize("ranks", [1, 2])
def test_avg_grads_for_the_optimizers_of_torch(tmp_path, ranks):
    """torch.optim.Adam on ranks with a part of the batch each, against one with the whole batch."""
    mpi(tmp_path, LAYERS + ADAM_OF_TORCH + END, ranks)


def test_denormal_numbers_are_flushed(tmp_path):
    """Adam's moments of dead units come to 1e-40, where every operation is slow."""
    source = """
import torch
from common import mpi_pytorch
mpi_pytorch.setup()
tiny = torch.full((100_000,), 2e-38)  # enough that all threads take part
assert (tiny > 0).all() and (tiny / 4 == 0).all()
"""
    mpi(tmp_path, source, 1)


@pytest.mark.parametrize("missing", ["compiler", "header"])
def test_not_compiled_without_a_compiler_or_a_header(monkeypatch, missing):
    """The function goes on as it is, and a line says so."""
    monkeypatch.delenv("CXX", raising=False)
    if missing == "compiler":
        monkeypatch.setenv("PATH", "")
    elif sys.platform != "darwin":
        monkeypatch.setattr(sysconfig, "get_path", lambda name: "/nowhere")
    with pytest.warns(UserWarning, match="not compiled, and slower"):
        assert mpi_pytorch.compile(abs, torch.device("cpu")) is abs


@pytest.mark.parametrize("ranks", [slow(1), 2])
def test_tf1_helpers_over_ranks(tmp_path, ranks):
    """All variables get rank 0's values; gradients are averaged; Adam stays in step."""
    source = """
import numpy as np
from common.mpi_tf1 import *
from common.mpi import broadcast, proc_id, num_procs
sess = setup()
rank, n = proc_id(), num_procs()
a = tf.get_variable("a", initializer=np.full((2, 3), rank, np.float32))
b = tf.get_variable("b", initializer=np.float32(10 + rank))
c = tf.get_variable("c", initializer=np.full(4, -rank, np.float32))
optimizer = Adam(0.1)
loss = tf.reduce_sum(a * (rank + 1.0)) + b * b * rank
grads = optimizer.compute_gradients(loss, [a, b])
step = optimizer.apply_gradients(grads)
sess.run(tf.global_variables_initializer())
sess.run(sync_all_params())
assert (sess.run(a) == 0).all() and sess.run(b) == 10 and (sess.run(c) == 0).all()
g_a, g_b = sess.run([g for g, _ in grads])
assert np.allclose(g_a, np.mean(np.arange(n) + 1)) and g_a.shape == (2, 3)
assert np.isclose(g_b, 2 * 10 * np.mean(np.arange(n)))
for _ in range(5):
    sess.run(step)
values, first = sess.run([a, b]), broadcast(sess.run([a, b]))
assert (values[0] == first[0]).all() and values[1] == first[1]
assert np.isclose(values[0], -0.5).all()  # Adam's steps on a constant gradient
flat = tf.placeholder(tf.float32, [7])
sess.run(assign_params_from_flat(flat, [a, b]), {flat: np.arange(7)})
assert sess.run(a).tolist() == [[0, 1, 2], [3, 4, 5]] and sess.run(b) == 6
assert sess.run(flat_concat([a, b])).tolist() == list(range(7))
print("passed")
"""
    assert mpi(tmp_path, source, ranks).stdout.count("passed") == ranks
