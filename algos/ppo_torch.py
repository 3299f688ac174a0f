"""Proximal Policy Optimization, PPO-Clip (Schulman et al. 2017, arXiv:1707.06347).

    python algos/ppo_torch.py --env-id CartPole-v1
    mpirun -np 4 python algos/ppo_torch.py --env-id Hopper-v4

From one batch of experience, take many steps up the clipped objective (eq. 7), which gains nothing
from moving the policy further than eps from the one that gathered the batch:

    ratio  = pi(a|s) / pi_old(a|s)
    L(pi)  = E[ min( ratio A, clip(ratio, 1 - eps, 1 + eps) A ) ]

The advantage A is GAE (Schulman et al. 2016, arXiv:1506.02438, eq. 16), and V regresses on the
discounted rewards to go:

    delta_t = r_t + gamma V(s_t+1) - V(s_t)        A_t = delta_t + gamma lam A_t+1

Diff me against vpg_torch.py: the ratio, its clip, and many policy steps instead of one.
Diff me against ppo_tf1.py: the same algorithm as a TensorFlow 1 graph.

From common/: the command line and checks (args, cli), the run directory, table and checkpoints
(logger), ranks and their random numbers (mpi_tools), Adam averaged over ranks (mpi_pytorch).
"""

import os
import sys
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Literal

os.environ.setdefault("GOMP_SPINCOUNT", "3000")  # threads wait 0.1 ms, not 10, before they sleep
sys.path.insert(1, str(Path(__file__).resolve().parents[1]))  # find common/ from any directory

import numpy as np
import torch
from gymnasium.spaces import Box, Discrete
from torch import nn

from common.args import JsonDict, NonNegInt, PosFloat, PosInt, Sizes, Unit
from common.cli import experiment, main, make_env
from common.logger import start_run
from common.mpi_pytorch import (
    MpiAdamOptimizer,
    load_state_dicts,
    mpi_compile,
    save_model,
    setup_pytorch_for_mpi,
    state_dicts,
    sync_params,
    to_arrays,
)
from common.mpi_tools import (
    RunningMeanStd,
    make_rng,
    mpi_avg,
    mpi_statistics_scalar,
    proc_id,
    rank_share,
)

# Arguments ----------------------------------------------------------------------------------------


@dataclass
class Args:
    # Experiment
    exp_name: str | None = None  # name of the experiment; <script>_<env-id> if not given
    seed: NonNegInt = 0  # random seed; every rank and every epoch draws numbers of its own
    data_dir: str = "data"  # directory that holds the run directories
    datestamp: bool = False  # put date and time into the run directory's name
    save_freq: PosInt = 10  # epochs between checkpoints
    snapshots: bool = False  # keep the policy of every save, and the best so far
    num_cpu: PosInt | Literal["auto"] = 1  # ranks to relaunch with under mpirun; auto: all cores
    resume: bool | str = False  # continue the run in the directory; or in DIR, with its arguments
    overwrite: bool = False  # replace the run that the directory holds
    device: str = "cpu"  # where the networks are trained: cpu, cuda, cuda:1, ...
    compile: bool = False  # compile the update steps: takes a minute, pays in long runs
    # Environment
    env_id: str = "HalfCheetah-v4"  # a Gymnasium id; my_package:MyEnv-v0 imports my_package first
    env_kwargs: JsonDict = field(default_factory=dict)  # arguments of the environment, as JSON
    max_ep_len: PosInt = 1000  # steps after which an episode is truncated
    # Training
    epochs: PosInt = 50  # number of epochs
    steps_per_epoch: PosInt = 4000  # environment steps per epoch, all ranks together
    gamma: Unit = 0.99  # discount factor
    hidden_sizes: Sizes = (64, 64)  # sizes of the hidden layers
    activation: Literal["tanh", "relu"] = "tanh"  # what follows each hidden layer
    minibatch_size: NonNegInt = 0  # samples per step on V, and on PPO's policy; 0: all of the epoch
    norm_obs: bool = False  # normalize observations by their mean and standard deviation so far
    norm_rew: bool = False  # normalize rewards by the standard deviation of discounted returns
    # PPO
    clip_ratio: PosFloat = 0.2  # eps: how far the objective rewards moving the policy
    pi_lr: PosFloat = 3e-4  # learning rate of the policy
    anneal_lr: bool = False  # lower pi_lr linearly, to 0 at the end of the run
    vf_lr: PosFloat = 1e-3  # learning rate of the value function
    train_pi_iters: NonNegInt = 80  # maximum number of policy steps per epoch
    train_v_iters: NonNegInt = 80  # value function steps per epoch
    lam: Unit = 0.97  # lambda of GAE
    target_kl: PosFloat = 0.01  # policy steps end at 1.5 times this KL divergence


