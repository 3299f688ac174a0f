"""Run a trained policy: print its returns, watch it in a window, write a video.

    python benchmark/test_policy.py data/ppo_torch_Hopper-v4/ppo_torch_Hopper-v4_s0
    python benchmark/test_policy.py RUN_DIR --deterministic --episodes 3 --video videos
    python benchmark/test_policy.py benchmark/policies/sac_walker2d.npz -d --render

The same from Python:

    from benchmark.test_policy import load_env, load_policy

    env, get_action = load_env(run), load_policy(run, deterministic=True)
    o, _ = env.reset(seed=0)
    o, r, terminated, truncated, _ = env.step(get_action(o))

A run is its directory, with policy.npz and those that `--snapshots` kept, or a file of
benchmark/policies. The environment is made as config.json says, or as the file does. NumPy is
enough to act, so neither torch nor tensorflow is imported. The arrays of a policy:

    weight_0 [in, out], bias_0 [out], weight_1, ...   the layers, float32: x @ W + b
    obs_mean, obs_std [in]  with --norm-obs: the input is clip((o - obs_mean) / obs_std, -10, 10)
    activation      "tanh" or "relu", after every layer but the last
    distribution    what the last layer's output means:
        "categorical"       logits; deterministic: the likeliest action
        "gaussian"          the mean; log_std [act_dim]; clipped to the bounds
        "deterministic"     tanh of it is the action in [-1, 1], scaled to the bounds; act_noise
                            is the standard deviation of the noise that exploration adds
        "squashed_gaussian" mean and log standard deviation; tanh of a sample, scaled to the bounds
    act_low, act_high       the bounds of Box actions, in the space's shape and dtype
    epoch                   number of epochs it was trained for
    config                  of files in benchmark/policies: JSON with env_id, env_kwargs,
                            max_ep_len, script, and what the table of that folder says
"""

import contextlib
import json
import os
import sys
import warnings
from ctypes.util import find_library
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass
from tyro.conf import Positional, arg

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run from any directory
from benchmark.reading import printable, read_json, read_npz
from common import UsageError
from common.args import NonNegInt, PosInt, parse_args
from common.mpi import make_rng

LOG_STD_MIN, LOG_STD_MAX = -20, 2  # of a squashed Gaussian, as in the SAC scripts
ADVICE = "rendering without a display needs EGL or OSMesa, with MUJOCO_GL=egl or osmesa: "
ADVICE += "apt-get install libegl1 libgl1-mesa-dri, or libosmesa6"
KNOWN = {"log_std", "act_noise", "act_low", "act_high", "obs_mean", "obs_std", "epoch", "config"}
KINDS = {"activation": ("tanh", "relu")}
KINDS |= {"distribution": ("categorical", "gaussian", "deterministic", "squashed_gaussian")}


@dataclass
class Args:
    run: Positional[Path]  # directory of a run, or a policy's file
    episodes: Annotated[PosInt, arg(aliases=["-n"])] = 10  # number of episodes
    deterministic: Annotated[bool, arg(aliases=["-d"])] = False  # the mean or mode, not a sample
    # Maximum steps per episode; -1: the run's max_ep_len; 0: the environment's limit alone.
    len: Annotated[int, Field(ge=-1), arg(aliases=["-l"])] = -1
    seed: NonNegInt = 0  # of environment and actions
    itr: Annotated[int | Literal["last"], arg(aliases=["-i"])] = "last"  # epoch of a save
    render: bool = False  # show it in a window
    norender: Annotated[bool, arg(aliases=["-nr"])] = False  # the default; as in Spinning Up
    video: str | None = None  # write a video of every episode to this directory


# Policy -------------------------------------------------------------------------------------------


def read_policy(path):
    """The arrays of a policy.npz, checked: it acts on an observation of zeros.

    Returns:
        dict: layers [(W [in, out], b [out]), ...], activation, distribution, epoch, and the rest of
        the file by name.

    Raises:
        UsageError: it is missing or damaged, or holds pickles or no policy.
    """
    try:
        arrays = read_npz(path)
        n = sum(name.startswith("weight_") for name in arrays)
        layers = [(arrays.pop(f"weight_{i}"), arrays.pop(f"bias_{i}")) for i in range(n)]
        policy = {**arrays, "layers": layers, "epoch": int(arrays.get("epoch", -1))}
        for name, kinds in KINDS.items():
            policy[name] = str(arrays[name])
            if policy[name] not in kinds:
                raise ValueError(f"unknown {name} {policy[name]}")
        if not all(np.isfinite(x).all() for layer in layers for x in layer):
            raise ValueError("its layers are not finite")
        with np.errstate(all="ignore"):
            a = act(policy, np.zeros(len(layers[0][0])), np.random.default_rng(0))
        if np.isnan(a).any():
            raise ValueError("its actions are not numbers")
    except KeyError as e:
        raise UsageError(f"{path} is no policy: it has no {e.args[0]}") from e
    except (OSError, ValueError, TypeError, IndexError) as e:
        raise UsageError(f"{path} is no policy: {printable(e)}") from e
    return policy


