"""DDPG, TD3 and SAC in both frameworks: against independent computations, each other, and tasks."""

import copy
import itertools
import json
import os
import subprocess
import time

import gymnasium as gym
import numpy as np
import pandas as pd
import pytest
import torch
from conftest import command, kill_all, load_script, mpi, progress, run, run_dir

from common import UsageError
from common.logger import EpochLogger
from common.mpi_tf1 import tf

ALGOS = ["ddpg", "td3", "sac"]
SCRIPTS = [f"{algo}_{framework}" for algo in ALGOS for framework in ("torch", "tf1")]
scripts = {name: load_script(name) for name in SCRIPTS}
OBS, ACT, B = 5, 3, 16
SIZES = (16, 8)
EAGER = {name: ["--no-compile"] if name.endswith("torch") else [] for name in SCRIPTS}
SMALL = ["--env-id", "Pendulum-v1", "--hidden-sizes", 16, 16, "--steps-per-epoch", 200]
SMALL += ["--start-steps", 100, "--update-after", 100, "--batch-size", 20, "--num-test-episodes", 2]


def batch(seed=0):
    """obs, act, rew, obs2, done, two draws of noise: float32, a third of the states terminal."""
    rng = np.random.default_rng(seed)
    draws = [rng.standard_normal((B, n)) for n in (OBS, ACT, OBS)]
    obs, act, obs2 = draws[0], np.tanh(draws[1]), draws[2]
    rew, done = rng.standard_normal(B), rng.uniform(size=B) < 0.33
    arrays = [obs, act, rew, obs2, done, rng.standard_normal((2, B, ACT))]
    return [np.asarray(x, np.float32) for x in arrays]


# Networks and losses: torch, tf1 and float64 NumPy ------------------------------------------------


def numpy_mlp(layers, x):
    *hidden, (W_out, b_out) = layers
    for W, b in hidden:
        x = np.maximum(x @ W + b, 0)
    return x @ W_out + b_out


class NumpyActorCritic:
    """What the scripts compute, in float64, from the same draws, written without looking."""

    def __init__(self, algo, seed=0, obs_dim=OBS, act_dim=ACT, sizes=SIZES):
        rng = np.random.default_rng(seed)
        outputs = 2 * act_dim if algo == "sac" else act_dim
        self.algo = algo
        self.pi = self.layers(rng, [obs_dim, *sizes, outputs])
        n_q = 1 if algo == "ddpg" else 2
        self.qs = [self.layers(rng, [obs_dim + act_dim, *sizes, 1]) for _ in range(n_q)]

    def layers(self, rng, sizes):
        out = []
        for n_in, n_out in itertools.pairwise(sizes):
            W = rng.uniform(-(n_in**-0.5), n_in**-0.5, (n_in, n_out))
            out.append((W, rng.uniform(-(n_in**-0.5), n_in**-0.5, n_out)))
        return out

    def q(self, obs, act):
        return [numpy_mlp(q, np.concatenate([obs, act], 1))[:, 0] for q in self.qs]

    def sample(self, obs, noise):
        mu, log_std = np.split(numpy_mlp(self.pi, obs), 2, 1)
        std = np.exp(np.clip(log_std, -20, 2))
        a = np.tanh(mu + std * noise)
        density = np.exp(-0.5 * noise**2) / (std * np.sqrt(2 * np.pi)) / (1 - a**2)
        return a, np.log(density).sum(1)

    def backup(self, rew, obs2, done, noise, alpha=0.2, gamma=0.9):
        bonus = 0
        if self.algo == "sac":
            act2, logp = self.sample(obs2, noise)
            bonus = -alpha * logp
        else:
            act2 = np.tanh(numpy_mlp(self.pi, obs2))
        if self.algo == "td3":
            act2 = np.clip(act2 + np.clip(0.2 * noise, -0.25, 0.25), -1, 1)
        return np.where(done > 0, rew, rew + gamma * (np.min(self.q(obs2, act2), 0) + bonus))

    def loss_pi(self, obs, noise, alpha=0.2):
        if self.algo == "sac":
            a, logp = self.sample(obs, noise)
            return np.mean(alpha * logp - np.min(self.q(obs, a), 0))
        return -np.mean(self.q(obs, np.tanh(numpy_mlp(self.pi, obs)))[0])


def losses(algo, m, ac, obs, act, rew, obs2, done, noise):
    """backup, loss_q, loss_pi of a script's own functions, torch or tf1 alike."""
    if algo == "sac":
        backup = m.compute_backup(ac, ac, rew, obs2, done, noise[0], 0.2, 0.9)
        loss_pi, _ = m.compute_loss_pi(ac, obs, noise[1], 0.2)
    elif algo == "td3":
        backup = m.compute_backup(ac, rew, obs2, done, noise[0], 0.2, 0.25, 0.9)
        loss_pi = m.compute_loss_pi(ac, obs)
    else:
        backup = m.compute_backup(ac, rew, obs2, done, 0.9)
        loss_pi = m.compute_loss_pi(ac, obs)
    qs = [ac.q(obs, act)] if algo == "ddpg" else ac.q(obs, act)
    return backup, m.compute_loss_q(*qs, backup), loss_pi


