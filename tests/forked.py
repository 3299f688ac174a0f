"""Python programs as forks of a process that has loaded the libraries: loading them takes most of
the programs that tests start longer than their own work."""

import multiprocessing
import os
import runpy
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIBRARIES = ["torch._dynamo", "tensorflow.compat.v1", "gymnasium", "pandas", "scipy.stats"]
LIBRARIES += ["tensorboard.summary.writer.record_writer"]
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(LIBRARIES)
os.environ.setdefault("GOMP_SPINCOUNT", "3000")  # as the scripts do, before torch is loaded


def run_for(command, limit, cwd=".", env=os.environ):
    """Run [sys.executable, ...], a program or a module. Returns (code, output); code is None if it
    was killed after `limit` seconds, as that of `exercise.run_for`."""
    with tempfile.NamedTemporaryFile("r") as output:
        words = [*map(str, command[1:])]
        process = SERVER.Process(target=_become, args=(words, str(cwd), dict(env), output.name))
        process.start()
        process.join(limit)
        code = process.exitcode
        process.kill()
        return code, output.read()


def _become(words, cwd, env, output):
    """Turn this process into the program."""
    for stream in (1, 2):
        os.dup2(os.open(output, os.O_WRONLY | os.O_APPEND), stream)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    paths = [*env.get("PYTHONPATH", "").split(os.pathsep), *sys.path]
    own = {"", str(ROOT), str(ROOT / "tests"), str(ROOT / "exercises")}  # what tests have added
    sys.path[:] = [path for path in paths if path not in own]
    if words[0] == "-m":
        sys.argv, sys.path[:0] = words[1:], [cwd]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[:0] = words, [os.path.dirname(words[0])]
        runpy.run_path(words[0], run_name="__main__")
