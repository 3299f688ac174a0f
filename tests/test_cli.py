"""The command line: flags, bad input, signals, exit codes. Every script is held to it."""

import json
import os
import random
import signal
import subprocess
from dataclasses import field, fields, replace
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
    saved_epoch,
    wait_for,
)
from conftest import mpi as run_source
from gymnasium import spaces
from pydantic import ValidationError
from pydantic.dataclasses import dataclass

from common import UsageError, mpi
from common.args import JsonDict, NonNegInt, PosFloat, PosInt, Sizes, Unit, parse_args
from common.run import make_env

QUICK = ["--env-id", "CartPole-v1", "--steps-per-epoch", "400"]


@dataclass
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
    env_kwargs: JsonDict = field(default_factory=dict)  # arguments
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
        ("--lr 0", "lr Input should be greater than 0"),
        ("--lr nan", "lr Input should be"),
        ("--lr inf", "lr Input should be a finite number"),
        ("--gamma 2", "gamma Input should be less than or equal to 1"),
        ("--sizes 64 0", "sizes.1 Input should be greater than or equal to 1"),
        ("--seed -1", "seed Input should be greater than or equal to 0"),
        ("--n 1.5", "invalid literal for int() with base 10: '1.5'"),
        ("--n", "--n"),
        ("--vebrose", "Perhaps you meant: --verbose"),
        ("--env_kwarg {}", "Perhaps you meant: --env-kwargs"),
        ("--activation foo", "invalid choice 'foo'"),
        ("--num-cpu 0", "num_cpu"),
        ("--num-cpu all", "INT|{auto}"),
        ("stray", "Unrecognized options: stray"),
        ("--env-kwargs [1]", "env_kwargs Input should be a valid dictionary"),
        ("--env-kwargs {", "Expecting property name"),
        ('--env-kwargs {"a":[Infinity]}', "env_kwargs Value error, Out of range float values"),
    ],
)
def test_bad_flags(monkeypatch, capsys, words, message):
    """A box says what is wrong with which; nothing of it is cut, however narrow the terminal is."""
    monkeypatch.setenv("COLUMNS", "40")
    with pytest.raises(SystemExit) as e:
        parse_args(Args, words.split())
    said = "".join(capsys.readouterr().err.replace("│", "").split())
    assert e.value.code == 2 and "".join(message.split()) in said, said


WRONG = [
    *({"n": x} for x in (500.5, "x", None, 0)),
    *({"lr": x} for x in ("high", None, 0, float("nan"))),
    *({"sizes": x} for x in ((64, 1.5), (64, 0), 64)),
    *({"num_cpu": x} for x in ("all", 0)),
    *({"gamma": x} for x in (1.5, [0.5])),
    {"activation": "elu"},
    {"verbose": "loud"},
    {"env_kwargs": {"a": float("inf")}},
]


@pytest.mark.parametrize("values", WRONG, ids=str)
def test_arguments_are_checked_from_python(values):
    (name,) = values
    with pytest.raises(ValidationError, match=rf"errors? for Args\n{name}"):
        Args(**values)
    Args(lr=1, sizes=[32, 16], num_cpu="auto", resume="dir", gamma=np.float64(0.5))


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
    (["--env-id", "Nope-v0"], "cannot make Nope-v0: NameNotFound: Environment `Nope`"),
    (["--env-id", "no_such_module:Env-v0"], "cannot make no_such_module:Env-v0"),
    (["--env-id", "Rows-v0"], "Rows-v0 has Dict("),
    (["--env-id", "Ints-v0"], "(2,), int32); supported: observations that a vector can hold, and "),
    (["--env-id", "MultiDiscrete-v0"], "and MultiDiscrete([2 2]); supported: "),
    (["--env-id", "Any-v0", "--env-kwargs", '{"x": 1}'], "cannot make Any-v0: TypeError: "),
    (["--env-id", "FrozenLake-v1", "--env-kwargs", '{"map_name": "9x9"}'], "KeyError: '9x9'"),
    (["--exp-name", "a/../../b"], "--exp-name must be a plain name"),
    (["--data-dir", "{tmp}/file"], "cannot write to"),
    (["--exp-name", "x" * 300], "cannot write to"),
    (["--resume", "--datestamp"], "--resume DIR goes on with a run"),
    (["--resume", "--overwrite"], "--resume and --overwrite exclude each other"),
]
# Of processes: on several ranks, before and after MPI has started, and what no memory holds.
OF_PROCESSES = [
    (["--fo", "3"], 1, "Unrecognized options: --fo, 3"),
    (["--gamma", "2"], 2, "Input should be less than or equal to 1"),
    (["--env-id", "Nope\x1b[31m\n-v0"], 2, "error: cannot make Nope\ufffd[31m -v0"),
    (["--num-cpu", "3", "--steps-per-epoch", "400"], 1, "400 is not a multiple of the 3 ranks"),
    (["--steps-per-epoch", 10**13], 1, "error: Unable to allocate"),
]


