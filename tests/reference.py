"""The six algorithms once more, in float64, for all ranks at once: what a run has to do.

Made from the papers, torch.optim.Adam and torch.distributions. All that it shares with the scripts
is `make_rng` and the order in which random numbers are drawn.
"""

from collections import defaultdict
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import torch
from gymnasium.spaces import Discrete
from recorder import Recorder
from torch import distributions
from torch.autograd import grad

from common.mpi import make_rng

distributions.Distribution.set_default_validate_args(False)  # it takes half of the time


def tensor(x):
    return torch.tensor(np.asarray(x), dtype=torch.float64)


def first_weights(rng, *sizes):
    """[W [in, out], b [out], W, ...] of a new network, rounded as float32."""
    bounds = [(n_in**-0.5, shape) for n_in, n in pairwise(sizes) for shape in ((n_in, n), n)]
    drawn = [tensor(np.float32(rng.uniform(-bound, bound, shape))) for bound, shape in bounds]
    return [x.requires_grad_() for x in drawn]


def mlp(params, x, activation):
    """x [B, in] -> [B, out]."""
    for W, b in zip(params[:-2:2], params[1:-2:2], strict=True):
        x = getattr(torch, activation)(x @ W + b)
    return x @ params[-2] + params[-1]


def minimize(optimizer, loss):
    """One gradient step."""
    params = optimizer.param_groups[0]["params"]
    for p, g in zip(params, grad(loss, params), strict=True):
        p.grad = g
    optimizer.step()


def flat(xs):
    return torch.cat([x.ravel() for x in xs])


class Rank:
    """A rank's environment and random numbers, and the columns that its episodes make."""

    def __init__(self, args, rank):
        self.args, self.rank, self.events = args, rank, []
        self.env = Recorder(**args.env_kwargs, events=self.events)

    def begin(self, epoch, stats):
        self.rng, self.stats = make_rng(self.args.seed, "rollout", self.rank, epoch), stats
        self.o, _ = self.env.reset(seed=int(self.rng.integers(2**31)))
        self.seen = [self.o]  # all observations of the epoch
        self.ret = self.len = 0

    def step(self, a, last):
        """Returns (o, r, o2, terminated, whether the path ends)."""
        o, self.len = self.o, self.len + 1
        self.o, r, terminated, truncated, _ = self.env.step(a)
        o2, self.ret = self.o, self.ret + r
        self.seen.append(o2)
        ended = terminated or truncated or self.len == self.args.max_ep_len
        if ended:
            self.stats["EpRet"].append(self.ret)
            self.stats["EpLen"].append(self.len)
            self.o, _ = self.env.reset()
            self.seen.append(self.o)
            self.ret = self.len = 0
        elif last:
            self.stats["CutEpRet"].append(self.ret)
        return o, r, o2, terminated, ended or last

    def test(self, epoch, i, act):
        """Test episode i of an epoch."""
        o, _ = self.env.reset(seed=int(make_rng(self.args.seed, "test", epoch, i).integers(2**31)))
        ep_ret, ep_len, ended = 0.0, 0, False
        while not ended and ep_len < self.args.max_ep_len:
            o, r, *ends, _ = self.env.step(act(o))
            ep_ret, ep_len, ended = ep_ret + r, ep_len + 1, any(ends)
        self.stats["TestEpRet"].append(ep_ret)
        self.stats["TestEpLen"].append(ep_len)


