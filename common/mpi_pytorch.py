"""PyTorch's half of the MPI helpers: set-up, averaged gradients, Adam, state for checkpoints."""

import contextlib
import ctypes
import io
import math
import mmap
import os
import shutil
import sys
import warnings
from pathlib import Path

import torch

from common import UsageError, files, mpi

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # from glibc's malloc.h
MOV_EAX_1_RET = b"\xb8\x01\x00\x00\x00\xc3"  # `return 1` in x86-64 code
OF_MKL = ("cos", "erf", "exp", "expm1", "log", "log1p", "sin", "sqrt", "tanh")  # what MKL computes


def setup(device="cpu"):
    """Prepare this rank: its share of the cores, and what makes PyTorch fast on a CPU.

    Returns:
        the torch.device of that name; ranks take turns at the GPUs if `device` is plain "cuda".

    Raises:
        UsageError: there is no such device.
    """
    torch.set_num_threads(mpi.threads_per_rank())  # ranks that each took all would fight for them
    # Adam's moments of dead units decay below 1e-38, where CPUs are slow. TensorFlow does the same.
    torch.set_flush_denormal(True)
    switch_mkl()
    # MKL looks for a function's code in its first call. Threads that make it at the same time can
    # get code of low accuracy, for once (pytorch issue 188792): in one run of some hundreds, with
    # errors of 1e-4. So one thread makes it.
    for name in OF_MKL:
        getattr(torch, name)(torch.ones(1))
    keep_freed_memory()
    if device == "cuda" and torch.cuda.is_available():
        device = f"cuda:{mpi.proc_id() % torch.cuda.device_count()}"
    try:
        probe = torch.zeros((), dtype=torch.float64, device=device)
        probe.item()  # there are devices without float64, and without values
        return probe.device
    except (RuntimeError, AssertionError, TypeError) as e:
        raise UsageError(f"--device {device} cannot be used: {str(e).splitlines()[0]}") from e


def switch_mkl():
    """Let MKL run on AMD's CPUs with AVX2 what it keeps for Intel's. Call this before any product.

    MKL, inside PyTorch's library, asks its function mkl_serv_intel_cpu_true, and takes slow code
    where that returns 0. PyTorch's packagers name the cure, a function that returns 1
    (pytorch/builder, pull request 1245); here it is written over the loaded one. torch.tanh is 7 to
    12 times as fast with it, a run of PPO 1.5 times on Zen 5, 1.05 to 1.2 times on Zen 4. Rounding
    changes. TORCH_MKL_AMD=0 in the environment leaves MKL as it is; so do other CPUs, a PyTorch
    without MKL, and systems that let no process change its code.

    Returns:
        "as on Intel" or "default", which config.json notes.
    """
    cpu = files.cpuinfo()
    amd = cpu.get("vendor_id") == "AuthenticAMD" and "avx2" in cpu.get("flags", "")
    files.versions["mkl"] = "default"
    if amd and os.environ.get("TORCH_MKL_AMD") != "0":
        with contextlib.suppress(OSError, AttributeError):
            library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
            intel_cpu_true = ctypes.CDLL(str(library)).mkl_serv_intel_cpu_true
            if intel_cpu_true() == 0:
                _overwrite(ctypes.cast(intel_cpu_true, ctypes.c_void_p).value, MOV_EAX_1_RET)
            if intel_cpu_true() == 1:
                files.versions["mkl"] = "as on Intel"
    return files.versions["mkl"]


def _overwrite(address, code):
    """Replace loaded machine code, where the kernel allows it."""
    mprotect, read_execute = ctypes.CDLL(None).mprotect, mmap.PROT_READ | mmap.PROT_EXEC
    start = address & -mmap.PAGESIZE
    pages = ctypes.c_void_p(start), ctypes.c_size_t(address + len(code) - start)
    if mprotect(*pages, read_execute | mmap.PROT_WRITE) == 0:
        ctypes.memmove(address, code, len(code))
        mprotect(*pages, read_execute)


def keep_freed_memory():
    """Have glibc keep up to 32 MB of freed memory, not 128 kB: activations need it again soon."""
    if sys.platform == "linux":
        with contextlib.suppress(AttributeError):  # another C library
            for parameter in (M_TRIM_THRESHOLD, M_MMAP_THRESHOLD):
                ctypes.CDLL(None).mallopt(parameter, 32 << 20)


def compile(function, device):
    """`torch.compile(function, fullgraph=True)`; on a GPU its graph is captured and replayed.

    `function` returns {name: tensor}.

    The function itself is returned, with a warning, where there is no C++ compiler.
    """
    if not any(shutil.which(c) for c in (os.environ.get("CXX", "g++"), "c++", "clang++")):
        warnings.warn("not compiled, and slower: there is no C++ compiler", stacklevel=2)
        return function
    if mpi.proc_id() == 0:
        with contextlib.suppress(OSError):  # nobody reads any more
            print("The first update is compiled: about half a minute the first time.", flush=True)
    torch._dynamo.config.trace_autograd_ops = True  # torch.autograd.grad may stand in the function
    capture = device.type == "cuda" and mpi.num_procs() == 1  # MPI cannot be part of a CUDA graph
    mode = "reduce-overhead" if capture else "default"
    compiled = torch.compile(function, fullgraph=True, mode=mode)
    # The next replay of a CUDA graph overwrites what this one returned.
    copied = lambda *args: {key: value.clone() for key, value in compiled(*args).items()}  # noqa: E731
    return copied if capture else compiled


@torch.library.custom_op("common::avg_tensor", mutates_args=())
def avg_tensor(x: torch.Tensor) -> torch.Tensor:
    """Average a tensor over all ranks: an operator of its own, so a compiled graph can hold it."""
    return torch.from_numpy(mpi.avg_float32(x.cpu().numpy())).to(x.device)