def in_torch(algo, data):
    m = scripts[f"{algo}_torch"]
    ac = m.actor_critic(OBS, ACT, SIZES, "relu", np.random.default_rng(0))
    out = losses(algo, m, ac, *map(torch.as_tensor, data))
    grads_q = torch.autograd.grad(out[1], list(ac.q.parameters()))
    grads_pi = torch.autograd.grad(out[2], list(ac.pi.parameters()))
    grads_pi = [g.T if g.ndim == 2 else g for g in grads_pi]  # nn.Linear stores W transposed
    if algo == "ddpg":
        grads_q = [g.T if g.ndim == 2 else g for g in grads_q]
    else:
        grads_q = [
            g[i].reshape(g.shape[1:] if g.shape[1] > 1 else -1) for i in (0, 1) for g in grads_q
        ]
    return [x.detach().numpy() for x in (*out, *grads_q, *grads_pi)]


def in_tf1(algo, data):
    m = scripts[f"{algo}_tf1"]
    with tf.Graph().as_default(), tf.Session() as sess:
        with tf.variable_scope("ac"):
            ac = m.actor_critic(OBS, ACT, SIZES, "relu", np.random.default_rng(0))
        out = losses(algo, m, ac, *map(tf.constant, data))
        grads = tf.gradients(out[1], tf.trainable_variables("ac/q/"))
        grads += tf.gradients(out[2], tf.trainable_variables("ac/pi/"))
        sess.run(tf.global_variables_initializer())
        return sess.run([*out, *grads])


@pytest.mark.parametrize("algo", ALGOS)
def test_targets_losses_gradients(algo):
    """torch, tf1 and float64 agree within 2e-5 relative, 2e-6 absolute; the policy's gradient also
    agrees with finite differences in float64, which no graph was involved in."""
    data = batch()
    a, b = in_torch(algo, data), in_tf1(algo, data)
    assert len(a) == len(b)
    for x, y in zip(a, b, strict=True):
        np.testing.assert_allclose(x.reshape(y.shape), y, rtol=2e-5, atol=2e-6)
    obs, act, rew, obs2, done, noise = (x.astype(np.float64) for x in data)
    ac = NumpyActorCritic(algo)
    backup = ac.backup(rew, obs2, done, noise[0])
    np.testing.assert_allclose(a[0], backup, rtol=2e-5, atol=2e-6)
    loss_q = sum(np.mean((q - backup) ** 2) for q in ac.q(obs, act))
    np.testing.assert_allclose(a[1], loss_q, rtol=2e-5)
    np.testing.assert_allclose(a[2], ac.loss_pi(obs, noise[1]), rtol=2e-5)
    bias, grad = ac.pi[-1][1], a[-1]  # of the last layer
    for i in range(len(bias)):
        bias[i] += 1e-6
        up = ac.loss_pi(obs, noise[1])
        bias[i] -= 2e-6
        down = ac.loss_pi(obs, noise[1])
        bias[i] += 1e-6
        assert (up - down) / 2e-6 == pytest.approx(grad[i], rel=1e-3, abs=1e-5)


def test_terminal_states_are_worth_their_reward():
    """The entropy term is masked along with Q."""
    for algo in ALGOS:
        data = batch()
        data[4][:] = 1
        np.testing.assert_array_equal(in_torch(algo, data)[0], data[2])


def test_log_prob_against_torch():
    """SAC's log pi(a|s) against torch.distributions, in float64 out to where tanh saturates."""
    m = scripts["sac_torch"]
    pi = m.actor_critic(OBS, ACT, SIZES, "relu", np.random.default_rng(0)).pi.double()
    obs, noise = torch.randn(200, OBS).double() * 5, torch.randn(200, ACT).double() * 2
    a, logp = pi(obs, noise)
    mu, log_std = pi.net(obs).chunk(2, -1)
    normal = torch.distributions.Normal(mu, log_std.clamp(-20, 2).exp())
    transform = torch.distributions.TanhTransform(cache_size=1)
    dist = torch.distributions.TransformedDistribution(normal, transform)
    u = mu + log_std.clamp(-20, 2).exp() * noise
    expected = dist.log_prob(transform(u)).sum(-1)
    torch.testing.assert_close(a, torch.tanh(u))
    torch.testing.assert_close(logp, expected)
    # Far out, 1 - tanh(u)^2 is 0 in float32 and its logarithm infinite; ours is neither.
    assert torch.isfinite(pi.float()(100 * obs.float(), noise.float())[1]).all()


def test_alpha_loss():
    """alpha falls while the entropy -log pi is above the target, and rises below it."""
    for logp, sign in ((-10.0, 1), (10.0, -1)):
        log_alpha = torch.tensor(0.5, requires_grad=True)
        scripts["sac_torch"].compute_loss_alpha(log_alpha, torch.full((4,), logp), -3.0).backward()
        assert log_alpha.grad.item() == pytest.approx(-(logp - 3.0)) and log_alpha.grad * sign > 0


