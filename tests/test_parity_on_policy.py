"""PyTorch and TensorFlow 1 compute the same, and start from the same weights.

Tolerances are float32 rounding: 1e-5 of a loss, 1e-5 of a gradient's largest entry, 1e-4 of it for
Fisher products, which are differentiated twice, and 1e-3 for what ten iterations of conjugate
gradient make of them. PPO's gradient jumps where a ratio crosses 1 +- eps, so that rounding alone
may decide a sample's part in it: its epochs are compared after 3 policy steps, not 80.
"""

import re

import gymnasium as gym
import numpy as np
import pandas as pd
import pytest
import torch
from conftest import load_script, progress, run, run_dir, slow

from common.mpi_tf1 import MpiAdamOptimizer, setup_tf1_for_mpi, tf

ALGOS = ["vpg", "trpo", "ppo"]
SPACES = {"box": gym.spaces.Box(-1, 1, (3,)), "discrete": gym.spaces.Discrete(4)}
B, OBS_DIM = 200, 5


class Pair:
    """One algorithm's networks in both frameworks, and a batch of made-up experience."""

    def __init__(self, algo, space, activation="tanh"):
        self.torch, self.tf1 = load_script(f"{algo}_torch"), load_script(f"{algo}_tf1")
        sizes = OBS_DIM, space, (16, 8), activation
        self.ac = self.torch.actor_critic(*sizes, np.random.default_rng(0))
        self.sess = setup_tf1_for_mpi()
        networks = self.tf1.actor_critic(*sizes, np.random.default_rng(0))
        self.pi, self.v = networks.pi, networks.v
        self.pi_vars, self.v_vars = tf.trainable_variables("pi/"), tf.trainable_variables("v/")
        self.sess.run(tf.global_variables_initializer())
        self.params = {}  # PyTorch's in its own order, by TensorFlow's names
        for name, param in self.ac.named_parameters():
            layer = re.fullmatch(r"(pi|v)\.(?:net\.)?(\d)\.(weight|bias)", name)
            name = f"{layer[1]}/{layer[3]}_{int(layer[2]) // 2}" if layer else "pi/log_std"
            self.params[name] = param

        rng = np.random.default_rng(1)
        normal = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
        self.obs, adv, ret = normal(B, OBS_DIM), normal(B), normal(B)
        if isinstance(space, gym.spaces.Discrete):
            act = rng.integers(space.n, size=B)
            logits = normal(B, space.n)
            self.dist_old = (logits - np.log(np.exp(logits).sum(-1, keepdims=True)),)
        else:
            act = normal(B, *space.shape)
            self.dist_old = normal(B, *space.shape), 0.3 * normal(*space.shape)
        with torch.no_grad():
            logp = self.ac.pi(*self.tensors(self.obs, act))[0].numpy()
        # The policy has moved since, in part.
        self.batch = self.obs, act, adv, ret, logp + 0.2 * normal(B)

    @staticmethod
    def tensors(*arrays):
        return [torch.as_tensor(x) for x in arrays]

    def torch_params(self, variables):
        """PyTorch's parameters in the order of TensorFlow's variables."""
        return [self.params[variable.op.name] for variable in variables]

    def assert_same_by_parameter(self, ours, theirs, tolerance):
        """PyTorch's arrays, one a parameter, against TensorFlow's: its matrices are [in, out]."""
        for a, b in zip(ours, theirs, strict=True):
            a = a.detach().numpy().T
            np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * np.abs(b).max())

    def to_torch_order(self, flat):
        """A flat vector over `pi_vars`, as a flat vector over PyTorch's parameters."""
        parts = np.split(flat, np.cumsum([int(np.prod(p.shape)) for p in self.pi_vars])[:-1])
        pairs = zip(self.pi_vars, parts, strict=True)
        arrays = {p.op.name: part.reshape(p.shape).T.ravel() for p, part in pairs}
        return np.concatenate([arrays[name] for name in self.params if name in arrays])


