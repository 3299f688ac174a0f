"""DDPG, TD3 and SAC beyond what test_replay.py compares: learning, limits, bad input."""

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import OFF_POLICY, load_script, progress, run_dir

from common import mpi


@pytest.mark.parametrize("name", ["sac_torch", "sac_tf1"])
def test_loss_of_alpha_by_hand(name):
    """Going down, it raises log alpha by the mean of log pi + target: the entropy is too low."""
    module, logp, log_alpha = load_script(name), np.float32([-1, 2, 5]), np.float32(0.5)
    if name.endswith("torch"):
        x, logp = torch.tensor(log_alpha, requires_grad=True), torch.tensor(logp)
        loss = module.compute_loss_alpha(x, logp.requires_grad_(), -1)
        gradient, through = torch.autograd.grad(loss, [x, logp], allow_unused=True)
        loss = loss.item()
    else:
        from common import mpi_tf1

        sess, tf = mpi_tf1.setup(), mpi_tf1.tf
        x, logp = tf.constant(log_alpha), tf.constant(logp)
        loss = module.compute_loss_alpha(x, logp, -1)
        gradient, through = tf.gradients(loss, [x, logp])
        loss, gradient = sess.run([loss, gradient])
    assert loss == pytest.approx(-0.5) and gradient == pytest.approx(-1)
    assert through is None, "logp_pi gets a gradient, and only log_alpha should"


def train(name, tmp_path, **flags):
    module = load_script(name)
    flags |= {"compile": False} if name.endswith("torch") else {}
    return module.train(module.Args(**flags, data_dir=str(tmp_path), exp_name=name))


@pytest.mark.slow
@pytest.mark.parametrize("name", OFF_POLICY)
def test_learns_pendulum(name, tmp_path):
    """A mean test return above -600 where a policy that does nothing gets -1200; SAC needs 4000
    steps for it and comes to -150, TD3 needs 6000."""
    epochs = 8 if name.startswith("sac") else 15
    flags = {"env_id": "Pendulum-v1", "hidden_sizes": (64, 64), "epochs": epochs}
    flags |= {"steps_per_epoch": 1000, "start_steps": 1000}
    assert train(name, tmp_path, **flags, num_test_episodes=10)
    returns = progress(run_dir(tmp_path, name)).AverageTestEpRet
    assert returns.max() > -600 and returns[0] < -800


@pytest.mark.parametrize("name", ["ddpg_torch", "sac_tf1"])
def test_no_test_episodes(name, tmp_path):
    """Their columns are there and empty; so are those of losses before the first update."""
    flags = {"env_id": "Pendulum-v1", "epochs": 1, "steps_per_epoch": 20, "num_test_episodes": 0}
    assert train(name, tmp_path, **flags)
    row = pd.read_csv(run_dir(tmp_path, name) / "progress.txt", sep="\t").loc[0]
    empty = {"AverageTestEpRet", "TestEpLen", "LossPi", "LossQ"}
    assert empty | {key for key in row.index if "Test" in key} <= {*row[row.isna()].index}


@pytest.mark.parametrize("name", OFF_POLICY)
def test_bad_input(name, tmp_path, monkeypatch):
    """One clear line, and nothing written."""
    cases = [({"env_id": "CartPole-v1"}, r"Discrete\(2\); supported: .* and Box actions of real")]
    cases += [({"batch_size": 100}, "--batch-size 100 is not a multiple of the 3 ranks")]
    if name.startswith("sac"):
        cases += [({"alpha": -1.0}, "alpha"), ({"alpha": "automatic"}, "alpha")]
    monkeypatch.setattr(mpi, "num_procs", lambda: 3)
    flags = {"env_id": "Pendulum-v1", "steps_per_epoch": 300}
    for more, message in cases:
        with pytest.raises(ValueError, match=message):
            train(name, tmp_path / "data", **flags | more)
    assert not (tmp_path / "data").exists()
