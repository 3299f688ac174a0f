"""Trust Region Policy Optimization (Schulman et al. 2015, arXiv:1502.05477).

    python algos/trpo_torch.py --env-id CartPole-v1
    mpirun -np 4 python algos/trpo_torch.py --env-id Hopper-v4

From one batch of experience, take the best step that moves the policy by no more than delta:

    max E[ pi(a|s) / pi_old(a|s) A ]   such that   E[ KL(pi_old(.|s) || pi(.|s)) ] <= delta

With the objective expanded to first order (gradient g) and the KL to second order (Hessian H, the
Fisher matrix), the solution is the natural gradient step sqrt(2 delta / x^T H x) x, where H x = g.
Conjugate gradient finds x from products of H with vectors, H v = grad(v . grad KL), without H
itself. A line search makes up for the approximations. damping_coeff times the identity is added to
H, so that flat directions give no huge steps.

The advantage A is estimated by generalized advantage estimation, GAE (Schulman et al. 2016,
arXiv:1506.02438, eq. 16), and V is fitted to R, the discounted rewards to go:

    delta_t = r_t + gamma V(s_t+1) - V(s_t)        A_t = delta_t + gamma lam A_t+1
                                                   R_t = r_t + gamma R_t+1

Diff me against vpg_torch.py: a step measured in KL instead of one measured in parameters.
Diff me against trpo_tf1.py: the same algorithm as a TensorFlow 1 graph.
"""

import os
import sys
from dataclasses import field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Literal

os.environ.setdefault("GOMP_SPINCOUNT", "3000")  # threads wait 0.1 ms, not 10, before they sleep
sys.path.insert(1, str(Path(__file__).resolve().parents[1]))  # find common/ from any directory

import numpy as np
import torch
from gymnasium.spaces import Box, Discrete
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
    minibatch_size: NonNegInt = 0  # samples per step on V, all ranks together; 0: whole epoch
    norm_obs: bool = False  # normalize observations by their mean and standard deviation so far
    norm_rew: bool = False  # divide rewards by the std of an episode's discounted sum so far
    # TRPO
    algo: Literal["trpo", "npg"] = "trpo"  # npg: natural policy gradient, without the line search
    delta: PosFloat = 0.01  # KL divergence that a policy step may reach
    damping_coeff: NonNegFloat = 0.1  # added to the diagonal of the Fisher matrix
    cg_iters: PosInt = 10  # iterations of conjugate gradient
    backtrack_iters: PosInt = 10  # maximum number of steps tried in the line search
    backtrack_coeff: Unit = 0.8  # length of each step tried, as a share of the one before
    vf_lr: PosFloat = 1e-3  # learning rate of the value function
    train_v_iters: NonNegInt = 80  # value function steps per epoch
    lam: Unit = 0.97  # lambda of GAE


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

    def __init__(self, obs_dim, n_actions, hidden_sizes, activation, rng):
        super().__init__()
        self.net = mlp([obs_dim, *hidden_sizes, n_actions], activation, rng)

    def forward(self, obs, act):
        """obs [B, obs_dim], act [B] int64 -> log pi(act|obs) [B], entropy [B]."""
        logp_all = torch.log_softmax(self.net(obs), -1)
        logp = logp_all.gather(-1, act[:, None]).squeeze(-1)
        return logp, -(logp_all.exp() * logp_all).sum(-1)

    def dist(self, obs):
        """obs [B, obs_dim] -> log pi(.|obs) [B, n_actions], which `kl` compares."""
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


