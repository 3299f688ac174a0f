"""Twin Delayed DDPG, TD3 (Fujimoto et al. 2018, arXiv:1802.09477).

    python algos/td3_torch.py --env-id HalfCheetah-v4
    mpirun -np 4 python algos/td3_torch.py --env-id Hopper-v4

DDPG's policy seeks out the actions whose Q is too high. TD3 makes three changes: the next state is
valued by the smaller of two Qs, clipped noise is added to the target policy's action (smoothing),
and the policy and the targets are updated once per policy_delay updates of the Qs.

    a'     = clip(pi_targ(s') + clip(sigma noise, -c, c), -1, 1)
    y      = r + gamma (1 - d) min_i Q_targ,i(s', a')
    L(Q_i) = E[ (Q_i(s, a) - y)^2 ]        L(pi) = -E[ Q_1(s, pi(s)) ]
    theta_targ <- polyak theta_targ + (1 - polyak) theta        after each step of pi

The noise is standard normal, sigma is target_noise, and c is noise_clip.

Diff me against ddpg_torch.py: the three changes. And sac_torch.py: the entropy.
Diff me against td3_tf1.py: the same algorithm as a TensorFlow 1 graph.
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
    # TD3
    pi_lr: PosFloat = 1e-3  # learning rate of the policy
    q_lr: PosFloat = 1e-3  # learning rate of the Q functions
    act_noise: NonNegFloat = 0.1  # standard deviation of the noise on actions in [-1, 1]
    target_noise: NonNegFloat = 0.2  # standard deviation of the noise on target actions
    noise_clip: NonNegFloat = 0.5  # bound of the noise on target actions
    policy_delay: PosInt = 2  # gradient steps of the Q functions for each one of the policy


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


class DeterministicActor(nn.Module):
    """a = tanh(u(s)), so actions lie in [-1, 1]."""

    def __init__(self, obs_dim, act_dim, hidden_sizes, activation, rng):
        super().__init__()
        self.net = mlp([obs_dim, *hidden_sizes, act_dim], activation, rng)

    def forward(self, obs):
        """obs [B, obs_dim] -> a [B, act_dim]."""
        return torch.tanh(self.net(obs))


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
    pi = DeterministicActor(obs_dim, act_dim, hidden_sizes, activation, rng)
    q = TwinQFunction(obs_dim, act_dim, hidden_sizes, activation, rng)
    return nn.ModuleDict({"pi": pi, "q": q})


def get_action(policy, o, rng=None):
    """Choose one action in NumPy: for a single observation, calling a framework is all overhead.

    Args:
        policy: dict from `export_policy`: arrays `weights` [(W [in, out], b [out]), ...],
            `activation` and `act_noise`.
        o: [obs_dim], the observation.
        rng: numpy.random.Generator of the noise; None for the action without noise.

    Returns:
        [act_dim] float32 within [-1, 1].
    """
    x = np.asarray(o, dtype=np.float32)
    *hidden, (W_out, b_out) = policy["weights"]
    for W, b in hidden:
        x = np.tanh(x @ W + b) if policy["activation"] == "tanh" else np.maximum(x @ W + b, 0)
    a = np.tanh(x @ W_out + b_out)
    if rng is None:
        return a
    noise = rng.standard_normal(a.shape, dtype=np.float32)
    return (a + policy["act_noise"] * noise).clip(-1, 1)


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


def compute_backup(ac_targ, rew, obs2, done, noise, target_noise, noise_clip, gamma):
    """y = r + gamma (1 - d) min_i Q_targ,i(s', a'), [B]; a' = clip(pi_targ(s') + clipped noise).

    rew, done [B], obs2 [B, obs_dim], noise [B, act_dim] standard normal.
    """
    with torch.no_grad():
        epsilon = (target_noise * noise).clamp(-noise_clip, noise_clip)
        act2 = (ac_targ.pi(obs2) + epsilon).clamp(-1, 1)
        q_targ = torch.min(*ac_targ.q(obs2, act2))
        return rew + gamma * (1 - done) * q_targ


def compute_loss_q(q1, q2, backup):
    """Mean squared Bellman errors: E[(Q_1(s, a) - y)^2] + E[(Q_2(s, a) - y)^2]; [B] each -> []."""
    return ((q1 - backup) ** 2).mean() + ((q2 - backup) ** 2).mean()


def compute_loss_pi(ac, obs):
    """-E[Q_1(s, pi(s))]; obs [B, obs_dim] -> []."""
    q1_pi, _ = ac.q(obs, ac.pi(obs))
    return -q1_pi.mean()


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
    ac_targ = copy.deepcopy(ac).requires_grad_(False)
    pi_optimizer = mpi_pytorch.Adam(ac.pi.parameters(), args.pi_lr)
    q_optimizer = mpi_pytorch.Adam(ac.q.parameters(), args.q_lr)

    def update(obs, act, rew, obs2, done, noise, update_pi):
        """Take one gradient step on a batch, as `ReplayBuffer.sample` draws it: [B, ...] each.

        noise [B, act_dim]: standard normal, for the target policy. update_pi: bool, whether the
        policy and the targets are updated too.
        Returns {name: tensor [] or [B]}, the losses and values to log.
        """
        # Q functions: fit them to the backup.
        smoothing = noise, args.target_noise, args.noise_clip
        backup = compute_backup(ac_targ, rew, obs2, done, *smoothing, args.gamma)
        q1, q2 = ac.q(obs, act)
        loss_q = compute_loss_q(q1, q2, backup)
        q_optimizer.minimize(loss_q)
        info = {"LossQ": loss_q, "Q1Vals": q1, "Q2Vals": q2}

        if update_pi:
            # Policy: gradient ascent on the new Q_1, which pi_optimizer leaves as it is.
            loss_pi = compute_loss_pi(ac, obs)
            pi_optimizer.minimize(loss_pi)
            info["LossPi"] = loss_pi

            # Target networks: move by a share of 1 - polyak toward the new ones.
            with torch.no_grad():
                for p, p_targ in zip(ac.parameters(), ac_targ.parameters(), strict=True):
                    p_targ.lerp_(p, 1 - args.polyak)
        return {key: value.detach() for key, value in info.items()}

    update = mpi_pytorch.compile(update, device) if args.compile else update

    def update_block(steps, rng):
        """Take gradient steps. All batches are drawn at once, which is faster than one by one."""
        shape = steps, local_batch_size
        noise = rng.standard_normal((steps, local_batch_size, act_dim), dtype=np.float32)
        batches = [torch.as_tensor(x, device=device) for x in (*buf.sample(shape, rng), noise)]
        first = int(q_optimizer.steps) + 1  # the delay counts gradient steps of the whole run
        for step, batch in enumerate(zip(*batches, strict=True), first):
            logger.store(**update(*batch, step % args.policy_delay == 0))

    def export_policy():
        """The policy as `get_action` takes it and policy.npz holds it: a dict of NumPy arrays."""
        arrays = {"weights": mpi_pytorch.layers(ac.pi.net), "activation": args.activation}
        arrays |= {"act_low": action_space.low, "act_high": action_space.high}
        return arrays | {"distribution": "deterministic", "act_noise": args.act_noise}

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
        for key in ("EpRet", "TestEpRet", "Q1Vals", "Q2Vals"):
            logger.log_tabular(key, with_min_and_max=True)
        for key in ("CutEpRet", "EpLen", "TestEpLen", "LossPi", "LossQ"):
            logger.log_tabular(key, average_only=True)
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
