"""What the tests share: running a script as a user would, with and without mpirun."""

import contextlib
import dataclasses
import importlib.util
import json
import os
import pickle
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import psutil
import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmark.reading import read_npz

ON_POLICY = [f"{algo}_{f}" for algo in ("vpg", "trpo", "ppo") for f in ("torch", "tf1")]
OFF_POLICY = [f"{algo}_{f}" for algo in ("ddpg", "td3", "sac") for f in ("torch", "tf1")]
SCRIPTS = ON_POLICY + OFF_POLICY
FAKE, GRID = ROOT / "tests" / "fake_script.py", ROOT / "benchmark" / "grid.py"
PATH = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])
MPIRUN = shutil.which("mpirun", path=PATH)
NO_TENSORFLOW = importlib.util.find_spec("tensorflow") is None


class NoTensorFlow:
    """In place of common.mpi_tf1 where TensorFlow is not installed: importing from it skips."""

    def __getattr__(self, name):
        if name not in ("tf", "setup"):  # for Hypothesis and pickle, which look at all modules
            raise AttributeError(name)
        pytest.skip("needs TensorFlow", allow_module_level=True)


if NO_TENSORFLOW:
    sys.modules["common.mpi_tf1"] = NoTensorFlow()


def skip_without_tensorflow(program):
    """Skip the test if `program`, a script's name or path, needs TensorFlow, which is missing."""
    if NO_TENSORFLOW and "_tf1" in str(program):
        pytest.skip("needs TensorFlow")


# Workers of pytest-xdist share the cores out, so that what they start does not fight for them.
if (worker := os.environ.get("PYTEST_XDIST_WORKER")) and hasattr(os, "sched_setaffinity"):
    cores, workers = sorted(os.sched_getaffinity(0)), int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    os.sched_setaffinity(0, cores[int(worker[2:]) % len(cores) :: workers])


@pytest.fixture(autouse=True)
def whole_floats():
    """Undo what a torch script does to this process: Hypothesis refuses to draw floats without
    denormal numbers."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_flush_denormal(False)


def pytest_xdist_auto_num_workers(config):
    """Two workers to a core, since tests wait now and then, but at most 4: each takes 1 GB."""
    return min(4, 2 * len(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else 2


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport():
    """Tests that are skipped for a reason with a word of the variable CI_REQUIRE in it fail."""
    report, required = (yield), os.environ.get("CI_REQUIRE", "").split()
    if report.skipped and any(word in report.longrepr[2] for word in required):
        report.outcome = "failed"
    return report


def needs_compiler():
    """Skip the test where `torch.compile` finds no C++ compiler."""
    from common.mpi_pytorch import can_compile

    if not can_compile():
        pytest.skip("needs a C++ compiler")


@dataclasses.dataclass
class Args:
    """A script's arguments, as the logger needs them."""

    env_id: str = "Env-v0"
    exp_name: str | None = None
    seed: int = 3
    data_dir: str = "data"
    datestamp: bool = False
    resume: bool = False
    overwrite: bool = False
    epochs: int = 2
    num_cpu: int = 1
    save_freq: int = 1
    snapshots: bool = False
    lr: float = 0.1
    anneal_lr: bool = False


def slow(*values):
    """Parameters of a test that takes long with them."""
    return pytest.param(*values, marks=pytest.mark.slow)


def mostly_slow(names, *quick):
    """Parameters of a test: `names`, those slow that are not in `quick`."""
    return [name if name in quick else slow(name) for name in names]


