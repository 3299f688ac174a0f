"""Soft Actor-Critic, SAC (Haarnoja et al. 2018, arXiv:1801.01290 and arXiv:1812.05905).

    python algos/sac_tf1.py --env-id HalfCheetah-v4
    mpirun -np 4 python algos/sac_tf1.py --env-id Hopper-v4

Like TD3, but the policy is stochastic, and its objective includes its entropy, weighted by alpha.
The policy follows the smaller of the two Qs, not Q_1. There is no target policy and no delay: the
next action a' is drawn from the current policy. As in the second paper, there is no value network.

    y        = r + gamma (1 - d) (min_i Q_targ,i(s', a') - alpha log pi(a'|s'))
    L(Q_i)   = E[ (Q_i(s, a) - y)^2 ]
    L(pi)    = E[ alpha log pi(a|s) - min_i Q_i(s, a) ],  a = tanh(mu(s) + sigma(s) noise)
    L(alpha) = -E[ log alpha (log pi(a|s) - act_dim) ]          with --alpha auto
    theta_targ <- polyak theta_targ + (1 - polyak) theta        after each step

Diff me against td3_tf1.py: a stochastic policy, and its entropy in both losses.
Diff me against sac_torch.py: the same algorithm in PyTorch.
"""

import sys
from dataclasses import field
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))  # find common/ from any directory

import numpy as np
from gymnasium.spaces import Box
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


class SquashedGaussianActor:
    """pi(a|s): a = tanh(u), u ~ Normal(mu(s), sigma(s)), so actions lie in [-1, 1]."""

    def __init__(self, obs_dim, act_dim, hidden_sizes, activation, rng):
        self.net = MLP([obs_dim, *hidden_sizes, 2 * act_dim], activation, rng)

    def __call__(self, obs, noise):
        """obs [B, obs_dim], standard normal noise [B, act_dim] -> a [B, act_dim], log pi(a|s) [B].

        log pi(a|s) = log Normal(u) - sum log(1 - tanh(u)^2), in a form accurate for large |u|.
        The network gives mu and log_std; log_std is clamped to [-20, 2].
        """
        mu, log_std = tf.split(self.net(obs), 2, -1)
        log_std = tf.clip_by_value(log_std, -20, 2)
        u = mu + tf.exp(log_std) * noise
        logp = tf.reduce_sum(-0.5 * noise**2 - log_std - 0.5 * np.log(2 * np.pi), -1)
        logp -= tf.reduce_sum(2 * (np.log(2) - u - tf.nn.softplus(-2 * u)), -1)
        return tf.tanh(u), logp


class TwinQFunction:
    """Q_1(s, a) and Q_2(s, a), which share nothing."""

    def __init__(self, obs_dim, act_dim, hidden_sizes, activation, rng):
        with tf.variable_scope("q1"):
            self.net1 = MLP([obs_dim + act_dim, *hidden_sizes, 1], activation, rng)
        with tf.variable_scope("q2"):
            self.net2 = MLP([obs_dim + act_dim, *hidden_sizes, 1], activation, rng)

    def __call__(self, obs, act):
        """obs [B, obs_dim], act [B, act_dim] -> [B], [B]."""
        x = tf.concat([obs, act], -1)
        return self.net1(x)[:, 0], self.net2(x)[:, 0]


def actor_critic(obs_dim, act_dim, hidden_sizes, activation, rng):
    """The policy `pi` and the Q functions `q`."""
    with tf.variable_scope("pi"):
        pi = SquashedGaussianActor(obs_dim, act_dim, hidden_sizes, activation, rng)
    with tf.variable_scope("q"):
        q = TwinQFunction(obs_dim, act_dim, hidden_sizes, activation, rng)
    return SimpleNamespace(pi=pi, q=q)


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
    act2, logp_act2 = ac.pi(obs2, noise)
    q_targ = tf.minimum(*ac_targ.q(obs2, act2))
    return tf.stop_gradient(rew + gamma * (1 - done) * (q_targ - alpha * logp_act2))


def compute_loss_q(q1, q2, backup):
    """Mean squared Bellman errors: E[(Q_1(s, a) - y)^2] + E[(Q_2(s, a) - y)^2]; [B] each -> []."""
    return tf.reduce_mean((q1 - backup) ** 2) + tf.reduce_mean((q2 - backup) ** 2)


def compute_loss_pi(ac, obs, noise, alpha):
    """E[alpha log pi(a|s) - min_i Q_i(s, a)], a ~ pi(.|s); returns loss [], log pi(a|s) [B].

    obs [B, obs_dim], noise [B, act_dim] standard normal.
    """
    a, logp_pi = ac.pi(obs, noise)
    q1_pi, q2_pi = ac.q(obs, a)
    return tf.reduce_mean(alpha * logp_pi - tf.minimum(q1_pi, q2_pi)), logp_pi


def compute_loss_alpha(log_alpha, logp_pi, target_entropy):
    """-E[log alpha (log pi(a|s) + target entropy)]: alpha rises while the entropy is too low.

    The paper (Haarnoja et al. 2018, arXiv:1812.05905, eq. 18) has alpha in place of log alpha.
    log_alpha [], logp_pi [B] -> []; only log_alpha gets a gradient.
    """
    return -tf.reduce_mean(log_alpha * (tf.stop_gradient(logp_pi) + target_entropy))


