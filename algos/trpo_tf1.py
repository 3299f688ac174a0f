"""Trust Region Policy Optimization (Schulman et al. 2015, arXiv:1502.05477).

    python algos/trpo_tf1.py --env-id CartPole-v1
    mpirun -np 4 python algos/trpo_tf1.py --env-id Hopper-v4

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

Diff me against vpg_tf1.py: a step measured in KL instead of one measured in parameters.
Diff me against trpo_torch.py: the same algorithm in PyTorch.
"""

import sys
from dataclasses import field
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))  # find common/ from any directory

import numpy as np
from gymnasium.spaces import Box, Discrete
from pydantic.dataclasses import dataclass

from common import mpi, mpi_tf1, run
from common.args import JsonDict, NonNegFloat, NonNegInt, PosFloat, PosInt, Sizes, Unit

# isort: split
import tensorflow.compat.v1 as tf  # mpi_tf1 has loaded it, quietly and in graph mode

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


class MLP:
    """A multilayer perceptron: [B, sizes[0]] -> [B, sizes[-1]], no activation after the last layer.

    Weights and biases are uniform in +-1 / sqrt(fan-in), as in PyTorch, drawn with NumPy:
    the script in the other framework starts from the same numbers.
    """

    def __init__(self, sizes, activation, rng):
        self.activation = {"tanh": tf.tanh, "relu": tf.nn.relu}[activation]
        self.layers = []
        for i, (fan_in, fan_out) in enumerate(pairwise(sizes)):
            bound = fan_in**-0.5
            weight = np.float32(rng.uniform(-bound, bound, (fan_in, fan_out)))
            bias = np.float32(rng.uniform(-bound, bound, fan_out))
            weight = tf.get_variable(f"weight_{i}", initializer=weight)
            self.layers.append((weight, tf.get_variable(f"bias_{i}", initializer=bias)))

    def __call__(self, x):
        *hidden, (W_out, b_out) = self.layers
        for W, b in hidden:
            x = self.activation(x @ W + b)
        return x @ W_out + b_out


class GaussianActor:
    """pi(a|s) = Normal(mu(s), exp(log_std)), for Box actions; log_std does not depend on s."""

    def __init__(self, obs_dim, act_dim, hidden_sizes, activation, rng):
        self.net = MLP([obs_dim, *hidden_sizes, act_dim], activation, rng)
        self.log_std = tf.get_variable("log_std", initializer=np.full(act_dim, -0.5, np.float32))

    def __call__(self, obs, act):
        """obs [B, obs_dim], act [B, act_dim] -> log pi(act|obs) [B], entropy [].

        The entropy is summed over action dimensions; Spinning Up's PyTorch scripts log the mean.
        """
        mu = self.net(obs)
        z = (act - mu) * tf.exp(-self.log_std)
        logp = tf.reduce_sum(-0.5 * z**2 - self.log_std - 0.5 * np.log(2 * np.pi), -1)
        return logp, tf.reduce_sum(self.log_std + 0.5 * np.log(2 * np.pi * np.e))

    def dist(self, obs):
        """obs [B, obs_dim] -> mu [B, act_dim], log_std [act_dim], which `kl` compares."""
        return self.net(obs), tf.identity(self.log_std)

    def kl(self, old, new):
        """Two results of `dist` -> mean KL(old || new) []."""
        (mu_old, log_std_old), (mu, log_std) = old, new
        z = (mu_old - mu) * tf.exp(-log_std)
        var_ratio = tf.exp(2 * (log_std_old - log_std))
        kl = tf.reduce_sum(log_std - log_std_old + 0.5 * (z**2 + var_ratio - 1), -1)
        return tf.reduce_mean(kl)


