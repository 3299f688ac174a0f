"""benchmark/test_policy.py: actions against a computation of their own, files, environments."""

import itertools
import json
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import conftest
import gymnasium as gym
import numpy as np
import pytest
from conftest import ROOT, mpi

from benchmark import report
from benchmark import test_policy as tp
from common import UsageError

POLICIES = ROOT / "benchmark" / "policies"

LOW, HIGH = np.float32([-1, 0, -3]), np.float32([1, 5, 7])
OBS = np.array([0.3, -0.2, 0.1, 0.5])


def arrays(sizes, distribution, activation="tanh", seed=0, **more):
    rng = np.random.default_rng(seed)
    out = {"activation": activation, "distribution": distribution, "epoch": 7, **more}
    for i, (a, b) in enumerate(itertools.pairwise(sizes)):
        out[f"weight_{i}"] = rng.normal(size=(a, b)).astype(np.float32)
        out[f"bias_{i}"] = rng.normal(size=b).astype(np.float32)
    return out


def write_run(directory, policy, env_id, **config):
    directory.mkdir(parents=True)
    config = {"env_id": env_id, "env_kwargs": {}, "max_ep_len": 50, "script": "x.py", **config}
    (directory / "config.json").write_text(json.dumps(config))
    np.savez(directory / "policy.npz", **policy)
    return directory


def load(tmp_path, policy):
    np.savez(tmp_path / "policy.npz", **policy)
    return tp.read_policy(tmp_path / "policy.npz")


def output(policy, o):
    """The network's output in float64, layer by layer."""
    x, n = np.asarray(o, np.float64), sum(k.startswith("weight_") for k in policy)
    for i in range(n):
        x = np.einsum("i,io->o", x, policy[f"weight_{i}"].astype(float)) + policy[f"bias_{i}"]
        if i < n - 1:
            x = np.tanh(x) if policy["activation"] == "tanh" else np.where(x > 0, x, 0)
    return x


def command_line(*args, **env):
    program = ROOT / "benchmark" / "test_policy.py"
    return conftest.run(program, *args, check=False, env={"DISPLAY": "", **env})


# Acting -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", ["tanh", "relu"])
def test_categorical(tmp_path, activation, capsys):
    """And arrays that acting ignores are named."""
    saved = arrays([4, 8, 3], "categorical", activation, ln_scale=np.ones(8))
    policy, logits, rng = load(tmp_path, saved), output(saved, OBS), np.random.default_rng(0)
    tp.load_policy(tmp_path)
    assert capsys.readouterr().err == f"test_policy.py: not used: ln_scale of {tmp_path}\n"
    assert tp.act(policy, OBS, rng, deterministic=True) == np.argmax(logits)
    p = np.exp(logits - logits.max())
    counts = np.bincount([tp.act(policy, OBS, rng) for _ in range(8000)], minlength=3) / 8000
    np.testing.assert_allclose(counts, p / p.sum(), atol=0.02)


def scaled(a):
    return LOW + (a + 1) / 2 * (HIGH - LOW)


# What the network's output x and standard normal noise n make, in float64.
ACTIONS = {
    "gaussian": lambda x, n: np.clip(x + np.exp([-1, 0, -2]) * n, LOW, HIGH),
    "deterministic": lambda x, n: scaled(np.clip(np.tanh(x) + 0.3 * n, -1, 1)),
    # The last log standard deviation, 50, is clipped to 2.
    "squashed_gaussian": lambda x, n: scaled(np.tanh(x[:3] + np.exp([-1, -3, 2]) * n)),
}


@pytest.mark.parametrize("distribution", ACTIONS)
def test_real_actions(tmp_path, distribution):
    sizes = [4, 8, 6 if distribution == "squashed_gaussian" else 3]
    saved = arrays(sizes, distribution, "relu", act_low=LOW, act_high=HIGH, act_noise=0.3)
    saved |= {"log_std": np.float32([-1, 0, -2])}
    if distribution == "squashed_gaussian":
        saved["bias_1"][3:], saved["weight_1"][:, 3:] = [-1, -3, 50], 0
    policy, x, rng = load(tmp_path, saved), output(saved, OBS), np.random.default_rng(0)
    expected = ACTIONS[distribution](x, 0)
    np.testing.assert_allclose(tp.act(policy, OBS, rng, True), expected, rtol=1e-4, atol=1e-4)
    sample = np.array([tp.act(policy, OBS, rng) for _ in range(8000)])
    truth = ACTIONS[distribution](x, rng.standard_normal((200_000, 3)))
    np.testing.assert_allclose(sample.mean(0), truth.mean(0), atol=0.15)
    np.testing.assert_allclose(sample.std(0), truth.std(0), rtol=0.05, atol=0.01)
    assert sample.dtype == np.float32 and truth.std(0).max() > 0.3


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("distribution", ACTIONS)
def test_actions_are_in_the_space(tmp_path, distribution, dtype):
    """0.3 in float32 is above 0.3 in float64: bounds are those of the space's own dtype."""
    low, high = np.array([[[-0.3], [0.1]], [[0.3], [0.3]]], dtype)
    space = gym.spaces.Box(low, high, dtype=dtype)
    saved = arrays([4, 4 if distribution == "squashed_gaussian" else 2], distribution)
    saved |= {"act_low": low, "act_high": high, "act_noise": 9, "log_std": np.ones(2)}
    policy, rng = load(tmp_path, saved), np.random.default_rng(0)
    for scale in (-99, 99, *range(50)):
        assert space.contains(tp.act(policy, OBS * scale, rng)), scale


