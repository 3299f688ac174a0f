"""Checkpoints that survive `kill -9`: written under another name, synced, then renamed.

    checkpoint/
        epoch_000012/           the state after 12 epochs
            rank_0.npz          a tree of arrays and scalars: parameters, optimizer, counters
            rank_1.npz          the same of the second rank
        epoch_000011/           the one before it, in case the newest is damaged
        journal/                the replay buffer, one part per checkpoint and rank
            rank_0_000011.npz
            rank_0_000012.npz

No pickle is written, and none is read: arrays are plain ones, the rest is JSON. Damage is noticed
by the checksums that an .npz file holds.
"""

import io
import json
import os
import shutil
import sys
from pathlib import Path

import numpy as np

from common import UsageError
from common.mpi_tools import allgather, barrier, broadcast, num_procs, proc_id
from common.serialization import printable, read_npz, write_atomically

KEEP = 2  # checkpoints kept


class CheckpointError(UsageError):
    """There are checkpoints, and none of them can be used."""


def tree_to_bytes(tree):
    """Nested dicts and lists of arrays, numbers, strings and None, as the bytes of an .npz file."""
    arrays = []

    def outline(node):  # the tree as JSON, whose dicts have string keys only
        if isinstance(node, dict):
            return {"dict": [[key, outline(value)] for key, value in node.items()]}
        if isinstance(node, list | tuple):
            return [outline(value) for value in node]
        if isinstance(node, np.ndarray | np.generic):
            arrays.append(np.asarray(node))
            return {"array": len(arrays) - 1}
        return node

    text, file = json.dumps(outline(tree)), io.BytesIO()
    named = {f"array_{i}": array for i, array in enumerate(arrays)}
    np.savez(file, outline=text, **named, allow_pickle=False)
    return file.getvalue()


def tree_from_bytes(data):
    """The inverse of `tree_to_bytes`. Raises ValueError if `data` holds no such tree."""
    arrays = read_npz(io.BytesIO(data))

    def rebuild(node):
        return dict(node["dict"]) if "dict" in node else arrays[f"array_{node['array']}"]

    try:
        return json.loads(str(arrays["outline"]), object_hook=rebuild)
    except (KeyError, TypeError, RecursionError) as e:
        raise ValueError(f"it holds no state: {type(e).__name__}: {e}") from e


class Checkpointer:
    """Saves and loads the checkpoints of one run; every method is called by all ranks together.

    Args:
        directory: where they are; made at the first save.
    """

    def __init__(self, directory):
        self.directory = Path(directory)
        self.journal = {}  # this rank's parts of the journal: file name -> transitions until then

    def save(self, epoch, state, buffer=None):
        """Save the state after `epoch` epochs.

        Args:
            epoch: number of finished epochs.
            state: this rank's tree (see `tree_to_bytes`), a dict.
            buffer: this rank's replay buffer, if there is one: `data` [size, width], whose row
                i % size holds the i-th transition, and `count`, the transitions ever stored. Only
                the rows that are new since the last save are written.

        Raises:
            OSError: the disk is full, say; the checkpoints before this one are intact.
        """
        temporary, final = self.directory / ".saving", self.directory / f"epoch_{epoch:06d}"
        if proc_id() == 0:
            (self.directory / "journal").mkdir(parents=True, exist_ok=True)
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir()
        barrier()
        before = self.journal
        if buffer is not None:
            count, size = buffer.count, len(buffer.data)
            new = np.arange(max(0, count - size, *before.values()), count) % size
            name = f"rank_{proc_id()}_{epoch:06d}.npz"
            _write(self.directory / "journal" / name, {"count": count, "rows": buffer.data[new]})
            parts = {**before, name: count}.items()
            self.journal = {name: stored for name, stored in parts if stored > count - size}
        about = {"epoch": epoch, "ranks": num_procs(), "journal": self.journal}
        _write(temporary / f"rank_{proc_id()}.npz", {"about": about, **state})
        barrier()
        if proc_id() == 0:
            shutil.rmtree(final, ignore_errors=True)  # a damaged one, found at the last start
            os.rename(temporary, final)
            saved = sorted(self.directory.glob("epoch_*"))
            kept = [path for path in saved if path <= final][-KEEP:]  # later ones are damaged
            for path in set(saved) - set(kept):
                shutil.rmtree(path, ignore_errors=True)
        barrier()
        for path in (self.directory / "journal").glob(f"rank_{proc_id()}_*.npz"):
            if path.name not in {*before, *self.journal}:
                path.unlink()

    def load(self, buffer=None):
        """Go back to the newest checkpoint that is intact on all ranks.

        Args:
            buffer: as in `save`; its rows and count are restored in place.

        Returns:
            (epoch, state): the number of finished epochs and this rank's tree; (0, None) if nothing
            was ever saved.

        Raises:
            CheckpointError: checkpoints exist and all are damaged, or are of another number of
                ranks.
        """
        names = broadcast(sorted((p.name for p in self.directory.glob("epoch_*")), reverse=True))
        for name in names:
            error = None
            try:
                about, state, journal = self._read(name)
            except (OSError, ValueError, TypeError, LookupError) as e:
                error = printable(f"{type(e).__name__}: {e}")
            errors = [e for e in allgather(error) if e]
            if not errors:
                self.journal = about["journal"]
                for count, rows in journal if buffer is not None else []:
                    buffer.data[np.arange(count - len(rows), count) % len(buffer.data)] = rows
                    buffer.count = count
                return about["epoch"], state
            if proc_id() == 0:
                print(f"WARNING: checkpoint {name} is damaged ({errors[0]})", file=sys.stderr)
        if names:
            raise CheckpointError(f"no usable checkpoint in {self.directory}")
        return 0, None

    def _read(self, name):
        """(about, state, [(count, rows), ...] of the journal) of this rank in a checkpoint."""
        state = _read(self.directory / name / f"rank_{proc_id()}.npz")
        about = state.pop("about")
        if name != f"epoch_{about['epoch']:06d}":
            raise ValueError(f"it is of epoch {about['epoch']}")
        if about["ranks"] != num_procs():
            raise ValueError(f"it is of {about['ranks']} ranks, and this run has {num_procs()}")
        parts = [_read(self.directory / "journal" / file) for file in about["journal"]]
        journal = [(part["count"], part["rows"]) for part in parts]
        if [count for count, _ in journal] != list(about["journal"].values()):
            raise ValueError("its journal is of other epochs")
        return about, state, journal


def _write(path, tree):
    write_atomically(path, lambda f: f.write(tree_to_bytes(tree)))


def _read(path):
    return tree_from_bytes(path.read_bytes())
