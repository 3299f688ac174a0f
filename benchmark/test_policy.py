"""Runs a trained policy: its returns, a window to watch it, a video.

    python benchmark/test_policy.py data/ppo_torch_Hopper-v4/ppo_torch_Hopper-v4_s0
    python benchmark/test_policy.py RUN_DIR --deterministic --episodes 3 --video videos

The environment is made as config.json says. The policy is policy.npz, which NumPy alone can act
with; neither torch nor tensorflow is imported. What is in it, W and b float32:

    weight_0 [in, out], bias_0 [out], weight_1, ...   the layers: x @ W + b
    activation      "tanh" or "relu", after every layer but the last
    distribution    what the last layer's output means:
        "categorical"       logits; deterministic: the likeliest action
        "gaussian"          the mean; log_std [act_dim]; clipped to the bounds
        "deterministic"     tanh of it is the action in [-1, 1], scaled to the bounds; act_noise
                            is the standard deviation of the noise that exploration adds
        "squashed_gaussian" mean and log standard deviation; tanh of a sample, scaled to the bounds
    act_low, act_high       the bounds, of Box actions
    epoch                   number of epochs it was trained for
"""

import argparse
import os
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that any directory will do
from common import UsageError
from common.serialization import printable, read_json, read_npz

LOG_STD_MIN, LOG_STD_MAX = -20, 2  # of a squashed Gaussian, as in the SAC scripts
ADVICE = (
    "rendering without a display needs EGL or OSMesa, with MUJOCO_GL=egl or osmesa: "
    "apt-get install libegl1 libgl1-mesa-dri, or libosmesa6"
)

# ------------------------------------------------------------------------------------------ policy


def load_policy(path):
    """The arrays of a policy.npz, checked.

    Args:
        path: the file.

    Returns:
        dict: layers [(W [in, out], b [out]), ...], activation, distribution, and the rest by name.

    Raises:
        UsageError: it is missing, holds pickles, more than it should, or no policy.
    """
    try:
        arrays = read_npz(path)
        n = sum(name.startswith("weight_") for name in arrays)
        layers = [(arrays.pop(f"weight_{i}"), arrays.pop(f"bias_{i}")) for i in range(n)]
        epoch = int(arrays.pop("epoch", -1))
        policy = {**arrays, "layers": layers, "epoch": epoch}
        for name in ("activation", "distribution"):
            policy[name] = str(arrays[name])
        _check_policy(policy)
    except FileNotFoundError:
        raise UsageError(f"{path} does not exist: the run has not saved a policy yet") from None
    except KeyError as e:
        raise UsageError(f"{path} is no policy: it has no {e.args[0]}") from e
    except (OSError, ValueError, TypeError) as e:
        raise UsageError(f"{path} is no policy: {printable(e)}") from e
    return policy


def _check_policy(policy):
    """Raise ValueError if the arrays do not fit together."""
    layers = policy["layers"]
    if not layers:
        raise ValueError("it has no layers")
    for i, (W, b) in enumerate(layers):
        fits = W.ndim == 2 and b.shape == W.shape[1:] and W.dtype == b.dtype == np.float32
        if not fits or (i and layers[i - 1][0].shape[1] != W.shape[0]):
            raise ValueError(f"layer {i} does not fit: {W.shape} {W.dtype}, {b.shape} {b.dtype}")
        if not (np.isfinite(W).all() and np.isfinite(b).all()):
            raise ValueError(f"layer {i} is not finite")
    if policy["activation"] not in ("tanh", "relu"):
        raise ValueError(f"unknown activation {policy['activation']!r}")
    distribution = policy["distribution"]
    needs = {"categorical": [], "gaussian": ["log_std", "act_low", "act_high"]}
    needs |= {"deterministic": ["act_noise", "act_low", "act_high"]}
    needs |= {"squashed_gaussian": ["act_low", "act_high"]}
    if distribution not in needs:
        raise ValueError(f"unknown distribution {distribution!r}")
    out = layers[-1][0].shape[1]
    act_dim = out / 2 if distribution == "squashed_gaussian" else out
    for name in needs[distribution]:
        if name not in policy:
            raise ValueError(f"it has no {name}")
        array, size = policy[name], 1 if name == "act_noise" else act_dim
        if array.size != size or (name == "log_std" and array.ndim != 1):
            raise ValueError(f"{name} has {array.size} numbers for {act_dim:g} actions")
        if array.dtype.kind not in "fiu" or np.isnan(array).any():
            raise ValueError(f"{name} does not hold numbers")