@pytest.mark.parametrize("name", SCRIPTS)
def test_numpy_actor_is_the_framework_s(name):
    """act() and the network agree, without noise and with it."""
    m, obs = scripts[name], batch()[0]
    if name.endswith("torch"):
        ac = m.actor_critic(OBS, ACT, SIZES, "relu", np.random.default_rng(0))
        layers = [x for x in ac.pi.net if isinstance(x, torch.nn.Linear)]
        weights = [(x.weight.detach().numpy().T, x.bias.detach().numpy()) for x in layers]
    else:
        with tf.Graph().as_default(), tf.Session() as sess:
            ac = m.actor_critic(OBS, ACT, SIZES, "relu", np.random.default_rng(0))
            outputs = ac.pi.outputs(tf.constant(obs))
            sess.run(tf.global_variables_initializer())
            weights, expected = sess.run([ac.pi.net.layers, outputs["act"]])
    actor = {"weights": weights, "activation": "relu", "act_noise": 0.1}
    ours = np.array([m.get_action(actor, o) for o in obs])
    noisy = np.array([m.get_action(actor, o, np.random.default_rng(1)) for o in obs])
    noise = np.random.default_rng(1).standard_normal((1, ACT), dtype=np.float32)
    noise = noise.repeat(B, axis=0)
    if name.endswith("torch"):
        zeros = [torch.zeros(B, ACT)] if name.startswith("sac") else []
        expected = ac.pi(torch.as_tensor(obs), *zeros)
        expected = (expected[0] if zeros else expected).detach().numpy()
        if name.startswith("sac"):
            with_noise = ac.pi(torch.as_tensor(obs), torch.as_tensor(noise))[0].detach().numpy()
            np.testing.assert_allclose(noisy, with_noise, rtol=1e-5, atol=1e-6)
    if not name.startswith("sac"):
        np.testing.assert_allclose(
            noisy, (expected + 0.1 * noise).clip(-1, 1), rtol=1e-5, atol=1e-6
        )
    np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-6)
    assert ours.dtype == noisy.dtype == np.float32


@pytest.mark.parametrize("name", SCRIPTS)
def test_actions_are_rescaled_per_dimension(name):
    low, high = np.array([-1, 0, -30], np.float32), np.array([1, 5, 10], np.float32)
    space, to_env = gym.spaces.Box(low, high), scripts[name].to_env
    for a, expected in ((-1, low), (1, high), (0, (low + high) / 2), (0.5, [0.5, 3.75, 0])):
        np.testing.assert_allclose(to_env(np.full(3, a, np.float32), space), expected)
    for a in np.random.default_rng(0).uniform(-1, 1, (1000, 3)).astype(np.float32):
        assert space.contains(to_env(a, space))


# Replay buffer ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCRIPTS)
def test_replay_buffer(name):
    """It holds the newest transitions, samples all of them, whole, and comes back exactly."""
    buf, journal = scripts[name].ReplayBuffer(2, 1, 7), []
    rng = np.random.default_rng(0)
    for i in range(17):
        buf.store(np.array([i, i]), np.array([-i]), 2.0 * i, np.array([i + 1, i + 1]), i % 3 == 0)
        if i in (2, 3, 9, 11, 16):
            part, needed = buf.save()
            journal = [*journal, part][-needed:]
        obs, act, rew, obs2, done = buf.sample((4, 50), rng)
        seen = np.unique(obs[..., 0])
        np.testing.assert_array_equal(seen, np.arange(max(0, i - 6), i + 1))
        assert obs.shape == (4, 50, 2) and act.shape == (4, 50, 1) and done.shape == (4, 50)
        np.testing.assert_array_equal(act[..., 0], -obs[..., 0])
        np.testing.assert_array_equal(rew, 2 * obs[..., 1])
        np.testing.assert_array_equal(obs2, obs + 1)
        np.testing.assert_array_equal(done, obs[..., 0] % 3 == 0)
    assert len(journal) == 2  # the rows since 9 are needed, those up to 9 are not
    again = scripts[name].ReplayBuffer(2, 1, 7)
    again.load(journal)
    assert again.count == 17
    np.testing.assert_array_equal(again.newest(7), buf.newest(7))
    np.testing.assert_array_equal(again.data, buf.data)


def test_replay_takes_memory_as_it_fills():
    """The default buffer of HalfCheetah, 42 floats a row, costs next to nothing until used."""
    before = resident()
    buf = scripts["sac_torch"].ReplayBuffer(17, 6, 1_000_000)
    for _ in range(100):
        buf.store(np.zeros(17), np.zeros(6), 0.0, np.zeros(17), False)
    assert buf.data.nbytes == 1_000_000 * 42 * 4 and buf.data.dtype == np.float32
    assert resident() - before < 8e6


def resident():
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Steps(gym.Env):
    """The observation counts all steps since the start; episodes terminate after `n` steps."""

    def __init__(self, n=5):
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (1,), np.float32)
        self.action_space = gym.spaces.Box(np.float32([-1, 0]), np.float32([1, 5]))
        self.n, self.t, self.total = n, 0, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t, self.total = 0, self.total + 100
        return np.float32([self.total]), {}

    def step(self, action):
        assert self.action_space.contains(action), action
        self.t, self.total = self.t + 1, self.total + 1
        return np.float32([self.total]), 1.0, self.t == self.n, False, {}


