"""Vanilla Policy Gradient (Williams 1992; Sutton et al. 2000), with a learned baseline.

    python algos/vpg_tf1.py --env-id CartPole-v1
    mpirun -np 4 python algos/vpg_tf1.py --env-id Hopper-v4

From one batch of experience, take one step up the gradient of the expected return, which makes
actions likelier that turned out better than expected:

    grad J(pi) = E[ grad log pi(a|s) A ]

The advantage A is GAE (Schulman et al. 2016, arXiv:1506.02438, eq. 16), and V regresses on the
discounted rewards to go:

    delta_t = r_t + gamma V(s_t+1) - V(s_t)        A_t = delta_t + gamma lam A_t+1

Diff me against ppo_tf1.py and trpo_tf1.py: what it takes to go further with one batch.
Diff me against vpg_torch.py: the same algorithm in PyTorch.

From common/: the command line and checks (args, cli), the run directory, table and checkpoints
(logger), ranks and their random numbers (mpi_tools), Adam averaged over ranks (mpi_tf1).
"""

import sys
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))  # find common/ from any directory

import numpy as np
from gymnasium.spaces import Box, Discrete

from common.args import JsonDict, NonNegInt, PosFloat, PosInt, Sizes, Unit
from common.cli import experiment, main, make_env
from common.logger import start_run
from common.mpi_tf1 import (
    MpiAdamOptimizer,
    load_variables,
    save_model,
    setup_tf1_for_mpi,
    sync_all_params,
)
from common.mpi_tools import (
    RunningMeanStd,
    make_rng,
    mpi_statistics_scalar,
    proc_id,
    rank_share,
)

# isort: split
import tensorflow.compat.v1 as tf  # common.mpi_tf1 has loaded it, quietly and in graph mode

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
    # VPG
    pi_lr: PosFloat = 3e-4  # learning rate of the policy
    anneal_lr: bool = False  # lower pi_lr linearly, to 0 at the end of the run
    vf_lr: PosFloat = 1e-3  # learning rate of the value function
    train_v_iters: NonNegInt = 80  # value function steps per epoch
    lam: Unit = 0.97  # lambda of GAE


# Networks -----------------------------------------------------------------------------------------


