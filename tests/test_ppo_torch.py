"""PPO as a user runs it: it learns, it is exact, it is small, its ranks agree."""

import os

import gymnasium as gym
import numpy as np
import pandas as pd
import pytest
import torch
from conftest import command, load_script, mpi, progress, run, run_dir

ppo = load_script("ppo_torch")
SMALL = ["--steps-per-epoch", 400, "--train-pi-iters", 5, "--train-v-iters", 5, "--save-freq", 2]


def test_loss_pi_by_hand():
    """Inside the clip, above it with A > 0 (which clips) and A < 0, and below it with A > 0."""
    ratio = torch.tensor([1.1, 1.5, 1.5, 0.5])
    adv = torch.tensor([2.0, 2.0, -1.0, 3.0])
    logp_old = torch.tensor([-0.3, -1.0, 0.2, 0.0])
    loss, kl, clip_frac = ppo.compute_loss_pi(torch.log(ratio) + logp_old, logp_old, adv, 0.2)
    gains = [1.1 * 2, 1.2 * 2, 1.5 * -1, 0.5 * 3]
    assert loss.item() == pytest.approx(-np.mean(gains), rel=1e-6)
    assert kl.item() == pytest.approx(
        np.mean([r - 1 - np.log(r) for r in ratio.tolist()]), rel=1e-5
    )
    assert clip_frac.item() == 0.75


def test_clipped_samples_have_no_gradient():
    logp = torch.log(torch.tensor([1.1, 1.5, 0.5, 0.5])).requires_grad_()
    adv = torch.tensor([1.0, 1.0, -1.0, 1.0])
    ppo.compute_loss_pi(logp, torch.zeros(4), adv, 0.2)[0].backward()
    np.testing.assert_allclose(logp.grad, [-1.1 / 4, 0, 0, -0.5 / 4], rtol=1e-5)


@pytest.mark.parametrize("space", [gym.spaces.Box(-1, 1, (3,)), gym.spaces.Discrete(4)])
def test_distributions_against_torch(space):
    """Log-probability and entropy, against torch.distributions."""
    ac = ppo.actor_critic(5, space, (16, 8), "tanh", np.random.default_rng(0))
    obs = torch.randn(7, 5)
    out = ac.pi.net(obs)
    if isinstance(space, gym.spaces.Discrete):
        dist = torch.distributions.Categorical(logits=out)
        act = dist.sample()
        logp, entropy = dist.log_prob(act), dist.entropy()
    else:
        dist = torch.distributions.Normal(out, ac.pi.log_std.exp())
        act = dist.sample()
        logp, entropy = dist.log_prob(act).sum(-1), dist.entropy().sum(-1)
    ours = ac.pi(obs, act)
    torch.testing.assert_close(ours[0], logp)
    torch.testing.assert_close(ours[1].expand(7), entropy)


@pytest.mark.parametrize("activation", ["tanh", "relu"])
def test_numpy_actor_is_the_networks_actor(activation):
    """What NumPy samples has the mean, spread and frequencies of the network's distribution."""
    for space in (gym.spaces.Box(-1, 1, (2,)), gym.spaces.Discrete(3)):
        ac = ppo.actor_critic(4, space, (32, 16), activation, np.random.default_rng(1))
        layers = [m for m in ac.pi.net if isinstance(m, torch.nn.Linear)]
        policy = {
            "weights": [(m.weight.detach().numpy().T, m.bias.detach().numpy()) for m in layers],
            "activation": activation,
        }
        o, rng = np.array([1.0, -2.0, 0.5, 3.0]), np.random.default_rng(2)
        out = ac.pi.net(torch.tensor(o, dtype=torch.float32)).detach().numpy()
        if isinstance(space, gym.spaces.Discrete):
            actions = np.array([ppo.get_action(policy, o, rng) for _ in range(4000)])
            wanted = np.exp(out - np.log(np.exp(out).sum()))
            np.testing.assert_allclose(np.bincount(actions) / 4000, wanted, atol=0.03)
        else:
            exact = ppo.get_action(policy | {"log_std": np.full(2, -np.inf, np.float32)}, o, rng)
            np.testing.assert_allclose(exact, out, rtol=1e-5)
            policy["log_std"] = np.array([-0.5, -2], np.float32)
            actions = np.array([ppo.get_action(policy, o, rng) for _ in range(4000)])
            np.testing.assert_allclose(actions.std(0), np.exp([-0.5, -2]), rtol=0.05)
            np.testing.assert_allclose(actions.mean(0), out, atol=0.05)