gym.register("Steps-v0", Steps)


class Recorder:
    """Runs a script in this process and keeps what it drew from its buffer and what it saved."""

    def __init__(self, name, monkeypatch, tmp_path, **flags):
        self.batches, self.noise, self.states, self.buffers = [], [], [], []
        m, recorder = scripts[name], self

        class ReplayBuffer(m.ReplayBuffer):
            def __init__(self, *args):
                super().__init__(*args)
                recorder.buffers.append(self)

            def sample(self, shape, rng):
                drawn = super().sample(shape, rng)
                recorder.batches.append(drawn)
                return drawn

        class Generator(np.random.Generator):
            def standard_normal(self, size, **kwargs):
                drawn = super().standard_normal(size, **kwargs)
                if len(size) > 2:
                    recorder.noise.append(drawn)
                return drawn

        def save_state(logger, policy, state, *journal):
            recorder.states.append(copy.deepcopy(state))
            return keep(logger, policy, state, *journal)

        keep = EpochLogger.save_state
        default_rng = lambda seed: Generator(np.random.PCG64(seed))  # noqa: E731
        monkeypatch.setattr(np.random, "default_rng", default_rng)
        monkeypatch.setattr(m, "ReplayBuffer", ReplayBuffer)
        monkeypatch.setattr(EpochLogger, "save_state", save_state)
        defaults = {"hidden_sizes": SIZES, "data_dir": str(tmp_path), "num_test_episodes": 1}
        if name.endswith("torch"):
            defaults["compile"] = False
        assert m.train(m.Args(**(defaults | {"exp_name": name} | flags)))


@pytest.mark.parametrize("name", SCRIPTS)
def test_ends_of_episodes(name, monkeypatch, tmp_path):
    """d is 1 at terminal states alone; a limit and the epoch's end cut; o2 is never a reset's."""
    flags = {"env_id": "Steps-v0", "epochs": 2, "steps_per_epoch": 32, "max_ep_len": 7}
    flags |= {"batch_size": 4, "update_after": 10**6, "start_steps": 10}
    for n, ends in ((5, {4, 9, 14, 19, 24, 29, 36, 41, 46, 51, 56, 61}), (100, set()), (7, None)):
        flags |= {"env_kwargs": {"n": n}, "exp_name": f"{name}_{n}"}
        record = Recorder(name, monkeypatch, tmp_path, **flags)
        rows = record.buffers[0].newest(1000)
        assert len(rows) == 64
        np.testing.assert_array_equal(rows[:, -2], rows[:, 0] + 1)
        if ends is not None:
            assert set(np.flatnonzero(rows[:, -1])) == ends
        else:  # a true end at max_ep_len is an end
            assert rows[:, -1].sum() == 8
        assert (np.abs(rows[:, 1:3]) <= 1).all()
        table = progress(run_dir(tmp_path, flags["exp_name"]))
        assert (
            table[["LossPi", "LossQ"]].isna().all(axis=None)
        )  # no update yet, and the columns exist


# One whole update ---------------------------------------------------------------------------------


