"""Twin Delayed DDPG, TD3 (Fujimoto et al. 2018, arXiv:1802.09477).

    python algos/td3_tf1.py --env-id HalfCheetah-v4
    mpirun -np 4 python algos/td3_tf1.py --env-id Hopper-v4

DDPG's policy seeks out the actions whose Q is too high. TD3 makes three changes: the next state is
valued by the smaller of two Qs, clipped noise is added to the target policy's action (smoothing),
and the policy and the targets are updated once per policy_delay updates of the Qs.

    a'     = clip(pi_targ(s') + clip(sigma noise, -c, c), -1, 1)
    y      = r + gamma (1 - d) min_i Q_targ,i(s', a')
    L(Q_i) = E[ (Q_i(s, a) - y)^2 ]        L(pi) = -E[ Q_1(s, pi(s)) ]
    theta_targ <- polyak theta_targ + (1 - polyak) theta        after each step of pi

The noise is standard normal, sigma is target_noise, and c is noise_clip.

Diff me against ddpg_tf1.py: the three changes. And sac_tf1.py: the entropy.
Diff me against td3_torch.py: the same algorithm in PyTorch.
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
    # TD3
    pi_lr: PosFloat = 1e-3  # learning rate of the policy
    q_lr: PosFloat = 1e-3  # learning rate of the Q functions
    act_noise: NonNegFloat = 0.1  # standard deviation of the noise on actions in [-1, 1]
    target_noise: NonNegFloat = 0.2  # standard deviation of the noise on target actions
    noise_clip: NonNegFloat = 0.5  # bound of the noise on target actions
    policy_delay: PosInt = 2  # gradient steps of the Q functions for each one of the policy


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


class DeterministicActor:
    """a = tanh(u(s)), so actions lie in [-1, 1]."""

    def __init__(self, obs_dim, act_dim, hidden_sizes, activation, rng):
        self.net = MLP([obs_dim, *hidden_sizes, act_dim], activation, rng)

    def __call__(self, obs):
        """obs [B, obs_dim] -> a [B, act_dim]."""
        return tf.tanh(self.net(obs))


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
        pi = DeterministicActor(obs_dim, act_dim, hidden_sizes, activation, rng)
    with tf.variable_scope("q"):
        q = TwinQFunction(obs_dim, act_dim, hidden_sizes, activation, rng)
    return SimpleNamespace(pi=pi, q=q)


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
    epsilon = tf.clip_by_value(target_noise * noise, -noise_clip, noise_clip)
    act2 = tf.clip_by_value(ac_targ.pi(obs2) + epsilon, -1, 1)
    q_targ = tf.minimum(*ac_targ.q(obs2, act2))
    return tf.stop_gradient(rew + gamma * (1 - done) * q_targ)


def compute_loss_q(q1, q2, backup):
    """Mean squared Bellman errors: E[(Q_1(s, a) - y)^2] + E[(Q_2(s, a) - y)^2]; [B] each -> []."""
    return tf.reduce_mean((q1 - backup) ** 2) + tf.reduce_mean((q2 - backup) ** 2)


def compute_loss_pi(ac, obs):
    """-E[Q_1(s, pi(s))]; obs [B, obs_dim] -> []."""
    q1_pi, _ = ac.q(obs, ac.pi(obs))
    return -tf.reduce_mean(q1_pi)


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
    with tf.variable_scope("ac_targ"):
        ac_targ = actor_critic(obs_dim, act_dim, args.hidden_sizes, args.activation, rng)
    ac_vars, targ_vars = tf.trainable_variables("ac/"), tf.trainable_variables("ac_targ/")
    pi_vars, q_vars = tf.trainable_variables("ac/pi/"), tf.trainable_variables("ac/q/")
    pi_optimizer = mpi_tf1.Adam(args.pi_lr, name="pi_optimizer")
    q_optimizer = mpi_tf1.Adam(args.q_lr, name="q_optimizer")

    # One gradient step: one graph from the batch to the new target networks. It changes variables
    # that it reads, so control dependencies fix the order.
    obs_ph, obs2_ph = (tf.placeholder(tf.float32, [local_batch_size, obs_dim]) for _ in range(2))
    act_ph = tf.placeholder(tf.float32, [local_batch_size, act_dim])
    rew_ph, done_ph = (tf.placeholder(tf.float32, [local_batch_size]) for _ in range(2))
    noise_ph = tf.placeholder(tf.float32, [local_batch_size, act_dim])
    batch_ph = [obs_ph, act_ph, rew_ph, obs2_ph, done_ph, noise_ph]

    # Q functions: fit them to the backup.
    smoothing = noise_ph, args.target_noise, args.noise_clip
    backup = compute_backup(ac_targ, rew_ph, obs2_ph, done_ph, *smoothing, args.gamma)
    q1, q2 = ac.q(obs_ph, act_ph)
    loss_q = compute_loss_q(q1, q2, backup)
    train_q = q_optimizer.minimize(loss_q, q_vars)
    info = {"LossQ": loss_q, "Q1Vals": q1, "Q2Vals": q2}

    # Policy: gradient ascent on the new Q_1, which pi_optimizer leaves as it is.
    with tf.control_dependencies([train_q]):
        loss_pi = compute_loss_pi(ac, obs_ph)
        train_pi = pi_optimizer.minimize(loss_pi, pi_vars)

    # Target networks: move by a share of 1 - polyak toward the new ones.
    with tf.control_dependencies([train_pi]):
        both = zip(ac_vars, targ_vars, strict=True)
        train_targ = [tf.assign_add(p_targ, (1 - args.polyak) * (p - p_targ)) for p, p_targ in both]
    with tf.control_dependencies([train_q]):
        info_q = {key: tf.identity(value) for key, value in info.items()}
    with tf.control_dependencies(train_targ):
        info_all = {key: tf.identity(value) for key, value in {**info, "LossPi": loss_pi}.items()}
    update_q, update_all = (sess.make_callable(x, batch_ph) for x in (info_q, info_all))

    # The SavedModel: the policy without noise, and Q of any action in [-1, 1].
    model_obs, model_act = (tf.placeholder(tf.float32, [None, dim]) for dim in (obs_dim, act_dim))
    model_q1, model_q2 = ac.q(model_obs, model_act)
    model_outputs = {"pi": ac.pi(model_obs), "q1": model_q1, "q2": model_q2}

    sess.run(tf.global_variables_initializer())
    sess.run(mpi_tf1.sync_all_params())
    sess.run([tf.assign(p_targ, p) for p, p_targ in zip(ac_vars, targ_vars, strict=True)])

    def update_block(steps, rng):
        """Take gradient steps. All batches are drawn at once, which is faster than one by one."""
        shape = steps, local_batch_size
        noise = rng.standard_normal((steps, local_batch_size, act_dim), dtype=np.float32)
        batches = (*buf.sample(shape, rng), noise)
        first = sess.run(q_optimizer.steps) + 1  # the delay counts gradient steps of the whole run
        for step, batch in enumerate(zip(*batches, strict=True), first):
            update = update_all if step % args.policy_delay == 0 else update_q
            logger.store(**update(*batch))

    def export_policy():
        """The policy as `get_action` takes it and policy.npz holds it: a dict of NumPy arrays."""
        arrays = {"weights": sess.run(ac.pi.net.layers), "activation": args.activation}
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
