"""What surrounds a run: defaults, a stop that one rank hears of, Time, synced rows, test_policy.py.

Training itself is in test_replay.py.
"""

import numpy as np
import pandas as pd
import pytest
import recorder
from conftest import ON_POLICY, SCRIPTS, load_script, mpi, read_status, run_dir
from test_replay import arguments, assert_same_events

from benchmark import test_policy as tp

# Spinning Up's, of all scripts that have the flag.
DEFAULTS = {"seed": 0, "gamma": 0.99, "max_ep_len": 1000, "steps_per_epoch": 4000, "num_cpu": 1}
ON = {"epochs": 50, "hidden_sizes": (64, 64), "activation": "tanh", "lam": 0.97, "pi_lr": 3e-4}
ON |= {"vf_lr": 1e-3, "train_pi_iters": 80, "train_v_iters": 80, "target_kl": 0.01}
ON |= {"clip_ratio": 0.2, "delta": 0.01, "damping_coeff": 0.1, "cg_iters": 10, "algo": "trpo"}
ON |= {"backtrack_iters": 10, "backtrack_coeff": 0.8, "minibatch_size": 0, "anneal_lr": False}
OFF = {"epochs": 100, "hidden_sizes": (256, 256), "activation": "relu", "replay_size": 10**6}
OFF |= {"polyak": 0.995, "pi_lr": 1e-3, "q_lr": 1e-3, "lr": 1e-3, "alpha": 0.2, "batch_size": 100}
OFF |= {"start_steps": 10_000, "update_after": 1000, "update_every": 50, "num_test_episodes": 10}
OFF |= {"act_noise": 0.1, "target_noise": 0.2, "noise_clip": 0.5, "policy_delay": 2}


@pytest.mark.parametrize("name", SCRIPTS)
def test_defaults_are_those_of_spinning_up(name):
    wanted = DEFAULTS | (ON if name in ON_POLICY else OFF)
    args = vars(load_script(name).Args())
    assert {key: args[key] for key in wanted if key in args} == {
        key: value for key, value in wanted.items() if key in args
    }


STOP = """
import os, signal, time
import recorder
from conftest import load_script
from common.mpi import proc_id
from common.run import main
def stop():
    time.sleep(2)
    os.kill(os.getpid(), signal.SIGTERM)
if proc_id() == 1 and "--resume" not in sys.argv:
    recorder.at_event[10] = stop
module = load_script("vpg_torch")
main(module.train, module.Args)
"""


def test_a_stop_of_one_rank(tmp_path):
    """All ranks stop, at the end of the epoch; Time goes on where it was when they resume."""
    flags = ["--env-id", "Recorder-v0", "--epochs", 3, "--steps-per-epoch", 40, "--exp-name", "x"]
    assert mpi(tmp_path, STOP, 2, *flags, cwd=tmp_path, check=False).returncode
    status = read_status(run_dir(tmp_path / "data", "x"))
    assert status["status"] == "interrupted" and status["epoch"] == 1
    mpi(tmp_path, STOP, 2, *flags, "--resume", cwd=tmp_path)
    time = pd.read_csv(run_dir(tmp_path / "data", "x") / "progress.txt", sep="\t").Time
    assert len(time) == 3 and (np.diff(time) > 0).all()


@pytest.fixture
def finished(tmp_path):
    """The directory of a run with a policy after each of two epochs."""
    train, args = arguments("vpg_torch", tmp_path, epochs=2, pi_lr=0.02)
    assert train(args)
    return run_dir(tmp_path, "vpg_torch", args.seed)


def test_the_policy_and_the_seed_that_test_policy_plays(finished):
    for flags in ({}, {"itr": 1, "deterministic": True}, {"seed": 3}, {"itr": 1, "seed": 4}):
        expected, seed = recorder.Recorder(mean=2, events=[]), flags.get("seed", 0)
        get_action = tp.load_policy(finished, **{**flags, "itr": flags.get("itr", "last")})
        o, _ = expected.reset(seed=seed)
        for _ in range(7):
            o, _, terminated, truncated, _ = expected.step(get_action(o))
            if terminated or truncated:
                break
        recorder.events.clear()
        words = [f"--{key}={x}" if x is not True else f"--{key}" for key, x in flags.items()]
        tp.main([str(finished), "--episodes=1", *words])
        assert_same_events(recorder.events, expected.events)
    obs = np.random.default_rng(0).standard_normal((20, 3))
    players = [tp.load_policy(finished, itr, seed=i) for itr in (1, 2, "last") for i in (0, 1)]
    actions = [np.array([play(o) for o in obs]).tobytes() for play in players]
    assert len({*actions}) == 4 and actions[2:4] == actions[4:]