def flat(state):
    """Parameters of a saved `ac` or `ac_targ` as lists of (W [in, out], b) by net: pi, q1, q2."""
    nets = {}
    for key, value in state.items():
        parts = key.replace("/", ".").split(".")
        value = np.asarray(value, np.float64)
        if "net" in parts:  # torch: pi.net.0.weight, twin Qs [2, in, out]
            net, i, kind = parts[0], int(parts[2]), parts[3]
            if net == "q" and value.ndim == 3:
                for j in (0, 1):
                    v = value[j] if kind == "weight" else value[j, 0]
                    nets.setdefault(f"q{j + 1}", {})[i // 2, kind] = v
            else:
                value = value.T if kind == "weight" else value
                nets.setdefault("q1" if net == "q" else net, {})[i // 2, kind] = value
        elif parts[-1] != "log_alpha":  # tf1: ac/q/q1/weight_0
            kind, i = parts[-1].split("_")
            net = parts[-2] if parts[-2] != "q" else "q1"
            nets.setdefault(net, {})[int(i), kind] = value
    return {
        name: [(p[i, "weight"], p[i, "bias"]) for i in range(len(p) // 2)]
        for name, p in nets.items()
    }


def reference_update(algo, ac, ac_targ, data, noise, alpha=0.2, log_alpha=None, lr=1e-3):
    """One gradient step of fresh optimizers in float64 with nothing of ours: autograd, Adam's first
    step (which is lr g / (|g| + eps)), polyak 0.995. Returns LossQ, LossPi, log_alpha."""
    obs, act, rew, obs2, done = (torch.tensor(x, dtype=torch.float64) for x in data)
    noise = None if noise is None else torch.tensor(noise, dtype=torch.float64)

    def net(layers, x):
        for W, b in layers[:-1]:
            x = torch.relu(x @ W + b)
        return x @ layers[-1][0] + layers[-1][1]

    def q(nets, obs, a):
        return [net(nets[k], torch.cat([obs, a], 1))[:, 0] for k in sorted(nets) if k != "pi"]

    def pi(nets, obs, noise):
        if algo != "sac":
            return torch.tanh(net(nets["pi"], obs)), 0.0
        mu, log_std = net(nets["pi"], obs).chunk(2, 1)
        normal = torch.distributions.Normal(mu, log_std.clamp(-20, 2).exp())
        u = mu + log_std.clamp(-20, 2).exp() * noise
        return torch.tanh(u), (normal.log_prob(u) - torch.log(1 - torch.tanh(u) ** 2)).sum(1)

    def step(params, loss):
        for p, g in zip(params, torch.autograd.grad(loss, params), strict=True):
            with torch.no_grad():
                p -= lr * g / (g.abs() + 1e-8)

    price = alpha if log_alpha is None else np.exp(log_alpha)
    ac = {k: [tuple(torch.tensor(x) for x in layer) for layer in v] for k, v in ac.items()}
    targ = {k: [tuple(torch.tensor(x) for x in layer) for layer in v] for k, v in ac_targ.items()}
    if algo == "sac":
        a2, logp2 = pi(ac, obs2, noise[0])
    else:
        a2, logp2 = pi(targ, obs2, None)
    if algo == "td3":
        a2 = (a2 + (0.2 * noise).clamp(-0.5, 0.5)).clamp(-1, 1)
    q_next = torch.stack(q(targ, obs2, a2)).min(0).values
    backup = rew + 0.99 * (1 - done) * (q_next - price * logp2)
    q_params = [x for k, v in ac.items() if k != "pi" for layer in v for x in layer]
    pi_params = [x for layer in ac["pi"] for x in layer]
    for x in q_params + pi_params:
        x.requires_grad_()
    loss_q = sum(((x - backup) ** 2).mean() for x in q(ac, obs, act))
    step(q_params, loss_q)
    a, logp = pi(ac, obs, noise[1] if algo == "sac" else None)
    qs = torch.stack(q(ac, obs, a))
    loss_pi = (price * logp - qs.min(0).values).mean() if algo == "sac" else -qs[0].mean()
    if log_alpha is not None:
        grad = -(logp.detach() + (-act.shape[1])).mean().item()
        log_alpha = log_alpha - lr * np.sign(grad)
    step(pi_params, loss_pi)
    with torch.no_grad():
        for k, v in targ.items():
            for new, old in zip(ac[k], v, strict=True):
                for x, y in zip(new, old, strict=True):
                    y.copy_(0.995 * y + 0.005 * x)
    plain = [
        {k: [tuple(x.detach().numpy() for x in layer) for layer in v] for k, v in n.items()}
        for n in (ac, targ)
    ]
    return *plain, loss_q.item(), loss_pi.item(), log_alpha


@pytest.mark.parametrize("alpha", [0.2, "auto"])
@pytest.mark.parametrize("name", SCRIPTS)
def test_one_update(name, alpha, monkeypatch, tmp_path):
    """The first update of a run, torch and tf1 against float64: the losses within 1e-4 relative;
    parameters and targets within 1e-6, where a step is 1e-3 (a target moves 0.005 of that)."""
    algo = name.split("_")[0]
    if alpha == "auto" and algo != "sac":
        pytest.skip("has no temperature")
    flags = {"env_id": "Pendulum-v1", "epochs": 1, "steps_per_epoch": 64, "start_steps": 32}
    flags |= {"update_after": 64, "update_every": 1, "batch_size": 32}
    flags |= {"policy_delay": 1} if algo == "td3" else {"alpha": alpha} if algo == "sac" else {}
    record = Recorder(name, monkeypatch, tmp_path, **flags)
    assert len(record.batches) == 1
    data = [x[0] for x in record.batches[0]]
    noise = record.noise[0][0] if record.noise else None
    start = NumpyActorCritic(algo, 0, 3, 1)
    ac = {"pi": start.pi, **{f"q{i + 1}": q for i, q in enumerate(start.qs)}}
    ac = {
        k: [tuple(np.float64(np.float32(x)) for x in layer) for layer in v] for k, v in ac.items()
    }
    targ = {k: v for k, v in ac.items() if algo != "sac" or k != "pi"}
    log_alpha = 0.0 if alpha == "auto" else None
    ac, targ, loss_q, loss_pi, log_alpha = reference_update(
        algo, ac, targ, data, noise, log_alpha=log_alpha
    )
    state = record.states[-1]
    for expected, got in ((ac, flat(state["ac"])), (targ, flat(state["ac_targ"]))):
        assert sorted(expected) == sorted(got)
        for key, layers in expected.items():
            for (W, b), (W2, b2) in zip(layers, got[key], strict=True):
                np.testing.assert_allclose(W2, W, rtol=0, atol=1e-6)
                np.testing.assert_allclose(b2, b, rtol=0, atol=1e-6)
    row = progress(run_dir(tmp_path, name)).iloc[0]
    assert row.LossQ == pytest.approx(loss_q, rel=1e-4)
    assert row.LossPi == pytest.approx(loss_pi, rel=1e-4)
    if alpha == "auto":
        got = next(v for k, v in state["ac"].items() if k.endswith("log_alpha"))
        assert got == pytest.approx(log_alpha, rel=1e-4) and log_alpha != 0


@pytest.mark.parametrize("algo", ALGOS)
def test_one_seed_one_table(algo, tmp_path):
    """torch and tf1 give the same progress.txt over three epochs, 0, 100 and 100 updates in:
    everything drawn and counted is equal, what is computed agrees within 1 %."""
    tables = []
    flags = [*SMALL, "--epochs", 3, "--seed", 3, "--start-steps", 400, "--update-after", 300]
    for name in (f"{algo}_torch", f"{algo}_tf1"):
        run(name, *flags, "--data-dir", tmp_path, *EAGER[name])
        tables.append(progress(run_dir(tmp_path, f"{name}_Pendulum-v1", seed=3)))
    a, b = tables
    assert list(a) == list(b)
    for x, y in ((a[:1], b[:1]), (a, b)):
        exact = len(x) == 1
        pd.testing.assert_frame_equal(x, y, rtol=1e-5 if exact else 1e-2, atol=1e-6)
    assert a.LossQ.notna().tolist() == [False, True, True]


@pytest.mark.parametrize("name", ["td3_torch", "td3_tf1"])
def test_delay_counts_over_the_whole_run(name, monkeypatch, tmp_path):
    """With one update a block the policy still moves every third time, across a resume too."""
    flags = {"env_id": "Pendulum-v1", "steps_per_epoch": 25, "start_steps": 0, "batch_size": 4}
    flags |= {"update_after": 4, "update_every": 1, "policy_delay": 3, "num_test_episodes": 0}
    rows = []
    for epochs in (4, 1):
        record = Recorder(
            name, monkeypatch, tmp_path, epochs=epochs, exp_name=f"e{epochs}", **flags
        )
        rows.append([s["updates"] for s in record.states])
    assert rows == [[22, 47, 72, 97], [22]]
    steps = record.states[0]["pi_optimizer"]
    steps = steps["step"][0] if "step" in steps else steps["pi_optimizer/step"]
    assert steps == 22 // 3


@pytest.mark.parametrize("algo", ALGOS)
def test_compiled_is_eager(algo, tmp_path):
    """--compile changes the speed, not the numbers, beyond float32 rounding."""
    flags = [*SMALL, "--epochs", 2, "--update-after", 350, "--data-dir", tmp_path, "--exp-name"]
    run(f"{algo}_torch", *flags, "eager", "--no-compile")
    run(f"{algo}_torch", *flags, "compiled", "--compile", timeout=600)
    tables = [progress(run_dir(tmp_path, name)) for name in ("eager", "compiled")]
    pd.testing.assert_frame_equal(*tables, rtol=1e-3, atol=1e-5)


# Runs ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCRIPTS)
def test_learns_pendulum(name, tmp_path):
    """A mean test return above -250 within 15 000 steps; a policy that does nothing gets -1200."""
    flags = ["--env-id", "Pendulum-v1", "--hidden-sizes", 64, 64, "--steps-per-epoch", 1000]
    flags += ["--epochs", 10, "--start-steps", 1000, "--save-freq", 10, "--seed", 0]
    run(name, *flags, *EAGER[name], "--data-dir", tmp_path)
    table = progress(run_dir(tmp_path, f"{name}_Pendulum-v1"))
    assert table.AverageTestEpRet.max() > -250 and table.AverageTestEpRet[0] < -900
    assert table.TotalEnvInteracts.iloc[-1] <= 15_000


ASYMMETRIC = """
import gymnasium as gym, numpy as np
class Shifted(gym.ActionWrapper):
    def __init__(self, env):
        super().__init__(env)
        self.action_space = gym.spaces.Box(np.float32([1]), np.float32([41]))
    def action(self, a):
        assert self.action_space.contains(a), a
        return (a - 21) / 10
pendulum = lambda: Shifted(gym.make("Pendulum-v1").unwrapped)
gym.register("Shifted-v0", pendulum, max_episode_steps=200)
gym.register("Unbounded-v0", lambda: Free(gym.make("Pendulum-v1")))
class Free(gym.ActionWrapper):
    def __init__(self, env):
        super().__init__(env)
        self.action_space = gym.spaces.Box(-np.inf, np.inf, (1,))
"""


@pytest.mark.parametrize("algo", ALGOS)
def test_asymmetric_bounds(algo, tmp_path):
    """Pendulum with its torque in [1, 41] is the same task: the same table, up to rounding."""
    (tmp_path / "shifted.py").write_text(ASYMMETRIC)
    flags = [*SMALL, "--epochs", 2, "--update-after", 390, "--data-dir", tmp_path]
    env, name = {"PYTHONPATH": str(tmp_path)}, f"{algo}_torch"
    run(name, *flags, "--exp-name", "a", "--no-compile")
    run(name, *flags, "--exp-name", "b", "--no-compile", "--env-id", "shifted:Shifted-v0", env=env)
    a, b = (progress(run_dir(tmp_path, exp_name)) for exp_name in "ab")
    pd.testing.assert_frame_equal(a, b, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("name", SCRIPTS)
def test_bad_input(name, tmp_path, monkeypatch):
    """One clear line, exit code 2, nothing written; in this process for most of the scripts."""
    (tmp_path / "shifted.py").write_text(ASYMMETRIC)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    m, data_dir = scripts[name], tmp_path / "data"
    cases = [
        ({"env_id": "CartPole-v1"}, "has Discrete actions; supported: Box"),
        ({"env_id": "shifted:Unbounded-v0"}, "has actions without bounds"),
        ({"replay_size": 50}, "--batch-size 100 is above --replay-size 50"),
        ({"update_after": 99}, "--update-after 99 is below --batch-size 100"),
    ]
    for flags, message in cases:
        flags = {"env_id": "Pendulum-v1", "data_dir": str(data_dir)} | flags
        with pytest.raises(UsageError, match=message):
            m.train(m.Args(**flags))
    if name in ("sac_torch", "td3_tf1"):
        words = [["--update-after", 99], ["--env-id", "shifted:Unbounded-v0"]]
        words += [["--num-cpu", 3, "--steps-per-epoch", 300]]
        messages = [
            "--update-after 99 is below",
            "without bounds",
            "--batch-size 100 is not a mult",
        ]
        if name == "sac_torch":
            words += [["--alpha", "-1"], ["--alpha", "automatic"]]
            messages += ["--alpha must be at least 0", "--alpha"]
        for flags, message in zip(words, messages, strict=True):
            flags = ["--env-id", "Pendulum-v1", "--data-dir", data_dir, *flags]
            result = run(name, *flags, check=False)
            lines = [line for line in result.stderr.splitlines() if line.strip()]
            assert result.returncode == 2 and len(lines) == 1 and message in lines[0], result.stderr
    assert not data_dir.exists()


@pytest.mark.parametrize("name, ranks", [("sac_torch", 2), ("td3_tf1", 1)])
def test_killed_and_resumed_is_uninterrupted(name, ranks, tmp_path):
    """kill -9 twice, somewhere, then --resume: the table of a run that nobody killed. The buffer is
    smaller than the run, so it wraps around, and old parts of it are forgotten."""
    flags = [*SMALL, "--epochs", 12, "--replay-size", 1000, "--data-dir", tmp_path, *EAGER[name]]
    flags += ["--exp-name"]
    run(name, *flags, "whole", ranks=ranks)
    for rows in (3, 7):
        process = subprocess.Popen(
            command(name, *flags, "killed", "--resume", ranks=ranks),
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        path, deadline = run_dir(tmp_path, "killed") / "progress.txt", time.monotonic() + 120
        while not path.exists() or len(path.read_text().splitlines()) <= rows:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        kill_all(process.pid)
        process.wait()
    assert len(list((run_dir(tmp_path, "killed") / "checkpoint").glob("journal/*"))) <= 7 * ranks
    run(name, *flags, "killed", "--resume", ranks=ranks)
    tables = [progress(run_dir(tmp_path, exp_name)) for exp_name in ("whole", "killed")]
    pd.testing.assert_frame_equal(*tables, check_exact=True)


def test_a_finished_run_drops_its_buffer(tmp_path):
    """--resume then does nothing; with more epochs it says that there is nothing to go on from."""
    flags = [*SMALL, "--epochs", 1, "--data-dir", tmp_path, "--exp-name", "run", "--no-compile"]
    run("ddpg_torch", *flags)
    directory = run_dir(tmp_path, "run")
    assert not (directory / "checkpoint").exists()
    before = (directory / "progress.txt").read_bytes()
    assert "is finished" in run("ddpg_torch", *flags, "--resume").stdout
    result = run("ddpg_torch", *flags, "--resume", "--epochs", 2, check=False)
    assert result.returncode == 2 and "cannot extend" in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert (directory / "progress.txt").read_bytes() == before
    assert json.loads((directory / "status.json").read_text())["status"] == "finished"


def test_testing_does_not_disturb_training(tmp_path):
    """All columns but those of the tests are the same with 0 and with 3 test episodes."""
    flags = [*SMALL, "--epochs", 3, "--data-dir", tmp_path, "--exp-name"]
    run("td3_tf1", *flags, "none", "--num-test-episodes", 0)
    run("td3_tf1", *flags, "some", "--num-test-episodes", 3)
    a, b = (progress(run_dir(tmp_path, name)) for name in ("none", "some"))
    test = [c for c in a if "Test" in c]
    assert a[test].isna().all(axis=None) and b[test].notna().all(axis=None)
    pd.testing.assert_frame_equal(a.drop(columns=test), b.drop(columns=test), check_exact=True)


@pytest.mark.parametrize("name", ["sac_torch", "td3_torch", "sac_tf1", "ddpg_tf1"])
def test_ranks_agree(name, tmp_path):
    """Two ranks: as many gradient steps as environment steps of both, each on half of the batch;
    parameters, targets and optimizers stay identical, buffers differ."""
    source = f"""
import sys; sys.path.insert(0, {os.path.dirname(__file__)!r})
from conftest import load_script
from common.logger import EpochLogger
from common.mpi_tools import *
m = load_script({name!r})
keep = EpochLogger.save_state
def save_state(self, policy, state, journal, parts):
    states = allgather(state)
    rows = allgather(journal["rows"])
    def same(a, b):
        if isinstance(a, dict): return all(same(a[k], b[k]) for k in a)
        if isinstance(a, list): return all(same(x, y) for x, y in zip(a, b))
        return (a == b) if isinstance(a, int) else bool((a == b).all())
    assert same(states[0], states[1])
    assert rows[0].shape == rows[1].shape and (rows[0] != rows[1]).any()
    steps = state["q_optimizer"]
    steps = steps["step"][0] if "step" in steps else steps["q_optimizer/step"]
    expected = {{0: 0, 1: 200, 2: 400}}[self.epoch - 1]
    assert int(steps) == expected, (int(steps), expected)
    assert num_procs() == 2
    return keep(self, policy, state, journal, parts)
EpochLogger.save_state = save_state
extra = dict(compile=False) if {name!r}.endswith("torch") else {{}}
m.train(m.Args(env_id="Pendulum-v1", epochs=3, steps_per_epoch=200, update_after=300,
               start_steps=0, hidden_sizes=(8, 8), **extra))
"""
    mpi(tmp_path, source, 2, cwd=tmp_path)
    table = progress(run_dir(tmp_path / "data", f"{name}_Pendulum-v1"))
    assert table.TotalEnvInteracts.tolist() == [200, 400, 600]


def test_averaged_gradients_are_those_of_the_whole_batch(tmp_path):
    """MpiAdamOptimizer of two ranks with half a batch each, compiled, against torch.optim.Adam with
    all of it; ten steps, within 1e-6 of the parameters."""
    source = """
import numpy as np, torch
from common.mpi_pytorch import MpiAdamOptimizer, mpi_compile
from common.mpi_tools import *
x = torch.as_tensor(np.random.default_rng(0).standard_normal((10, 8, 4)), dtype=torch.float32)
def net():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1))
ours, theirs = net(), net()
ours_opt = MpiAdamOptimizer(ours.parameters(), 1e-2)
theirs_opt = torch.optim.Adam(theirs.parameters(), 1e-2)
def update(x):
    loss = ((ours(x) - x.sum(-1, keepdim=True)) ** 2).mean()
    ours_opt.minimize(loss)
    return loss.detach()
update = mpi_compile(update)
for batch in x:
    update(batch[proc_id() * 8 // num_procs() : (proc_id() + 1) * 8 // num_procs()])
    theirs_opt.zero_grad()
    ((theirs(batch) - batch.sum(-1, keepdim=True)) ** 2).mean().backward()
    theirs_opt.step()
for p, q in zip(ours.parameters(), theirs.parameters()):
    torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
"""
    for ranks in (1, 2):
        mpi(tmp_path, source, ranks)


@pytest.mark.parametrize("name", ["sac_torch", "td3_tf1"])
def test_what_a_run_leaves(name, tmp_path):
    """policy.npz acts as the saved model does."""
    run(name, *SMALL, "--epochs", 1, "--data-dir", tmp_path, *EAGER[name])
    directory = run_dir(tmp_path, f"{name}_Pendulum-v1")
    obs = np.random.default_rng(0).standard_normal((6, 3)).astype(np.float32)
    with np.load(directory / "policy.npz", allow_pickle=False) as f:
        policy = dict(f)
    assert (policy["act_low"], policy["act_high"], policy["epoch"]) == (-2, 2, 1)
    out = numpy_mlp([(policy[f"weight_{i}"], policy[f"bias_{i}"]) for i in range(3)], obs)
    if name == "sac_torch":
        assert str(policy["distribution"]) == "squashed_gaussian"
        state = torch.load(directory / "torch_save" / "model.pt", weights_only=True)
        ac = scripts[name].actor_critic(3, 1, (16, 16), "relu", np.random.default_rng(9))
        ac.load_state_dict(state)
        expected = ac.pi(torch.as_tensor(obs), torch.zeros(6, 1))[0].detach().numpy()
        np.testing.assert_allclose(np.tanh(out[:, :1]), expected, rtol=1e-5, atol=1e-6)
    else:
        assert str(policy["distribution"]) == "deterministic" and policy["act_noise"] == 0.1
        with tf.Graph().as_default(), tf.Session() as sess:
            model = tf.saved_model.load(sess, ["serve"], str(directory / "tf1_save"))
            signature = model.signature_def["serving_default"]
            feed = {signature.inputs["obs"].name: obs}
            expected = sess.run(signature.outputs["act"].name, feed)
        np.testing.assert_allclose(np.tanh(out), expected, rtol=1e-5, atol=1e-6)