def test_observations_are_normalized_as_in_training(tmp_path):
    """With --norm-obs, statistics of the observations are part of the policy."""
    mean, std = np.float32([1, -2, 0, 5]), np.float32([0.5, 2, 1e-6, 1])
    saved = arrays([4, 8, 3], "gaussian", act_low=LOW * 99, act_high=HIGH * 99)
    saved |= {"log_std": np.zeros(3, np.float32), "obs_mean": mean, "obs_std": std}
    expected = output(saved, [-1.4, 0.9, 10, -4.5])  # 0.1 / 1e-6 is clipped to 10
    a = tp.act(load(tmp_path, saved), OBS, np.random.default_rng(0), True)
    np.testing.assert_allclose(a, expected.clip(LOW * 99, HIGH * 99), rtol=1e-5)


# Environments -------------------------------------------------------------------------------------


def test_returns_are_those_of_the_environment(tmp_path, capsys):
    """CartPole under a policy that always pushes right, against the same in a loop of its own."""
    policy = arrays([4, 2], "categorical")
    policy["weight_0"][:], policy["bias_0"][:] = 0, [0, 100]
    run = write_run(tmp_path / "run", policy, "CartPole-v1")
    env, expected = gym.make("CartPole-v1"), []
    for i in range(3):
        env.reset(seed=5 if i == 0 else None)
        expected.append(1 + next(n for n in itertools.count() if env.step(1)[2]))
    tp.main([str(run), "--episodes", "3", "--seed", "5"])
    lines = capsys.readouterr().out.splitlines()
    assert [float(line.split()[3]) for line in lines[1:4]] == expected
    assert f"mean {np.mean(expected):.3f}   std {np.std(expected):.3f}" in lines[-1]
    assert "after epoch 7" in lines[0]


def test_the_saved_configuration(tmp_path, capsys):
    more = {"act_low": np.float32([-2]), "act_high": np.float32([2]), "log_std": np.float32([0])}
    config = {"env_kwargs": {"g": 0.0}, "max_ep_len": 30}
    run = write_run(tmp_path / "run", arrays([3, 1], "gaussian", **more), "Pendulum-v1", **config)
    assert tp.load_env(run).unwrapped.g == 0.0

    def printed(*flags):
        tp.main([str(run), *flags])
        return capsys.readouterr().out

    texts = [printed("-n", "2", *flags) for flags in (["-d"], ["-d", "-nr"], [])]
    lines = [text.splitlines() for text in texts]
    assert texts[0] == texts[1] and not {*lines[0]} & {*lines[2]}
    assert texts[0].count("length    30") == 2
    env, get_action, ep_ret = tp.load_env(run), tp.load_policy(run, seed=3), 0.0
    o, _ = env.reset(seed=3)
    assert len({float(tp.load_policy(run, seed=seed)(o)[0]) for seed in range(3)}) == 3
    for _ in range(30):
        o, r, *_ = env.step(get_action(o))
        ep_ret += r
    assert f"return {ep_ret:>10.3f}" in printed("-n", "1", "--seed", "3")
    # Of one seed, actions and the environment still draw numbers of their own.
    act, mean = (tp.load_policy(run, deterministic=d, seed=3) for d in (False, True))
    noise = [act([0, 0, 1]) - mean([0, 0, 1]) for _ in range(9)]
    drawn = gym.utils.seeding.np_random(3)[0].standard_normal((9, 1))
    assert not np.isclose(noise, drawn).any()
    assert printed("-n", "1", "--len", "0").count("length   200") == 1
    # A file that names its environment is enough.
    config = json.dumps({"env_id": "Pendulum-v1", "script": "x.py", **config})
    saved = dict(np.load(run / "policy.npz"))
    run = tmp_path / "pendulum.npz"
    np.savez(run, **saved, config=config)
    assert printed("-n", "2", "-d") == texts[0]


