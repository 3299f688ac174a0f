"""The command line: flags, bad input, signals, exit codes. Every script is held to it."""

import dataclasses
import json
import os
import random
import signal
import subprocess
from typing import Literal

import gymnasium as gym
import numpy as np
import pytest
from conftest import (
    FAKE,
    ON_POLICY,
    SCRIPTS,
    command,
    load_script,
    progress,
    read_status,
    run,
    run_dir,
    saved_epochs,
    wait_for,
)
from conftest import mpi as run_source
from gymnasium import spaces

from common import UsageError, mpi
from common.args import JsonDict, NonNegInt, PosFloat, PosInt, Sizes, Unit, check_args, parse_args
from common.run import make_env

QUICK = ["--env-id", "CartPole-v1", "--steps-per-epoch", "400"]


@dataclasses.dataclass
class Args:
    """A few flags."""

    # Numbers
    lr: PosFloat = 1e-3  # step size
    gamma: Unit = 0.99  # discount
    sizes: Sizes = (64, 64)  # layers
    n: PosInt = 1  # a number
    seed: NonNegInt = 0  # random seed
    num_cpu: PosInt | Literal["auto"] = 1  # ranks
    # The rest
    name: str | None = None  # a name
    activation: Literal["tanh", "relu"] = "tanh"  # what follows a layer
    resume: bool | str = False  # go on
    env_kwargs: JsonDict = dataclasses.field(default_factory=dict)  # arguments
    verbose: bool = False  # talk


def test_flags():
    words = ["--lr", "0.5", "--gamma", "1", "--sizes", "32", "16", "--verbose", "--n", "7"]
    args = parse_args(Args, [*words, "--env-kwargs", '{"a": [1, null]}'])
    assert args == Args(0.5, 1.0, (32, 16), 7, env_kwargs={"a": [1, None]}, verbose=True)
    args = parse_args(Args, ["--num_cpu", "auto", "--env_kwargs", "{}", "--resume", "--name", "x"])
    assert args == Args(num_cpu="auto", name="x", resume=True)
    assert parse_args(Args, ["--resume"]).resume is True


@pytest.mark.parametrize(
    "words, message",
    [
        ("--lr 0", "--lr must be above 0, not 0.0"),
        ("--lr nan", "--lr must be above 0, not nan"),
        ("--lr inf", "--lr must be above 0, not inf"),
        ("--gamma 2", "--gamma must be between 0 and 1, not 2.0"),
        ("--sizes 64 0", "--sizes must be a list, each an integer of at least 1, not (64, 0)"),
        ("--seed -1", "--seed must be an integer of at least 0, not -1"),
        ("--n 1.5", "--n: invalid literal for int() with base 10: '1.5'"),
        ("--n", "--n: missing value"),
        ("--vebrose", "Unrecognized options: --vebrose (perhaps --verbose?)"),
        ("--env_kwarg {}", "Unrecognized options: --env_kwarg, {} (perhaps --env-kwargs?)"),
        ("--activation foo", "--activation: expected one of tanh, relu, not foo"),
        ("--num-cpu 0", "--num-cpu must be an integer of at least 1, not 0"),
        ("--num-cpu all", "--num-cpu: no type matching INT|{auto}"),
        ("--resume /nowhere --lr 1", "cannot resume /nowhere: "),
        ("stray", "Unrecognized options: stray"),
        ("--verbose True", "Unrecognized options: True (a switch takes no value: --name sets"),
        ("--env-kwargs [1]", "--env-kwargs: expected a JSON object, got [1]"),
        ("--env-kwargs {", "--env-kwargs: Expecting property name"),
        ('--env-kwargs {"a":[Infinity]}', "--env-kwargs: config.json cannot hold NaN and inf"),
    ],
)
def test_bad_flags_are_one_line(monkeypatch, words, message):
    """Whole, however narrow the terminal is."""
    monkeypatch.setenv("COLUMNS", "40")
    with pytest.raises(UsageError) as e:
        parse_args(Args, words.split())
    assert str(e.value).startswith(message) and "\n" not in str(e.value)


WRONG = [
    *({"n": x} for x in (500.0, True, "7", None, 0)),
    *({"lr": x} for x in ("0.1", None, 0, float("nan"))),
    *({"sizes": x} for x in ((64, 1.0), (64, 0), 64)),
    *({"num_cpu": x} for x in ("all", 0, True)),
    *({"gamma": x} for x in (1.5, [0.5])),
    {"activation": "elu"},
]