def load_script(name):
    """The module of a script in algos/, by file name without .py."""
    skip_without_tensorflow(name)
    spec = importlib.util.spec_from_file_location(name, ROOT / "algos" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def command(program, *flags, ranks=1):
    """The command line of a script in algos/ (by name) or of any program (by path)."""
    skip_without_tensorflow(program)
    path = ROOT / "algos" / f"{program}.py" if not str(program).endswith(".py") else program
    mpirun = [MPIRUN, "-np", str(ranks)] if ranks > 1 else []
    return [*mpirun, sys.executable, str(path), *map(str, flags)]


def run(program, *flags, ranks=1, cwd=None, check=True, timeout=300, env=None):
    """Run a program to its end. Fails the test, showing its output, if its exit code is not 0."""
    options = {"capture_output": True, "text": True, "timeout": timeout, "cwd": cwd}
    env = {**os.environ, **(env or {})}
    result = subprocess.run(command(program, *flags, ranks=ranks), env=env, **options)
    if check and result.returncode:
        pytest.fail(f"{program} exited with {result.returncode}\n{result.stdout}\n{result.stderr}")
    return result


def mpi(tmp_path, source, ranks, *flags, **kwargs):
    """Run a few lines of Python on several ranks; `common` and `conftest` are importable."""
    program, path = tmp_path / "program.py", [str(ROOT), str(ROOT / "tests")]
    program.write_text(f"import sys\nsys.path[:0] = {path}\n{source}")
    return run(program, *flags, ranks=ranks, **kwargs)


def run_dir(data_dir, exp_name, seed=0):
    """The run directory of an experiment."""
    return Path(data_dir, exp_name, f"{exp_name}_s{seed}")


def progress(directory):
    """The table of a run, without the one column that differs between equal runs."""
    return pd.read_csv(Path(directory, "progress.txt"), sep="\t").drop(columns="Time")


def read_status(directory):
    """status.json of a run, as a dict."""
    return json.loads(Path(directory, "status.json").read_text())


def checkpoint(directory):
    """What a run would be resumed from, by name; {"epoch": 0} where there is nothing yet."""
    for name in ("checkpoint.npz", "checkpoint_previous.npz", "checkpoint.npz"):
        with contextlib.suppress(FileNotFoundError):  # as it is being replaced
            arrays = read_npz(Path(directory, name))
            return json.loads(str(arrays.pop("about"))) | arrays
    return {"epoch": 0}


def saved_epoch(directory):
    """The number of epochs after which a run was saved last."""
    return int(checkpoint(directory)["epoch"])


def contents(directory):
    """{path: bytes} of all files below a directory, except locks."""
    paths = [p for p in sorted(Path(directory).rglob("*")) if p.is_file() and p.name != ".lock"]
    return {str(p.relative_to(directory)): p.read_bytes() for p in paths}


def assert_same_run(a, b):
    """Two runs have the same table, column Time apart, and end with the same policy."""
    pd.testing.assert_frame_equal(progress(a), progress(b), check_exact=True)
    with np.load(a / "policy.npz") as x, np.load(b / "policy.npz") as y:
        assert sorted(x) == sorted(y) and all((x[key] == y[key]).all() for key in x)


def wait_for(condition, seconds=60):
    """Fail the test if a condition does not come true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def processes(word):
    """Ids of the processes with a word (a directory of the test, say) in their command line."""
    running = psutil.process_iter(["cmdline"])
    return [p.pid for p in running if str(word) in " ".join(p.info["cmdline"] or ())]


def kill_all(pid):
    """SIGKILL to a process and all that it started, in whatever process groups they are."""
    process = psutil.Process(pid)
    for p in (process, *process.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            p.kill()


def saved_model(directory, **inputs):
    """Outputs {name: array} of the SavedModel of a run, in a session of its own."""
    from common.mpi_tf1 import tf

    with tf.Graph().as_default(), tf.Session() as sess:
        model = tf.saved_model.load(sess, ["serve"], str(directory / "tf1_save"))
        signature = model.signature_def["serving_default"]
        outputs = {name: info.name for name, info in signature.outputs.items()}
        return sess.run(outputs, {signature.inputs[k].name: x for k, x in inputs.items()})


class Buffer:
    """A replay buffer of `size` rows. The i-th transition, from 0, is (i, i)."""

    def __init__(self, size, count=0):
        self.data, self.count = np.full((size, 2), -1.0), 0
        self.store(count)

    def store(self, n):
        for _ in range(n):
            self.data[self.count % len(self.data)] = self.count
            self.count += 1


def flip_a_bit(path):
    """Damage the first array of an .npz file; its zip headers have bytes that nothing reads."""
    data = bytearray(path.read_bytes())
    data[data.index(b"NUMPY") + 130] ^= 1  # the header of an .npy file is 128 bytes long
    path.write_bytes(data)


def truncate(path):
    path.write_bytes(path.read_bytes()[:-7])


class Planted:
    """Unpickling it creates the file that the environment variable PLANTED names."""

    def __reduce__(self):
        return (Path.touch, (Path(os.environ["PLANTED"]),))


@pytest.fixture
def planted(tmp_path, monkeypatch):
    """A pickle of `Planted`, as bytes. The test fails if anything has executed it in the end."""
    path = tmp_path / "executed"
    monkeypatch.setenv("PLANTED", str(path))
    pickle.loads(pickle.dumps(Planted()))
    assert path.exists()  # the pickle works
    path.unlink()
    yield pickle.dumps(Planted())
    assert not path.exists()