def test_earlier_saves_by_epoch(tmp_path, capsys):
    run = write_run(tmp_path / "run", arrays([4, 2], "categorical"), "CartPole-v1")
    for epoch in (3, 5):  # the later one pushes right, whatever it sees
        saved = arrays([4, 2], "categorical", seed=epoch)
        saved["bias_0"] = np.float32([0, 100 * (epoch == 5)])
        np.savez(run / f"policy_{epoch}.npz", **{**saved, "epoch": epoch})
    found = {itr: tp.find_policy(run, itr)["epoch"] for itr in ("last", -1, 3, 5)}
    assert found == {"last": 7, -1: 7, 3: 3, 5: 5}
    env = gym.make("CartPole-v1")
    env.reset(seed=0)
    length = 1 + next(n for n in itertools.count() if env.step(1)[2])
    for flags, found in ([], False), (["-i", "5"], True):
        tp.main([str(run), "-n", "1", *flags])
        said = capsys.readouterr().out
        assert ("after epoch 5" in said) is (f"length {length:>5}\n" in said) is found
    with pytest.raises(UsageError, match=r"only policy.npz, policy_3.npz, .*--snapshots"):
        tp.load_policy(run, 4)


@pytest.mark.parametrize(
    ("env_id", "obs", "n"), [("FrozenLake-v1", 16, 4), ("Blackjack-v1", 45, 2)]
)
def test_from_python(tmp_path, env_id, obs, n):
    """Observations are flattened as in training: one of 16 numbers; out of 32, of 11 and of 2."""
    saved = arrays([obs, n], "categorical")
    run = write_run(tmp_path / "run", saved, env_id)
    env, get_action = tp.load_env(run), tp.load_policy(str(run), deterministic=True)
    o, _ = env.reset(seed=0)
    assert get_action(o) == np.argmax(output(saved, o))
    env.step(get_action(o))


def test_discrete_actions_that_do_not_start_at_0(tmp_path, monkeypatch):
    """The policy counts from 0; what `load_env` returns shifts the action."""
    taken, real = [], gym.make

    def step(action):
        taken.append(action)
        return action - 5

    def make(*args, **kwargs):
        space = gym.spaces.Discrete(2, start=5)
        return gym.wrappers.TransformAction(real(*args, **kwargs), step, space)

    monkeypatch.setattr(gym, "make", make)
    tp.main([str(write_run(tmp_path / "run", arrays([4, 2], "categorical"), "CartPole-v1"))])
    assert set(taken) == {5, 6}


HOPPER = {"act_low": -np.ones(3, np.float32), "act_high": np.ones(3, np.float32)}
HOPPER = arrays([11, 3], "gaussian", log_std=np.zeros(3, np.float32), **HOPPER)


def test_video(tmp_path, monkeypatch):
    """Hopper, drawn without a display, if this machine can, by a camera that goes along."""
    monkeypatch.delenv("DISPLAY", raising=False)
    run = write_run(tmp_path / "hopper_0.9_s0", HOPPER, "Hopper-v4", max_ep_len=10)
    shutil.copy(run / "policy.npz", run / "policy_7.npz")
    done = command_line(run, "-n", 2, "--video", tmp_path / "videos")
    if done.returncode == 2:
        assert "apt-get install" in done.stderr and done.stderr.count("\n") == 1
        pytest.skip(f"no rendering on this machine: {done.stderr}")
    assert done.returncode == 0, done.stderr
    command_line(run, "-n", 1, "--itr", 7, "--video", tmp_path / "videos")
    videos = sorted((tmp_path / "videos").glob("*.mp4"))
    names = [f"hopper_0.9_s0{x}.mp4" for x in ("-episode-0", "-episode-1", "_7-episode-0")]
    assert [v.name for v in videos] == names
    from moviepy import VideoFileClip

    with VideoFileClip(str(videos[0])) as clip:
        assert clip.n_frames >= 5 and clip.get_frame(0).std() > 10  # a picture, not a blank
    # In a process of its own: MuJoCo, once imported, keeps the way in which it draws.
    source = f"""
import numpy as np
from benchmark import test_policy as tp
env = tp.load_env({str(run)!r}, "rgb_array")
for x in (0, 10):  # far to the right, it is in the middle of the picture still
    env.reset(seed=0)
    env.unwrapped.data.qpos[0] = x
    env.step(np.zeros(3, np.float32))
    red, green, _ = np.moveaxis(env.render().astype(int), 2, 0)
    print(np.mean(np.nonzero(red > green + 50)[1]))
"""
    robots = [float(word) for word in mpi(tmp_path, source, 1).stdout.split()]
    assert robots[0] == pytest.approx(robots[1], abs=5)


