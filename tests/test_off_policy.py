"""DDPG, TD3 and SAC in both frameworks: against float64, against each other, and on tasks."""

import itertools
import re
from dataclasses import replace
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pandas as pd
import pytest
import torch
from conftest import (
    OFF_POLICY,
    load_script,
    mostly_slow,
    mpi,
    needs_compiler,
    progress,
    run_dir,
    saved_model,
    slow,
)

from common import UsageError, logger, mpi_tools
from common.mpi_tools import make_rng

scripts = {name: load_script(name) for name in OFF_POLICY}
SIZES, LR, GAMMA, POLYAK = (16, 8), 1e-3, 0.99, 0.995


class Steps(gym.Env):
    """Observation [3]: a hundredth of the steps so far, and noise. Reward: the second action.

    Episodes terminate after `n` steps. A reset adds 100 to the steps; one with a seed clears them.
    """

    def __init__(self, n=5, high=5):
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (3,), np.float32)
        self.action_space = gym.spaces.Box(np.float32([-1, 0]), np.float32([1, high]))
        self.n, self.t, self.total = n, 0, 0

    def observation(self):
        return np.float32([self.total / 100, *self.np_random.standard_normal(2)])

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t, self.total = 0, 0 if seed is not None else self.total + 100
        return self.observation(), {}

    def step(self, action):
        assert self.action_space.contains(action), action
        self.t, self.total = self.t + 1, self.total + 1
        return self.observation(), float(action[1]), self.t == self.n, False, {}


gym.register("Steps-v0", Steps)


def record(name, tmp_path, stop_after=None, **flags):
    """Run a script in this process.

    Returns:
        namespace of `batches` and `noise`, as drawn for each block of gradient steps; `states`, the
        parameters and optimizers before each block and at the end; `args`, `buffer`, `table`,
        `directory`; whether it `finished`: it is asked to stop after `stop_after` epochs.
    """
    m, seen = scripts[name], SimpleNamespace(batches=[], noise=[], states=[])

    class ReplayBuffer(m.ReplayBuffer):
        def __init__(self, *args):
            super().__init__(*args)
            seen.buffer = self

        def sample(self, shape, rng):
            seen.states.append(seen.snapshot())
            seen.batches.append(super().sample(shape, rng))
            return seen.batches[-1]

    class Generator(np.random.Generator):
        def standard_normal(self, size, **kwargs):
            drawn = super().standard_normal(size, **kwargs)
            if len(size) > 2:
                seen.noise.append(drawn)
            return drawn

    def load(*args):  # torch: stateful, state; tf1: sess, stateful, state
        seen.snapshot = lambda: m.state_dicts(args[0]) if in_torch else args[0].run(args[1])
        return keep(*args)

    in_torch = name.endswith("torch")
    load_name = "load_state_dicts" if in_torch else "load_variables"
    keep = getattr(m, load_name)
    stops = iter([False] * (stop_after - 1) + [True] if stop_after else [])
    defaults = {"env_id": "Steps-v0", "hidden_sizes": SIZES, "data_dir": str(tmp_path)}
    defaults |= {"exp_name": name, "num_test_episodes": 1, "start_steps": 10**6, "batch_size": 32}
    defaults |= {"compile": False} if in_torch else {}
    seen.args = m.Args(**(defaults | flags))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(m, "ReplayBuffer", ReplayBuffer)
        patch.setattr(m, "make_rng", lambda *key: Generator(make_rng(*key).bit_generator))
        patch.setattr(m, load_name, load)
        patch.setattr(logger, "stop_requested", lambda: next(stops, False))
        seen.finished = m.train(seen.args)
    seen.states.append(seen.snapshot())
    seen.directory = run_dir(tmp_path, seen.args.exp_name, seen.args.seed)
    seen.table = progress(seen.directory)
    return seen


def canonical(state):
    """A snapshot as {name: list of float64 arrays}, weights [in, out], for both frameworks alike.

    Names: pi, q (of both Q functions), log_alpha; the same with `targ_`; pi_m, pi_v, pi_step and so
    on for the optimizers.
    """
    found = {}
    for part, tree in state.items():
        if part.endswith("optimizer"):
            names = ("exp_avg", "exp_avg_sq", "step") if "exp_avg" in tree else ("m", "v", "step")
            for short, name in zip(("m", "v", "step"), names, strict=True):
                xs = tree.get(name) or [x for key, x in tree.items() if key.endswith(f"/{name}")]
                found[part.replace("optimizer", short)] = xs[:1] if short == "step" else xs
        else:
            for key, x in tree.items():
                net = re.search(r"(?:^|/)(pi|q|log_alpha)", key)[1]
                found.setdefault(f"targ_{net}" if part == "ac_targ" else net, []).append(x)
    if "exp_avg" in state["q_optimizer"]:
        found = {key: from_torch(xs) for key, xs in found.items()}
    return {key: [np.float64(x) for x in xs] for key, xs in found.items()}


