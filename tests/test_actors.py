"""How the policies of all scripts act: in NumPy, and within the environment's bounds."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import ON_POLICY, SCRIPTS, load_script
from torch import distributions

SPACES = [gym.spaces.Box(-1, 1, (2,)), gym.spaces.Discrete(3)]


def actor(module, space):
    """A script's policy, `get_action`'s dict of it, and a function that calls a part of it with
    arrays and returns an array or a tuple of arrays."""
    rng = np.random.default_rng(8)  # for SAC, log_std far beyond its bounds on both sides
    if module.__name__.endswith("torch"):
        from common.mpi_pytorch import layers

        pi = module.actor_critic(4, space, (16, 8), "relu", rng).pi.requires_grad_(False)
        weights, given, fetch = layers(pi.net), torch.as_tensor, np.asarray
    else:
        from common import mpi_tf1

        sess, given = mpi_tf1.setup(), mpi_tf1.tf.constant
        pi, fetch = module.actor_critic(4, space, (16, 8), "relu", rng).pi, sess.run
        sess.run(mpi_tf1.tf.global_variables_initializer())
        weights = sess.run(pi.net.layers)

    def call(part, *arrays):
        found = part(*map(given, arrays))
        return tuple(map(fetch, found)) if isinstance(found, tuple) else fetch(found)

    return pi, {"weights": weights, "activation": "relu", "act_noise": 0.3}, call


def test_layers_that_numpy_does_not_know_are_refused():
    from common.mpi_pytorch import layers

    nn = torch.nn
    for more in [nn.LayerNorm(2)], [nn.ReLU()], [nn.GELU(), nn.Linear(2, 2)], [nn.Linear(2, 2)]:
        with pytest.raises(TypeError, match="get_action"):
            layers(nn.Sequential(nn.Linear(2, 2), *more))


@pytest.mark.parametrize("script", SCRIPTS)
def test_numpy_acts_as_the_framework(script):
    """`get_action` in NumPy gives the action of the framework's networks for the same noise."""
    module, n = load_script(script), 400
    obs = 50 * np.random.default_rng(1).standard_normal((n, 4), dtype=np.float32)
    noise = [np.random.default_rng(i).standard_normal(2, dtype=np.float32) for i in range(n)]
    noise = np.array(noise)
    if script in ON_POLICY:
        pi, policy, call = actor(module, SPACES[1])
        logits = call(pi.net, obs) + [np.random.default_rng(i).gumbel(size=3) for i in range(n)]
        found = [module.get_action(policy, obs[i], np.random.default_rng(i)) for i in range(n)]
        assert found == logits.argmax(-1).tolist()
        pi, policy, call = actor(module, SPACES[0])
        policy["log_std"] = np.float32([3, -4])
        wanted = call(pi.net, obs) + np.exp(policy["log_std"]) * noise
    else:
        pi, policy, call = actor(module, 2)
        if "sac" in script:
            best, wanted = call(pi, obs, 0 * noise)[0], call(pi, obs, noise)[0]
            assert ((call(pi.net, obs)[:, 2:] > 2) & (abs(wanted) < 0.99)).sum() > 20
        else:
            best = call(pi, obs)
            wanted = np.clip(best + policy["act_noise"] * noise, -1, 1)
        found = [module.get_action(policy, o) for o in obs]
        np.testing.assert_allclose(found, best, rtol=0, atol=1e-3)
    found = [module.get_action(policy, obs[i], np.random.default_rng(i)) for i in range(n)]
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-3)


@pytest.mark.parametrize("script", ON_POLICY)
@pytest.mark.parametrize("space", SPACES, ids=lambda space: type(space).__name__)
def test_log_prob_and_entropy(space, script):
    """They are those of torch.distributions, of all dimensions of an action together."""
    rng, discrete = np.random.default_rng(0), space is SPACES[1]
    pi, _, call = actor(load_script(script), space)
    obs = rng.standard_normal((50, 4), dtype=np.float32)
    act = rng.integers(3, size=50) if discrete else rng.normal(size=(50, 2)).astype(np.float32)
    out = torch.tensor(call(pi.net, obs), dtype=torch.float64)
    dist = distributions.Categorical(logits=out)
    if not discrete:
        dist = distributions.Independent(distributions.Normal(out, np.exp(-0.5)), 1)
    logp, entropy = call(pi, obs, act)
    np.testing.assert_allclose(logp, dist.log_prob(torch.tensor(act)), rtol=0, atol=1e-5)
    np.testing.assert_allclose(entropy.mean(), dist.entropy().mean(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("script", ["sac_torch", "sac_tf1"])
@pytest.mark.parametrize("form", ["any", "ours"])
def test_log_prob_where_tanh_saturates(form, script):
    """SAC's log pi(a|s) holds where 1 - tanh(u)^2 is 0 in float32 (its log is log 4 - 2 |u|), with
    log_std clamped to [-20, 2].

    Where sigma is small beside mu, u keeps few digits of the noise: of forms that compute it again
    from u, no more is asked there than that they clamp log_std.
    """
    rng = np.random.default_rng(0)
    obs, noise = (rng.standard_normal((200, n), dtype=np.float32) for n in (4, 3))
    pi, _, call = actor(load_script(script), 3)
    a, logp = call(pi, 1000 * obs, noise)
    mu, log_std = np.split(call(pi.net, 1000 * obs).astype(float), 2, axis=1)
    assert (log_std > 2).sum() > 50
    clamped, log_std = log_std < -100, log_std.clip(-20, 2)
    u = mu + np.exp(log_std) * noise
    log_normal = -0.5 * noise**2 - log_std - 0.5 * np.log(2 * np.pi)
    expected = (log_normal - np.log(4) + 2 * np.abs(u)).sum(-1)
    saturated = (np.abs(u) > 10).all(-1)
    assert clamped[saturated].sum() > 10 and (1 - a[saturated] ** 2 == 0).all()
    np.testing.assert_allclose(logp[saturated], expected[saturated], rtol=0, atol=50)
    exact = saturated & (log_std > (-2 if form == "any" else -np.inf)).all(-1)
    assert exact.sum() > 15
    np.testing.assert_allclose(logp[exact], expected[exact], rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("script", SCRIPTS)
def test_to_env(script):
    """An action comes to the bounds of each dimension, in the shape of the space: clipped where the
    policy is a Gaussian, rescaled from [-1, 1] elsewhere."""
    to_env = load_script(script).to_env
    box = gym.spaces.Box(np.array([-1, -2], np.float32), np.array([1, 0.5], np.float32))
    middle = [0, 0] if script in ON_POLICY else [0, -0.75]
    for x, wanted in ((-3, [-1, -2]), (0, middle), (3, [1, 0.5])):
        np.testing.assert_array_equal(to_env(np.full(2, x, np.float32), box), wanted)
    assert to_env(np.zeros(4, np.float32), gym.spaces.Box(-1, 1, (2, 2))).shape == (2, 2)
    if script in ON_POLICY:
        assert to_env(2, gym.spaces.Discrete(5, start=-1)) == 1