@pytest.mark.parametrize("values", WRONG, ids=str)
def test_numbers_are_checked_from_python(values):
    (name,) = values
    with pytest.raises(UsageError, match=rf"^--{name.replace('_', '-')} must be .*, not "):
        check_args(Args(**values))
    check_args(Args(lr=1, sizes=[32, 16], num_cpu="auto", resume="dir", gamma=np.float64(0.5)))
    check_args(Args(lr=np.float32(1e-3), seed=np.int64(3)))


BOX = spaces.Box(-1, 1, (2,))


class AnySpace(gym.Env):
    """Observations of any space, at random; stopped by Ctrl-C at a step."""

    def __init__(self, observation_space=BOX, action_space=BOX, ctrl_c_at=None):
        self.observation_space, self.action_space = observation_space, action_space
        self.steps_left = ctrl_c_at or -1

    def reset(self, *, seed=None, options=None):
        self.observation_space.seed(seed)
        return self.observation_space.sample(), {}

    def step(self, action):
        self.steps_left -= 1
        if self.steps_left == 0:
            raise KeyboardInterrupt
        return self.observation_space.sample(), 0.0, False, False, {}


ODD = {
    "Any": AnySpace,
    "Rows": lambda: AnySpace(spaces.Dict({"a": BOX, "b": spaces.Sequence(BOX)})),
    "Empty": lambda: AnySpace(spaces.Box(-1, 1, (0,))),
    "Images": lambda: AnySpace(spaces.Box(0, 255, (8, 8, 3), np.uint8)),
    "Ints": lambda: AnySpace(BOX, spaces.Box(0, 5, (2,), np.int32)),
    "Huge": lambda: AnySpace(BOX, spaces.Box(-3e38, 3e38, (2,))),
    "MultiDiscrete": lambda: AnySpace(BOX, spaces.MultiDiscrete([2, 2])),
}


@pytest.fixture
def odd_spaces(monkeypatch):
    """Register the environments in `ODD`."""
    for name, make in ODD.items():
        spec = gym.envs.registration.EnvSpec(f"{name}-v0", make)
        monkeypatch.setitem(gym.registry, spec.id, spec)


BAD_INPUT = [
    (["--fo", "3"], "Unrecognized options: --fo, 3"),
    (["--env-id", "Nope-v0"], "cannot make Nope-v0: NameNotFound: Environment `Nope`"),
    (["--env-id", "no_such_module:Env-v0"], "cannot make no_such_module:Env-v0"),
    (["--env-id", "Rows-v0"], "has Dict observations, which no vector can hold"),
    (["--env-id", "Empty-v0"], "Empty-v0 has empty observations"),
    (["--env-id", "Images-v0"], "has images as observations: these networks take vec"),
    (["--env-id", "Ints-v0"], "has integer actions in a Box; supported: real numbers"),
    (["--env-id", "MultiDiscrete-v0"], "has MultiDiscrete actions; supported: Box"),
    (["--env-id", "Any-v0", "--env-kwargs", '{"x": 1}'], "cannot make Any-v0: TypeError: "),
    (["--env-id", "FrozenLake-v1", "--env-kwargs", '{"map_name": "9x9"}'], "KeyError: '9x9'"),
    (["--gamma", "2"], "--gamma must be between 0 and 1, not 2.0"),
    (["--exp-name", "a/../../b"], "--exp-name must be a plain name"),
    (["--data-dir", "{tmp}/file"], "cannot write to"),
    (["--resume", "--overwrite"], "--resume and --overwrite exclude each other"),
    (["--num-cpu", "3", "--steps-per-epoch", "400"], "400 is not a multiple of the 3 ranks"),
]


@pytest.mark.parametrize("script", ["ppo_torch", "trpo_tf1", "sac_torch"])
def test_bad_input(tmp_path, script):
    """One clear line on stderr, on one rank, exit code 2, no directory made."""
    (tmp_path / "file").write_text("")
    base = ["--env-id", "Pendulum-v1", "--data-dir", tmp_path / "data"]
    cases = BAD_INPUT[:2] + BAD_INPUT[-3:] if script == "ppo_torch" else BAD_INPUT[-1:]
    for flags, message in cases:
        flags = [flag.format(tmp=tmp_path) for flag in flags]
        result = run(script, *base, *flags, check=False, cwd=tmp_path)
        lines = [line for line in result.stderr.splitlines() if line.strip()]
        assert result.returncode == 2, result.stderr
        assert len(lines) == 1 and message in lines[0], result.stderr
        assert lines[0].startswith(f"{script}.py: error: ")
    made = {p.name for p in tmp_path.iterdir()} - {"file", "__pycache__"}
    assert not made