def get_action(policy, o, rng):
    """Sample one action in NumPy: for a single observation, calling a framework is all overhead.

    Args:
        policy: dict from `export_policy`: arrays `weights` [(W [in, out], b [out]), ...],
            `activation`, and for Box actions `log_std` [act_dim].
        o: [obs_dim], the observation.
        rng: numpy.random.Generator.

    Returns:
        [act_dim] float32 for Box actions, an int from 0 for Discrete ones.
    """
    x = np.asarray(o, dtype=np.float32)
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
    """One epoch of this rank's experience: paths, one after another."""

    def __init__(self, obs_dim, action_space, size):
        self.obs = np.zeros((size, obs_dim), dtype=np.float32)
        discrete = isinstance(action_space, Discrete)
        act_shape = () if discrete else (int(np.prod(action_space.shape)),)
        self.act = np.zeros((size, *act_shape), dtype=np.int64 if discrete else np.float32)
        self.rew = np.zeros(size, dtype=np.float32)
        self.ptr, self.ends = 0, []

    def store(self, o, a, r):
        """Add one step. The action is as sampled, not as clipped for the environment."""
        self.obs[self.ptr], self.act[self.ptr], self.rew[self.ptr] = o, a, r
        self.ptr += 1

    def finish_path(self, o2, terminated):
        """End a path: the episode is over, or is cut at the end of the epoch.

        Args:
            o2: array [obs_dim], the observation after the last step; a copy of it is kept.
            terminated: whether o2 is a terminal state, worth 0. A path that was cut or truncated
                would have gone on: V(o2) estimates the rest of its return.
        """
        self.ends.append((self.ptr - 1, np.array(o2, dtype=np.float32), terminated))

    def get(self):
        """Empty the buffer, which must be full.

        Returns:
            obs [N, obs_dim], act [N] or [N, act_dim], rew [N]; and of the P paths the index of the
            last step [P], and what `finish_path` was given: o2 [P, obs_dim], terminated [P].
        """
        last, o2, terminated = map(np.array, zip(*self.ends, strict=True))
        self.ptr, self.ends = 0, []
        return self.obs, self.act, self.rew, last, o2, terminated


