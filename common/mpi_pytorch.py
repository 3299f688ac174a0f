"""PyTorch's half of the MPI helpers, and tensors to arrays and back for checkpoints."""

import contextlib
import io
import math
import os
import shutil
import sys
import warnings
from pathlib import Path

import numpy as np
import torch
from torch.utils._pytree import tree_map
from tqdm import tqdm

from common import UsageError
from common.cpu import keep_freed_memory, switch_mkl
from common.mpi_tools import (
    average,
    barrier,
    broadcast,
    check_finite,
    num_procs,
    proc_id,
    threads_per_rank,
)
from common.serialization import write_atomically

switch_mkl(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")
keep_freed_memory()


def setup_pytorch_for_mpi(device="cpu"):
    """Give this rank its share of the cores: ranks that each took all would fight for them.

    Returns:
        the torch.device of that name; ranks take turns at the GPUs if `device` is plain "cuda".

    Raises:
        UsageError: there is no such device.
    """
    torch.set_num_threads(threads_per_rank())
    # Adam's moments of dead units decay below 1e-38, where CPUs are slow. TensorFlow does the same.
    torch.set_flush_denormal(True)
    if device == "cuda" and torch.cuda.is_available():
        device = f"cuda:{proc_id() % torch.cuda.device_count()}"
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as e:
        raise UsageError(f"--device {device} cannot be used: {str(e).splitlines()[0]}") from e


_others_wait = False  # whether the other ranks wait for this one to compile


def _let_others_compile():
    global _others_wait
    if _others_wait:
        _others_wait = False
        barrier()


def mpi_compile(function, **options):
    """`torch.compile(function, fullgraph=True)`, by rank 0 first: the others find it in its cache.

    The function itself is returned, with a warning, where inductor cannot compile: it needs a C++
    compiler, and a path to its own headers without spaces, which it does not quote. All ranks must
    make their first call at the same point of the run.
    """
    found = any(shutil.which(c) for c in (os.environ.get("CXX", "g++"), "c++", "clang++"))
    if not found or " " in torch.__file__:
        why = f"{torch.__file__} holds a space" if found else "there is no C++ compiler"
        if proc_id() == 0:
            warnings.warn(f"not compiled, and slower: {why}", stacklevel=2)
        return function
    torch._dynamo.config.trace_autograd_ops = True  # torch.autograd.grad may stand in the function
    compiled, called = torch.compile(function, fullgraph=True, **options), False

    def call(*args):
        nonlocal called
        global _others_wait
        if called:
            return compiled(*args)
        called = True
        if proc_id() == 0:
            with contextlib.suppress(OSError):  # where nobody reads any more
                tqdm.write("Compiling (about half a minute the first time) ...", file=sys.stdout)
            _others_wait = True
        else:
            barrier()
        result = compiled(*args)
        _let_others_compile()
        return result

    return call


@torch.library.custom_op("common::mpi_avg", mutates_args=())
def mpi_avg_tensor(x: torch.Tensor) -> torch.Tensor:
    """Average a tensor over all ranks: an operator of its own, so a compiled graph can hold it."""
    _let_others_compile()  # in a graph's first call: it is compiled by now, and needs them all
    return torch.from_numpy(average(to_arrays(x))).to(x.device)


@mpi_avg_tensor.register_fake
def _(x):
    return torch.empty_like(x)


class MpiAdamOptimizer:
    """Adam (Kingma and Ba 2015, arXiv:1412.6980) on gradients averaged over all ranks.

    The numbers of torch.optim.Adam, whose `step` cannot stand in a compiled graph; this one can.

    Args:
        params: the parameters; their values change in place.
        learning_rate, beta1, beta2, epsilon: as in the paper; floats. `learning_rate.fill_` changes
            the first later.
    """

    def __init__(self, params, learning_rate, beta1=0.9, beta2=0.999, epsilon=1e-8):
        self.params, self.ranks = list(params), num_procs()
        self.beta1, self.beta2, self.epsilon = beta1, beta2, epsilon
        self.exp_avgs, self.exp_avg_sqs = ([torch.zeros_like(p) for p in self.params] for _ in "12")
        like = {"dtype": torch.float64, "device": self.params[0].device}
        self.step, self.learning_rate = torch.zeros((), **like), torch.tensor(learning_rate, **like)
        for state in (*self.exp_avgs, *self.exp_avg_sqs, self.step, self.learning_rate):
            state.requires_grad_(False)
            if state.is_cuda:  # CUDA graphs change it where it lies
                torch._dynamo.mark_static_address(state)

    def compute_gradients(self, loss):
        """The gradients of `loss`, averaged over all ranks with one message: one per parameter."""
        grads = torch.autograd.grad(loss, self.params)
        if self.ranks > 1:
            flat = mpi_avg_tensor(torch.cat([g.flatten() for g in grads]))
            parts = flat.split([g.numel() for g in grads])
            grads = [part.view_as(g) for part, g in zip(parts, grads, strict=True)]
        return grads

    @torch.no_grad()
    def apply_gradients(self, grads):
        """Take one step with what `compute_gradients` returned."""
        self.step += 1
        # beta^t as exp(t log beta): the compiler works an exp out once, a power per parameter.
        correction1 = 1 - torch.exp(self.step * math.log(self.beta1))
        correction2 = torch.sqrt(1 - torch.exp(self.step * math.log(self.beta2)))
        step_size = (self.learning_rate * correction2 / correction1).float()
        epsilon = (self.epsilon * correction2).float()
        for p, g, m, v in zip(self.params, grads, self.exp_avgs, self.exp_avg_sqs, strict=True):
            m.lerp_(g, 1 - self.beta1)
            v.lerp_(g * g, 1 - self.beta2)
            p -= step_size * m / (torch.sqrt(v) + epsilon)

    def minimize(self, loss):
        """Take one step down the gradient of `loss`, averaged over all ranks."""
        self.apply_gradients(self.compute_gradients(loss))

    def state_dict(self):
        """The moments and step counts, for checkpoints."""
        return {"exp_avg": self.exp_avgs, "exp_avg_sq": self.exp_avg_sqs, "step": [self.step]}

    @torch.no_grad()
    def load_state_dict(self, state):
        """Go back to what `state_dict` returned."""
        for name, tensors in self.state_dict().items():
            for mine, saved in zip(tensors, state[name], strict=True):
                mine.copy_(saved)


@torch.no_grad()
def sync_params(module):
    """Give every rank rank 0's parameters."""
    for p in module.parameters():
        p.copy_(torch.from_numpy(broadcast(p.detach().cpu().numpy())))


def save_model(module, output_dir):
    """Write torch_save/model.pt in the run directory: the state_dict, for `weights_only=True`.

    Raises:
        FloatingPointError: on all ranks, if a parameter is NaN or infinite; nothing was written.
    """
    check_finite("the networks", parameter=to_arrays(module.state_dict()))
    if proc_id() == 0:
        path = Path(output_dir, "torch_save", "model.pt")
        path.parent.mkdir(exist_ok=True)
        buffer = io.BytesIO()  # torch.save hides a full disk behind an error of its own
        torch.save(module.state_dict(), buffer)
        write_atomically(path, lambda f: f.write(buffer.getvalue()))


def state_dicts(stateful):
    """The state of modules and optimizers as NumPy arrays: {name: object} -> {name: state_dict}."""
    return {name: to_arrays(part.state_dict()) for name, part in stateful.items()}


def load_state_dicts(stateful, state):
    """Go back to what `state_dicts` returned; nothing happens if `state` is None."""
    for name, part in stateful.items() if state else ():
        to_tensor = lambda x: torch.from_numpy(x) if isinstance(x, np.ndarray) else x  # noqa: E731
        part.load_state_dict(tree_map(to_tensor, state[name]))


def to_arrays(tree):
    """A copy of nested dicts and lists (a state_dict) with NumPy arrays in place of tensors."""
    to_array = lambda x: x.detach().cpu().numpy().copy() if isinstance(x, torch.Tensor) else x  # noqa: E731
    return tree_map(to_array, tree)