# Training -----------------------------------------------------------------------------------------


def train(args):
    """Train a policy. Returns whether the run is finished: False if a signal stopped it."""
    # Set-up: bad input is refused before anything is written.
    sess = mpi_tf1.setup(parallel_ops=True)
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
    with tf.variable_scope("ac"):
        ac = actor_critic(obs_dim, act_dim, args.hidden_sizes, args.activation, rng)
    with tf.variable_scope("ac_targ/q"):
        q_function = TwinQFunction(obs_dim, act_dim, args.hidden_sizes, args.activation, rng)
        ac_targ = SimpleNamespace(q=q_function)
    pi_vars, q_vars = tf.trainable_variables("ac/pi/"), tf.trainable_variables("ac/q/")
    targ_vars = tf.trainable_variables("ac_targ/")
    pi_optimizer = mpi_tf1.Adam(args.lr, name="pi_optimizer")
    q_optimizer = mpi_tf1.Adam(args.lr, name="q_optimizer")
    auto_alpha = args.alpha == "auto"
    if auto_alpha:
        log_alpha = tf.get_variable("log_alpha", initializer=np.float32(0))
        alpha_optimizer = mpi_tf1.Adam(args.lr, name="alpha_optimizer")

    # One gradient step: one graph from the batch to the new target networks. It changes variables
    # that it reads, so control dependencies fix the order.
    obs_ph, obs2_ph = (tf.placeholder(tf.float32, [local_batch_size, obs_dim]) for _ in range(2))
    act_ph = tf.placeholder(tf.float32, [local_batch_size, act_dim])
    rew_ph, done_ph = (tf.placeholder(tf.float32, [local_batch_size]) for _ in range(2))
    noise_ph = tf.placeholder(tf.float32, [2, local_batch_size, act_dim])
    alpha = tf.stop_gradient(tf.exp(log_alpha)) if auto_alpha else args.alpha

    # Q functions: fit them to the backup.
    backup = compute_backup(ac, ac_targ, rew_ph, obs2_ph, done_ph, noise_ph[0], alpha, args.gamma)
    q1, q2 = ac.q(obs_ph, act_ph)
    loss_q = compute_loss_q(q1, q2, backup)
    train_q = q_optimizer.minimize(loss_q, q_vars)

    # Policy: gradient ascent on the smaller Q plus alpha times the entropy; pi_optimizer leaves
    # Q as it is.
    with tf.control_dependencies([train_q]):
        loss_pi, logp_pi = compute_loss_pi(ac, obs_ph, noise_ph[1], alpha)
        train_pi = pi_optimizer.minimize(loss_pi, pi_vars)

    # Alpha: toward the target entropy.
    train_alpha = train_pi
    if auto_alpha:
        with tf.control_dependencies([train_pi]):  # all ranks must send their messages in one order
            loss_alpha = compute_loss_alpha(log_alpha, logp_pi, -act_dim)
            train_alpha = alpha_optimizer.minimize(loss_alpha, [log_alpha])

    # Target networks: move by a share of 1 - polyak toward the new ones.
    with tf.control_dependencies([train_alpha]):
        both = zip(q_vars, targ_vars, strict=True)
        train_targ = [tf.assign_add(p_targ, (1 - args.polyak) * (p - p_targ)) for p, p_targ in both]
    with tf.control_dependencies(train_targ):
        info = {"LossQ": loss_q, "LossPi": loss_pi, "Q1Vals": q1, "Q2Vals": q2, "LogPi": logp_pi}
        info = {key: tf.identity(value) for key, value in info.items()}
    update = sess.make_callable(info, [obs_ph, act_ph, rew_ph, obs2_ph, done_ph, noise_ph])

    # The SavedModel: the policy without noise, a sample of it, and Q of any action in [-1, 1].
    model_obs, model_act = (tf.placeholder(tf.float32, [None, dim]) for dim in (obs_dim, act_dim))
    model_mu, _ = ac.pi(model_obs, noise=0.0)
    model_pi, _ = ac.pi(model_obs, tf.random.normal(tf.shape(model_mu)))
    model_q1, model_q2 = ac.q(model_obs, model_act)
    model_outputs = {"mu": model_mu, "pi": model_pi, "q1": model_q1, "q2": model_q2}

    sess.run(tf.global_variables_initializer())
    sess.run(mpi_tf1.sync_all_params())
    sess.run([tf.assign(p_targ, p) for p, p_targ in zip(q_vars, targ_vars, strict=True)])

    def update_block(steps, rng):
        """Take gradient steps. All batches are drawn at once, which is faster than one by one."""
        shape = steps, local_batch_size
        noise = rng.standard_normal((steps, 2, local_batch_size, act_dim), dtype=np.float32)
        batches = (*buf.sample(shape, rng), noise)
        for batch in zip(*batches, strict=True):
            logger.store(**update(*batch))

    def export_policy():
        """The policy as `get_action` takes it and policy.npz holds it: a dict of NumPy arrays."""
        arrays = {"weights": sess.run(ac.pi.net.layers), "activation": args.activation}
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
    logger.setup_tf_saver(sess, {"obs": model_obs, "act": model_act}, model_outputs)
    state = {"networks": mpi_tf1.State(sess)}

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
        logger.log_tabular("Alpha", sess.run(alpha) if auto_alpha else args.alpha)
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