def from_torch(xs):
    """Layers of nn.Linear, W [out, in], or TwinLinear, W [2, in, out], as W [in, out] and b [out]
    of one network after the other."""
    if xs[0].ndim == 3:
        return [x[i] if x.shape[1] > 1 else x[i, 0] for i in (0, 1) for x in xs]
    return [x.T if x.ndim == 2 else x for x in xs]


# Updates ------------------------------------------------------------------------------------------


def mlp(layers, x):
    """[B, in] -> [B, out], arrays or tensors; layers as in `canonical`."""
    for W, b in zip(layers[:-2:2], layers[1:-2:2], strict=True):
        x = (x @ W + b).clip(min=0)
    return x @ layers[-2] + layers[-1]


def q(layers, x):
    """Q of each network in `layers`, [B] each; x [B, obs_dim + act_dim]."""
    n = 2 * (len(SIZES) + 1)
    return [mlp(layers[i : i + n], x)[:, 0] for i in range(0, len(layers), n)]


def reference_update(algo, state, batch, noise, alpha, policy_delay=2):
    """One gradient step in float64 from a canonical state: autograd, and Adam as in its paper.

    Returns:
        the next state; LossQ; LossPi, or None where the policy waits; {name: list of arrays}, how
        far rounding of gradients may move each parameter.
    """
    s = {k: [torch.tensor(x, dtype=torch.float64) for x in v] for k, v in state.items()}
    obs, act, rew, obs2, done = (torch.tensor(x, dtype=torch.float64) for x in batch)
    noise = None if noise is None else torch.tensor(noise, dtype=torch.float64)
    auto, slack = alpha == "auto", {}
    price = s["log_alpha"][0].exp().item() if auto else alpha

    def pi(layers, obs, noise):
        if algo != "sac":
            return torch.tanh(mlp(layers, obs)), 0.0
        mu, log_std = mlp(layers, obs).chunk(2, 1)
        normal = torch.distributions.Normal(mu, log_std.clamp(-20, 2).exp())
        u = mu + normal.stddev * noise
        return torch.tanh(u), (normal.log_prob(u) - torch.log(1 - torch.tanh(u) ** 2)).sum(1)

    def adam(name, optimizer, loss):
        grads = torch.autograd.grad(loss, s[name])
        s[f"{optimizer}_step"][0] += 1
        t, slack[name] = s[f"{optimizer}_step"][0], []
        moments = s[f"{optimizer}_m"], s[f"{optimizer}_v"]
        with torch.no_grad():
            for p, g, m, v in zip(s[name], grads, *moments, strict=True):
                m.copy_(0.9 * m + 0.1 * g)
                v.copy_(0.999 * v + 0.001 * g**2)
                size = torch.sqrt(v / (1 - 0.999**t)) + 1e-8
                p -= LR * (m / (1 - 0.9**t)) / size
                slack[name].append((1e-6 + LR * 1e-5 * g.abs().max() / size).numpy())

    with torch.no_grad():
        noise2 = noise[0] if algo == "sac" else None
        act2, logp2 = pi(s["pi" if algo == "sac" else "targ_pi"], obs2, noise2)
        if algo == "td3":
            act2 = (act2 + (0.2 * noise).clamp(-0.5, 0.5)).clamp(-1, 1)
        q2 = torch.stack(q(s["targ_q"], torch.cat([obs2, act2], 1))).min(0).values
        backup = torch.where(done > 0, rew, rew + GAMMA * (q2 - price * logp2))
    for p in (*s["q"], *s["pi"], *s.get("log_alpha", [])):
        p.requires_grad_()
    loss_q = sum(((x - backup) ** 2).mean() for x in q(s["q"], torch.cat([obs, act], 1)))
    adam("q", "q", loss_q)
    loss_pi = None
    if algo != "td3" or s["q_step"][0] % policy_delay == 0:
        a, logp = pi(s["pi"], obs, noise[1] if algo == "sac" else None)
        qs = torch.stack(q(s["q"], torch.cat([obs, a], 1)))
        loss_pi = (price * logp - qs.min(0).values if algo == "sac" else -qs[0]).mean()
        adam("pi", "pi", loss_pi)
        if auto:  # the target entropy is -dim(A)
            adam("log_alpha", "alpha", s["log_alpha"][0] * (act.shape[1] - logp.detach()).mean())
        for name in ("pi", "q") if algo != "sac" else ("q",):
            for p, p_targ in zip(s[name], s[f"targ_{name}"], strict=True):
                p_targ.copy_(POLYAK * p_targ + (1 - POLYAK) * p.detach())
    after = {k: [x.detach().numpy() for x in v] for k, v in s.items()}
    return after, loss_q.item(), None if loss_pi is None else loss_pi.item(), slack


