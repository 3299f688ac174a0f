"""Soft Actor-Critic, SAC (Haarnoja et al. 2018, arXiv:1801.01290 and arXiv:1812.05905).

    python algos/sac_torch.py --env-id HalfCheetah-v4
    mpirun -np 4 python algos/sac_torch.py --env-id Hopper-v4

Like TD3, but the policy is stochastic, and its objective includes its entropy, weighted by alpha.
The policy follows the smaller of the two Qs, not Q_1. There is no target policy and no delay: the
next action a' is drawn from the current policy. As in the second paper, there is no value network.

    y        = r + gamma (1 - d) (min_i Q_targ,i(s', a') - alpha log pi(a'|s'))
    L(Q_i)   = E[ (Q_i(s, a) - y)^2 ]
    L(pi)    = E[ alpha log pi(a|s) - min_i Q_i(s, a) ],  a = tanh(mu(s) + sigma(s) noise)
    L(alpha) = -E[ log alpha (log pi(a|s) - act_dim) ]          with --alpha auto
    theta_targ <- polyak theta_targ + (1 - polyak) theta        after each step

Diff me against td3_torch.py: a stochastic policy, and its entropy in both losses.
Diff me against sac_tf1.py: the same algorithm as a TensorFlow 1 graph.
"""

import copy
import os
import sys
from dataclasses import field
from itertools import pairwise
from pathlib import Path
from typing import Literal

os.environ.setdefault("GOMP_SPINCOUNT", "3000")  # threads wait 0.1 ms, not 10, before they sleep
sys.path.insert(1, str(Path(__file__).resolve().parents[1]))  # find common/ from any directory

import numpy as np
import torch
from gymnasium.spaces import Box
from pydantic.dataclasses import dataclass
from torch import nn

from common import mpi, mpi_pytorch, run
from common.args import JsonDict, NonNegFloat, NonNegInt, PosFloat, PosInt, Sizes, Unit

# Arguments ----------------------------------------------------------------------------------------


@dataclass
class Args:
    # Experiment
    exp_name: str | None = None  # name of the experiment; <script>_<env-id> if not given
    seed: NonNegInt = 0  # random seed; every rank and every epoch draws numbers of its own
    data_dir: str = "data"  # directory that holds the run directories
    datestamp: bool = False  # put date and time into the run directory's name
    save_freq: PosInt = 10  # epochs between checkpoints
    snapshots: bool = False  # keep the policy of every save
    num_cpu: PosInt | Literal["auto"] = 1  # ranks to relaunch with under mpirun; auto: all cores
    resume: bool | str = False  # continue the run of this name and seed; or DIR, with its arguments
    overwrite: bool = False  # replace the run that the directory holds
    device: str = "cpu"  # where the networks are trained: cpu, cuda, cuda:1, ...
    compile: bool = True  # compile the update: a wait at the start, then about twice as fast
    # Environment
    env_id: str = "HalfCheetah-v4"  # a Gymnasium id; my_package:MyEnv-v0 imports my_package first
    env_kwargs: JsonDict = field(default_factory=dict)  # arguments of the environment, as JSON
    max_ep_len: PosInt = 1000  # steps after which an episode is truncated
    # Training
    epochs: PosInt = 100  # number of epochs
    steps_per_epoch: PosInt = 4000  # environment steps per epoch, all ranks together
    gamma: Unit = 0.99  # discount factor
    hidden_sizes: Sizes = (256, 256)  # sizes of the hidden layers
    activation: Literal["tanh", "relu"] = "relu"  # what follows each hidden layer
    replay_size: PosInt = 1_000_000  # transitions in the replay buffers of all ranks together
    batch_size: PosInt = 100  # transitions per gradient step, all ranks together
    start_steps: NonNegInt = 10_000  # first steps, all ranks together: actions uniformly random
    update_after: NonNegInt = 1000  # steps before the first update, all ranks together
    update_every: PosInt = 50  # steps of each rank between two blocks of gradient steps
    num_test_episodes: NonNegInt = 10  # episodes without noise after each epoch, all ranks together
    polyak: Unit = 0.995  # weight of the old target networks in each update of them
    # SAC
    lr: PosFloat = 1e-3  # learning rate of the policy, the Q functions and alpha
    alpha: NonNegFloat | Literal["auto"] = 0.2  # weight of the entropy; auto: entropy near -act_dim


