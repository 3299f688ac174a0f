"""Ranks on two hosts: mpirun starts them through a program in place of ssh."""

import json
import subprocess

import pytest
from conftest import MPIRUN, command, progress, run, run_dir

# As ssh does it: in another directory and without this one's environment, a shell gets the words
# behind the options and the host as one line.
SSH = """#!/bin/sh
echo "$@" >>{called}
while [ "${{1#-}}" != "$1" ]; do shift; done
shift
cd / && exec env -i PATH=/usr/bin:/bin sh -c "$*"
"""


@pytest.mark.slow
def test_two_hosts_give_the_numbers_of_one(tmp_path):
    """One rank on each of two hosts, against two ranks on one."""
    ssh, here, there = (tmp_path / name for name in ("ssh", "here", "there"))
    ssh.write_text(SSH.format(called=tmp_path / "called"))
    ssh.chmod(0o755)
    flags = ["--env-id", "CartPole-v1", "--steps-per-epoch", 400, "--exp-name", "run"]
    flags += ["--epochs", 2, "--data-dir"]
    run("ppo_torch", *flags, here, ranks=2)
    hosts = [MPIRUN, "-launcher", "ssh", "-launcher-exec", ssh, "-hosts", "127.0.0.1,127.0.0.2"]
    words = [*hosts, "-np", "2", *command("ppo_torch", *flags, there)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "127.0.0.2" in (tmp_path / "called").read_text()
    assert json.loads((run_dir(there, "run") / "config.json").read_text())["ranks"] == 2
    assert progress(run_dir(here, "run")).equals(progress(run_dir(there, "run")))