@pytest.mark.parametrize("script", SCRIPTS)
def test_bad_input_is_refused_by_every_script(tmp_path, odd_spaces, script):
    """The same in this process, which is quicker: before a directory is made."""
    module, data = load_script(script), tmp_path / "data"
    cases = BAD_INPUT[1:12] + BAD_INPUT[13:14]
    if script.endswith("_torch"):
        cases = [*cases, (["--device", "quantum"], "--device quantum cannot be used")]
        cases = [*cases, (["--device", "meta"], "--device meta cannot be used")]
    if script.startswith(("ddpg", "td3", "sac")):
        cases = [*cases, (["--env-id", "Huge-v0"], "Huge-v0 has actions without bounds")]
    if "ppo" in script:
        words = ["--minibatch-size", "4001"]
        cases = [*cases, (words, "--minibatch-size 4001 is above --steps-per-epoch, 4000")]
    for flags, message in cases:
        words = ["--env-id", "Pendulum-v1", "--data-dir", str(data), *flags]
        with pytest.raises(UsageError) as e:
            module.train(parse_args(module.Args, words))
        assert message in str(e.value) and "\n" not in str(e.value)
    wrong = [{"gamma": 1.5}, {"epochs": 0, "overwrite": True}, {"steps_per_epoch": 500.0}]
    for values in [*wrong, {"snapshots": "False"}, {"seed": True}, {"num_cpu": 3}]:
        with pytest.raises(UsageError, match=r"must be|start Python with mpirun"):
            module.train(module.Args(env_id="Pendulum-v1", data_dir=str(data), **values))
    assert not data.exists()


@pytest.mark.parametrize("script", SCRIPTS)
def test_help(script, capsys):
    module = load_script(script)
    with pytest.raises(SystemExit) as e:
        parse_args(module.Args, ["--help"])
    out = capsys.readouterr().out
    assert not e.value.code and f"{script}.py" in out
    names = [field.name for field in dataclasses.fields(module.Args)]
    assert all(f" --{name.replace('_', '-')}" in out for name in names)
    assert "discount factor (default: 0.99)" in out


SIGNALS = [(signal.SIGTERM, 1), (signal.SIGINT, 1), (signal.SIGUSR1, 1), (signal.SIGINT, 2)]


@pytest.mark.parametrize("signum, ranks", SIGNALS)
def test_a_signal_ends_the_run_at_a_clean_cut(tmp_path, signum, ranks):
    flags = ["--epochs", 500, "--epoch-seconds", 0.2, "--data-dir", tmp_path, "--exp-name", "r"]
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    directory = run_dir(tmp_path, "r")
    process = subprocess.Popen(command(FAKE, *flags, ranks=ranks), **pipes)
    wait_for(lambda: len(saved_epochs(directory)) > 2)
    process.send_signal(signum)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + signum or (process.returncode and ranks > 1)
    assert err.count(f"{signum.name}: stopping at the end of this epoch") == 1
    status = read_status(directory)
    assert status["status"] == "interrupted"
    assert status["epoch"] == len(progress(directory)) == saved_epochs(directory)[-1]


def test_num_cpu_relaunches_under_mpirun(tmp_path):
    run("ppo_torch", *QUICK, "--epochs", 1, "--num-cpu", 2, "--data-dir", tmp_path)
    config = run_dir(tmp_path, "ppo_torch_CartPole-v1") / "config.json"
    assert json.loads(config.read_text())["ranks"] == 2