def act(policy, o, rng, deterministic=False):
    """One action for one observation.

    Args:
        policy: from `read_policy`.
        o: [obs_dim], the observation.
        rng: numpy.random.Generator.
        deterministic: the likeliest action, or the mean one, instead of a sample.

    Returns:
        an int from 0 for a categorical policy, else an array of the environment's action shape and
        dtype, within the bounds.
    """
    x = np.asarray(o, dtype=np.float32)
    if "obs_mean" in policy:
        x = ((x - policy["obs_mean"]) / policy["obs_std"]).clip(-10, 10)
    for i, (W, b) in enumerate(policy["layers"]):
        if i:
            x = np.tanh(x) if policy["activation"] == "tanh" else np.maximum(x, 0)
        x = x @ W + b
    kind = policy["distribution"]
    if kind == "categorical":
        return int(np.argmax(x if deterministic else x + rng.gumbel(size=x.shape)))
    low, high = policy["act_low"], policy["act_high"]  # of the space's shape and dtype
    std = 0.0
    if kind == "squashed_gaussian":
        x, log_std = np.split(x, 2)
        std = np.exp(log_std.clip(LOG_STD_MIN, LOG_STD_MAX))
    elif not deterministic:
        std = np.exp(policy["log_std"]) if kind == "gaussian" else policy["act_noise"]
    noise = 0 if deterministic else std * rng.standard_normal(x.shape)
    a = x + noise
    if kind != "gaussian":
        a = (np.tanh(x) + noise).clip(-1, 1) if kind == "deterministic" else np.tanh(a)
        a = low.ravel() + (a + 1) / 2 * (high - low).ravel()
    # Rounding to another dtype may lead out of the bounds: it comes first.
    return a.reshape(low.shape).astype(low.dtype).clip(low, high)


def find_policy(run, itr="last"):
    """The policy of a run: the last, or that of an epoch; or a file's.

    Raises UsageError if there is none, naming those there are.
    """
    if Path(run).is_file():
        if itr not in ("last", -1):
            raise UsageError(f"--itr is for directories of runs; {run} is one policy")
        return read_policy(run)
    name = "policy.npz" if itr in ("last", -1) else f"policy_{itr}.npz"  # -1: Spinning Up's word
    there = sorted(path.name for path in Path(run).glob("policy*.npz"))
    if name not in there:
        more = f", only {', '.join(there)} (a run with --snapshots keeps more)" if there else ""
        raise UsageError(f"there is no {name} in {run}{more}")
    return read_policy(Path(run, name))


def load_policy(run, itr="last", deterministic=False, seed=0):
    """A function from observation [obs_dim] to action: what the run's policy does.

    Args:
        run: directory of a run, or a policy's file.
        itr: "last", or an epoch, which needs a run with `--snapshots`.
        deterministic: the likeliest action, or the mean one, instead of a sample.
        seed: of the samples.

    Raises:
        UsageError: there is no such policy.
    """
    policy, rng = find_policy(run, itr), make_rng(seed, "test")  # apart from the environment's
    if other := sorted(policy.keys() - KNOWN - KINDS.keys() - {"layers"}):
        print(f"test_policy.py: not used: {', '.join(other)} of {run}", file=sys.stderr)
    return lambda o: act(policy, o, rng, deterministic)


# Environment --------------------------------------------------------------------------------------


def read_config(run):
    """What a run's config.json, or a policy's file, says of the environment.

    Raises UsageError if this is neither, or a file that does not name its environment.
    """
    try:
        if Path(run).is_file():
            config = json.loads(str(read_policy(run)["config"]))
        else:
            config = read_json(Path(run, "config.json"))
        usual = {"env_kwargs": {}, "max_ep_len": 0, "script": None}
        return {**usual, **config, "env_id": config["env_id"]}
    except KeyError as e:
        text = f"{run} does not name its environment"
        raise UsageError(f"{text}: give the directory of its run, which has a config.json") from e
    except (OSError, ValueError, TypeError) as e:
        raise UsageError(f"{run} is not the directory of a run: {e}") from e


