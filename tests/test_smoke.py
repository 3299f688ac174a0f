"""sweeps/smoke.toml, shortened: all twelve scripts through grid.py, plot.py and test_policy.py."""

import csv
import re

import pytest
from conftest import ROOT, SCRIPTS, run, run_dir, slow

from benchmark import test_policy as tp


@pytest.mark.parametrize("some", [("ppo_torch", "td3_tf1"), slow(None)])
def test_the_smoke_sweep_runs_plots_and_can_be_watched(tmp_path, capsys, some):
    text = (ROOT / "sweeps" / "smoke.toml").read_text()
    scripts = some or SCRIPTS
    assert sorted(re.findall(r"algos/(\w+)\.py", text)) == sorted(SCRIPTS)
    for script in set(SCRIPTS) - set(scripts):
        text = text.replace(f'    "algos/{script}.py",\n', "")
    if some:
        text = text.replace('"ddpg_*", "td3_*", "sac_*"', '"td3_*"')
    for old, new in (
        ("epochs = 4", "epochs = 2"),
        ("steps_per_epoch = 1000", "steps_per_epoch = 600"),
        ("vals = 1000", "vals = 300"),
    ):
        assert text.count(old) == 1
        text = text.replace(old, new)
    # Compiling takes longer than all the rest, and has tests of its own.
    text += '\n[params.compile]\nvals = false\nscripts = ["*_torch"]\n'
    (tmp_path / "smoke.toml").write_text(text)

    done = run(ROOT / "benchmark" / "grid.py", "smoke.toml", cwd=tmp_path, timeout=1200)
    assert f"smoke: {len(scripts)} runs, {len(scripts)} finished, in" in done.stdout

    words = ["data/smoke_", "--out", "smoke.png", "--csv", "smoke.csv"]
    run(ROOT / "benchmark" / "plot.py", *words, cwd=tmp_path)
    with open(tmp_path / "smoke.csv", newline="") as f:
        rows = [r for r in csv.DictReader(f) if r["TotalEnvInteracts"] == "1200"]
    assert sorted(f"{r['algo']}_{r['framework']}" for r in rows) == sorted(scripts)
    assert all(-2000 < float(r["mean"]) < 0 for r in rows)  # Pendulum's returns

    for script in scripts:
        directory = run_dir(tmp_path / "data", f"smoke_{script}")
        flags = ["--deterministic"] if script.endswith("torch") else []
        tp.main([str(directory), "--episodes", "1", *flags])
        said = capsys.readouterr().out
        assert f"{script}.py, after epoch 2" in said
        assert -2000 < float(said.split("mean")[1].split()[0]) < 0
