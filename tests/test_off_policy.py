"""DDPG, TD3 and SAC beyond what test_replay.py compares: learning, limits, bad input."""

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import OFF_POLICY, load_script, mostly_slow, progress, run_dir

from common import UsageError, mpi, mpi_tf1


@pytest.mark.parametrize("name", ["sac_torch", "sac_tf1"])
def test_log_prob_where_tanh_saturates(name):
    """SAC's log pi(a|s) holds where 1 - tanh(u)^2 is 0 in float32; its log is log 4 - 2 |u|. The
    standard deviation is at most e^2, for the actor in NumPy too."""
    module, rng = load_script(name), np.random.default_rng(0)
    obs, noise = (rng.standard_normal((200, n)).astype(np.float32) for n in (5, 3))
    if name.endswith("torch"):
        pi = module.actor_critic(5, 3, (16, 8), "relu", rng).pi
        arrays = [x.detach().numpy().T for x in pi.parameters()]
        with torch.no_grad():
            a, logp = (x.numpy() for x in pi(torch.tensor(1000 * obs), torch.tensor(noise)))
    else:
        sess = mpi_tf1.setup()
        pi = module.actor_critic(5, 3, (16, 8), "relu", rng).pi
        sess.run(mpi_tf1.tf.global_variables_initializer())
        arrays = [x for layer in sess.run(pi.net.layers) for x in layer]
        a, logp = sess.run(pi(1000 * obs, noise))
    layers = list(zip(arrays[::2], arrays[1::2], strict=True))
    x = 1000.0 * obs
    for W, b in layers:
        x = (x if W is arrays[0] else x.clip(min=0)) @ W + b
    mu, log_std = np.split(x, 2, axis=1)
    assert (log_std > 2).sum() > 50 and (log_std < -20).sum() > 50
    log_std = log_std.clip(-20, 2)
    u = mu + np.exp(log_std) * noise
    log_normal = -0.5 * noise**2 - log_std - 0.5 * np.log(2 * np.pi)
    saturated = (np.abs(u) > 10).all(-1)
    assert saturated.sum() > 50 and (1 - a[saturated] ** 2 == 0).all()
    expected = (log_normal - np.log(4) + 2 * np.abs(u)).sum(-1)
    np.testing.assert_allclose(logp[saturated], expected[saturated], rtol=1e-4, atol=1e-3)
    wide = {"weights": [(np.zeros((5, 2), np.float32), np.float32([0, 50]))], "activation": "relu"}
    actions = [module.get_action(wide, obs[0], np.random.default_rng(i))[0] for i in range(50)]
    noise = [np.random.default_rng(i).standard_normal(1, np.float32)[0] for i in range(50)]
    np.testing.assert_allclose(actions, np.tanh(np.exp(2) * np.array(noise)), rtol=1e-5)


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
        sess, tf = mpi_tf1.setup(), mpi_tf1.tf
        x, logp = tf.constant(log_alpha), tf.constant(logp)
        loss = module.compute_loss_alpha(x, logp, -1)
        gradient, through = tf.gradients(loss, [x, logp])
        loss, gradient = sess.run([loss, gradient])
    assert loss == pytest.approx(-0.5) and gradient == pytest.approx(-1) and through is None


def train(name, tmp_path, **flags):
    module = load_script(name)
    flags |= {"compile": False} if name.endswith("torch") else {}
    return module.train(module.Args(**flags, data_dir=str(tmp_path), exp_name=name))


@pytest.mark.parametrize("name", mostly_slow(OFF_POLICY, "sac_torch"))
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
    assert {key for key in row.index if "Test" in key or "Loss" in key} <= {*row[row.isna()].index}


@pytest.mark.parametrize("name", OFF_POLICY)
def test_bad_input(name, tmp_path, monkeypatch):
    """One clear line, and nothing written."""
    cases = [({"env_id": "CartPole-v1"}, "has Discrete actions; supported: Box")]
    cases += [({"batch_size": 100}, "--batch-size 100 is not a multiple of the 3 ranks")]
    if name.startswith("sac"):
        cases += [({"alpha": -1.0}, "--alpha"), ({"alpha": "automatic"}, "--alpha")]
    monkeypatch.setattr(mpi, "num_procs", lambda: 3)
    flags = {"env_id": "Pendulum-v1", "steps_per_epoch": 300}
    for more, message in cases:
        with pytest.raises(UsageError, match=message):
            train(name, tmp_path / "data", **flags | more)
    assert not (tmp_path / "data").exists()