def test_to_env():
    box = gym.spaces.Box(np.array([-1, -2], np.float32), np.array([1, 0.5], np.float32))
    assert ppo.to_env(np.array([3, 3], np.float32), box).tolist() == [1, 0.5]
    assert ppo.to_env(np.array([-3, -3], np.float32), box).tolist() == [-1, -2]
    assert ppo.to_env(np.zeros(4, np.float32), gym.spaces.Box(-1, 1, (2, 2))).shape == (2, 2)
    assert ppo.to_env(2, gym.spaces.Discrete(5, start=-1)) == 1


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_same_seed_gives_the_same_numbers(tmp_path, ranks):
    tables = []
    for name in ("a", "b"):
        flags = ["--env-id", "Hopper-v4", "--epochs", 3, "--data-dir", tmp_path, "--exp-name", name]
        run("ppo_torch", *SMALL, *flags, ranks=ranks)
        tables.append(progress(run_dir(tmp_path, name)))
    pd.testing.assert_frame_equal(*tables, check_exact=True)
    run("ppo_torch", *SMALL, *flags[:-1], "c", "--seed", 1, ranks=ranks)
    assert not progress(run_dir(tmp_path, "c", seed=1)).equals(tables[0])


def test_ranks_start_and_stay_identical(tmp_path):
    """The same first parameters for 1 and 2 ranks; afterwards the ranks hold the same numbers."""
    source = """
from conftest import load_script
from common.mpi_tools import *
import numpy as np, torch
ppo = load_script("ppo_torch")
start = ppo.actor_critic
def remember(*args):
    global ac
    ac = start(*args)
    np.save(f"start_{num_procs()}_{proc_id()}", flat())
    return ac
flat = lambda: torch.cat([p.detach().ravel() for p in ac.parameters()]).numpy()
ppo.actor_critic = remember
ppo.train(ppo.Args(env_id="Hopper-v4", epochs=2, steps_per_epoch=400, train_pi_iters=5,
                   train_v_iters=5, exp_name=f"ranks{num_procs()}"))
np.save(f"end_{num_procs()}_{proc_id()}", flat())
"""
    env = {"PYTHONPATH": os.path.dirname(__file__)}
    for ranks in (1, 2):
        mpi(tmp_path, source, ranks, cwd=tmp_path, env=env)
    start = [np.load(tmp_path / f"start_{name}.npy") for name in ("1_0", "2_0", "2_1")]
    end = [np.load(tmp_path / f"end_{name}.npy") for name in ("1_0", "2_0", "2_1")]
    assert (start[0] == start[1]).all() and (start[0] == start[2]).all()
    assert (end[1] == end[2]).all() and (end[0] != end[1]).any() and (start[1] != end[1]).any()


def test_model_loads(tmp_path):
    """torch_save/model.pt is a plain state_dict; policy.npz holds the same actor."""
    flags = ["--env-id", "Pendulum-v1", *SMALL, "--epochs", 1, "--data-dir", tmp_path]
    run("ppo_torch", *flags, "--norm-obs")
    directory = run_dir(tmp_path, "ppo_torch_Pendulum-v1")
    state = torch.load(directory / "torch_save" / "model.pt", weights_only=True)
    env = gym.make("Pendulum-v1")
    ac = ppo.actor_critic(3, env.action_space, (64, 64), "tanh", np.random.default_rng(5))
    ac.load_state_dict(state)
    with np.load(directory / "policy.npz", allow_pickle=False) as policy:
        assert str(policy["distribution"]) == "gaussian"
        assert (policy["act_low"], policy["act_high"]) == (-2, 2)
        np.testing.assert_array_equal(policy["log_std"], state["pi.log_std"])
        assert policy["obs_mean"].shape == policy["obs_std"].shape == (3,)
        np.testing.assert_array_equal(policy["weight_2"].T, state["pi.net.4.weight"])


def test_memory(tmp_path):
    """A rank at the default size stays under 700 MB."""
    flags = ["--env-id", "HalfCheetah-v4", "--epochs", 2, "--data-dir", tmp_path]
    # A small process in between: a child's peak begins at the size of the process that forked it.
    program = tmp_path / "peak.py"
    program.write_text(
        "import resource, subprocess, sys\n"
        "subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL)\n"
        "print('peak', resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)\n"
    )
    out = run(program, *command("ppo_torch", *flags)).stdout
    assert 100 < int(out.split("peak")[1]) / 1024 < 700