def test_rendering_that_cannot_work_says_what_to_install(tmp_path):
    run = write_run(tmp_path / "run", HOPPER, "Hopper-v4")
    done = command_line(run, "--video", tmp_path / "videos", MUJOCO_GL="glfw")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "apt-get install libegl1" in done.stderr
    assert not (tmp_path / "videos").exists()
    if sys.platform == "linux":
        done = command_line(run, "--render")
        assert done.returncode == 2 and "--video" in done.stderr


def test_ctrl_c_ends_without_a_traceback():
    command = [sys.executable, ROOT / "benchmark/test_policy.py", POLICIES / "ppo_hopper.npz"]
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    how["preexec_fn"] = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # jobs may ignore it
    process = subprocess.Popen([*command, "-n", "1000000"], **how)
    assert b"ppo_torch.py" in process.stdout.readline()
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60)[1] == b"" and process.returncode == 130


# Published ----------------------------------------------------------------------------------------

ROWS = (POLICIES / "README.md").read_text()
ROWS = re.findall(r"^\| \[(\w+\.npz)\].* (-?\d+) \| (\d+) \|$", ROWS, flags=re.M)


def test_the_published_policies_are_those_of_the_table_and_small():
    assert [name for name, *_ in ROWS] == sorted(path.name for path in POLICIES.glob("*.npz"))
    assert sum(path.stat().st_size for path in POLICIES.glob("*.npz")) < 4e6
    tasks = {name.split("_")[1] for name, *_ in ROWS}
    assert tasks == {f"{task.lower()}.npz" for task in report.ENVS}


@pytest.mark.parametrize("name, mean, deviation", ROWS)
def test_a_published_policy_returns_what_the_table_says(name, mean, deviation, capsys):
    """With other episodes than the table's. The median of three: a robot may fall once."""
    tp.main([str(POLICIES / name), "-d", "-n", "3", "--seed", "1"])
    found = re.findall(r"return +(\S+)", capsys.readouterr().out)
    margin = 4 * float(deviation) + 0.05 * abs(float(mean))
    assert np.median(np.float64(found)) == pytest.approx(float(mean), abs=margin)


def test_a_policy_is_published_with_its_environment_and_its_returns(tmp_path, capsys):
    """Of a run whose last save is older than its last epoch; the file does as the run does."""
    more = {"act_low": np.float32([-2]), "act_high": np.float32([2]), "log_std": np.float32([0])}
    config = {"max_ep_len": 1000, "script": "ppo_torch.py", "seed": 3, "gamma": 0.9999}
    config |= {"hidden_sizes": [64, 32]}
    run = write_run(tmp_path / "x_s3", arrays([3, 1], "gaussian", **more), "Pendulum-v1", **config)
    lines = [f"{i}\t1\t{400 * (i + 1)}\t1\n" for i in range(9)]
    (run / "progress.txt").write_text(
        "Epoch\tAverageEpRet\tTotalEnvInteracts\tTime\n" + "".join(lines)
    )
    folder = tmp_path / "policies"
    folder.mkdir()
    report.publish([str(run)], folder)
    capsys.readouterr()
    said = []
    for path in (run, folder / "ppo_pendulum.npz"):
        tp.main([str(path), "-d", "-n", "100"])
        said.append(capsys.readouterr().out)
    assert said[0] == said[1] and "Pendulum-v1, ppo_torch.py, after epoch 7" in said[0]
    mean, deviation = map(float, re.search(r"mean (\S+) +std (\S+)", said[0]).groups())
    row = "| [ppo_pendulum.npz](ppo_pendulum.npz) | ppo_torch.py | gamma 0.9999 | 3 | 2.8k "
    assert report.trained(folder).endswith(f"\n{row}| {mean:.0f} | {deviation:.0f} |")
    (run / "config.json").write_text('{"env_id": "Pendulum-v1", "script": "ppo_mine.py"}')
    with pytest.raises(ValueError, match=r"x_s3 is not a run of one of the twelve scripts"):
        report.publish([str(run)], folder)