UPDATES = [(name, 0.2, False) for name in OFF_POLICY]
UPDATES += [("sac_torch", "auto", False), ("sac_tf1", "auto", False)]
UPDATES += [slow("ddpg_torch", 0.2, True), slow("td3_torch", 0.2, True)]
UPDATES += [slow("sac_torch", "auto", True)]


@pytest.mark.parametrize("name, alpha, compiled", UPDATES)
def test_updates(name, alpha, compiled, tmp_path):
    """Each of 20 updates takes the script from the state it is in to where float64 goes from the
    same state, with the same batch: moments within 1e-5 of the largest, parameters within what that
    moves them. Nothing adds up over updates, so any CPU will do."""
    if compiled:
        needs_compiler()
    algo = name.split("_")[0]
    flags = {"epochs": 1, "steps_per_epoch": 59, "update_after": 40, "update_every": 1}
    flags |= {"alpha": alpha} if algo == "sac" else {}
    seen = record(name, tmp_path, **flags, **({"compile": True} if compiled else {}))
    assert len(seen.batches) == 20 and 0 < np.mean(seen.batches[0][4]) < 0.5  # some are terminal
    states, losses = [canonical(state) for state in seen.states], {"LossQ": [], "LossPi": []}
    for i, (before, after) in enumerate(itertools.pairwise(states)):
        noise = seen.noise[i][0] if seen.noise else None
        batch = [x[0] for x in seen.batches[i]]
        expected, loss_q, loss_pi, slack = reference_update(algo, before, batch, noise, alpha)
        assert sorted(expected) == sorted(after)
        for key, wanted in expected.items():
            for j, (x, y) in enumerate(zip(wanted, after[key], strict=True)):
                allowed = slack[key][j] if key in slack else 1e-6 + 1e-5 * np.abs(x).max()
                assert x.shape == y.shape and (np.abs(x - y) <= allowed).all(), (i, key, j)
        losses["LossQ"].append(loss_q)
        losses["LossPi"] += [loss_pi] if loss_pi is not None else []
    for key, values in losses.items():
        assert seen.table[key][0] == pytest.approx(np.mean(values), rel=1e-4)
    assert len(losses["LossPi"]) == (10 if algo == "td3" else 20)
    moved = [np.abs(x - y).max() for x, y in zip(states[0]["pi"], states[-1]["pi"], strict=True)]
    assert min(moved) > 1e-3


def assert_same(a, b):
    """Two canonical states are equal to the bit."""
    assert a.keys() == b.keys()
    for key in a:
        for x, y in zip(a[key], b[key], strict=True):
            np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("algo", ["ddpg", "td3", "sac"])
def test_both_frameworks_draw_the_same(algo, tmp_path):
    """One seed gives both the same weights, steps, batches and noise, to the bit, and the same
    columns. What they compute from these is the test before this one."""
    flags = {"epochs": 2, "steps_per_epoch": 50, "update_after": 40, "update_every": 10, "seed": 3}
    flags |= {"alpha": "auto"} if algo == "sac" else {}
    a, b = (record(f"{algo}_{framework}", tmp_path, **flags) for framework in ("torch", "tf1"))
    assert len(a.batches) == len(b.batches) == 7 and len(a.noise) == len(b.noise)
    assert_same(*(canonical(seen.states[0]) for seen in (a, b)))
    for x, y in zip((*a.batches, *a.noise), (*b.batches, *b.noise), strict=True):
        for u, v in zip(x, y, strict=True):
            np.testing.assert_array_equal(u, v)
    np.testing.assert_array_equal(a.buffer.data, b.buffer.data)
    assert list(a.table) == list(b.table)
    assert a.table.TotalEnvInteracts.tolist() == b.table.TotalEnvInteracts.tolist() == [50, 100]