# Networks -----------------------------------------------------------------------------------------


def mlp(sizes, activation, rng):
    """A multilayer perceptron: [B, sizes[0]] -> [B, sizes[-1]], no activation after the last layer.

    Weights and biases are uniform in +-1 / sqrt(fan-in), as in PyTorch, drawn with NumPy:
    the script in the other framework starts from the same numbers.
    """
    layers = []
    for fan_in, fan_out in pairwise(sizes):
        layer, bound = nn.Linear(fan_in, fan_out), fan_in**-0.5
        weight = rng.uniform(-bound, bound, (fan_in, fan_out))
        bias = rng.uniform(-bound, bound, fan_out)
        layer.load_state_dict({"weight": torch.tensor(weight.T), "bias": torch.tensor(bias)})
        layers += [layer, {"tanh": nn.Tanh, "relu": nn.ReLU}[activation]()]
    return nn.Sequential(*layers[:-1])


class SquashedGaussianActor(nn.Module):
    """pi(a|s): a = tanh(u), u ~ Normal(mu(s), sigma(s)), so actions lie in [-1, 1]."""

    def __init__(self, obs_dim, act_dim, hidden_sizes, activation, rng):
        super().__init__()
        self.net = mlp([obs_dim, *hidden_sizes, 2 * act_dim], activation, rng)

    def forward(self, obs, noise):
        """obs [B, obs_dim], standard normal noise [B, act_dim] -> a [B, act_dim], log pi(a|s) [B].

        log pi(a|s) = log Normal(u) - sum log(1 - tanh(u)^2), in a form accurate for large |u|.
        The network gives mu and log_std; log_std is clamped to [-20, 2].
        """
        mu, log_std = self.net(obs).chunk(2, -1)
        log_std = log_std.clamp(-20, 2)
        u = mu + torch.exp(log_std) * noise
        logp = (-0.5 * noise**2 - log_std - 0.5 * np.log(2 * np.pi)).sum(-1)
        logp -= (2 * (np.log(2) - u - nn.functional.softplus(-2 * u))).sum(-1)
        return torch.tanh(u), logp


class TwinLinear(nn.Module):
    """Two linear layers as one batched product: [B, in] or [2, B, in] -> [2, B, out].

    Its weight is [2, in, out], its bias [2, 1, out]. An update with two separate networks would
    take 10 to 20 % longer.
    """

    def __init__(self, layer1, layer2):
        super().__init__()
        self.weight = nn.Parameter(torch.stack([layer1.weight.T, layer2.weight.T]).detach())
        self.bias = nn.Parameter(torch.stack([layer1.bias, layer2.bias])[:, None].detach())

    def forward(self, x):
        return x @ self.weight + self.bias


class TwinQFunction(nn.Module):
    """Q_1(s, a) and Q_2(s, a), which share no parameters if only linear layers have any."""

    def __init__(self, obs_dim, act_dim, hidden_sizes, activation, rng):
        super().__init__()
        q1, q2 = (mlp([obs_dim + act_dim, *hidden_sizes, 1], activation, rng) for _ in range(2))
        pairs = zip(q1, q2, strict=True)
        twins = [TwinLinear(x, y) if isinstance(x, nn.Linear) else x for x, y in pairs]
        self.net = nn.Sequential(*twins)

    def forward(self, obs, act):
        """obs [B, obs_dim], act [B, act_dim] -> [2, B]."""
        return self.net(torch.cat([obs, act], -1)).squeeze(-1)


def actor_critic(obs_dim, act_dim, hidden_sizes, activation, rng):
    """The policy `pi` and the Q functions `q`."""
    pi = SquashedGaussianActor(obs_dim, act_dim, hidden_sizes, activation, rng)
    q = TwinQFunction(obs_dim, act_dim, hidden_sizes, activation, rng)
    return nn.ModuleDict({"pi": pi, "q": q})