def test_resume_relaunches_with_the_ranks_that_the_run_had(tmp_path):
    """However they were started; other ranks are refused."""
    directory = run_dir(tmp_path, "r")
    run(FAKE, "--epochs", 1, "--data-dir", tmp_path, "--exp-name", "r", ranks=2)
    for epochs, ranks in ((2, 1), (3, 2), (4, 1)):
        run(FAKE, "--resume", directory, "--epochs", epochs, ranks=ranks)
        assert json.loads((directory / "config.json").read_text())["ranks"] == 2
        assert len(progress(directory)) == read_status(directory)["epoch"] == epochs
    for flags, ranks in ((["--num-cpu", 1], 1), ([], 3)):
        refused = run(FAKE, "--resume", directory, *flags, ranks=ranks, check=False)
        assert refused.returncode == 2
        text = f"error: cannot resume {directory}: ranks was 2, is {ranks}, start it with"
        assert refused.stderr.count(f"{text} mpirun -np 2") == 1


@pytest.mark.parametrize("cores, ranks", [(1, None), (6, "6")])
def test_num_cpu_auto_takes_all_cores(monkeypatch, cores, ranks):
    started = []
    monkeypatch.setattr(mpi, "cores", lambda: cores)
    monkeypatch.setattr(os, "execv", lambda path, words: started.append(words))
    mpi.fork("auto")
    assert [words[1:3] for words in started] == ([["-np", ranks]] if ranks else [])
    monkeypatch.setenv("PMI_RANK", "0")  # under an mpirun of the user's: as many as there are
    mpi.fork("auto")
    assert len(started) == bool(ranks)