def test_log_prob_where_tanh_saturates():
    """SAC's log pi(a|s) holds where 1 - tanh(u)^2 is 0 in float32; its log is log 4 - 2 |u|."""
    rng = np.random.default_rng(0)
    pi = scripts["sac_torch"].actor_critic(5, 3, SIZES, "relu", rng).pi
    obs, noise = (torch.tensor(rng.standard_normal((200, n))).float() for n in (5, 3))
    mu, log_std = pi.net(1000 * obs).chunk(2, -1)
    log_std = log_std.clamp(-20, 2)
    u = mu + log_std.exp() * noise
    log_normal = -0.5 * noise**2 - log_std - 0.5 * np.log(2 * np.pi)
    a, logp = pi(1000 * obs, noise)
    saturated = (u.abs() > 10).all(-1)
    assert saturated.sum() > 50 and (1 - a[saturated] ** 2 == 0).all()
    expected = (log_normal - np.log(4) + 2 * u.abs()).sum(-1)
    torch.testing.assert_close(logp[saturated], expected[saturated], rtol=1e-4, atol=1e-3)


# Actions and buffer -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OFF_POLICY)
def test_actions_are_rescaled_per_dimension(name):
    low, high = np.array([-1, 0, -30], np.float32), np.array([1, 5, 10], np.float32)
    space, to_env = gym.spaces.Box(low, high), scripts[name].to_env
    for a, expected in ((-1, low), (1, high), (0, (low + high) / 2), (0.5, [0.5, 3.75, 0])):
        np.testing.assert_allclose(to_env(np.full(3, a, np.float32), space), expected)
    for a in np.random.default_rng(0).uniform(-1, 1, (1000, 3)).astype(np.float32):
        assert space.contains(to_env(a, space))


@pytest.mark.parametrize("name", OFF_POLICY)
def test_replay_buffer(name):
    """It holds the newest transitions, and samples all of them, whole."""
    buf, rng = scripts[name].ReplayBuffer(2, 1, 7), np.random.default_rng(0)
    for i in range(17):
        buf.store(np.array([i, i]), np.array([-i]), 2.0 * i, np.array([i + 1, i + 1]), i % 3 == 0)
        obs, act, rew, obs2, done = buf.sample((4, 50), rng)
        np.testing.assert_array_equal(np.unique(obs[..., 0]), np.arange(max(0, i - 6), i + 1))
        assert obs.shape == (4, 50, 2) and act.shape == (4, 50, 1) and done.shape == (4, 50)
        np.testing.assert_array_equal(act[..., 0], -obs[..., 0])
        np.testing.assert_array_equal(rew, 2 * obs[..., 1])
        np.testing.assert_array_equal(obs2, obs + 1)
        np.testing.assert_array_equal(done, obs[..., 0] % 3 == 0)


@pytest.mark.parametrize("name", OFF_POLICY)
def test_what_is_stored(name, tmp_path):
    """d is 1 at terminal states alone; a limit and the epoch's end cut; o2 is never a reset's;
    actions are within [-1, 1], where the environment gets its own bounds."""
    flags = {"epochs": 2, "steps_per_epoch": 32, "max_ep_len": 7, "update_after": 10**6}
    for n, ends in ((5, {4, 9, 14, 19, 24, 29, 36, 41, 46, 51, 56, 61}), (100, set()), (7, None)):
        flags |= {"env_kwargs": {"n": n}, "exp_name": f"{name}_{n}", "start_steps": 10}
        seen = record(name, tmp_path, **flags)
        obs, act, rew, obs2, done = np.split(seen.buffer.data[:64], seen.buffer.columns, axis=1)
        assert seen.buffer.count == 64
        np.testing.assert_allclose(100 * obs2[:, 0], 100 * obs[:, 0] + 1, rtol=1e-4)
        assert (np.abs(act) <= 1).all() and act.min() < -0.5 and act.max() > 0.5
        np.testing.assert_allclose(rew[:, 0], 2.5 * (act[:, 1] + 1), rtol=1e-5, atol=1e-5)
        if ends is not None:
            assert set(np.flatnonzero(done)) == ends
        else:  # a true end at max_ep_len is an end
            assert done.sum() == 8
        # Before the first update there is no loss, and its columns exist.
        assert seen.table[["LossPi", "LossQ"]].isna().all(axis=None)