# Networks -----------------------------------------------------------------------------------------


def mlp(sizes, activation, rng):
    """A multilayer perceptron: [B, sizes[0]] -> [B, sizes[-1]], no activation after the last layer.

    Weights and biases are uniform within 1 / sqrt(fan-in), as PyTorch has it, drawn with NumPy:
    the TensorFlow script starts from the same numbers.
    """
    layers = []
    for fan_in, fan_out in pairwise(sizes):
        layer, bound = nn.Linear(fan_in, fan_out), fan_in**-0.5
        weight = rng.uniform(-bound, bound, (fan_in, fan_out))
        bias = rng.uniform(-bound, bound, fan_out)
        layer.load_state_dict({"weight": torch.tensor(weight.T), "bias": torch.tensor(bias)})
        layers += [layer, {"tanh": nn.Tanh, "relu": nn.ReLU}[activation]()]
    return nn.Sequential(*layers[:-1])


class GaussianActor(nn.Module):
    """pi(a|s) = Normal(mu(s), exp(log_std)), for Box actions; log_std does not depend on s."""

    def __init__(self, obs_dim, act_dim, hidden_sizes, activation, rng):
        super().__init__()
        self.net = mlp([obs_dim, *hidden_sizes, act_dim], activation, rng)
        self.log_std = nn.Parameter(torch.full((act_dim,), -0.5))

    def forward(self, obs, act):
        """obs [B, obs_dim], act [B, act_dim] -> log pi(act|obs) [B], entropy [].

        The entropy is summed over action dimensions; Spinning Up's PyTorch scripts log the mean.
        """
        mu = self.net(obs)
        z = (act - mu) * torch.exp(-self.log_std)
        logp = (-0.5 * z**2 - self.log_std - 0.5 * np.log(2 * np.pi)).sum(-1)
        return logp, (self.log_std + 0.5 * np.log(2 * np.pi * np.e)).sum()


class CategoricalActor(nn.Module):
    """pi(a|s) = softmax(logits(s))[a], for Discrete actions."""

    def __init__(self, obs_dim, act_dim, hidden_sizes, activation, rng):
        super().__init__()
        self.net = mlp([obs_dim, *hidden_sizes, act_dim], activation, rng)

    def forward(self, obs, act):
        """obs [B, obs_dim], act [B] int64 -> log pi(act|obs) [B], entropy [B]."""
        logp_all = torch.log_softmax(self.net(obs), -1)
        logp = logp_all.gather(-1, act[:, None]).squeeze(-1)
        return logp, -(logp_all.exp() * logp_all).sum(-1)


def actor_critic(obs_dim, space, hidden_sizes, activation, rng):
    """The policy `pi` and the value function `v` [B, obs_dim] -> [B, 1], which share nothing."""
    if isinstance(space, Discrete):
        pi = CategoricalActor(obs_dim, int(space.n), hidden_sizes, activation, rng)
    else:
        pi = GaussianActor(obs_dim, int(np.prod(space.shape)), hidden_sizes, activation, rng)
    return nn.ModuleDict({"pi": pi, "v": mlp([obs_dim, *hidden_sizes, 1], activation, rng)})


def normalize(x, mean, std):
    """(x - mean) / std, clipped to [-10, 10]."""
    return ((x - mean) / std).clip(-10, 10)


def get_action(policy, o, rng):
    """Sample one action in NumPy: for a single observation, calling a framework is all overhead.

    Args:
        policy: dict from `export_policy`: arrays `weights` [(W [in, out], b [out]), ...],
            `activation`, for Box actions `log_std` [act_dim], and with --norm-obs `obs_mean` and
            `obs_std` [obs_dim].
        o: [obs_dim], the observation.
        rng: numpy.random.Generator.

    Returns:
        [act_dim] float32 for Box actions, an int from 0 for Discrete ones.
    """
    x = np.asarray(o, dtype=np.float32)
    if "obs_mean" in policy:
        x = normalize(x, policy["obs_mean"], policy["obs_std"])
    *hidden, (W_out, b_out) = policy["weights"]
    for W, b in hidden:
        x = np.tanh(x @ W + b) if policy["activation"] == "tanh" else np.maximum(x @ W + b, 0)
    x = x @ W_out + b_out
    if "log_std" in policy:
        return x + np.exp(policy["log_std"]) * rng.standard_normal(x.shape, dtype=np.float32)
    return int(np.argmax(x + rng.gumbel(size=x.shape)))  # the Gumbel-max trick samples softmax(x)