def get_action(policy, o, rng=None):
    """Choose one action in NumPy: for a single observation, calling a framework is all overhead.

    Args:
        policy: dict from `export_policy`: arrays `weights` [(W [in, out], b [out]), ...] and
            `activation`.
        o: [obs_dim], the observation.
        rng: numpy.random.Generator of the noise; None for the action without noise.

    Returns:
        [act_dim] float32 within [-1, 1].
    """
    x = np.asarray(o, dtype=np.float32)
    *hidden, (W_out, b_out) = policy["weights"]
    for W, b in hidden:
        x = np.tanh(x @ W + b) if policy["activation"] == "tanh" else np.maximum(x @ W + b, 0)
    mu, log_std = np.split(x @ W_out + b_out, 2)
    if rng is None:
        return np.tanh(mu)
    noise = rng.standard_normal(mu.shape, dtype=np.float32)
    return np.tanh(mu + np.exp(log_std.clip(-20, 2)) * noise)


def to_env(a, space):
    """The action as the environment takes it: from [-1, 1] to the bounds of each dimension."""
    a = space.low + (a.reshape(space.shape) + 1) / 2 * (space.high - space.low)
    return a.astype(space.dtype, copy=False).clip(space.low, space.high)


# Buffer -------------------------------------------------------------------------------------------


class ReplayBuffer:
    """The newest `size` transitions of this rank, in the rows of one array: o, a, r, o2, d.

    o2 is the observation that followed, never that of a reset. d is 1 only if o2 is terminal, and
    0 where a time limit or the end of an epoch cut the episode: the backup then counts Q of o2.
    """

    def __init__(self, obs_dim, act_dim, size):
        widths = [obs_dim, act_dim, 1, obs_dim, 1]
        self.columns = np.cumsum(widths)[:-1]
        self.data = np.zeros((size, sum(widths)), dtype=np.float32)  # memory is used as rows fill
        self.count = 0  # transitions ever stored

    def store(self, o, a, r, o2, d):
        """Add one transition. The action is in [-1, 1], not as rescaled for the environment."""
        self.data[self.count % len(self.data)] = np.concatenate([o, a, [float(r)], o2, [d]])
        self.count += 1

    def sample(self, shape, rng):
        """Draw transitions with replacement; `shape` is (gradient steps, batch size).

        Returns obs, act, rew, obs2, done: obs and obs2 [*shape, obs_dim], act [*shape, act_dim],
        rew and done [*shape].
        """
        rows = self.data[rng.integers(min(self.count, len(self.data)), size=shape)]
        obs, act, rew, obs2, done = np.split(rows, self.columns, axis=-1)
        return obs, act, rew[..., 0], obs2, done[..., 0]


# Losses -------------------------------------------------------------------------------------------


def compute_backup(ac, ac_targ, rew, obs2, done, noise, alpha, gamma):
    """y = r + gamma (1 - d) (min_i Q_targ,i(s', a') - alpha log pi(a'|s')), [B]; a' ~ pi(.|s').

    rew, done [B], obs2 [B, obs_dim], noise [B, act_dim] standard normal.
    """
    with torch.no_grad():
        act2, logp_act2 = ac.pi(obs2, noise)
        q_targ = torch.min(*ac_targ.q(obs2, act2))
        return rew + gamma * (1 - done) * (q_targ - alpha * logp_act2)


def compute_loss_q(q1, q2, backup):
    """Mean squared Bellman errors: E[(Q_1(s, a) - y)^2] + E[(Q_2(s, a) - y)^2]; [B] each -> []."""
    return ((q1 - backup) ** 2).mean() + ((q2 - backup) ** 2).mean()


def compute_loss_pi(ac, obs, noise, alpha):
    """E[alpha log pi(a|s) - min_i Q_i(s, a)], a ~ pi(.|s); returns loss [], log pi(a|s) [B].

    obs [B, obs_dim], noise [B, act_dim] standard normal.
    """
    a, logp_pi = ac.pi(obs, noise)
    q1_pi, q2_pi = ac.q(obs, a)
    return (alpha * logp_pi - torch.min(q1_pi, q2_pi)).mean(), logp_pi


