"""Proximal Policy Optimization, PPO-Clip (Schulman et al. 2017, arXiv:1707.06347).

    python algos/ppo_tf1.py --env-id CartPole-v1
    mpirun -np 4 python algos/ppo_tf1.py --env-id Hopper-v4

From one batch of experience, take many steps up the clipped objective (eq. 7). It gains nothing
more once the ratio of an action's new to its old probability is above 1 + eps where the advantage A
is positive, or below 1 - eps where A is negative:

    ratio      = pi(a|s) / pi_old(a|s)
    J_clip(pi) = E[ min( ratio A, clip(ratio, 1 - eps, 1 + eps) A ) ]

The steps end early if the KL divergence grows too large: Spinning Up's addition to the paper.

The advantage A is estimated by generalized advantage estimation, GAE (Schulman et al. 2016,
arXiv:1506.02438, eq. 16), and V is fitted to R, the discounted rewards to go:

    delta_t = r_t + gamma V(s_t+1) - V(s_t)        A_t = delta_t + gamma lam A_t+1
                                                   R_t = r_t + gamma R_t+1

Diff me against vpg_tf1.py: the ratio, its clip, and many policy steps instead of one.
Diff me against ppo_torch.py: the same algorithm in PyTorch.
"""

import sys
from dataclasses import field
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))  # find common/ from any directory

import numpy as np
from gymnasium.spaces import Box, Discrete
from pydantic.dataclasses import dataclass

from common import mpi, mpi_tf1, run
from common.args import JsonDict, NonNegInt, PosFloat, PosInt, Sizes, Unit

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
    minibatch_size: NonNegInt = 0  # samples per gradient step, all ranks together; 0: whole epoch
    norm_obs: bool = False  # normalize observations by their mean and standard deviation so far
    norm_rew: bool = False  # divide rewards by the std of an episode's discounted sum so far
    # PPO
    clip_ratio: PosFloat = 0.2  # eps: a ratio gains nothing more beyond 1 - eps or 1 + eps
    pi_lr: PosFloat = 3e-4  # learning rate of the policy
    anneal_lr: bool = False  # lower pi_lr linearly, to 0 at the end of the run
    vf_lr: PosFloat = 1e-3  # learning rate of the value function
    train_pi_iters: NonNegInt = 80  # maximum number of policy steps per epoch
    train_v_iters: NonNegInt = 80  # value function steps per epoch
    lam: Unit = 0.97  # lambda of GAE
    target_kl: PosFloat = 0.01  # policy steps end at 1.5 times this KL divergence


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


class CategoricalActor:
    """pi(a|s) = softmax(logits(s))[a], for Discrete actions."""

    def __init__(self, obs_dim, n_actions, hidden_sizes, activation, rng):
        self.net = MLP([obs_dim, *hidden_sizes, n_actions], activation, rng)

    def __call__(self, obs, act):
        """obs [B, obs_dim], act [B] int64 -> log pi(act|obs) [B], entropy [B]."""
        logp_all = tf.nn.log_softmax(self.net(obs), -1)
        logp = tf.gather(logp_all, act, batch_dims=1)
        return logp, -tf.reduce_sum(tf.exp(logp_all) * logp_all, -1)


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


def compute_loss_pi(logp, logp_old, adv, clip_ratio):
    """PPO's clipped objective, negated: -E[min(ratio A, clip(ratio, 1 - eps, 1 + eps) A)].

    The minimum keeps the gradient of a ratio that has moved the wrong way: it can come back.

    Args:
        logp, logp_old, adv: [B], log-probabilities under the new and the old policy; advantages.

    Returns:
        loss_pi []; the share of clipped ratios, those with |ratio - 1| > clip_ratio [].
    """
    ratio = tf.exp(logp - logp_old)
    clipped = tf.clip_by_value(ratio, 1 - clip_ratio, 1 + clip_ratio)
    clip_frac = tf.reduce_mean(tf.cast(tf.abs(ratio - 1) > clip_ratio, tf.float32))
    return -tf.reduce_mean(tf.minimum(ratio * adv, clipped * adv)), clip_frac


def compute_loss_v(v, ret):
    """Mean squared error of the values: E[(V(s) - R)^2]; v, ret [B] -> []."""
    return tf.reduce_mean((v - ret) ** 2)