class MLP:
    """A multilayer perceptron: [B, sizes[0]] -> [B, sizes[-1]], no activation after the last layer.

    Weights and biases are uniform within 1 / sqrt(fan-in), as PyTorch has it, drawn with NumPy:
    the PyTorch script starts from the same numbers.
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

    def outputs(self, obs):
        """What the SavedModel gives for obs [B, obs_dim]."""
        return {"mu": self.net(obs), "log_std": tf.identity(self.log_std)}


class CategoricalActor:
    """pi(a|s) = softmax(logits(s))[a], for Discrete actions."""

    def __init__(self, obs_dim, act_dim, hidden_sizes, activation, rng):
        self.net = MLP([obs_dim, *hidden_sizes, act_dim], activation, rng)

    def __call__(self, obs, act):
        """obs [B, obs_dim], act [B] int64 -> log pi(act|obs) [B], entropy [B]."""
        logp_all = tf.nn.log_softmax(self.net(obs), -1)
        logp = tf.gather(logp_all, act, batch_dims=1)
        return logp, -tf.reduce_sum(tf.exp(logp_all) * logp_all, -1)

    def outputs(self, obs):
        """What the SavedModel gives for obs [B, obs_dim]."""
        return {"logits": self.net(obs)}


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
    """A function whose gradient is the policy gradient, negated: -E[log pi(a|s) A].

    Args:
        logp, logp_old, adv: [B], log-probabilities under the new and the old policy; advantages.

    Returns:
        loss_pi []; approximate KL(old || new) [], E[(ratio - 1) - log ratio], which is never
        negative (http://joschu.net/blog/kl-approx.html).
    """
    log_ratio = logp - logp_old
    ratio = tf.exp(log_ratio)
    loss_pi = -tf.reduce_mean(logp * adv)
    kl = tf.reduce_mean(ratio - 1 - log_ratio)
    return loss_pi, kl


def compute_loss_v(v, ret):
    """Mean squared error of the values: E[(V(s) - R)^2]; v, ret [B] -> []."""
    return tf.reduce_mean((v - ret) ** 2)


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
    sess = setup_tf1_for_mpi()
    env = make_env(args.env_id, args.env_kwargs, (Box, Discrete))
    obs_dim, action_space = env.observation_space.shape[0], env.action_space
    local_steps_per_epoch = rank_share("--steps-per-epoch", args.steps_per_epoch)
    minibatch_size = rank_share("--minibatch-size", args.minibatch_size, args.steps_per_epoch)
    logger = start_run(args, __file__)
    if logger.finished:
        return logger.close()

    # Networks and optimizers: all ranks start from the same parameters.
    rng = make_rng(args.seed, "weights")
    ac = actor_critic(obs_dim, action_space, args.hidden_sizes, args.activation, rng)
    pi_vars, v_vars = tf.trainable_variables("pi/"), tf.trainable_variables("v/")
    pi_lr = tf.get_variable("pi_lr", initializer=np.float64(args.pi_lr), trainable=False)
    pi_optimizer = MpiAdamOptimizer(pi_lr, name="pi_optimizer")
    vf_optimizer = MpiAdamOptimizer(args.vf_lr, name="vf_optimizer")
    n_pi, n_v = (sum(p.shape.num_elements() for p in params) for params in (pi_vars, v_vars))
    logger.log(f"Number of parameters: pi {n_pi}, v {n_v}")
    norm = args.norm_obs, args.norm_rew
    buf = GAEBuffer(obs_dim, action_space, local_steps_per_epoch, args.gamma, args.lam, *norm)

    # The graph: losses on the experience in the buffer, and the steps that lower them.
    obs_ph = tf.placeholder(tf.float32, [None, obs_dim])
    act_ph = tf.placeholder(buf.act.dtype, [None, *buf.act.shape[1:]])
    adv_ph, ret_ph, logp_old_ph = (tf.placeholder(tf.float32, [None]) for _ in range(3))
    logp, entropy = ac.pi(obs_ph, act_ph)
    v_obs = ac.v(obs_ph)[:, 0]
    loss_pi_op, kl_op = compute_loss_pi(logp, logp_old_ph, adv_ph)
    loss_v_op = compute_loss_v(v_obs, ret_ph)
    losses = loss_pi_op, loss_v_op, kl_op, tf.reduce_mean(entropy)
    train_pi = pi_optimizer.minimize(loss_pi_op, pi_vars)
    train_v = vf_optimizer.minimize(loss_v_op, v_vars)
    outputs = {**ac.pi.outputs(obs_ph), "v": v_obs}
    sess.run(tf.global_variables_initializer())
    sess.run(sync_all_params())

    def values(obs):
        """V of observations: array [N, obs_dim] -> array [N]."""
        return sess.run(v_obs, {obs_ph: obs})

    def update(rng):
        """Improve policy and value function on the epoch's experience, and store what to log."""
        obs, act, adv, ret, val = buf.get(values)
        ret_std = buf.stats.std[-1] if args.norm_rew else 1  # the unit of V
        batch = {obs_ph: obs, act_ph: act, adv_ph: adv, ret_ph: ret}
        batch[logp_old_ph] = sess.run(logp, batch)
        loss_pi_old, loss_v_old, *_ = sess.run(losses, batch)

        # Policy: one step, since the gradient holds only for the policy that gathered the batch.
        if args.anneal_lr:
            pi_lr.load(args.pi_lr * (1 - logger.epoch / args.epochs), sess)
        sess.run(train_pi, batch)

        # Value function: many steps, since its targets do not depend on it.
        for part in minibatches(args.train_v_iters, minibatch_size, len(obs), rng):
            sess.run(train_v, {obs_ph: obs[part], ret_ph: ret[part]})

        loss_pi, loss_v, kl, entropy = sess.run(losses, batch)
        logger.store(LossPi=loss_pi_old, DeltaLossPi=loss_pi - loss_pi_old, Entropy=entropy, KL=kl)
        logger.store(LossV=loss_v_old * ret_std**2, DeltaLossV=(loss_v - loss_v_old) * ret_std**2)
        logger.store(VVals=val * ret_std)

    def export_policy():
        """The policy as `get_action` takes it and policy.npz holds it: a dict of NumPy arrays."""
        arrays = {"weights": sess.run(ac.pi.net.layers), "activation": args.activation}
        if args.norm_obs:
            mean, std = np.float32(buf.stats.mean), np.float32(buf.stats.std)
            arrays |= {"obs_mean": mean[:-1], "obs_std": std[:-1]}
        if isinstance(action_space, Discrete):
            return arrays | {"distribution": "categorical"}
        arrays |= {"act_low": action_space.low, "act_high": action_space.high}
        return arrays | {"distribution": "gaussian", "log_std": sess.run(ac.pi.log_std)}

    # Resume: an epoch starts from a reset and draws random numbers of its own, so this is all there
    # is to restore.
    stateful = {"ac": {p.op.name: p for p in pi_vars + v_vars}}
    stateful |= {"pi_optimizer": pi_optimizer.variables}
    stateful |= {"vf_optimizer": vf_optimizer.variables}
    if state := logger.load_state():
        load_variables(sess, stateful, state)
        buf.stats.load_state_dict(state["stats"])

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
        for key in ("Entropy", "KL"):
            logger.log_tabular(key, average_only=True)
        logger.log_tabular("Time", logger.time())
        logger.dump_tabular()

        if logger.save_due():
            save_model(sess, {"obs": obs_ph}, outputs, logger.output_dir)
            state = sess.run(stateful) | {"stats": buf.stats.state_dict()}
            logger.save_state(export_policy(), state, judged=policy)

    return logger.close()


# Command line -------------------------------------------------------------------------------------

if __name__ == "__main__":
    main(train, Args)