# Runs ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", mostly_slow(OFF_POLICY, "sac_torch"))
def test_learns_pendulum(name, tmp_path):
    """A mean test return above -600 where a policy that does nothing gets -1200; SAC needs 4000
    steps for it and comes to -150, TD3 needs 6000."""
    epochs = 8 if name.startswith("sac") else 15
    flags = {"env_id": "Pendulum-v1", "hidden_sizes": (64, 64), "epochs": epochs}
    flags |= {"steps_per_epoch": 1000, "start_steps": 1000, "num_test_episodes": 10}
    seen = record(name, tmp_path, **flags, batch_size=100, save_freq=epochs)
    assert seen.table.AverageTestEpRet.max() > -600 and seen.table.AverageTestEpRet[0] < -800


@pytest.mark.parametrize(
    "name", mostly_slow(OFF_POLICY, "ddpg_torch", "td3_torch", "sac_torch", "td3_tf1")
)
def test_resumed_is_uninterrupted(name, tmp_path):
    """A run that is stopped and resumed draws and computes what one that was not does, to the bit.
    The buffer wraps around. TD3's policy moves every third time throughout."""
    flags = {"epochs": 3, "steps_per_epoch": 50, "start_steps": 60, "update_after": 40}
    flags |= {"update_every": 10, "replay_size": 120}
    flags |= {"policy_delay": 3} if name.startswith("td3") else {}
    whole = record(name, tmp_path, exp_name="whole", **flags)
    first = record(name, tmp_path, stop_after=1, **flags)
    again = record(name, tmp_path, resume=True, **flags)
    assert (whole.finished, first.finished, again.finished) == (True, False, True)
    pd.testing.assert_frame_equal(whole.table, again.table, check_exact=True)
    np.testing.assert_array_equal(whole.buffer.data, again.buffer.data)
    states = [canonical(state) for state in (*first.states[:-1], *again.states)]
    for expected, state in zip(map(canonical, whole.states), states, strict=True):
        assert_same(expected, state)
        if name.startswith("td3"):
            assert state["pi_step"][0] == state["q_step"][0] // 3
    assert states[-1]["q_step"][0] == 120


@pytest.mark.parametrize("name", ["sac_torch", "td3_tf1"])
def test_testing_does_not_disturb_training(name, tmp_path):
    """All columns but those of the tests are the same with 0 and with 3 test episodes."""
    flags = {"epochs": 3, "steps_per_epoch": 50, "start_steps": 60, "update_after": 50}
    runs = [record(name, tmp_path, exp_name=f"{n}", num_test_episodes=n, **flags) for n in (0, 3)]
    a, b = (seen.table for seen in runs)
    test = [c for c in a if "Test" in c]
    assert a[test].isna().all(axis=None) and b[test].notna().all(axis=None)
    pd.testing.assert_frame_equal(a.drop(columns=test), b.drop(columns=test), check_exact=True)


@pytest.mark.parametrize("name", OFF_POLICY)
def test_bad_input(name, tmp_path, monkeypatch):
    """One clear line, and nothing written."""
    cases = [({"env_id": "CartPole-v1"}, "has Discrete actions; supported: Box")]
    cases += [({"env_kwargs": {"high": np.inf}}, "has actions without bounds")]
    cases += [({"batch_size": 100}, "--batch-size 100 is not a multiple of the 3 ranks")]
    if name.startswith("sac"):
        cases += [({"alpha": -1.0}, "--alpha"), ({"alpha": "automatic"}, "--alpha")]
    monkeypatch.setattr(mpi_tools, "num_procs", lambda: 3)
    for flags, message in cases:
        with pytest.raises(UsageError, match=message):
            record(name, tmp_path / "data", **({"steps_per_epoch": 300} | flags))
    assert not (tmp_path / "data").exists()


# Several ranks ------------------------------------------------------------------------------------


RANKS = """
import json
from conftest import load_script
from common.logger import EpochLogger
from common.mpi_tools import allgather, num_procs
from common.serialization import convert_json
m = load_script(NAME)
keep = EpochLogger.save_state
def save_state(self, policy, state, buf):
    a, b = allgather(json.dumps(convert_json(state)))
    rows = allgather(buf.data[:buf.count])
    assert num_procs() == 2 and a == b
    assert rows[0].shape == rows[1].shape and (rows[0] != rows[1]).any()
    steps = state["q_optimizer"]
    steps = steps["step"][0] if "step" in steps else steps["q_optimizer/step"]
    assert int(steps) == {1: 0, 2: 200, 3: 400}[self.epoch], (int(steps), self.epoch)
    return keep(self, policy, state, buf)
EpochLogger.save_state = save_state
extra = dict(compile=False) if NAME.endswith("torch") else {}
m.train(m.Args(env_id="Pendulum-v1", epochs=3, steps_per_epoch=200, update_after=300,
               start_steps=0, hidden_sizes=(8, 8), **extra))
"""


