"""MKL: its switch for AMD's CPUs, and the first calls of its functions."""

import ctypes
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from conftest import ROOT, run, run_dir

from common import cpu

LIBRARY = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"

NUMBERS = f"""
import json, sys
sys.path.insert(0, {str(ROOT)!r})
import torch
from common import cpu
cpu.tune_torch()
mkl = cpu.mkl
x, w = (torch.randn(n, 256, generator=torch.Generator().manual_seed(n)) for n in (512, 300))
functions = torch.tanh, torch.exp, torch.sin, lambda x: x @ w.T.to(x) / 16, lambda x: x.std(0)
errors = []
for f in functions:
    exact = f(x.double())
    errors.append(float(((f(x) - exact).abs() / (1 + exact.abs())).max()))
intel = getattr(__import__("ctypes").CDLL({str(LIBRARY)!r}), "mkl_serv_intel_cpu_true", int)()
maps = [line.split() for line in open("/proc/self/maps")] if sys.platform == "linux" else []
writable_code = [m[-1] for m in maps if m[1].startswith("rwx") and "torch" in m[-1]]
print(json.dumps([mkl, intel, writable_code, errors]))
"""


def numbers(**env):
    """mkl_serv_intel_cpu_true's answer and rounding errors, in a new process."""
    command = [sys.executable, "-c", NUMBERS]
    result = subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True)
    assert result.returncode == 0 and not result.stderr, result.stderr
    return json.loads(result.stdout)


def test_numbers_agree_with_the_plain_path():
    """Both within float32 rounding of float64, and the code of MKL is not left writable."""
    plain, switched = numbers(TORCH_MKL_AMD="0"), numbers()
    for mkl, intel, writable, errors in (plain, switched):
        assert max(errors) < 3e-6 and writable == []
        assert mkl == "default" or intel == 1
    assert plain[0] == "default"
    if plain[1] == 0 and "AMD" in cpu.name() and hasattr(os, "sched_getaffinity"):
        assert switched[:2] == ["as on Intel", 1]


FIRST_CALLS = f"""
import os, sys
sys.path.insert(0, {str(ROOT)!r})
import torch
from common import cpu, mpi
mpi.threads_per_rank = lambda: 4
x, wrong = torch.rand(1 << 14), 0
for _ in range(75):
    children = []
    for _ in range(8):
        children.append(os.fork())
        if children[-1] == 0:
            cpu.tune_torch()
            torch.relu(x)  # wakes all threads
            error = float((torch.exp(x) - torch.exp(x.double())).abs().max())
            os._exit(error > 1e-5)
    wrong += sum(os.waitpid(child, 0)[1] != 0 for child in children)
print(wrong)
"""


@pytest.mark.slow
def test_first_calls_are_as_accurate_as_all_others():
    """Also where several threads make them at once. Without the calls in `tune_torch` this goes
    wrong at random, in one process of some hundreds; so there are 600."""
    command = [sys.executable, "-c", FIRST_CALLS]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "0\n"


def test_first_calls_are_made_of_all_functions_in_use():
    texts = [p.read_text() for folder in ("algos", "common") for p in (ROOT / folder).glob("*.py")]
    used = set(re.findall(r"torch\.(\w+)\(", "".join(texts)))
    of_mkl = {"acos", "asin", "atan", "cos", "erf", "erfc", "exp", "expm1", "log", "log10", "log1p"}
    of_mkl |= {"log2", "sin", "sqrt", "tan", "tanh"}  # aten/src/ATen/cpu/vml.h
    assert {"exp", "sqrt", "tanh"} <= used & of_mkl <= set(cpu.OF_MKL)


AMD = "vendor_id: AuthenticAMD\ncpu family: 25\nmodel: 17\nmodel name: X\nflags: avx2\n\nx: 1\n"
OTHERS = {
    "Intel": "vendor_id\t: GenuineIntel\nmodel name\t: Xeon\nflags\t\t: fpu avx2 avx512f\n",
    "old AMD": "vendor_id\t: AuthenticAMD\nmodel name\t: Opteron\nflags\t\t: fpu avx\n",
    "ARM": "processor\t: 0\nBogoMIPS\t: 50.00\nCPU implementer\t: 0x41\n",
    "macOS": None,
    "off": AMD,
}


class Hardened:
    """MKL's function, and a kernel that lets no code be changed."""

    mkl_serv_intel_cpu_true = ctypes.CFUNCTYPE(ctypes.c_int)(lambda: 0)

    def mprotect(self, *args):
        return -1


LIBRARIES = {"missing": OSError(), "without MKL": object(), "hardened": Hardened()}


@pytest.mark.parametrize("kind", [*OTHERS, *LIBRARIES])
def test_other_cpus_and_libraries_are_left_alone(tmp_path, monkeypatch, kind):
    info, cpuinfo = OTHERS.get(kind, AMD), tmp_path / "cpuinfo"
    if info:
        cpuinfo.write_text(info)
    if kind == "off":
        monkeypatch.setenv("TORCH_MKL_AMD", "0")
    monkeypatch.setattr(cpu, "Path", lambda path: cpuinfo)
    opened = mock.Mock(side_effect=[LIBRARIES.get(kind)] * 2)
    monkeypatch.setattr(cpu.ctypes, "CDLL", opened)
    mkl = cpu.switch_mkl(LIBRARY)
    assert cpu.name() == ("AuthenticAMD X (family 25, model 17)" if info == AMD else "unknown")
    assert mkl == "default" and opened.called == (kind in LIBRARIES)


def test_config_names_cpu_and_mkl(tmp_path):
    flags = ["--epochs", 1, "--steps-per-epoch", 100, "--data-dir", tmp_path, "--exp-name", "x"]
    run("ppo_torch", "--env-id", "CartPole-v1", *flags, env={"TORCH_MKL_AMD": "0"})
    versions = json.loads((run_dir(tmp_path, "x") / "config.json").read_text())["versions"]
    assert versions["mkl"] == "default" and versions["cpu"] == cpu.name() != ""
    assert "torch" in versions and "tensorflow" not in versions  # which it does not load