def load_env(run, render_mode=None):
    """The environment of a run, as its script made it: vector observations, actions from 0.

    Args:
        run: directory of a run, or a policy's file.
        render_mode: "human" for a window, "rgb_array" for pictures.

    Raises:
        UsageError: it cannot be made or, given a render mode, cannot be drawn.
    """
    config = read_config(run)
    displays = os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    if render_mode and sys.platform == "linux" and not displays:
        if render_mode == "human":
            raise UsageError("--render needs a display; without one, --video DIR writes a video")
        # Where neither is installed, MuJoCo could not even be imported with "egl" or "osmesa".
        gl = next(filter(find_library, ("EGL", "OSMesa")), "glfw").lower()
        os.environ.setdefault("MUJOCO_GL", gl)
    import gymnasium as gym

    from common.run import make_env

    gym.logger.min_level = gym.logger.ERROR  # hide that there are newer versions
    spaces = gym.spaces.Box, gym.spaces.Discrete
    env = make_env(config["env_id"], config["env_kwargs"], spaces)
    if render_mode:
        if render_mode not in (env.metadata.get("render_modes") or ()):
            raise UsageError(f"{config['env_id']} cannot be drawn: no render mode {render_mode!r}")
        env.close()
        try:
            more = {**config["env_kwargs"], "render_mode": render_mode}
            env = make_env(config["env_id"], more, spaces)
            follow(env, config["env_kwargs"])
            with warnings.catch_warnings(action="ignore"):
                env.reset(seed=0)
                env.render()
        except Exception as e:  # of any kind: a driver may raise anything
            raise UsageError(f"{type(e).__name__}: {printable(e)} ({ADVICE})") from e
    if start := int(getattr(env.action_space, "start", 0)):
        space = gym.spaces.Discrete(env.action_space.n)
        env = gym.wrappers.TransformAction(env, lambda a: a + start, space)
    return env


def follow(env, env_kwargs):
    """Have a MuJoCo robot filmed by its camera `track`, if it has one and no camera is asked for.

    Gymnasium films it with a camera that stays where it is, and the robot walks out of the picture.
    """
    renderer = getattr(env.unwrapped, "mujoco_renderer", None)
    if renderer and not any("camera" in name for name in env_kwargs):
        import mujoco

        kind = mujoco.mjtObj.mjOBJ_CAMERA
        camera = mujoco.mj_name2id(env.unwrapped.model, kind, "track")
        if camera >= 0:
            renderer.camera_id = camera  # of pictures; a window has the other
            fixed = mujoco.mjtCamera.mjCAMERA_FIXED
            renderer.default_cam_config = {"type": fixed, "fixedcamid": camera}


def run_policy(env, get_action, max_ep_len=0, num_episodes=100, seed=0):
    """Run whole episodes and print each; returns (returns, lengths), lists of `num_episodes`.

    max_ep_len: steps after which an episode is cut; 0 for no limit but the environment's.
    """
    returns, lengths = [], []
    for i in range(num_episodes):
        o, _ = env.reset(seed=seed if i == 0 else None)
        ep_ret, ep_len, done = 0.0, 0, False
        while not done and ep_len != (max_ep_len or -1):
            o, r, terminated, truncated, _ = env.step(get_action(o))
            ep_ret, ep_len, done = ep_ret + float(r), ep_len + 1, terminated or truncated
        returns.append(ep_ret)
        lengths.append(ep_len)
        print(f"episode {i:>3}   return {ep_ret:>10.3f}   length {ep_len:>5}", flush=True)
    return returns, lengths


def main(argv=None):
    sys.path.append("")  # an environment's module may be in the current directory
    try:
        args = parse_args(Args, argv)
        if args.render and (args.video or args.norender):
            raise UsageError("--render excludes --video and --norender")
        policy, config = find_policy(args.run, args.itr), read_config(args.run)
        get_action = load_policy(args.run, args.itr, args.deterministic, args.seed)
        env = load_env(args.run, "human" if args.render else args.video and "rgb_array")
        n, wanted = env.observation_space.shape[0], len(policy["layers"][0][0])
        if n != wanted:
            raise UsageError(f"the policy takes {wanted} numbers, the environment observes {n}")
        if args.video:
            from gymnasium.wrappers import RecordVideo

            run = args.run.resolve()
            name = run.stem if run.is_file() else run.name
            name += f"_{args.itr}" if args.itr not in ("last", -1) else ""
            how = {"episode_trigger": lambda _: True, "disable_logger": True}
            env = RecordVideo(env, args.video, name_prefix=name, **how)
    except (OSError, UsageError) as e:
        print(f"test_policy.py: error: {printable(e, 1000)}", file=sys.stderr)
        sys.exit(2)
    max_ep_len = config["max_ep_len"] if args.len < 0 else args.len
    how = "deterministic" if args.deterministic else "sampled"
    env_id, script = printable(config["env_id"]), printable(config["script"])
    print(f"{env_id}, {script}, after epoch {policy['epoch']}, {how} actions")
    with contextlib.closing(env):
        returns, lengths = run_policy(env, get_action, max_ep_len, args.episodes, args.seed)
    print(
        f"mean {np.mean(returns):.3f}   std {np.std(returns):.3f}   "
        f"min {np.min(returns):.3f}   max {np.max(returns):.3f}   length {np.mean(lengths):.1f}"
    )


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