@pytest.mark.parametrize("name", mostly_slow(OFF_POLICY, "sac_torch"))
def test_ranks_agree(name, tmp_path):
    """Two ranks: as many gradient steps as environment steps of both, each on half of the batch;
    parameters, targets and optimizers stay identical, buffers differ."""
    mpi(tmp_path, f"NAME = {name!r}\n{RANKS}", 2, cwd=tmp_path)
    table = progress(run_dir(tmp_path / "data", f"{name}_Pendulum-v1"))
    assert table.TotalEnvInteracts.tolist() == [200, 400, 600]


# What a run leaves --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OFF_POLICY)
def test_saved_models(name, tmp_path):
    """policy.npz, the script's own actor and the saved networks agree, and the SavedModel's Q
    functions are those of the run; NumPy computes all of it once more. The replay buffer is gone,
    and nothing is left to resume."""
    algo, m = name.split("_")[0], scripts[name]
    seen = record(name, tmp_path, epochs=1, steps_per_epoch=50, update_after=40, update_every=10)
    state, rng = canonical(seen.states[-1]), np.random.default_rng(0)
    obs, act = (rng.standard_normal((6, n)).astype(np.float32) for n in (3, 2))

    mu, log_std = mlp(state["pi"], obs)[:, :2], mlp(state["pi"], obs)[:, 2:]
    noise = np.random.default_rng(1).standard_normal(2, dtype=np.float32)
    noisy = (np.tanh(mu) + 0.1 * noise).clip(-1, 1)
    if algo == "sac":
        noisy = np.tanh(mu + np.exp(log_std) * noise)
    qs = q(state["q"], np.hstack([obs, act]))
    names = {"ddpg": ["pi", "q"], "td3": ["pi", "q1", "q2"], "sac": ["mu", "q1", "q2"]}[algo]
    expected = dict(zip(names, (np.tanh(mu), *qs), strict=True))

    with np.load(seen.directory / "policy.npz", allow_pickle=False) as f:
        saved = dict(f)
    assert saved["epoch"] == 1 and saved["act_low"].tolist() == [-1, 0]
    kind = "squashed_gaussian" if algo == "sac" else "deterministic"
    assert saved["distribution"] == kind and saved["act_high"].tolist() == [1, 5]
    policy = saved | {"weights": [(saved[f"weight_{i}"], saved[f"bias_{i}"]) for i in range(3)]}
    close = {"rtol": 1e-5, "atol": 1e-5}
    for o, a, b in zip(obs, np.tanh(mu), noisy, strict=True):
        np.testing.assert_allclose(m.get_action(policy, o), a, **close)
        np.testing.assert_allclose(m.get_action(policy, o, np.random.default_rng(1)), b, **close)
        assert m.get_action(policy, o).dtype == np.float32

    if name.endswith("torch"):
        ac = m.actor_critic(3, 2, SIZES, "relu", np.random.default_rng(9))
        path = seen.directory / "torch_save" / "model.pt"
        ac.load_state_dict(torch.load(path, weights_only=True))
        x, a = torch.as_tensor(obs), torch.as_tensor(act)
        with torch.no_grad():
            pi = ac.pi(x, torch.zeros(6, 2))[0] if algo == "sac" else ac.pi(x)
            qs = [ac.q(x, a)] if algo == "ddpg" else ac.q(x, a)
        got = dict(zip(expected, (pi, *qs), strict=True))
    else:
        got, again = (saved_model(seen.directory, obs=obs, act=act) for _ in range(2))
        if algo == "sac":
            sample = got.pop("pi")
            assert (sample != again["pi"]).all() and (np.abs(sample) < 1).all()
    assert got.keys() == expected.keys()
    for key in expected:
        np.testing.assert_allclose(got[key], expected[key], **close)
    assert not (seen.directory / "checkpoint").exists() and m.train(replace(seen.args, resume=True))
    assert progress(seen.directory).equals(seen.table)