def act(policy, o, rng, deterministic=False):
    """One action for one observation.

    Args:
        policy: from `load_policy`.
        o: [obs_dim], the observation.
        rng: numpy.random.Generator.
        deterministic: the likeliest action, or the mean one, instead of a sample.

    Returns:
        an int from 0 for a categorical policy, else [act_dim] float32 within the bounds.
    """
    x = np.asarray(o, dtype=np.float32)
    for W, b in policy["layers"][:-1]:
        x = x @ W + b
        x = np.tanh(x) if policy["activation"] == "tanh" else np.maximum(x, 0)
    W, b = policy["layers"][-1]
    x = x @ W + b
    kind = policy["distribution"]
    if kind == "categorical":
        return int(np.argmax(x if deterministic else x + rng.gumbel(size=x.shape)))
    low, high = policy["act_low"].ravel(), policy["act_high"].ravel()
    if kind == "gaussian":
        noise = 0 if deterministic else np.exp(policy["log_std"]) * rng.standard_normal(x.shape)
        return (x + noise).clip(low, high).astype(np.float32)
    if kind == "deterministic":
        noise = 0 if deterministic else policy["act_noise"] * rng.standard_normal(x.shape)
        a = (np.tanh(x) + noise).clip(-1, 1)
    else:
        mu, log_std = np.split(x, 2)
        std = np.exp(log_std.clip(LOG_STD_MIN, LOG_STD_MAX))
        a = np.tanh(mu if deterministic else mu + std * rng.standard_normal(mu.shape))
    return (low + (a + 1) / 2 * (high - low)).astype(np.float32)


# --------------------------------------------------------------------------------------------- run


def find_policy(run_dir, itr=None):
    """The policy of a run: policy.npz, or of its saves (policy*.npz) the one of epoch `itr`.

    Raises UsageError if there is none, naming the epochs there are.
    """
    if itr is None:
        return load_policy(run_dir / "policy.npz")
    epochs = []
    for path in sorted(run_dir.glob("policy*.npz")):
        policy = load_policy(path)
        if policy["epoch"] == itr:
            return policy
        epochs.append(policy["epoch"])
    there = ", ".join(map(str, sorted(epochs))) or "none"
    raise UsageError(f"no policy of epoch {itr} is saved in {run_dir}; there are: {there}")


def read_config(run_dir):
    """config.json of a run; UsageError if this is no run directory."""
    path = run_dir / "config.json"
    try:
        config = read_json(path)
    except (FileNotFoundError, NotADirectoryError):
        runs = sorted(run_dir.glob("*/config.json")) or sorted(run_dir.glob("*/*/config.json"))
        hint = f"; did you mean {runs[0].parent}?" if runs else ""
        raise UsageError(f"{run_dir} is not the directory of a run{hint}") from None
    except ValueError as e:
        raise UsageError(str(e)) from e
    if not isinstance(config.get("env_id"), str):
        raise UsageError(f"{path} is damaged: it names no environment")
    if not isinstance(config.get("env_kwargs") or {}, dict):
        raise UsageError(f"{path} is damaged: env_kwargs is not an object")
    steps = config.get("max_ep_len") or 0
    if type(steps) is not int or steps < 0:
        raise UsageError(f"{path} is damaged: max_ep_len is {steps!r}")
    return config


def choose_gl():
    """Let MuJoCo render without a display: EGL, else OSMesa, whichever works here."""
    if "MUJOCO_GL" in os.environ or os.environ.get("DISPLAY") or sys.platform != "linux":
        return
    probe = "import mujoco; c = mujoco.GLContext(8, 8); c.make_current(); c.free()"
    for name in ("egl", "osmesa"):
        env = {**os.environ, "MUJOCO_GL": name, "PYOPENGL_PLATFORM": name}
        if subprocess.run([sys.executable, "-c", probe], env=env, capture_output=True).returncode:
            continue
        os.environ.update(env)
        return


def make_env(config, render_mode=None):
    """The environment of a run, with vector observations.

    Raises UsageError if it cannot be made or, given a render mode, cannot be drawn.
    """
    if render_mode == "human" and sys.platform == "linux":
        if not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
            raise UsageError("--render needs a display; without one, --video DIR writes a video")
    elif render_mode:
        choose_gl()
    import gymnasium as gym

    gym.logger.min_level = gym.logger.ERROR  # the version of the environment is the run's affair
    kwargs = {**(config.get("env_kwargs") or {})}
    if render_mode:
        kwargs["render_mode"] = render_mode
    try:
        env = gym.make(config["env_id"], disable_env_checker=True, **kwargs)
    except (gym.error.Error, ImportError, TypeError, ValueError) as e:
        raise UsageError(f"cannot make {config['env_id']}: {printable(e)}") from e
    except Exception as e:
        if not render_mode:  # of whatever kind: config.json may ask for anything
            text = f"{type(e).__name__}: {printable(e)}"
            raise UsageError(f"cannot make {config['env_id']}: {text}") from e
        raise UsageError(f"cannot render {config['env_id']}: {printable(e)} ({ADVICE})") from e
    if render_mode:
        try:
            with warnings.catch_warnings(action="ignore"):
                env.reset(seed=0)
                env.render()
        except Exception as e:  # each library that draws fails in its own way
            advice = "" if isinstance(e, gym.error.DependencyNotInstalled) else f" ({ADVICE})"
            raise UsageError(f"cannot render {config['env_id']}: {printable(e)}{advice}") from e
    if len(env.observation_space.shape) != 1:
        env = gym.wrappers.FlattenObservation(env)
    return env