@pytest.mark.parametrize("script", ["ppo_torch", "trpo_tf1", "sac_torch"])
def test_bad_input(tmp_path, script):
    """Told on stderr, by one rank; exit code 2, no directory made."""
    words = ["--env-id", "Pendulum-v1", "--data-dir", tmp_path / "data"]
    cases = OF_PROCESSES[0 if script == "ppo_torch" else -1 :]
    if script == "sac_torch":
        cases = [(["--replay-size", 10**14], 1, "error: Unable to allocate")]
    for flags, ranks, message in cases:
        result = run(script, *words, *flags, ranks=ranks, check=False, cwd=tmp_path)
        assert result.returncode == 2, result.stderr
        said = " ".join(result.stderr.replace("│", " ").split())
        assert said.count(message) == 1 and "Traceback" not in said, result.stderr
    assert not [p for p in tmp_path.iterdir() if p.name != "__pycache__"]


@pytest.mark.parametrize("script", SCRIPTS)
def test_bad_input_is_refused_by_every_script(tmp_path, odd_spaces, script):
    """Before a directory is made."""
    module, data = load_script(script), tmp_path / "data"
    (tmp_path / "file").touch()
    cases = [*BAD_INPUT]
    if script.endswith("_torch"):
        cases.append((["--device", "quantum"], "--device quantum cannot be used"))
        cases.append((["--device", "meta"], "--device meta cannot be used"))
    if script.startswith(("ddpg", "td3", "sac")):
        cases.append((["--env-id", "Huge-v0"], "Box actions of real numbers, with bounds"))
    if "ppo" in script:
        words = ["--minibatch-size", "4001"]
        cases.append((words, "--minibatch-size 4001 is above --steps-per-epoch, 4000"))
    for flags, message in cases:
        words = ["--env-id", "Pendulum-v1", "--data-dir", str(data)]
        words += [flag.replace("{tmp}", str(tmp_path)) for flag in flags]
        with pytest.raises(UsageError) as e:
            module.train(parse_args(module.Args, words))
        assert message in str(e.value)
    for values in ({"gamma": 1.5}, {"epochs": 0}, {"steps_per_epoch": 0.5}, {"snapshots": "x"}):
        with pytest.raises(ValidationError):
            module.Args(**values)
    with pytest.raises(UsageError, match="start Python with mpirun"):
        module.train(module.Args(env_id="Pendulum-v1", data_dir=str(data), num_cpu=3))
    assert not data.exists()


@pytest.mark.parametrize("script", SCRIPTS)
def test_help(script, capsys):
    module = load_script(script)
    with pytest.raises(SystemExit) as e:
        parse_args(module.Args, ["--help"])
    out = capsys.readouterr().out
    assert not e.value.code and f"{script}.py" in out
    names = [field.name for field in fields(module.Args)]
    assert all(f" --{name.replace('_', '-')}" in out for name in names)
    assert "discount factor (default: 0.99)" in out


SIGNALS = [(signal.SIGTERM, 1), (signal.SIGINT, 1), (signal.SIGUSR1, 1), (signal.SIGINT, 2)]


@pytest.mark.parametrize("signum, ranks", SIGNALS)
def test_a_signal_ends_the_run_at_a_clean_cut(tmp_path, signum, ranks):
    flags = ["--epochs", 500, "--epoch-seconds", 0.2, "--data-dir", tmp_path, "--exp-name", "r"]
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    directory = run_dir(tmp_path, "r")
    process = subprocess.Popen(command(FAKE, *flags, ranks=ranks), **pipes)
    wait_for(lambda: saved_epoch(directory) > 1)
    process.send_signal(signum)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + signum or (process.returncode and ranks > 1)
    assert err.count(f"{signum.name}: stopping at the end of this epoch") == 1
    status = read_status(directory)
    assert status["status"] == "interrupted"
    assert status["epoch"] == len(progress(directory)) == saved_epoch(directory)


def test_mpi_does_not_start_before_the_relaunch(tmp_path):
    """Open MPI would take the variables that it sets as it starts for those of a parent."""
    source = """
from test_cli import Args, parse_args
parse_args(Args, [])
print("mpi4py.MPI" in sys.modules)
"""
    assert run_source(tmp_path, source, 1).stdout == "False\n"


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
        text = f"error: cannot resume {directory}: ranks was 2, is {ranks}\n"
        assert refused.stderr.count(text) == 1


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
    assert done.returncode == 2
    assert done.stderr == "TensorFlow is missing: pip install -r requirements.txt\n"


# From Python --------------------------------------------------------------------------------------


def test_a_run_after_one_that_was_stopped(tmp_path):
    """In one process: it is not stopped, too. Two signals at once are one request: Ctrl-C."""
    source = """
import os
from common import run
from test_cli import Args

def train(args):
    for _ in "12":
        os.kill(os.getpid(), 15)
    return not run.stop_requested()

try:
    run.main(train, Args)
except SystemExit as e:
    print(e.code, run.stop_requested())
"""
    assert run_source(tmp_path, source, 1).stdout == "143 False\n"


