"""All twelve scripts for a moment, through grid.py, plot.py and test_policy.py."""

import pandas as pd
import pytest
from conftest import GRID, ROOT, SCRIPTS, run, run_dir, skip_without_tensorflow, slow

from benchmark import test_policy as tp

# As sweeps/smoke.toml, but shorter, and without compiling, which takes longer than all the rest.
SWEEP = """
name = "smoke"
script = {}
workers = 2
[params]
env_id = "Pendulum-v1"
epochs = 2
steps_per_epoch = 600
compile = false
"""


@pytest.mark.parametrize("scripts", [["ddpg_torch", "ppo_tf1"], slow(SCRIPTS)], ids=len)
def test_a_sweep_runs_plots_and_can_be_watched(tmp_path, capsys, scripts):
    skip_without_tensorflow(scripts)
    (tmp_path / "smoke.toml").write_text(SWEEP.format([f"algos/{s}.py" for s in scripts]))
    done = run(GRID, "smoke.toml", cwd=tmp_path, timeout=1200)
    assert f"smoke: {len(scripts)} runs, {len(scripts)} finished, in" in done.stdout

    words = ["data/smoke_", "--out", "smoke.png", "--csv", "smoke.csv"]
    run(ROOT / "benchmark" / "plot.py", *words, cwd=tmp_path)
    rows = pd.read_csv(tmp_path / "smoke.csv").query("TotalEnvInteracts == 1200")
    assert sorted(rows.algo + "_" + rows.framework) == sorted(scripts)
    assert rows["mean"].between(-2000, 0).all()  # Pendulum's returns

    for script in scripts:
        flags = ["--deterministic"] if script.endswith("torch") else []
        tp.main([str(run_dir(tmp_path / "data", f"smoke_{script}")), "--episodes", "1", *flags])
        said = capsys.readouterr().out
        assert f"{script}.py, after epoch 2" in said
        assert -2000 < float(said.split("mean")[1].split()[0]) < 0
