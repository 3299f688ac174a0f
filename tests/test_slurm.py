"""grid.py --slurm: the script of a job array, and a real Slurm where one answers (.ci/slurm.sh)."""

import functools
import json
import os
import re
import subprocess
import sys

import pytest
from conftest import FAKE, GRID, progress, read_status, run, run_dir, wait_for


@functools.cache
def slurm_answers():
    words = ["timeout", "10", "sinfo", "--noheader", "--format=%t"]
    done = subprocess.run(words, capture_output=True, text=True)
    return any(state in done.stdout for state in ("idle", "mix", "alloc"))


needs_slurm = pytest.mark.skipif(
    not slurm_answers(), reason="no Slurm answers here; as root on Debian, .ci/slurm.sh starts one"
)


def write_sweep(directory, params="", slurm="", num_cpu=2):
    # The job's name is the directory's own: another test's jobs are not in its way.
    name = "".join(c for c in directory.name if c.isalnum())
    (directory / "sweep.toml").write_text(
        f'name = "{name}"\nscript = "{FAKE}"\nnum_cpu = {num_cpu}\n'
        f"[params]\n{params}\n[slurm]\n{slurm}\n"
    )
    return name


def submit(directory, *args, **env):
    return run(GRID, "sweep.toml", "--slurm", *args, cwd=directory, check=False, env=env)


def queued(name):
    words = ["squeue", "--noheader", f"--name={name}", "--format=%i %T"]
    return subprocess.run(words, capture_output=True, text=True).stdout.splitlines()


def test_job_script(tmp_path):
    slurm = 'partition = "gpu"\ntime = "1-00:00:00"\ncpus_per_task = 2\nsignal = "B:USR1@300"'
    slurm += '\nexclusive = true\nhold = false\nmail_type = ["END", "FAIL"]\ncomment = "two words"'
    name = write_sweep(tmp_path, "seed = [0, 1, 2]", slurm, num_cpu=4)
    done = submit(tmp_path, "--dry-run")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    for expected in [
        *("#!/bin/bash", f"#SBATCH --job-name={name}", "#SBATCH --array=1-3", "#SBATCH --ntasks=4"),
        *("#SBATCH --partition=gpu", "#SBATCH --time=1-00:00:00", "#SBATCH --cpus-per-task=2"),
        *("#SBATCH --exclusive", "#SBATCH --mail-type=END,FAIL", "#SBATCH --comment='two words'"),
    ]:
        assert expected in lines
    assert "hold" not in done.stdout
    signals = [line for line in lines if "--signal" in line]  # sbatch takes the last
    assert signals == ["#SBATCH --signal=B:USR1@120", "#SBATCH --signal=B:USR1@300"]
    assert sum(bool(re.match(r"'exec .*mpirun.* -np 4", line)) for line in lines) == 3
    assert os.listdir(tmp_path) == ["sweep.toml"]
    assert subprocess.run(["bash", "-n"], input=done.stdout, text=True).returncode == 0


def test_without_slurm(tmp_path):
    write_sweep(tmp_path)
    done = submit(tmp_path, PATH=os.path.dirname(sys.executable))
    assert done.returncode == 2
    assert done.stderr.startswith("grid.py: error: sweep.toml: --slurm needs Slurm's squeue: ")
    assert not list(tmp_path.glob("data/*"))
    assert "datestamp" in submit(tmp_path, "--dry-run", "--datestamp").stderr


@pytest.mark.slow
@needs_slurm
def test_a_job_array_is_warned_requeued_and_resumed(tmp_path):
    """But for what fails, which is submitted again on request."""
    tmp_path = tmp_path / "a path"
    tmp_path.mkdir()
    params = "fail_at = [-1, 1]\nepochs = 12\nepoch_seconds = 0.5"
    name = write_sweep(tmp_path, params, "time = 5")
    done = submit(tmp_path)
    assert done.returncode == 0, done.stderr
    assert "submitted job" in done.stdout and "2 of 2 runs" in done.stdout
    job = done.stdout.split("submitted job ")[1].split(",")[0]
    again = submit(tmp_path)
    assert again.returncode == 2 and "in the queue already" in again.stderr

    # Slurm's warning before the time limit is this signal, to this shell.
    directory, failing = (run_dir(tmp_path / "data", f"{name}_fai{x}") for x in ("-1", "1"))
    table = directory / "progress.txt"
    wait_for(lambda: table.exists() and table.read_text().count("\n") > 2)
    subprocess.run(["scancel", "--batch", "--signal=USR1", f"{job}_1"], check=True)
    wait_for(lambda: f"{job}_1 PENDING" in queued(name))
    assert read_status(directory)["status"] == "interrupted" and 2 <= len(progress(directory)) < 12

    wait_for(lambda: not queued(name))
    assert read_status(directory)["status"] == "finished"
    assert progress(directory).AverageEpRet.tolist() == list(range(1, 13))
    assert json.loads((directory / "config.json").read_text())["ranks"] == 2
    assert read_status(failing)["status"] == "failed" and len(progress(failing)) == 1
    assert "nothing to submit" in submit(tmp_path).stdout
    assert "1 of 2 runs" in submit(tmp_path, "--retry-failed").stdout
    wait_for(lambda: not queued(name))


@needs_slurm
def test_what_sbatch_refuses_is_one_line(tmp_path):
    write_sweep(tmp_path, "", 'partition = "nowhere"')
    done = submit(tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("grid.py: error: sweep.toml: sbatch: ")
    assert done.stderr.count("\n") == 1 and "partition" in done.stderr