def run(algo, args, ranks):
    """A whole run.

    Args:
        args: a script's `Args`, for Recorder-v0.

    Returns:
        namespace: `events` of each rank; lists with an item per epoch: `stats`, {column: numbers},
        `policies`, the arrays of the policy's network, `marks`, the number of rank 0's events so
        far; and of the end `nets`, {name: function of tensors}, and `act`, a function from an
        observation to the action without noise.
    """
    family = on_policy if algo in ("vpg", "trpo", "ppo") else off_policy
    workers = [Rank(args, rank) for rank in range(ranks)]
    done = SimpleNamespace(events=[w.events for w in workers], stats=[], policies=[], marks=[])
    for epoch, (stats, pi, done.nets, done.act) in enumerate(family(algo, args, workers), 1):
        stats["Epoch"], stats["TotalEnvInteracts"] = [epoch - 1], [epoch * args.steps_per_epoch]
        done.stats.append(stats)
        done.policies.append([p.detach().numpy().copy() for p in pi])
        done.marks.append(len(workers[0].events))
    return done


# On-policy ----------------------------------------------------------------------------------------


class Statistics:
    """Of the observations and of the discounted returns so far, over all ranks, epoch by epoch."""

    def __init__(self, args):
        self.args, self.obs, self.rets = args, np.zeros((0, 3)), np.zeros(0)
        self.mean, self.std, self.ret_std = 0.0, 1.0, 1.0

    def update(self, obs, rew, cut):
        """All obs of an epoch [M, 3]; of its steps rew [N] and cut [N], whether a path ends."""
        ret, rets = 0.0, []
        for r, end in zip(rew, cut, strict=True):
            rets.append(r + self.args.gamma * ret)
            ret = 0.0 if end else rets[-1]
        self.obs, self.rets = np.vstack([self.obs, obs]), np.append(self.rets, rets)
        if getattr(self.args, "norm_obs", False):
            self.mean, self.std = self.obs.mean(0), np.sqrt(self.obs.var(0) + 1e-8)
        if getattr(self.args, "norm_rew", False):
            self.ret_std = np.sqrt(self.rets.var() + 1e-8)

    def normalize(self, obs):
        """As float64 tensor; the policy acts on it."""
        scaled = (np.asarray(obs) - self.mean) / self.std
        return tensor(scaled.clip(-10, 10) if getattr(self.args, "norm_obs", False) else scaled)