def gae(rew, val, last, last_val, gamma, lam):
    """Advantages (Schulman et al. 2016, eq. 16) and rewards to go of paths, one after another.

        delta_t = r_t + gamma V(s_t+1) - V(s_t)
        A_t     = delta_t + gamma lam A_t+1
        R_t     = r_t + gamma R_t+1

    Args:
        rew, val: arrays [N], r_t and V(s_t).
        last, last_val: arrays [P], the index of each path's last step, and V of the observation
            after it: 0 if that is terminal.

    Returns:
        adv, ret: arrays [N] float64.
    """
    adv, ret = np.zeros(len(rew)), np.zeros(len(rew))
    rew, val = rew.tolist(), val.tolist()  # one by one, floats are faster than NumPy's scalars
    end_val = dict(zip(last.tolist(), last_val.tolist(), strict=True))
    for t in reversed(range(len(rew))):
        if t in end_val:
            next_adv, next_ret, next_val = 0.0, end_val[t], end_val[t]
        delta = rew[t] + gamma * next_val - val[t]
        adv[t] = next_adv = delta + gamma * lam * next_adv
        ret[t] = next_ret = rew[t] + gamma * next_ret
        next_val = val[t]
    return adv, ret


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
    """TRPO's objective, negated: -E[ratio A].

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
    """Gradient of y [] with respect to `params`, as one vector [D]; options of autograd.grad."""
    return torch.cat([g.reshape(-1) for g in torch.autograd.grad(y, params, **options)])


def fisher_product(grad_kl, params, x):
    """H x = grad(x . grad KL) [D], H the Hessian of the KL; grad_kl [D] with its graph, x [D]."""
    return flat_grad(grad_kl @ x, params, retain_graph=True)


def conjugate_gradient(Ax, b, iters):
    """Solve A x = b for a symmetric positive definite A (Hestenes and Stiefel 1952).

    Args:
        Ax: function from an array [D] to A times it. Here A is a matrix, and r = b - A x.
        b: array [D] float64.
        iters: maximum number of iterations; without rounding, x is exact after at most D of them,
            and more change nothing.

    Returns:
        x: array [D] float64.
    """
    x, r, p = np.zeros_like(b), b.copy(), b.copy()
    rr = r @ r
    for _ in range(iters):
        Ap = Ax(p)
        pAp = p @ Ap
        if not pAp > 0:  # x is exact (p = 0), or by rounding A is indefinite or NaN
            break
        x += rr / pAp * p
        r -= rr / pAp * Ap
        rr, rr_old = r @ r, rr
        p = r + rr / rr_old * p
    return x


def natural_step(fisher, g, delta, cg_iters):
    """The natural gradient step, to be subtracted: sqrt(2 delta / x^T H x) x, where H x = g.

    Args:
        fisher: function from an array x [D] to H x [D].
        g: array [D] float64, gradient of the loss.

    Returns:
        array [D] float64; zeros if x^T H x is not positive and finite, as where g = 0.
    """
    x = conjugate_gradient(fisher, g, cg_iters)
    xHx = x @ fisher(x)
    return np.sqrt(2 * delta / xHx) * x if 0 < xHx < np.inf else np.zeros_like(g)


# Training -----------------------------------------------------------------------------------------


def train(args):
    """Train a policy. Returns whether the run is finished: False if a signal stopped it."""
    # Set-up: bad input is refused before anything is written.
    device = mpi_pytorch.setup(args.device)
    env = run.make_env(args.env_id, args.env_kwargs, (Box, Discrete))
    env = run.NormalizedEnv(env, args.norm_obs, args.norm_rew, args.gamma)
    obs_dim, action_space = env.observation_space.shape[0], env.action_space
    local_steps_per_epoch = mpi.share("--steps-per-epoch", args.steps_per_epoch)
    minibatch_size = mpi.share("--minibatch-size", args.minibatch_size, args.steps_per_epoch)
    buf = GAEBuffer(obs_dim, action_space, local_steps_per_epoch)
    logger = run.start(args, __file__)

    # Networks and optimizers: all ranks start from the same parameters.
    rng = mpi.make_rng(args.seed, "weights")
    ac = actor_critic(obs_dim, action_space, args.hidden_sizes, args.activation, rng).to(device)
    mpi_pytorch.sync_params(ac)
    pi_params = list(ac.pi.parameters())
    vf_optimizer = mpi_pytorch.Adam(ac.v.parameters(), args.vf_lr)

    def values(obs):
        """V of observations: array [N, obs_dim] -> array [N]."""
        with torch.no_grad():
            return ac.v(torch.as_tensor(obs, device=device))[:, 0].cpu().numpy()

    @torch.no_grad()
    def losses(obs, act, adv, ret, logp_old, dist_old):
        """loss_pi, loss_v, the KL from `dist_old`, the entropy: floats."""
        logp, entropy = ac.pi(obs, act)
        loss_pi = compute_loss_pi(logp, logp_old, adv)
        loss_v, kl = compute_loss_v(ac.v(obs)[:, 0], ret), ac.pi.kl(dist_old, ac.pi.dist(obs))
        return [x.item() for x in (loss_pi, loss_v, kl, entropy.mean())]

    def fisher(grad_kl, x):
        """(H + damping_coeff I) x, averaged over all ranks; arrays x [D] float64 -> [D] float64."""
        x_t = torch.as_tensor(x, dtype=torch.float32, device=device)
        Hx = fisher_product(grad_kl, pi_params, x_t)
        return mpi.avg(Hx.cpu()) + args.damping_coeff * x

    def set_params(params):
        """Give the policy the parameters `params` [D]."""
        params = torch.as_tensor(params, dtype=torch.float32, device=device)
        nn.utils.vector_to_parameters(params, pi_params)

    def update(rng):
        """Improve policy and value function on the epoch's experience, and store what to log."""
        obs, act, rew, last, obs2, terminated = buf.get()
        rew = env.normalize_rewards(rew)
        val, last_val = np.split(values(np.concatenate([obs, obs2])), [len(obs)])
        adv, ret = gae(rew, val, last, np.where(terminated, 0, last_val), args.gamma, args.lam)
        mean, std = mpi.statistics(adv)
        adv, ret = np.float32((adv - mean) / (std + 1e-8)), np.float32(ret)
        obs, act, adv, ret = (torch.as_tensor(x, device=device) for x in (obs, act, adv, ret))
        with torch.no_grad():
            logp_old, _ = ac.pi(obs, act)
            dist_old = [x.clone() for x in ac.pi.dist(obs)]  # log_std is the parameter itself
        batch = obs, act, adv, ret, logp_old, dist_old
        loss_pi_old, loss_v_old, *_ = losses(*batch)

        # Policy: the natural gradient step. Gradient and Fisher products are averaged over ranks.
        # The KL and its gradient are 0 here, where the policy is the old one; its Hessian is not.
        logp, _ = ac.pi(obs, act)
        g = mpi.avg(flat_grad(compute_loss_pi(logp, logp_old, adv), pi_params).cpu())
        grad_kl = flat_grad(ac.pi.kl(dist_old, ac.pi.dist(obs)), pi_params, create_graph=True)
        step = natural_step(partial(fisher, grad_kl), g, args.delta, args.cg_iters)

        # Line search: the longest step tried that stays within the KL bound and does not make the
        # objective worse. Both are averaged, so that all ranks take the same step.
        params = nn.utils.parameters_to_vector(pi_params).detach().cpu().double().numpy()
        loss_pi_start = mpi.avg(loss_pi_old)
        for i in range(args.backtrack_iters):
            set_params(params - args.backtrack_coeff**i * step)
            loss_pi, _, kl, _ = mpi.avg(losses(*batch))
            if args.algo == "npg" or (kl <= args.delta and loss_pi <= loss_pi_start):
                break
        else:
            set_params(params)
            i = args.backtrack_iters

        # Value function: many steps, since its targets stay the same meanwhile.
        for part in minibatches(args.train_v_iters, minibatch_size, len(obs), rng):
            vf_optimizer.minimize(compute_loss_v(ac.v(obs[part])[:, 0], ret[part]))

        loss_pi, loss_v, kl, entropy = losses(*batch)
        logger.store(LossPi=loss_pi_old, DeltaLossPi=loss_pi - loss_pi_old, Entropy=entropy, KL=kl)
        logger.store(LossV=loss_v_old, DeltaLossV=loss_v - loss_v_old, VVals=val)
        logger.store(BacktrackIters=i)

    def export_policy():
        """The policy as `get_action` takes it and policy.npz holds it: a dict of NumPy arrays."""
        weights = mpi_pytorch.layers(ac.pi.net)
        arrays = {"weights": weights, "activation": args.activation, **env.policy_arrays()}
        if isinstance(action_space, Discrete):
            return arrays | {"distribution": "categorical"}
        arrays |= {"act_low": action_space.low, "act_high": action_space.high}
        return arrays | {"distribution": "gaussian", "log_std": mpi_pytorch.to_array(ac.pi.log_std)}

    # Resume: an epoch starts from a reset and draws random numbers of its own, so this is all there
    # is to restore.
    logger.setup_pytorch_saver(ac)
    networks = mpi_pytorch.State(ac=ac, vf_optimizer=vf_optimizer)
    state = {"networks": networks, "env": env}

    # Main loop: each epoch gathers experience with a fixed policy, then improves it.
    for epoch in range(logger.load_state(state), args.epochs):
        rng = mpi.make_rng(args.seed, "rollout", mpi.proc_id(), epoch)
        policy = export_policy()
        (o, _), ep_ret, ep_len = env.reset(seed=int(rng.integers(2**31))), 0.0, 0

        for t in logger.progress(local_steps_per_epoch):
            a = get_action(policy, o, rng)
            o2, r, terminated, truncated, _ = env.step(to_env(a, action_space))
            buf.store(o, a, r)
            o, ep_ret, ep_len = o2, ep_ret + r, ep_len + 1

            ended = terminated or truncated or ep_len == args.max_ep_len
            cut = t == local_steps_per_epoch - 1
            if ended or cut:
                buf.finish_path(o, terminated)
            if ended:
                logger.store(EpRet=ep_ret, EpLen=ep_len)
                (o, _), ep_ret, ep_len = env.reset(), 0.0, 0
            elif cut:
                logger.store(CutEpRet=ep_ret)

        env.update_statistics()  # for --norm-obs and --norm-rew
        update(rng)

        # Log and save.
        logger.log_tabular("Epoch", epoch)
        logger.log_tabular("TotalEnvInteracts", (epoch + 1) * args.steps_per_epoch)
        for key in ("EpRet", "VVals"):
            logger.log_tabular(key, with_min_and_max=True)
        keys = "CutEpRet", "EpLen", "LossPi", "LossV", "DeltaLossPi", "DeltaLossV", "Entropy", "KL"
        for key in [*keys, "BacktrackIters"]:
            logger.log_tabular(key, average_only=True)
        logger.log_tabular("Time", logger.time())
        logger.dump_tabular()

        stop = run.stop_requested()  # by a signal, to any rank
        if stop or logger.save_due():
            logger.save_state(state, export_policy())
        if stop:
            break
    return logger.close()


# Command line -------------------------------------------------------------------------------------

if __name__ == "__main__":
    run.main(train, Args)