def losses_in_torch(pair, algo):
    """loss_pi and what comes with it, entropy, loss_v."""
    obs, act, adv, ret, logp_old = pair.tensors(*pair.batch)
    logp, entropy = pair.ac.pi(obs, act)
    loss_v = pair.torch.compute_loss_v(pair.ac.v(obs).squeeze(-1), ret)
    more = (0.2,) if algo == "ppo" else ()
    losses = pair.torch.compute_loss_pi(logp, logp_old, adv, *more)
    if algo == "trpo":
        losses = losses, pair.ac.pi.kl(pair.tensors(*pair.dist_old), pair.ac.pi.dist(obs))
    return *losses, entropy.mean(), loss_v


def losses_in_tf1(pair, algo):
    obs, act, adv, ret, logp_old = (tf.constant(x) for x in pair.batch)
    logp, entropy = pair.pi(obs, act)
    loss_v = pair.tf1.compute_loss_v(pair.v(obs)[:, 0], ret)
    more = (0.2,) if algo == "ppo" else ()
    losses = pair.tf1.compute_loss_pi(logp, logp_old, adv, *more)
    if algo == "trpo":
        losses = losses, pair.pi.kl(pair.dist_old, pair.pi.dist(obs))
    return *losses, tf.reduce_mean(entropy), loss_v


@pytest.mark.parametrize("activation", ["tanh", "relu"])
@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("algo", ALGOS)
def test_weights_losses_and_gradients(algo, space, activation):
    """The first weights are equal to the bit; losses and gradients to rounding."""
    pair = Pair(algo, SPACES[space], activation)
    variables = pair.pi_vars + pair.v_vars
    pair.assert_same_by_parameter(pair.torch_params(variables), pair.sess.run(variables), 0)
    ours, theirs = losses_in_torch(pair, algo), losses_in_tf1(pair, algo)
    np.testing.assert_allclose(
        [x.item() for x in ours], pair.sess.run(theirs), rtol=1e-5, atol=1e-7
    )
    for i, variables in ((0, pair.pi_vars), (-1, pair.v_vars)):
        grads = torch.autograd.grad(ours[i], pair.torch_params(variables), retain_graph=True)
        pair.assert_same_by_parameter(
            grads, pair.sess.run(tf.gradients(theirs[i], variables)), 1e-5
        )


@pytest.mark.parametrize("space", SPACES)
def test_trpo_step(space):
    """Fisher products, then the whole natural gradient step, from the same weights and batch."""
    pair = Pair("trpo", SPACES[space])
    params = list(pair.ac.pi.parameters())
    with torch.no_grad():
        dist_old = [x.clone() for x in pair.ac.pi.dist(torch.as_tensor(pair.obs))]
    loss_pi = losses_in_torch(pair, "trpo")[0]
    kl = pair.ac.pi.kl(dist_old, pair.ac.pi.dist(torch.as_tensor(pair.obs)))
    grad_kl = pair.torch.flat_grad(kl, params, create_graph=True)
    g = pair.torch.flat_grad(loss_pi, params, retain_graph=True).numpy().astype(np.float64)

    def fisher(x):
        x_t = torch.as_tensor(x, dtype=torch.float32)
        return pair.torch.fisher_product(grad_kl, params, x_t).numpy() + 0.1 * x

    dist = pair.pi.dist(tf.constant(pair.obs))
    kl_op = pair.pi.kl([x.numpy() for x in dist_old], dist)
    x_ph = tf.placeholder(tf.float32, [None])
    grad_kl_op = pair.tf1.flat_grad(kl_op, pair.pi_vars)
    fisher_op = pair.tf1.fisher_product(grad_kl_op, pair.pi_vars, x_ph)
    g_tf1 = pair.sess.run(pair.tf1.flat_grad(losses_in_tf1(pair, "trpo")[0], pair.pi_vars))

    def fisher_tf1(x):
        return pair.sess.run(fisher_op, {x_ph: x}) + 0.1 * x

    def assert_close(ours, theirs, tolerance):
        theirs = pair.to_torch_order(theirs)
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=tolerance * np.abs(theirs).max())

    rng = np.random.default_rng(2)
    for _ in range(5):
        x = rng.normal(size=len(g))
        assert_close(fisher(pair.to_torch_order(x)), fisher_tf1(x), 1e-4)
    step = pair.torch.natural_step(fisher, g, 0.01, 10)
    step_tf1 = pair.tf1.natural_step(fisher_tf1, g_tf1.astype(np.float64), 0.01, 10)
    assert np.linalg.norm(step) > 1e-3
    assert_close(step, step_tf1, 1e-3)