def to_env(a, space):
    """The action as the environment takes it. Spinning Up does not clip it to the bounds."""
    if isinstance(space, Discrete):
        return a + int(space.start)
    return a.reshape(space.shape).astype(space.dtype, copy=False).clip(space.low, space.high)


# Buffer -------------------------------------------------------------------------------------------


class GAEBuffer:
    """One epoch of this rank's experience, and once it is full, advantages and returns.

    `stats` holds statistics over all ranks and epochs: of the observations and, in the last column,
    of the discounted returns so far. `norm_obs` and `norm_rew` use them, and `get` updates them.
    """

    def __init__(self, obs_dim, action_space, size, gamma, lam, norm_obs=False, norm_rew=False):
        self.obs = np.zeros((size, obs_dim), dtype=np.float32)
        discrete = isinstance(action_space, Discrete)
        act_shape = () if discrete else (int(np.prod(action_space.shape)),)
        self.act = np.zeros((size, *act_shape), dtype=np.int64 if discrete else np.float32)
        self.rew = np.zeros(size, dtype=np.float32)
        self.gamma, self.lam = gamma, lam
        self.norm_obs, self.norm_rew, self.stats = norm_obs, norm_rew, RunningMeanStd(obs_dim + 1)
        self.past_ret, self.past_rets = 0.0, np.zeros(size)
        self.ptr, self.paths = 0, []

    def store(self, o, a, r):
        """Add one step. The action is as sampled, not as clipped for the environment."""
        self.obs[self.ptr], self.act[self.ptr], self.rew[self.ptr] = o, a, r
        self.past_rets[self.ptr] = self.past_ret = r + self.gamma * self.past_ret
        self.ptr += 1

    def finish_path(self, o2, terminated):
        """End a path: the episode is over, or is cut at the end of the epoch.

        Args:
            o2: [obs_dim], the observation after the last step.
            terminated: whether o2 is a terminal state, worth 0. A path that was cut or truncated
                would have gone on: V(o2) estimates the rest of its return.
        """
        self.paths.append((self.ptr, np.array(o2, dtype=np.float32), terminated))
        self.past_ret = 0.0

    def get(self, v):
        """Empty the buffer.

        Args:
            v: function from observations [N, obs_dim] to values [N], called once for all steps.

        Returns:
            obs [size, obs_dim], act [size] or [size, act_dim], adv [size], ret [size], val [size];
            adv has mean 0 and standard deviation 1 over all ranks. With `norm_obs`, obs is
            normalized; with `norm_rew`, so are the rewards that adv and ret are made of.
        """
        size, rew = len(self.rew), self.rew
        obs = np.concatenate([self.obs, [o2 for _, o2, _ in self.paths]])
        if self.norm_obs:  # by the statistics that the policy acted on
            obs = normalize(obs, np.float32(self.stats.mean[:-1]), np.float32(self.stats.std[:-1]))
        if self.norm_obs or self.norm_rew:
            self.stats.update(np.column_stack([self.obs, self.past_rets]))
        if self.norm_rew:
            rew = normalize(rew, 0, self.stats.std[-1])
        values = v(obs)
        val, v_end = values[:size].tolist(), values[size:].tolist()
        rew, adv, ret = rew.tolist(), np.zeros(size), np.zeros(size)
        start = 0
        for (end, _, terminated), v_next in zip(self.paths, v_end, strict=True):
            v_next = 0.0 if terminated else v_next
            a, g = 0.0, v_next
            for t in reversed(range(start, end)):
                delta = rew[t] + self.gamma * v_next - val[t]
                a = delta + self.gamma * self.lam * a
                g = rew[t] + self.gamma * g
                adv[t], ret[t], v_next = a, g, val[t]
            start = end
        self.ptr, self.paths = 0, []
        mean, std = mpi_statistics_scalar(adv)
        adv = ((adv - mean) / (std + 1e-8)).astype(np.float32)
        return obs[:size], self.act, adv, ret.astype(np.float32), values[:size]


def minibatches(iters, minibatch_size, size, rng):
    """Indices of the samples, out of `size`, for each of `iters` gradient steps.

    Each sample is drawn once before any is drawn again; all are taken if minibatch_size is 0.
    """
    if minibatch_size == 0:
        return [slice(None)] * iters
    passes = iters * minibatch_size // size + 1
    order = np.concatenate([rng.permutation(size) for _ in range(passes)])
    return order[: iters * minibatch_size].reshape(iters, minibatch_size)


# Losses -------------------------------------------------------------------------------------------


