"""What MKL and glibc must be told to be fast; free of any learning framework."""

import contextlib
import ctypes
import mmap
import os
import re
import sys
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # from glibc's malloc.h
MOV_EAX_1_RET = b"\xb8\x01\x00\x00\x00\xc3"  # `return 1` in x86-64 code

mkl = None  # once switch_mkl has been called, "as on Intel" or "default": for config.json


def _cpuinfo():
    """Fields of the first CPU in /proc/cpuinfo; none where there is no such file."""
    with contextlib.suppress(OSError):
        return dict(re.findall(r"^(.+?)\s*: (.+)$", CPUINFO.read_text().split("\n\n")[0], re.M))
    return {}


def cpu_name():
    """Maker, model and generation, such as "AuthenticAMD AMD EPYC (family 26, model 2)".

    "unknown" outside of Linux on x86.
    """
    name = "{vendor_id} {model name} (family {cpu family}, model {model})"
    with contextlib.suppress(KeyError):
        return name.format_map(_cpuinfo())
    return "unknown"


def switch_mkl(library):
    """Let MKL run on AMD's CPUs with AVX2 what it keeps for Intel's. Call this before any product.

    MKL, inside PyTorch's library, asks its function mkl_serv_intel_cpu_true, and takes slow code
    where that returns 0: torch.tanh takes 7 to 12 times as long. PyTorch's packagers name the cure,
    a function that returns 1 (pytorch/builder, pull request 1245); here it is written over the
    loaded one. Rounding changes. TORCH_MKL_AMD=0 in the environment leaves MKL as it is; so do
    other CPUs, a PyTorch without MKL, and systems that let no process change its code.

    Args:
        library: path of libtorch_cpu.so.
    """
    global mkl
    mkl = "default"
    amd = _cpuinfo().get("vendor_id") == "AuthenticAMD" and "avx2" in _cpuinfo().get("flags", "")
    if not amd or os.environ.get("TORCH_MKL_AMD") == "0":
        return
    with contextlib.suppress(OSError, AttributeError):
        intel_cpu_true = ctypes.CDLL(str(library)).mkl_serv_intel_cpu_true
        if intel_cpu_true() == 0:
            _overwrite(ctypes.cast(intel_cpu_true, ctypes.c_void_p).value, MOV_EAX_1_RET)
            mkl = "as on Intel" if intel_cpu_true() == 1 else "default"


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
