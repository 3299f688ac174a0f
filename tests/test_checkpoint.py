"""Checkpoints: what is saved comes back, damage is noticed, nothing is ever unpickled."""

import numpy as np
import pytest
from conftest import Buffer, flip_a_bit, mpi, truncate

from common.checkpoint import Checkpointer, CheckpointError, tree_from_bytes, tree_to_bytes

STATE = {"ac": {"w": np.arange(6, dtype=np.float32).reshape(2, 3)}, "t": 3, "groups": [{0: 0.5}]}
TREE = [
    *([], {}, None, True, -7, 10**30, 0.1, "", "é", {"array": 1}, {"dict": {0: [None]}}, [[], [1]]),
    *(np.float32([[1, np.nan]]), np.zeros((2, 0), bool), np.array(3), np.array("text")),
]


def test_trees_round_trip():
    """Types and dtypes included."""
    for tree in (TREE, {"all": TREE, 1: STATE}):
        assert repr(tree_from_bytes(tree_to_bytes(tree))) == repr(tree)


def test_nothing_saved(tmp_path):
    assert Checkpointer(tmp_path / "none").load() == (0, None)


def test_two_are_kept_and_the_newest_comes_back(tmp_path):
    saver = Checkpointer(tmp_path)
    for epoch in (1, 2, 3):
        saver.save(epoch, {**STATE, "t": epoch})
    assert sorted(p.name for p in tmp_path.glob("epoch_*")) == ["epoch_000002", "epoch_000003"]
    epoch, state = Checkpointer(tmp_path).load()
    assert epoch == 3 and repr(state) == repr({**STATE, "t": 3})


@pytest.mark.parametrize("damage", [flip_a_bit, truncate])
def test_damage_is_noticed(tmp_path, capsys, damage):
    """The checkpoint before is used, loudly; without one the run is refused."""
    saver = Checkpointer(tmp_path)
    for epoch in (1, 2):
        saver.save(epoch, {**STATE, "t": epoch})
    for epoch in (2, 1):
        loaded_epoch, state = Checkpointer(tmp_path).load()
        assert loaded_epoch == state["t"] == epoch
        damage(tmp_path / f"epoch_{epoch:06d}" / "rank_0.npz")
    capsys.readouterr()
    with pytest.raises(CheckpointError, match="no usable checkpoint"):
        Checkpointer(tmp_path).load()
    said = capsys.readouterr().err
    assert all(f"checkpoint epoch_00000{epoch} is damaged" in said for epoch in (1, 2))


def loaded(directory):
    """(epoch, buffer) as a new process finds them."""
    buffer = Buffer(10)
    return Checkpointer(directory).load(buffer)[0], buffer


@pytest.mark.parametrize("steps", [[3, 3, 3, 3, 3, 3], [4, 0, 10, 1], [25, 7, 7], [10, 10, 1, 30]])
def test_the_replay_buffer_comes_back(tmp_path, steps):
    """Row by row, whether it was full or not, and also where every save is by a new process."""
    for directory, again in ((tmp_path / "one", False), (tmp_path / "many", True)):
        saver, buffer = Checkpointer(directory), Buffer(10)
        for epoch, n in enumerate(steps, 1):
            if again:
                saver, buffer = Checkpointer(directory), Buffer(10)
                saver.load(buffer)
            buffer.store(n)
            saver.save(epoch, STATE, buffer)
            found, other = loaded(directory)
            assert (found, other.count) == (epoch, buffer.count)
            np.testing.assert_array_equal(other.data, buffer.data)


def test_the_journal_holds_each_transition_once(tmp_path):
    saver, buffer = Checkpointer(tmp_path), Buffer(10)
    for epoch in range(1, 9):
        buffer.store(2)
        saver.save(epoch, STATE, buffer)
        names = sorted(p.name for p in (tmp_path / "journal").iterdir())
        # Five parts are a full buffer; the checkpoint before needs one more.
        parts = range(max(1, epoch - 5), epoch + 1)
        assert names == [f"rank_0_{i:06d}.npz" for i in parts]
    for name in names:
        tree = tree_from_bytes((tmp_path / "journal" / name).read_bytes())
        assert tree["rows"].shape == (2, 2) and tree["count"] == 2 * int(name[-10:-4])


def test_back_to_the_checkpoint_before(tmp_path):
    """Its buffer is whole too, and training goes on from there."""
    saver, buffer = Checkpointer(tmp_path), Buffer(10)
    for epoch in range(1, 6):
        buffer.store(4)
        saver.save(epoch, STATE, buffer)
    flip_a_bit(tmp_path / "journal" / "rank_0_000005.npz")
    saver, buffer = Checkpointer(tmp_path), Buffer(10)
    assert saver.load(buffer)[0] == 4
    assert buffer.count == 16 and sorted(buffer.data[:, 0]) == list(range(6, 16))
    buffer.store(4)
    saver.save(5, STATE, buffer)
    epoch, other = loaded(tmp_path)
    assert epoch == 5 and sorted(other.data[:, 0]) == list(range(10, 20))


def test_several_ranks(tmp_path, capsys):
    source = """
import os
import numpy as np
from common.checkpoint import Checkpointer
from common.mpi_tools import barrier, proc_id
from conftest import Buffer
saver, buffer = Checkpointer("saves"), Buffer(4, proc_id())
for epoch in (1, 2):
    buffer.store(1)
    saver.save(epoch, {"mine": np.array([proc_id(), epoch])}, buffer)
found = Buffer(4)
epoch, state = Checkpointer("saves").load(found)
assert epoch == 2 and list(state["mine"]) == [proc_id(), 2]
assert found.count == buffer.count and (found.data == buffer.data).all()
barrier()
if proc_id() == 1:  # one rank's file is lost: all go back together
    os.unlink("saves/epoch_000002/rank_1.npz")
barrier()
epoch, state = Checkpointer("saves").load()
assert epoch == 1 and list(state["mine"]) == [proc_id(), 1]
print("all well", flush=True)
"""
    assert mpi(tmp_path, source, 2, cwd=tmp_path).stdout.count("all well") == 2
    with pytest.raises(CheckpointError, match="no usable checkpoint"):
        Checkpointer(tmp_path / "saves").load()
    assert "it is of 2 ranks, and this run has 1" in capsys.readouterr().err