def compute_loss_pi(logp, logp_old, adv, clip_ratio):
    """PPO's clipped objective, negated: -E[min(ratio A, clip(ratio, 1 - eps, 1 + eps) A)].

    Args:
        logp, logp_old, adv: [B], log-probabilities under the new and the old policy; advantages.

    Returns:
        loss_pi []; approximate KL(old || new) [], E[(ratio - 1) - log ratio], which is never
        negative (http://joschu.net/blog/kl-approx.html); the share of clipped ratios [].
    """
    log_ratio = logp - logp_old
    ratio = torch.exp(log_ratio)
    clipped = torch.clamp(ratio, 1 - clip_ratio, 1 + clip_ratio)
    loss_pi = -torch.min(ratio * adv, clipped * adv).mean()
    kl = (ratio - 1 - log_ratio).mean()
    clip_frac = ((ratio - 1).abs() > clip_ratio).float().mean()
    return loss_pi, kl, clip_frac


def compute_loss_v(v, ret):
    """Mean squared error of the values: E[(V(s) - R)^2]; v, ret [B] -> []."""
    return ((v - ret) ** 2).mean()


# Training -----------------------------------------------------------------------------------------


@experiment
def train(args):
    """Train a policy.

    Returns:
        True if the run is finished, False if it was asked to stop before.

    Raises:
        UsageError: bad input; nothing was written.
        FloatingPointError: an observation, reward, loss or parameter became NaN or infinite.
    """
    # Set-up: bad input is refused before anything is written.
    device = setup_pytorch_for_mpi(args.device)
    env = make_env(args.env_id, args.env_kwargs, (Box, Discrete))
    obs_dim, action_space = env.observation_space.shape[0], env.action_space
    local_steps_per_epoch = rank_share("--steps-per-epoch", args.steps_per_epoch)
    minibatch_size = rank_share("--minibatch-size", args.minibatch_size, args.steps_per_epoch)
    logger = start_run(args, __file__)
    if logger.finished:
        return logger.close()

    # Networks and optimizers: all ranks start from the same parameters.
    rng = make_rng(args.seed, "weights")
    ac = actor_critic(obs_dim, action_space, args.hidden_sizes, args.activation, rng).to(device)
    sync_params(ac)
    pi_optimizer = MpiAdamOptimizer(ac.pi.parameters(), args.pi_lr)
    vf_optimizer = MpiAdamOptimizer(ac.v.parameters(), args.vf_lr)
    n_pi, n_v = (sum(p.numel() for p in net.parameters()) for net in (ac.pi, ac.v))
    logger.log(f"Number of parameters: pi {n_pi}, v {n_v}")
    norm = args.norm_obs, args.norm_rew
    buf = GAEBuffer(obs_dim, action_space, local_steps_per_epoch, args.gamma, args.lam, *norm)

    def values(obs):
        """V of observations: array [N, obs_dim] -> array [N]."""
        with torch.no_grad():
            return ac.v(torch.as_tensor(obs, device=device))[:, 0].cpu().numpy()

    @torch.no_grad()
    def losses(obs, act, adv, ret, logp_old):
        """loss_pi, loss_v, approximate KL, share of clipped ratios, entropy: floats."""
        logp, entropy = ac.pi(obs, act)
        loss_pi, kl, clip_frac = compute_loss_pi(logp, logp_old, adv, args.clip_ratio)
        loss_v = compute_loss_v(ac.v(obs)[:, 0], ret)
        return [x.item() for x in (loss_pi, loss_v, kl, clip_frac, entropy.mean())]

    def pi_gradients(obs, act, adv, logp_old):
        """The gradients of loss_pi, averaged over all ranks, and the KL divergence []."""
        logp, _ = ac.pi(obs, act)
        loss_pi, kl, _ = compute_loss_pi(logp, logp_old, adv, args.clip_ratio)
        return pi_optimizer.compute_gradients(loss_pi), kl.detach()

    def train_v(obs, ret):
        """One gradient step on loss_v."""
        vf_optimizer.minimize(compute_loss_v(ac.v(obs)[:, 0], ret))

    if args.compile:
        pi_gradients, train_v = mpi_compile(pi_gradients), mpi_compile(train_v)
        pi_optimizer.apply_gradients = mpi_compile(pi_optimizer.apply_gradients)

    def update(rng):
        """Improve policy and value function on the epoch's experience, and store what to log."""
        *batch, val = buf.get(values)
        ret_std = buf.stats.std[-1] if args.norm_rew else 1  # the unit of V
        obs, act, adv, ret = (torch.as_tensor(x, device=device) for x in batch)
        with torch.no_grad():
            logp_old, _ = ac.pi(obs, act)
        loss_pi_old, loss_v_old, *_ = losses(obs, act, adv, ret, logp_old)

        # Policy: steps until the new policy is too far from the old. The KL is checked before the
        # step is taken, and averaged, so that all ranks stop together.
        if args.anneal_lr:
            pi_optimizer.learning_rate.fill_(args.pi_lr * (1 - logger.epoch / args.epochs))
        i = 0
        for i, part in enumerate(minibatches(args.train_pi_iters, minibatch_size, len(obs), rng)):
            grads, kl = pi_gradients(obs[part], act[part], adv[part], logp_old[part])
            if mpi_avg(kl.item()) > 1.5 * args.target_kl:
                break
            pi_optimizer.apply_gradients(grads)

        # Value function: it takes all of its steps, even if the policy stopped early.
        for part in minibatches(args.train_v_iters, minibatch_size, len(obs), rng):
            train_v(obs[part], ret[part])

        loss_pi, loss_v, kl, clip_frac, entropy = losses(obs, act, adv, ret, logp_old)
        logger.store(LossPi=loss_pi_old, DeltaLossPi=loss_pi - loss_pi_old, Entropy=entropy, KL=kl)
        logger.store(LossV=loss_v_old * ret_std**2, DeltaLossV=(loss_v - loss_v_old) * ret_std**2)
        logger.store(VVals=val * ret_std)
        logger.store(ClipFrac=clip_frac, StopIter=i)

    def export_policy():
        """The policy as `get_action` takes it and policy.npz holds it: a dict of NumPy arrays."""
        weights = [to_arrays((layer.weight.T, layer.bias)) for layer in ac.pi.net[::2]]
        arrays = {"weights": weights, "activation": args.activation}
        if args.norm_obs:
            mean, std = np.float32(buf.stats.mean), np.float32(buf.stats.std)
            arrays |= {"obs_mean": mean[:-1], "obs_std": std[:-1]}
        if isinstance(action_space, Discrete):
            return arrays | {"distribution": "categorical"}
        arrays |= {"act_low": action_space.low, "act_high": action_space.high}
        return arrays | {"distribution": "gaussian", "log_std": to_arrays(ac.pi.log_std)}

    # Resume: an epoch starts from a reset and draws random numbers of its own, so this is all there
    # is to restore.
    stateful = {"ac": ac, "pi_optimizer": pi_optimizer, "vf_optimizer": vf_optimizer}
    stateful["stats"] = buf.stats
    load_state_dicts(stateful, logger.load_state())

    # Main loop: each epoch gathers experience with a fixed policy, then improves it.
    for epoch in logger.epochs_left():
        rng = make_rng(args.seed, "rollout", proc_id(), epoch)
        policy = export_policy()
        o, _ = env.reset(seed=int(rng.integers(2**31)))
        ep_ret, ep_len = 0.0, 0

        for t in logger.progress(local_steps_per_epoch):
            a = get_action(policy, o, rng)
            o2, r, terminated, truncated, _ = env.step(to_env(a, action_space))
            buf.store(o, a, r)
            o, ep_ret, ep_len = o2, ep_ret + float(r), ep_len + 1

            ended = terminated or truncated or ep_len == args.max_ep_len
            if ended or t == local_steps_per_epoch - 1:
                buf.finish_path(o, terminated)
            if ended:
                logger.store(EpRet=ep_ret, EpLen=ep_len)
                o, _ = env.reset()
                ep_ret, ep_len = 0.0, 0
            elif t == local_steps_per_epoch - 1:
                logger.store(CutEpRet=ep_ret)

        update(rng)

        # Log and save.
        logger.log_tabular("Epoch", epoch)
        logger.log_tabular("EpRet", with_min_and_max=True)
        for key in ("CutEpRet", "EpLen"):
            logger.log_tabular(key, average_only=True)
        logger.log_tabular("VVals", with_min_and_max=True)
        logger.log_tabular("TotalEnvInteracts", (epoch + 1) * args.steps_per_epoch)
        for key in ("LossPi", "LossV", "DeltaLossPi", "DeltaLossV"):
            logger.log_tabular(key, average_only=True)
        for key in ("Entropy", "KL", "ClipFrac", "StopIter"):
            logger.log_tabular(key, average_only=True)
        logger.log_tabular("Time", logger.time())
        logger.dump_tabular()

        if logger.save_due():
            save_model(ac, logger.output_dir)
            state = state_dicts(stateful)
            logger.save_state(export_policy(), state, judged=policy)

    return logger.close()


# Command line -------------------------------------------------------------------------------------

if __name__ == "__main__":
    main(train, Args)
