"""Ranks on two hosts: mpirun over ssh, to a real sshd on two loopback addresses."""

import getpass
import json
import os
import shutil
import socket
import subprocess
import sys

import pytest
from conftest import MPIRUN, ROOT, progress, run_dir, wait_for

HOSTS = "127.0.0.1,127.0.0.2"
PATH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/usr/local/sbin"])
SSHD, SSH, KEYGEN = (shutil.which(name, path=PATH) for name in ("sshd", "ssh", "ssh-keygen"))
QUICK = ["--env-id", "CartPole-v1", "--steps-per-epoch", "400", "--exp-name", "run"]


@pytest.fixture
def ssh(tmp_path):
    """A program that mpirun calls in place of ssh: it talks to an sshd of this test's own."""
    if not (SSHD and SSH and KEYGEN):
        pytest.skip("needs ssh and sshd (Debian: apt-get install openssh-server)")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    for key in ("host_key", "user_key"):
        words = [KEYGEN, "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / key]
        subprocess.run(words, check=True)
    shutil.copy(tmp_path / "user_key.pub", tmp_path / "authorized_keys")
    if os.getuid() == 0:
        os.makedirs("/run/sshd", exist_ok=True)  # sshd insists on it
    (tmp_path / "sshd_config").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nListenAddress 127.0.0.2\nStrictModes no\n"
        f"HostKey {tmp_path}/host_key\nAuthorizedKeysFile {tmp_path}/authorized_keys\n"
        "PasswordAuthentication no\nPermitRootLogin yes\nUsePAM no\nPidFile none\n"
    )
    words = [SSHD, "-D", "-e", "-f", tmp_path / "sshd_config"]
    with open(tmp_path / "sshd.log", "wb") as log:
        sshd = subprocess.Popen(words, stderr=log)
    program = tmp_path / "ssh"
    program.write_text(
        f'#!/bin/sh\necho "$@" >>{tmp_path}/called\n'
        f"exec {SSH} -F none -p {port} -i {tmp_path}/user_key -l {getpass.getuser()} "
        f'-o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR "$@"\n'
    )
    program.chmod(0o755)
    try:
        wait_for(lambda: b"listening" in (tmp_path / "sshd.log").read_bytes(), seconds=10)
        answer = subprocess.run([program, "127.0.0.2", "true"], capture_output=True, text=True)
        if answer.returncode:
            pytest.skip(f"sshd lets nobody in here: {answer.stderr.strip()}")
        yield program
    finally:
        sshd.terminate()
        sshd.wait()


@pytest.mark.slow
def test_two_hosts_give_the_numbers_of_one(tmp_path, ssh):
    """One rank on each of two hosts, against two ranks on one."""
    script = [sys.executable, ROOT / "algos" / "ppo_torch.py", *QUICK]
    hosts = [MPIRUN, "-launcher", "ssh", "-launcher-exec", ssh, "-hosts", HOSTS, "-np", "2"]
    here, there = tmp_path / "here", tmp_path / "there"
    for launch, data in (([MPIRUN, "-np", "2"], here), (hosts, there)):
        words = [*launch, *script, "--epochs", "2", "--data-dir", data]
        done = subprocess.run(words, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
    assert any("127.0.0.2" in line for line in (tmp_path / "called").read_text().splitlines())
    config = json.loads((run_dir(there, "run") / "config.json").read_text())
    assert config["ranks"] == 2
    assert progress(run_dir(here, "run")).equals(progress(run_dir(there, "run")))
