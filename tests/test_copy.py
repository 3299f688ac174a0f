"""A script is one file to copy: it and common/ are enough, in any folder, without git."""

import shutil

import pytest
from conftest import ROOT, progress, run, run_dir

SMALL = ["--steps-per-epoch", 200, "--epochs", 2, "--exp-name", "run", "--hidden-sizes", 16]
OFF_POLICY = ["--env-id", "Pendulum-v1", "--num-test-episodes", 1, "--update-after", 150]


@pytest.mark.parametrize(
    "script, flags",
    [
        ("ppo_torch", ["--env-id", "my_envs:Mine-v0"]),
        ("vpg_tf1", ["--env-id", "CartPole-v1"]),
        ("sac_torch", [*OFF_POLICY, "--no-compile"]),
        ("ddpg_tf1", OFF_POLICY),
    ],
)
def test_a_copied_script_runs(tmp_path, script, flags):
    """`cp -r algos/<script>.py common my_project/`; a folder above has another `common`. The
    environment may be registered in the current directory."""
    project = tmp_path / "my_project"
    project.mkdir()
    shutil.copy(ROOT / "algos" / f"{script}.py", project)
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "common", project / "common", ignore=ignored)
    (tmp_path / "common").mkdir()
    (tmp_path / "common" / "__init__.py").write_text("raise RuntimeError('not this one')\n")
    assert not any((folder / ".git").exists() for folder in project.parents)
    maker = "gymnasium.envs.classic_control:CartPoleEnv"
    text = f"from gymnasium import register\nregister('Mine-v0', '{maker}')\n"
    (here := tmp_path / "elsewhere").mkdir()
    (here / "my_envs.py").write_text(text)
    run(project / f"{script}.py", *SMALL, *flags, cwd=here)
    directory = run_dir(here / "data", "run")
    assert len(progress(directory)) == 2
    run(ROOT / "benchmark" / "test_policy.py", directory, "--episodes", 1, cwd=here)