class CategoricalActor:
    """pi(a|s) = softmax(logits(s))[a], for Discrete actions."""

    def __init__(self, obs_dim, n_actions, hidden_sizes, activation, rng):
        self.net = MLP([obs_dim, *hidden_sizes, n_actions], activation, rng)

    def __call__(self, obs, act):
        """obs [B, obs_dim], act [B] int64 -> log pi(act|obs) [B], entropy [B]."""
        logp_all = tf.nn.log_softmax(self.net(obs), -1)
        logp = tf.gather(logp_all, act, batch_dims=1)
        return logp, -tf.reduce_sum(tf.exp(logp_all) * logp_all, -1)

    def dist(self, obs):
        """obs [B, obs_dim] -> log pi(.|obs) [B, n_actions], which `kl` compares."""
        return (tf.nn.log_softmax(self.net(obs), -1),)

    def kl(self, old, new):
        """Two results of `dist` -> mean KL(old || new) []."""
        (logp_old,), (logp,) = old, new
        return tf.reduce_mean(tf.reduce_sum(tf.exp(logp_old) * (logp_old - logp), -1))


def actor_critic(obs_dim, space, hidden_sizes, activation, rng):
    """The policy `pi` and the value function `v` [B, obs_dim] -> [B, 1], which share nothing."""
    with tf.variable_scope("pi"):
        if isinstance(space, Discrete):
            pi = CategoricalActor(obs_dim, int(space.n), hidden_sizes, activation, rng)
        else:
            pi = GaussianActor(obs_dim, int(np.prod(space.shape)), hidden_sizes, activation, rng)
    with tf.variable_scope("v"):
        v = MLP([obs_dim, *hidden_sizes, 1], activation, rng)
    return SimpleNamespace(pi=pi, v=v)


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
    ratio = tf.exp(logp - logp_old)
    return -tf.reduce_mean(ratio * adv)


def compute_loss_v(v, ret):
    """Mean squared error of the values: E[(V(s) - R)^2]; v, ret [B] -> []."""
    return tf.reduce_mean((v - ret) ** 2)


# Natural gradient ---------------------------------------------------------------------------------


def flat_grad(y, params):
    """Gradient of y [] with respect to `params`, as one vector [D]."""
    return mpi_tf1.flat_concat(tf.gradients(y, params))


