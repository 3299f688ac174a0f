"""Trust Region Policy Optimization (Schulman et al. 2015, arXiv:1502.05477).

    python algos/trpo_torch.py --env-id CartPole-v1
    mpirun -np 4 python algos/trpo_torch.py --env-id Hopper-v4

From one batch of experience, take the best step that moves the policy by no more than delta:

    max E[ pi(a|s) / pi_old(a|s) A ]   such that   E[ KL(pi_old(.|s) || pi(.|s)) ] <= delta

To first order in the objective, gradient g, and to second order in the KL, Hessian H (the Fisher
matrix), the answer is the natural gradient step sqrt(2 delta / x^T H x) x, where H x = g. Conjugate
gradient finds x from products H v alone, and a line search makes up for the approximations.

The advantage A is GAE (Schulman et al. 2016, arXiv:1506.02438, eq. 16), and V regresses on the
discounted rewards to go:

    delta_t = r_t + gamma V(s_t+1) - V(s_t)        A_t = delta_t + gamma lam A_t+1

Diff me against vpg_torch.py: a step measured in KL instead of one measured in parameters.
Diff me against trpo_tf1.py: the same algorithm as a TensorFlow 1 graph.

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

from common.args import JsonDict, NonNegFloat, NonNegInt, PosFloat, PosInt, Sizes, Unit
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
    compile: bool = False  # compile V's steps; the policy's are differentiated twice: not possible
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
    # TRPO
    algo: Literal["trpo", "npg"] = "trpo"  # npg: natural policy gradient, without the line search
    delta: PosFloat = 0.01  # KL divergence that a policy step may reach
    damping_coeff: NonNegFloat = 0.1  # added to the diagonal of the Fisher matrix
    cg_iters: PosInt = 10  # iterations of conjugate gradient
    backtrack_iters: PosInt = 10  # maximum number of steps tried in the line search
    backtrack_coeff: Unit = 0.8  # how much shorter each of them is than the one before
    vf_lr: PosFloat = 1e-3  # learning rate of the value function
    train_v_iters: NonNegInt = 80  # value function steps per epoch
    lam: Unit = 0.97  # lambda of GAE


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

    def dist(self, obs):
        """obs [B, obs_dim] -> mu [B, act_dim], log_std [act_dim], which `kl` compares."""
        return self.net(obs), self.log_std

    def kl(self, old, new):
        """Two results of `dist` -> mean KL(old || new) []."""
        (mu_old, log_std_old), (mu, log_std) = old, new
        z = (mu_old - mu) * torch.exp(-log_std)
        var_ratio = torch.exp(2 * (log_std_old - log_std))
        return (log_std - log_std_old + 0.5 * (z**2 + var_ratio - 1)).sum(-1).mean()


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

    def dist(self, obs):
        """obs [B, obs_dim] -> log pi(.|obs) [B, act_dim], which `kl` compares."""
        return (torch.log_softmax(self.net(obs), -1),)

    def kl(self, old, new):
        """Two results of `dist` -> mean KL(old || new) []."""
        (logp_old,), (logp,) = old, new
        return (logp_old.exp() * (logp_old - logp)).sum(-1).mean()


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


def compute_loss_pi(logp, logp_old, adv):
    """The surrogate objective, negated: -E[ratio A].

    Args:
        logp, logp_old, adv: [B], log-probabilities under the new and the old policy; advantages.

    Returns:
        loss_pi [].
    """
    ratio = torch.exp(logp - logp_old)
    return -(ratio * adv).mean()


def compute_loss_v(v, ret):
    """Mean squared error of the values: E[(V(s) - R)^2]; v, ret [B] -> []."""
    return ((v - ret) ** 2).mean()


# Natural gradient ---------------------------------------------------------------------------------


def flat_grad(y, params, **options):
    """Gradient of y [] with respect to `params`, as one vector [N]; options of autograd.grad."""
    return torch.cat([g.reshape(-1) for g in torch.autograd.grad(y, params, **options)])


def fisher_product(grad_kl, params, x):
    """H x [N], H the Hessian of the KL; grad_kl [N] its gradient with its graph, x [N]."""
    return flat_grad(grad_kl @ x, params, retain_graph=True)


def conjugate_gradient(Ax, b, iters):
    """Solve A x = b for a symmetric positive definite A (Hestenes and Stiefel 1952).

    Args:
        Ax: function from a vector [N] to A times it.
        b: [N] float64.
        iters: maximum number of iterations; without rounding, N of them are exact.

    Returns:
        x [N] float64.
    """
    x, r, p = np.zeros_like(b), b.copy(), b.copy()
    rr = r @ r
    for _ in range(iters):
        Ap = Ax(p)
        pAp = p @ Ap
        if not pAp > 0:  # p is 0, since x is exact, or rounding has made A indefinite, or NaN
            break
        x += rr / pAp * p
        r -= rr / pAp * Ap
        rr, rr_old = r @ r, rr
        p = r + rr / rr_old * p
    return x


def natural_step(fisher, g, delta, cg_iters):
    """The natural gradient step, to be subtracted: sqrt(2 delta / x^T H x) x, where H x = g.

    Args:
        fisher: function from x [N] to H x [N].
        g: [N] float64, gradient of the loss.

    Returns:
        [N] float64; zeros where x^T H x is not positive and finite: g = 0, say.
    """
    x = conjugate_gradient(fisher, g, cg_iters)
    xHx = x @ fisher(x)
    return np.sqrt(2 * delta / xHx) * x if 0 < xHx < np.inf else np.zeros_like(g)


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
    pi_params = list(ac.pi.parameters())
    vf_optimizer = MpiAdamOptimizer(ac.v.parameters(), args.vf_lr)
    n_pi, n_v = (sum(p.numel() for p in net.parameters()) for net in (ac.pi, ac.v))
    logger.log(f"Number of parameters: pi {n_pi}, v {n_v}")
    norm = args.norm_obs, args.norm_rew
    buf = GAEBuffer(obs_dim, action_space, local_steps_per_epoch, args.gamma, args.lam, *norm)

    def values(obs):
        """V of observations: array [N, obs_dim] -> array [N]."""
        with torch.no_grad():
            return ac.v(torch.as_tensor(obs, device=device))[:, 0].cpu().numpy()

    def losses(obs, act, adv, ret, logp_old, dist_old):
        """loss_pi, loss_v, the KL divergence from `dist_old` and the entropy: tensors []."""
        logp, entropy = ac.pi(obs, act)
        loss_pi, loss_v = compute_loss_pi(logp, logp_old, adv), compute_loss_v(ac.v(obs)[:, 0], ret)
        return loss_pi, loss_v, ac.pi.kl(dist_old, ac.pi.dist(obs)), entropy.mean()

    def train_v(obs, ret):
        """One gradient step on loss_v."""
        vf_optimizer.minimize(compute_loss_v(ac.v(obs)[:, 0], ret))

    if args.compile:  # not the policy's: compiled functions cannot be differentiated twice
        train_v = mpi_compile(train_v)

    def update(rng):
        """Improve policy and value function on the epoch's experience, and store what to log."""
        *batch, val = buf.get(values)
        ret_std = buf.stats.std[-1] if args.norm_rew else 1  # the unit of V
        obs, act, adv, ret = (torch.as_tensor(x, device=device) for x in batch)
        with torch.no_grad():
            logp_old, _ = ac.pi(obs, act)
            dist_old = [x.clone() for x in ac.pi.dist(obs)]
        batch = obs, act, adv, ret, logp_old, dist_old
        loss_pi, loss_v, kl, _ = losses(*batch)
        loss_pi_old, loss_v_old = loss_pi.item(), loss_v.item()

        # Policy: the natural gradient step. Gradient and Fisher products are averaged over ranks.
        g = mpi_avg(flat_grad(loss_pi, pi_params).cpu())
        grad_kl = flat_grad(kl, pi_params, create_graph=True)

        def fisher(x):
            x_t = torch.as_tensor(x, dtype=torch.float32, device=device)
            Hx = fisher_product(grad_kl, pi_params, x_t)
            return mpi_avg(Hx.cpu()) + args.damping_coeff * x

        def set_params(x):
            x = torch.as_tensor(x, dtype=torch.float32, device=device)
            nn.utils.vector_to_parameters(x, pi_params)

        def measure():
            with torch.no_grad():
                return [x.item() for x in losses(*batch)]

        params = nn.utils.parameters_to_vector(pi_params).detach().cpu().numpy().astype(np.float64)
        step = natural_step(fisher, g, args.delta, args.cg_iters)

        # Line search: the longest step that keeps to the KL and improves the objective. Both are
        # averaged, so that all ranks take the same step.
        loss_pi_start = mpi_avg(loss_pi_old)
        for i in range(args.backtrack_iters):
            set_params(params - args.backtrack_coeff**i * step)
            loss_pi, _, kl, _ = mpi_avg(measure())
            if args.algo == "npg" or (kl <= args.delta and loss_pi <= loss_pi_start):
                break
        else:
            set_params(params)
            i = args.backtrack_iters

        # Value function: many steps, since its targets do not depend on it.
        for part in minibatches(args.train_v_iters, minibatch_size, len(obs), rng):
            train_v(obs[part], ret[part])

        loss_pi, loss_v, kl, entropy = measure()
        logger.store(LossPi=loss_pi_old, DeltaLossPi=loss_pi - loss_pi_old, Entropy=entropy, KL=kl)
        logger.store(LossV=loss_v_old * ret_std**2, DeltaLossV=(loss_v - loss_v_old) * ret_std**2)
        logger.store(VVals=val * ret_std)
        logger.store(BacktrackIters=i)

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
    stateful = {"ac": ac, "vf_optimizer": vf_optimizer, "stats": buf.stats}
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
        for key in ("Entropy", "KL", "BacktrackIters"):
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