def compute_loss_alpha(log_alpha, logp_pi, target_entropy):
    """-E[log alpha (log pi(a|s) + target entropy)]: alpha rises while the entropy is too low.

    The paper (Haarnoja et al. 2018, arXiv:1812.05905, eq. 18) has alpha in place of log alpha.
    log_alpha [], logp_pi [B] -> []; only log_alpha gets a gradient.
    """
    return -(log_alpha * (logp_pi.detach() + target_entropy)).mean()


# Training -----------------------------------------------------------------------------------------


def train(args):
    """Train a policy. Returns whether the run is finished: False if a signal stopped it."""
    # Set-up: bad input is refused before anything is written.
    device = mpi_pytorch.setup(args.device)
    env = run.make_env(args.env_id, args.env_kwargs, (Box,), bounded=True)
    test_env = run.make_env(args.env_id, args.env_kwargs, (Box,), bounded=True)
    obs_dim, action_space = env.observation_space.shape[0], env.action_space
    act_dim = int(np.prod(action_space.shape))
    local_steps_per_epoch = mpi.share("--steps-per-epoch", args.steps_per_epoch)
    local_batch_size = mpi.share("--batch-size", args.batch_size)
    local_replay_size = mpi.share("--replay-size", args.replay_size)
    buf = ReplayBuffer(obs_dim, act_dim, local_replay_size)
    logger = run.start(args, __file__)

    # Networks and optimizers: all ranks start from the same parameters.
    rng = mpi.make_rng(args.seed, "weights")
    ac = actor_critic(obs_dim, act_dim, args.hidden_sizes, args.activation, rng).to(device)
    mpi_pytorch.sync_params(ac)
    ac_targ = copy.deepcopy(nn.ModuleDict({"q": ac.q})).requires_grad_(False)
    pi_optimizer = mpi_pytorch.Adam(ac.pi.parameters(), args.lr)
    q_optimizer = mpi_pytorch.Adam(ac.q.parameters(), args.lr)
    auto_alpha = args.alpha == "auto"
    if auto_alpha:
        log_alpha = nn.Parameter(torch.zeros((), device=device))
        alpha_optimizer = mpi_pytorch.Adam([log_alpha], args.lr)

    def update(obs, act, rew, obs2, done, noise):
        """Take one gradient step on a batch, as `ReplayBuffer.sample` draws it: [B, ...] each.

        noise [2, B, act_dim]: standard normal, for the next actions and for the policy's loss.
        Returns {name: tensor [] or [B]}, the losses and values to log.
        """
        alpha = log_alpha.detach().exp() if auto_alpha else args.alpha

        # Q functions: fit them to the backup.
        backup = compute_backup(ac, ac_targ, rew, obs2, done, noise[0], alpha, args.gamma)
        q1, q2 = ac.q(obs, act)
        loss_q = compute_loss_q(q1, q2, backup)
        q_optimizer.minimize(loss_q)

        # Policy: gradient ascent on the smaller Q plus alpha times the entropy; pi_optimizer leaves
        # Q as it is.
        loss_pi, logp_pi = compute_loss_pi(ac, obs, noise[1], alpha)
        pi_optimizer.minimize(loss_pi)

        # Alpha: toward the target entropy.
        if auto_alpha:
            loss_alpha = compute_loss_alpha(log_alpha, logp_pi, -act_dim)
            alpha_optimizer.minimize(loss_alpha)

        # Target networks: move by a share of 1 - polyak toward the new ones.
        with torch.no_grad():
            for p, p_targ in zip(ac.q.parameters(), ac_targ.q.parameters(), strict=True):
                p_targ.lerp_(p, 1 - args.polyak)
        info = {"LossQ": loss_q, "LossPi": loss_pi, "Q1Vals": q1, "Q2Vals": q2, "LogPi": logp_pi}
        return {key: value.detach() for key, value in info.items()}

    update = mpi_pytorch.compile(update, device) if args.compile else update

    def update_block(steps, rng):
        """Take gradient steps. All batches are drawn at once, which is faster than one by one."""
        shape = steps, local_batch_size
        noise = rng.standard_normal((steps, 2, local_batch_size, act_dim), dtype=np.float32)
        batches = [torch.as_tensor(x, device=device) for x in (*buf.sample(shape, rng), noise)]
        for batch in zip(*batches, strict=True):
            logger.store(**update(*batch))

    def export_policy():
        """The policy as `get_action` takes it and policy.npz holds it: a dict of NumPy arrays."""
        arrays = {"weights": mpi_pytorch.layers(ac.pi.net), "activation": args.activation}
        arrays |= {"act_low": action_space.low, "act_high": action_space.high}
        return arrays | {"distribution": "squashed_gaussian"}

    def test(policy, epoch):
        """Run this rank's share of an epoch's test episodes, which are without noise."""
        for i in range(mpi.proc_id(), args.num_test_episodes, mpi.num_procs()):
            rng = mpi.make_rng(args.seed, "test", epoch, i)
            o, _ = test_env.reset(seed=int(rng.integers(2**31)))
            ended, ep_ret, ep_len = False, 0.0, 0
            while not ended:
                a = to_env(get_action(policy, o), action_space)
                o, r, terminated, truncated, _ = test_env.step(a)
                ep_ret, ep_len = ep_ret + r, ep_len + 1
                ended = terminated or truncated or ep_len == args.max_ep_len
            logger.store(TestEpRet=ep_ret, TestEpLen=ep_len)

    # Resume: an epoch starts from a reset and draws random numbers of its own, so this and the
    # buffer are all there is to restore.
    logger.setup_pytorch_saver(ac)
    parts = {"ac": ac, "ac_targ": ac_targ, "pi_optimizer": pi_optimizer, "q_optimizer": q_optimizer}
    if auto_alpha:
        parts |= {"log_alpha": log_alpha, "alpha_optimizer": alpha_optimizer}
    state = {"networks": mpi_pytorch.State(**parts)}

    # Main loop: update_every steps on each rank, then as many gradient steps as all ranks took.
    for epoch in range(logger.load_state(state, buf), args.epochs):
        rng = mpi.make_rng(args.seed, "rollout", mpi.proc_id(), epoch)
        policy = export_policy()
        (o, _), ep_ret, ep_len = env.reset(seed=int(rng.integers(2**31))), 0.0, 0

        for t in logger.progress(local_steps_per_epoch):
            local_steps = epoch * local_steps_per_epoch + t + 1
            total_steps = local_steps * mpi.num_procs()
            if total_steps <= args.start_steps:
                a = rng.uniform(-1, 1, act_dim).astype(np.float32)
            else:
                a = get_action(policy, o, rng)
            o2, r, terminated, truncated, _ = env.step(to_env(a, action_space))
            buf.store(o, a, r, o2, terminated)
            o, ep_ret, ep_len = o2, ep_ret + r, ep_len + 1

            if terminated or truncated or ep_len == args.max_ep_len:
                logger.store(EpRet=ep_ret, EpLen=ep_len)
                (o, _), ep_ret, ep_len = env.reset(), 0.0, 0
            elif t == local_steps_per_epoch - 1:
                logger.store(CutEpRet=ep_ret)

            if total_steps >= args.update_after and local_steps % args.update_every == 0:
                update_block(args.update_every * mpi.num_procs(), rng)
                policy = export_policy()

        test(policy, epoch)

        # Log and save.
        logger.log_tabular("Epoch", epoch)
        logger.log_tabular("TotalEnvInteracts", (epoch + 1) * args.steps_per_epoch)
        for key in ("EpRet", "TestEpRet", "Q1Vals", "Q2Vals", "LogPi"):
            logger.log_tabular(key, with_min_and_max=True)
        for key in ("CutEpRet", "EpLen", "TestEpLen", "LossPi", "LossQ"):
            logger.log_tabular(key, average_only=True)
        logger.log_tabular("Alpha", log_alpha.exp().item() if auto_alpha else args.alpha)
        logger.log_tabular("Time", logger.time())
        logger.dump_tabular()

        stop = run.stop_requested()  # by a signal, to any rank
        if stop or logger.save_due():
            logger.save_state(state, policy, buffer=buf)
        if stop:
            break
    return logger.close()


# Command line -------------------------------------------------------------------------------------

if __name__ == "__main__":
    run.main(train, Args)