@avg_tensor.register_fake
def _(x):
    return torch.empty_like(x)


def avg_tensors(xs):
    """Average a list of tensors over all ranks, with one message."""
    flat = avg_tensor(torch.cat([x.flatten() for x in xs]))
    parts = flat.split([x.numel() for x in xs])
    return [part.view_as(x) for part, x in zip(parts, xs, strict=True)]


def avg_grads(module):
    """Average the `.grad` of a module's parameters over all ranks, in place, with one message.

    Call it between `loss.backward()` and the step of an optimizer of torch.optim.
    """
    grads = [p.grad for p in module.parameters() if p.grad is not None]
    if mpi.num_procs() > 1:
        for g, mean in zip(grads, avg_tensors(grads), strict=True):
            g.copy_(mean)


@torch.no_grad()
def sync_params(module):
    """Give every rank rank 0's parameters."""
    for p in module.parameters():
        p.copy_(torch.from_numpy(mpi.broadcast(p.detach().cpu().numpy())))


class Adam:
    """Adam (Kingma and Ba 2015, arXiv:1412.6980) on gradients averaged over all ranks.

    The numbers of torch.optim.Adam, whose `step` cannot stand in a compiled graph; this one can,
    and a compiled update of SAC takes 23 % less time for it.

    Args:
        params: the parameters; their values change in place.
        lr, beta1, beta2, epsilon: as in the paper; floats. `lr.fill_` changes the first later.
    """

    def __init__(self, params, lr, beta1=0.9, beta2=0.999, epsilon=1e-8):
        self.params, self.ranks = list(params), mpi.num_procs()
        self.beta1, self.beta2, self.epsilon = beta1, beta2, epsilon
        self.exp_avgs, self.exp_avg_sqs = ([torch.zeros_like(p) for p in self.params] for _ in "12")
        like = {"dtype": torch.float64, "device": self.params[0].device}
        self.steps, self.lr = torch.zeros((), **like), torch.tensor(lr, **like)
        for state in (*self.exp_avgs, *self.exp_avg_sqs, self.steps, self.lr):
            state.requires_grad_(False)
            if state.is_cuda:  # CUDA graphs change it where it lies
                torch._dynamo.mark_static_address(state)

    def compute_gradients(self, loss):
        """The gradients of `loss`, averaged over all ranks with one message: one per parameter."""
        grads = torch.autograd.grad(loss, self.params)
        return avg_tensors(grads) if self.ranks > 1 else grads

    @torch.no_grad()
    def apply_gradients(self, grads):
        """Take one step with what `compute_gradients` returned."""
        self.steps += 1
        # beta^t as exp(t log beta): the compiler works an exp out once, a power per parameter.
        correction1 = 1 - torch.exp(self.steps * math.log(self.beta1))
        correction2 = torch.sqrt(1 - torch.exp(self.steps * math.log(self.beta2)))
        step_size = (self.lr * correction2 / correction1).float()
        epsilon = (self.epsilon * correction2).float()
        for p, g, m, v in zip(self.params, grads, self.exp_avgs, self.exp_avg_sqs, strict=True):
            m.lerp_(g, 1 - self.beta1)
            v.lerp_(g * g, 1 - self.beta2)
            p -= step_size * m / (torch.sqrt(v) + epsilon)

    def minimize(self, loss):
        """Take one step down the gradient of `loss`, averaged over all ranks."""
        self.apply_gradients(self.compute_gradients(loss))

    def state_dict(self):
        """The moments and the step count, by name."""
        moments = {"exp_avg": self.exp_avgs, "exp_avg_sq": self.exp_avg_sqs, "step": [self.steps]}
        return {f"{name}/{i}": x for name, xs in moments.items() for i, x in enumerate(xs)}


class State:
    """Modules, optimizers and tensors of a run, for `EpochLogger.save_state` and `load_state`.

    Args:
        parts: by name, a tensor or an object whose `state_dict()` is a flat dict of tensors, as
            those of modules and of `Adam` are.
    """

    def __init__(self, **parts):
        self.parts = parts

    def tensors(self):
        """The tensors by name. A module may have other ones by now, so none are kept."""
        found = {}
        for name, part in self.parts.items():
            tensors = {"value": part} if isinstance(part, torch.Tensor) else part.state_dict()
            found |= {f"{name}/{key}": tensor for key, tensor in tensors.items()}
        return found

    def state_dict(self):
        """All tensors as arrays, {name: array}."""
        return {name: to_array(tensor) for name, tensor in self.tensors().items()}

    @torch.no_grad()
    def load_state_dict(self, arrays):
        """Give the tensors the values that `state_dict` once returned."""
        for name, tensor in self.tensors().items():
            tensor.copy_(torch.from_numpy(arrays[name]))


def to_array(tensor):
    """A tensor's values, copied to a NumPy array."""
    return tensor.detach().cpu().numpy().copy()


def layers(net):
    """Weights and biases of an nn.Sequential of linear layers: [(W [in, out], b [out]), ...]."""
    linear = [layer for layer in net if hasattr(layer, "weight")]
    return [(to_array(layer.weight.T), to_array(layer.bias)) for layer in linear]


def save_model(module, output_dir):
    """Write torch_save/model.pt in a run directory: the state_dict, for `weights_only=True`."""
    path = Path(output_dir, "torch_save", "model.pt")
    path.parent.mkdir(exist_ok=True)
    buffer = io.BytesIO()  # torch.save hides a full disk behind an error of its own
    torch.save(module.state_dict(), buffer)
    files.write_atomically(path, lambda f: f.write(buffer.getvalue()))
