"""PyTorch's half of the MPI helpers: set-up, averaged gradients, Adam, state for checkpoints."""

import io
import math
import os
import shutil
import sys
import sysconfig
import warnings
from pathlib import Path

import torch
from torch import nn

from common import UsageError, cpu, files, mpi


def setup(device="cpu"):
    """Prepare this rank, and find the device.

    Returns:
        the torch.device of that name; plain "cuda" spreads the ranks over all GPUs.

    Raises:
        UsageError: there is no such device.
    """
    cpu.tune_torch()
    if device == "cuda" and torch.cuda.is_available():
        device = f"cuda:{mpi.proc_id() % torch.cuda.device_count()}"
    try:
        probe = torch.zeros((), dtype=torch.float64, device=device)
        probe.item()  # some devices have no float64, or hold no values
        return probe.device
    except (RuntimeError, AssertionError, TypeError) as e:
        raise UsageError(f"--device {device} cannot be used: {str(e).splitlines()[0]}") from e


def can_compile():
    """Whether `torch.compile` finds what it needs: a C++ compiler and Python's header."""
    mac, header = sys.platform == "darwin", Path(sysconfig.get_path("include"), "Python.h")
    compiler = os.environ.get("CXX", "clang++" if mac else "g++")
    return bool(shutil.which(compiler)) and (mac or header.exists())  # Debian: python3-dev


def compile(function, device):
    """`torch.compile(function, fullgraph=True)`; on a GPU its graph is captured and replayed.

    `function` returns {name: tensor}. Compilation takes half a minute the first time. The function
    itself is returned, with a warning, where `can_compile` is false.
    """
    if not can_compile():
        warnings.warn("not compiled, and slower: no C++ compiler, or no Python.h", stacklevel=2)
        return function
    torch._dynamo.config.trace_autograd_ops = True  # functions may call torch.autograd.grad
    capture = device.type == "cuda" and mpi.num_procs() == 1  # MPI cannot be part of a CUDA graph
    mode = "reduce-overhead" if capture else "default"
    compiled = torch.compile(function, fullgraph=True, mode=mode)
    # The next replay of a CUDA graph overwrites what this one returned.
    copied = lambda *args: {key: value.clone() for key, value in compiled(*args).items()}  # noqa: E731
    return copied if capture else compiled


@torch.library.custom_op("common::avg_tensor", mutates_args=())
def avg_tensor(x: torch.Tensor) -> torch.Tensor:
    """Average a tensor over all ranks, as a custom operator, which a compiled graph can contain."""
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

    It gives the numbers of torch.optim.Adam, whose `step` cannot be part of a compiled graph. This
    one can be, so a compiled update of SAC takes 23 % less time.

    Args:
        params: the parameters; their values change in place.
        lr, beta1, beta2, epsilon: as in the paper, with betas above 0; `lr.fill_` sets lr later.
    """

    def __init__(self, params, lr, beta1=0.9, beta2=0.999, epsilon=1e-8):
        self.params, self.ranks = list(params), mpi.num_procs()
        self.beta1, self.beta2, self.epsilon = beta1, beta2, epsilon
        self.exp_avgs, self.exp_avg_sqs = ([torch.zeros_like(p) for p in self.params] for _ in "12")
        like = {"dtype": torch.float64, "device": self.params[0].device}
        self.steps, self.lr = torch.zeros((), **like), torch.tensor(lr, **like)
        for state in (*self.exp_avgs, *self.exp_avg_sqs, self.steps, self.lr):
            if state.is_cuda:  # CUDA graphs change it in place
                torch._dynamo.mark_static_address(state)

    def minimize(self, loss):
        """Take one step down the gradient of `loss`, averaged over all ranks with one message."""
        grads = torch.autograd.grad(loss, self.params)
        self.apply_gradients(avg_tensors(grads) if self.ranks > 1 else grads)

    @torch.no_grad()
    def apply_gradients(self, grads):
        """Take one step; grads: one tensor per parameter."""
        self.steps += 1
        # beta^t as exp(t log beta): a compiled power would be computed anew for each parameter.
        correction1 = 1 - torch.exp(self.steps * math.log(self.beta1))
        correction2 = torch.sqrt(1 - torch.exp(self.steps * math.log(self.beta2)))
        step_size = (self.lr * correction2 / correction1).float()
        epsilon = (self.epsilon * correction2).float()
        for p, g, m, v in zip(self.params, grads, self.exp_avgs, self.exp_avg_sqs, strict=True):
            m.lerp_(g, 1 - self.beta1)
            v.lerp_(g * g, 1 - self.beta2)
            p -= step_size * m / (torch.sqrt(v) + epsilon)

    def state_dict(self):
        """The moments, the step count and the step size, by name."""
        state = {"exp_avg": self.exp_avgs, "exp_avg_sq": self.exp_avg_sqs}
        state |= {"step": [self.steps], "lr": [self.lr]}
        return {f"{name}/{i}": x for name, xs in state.items() for i, x in enumerate(xs)}


class State:
    """Modules, optimizers and tensors of a run, for `EpochLogger.save_state` and `load_state`.

    Args:
        parts: by name, a tensor or an object whose `state_dict()` is a flat dict of tensors, as
            those of modules and of `Adam` are.
    """

    def __init__(self, **parts):
        self.parts = parts

    def tensors(self):
        """The tensors by name. They are looked up anew, since a module may have replaced them."""
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
    linear, between = {type(x) for x in net[::2]}, {type(x) for x in net[1::2]}
    if linear != {nn.Linear} or between - {nn.Tanh, nn.ReLU} or len(net) % 2 == 0:
        raise TypeError("export_policy and get_action know no such network: change them, too")
    return [(to_array(layer.weight.T), to_array(layer.bias)) for layer in net[::2]]


def save_model(module, output_dir):
    """Write a module's state_dict, moved to the CPU, to torch_save/model.pt in a run directory."""
    path = Path(output_dir, "torch_save", "model.pt")
    path.parent.mkdir(exist_ok=True)
    buffer = io.BytesIO()  # torch.save reports a full disk as another error
    torch.save({key: x.cpu() for key, x in module.state_dict().items()}, buffer)
    files.write_atomically(path, lambda f: f.write(buffer.getvalue()))