def record(env, directory, name):
    """`env`, which writes a video of every episode to `directory`, `<name>-episode-<i>.mp4`."""
    import gymnasium as gym

    try:
        Path(directory).mkdir(parents=True, exist_ok=True)
        return gym.wrappers.RecordVideo(
            env,
            directory,
            episode_trigger=lambda _: True,
            name_prefix=name,
            disable_logger=True,
        )
    except (OSError, gym.error.Error) as e:
        raise UsageError(f"--video: {e}") from e


def run_policy(env, policy, episodes, max_ep_len, deterministic=False, seed=0):
    """Run whole episodes and print each; returns (returns, lengths), lists of `episodes` numbers.

    max_ep_len: steps after which an episode is cut; 0 for no bound but the environment's.
    """
    space = env.action_space
    rng = np.random.default_rng(seed)
    returns, lengths = [], []
    for i in range(episodes):
        o, _ = env.reset(seed=seed if i == 0 else None)
        ep_ret, ep_len, done = 0.0, 0, False
        while not done and ep_len != (max_ep_len or -1):
            a = act(policy, o, rng, deterministic)
            a = a + int(space.start) if isinstance(a, int) else a.reshape(space.shape)
            o, r, terminated, truncated, _ = env.step(a)
            done = terminated or truncated
            ep_ret, ep_len = ep_ret + float(r), ep_len + 1
        returns.append(ep_ret)
        lengths.append(ep_len)
        print(f"episode {i:>3}   return {ep_ret:>10.3f}   length {ep_len:>5}", flush=True)
    return returns, lengths


def check_spaces(env, policy, env_id):
    """Raise UsageError if the environment is not the one that the policy was trained for."""
    obs_dim = env.observation_space.shape[0]
    W, out = policy["layers"][0][0], policy["layers"][-1][0].shape[1]
    if W.shape[0] != obs_dim:
        raise UsageError(f"the policy takes {W.shape[0]} observations, {env_id} has {obs_dim}")
    space = env.action_space
    if policy["distribution"] == "categorical":
        n, has = getattr(space, "n", None), out
    else:
        n, has = int(np.prod(space.shape or (0,))), policy["act_low"].size
    if n != has:
        raise UsageError(f"the policy has {has} actions, {env_id} has {space}")


# ------------------------------------------------------------------------------------ command line


class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise UsageError(message)


def parse_args(argv=None):
    parser = Parser(
        prog="test_policy.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("run_dir", type=Path, help="directory of a run")
    add("--episodes", "-n", type=int, default=10, metavar="N", help="default: %(default)s")
    add(
        "--deterministic",
        "-d",
        action="store_true",
        help="do not sample: the policy's mean or mode",
    )
    add(
        "--len",
        "-l",
        type=int,
        metavar="N",
        help="most steps an episode (default: the run's; 0: any)",
    )
    add("--seed", type=int, default=0, metavar="N", help="of environment and actions (default: 0)")
    add("--itr", "-i", type=int, metavar="EPOCH", help="an earlier save, where there is one")
    add("--render", action="store_true", help="show it in a window")
    add("--video", metavar="DIR", help="write a video of every episode to DIR")
    args = parser.parse_args(argv)
    for name, low in (("episodes", 1), ("len", 0), ("seed", 0)):
        value = getattr(args, name)
        if value is not None and value < low:
            raise UsageError(f"--{name} must be at least {low}, not {value}")
    if args.render and args.video:
        raise UsageError("--render and --video exclude each other")
    return args


def main(argv=None):
    try:
        args = parse_args(argv)
        config = read_config(args.run_dir)
        policy = find_policy(args.run_dir, args.itr)
        mode = "human" if args.render else "rgb_array" if args.video else None
        env = make_env(config, mode)
        check_spaces(env, policy, config["env_id"])
        if args.video:
            env = record(env, args.video, args.run_dir.resolve().name)
    except UsageError as e:
        print(f"test_policy.py: error: {printable(e, 1000)}", file=sys.stderr)
        sys.exit(2)
    max_ep_len = config.get("max_ep_len") or 0 if args.len is None else args.len
    how = "deterministic" if args.deterministic else "sampled"
    env_id, script = printable(config["env_id"]), printable(config.get("script"))
    print(f"{env_id}, {script}, after epoch {policy['epoch']}, {how} actions")
    try:
        returns, lengths = run_policy(
            env, policy, args.episodes, max_ep_len, args.deterministic, args.seed
        )
    finally:
        env.close()
    print(
        f"mean {np.mean(returns):.3f}   std {np.std(returns):.3f}   "
        f"min {np.min(returns):.3f}   max {np.max(returns):.3f}   length {np.mean(lengths):.1f}"
    )
    if args.video:
        print(f"videos are in {args.video}")


if __name__ == "__main__":
    try:
        main()
    except BrokenPipeError:  # nobody reads any more (`| head -1`): then there is nothing to do
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