def test_adam():
    """Fifty steps on given gradients, tiny ones and zeros among them, where epsilon matters."""
    rng = np.random.default_rng(0)
    start = rng.normal(size=(3, 4)).astype(np.float32)
    scale = np.float32([1e3, 1, 1e-8, 0])
    grads = rng.normal(size=(50, 3, 4)).astype(np.float32) * scale
    sess = setup_tf1_for_mpi()
    variable = tf.get_variable("x", initializer=start)
    optimizer, ph = MpiAdamOptimizer(1e-2), tf.placeholder(tf.float32, [3, 4])
    # The gradient of sum(x ph) is ph.
    step = optimizer.minimize(tf.reduce_sum(variable * ph), [variable])
    sess.run(tf.global_variables_initializer())
    param = torch.nn.Parameter(torch.tensor(start))
    torch_optimizer = torch.optim.Adam([param], lr=1e-2)
    m, v, exact = 0.0, 0.0, start.astype(np.float64)
    for t, g in enumerate(grads, 1):
        sess.run(step, {ph: g})
        param.grad = torch.tensor(g)
        torch_optimizer.step()
        g = g.astype(np.float64)
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
        exact -= 1e-2 * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8)
        np.testing.assert_allclose(sess.run(variable), exact, rtol=0, atol=5e-6)
        np.testing.assert_allclose(sess.run(variable), param.detach().numpy(), rtol=0, atol=5e-6)
    assert sess.run(optimizer.variables["adam/step"]) == 50
    assert np.abs(exact - start)[:, :3].min() > 1e-3


@pytest.mark.parametrize("algo", ALGOS)
@pytest.mark.parametrize("env_id", ["CartPole-v1", slow("Hopper-v4")])
def test_two_epochs_from_the_command_line(tmp_path, algo, env_id):
    """The same seed: the same experience, and after the updates the same rows of progress.txt.

    The second epoch is the first that acts on statistics; few steps keep the rounding small.
    """
    flags = ["--env-id", env_id, "--epochs", 2, "--seed", 3, "--data-dir", tmp_path]
    flags += ["--steps-per-epoch", 600, "--train-v-iters", 5, "--minibatch-size", 200]
    flags += ["--train-pi-iters", 3] if algo == "ppo" else []
    flags += ["--norm-obs", "--norm-rew"] + (["--anneal-lr"] if algo != "trpo" else [])
    a, b = (run_dir(tmp_path, framework, seed=3) for framework in ("torch", "tf1"))
    for framework in ("torch", "tf1"):
        run(f"{algo}_{framework}", *flags, "--exp-name", framework)
    assert progress(a).AverageEpRet[0] == progress(b).AverageEpRet[0]
    pd.testing.assert_frame_equal(progress(a), progress(b), rtol=1e-3, atol=1e-5)
    with np.load(a / "policy.npz") as x, np.load(b / "policy.npz") as y:
        assert sorted(x) == sorted(y)
        for key in x:
            if x[key].dtype == np.float32:
                np.testing.assert_allclose(x[key], y[key], rtol=1e-4, atol=1e-4)
            else:
                assert (x[key] == y[key]).all()