def test_the_picture_of_robots(tmp_path):
    """They move side by side, in the middle of their panels, and what is between them is clear."""
    from PIL import Image

    picture = POLICIES / "robots.webp"
    assert picture.stat().st_size < 2e6
    out, robots = tmp_path / "robots.webp", [POLICIES / f"ppo_{x}.npz" for x in ("hopper", "ant")]
    words = [*robots, "--out", out, "--seconds", 0.2]
    program = ROOT / "benchmark" / "picture.py"
    done = conftest.run(program, *words, check=False, env={"DISPLAY": ""})
    if "apt-get install" in done.stderr:
        pytest.skip(f"no rendering on this machine: {done.stderr}")
    assert done.returncode == 0, done.stderr
    with Image.open(out) as film, Image.open(picture) as whole:
        assert film.n_frames == 4 and film.width < 0.5 * whole.width and whole.n_frames > 60
        first = np.asarray(film.convert("RGBA"), int)
        film.seek(3)
        last = np.asarray(film.convert("RGBA"), int)
    (gap,) = np.nonzero((first[:, :, 3] == 0).all(axis=0))
    assert gap.mean() == pytest.approx(film.width / 2, abs=1)
    for panel in (slice(0, gap[0]), slice(gap[-1] + 1, None)):
        a, b = first[:, panel, :3], last[:, panel, :3]
        assert np.abs(a - b).mean() > 1
        robot = np.nonzero(a[:, :, 0] > a[:, :, 2] + 40)[1]
        assert len(robot) > 100 and np.mean(robot) == pytest.approx(a.shape[1] / 2, rel=0.3)
    done = conftest.run(program, tmp_path / "no.npz", check=False)
    assert done.returncode == 1 and done.stderr.startswith("picture.py: error: ")


# Files --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"bias_0": np.full(8, np.nan, np.float32)}, "not finite"),
        ({"activation": "gelu"}, "gelu"),
        ({"log_std": None}, "log_std"),
        ({"log_std": np.float32([np.nan])}, "not numbers"),
        ({"act_low": np.zeros(3, np.float32)}, "no policy"),
        ({"obs_mean": np.zeros(4), "obs_std": np.zeros(4)}, "not numbers"),
    ],
)
def test_files_that_hold_no_policy(tmp_path, change, word):
    """Pickles, bombs and damaged archives are in test_files.py."""
    more = {"act_low": np.float32([-2]), "act_high": np.float32([2]), "log_std": np.float32([0])}
    policy = {**arrays([4, 8, 1], "gaussian", **more), "layers": np.ones(3)}
    assert len(load(tmp_path, policy)["layers"]) == 2  # the policy's, not the array of this name
    with pytest.raises(UsageError, match=word):
        load(tmp_path, {k: v for k, v in {**policy, **change}.items() if v is not None})


class Blind(gym.Env):
    """An environment that nobody can look at."""

    observation_space, action_space = gym.spaces.Box(-1, 1, (4,)), gym.spaces.Discrete(2)


@pytest.mark.parametrize(
    ("args", "word"),
    [
        ([], "required"),
        (["unknown"], "NoSuchEnv"),
        (["broken"], "config.json"),
        (["nothing"], "no policy.npz in nothing\n"),
        (["run", "--len", "-2"], "\n  len  "),
        (["run", "--render", "--video", "x"], "--video"),
        (["run", "--render", "-nr"], "--render excludes --video and --norender"),
        (["run", "--itr", "first"], "--itr"),
        (["run", "-i", "3"], "only policy.npz"),
        (["other"], "the policy takes 4 numbers, the environment observes 3"),
        (["run/policy.npz"], "does not name its environment: give the directory of its run"),
        (["run/policy.npz", "-i", "3"], "--itr is for directories"),
        (["blind", "--video", "x"], "error: Blind-v0 cannot be drawn: no render mode 'rgb_array'"),
    ],
)
def test_bad_input_is_one_line(tmp_path, monkeypatch, capsys, args, word):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "40")
    good = arrays([4, 2], "categorical")
    for name in ("run", "unknown", "broken", "nothing"):
        write_run(Path(name), good, "NoSuchEnv-v0" if name == "unknown" else "CartPole-v1")
    write_run(Path("other"), good, "Pendulum-v1")
    write_run(Path("blind"), good, "Blind-v0")
    monkeypatch.setitem(gym.registry, "Blind-v0", gym.envs.registration.EnvSpec("Blind-v0", Blind))
    Path("broken/config.json").write_text("{")
    Path("nothing/policy.npz").unlink()
    with pytest.raises(SystemExit) as stopped:
        tp.main(args)
    assert stopped.value.code == 2
    said = capsys.readouterr().err
    assert word in said and "Traceback" not in said
    assert "For full helptext" in said or said.startswith("test_policy.py: error: ")