@pytest.mark.parametrize("error", ["SystemExit(0)", "MemoryError"])
def test_an_environment_that_calls_sys_exit_ends_all_ranks(tmp_path, error):
    """Also before there is a run directory, as in its constructor; with a traceback."""
    source = f"""
from common import mpi, run
from test_cli import Args

def train(args):
    if mpi.proc_id() == 1:
        raise {error}
    mpi.reduce(1)

run.main(train, Args)
"""
    done = run_source(tmp_path, source, 2, check=False)
    assert done.returncode and "failed on rank 1 of 2" in done.stderr
    assert "Traceback" in done.stderr


def test_all_that_an_environment_draws_from_is_seeded():
    env = make_env("CartPole-v1", {}, (spaces.Box, spaces.Discrete))
    env.reset(seed=2**40)  # np.random has 32 bits of it
    inner = env.unwrapped

    def draw(**seed):
        env.reset(**seed)
        samples = [space.sample() for space in (inner.action_space, inner.observation_space)]
        return str([random.random(), np.random.rand(), *samples])  # noqa: NPY002

    first, second = draw(seed=3), draw()
    assert first == draw(seed=3) and second == draw() and first != second
    drawers = inner, inner.action_space, inner.observation_space
    assert len({x.np_random.bit_generator.seed_seq.entropy for x in drawers}) == 3  # all differ


TINY = {"steps_per_epoch": 40, "max_ep_len": 20, "epochs": 3, "save_freq": 1, "hidden_sizes": (8,)}
OFF_POLICY = {"start_steps": 20, "update_after": 20, "update_every": 20, "num_test_episodes": 1}


@pytest.mark.parametrize("script", ["ppo_torch", "td3_tf1"])
def test_ctrl_c_in_a_notebook(tmp_path, odd_spaces, monkeypatch, script):
    """The same process can go on."""
    module, left = load_script(script), iter([90])  # steps until Ctrl-C, the first time only
    make = lambda: AnySpace(ctrl_c_at=next(left, None))  # noqa: E731
    monkeypatch.setattr(gym.registry["Any-v0"], "entry_point", make)
    more = {} if script in ON_POLICY else OFF_POLICY
    args = module.Args(env_id="Any-v0", **TINY, **more, exp_name="run", data_dir=str(tmp_path))
    with pytest.raises(KeyboardInterrupt):
        module.train(args)
    directory = run_dir(tmp_path, "run")
    assert module.train(replace(args, resume=True))
    assert progress(directory).Epoch.tolist() == [0, 1, 2]
    assert read_status(directory)["status"] == "finished"


def test_a_run_that_fails_from_python(tmp_path, monkeypatch):
    """Its directory is free for the next one; what is refused leaves the old run as it is."""
    module, directory = load_script("ppo_torch"), run_dir(tmp_path, "run")
    args = module.Args(env_id="Pendulum-v1", **TINY, data_dir=str(tmp_path), exp_name="run")
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(module, "compute_loss_pi", lambda *args: 1 / 0)
        module.train(args)
    assert module.train(replace(args, overwrite=True))
    for values in ({"epochs": 0}, {"gamma": 1.5}, {"env_id": "Nope-v0"}):
        with pytest.raises(ValueError, match=r"greater|less|Nope-v0"):
            module.train(replace(args, overwrite=True, **values))
    assert len(progress(directory)) == 3


@pytest.mark.parametrize("datestamp", [False, True])
def test_resume_takes_the_arguments_of_a_directory(tmp_path, monkeypatch, datestamp):
    module = load_script("ppo_torch")
    args = {**TINY, "gamma": 0.5, "env_kwargs": {"g": 9.0}, "env_id": "Pendulum-v1"}
    how = {"datestamp": datestamp, "overwrite": True, "data_dir": str(tmp_path)}
    assert module.train(module.Args(**args, **how))
    (directory,) = tmp_path.glob("*/*")
    monkeypatch.chdir("/")
    words = ["--resume", str(directory)]
    again = parse_args(module.Args, words)
    assert {name: getattr(again, name) for name in args} == args
    assert module.train(again)  # a no-op
    assert module.train(parse_args(module.Args, [*words, "--epochs", "4"]))
    assert module.train(replace(again, resume=str(directory), epochs=5))
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
    for config in ('{"gamma": "high"}', '{"data_dir": ["a"]}', "[]", "{"):
        (directory / "config.json").write_text(config)
        with pytest.raises(UsageError, match=f"cannot resume {directory}"):
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


def test_observations_of_no_numbers_are_refused(odd_spaces):
    with pytest.raises(UsageError, match="supported: observations that"):
        make_env("Any-v0", {"observation_space": spaces.Box(-1, 1, (0,))}, (spaces.Box,))


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