def approx_kl(logp, logp_old):
    """KL(old || new), estimated from samples of the old policy: E[(ratio - 1) - log ratio].

    It is never negative (http://joschu.net/blog/kl-approx.html). logp, logp_old [B] -> [].
    """
    log_ratio = logp - logp_old
    return tf.reduce_mean(tf.exp(log_ratio) - 1 - log_ratio)


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
    pi_lr = tf.get_variable("pi_lr", initializer=np.float64(args.pi_lr), trainable=False)
    pi_optimizer = mpi_tf1.Adam(pi_lr, name="pi_optimizer")
    vf_optimizer = mpi_tf1.Adam(args.vf_lr, name="vf_optimizer")

    # The graph: losses on the experience in the buffer, and the steps that lower them.
    obs_ph = tf.placeholder(tf.float32, [None, obs_dim])
    act_ph = tf.placeholder(buf.act.dtype, [None, *buf.act.shape[1:]])
    adv_ph, ret_ph, logp_old_ph = (tf.placeholder(tf.float32, [None]) for _ in range(3))
    logp, entropy_op = ac.pi(obs_ph, act_ph)
    v_obs = ac.v(obs_ph)[:, 0]
    loss_pi_op, clip_frac_op = compute_loss_pi(logp, logp_old_ph, adv_ph, args.clip_ratio)
    loss_v_op, kl_op = compute_loss_v(v_obs, ret_ph), approx_kl(logp, logp_old_ph)
    losses = loss_pi_op, loss_v_op, kl_op, tf.reduce_mean(entropy_op), clip_frac_op

    # The KL is checked before the step is taken, and averaged, so that all ranks stop together.
    too_far = mpi_tf1.avg_tensor(kl_op) > 1.5 * args.target_kl
    with tf.control_dependencies([too_far]):  # all ranks must send their messages in one order
        pi_grads = pi_optimizer.compute_gradients(loss_pi_op, pi_vars)
    train_pi = tf.cond(too_far, tf.no_op, lambda: pi_optimizer.apply_gradients(pi_grads))
    train_v = vf_optimizer.minimize(loss_v_op, v_vars)
    sess.run(tf.global_variables_initializer())
    sess.run(mpi_tf1.sync_all_params())

    def values(obs):
        """V of observations: array [N, obs_dim] -> array [N]."""
        return sess.run(v_obs, {obs_ph: obs})

    def update(epoch, rng):
        """Improve policy and value function on the epoch's experience, and store what to log."""
        obs, act, rew, last, obs2, terminated = buf.get()
        rew = env.normalize_rewards(rew)
        val, last_val = np.split(values(np.concatenate([obs, obs2])), [len(obs)])
        adv, ret = gae(rew, val, last, np.where(terminated, 0, last_val), args.gamma, args.lam)
        mean, std = mpi.statistics(adv)
        adv, ret = np.float32((adv - mean) / (std + 1e-8)), np.float32(ret)
        batch = {obs_ph: obs, act_ph: act, adv_ph: adv, ret_ph: ret}
        batch[logp_old_ph] = sess.run(logp, batch)
        loss_pi_old, loss_v_old, *_ = sess.run(losses, batch)

        # Policy: steps until the new policy is too far from the old.
        if args.anneal_lr:
            pi_lr.load(args.pi_lr * (1 - epoch / args.epochs), sess)
        stop_iter = 0
        for part in minibatches(args.train_pi_iters, minibatch_size, len(obs), rng):
            minibatch = {key: array[part] for key, array in batch.items()}
            if sess.run((too_far, train_pi), minibatch)[0]:
                break
            stop_iter += 1

        # Value function: it takes all of its steps, even if the policy stopped early.
        for part in minibatches(args.train_v_iters, minibatch_size, len(obs), rng):
            sess.run(train_v, {obs_ph: obs[part], ret_ph: ret[part]})

        loss_pi, loss_v, kl, entropy, clip_frac = sess.run(losses, batch)
        logger.store(LossPi=loss_pi_old, DeltaLossPi=loss_pi - loss_pi_old, Entropy=entropy, KL=kl)
        logger.store(LossV=loss_v_old, DeltaLossV=loss_v - loss_v_old, VVals=val)
        logger.store(ClipFrac=clip_frac, StopIter=stop_iter)

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
        update(epoch, rng)

        # Log and save.
        logger.log_tabular("Epoch", epoch)
        logger.log_tabular("TotalEnvInteracts", (epoch + 1) * args.steps_per_epoch)
        for key in ("EpRet", "VVals"):
            logger.log_tabular(key, with_min_and_max=True)
        keys = "CutEpRet", "EpLen", "LossPi", "LossV", "DeltaLossPi", "DeltaLossV", "Entropy", "KL"
        for key in [*keys, "ClipFrac", "StopIter"]:
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
