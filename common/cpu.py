"""What makes PyTorch fast, and its numbers repeatable, on a CPU; and the CPU's name."""

import contextlib
import ctypes
import mmap
import os
import re
import sys
from pathlib import Path

from common import mpi

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # from glibc's malloc.h
MOV_EAX_1_RET = b"\xb8\x01\x00\x00\x00\xc3"  # `return 1` in x86-64 code
OF_MKL = ("cos", "erf", "exp", "expm1", "log", "log1p", "sin", "sqrt", "tanh")  # what MKL computes

mkl = None  # "as on Intel" or "default", once `tune_torch` was called; config.json notes it


def tune_torch():
    """Prepare PyTorch for this rank. Call this before it computes anything."""
    global mkl
    import torch

    torch.set_num_threads(mpi.threads_per_rank())  # if each took all cores, all would be slow
    # Adam's moments of dead units decay below 1e-38, where CPUs are slow. TensorFlow does the same.
    torch.set_flush_denormal(True)
    mkl = switch_mkl(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")
    # MKL picks a function's code at the first call. If several threads make this call at once, one
    # of them can get code of low accuracy (pytorch issue 188792): errors of 1e-4, in one run
    # of several hundred. So a single thread makes the first call.
    for name in OF_MKL:
        getattr(torch, name)(torch.ones(1))
    # Let glibc keep up to 32 MB of freed memory, not 128 kB: activations soon need it again.
    with contextlib.suppress(AttributeError):  # another C library
        for parameter in (M_TRIM_THRESHOLD, M_MMAP_THRESHOLD) if sys.platform == "linux" else ():
            ctypes.CDLL(None).mallopt(parameter, 32 << 20)


def switch_mkl(library):
    """Let MKL run on AMD's CPUs with AVX2 what it keeps for Intel's.

    MKL, which is part of PyTorch's library, calls its function mkl_serv_intel_cpu_true and takes
    slow code if that returns 0. PyTorch's packagers name the remedy, a function that returns 1
    (pytorch/builder, pull request 1245); here its code is written over the loaded function's.
    torch.tanh is 7 to 12 times as fast with it, a run of PPO 1.5 times on Zen 5, 1.05 to 1.2 times
    on Zen 4. Rounding changes. MKL stays as it is with TORCH_MKL_AMD=0 in the environment, on other
    CPUs, and on systems that do not let a process change its code.

    Returns:
        "as on Intel" or "default".
    """
    cpu = info()
    amd = cpu.get("vendor_id") == "AuthenticAMD" and "avx2" in cpu.get("flags", "")
    if amd and os.environ.get("TORCH_MKL_AMD") != "0":
        with contextlib.suppress(OSError, AttributeError):
            intel_cpu_true = ctypes.CDLL(str(library)).mkl_serv_intel_cpu_true
            if intel_cpu_true() == 0:
                _overwrite(ctypes.cast(intel_cpu_true, ctypes.c_void_p).value, MOV_EAX_1_RET)
            if intel_cpu_true() == 1:
                return "as on Intel"
    return "default"


def _overwrite(address, code):
    """Replace loaded machine code, where the kernel allows it."""
    mprotect, read_execute = ctypes.CDLL(None).mprotect, mmap.PROT_READ | mmap.PROT_EXEC
    start = address & -mmap.PAGESIZE
    pages = ctypes.c_void_p(start), ctypes.c_size_t(address + len(code) - start)
    if mprotect(*pages, read_execute | mmap.PROT_WRITE) == 0:
        ctypes.memmove(address, code, len(code))
        mprotect(*pages, read_execute)


def info():
    """Fields of the first CPU in /proc/cpuinfo; none where there is no such file."""
    with contextlib.suppress(OSError):
        text = Path("/proc/cpuinfo").read_text()
        return dict(re.findall(r"^(.+?)\s*: (.+)$", text.split("\n\n")[0], re.M))
    return {}


def name():
    """Maker, model and generation, such as "AuthenticAMD AMD EPYC (family 26, model 2)".

    "unknown" outside of Linux on x86.
    """
    with contextlib.suppress(KeyError):
        return "{vendor_id} {model name} (family {cpu family}, model {model})".format_map(info())
    return "unknown"