def test_without_tensorflow(tmp_path):
    """One line on one rank, exit code 2."""
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['tensorflow'] = None")
    done = run("vpg_tf1", ranks=2, check=False, env={"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("vpg_tf1.py: error: TensorFlow is not installed")


# From Python --------------------------------------------------------------------------------------


def test_a_run_after_one_that_was_stopped(tmp_path):
    """In one process: it is not stopped, too."""
    source = """
import os
from common import run
from test_cli import Args

def train(args):
    os.kill(os.getpid(), 15)
    return not run.stop_requested()

try:
    run.main(train, Args)
except SystemExit as e:
    print(e.code, run.stop_requested())
"""
    assert run_source(tmp_path, source, 1).stdout == "143 False\n"


def test_all_that_an_environment_draws_from_is_seeded():
    env = make_env("CartPole-v1", {}, (spaces.Box, spaces.Discrete))
    inner = env.unwrapped

    def draw(**seed):
        env.reset(**seed)
        samples = [space.sample() for space in (inner.action_space, inner.observation_space)]
        return str([random.random(), np.random.rand(), *samples])  # noqa: NPY002

    first, second = draw(seed=3), draw()
    assert first == draw(seed=3) and second == draw() and first != second


TINY = {"steps_per_epoch": 40, "max_ep_len": 20, "epochs": 3, "save_freq": 1, "hidden_sizes": (8,)}
OFF_POLICY = {"start_steps": 20, "update_after": 20, "update_every": 20, "num_test_episodes": 1}


@pytest.mark.parametrize("script", ["ppo_torch", "td3_tf1"])
def test_ctrl_c_in_a_notebook(tmp_path, odd_spaces, monkeypatch, script):
    """The status says so, and the same process can go on."""
    module, left = load_script(script), iter([90])  # steps until Ctrl-C, the first time only
    make = lambda: AnySpace(ctrl_c_at=next(left, None))  # noqa: E731
    monkeypatch.setattr(gym.registry["Any-v0"], "entry_point", make)
    more = {} if script in ON_POLICY else OFF_POLICY
    args = module.Args(env_id="Any-v0", **TINY, **more, exp_name="run", data_dir=str(tmp_path))
    with pytest.raises(KeyboardInterrupt):
        module.train(args)
    directory = run_dir(tmp_path, "run")
    status = read_status(directory)
    assert (status["status"], status["epoch"]) == ("interrupted", 2)
    assert module.train(dataclasses.replace(args, resume=True))
    assert progress(directory).Epoch.tolist() == [0, 1, 2]
    assert read_status(directory)["status"] == "finished"


def test_a_run_that_fails_from_python(tmp_path, monkeypatch):
    """Its directory is free for the next one; what is refused leaves the old run as it is."""
    module, directory = load_script("ppo_torch"), run_dir(tmp_path, "run")
    args = module.Args(env_id="Pendulum-v1", **TINY, data_dir=str(tmp_path), exp_name="run")
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(module, "compute_loss_pi", lambda *args: 1 / 0)
        module.train(args)
    status = read_status(directory)
    assert (status["status"], status["error"]) == ("failed", "ZeroDivisionError: division by zero")
    assert module.train(dataclasses.replace(args, overwrite=True))
    for values in ({"epochs": 0}, {"gamma": 1.5}, {"env_id": "Nope-v0"}):
        with pytest.raises(UsageError):
            module.train(dataclasses.replace(args, overwrite=True, **values))
    assert len(progress(directory)) == 3


@pytest.mark.parametrize("datestamp", [False, True])
def test_resume_takes_the_arguments_of_a_directory(tmp_path, monkeypatch, datestamp):
    module = load_script("ppo_torch")
    args = {**TINY, "gamma": 0.5, "env_kwargs": {"g": 9.0}, "env_id": "Pendulum-v1"}
    assert module.train(module.Args(**args, datestamp=datestamp, data_dir=str(tmp_path)))
    (directory,) = tmp_path.glob("*/*")
    monkeypatch.chdir("/")
    words = ["--resume", str(directory)]
    again = parse_args(module.Args, words)
    assert {name: getattr(again, name) for name in args} == args
    assert module.train(again)  # a no-op
    assert module.train(parse_args(module.Args, [*words, "--epochs", "4"]))
    assert module.train(dataclasses.replace(again, resume=directory, epochs=np.int64(5)))
    assert len(progress(directory)) == 5 and len(os.listdir(tmp_path)) == 1
    for script, flags, text in (
        ("ppo_torch", ["--gamma", "0.9"], "gamma was 0.5, is 0.9"),
        ("ppo_torch", ["--resume", str(directory.parent)], "cannot resume .*config.json"),
        ("ppo_torch", ["--overwrite"], "exclude each other"),
        ("vpg_torch", [], r"script was ppo_torch\.py, is vpg_torch\.py"),
    ):
        module = load_script(script)
        with pytest.raises(UsageError, match=text):
            module.train(parse_args(module.Args, [*words, *flags]))
    (directory / "config.json").write_text('{"gamma": "high"}')
    with pytest.raises(UsageError, match="--gamma must be between 0 and 1, not 'high'"):
        parse_args(module.Args, words)


# Observation spaces -------------------------------------------------------------------------------

FLATTENED = [
    ("Discrete(4)", spaces.Discrete(4), 4),
    ("from 5", spaces.Discrete(3, start=5), 3),
    ("MultiDiscrete", spaces.MultiDiscrete([2, 3]), 5),
    ("MultiBinary", spaces.MultiBinary(3), 3),
    ("Tuple", spaces.Tuple([spaces.Discrete(2), BOX]), 4),
    ("Dict", spaces.Dict({"a": BOX, "b": spaces.Dict({"c": spaces.MultiBinary((2, 2))})}), 6),
    ("matrix", spaces.Box(-1, 1, (2, 3)), 6),
]


@pytest.mark.parametrize("name, space, size", FLATTENED, ids=[name for name, *_ in FLATTENED])
def test_observations_are_flattened(odd_spaces, name, space, size):
    """As Gymnasium's own `flatten` has it: categories one-hot, one after another."""
    env = make_env("Any-v0", {"observation_space": space}, (spaces.Box,), bounded=True)
    seen, _ = env.reset(seed=3)
    space.seed(3)
    np.testing.assert_array_equal(seen, spaces.flatten(space, space.sample()))
    assert seen.shape == env.observation_space.shape == env.step(np.zeros(2))[0].shape == (size,)


@pytest.mark.parametrize(
    "script, env_id, env_kwargs, size",
    [
        ("ppo_torch", "Blackjack-v1", {}, 32 + 11 + 2),
        ("trpo_tf1", "FrozenLake-v1", {}, 16),
        ("sac_torch", "Any-v0", {"observation_space": FLATTENED[5][1]}, 6),
        ("ddpg_tf1", "Any-v0", {"observation_space": FLATTENED[5][1]}, 6),
    ],
)
def test_scripts_train_on_flattened_observations(
    tmp_path, odd_spaces, script, env_id, env_kwargs, size
):
    module = load_script(script)
    more = {} if script in ON_POLICY else OFF_POLICY
    more = more | ({"compile": False} if script == "sac_torch" else {})
    args = {"env_id": env_id, "env_kwargs": env_kwargs, "exp_name": "run"}
    assert module.train(module.Args(**args, **TINY, **more, data_dir=str(tmp_path)))
    with np.load(run_dir(tmp_path, "run") / "policy.npz") as policy:
        assert policy["weight_0"].shape == (size, 8)