def on_policy(algo, args, workers):
    """Yields an epoch's numbers by column, the policy's network, and `nets` and `act` of `run`."""
    n_steps, space = args.steps_per_epoch // len(workers), workers[0].env.action_space
    discrete = isinstance(space, Discrete)
    n_act = int(space.n) if discrete else space.shape[0]
    rng = make_rng(args.seed, "weights")
    pi = first_weights(rng, 3, *args.hidden_sizes, n_act)
    log_std = torch.full((n_act,), -0.5, dtype=torch.float64, requires_grad=True)
    v = first_weights(rng, 3, *args.hidden_sizes, 1)
    pi_params, known = pi + ([] if discrete else [log_std]), Statistics(args)
    pi_optimizer = torch.optim.Adam(pi_params, getattr(args, "pi_lr", 0.0))
    v_optimizer = torch.optim.Adam(v, args.vf_lr)

    def dist(x):
        out = mlp(pi, x, args.activation)
        if discrete:
            return distributions.Categorical(logits=out)
        return distributions.Independent(distributions.Normal(out, log_std.exp()), 1)

    def V(x):
        return mlp(v, x, args.activation)[..., 0]

    def act(o, rng=None):
        """The action as sampled, and as the environment gets it."""
        a = mlp(pi, known.normalize(o), args.activation).detach().numpy()
        if discrete:
            a = int(np.argmax(a + (rng.gumbel(size=n_act) if rng else 0)))
            return a, a + space.start
        std = log_std.exp().detach().numpy()
        a = a + (std * rng.standard_normal(n_act, dtype=np.float32) if rng else 0)
        return a, np.float32(a).clip(space.low, space.high)

    def parts(iters):
        """Indices of the samples of each gradient step, all ranks together."""
        size = getattr(args, "minibatch_size", 0) // len(workers)
        if size == 0:
            return [slice(None)] * iters
        passes = -(-iters * size // n_steps)  # the scripts draw one more if they divide
        orders = [
            np.concatenate([w.rng.permutation(n_steps) for _ in range(passes)]) for w in workers
        ]
        chosen = [order[: iters * size].reshape(iters, size) for order in orders]
        return np.concatenate([n_steps * k + c for k, c in enumerate(chosen)], axis=1)

    def losses(batch, part=slice(None)):
        """loss_pi, KL, share of ratios that are clipped."""
        x, a, adv, _, logp_old, old = batch
        logp, A = dist(x[part]).log_prob(a[part]), adv[part]
        ratio, eps = torch.exp(logp - logp_old[part]), getattr(args, "clip_ratio", np.inf)
        clip_frac = ((ratio - 1).abs() > eps).double().mean().item()
        kl = (ratio - 1 - ratio.log()).mean()
        if algo == "vpg":
            return -(logp * A).mean(), kl, clip_frac
        if algo == "ppo":
            return -torch.min(ratio * A, ratio.clamp(1 - eps, 1 + eps) * A).mean(), kl, clip_frac
        return -(ratio * A).mean(), distributions.kl_divergence(old, dist(x)).mean(), clip_frac

    for epoch in range(args.epochs):
        stats, columns = defaultdict(list), []
        for w in workers:
            w.begin(epoch, stats)
            for t in range(n_steps):
                a, to_env = act(w.o, w.rng)
                o, r, o2, terminated, cut = w.step(to_env, t == n_steps - 1)
                columns.append((o, a, r, o2, terminated, cut))
        obs, actions, rew, obs2, terminated, cut = map(np.array, zip(*columns, strict=True))

        # Advantages and returns, ranks one after the other: each ends with a cut.
        x, x2 = known.normalize(obs), known.normalize(obs2)
        known.update(np.concatenate([w.seen for w in workers]), rew, cut)
        scaled = (rew / known.ret_std).clip(-10, 10) if getattr(args, "norm_rew", 0) else rew
        val, val2 = V(x).detach().numpy(), V(x2).detach().numpy() * ~terminated
        adv, ret = scaled + args.gamma * val2 - val, scaled + args.gamma * val2 * cut
        for t in reversed(range(len(rew) - 1)):
            adv[t] += args.gamma * args.lam * adv[t + 1] * ~cut[t]
            ret[t] += args.gamma * ret[t + 1] * ~cut[t]
        stats["VVals"] = val
        adv, ret, a = tensor((adv - adv.mean()) / (adv.std() + 1e-8)), tensor(ret), tensor(actions)
        with torch.no_grad():
            old = dist(x)
            batch = x, a, adv, ret, old.log_prob(a), old

        # The update.
        loss_pi, loss_v = losses(batch)[0].item(), ((V(x) - ret) ** 2).mean().item()
        if getattr(args, "anneal_lr", False):
            pi_optimizer.param_groups[0]["lr"] = args.pi_lr * (1 - epoch / args.epochs)
        if algo == "vpg":
            minimize(pi_optimizer, losses(batch)[0])
        elif algo == "trpo":
            stats["BacktrackIters"] = [trust_region_step(args, pi_params, losses, batch)]
        else:
            stats["StopIter"] = [0]
            for part in parts(args.train_pi_iters):
                loss, kl, _ = losses(batch, part)
                if kl > 1.5 * args.target_kl:
                    break
                minimize(pi_optimizer, loss)
                stats["StopIter"][0] += 1
        for part in parts(args.train_v_iters):
            minimize(v_optimizer, ((V(x[part]) - ret[part]) ** 2).mean())

        loss_pi_new, kl, clip_frac = losses(batch)
        loss_v_new = ((V(x) - ret) ** 2).mean().item()
        stats |= {"LossPi": [loss_pi], "DeltaLossPi": [loss_pi_new.item() - loss_pi]}
        stats |= {"KL": [kl.item()], "Entropy": dist(x).entropy().detach().numpy()}
        stats |= {"LossV": [loss_v], "DeltaLossV": [loss_v_new - loss_v]}
        if algo == "ppo":
            stats["ClipFrac"] = [clip_frac]
        nets = {"pi": lambda x: mlp(pi, x, args.activation), "v": V}
        yield stats, pi, nets, lambda o: act(o)[1]


def trust_region_step(args, params, losses, batch):
    """TRPO's step; returns how many times the line search went back."""
    loss, kl, _ = losses(batch)
    g, grad_kl = flat(grad(loss, params)), flat(grad(kl, params, create_graph=True))

    def fisher(x):
        return flat(grad(grad_kl @ x, params, retain_graph=True)) + args.damping_coeff * x

    x, r = torch.zeros_like(g), g
    p = r
    for _ in range(args.cg_iters):
        Ap = fisher(p)
        alpha = r @ r / (p @ Ap)
        x, r_new = x + alpha * p, r - alpha * Ap
        p, r = r_new + r_new @ r_new / (r @ r) * p, r_new
    step, start = x * torch.sqrt(2 * args.delta / (x @ fisher(x))), flat(params).detach()
    for i in range(args.backtrack_iters + 1):
        size = args.backtrack_coeff**i if i < args.backtrack_iters else 0
        torch.nn.utils.vector_to_parameters(start - size * step, params)
        new_loss, kl, _ = losses(batch)
        if args.algo == "npg" or (kl <= args.delta and new_loss <= loss) or size == 0:
            return i


# Off-policy ---------------------------------------------------------------------------------------


def off_policy(algo, args, workers):
    """Yields as `on_policy` does."""
    n_steps, space = args.steps_per_epoch // len(workers), workers[0].env.action_space
    n_act, sac, rng = space.shape[0], algo == "sac", make_rng(args.seed, "weights")
    pi = first_weights(rng, 3, *args.hidden_sizes, n_act * (2 if sac else 1))
    qs = [first_weights(rng, 3 + n_act, *args.hidden_sizes, 1) for _ in range(2 - (algo == "ddpg"))]
    q_params, copy = [x for q in qs for x in q], lambda xs: [x.detach().clone() for x in xs]
    pi_targ, qs_targ = copy(pi), [copy(q) for q in qs]
    q_targ_params = [x for q in qs_targ for x in q]
    log_alpha, auto = tensor(0.0).requires_grad_(), sac and args.alpha == "auto"
    pi_lr, q_lr = (args.lr, args.lr) if sac else (args.pi_lr, args.q_lr)
    q_optimizer = torch.optim.Adam(q_params, q_lr)
    pi_optimizer = torch.optim.Adam(pi, pi_lr)
    alpha_optimizer = torch.optim.Adam([log_alpha], pi_lr)
    size, steps = args.replay_size // len(workers), 0
    buffers = [[None] * size for _ in workers]

    def policy(params, x, noise):
        """Action in [-1, 1], and log pi of SAC's; without noise if that is 0."""
        out = mlp(params, x, args.activation)
        if not sac:
            return torch.tanh(out), tensor(0.0)
        mu, log_std = out.chunk(2, -1)
        normal = distributions.Normal(mu, log_std.clamp(-20, 2).exp())
        u = mu + normal.stddev * noise
        return torch.tanh(u), (normal.log_prob(u) - torch.log(1 - torch.tanh(u) ** 2)).sum(-1)

    def Q(params, obs, a):
        return mlp(params, torch.cat([obs, a], -1), args.activation)[:, 0]

    def scaled(a):
        return np.float32(space.low + (a + 1) / 2 * (space.high - space.low)).clip(
            space.low, space.high
        )

    def act(o, noise):
        with torch.no_grad():
            a = policy(pi, tensor(o), tensor(noise))[0].numpy()
        return a if sac else (a + args.act_noise * noise).clip(-1, 1)

    def best(o):
        return scaled(act(o, np.zeros(n_act)))

    def update(batch, noise, stats):
        nonlocal steps
        obs, a, rew, obs2, done = map(tensor, batch)
        price = log_alpha.exp().item() if auto else args.alpha if sac else 0
        with torch.no_grad():
            a2, logp2 = policy(pi if sac else pi_targ, obs2, noise[0])
            if algo == "td3":
                clip = args.noise_clip
                a2 = (a2 + (args.target_noise * noise[0]).clamp(-clip, clip)).clamp(-1, 1)
            smaller = torch.stack([Q(q, obs2, a2) for q in qs_targ]).min(0).values
            backup = rew + args.gamma * (1 - done) * (smaller - price * logp2)
        values = [Q(q, obs, a) for q in qs]
        loss_q = sum(((value - backup) ** 2).mean() for value in values)
        for name, value in zip(
            ("QVals",) if algo == "ddpg" else ("Q1Vals", "Q2Vals"), values, strict=True
        ):
            stats[name] += value.tolist()
        stats["LossQ"].append(loss_q.item())
        minimize(q_optimizer, loss_q)
        steps += 1
        if algo == "td3" and steps % args.policy_delay:
            return
        a, logp = policy(pi, obs, noise[-1])
        values = torch.stack([Q(q, obs, a) for q in qs])
        loss_pi = (price * logp - (values.min(0).values if sac else values[0])).mean()
        stats["LossPi"].append(loss_pi.item())
        if sac:
            stats["LogPi"] += logp.tolist()
        minimize(pi_optimizer, loss_pi)
        if auto:
            minimize(alpha_optimizer, -log_alpha * (logp.detach() - n_act).mean())
        with torch.no_grad():
            for p, targ in zip(pi + q_params, pi_targ + q_targ_params, strict=True):
                targ.copy_(args.polyak * targ + (1 - args.polyak) * p)

    for epoch in range(args.epochs):
        stats = defaultdict(list)
        for w in workers:
            w.begin(epoch, stats)
        for t in range(1, n_steps + 1):
            count = epoch * n_steps + t  # steps of each rank, this one included
            for w, buffer in zip(workers, buffers, strict=True):
                if (count - 1) * len(workers) < args.start_steps:
                    a = w.rng.uniform(-1, 1, n_act)
                else:
                    a = act(w.o, w.rng.standard_normal(n_act, dtype=np.float32))
                o, r, o2, terminated, _ = w.step(scaled(a), t == n_steps)
                buffer[(count - 1) % size] = (o, a, r, o2, float(terminated))
            if count * len(workers) < args.update_after or count % args.update_every:
                continue
            share, n = args.batch_size // len(workers), args.update_every * len(workers)
            noises, batches = [], []
            for w, buffer in zip(workers, buffers, strict=True):
                shape = {"ddpg": (1, 0, n_act), "td3": (1, share, n_act), "sac": (2, share, n_act)}[
                    algo
                ]
                noises.append(w.rng.standard_normal((n, *shape), dtype=np.float32))
                rows = w.rng.integers(min(count, size), size=(n, share))
                batches.append([[buffer[i] for i in row] for row in rows])
            for i in range(n):
                batch = [row for b in batches for row in b[i]]
                noise = tensor(np.concatenate([x[i] for x in noises], axis=-2))
                update(map(np.array, zip(*batch, strict=True)), noise, stats)
        if sac:
            stats["Alpha"] = [log_alpha.exp().item() if auto else args.alpha]
        for i in range(args.num_test_episodes):
            workers[i % len(workers)].test(epoch, i, best)
        nets = {"mu" if sac else "pi": lambda x: policy(pi, x, 0.0)[0]}
        names = ("q",) if algo == "ddpg" else ("q1", "q2")
        nets |= {name: lambda x, a, q=q: Q(q, x, a) for name, q in zip(names, qs, strict=True)}
        yield stats, pi, nets, best