def fisher_product(grad_kl, params, x):
    """H x = grad(x . grad KL) [D], H the Hessian of the KL; grad_kl [D], x [D]."""
    return flat_grad(tf.reduce_sum(grad_kl * x), params)


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
    sess = mpi_tf1.setup()
    env = run.make_env(args.env_id, args.env_kwargs, (Box, Discrete))
    env = run.NormalizedEnv(env, args.norm_obs, args.norm_rew, args.gamma)
    obs_dim, action_space = env.observation_space.shape[0], env.action_space
    local_steps_per_epoch = mpi.share("--steps-per-epoch", args.steps_per_epoch)
    minibatch_size = mpi.share("--minibatch-size", args.minibatch_size, args.steps_per_epoch)
    buf = GAEBuffer(obs_dim, action_space, local_steps_per_epoch)
    logger = run.start(args, __file__)

    # Networks and optimizers: all ranks start from the same parameters.
    rng = mpi.make_rng(args.seed, "weights")
    ac = actor_critic(obs_dim, action_space, args.hidden_sizes, args.activation, rng)
    pi_vars, v_vars = tf.trainable_variables("pi/"), tf.trainable_variables("v/")
    vf_optimizer = mpi_tf1.Adam(args.vf_lr, name="vf_optimizer")

    # The graph: losses on the experience in the buffer, and the steps that lower them.
    obs_ph = tf.placeholder(tf.float32, [None, obs_dim])
    act_ph = tf.placeholder(buf.act.dtype, [None, *buf.act.shape[1:]])
    adv_ph, ret_ph, logp_old_ph = (tf.placeholder(tf.float32, [None]) for _ in range(3))
    logp, entropy_op = ac.pi(obs_ph, act_ph)
    v_obs = ac.v(obs_ph)[:, 0]
    dist = ac.pi.dist(obs_ph)
    dist_old_ph = [tf.placeholder(tf.float32, x.shape) for x in dist]
    loss_pi_op = compute_loss_pi(logp, logp_old_ph, adv_ph)
    loss_v_op, kl_op = compute_loss_v(v_obs, ret_ph), ac.pi.kl(dist_old_ph, dist)
    losses = loss_pi_op, loss_v_op, kl_op, tf.reduce_mean(entropy_op)
    params_op, params_ph = mpi_tf1.flat_concat(pi_vars), tf.placeholder(tf.float32, [None])
    set_params_op = mpi_tf1.assign_params_from_flat(params_ph, pi_vars)
    grad_op, x_ph = flat_grad(loss_pi_op, pi_vars), tf.placeholder(tf.float32, [None])
    fisher_op = fisher_product(flat_grad(kl_op, pi_vars), pi_vars, x_ph)
    train_v = vf_optimizer.minimize(loss_v_op, v_vars)
    sess.run(tf.global_variables_initializer())
    sess.run(mpi_tf1.sync_all_params())

    def values(obs):
        """V of observations: array [N, obs_dim] -> array [N]."""
        return sess.run(v_obs, {obs_ph: obs})

    def fisher(batch, x):
        """(H + damping_coeff I) x, averaged over all ranks; arrays x [D] float64 -> [D] float64."""
        Hx = sess.run(fisher_op, {**batch, x_ph: x})
        return mpi.avg(Hx) + args.damping_coeff * x

    def set_params(params):
        """Give the policy the parameters `params` [D]."""
        sess.run(set_params_op, {params_ph: params})

    def update(rng):
        """Improve policy and value function on the epoch's experience, and store what to log."""
        obs, act, rew, last, obs2, terminated = buf.get()
        rew = env.normalize_rewards(rew)
        val, last_val = np.split(values(np.concatenate([obs, obs2])), [len(obs)])
        adv, ret = gae(rew, val, last, np.where(terminated, 0, last_val), args.gamma, args.lam)
        mean, std = mpi.statistics(adv)
        adv, ret = np.float32((adv - mean) / (std + 1e-8)), np.float32(ret)
        batch = {obs_ph: obs, act_ph: act, adv_ph: adv, ret_ph: ret}
        batch |= zip([logp_old_ph, *dist_old_ph], sess.run((logp, *dist), batch), strict=True)
        loss_pi_old, loss_v_old, *_ = sess.run(losses, batch)

        # Policy: the natural gradient step. Gradient and Fisher products are averaged over ranks.
        # The KL and its gradient are 0 here, where the policy is the old one; its Hessian is not.
        g = mpi.avg(sess.run(grad_op, batch))
        step = natural_step(partial(fisher, batch), g, args.delta, args.cg_iters)

        # Line search: the longest step tried that stays within the KL bound and does not make the
        # objective worse. Both are averaged, so that all ranks take the same step.
        params = sess.run(params_op).astype(np.float64)
        loss_pi_start = mpi.avg(loss_pi_old)
        for i in range(args.backtrack_iters):
            set_params(params - args.backtrack_coeff**i * step)
            loss_pi, _, kl, _ = mpi.avg(sess.run(losses, batch))
            if args.algo == "npg" or (kl <= args.delta and loss_pi <= loss_pi_start):
                break
        else:
            set_params(params)
            i = args.backtrack_iters

        # Value function: many steps, since its targets stay the same meanwhile.
        for part in minibatches(args.train_v_iters, minibatch_size, len(obs), rng):
            sess.run(train_v, {obs_ph: obs[part], ret_ph: ret[part]})

        loss_pi, loss_v, kl, entropy = sess.run(losses, batch)
        logger.store(LossPi=loss_pi_old, DeltaLossPi=loss_pi - loss_pi_old, Entropy=entropy, KL=kl)
        logger.store(LossV=loss_v_old, DeltaLossV=loss_v - loss_v_old, VVals=val)
        logger.store(BacktrackIters=i)

    def export_policy():
        """The policy as `get_action` takes it and policy.npz holds it: a dict of NumPy arrays."""
        weights = sess.run(ac.pi.net.layers)
        arrays = {"weights": weights, "activation": args.activation, **env.policy_arrays()}
        if isinstance(action_space, Discrete):
            return arrays | {"distribution": "categorical"}
        arrays |= {"act_low": action_space.low, "act_high": action_space.high}
        return arrays | {"distribution": "gaussian", "log_std": sess.run(ac.pi.log_std)}

    # Resume: an epoch starts from a reset and draws random numbers of its own, so this is all there
    # is to restore.
    logger.setup_tf_saver(sess, {"obs": obs_ph}, {"pi": ac.pi.net(obs_ph), "v": v_obs})
    state = {"networks": mpi_tf1.State(sess), "env": env}

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
