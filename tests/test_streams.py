"""Random streams: no two uses of random numbers in a run, or in runs of other seeds, share one."""

import itertools

import numpy as np
import pytest
from conftest import load_script

from common import mpi
from common.mpi import make_rng

SEEDS = (0, 1, 2, 3, 4, 9999, 10000, 10001, 20000)


def streams():
    """{name: generator} of runs of these seeds, on three ranks, in several epochs and tests."""
    made = {}
    for seed in SEEDS:
        made[seed, "weights"] = make_rng(seed, "weights")
        for rank, epoch in itertools.product(range(3), (0, 1, 2, 10000)):
            made[seed, "rollout", rank, epoch] = make_rng(seed, "rollout", rank, epoch)
        for epoch, episode in itertools.product((0, 1, 10000), range(4)):
            made[seed, "test", epoch, episode] = make_rng(seed, "test", epoch, episode)
    return made


def test_no_two_streams_share_numbers():
    """No 64-bit number comes twice, at the same place or another. Seed 10000 on rank 0 was once
    seed 0 on rank 1, and the initial weights were rank 0's first noise."""
    drawn = {
        name: rng.integers(2**64, size=200, dtype=np.uint64) for name, rng in streams().items()
    }
    numbers = np.concatenate(list(drawn.values()))
    assert len(np.unique(numbers)) == len(numbers) == 200 * len(drawn)


@pytest.mark.parametrize("name", ["ppo_torch", "sac_torch"])
def test_a_script_draws_from_streams_of_its_own(tmp_path, monkeypatch, name):
    """The generators that a run makes, by use and key: each once, two epochs and tests included."""
    made, script = [], load_script(name)
    spy = lambda seed, *key: made.append((seed, *key)) or make_rng(seed, *key)  # noqa: E731
    monkeypatch.setattr(mpi, "make_rng", spy)
    args = {"env_id": "Pendulum-v1", "steps_per_epoch": 60, "epochs": 2, "max_ep_len": 20}
    if name == "sac_torch":
        args |= {"update_after": 100, "num_test_episodes": 2, "compile": False, "start_steps": 50}
    assert script.train(script.Args(**args, data_dir=str(tmp_path)))
    wanted = [(0, "weights"), (0, "rollout", 0, 0), (0, "rollout", 0, 1)]
    if name == "sac_torch":
        wanted += [(0, "test", epoch, i) for epoch in range(2) for i in range(2)]
    assert sorted(made, key=str) == sorted(wanted, key=str)
