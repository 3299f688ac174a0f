"""Checkpoints that survive `kill -9`: written under another name, synced, then renamed.

    checkpoint/
        epoch_000012/           the state after 12 epochs
            rank_0.npz          a tree of arrays and scalars: parameters, optimizer, counters
            rank_1.npz          the same of the second rank
            manifest.json       epoch, number of ranks, every file's SHA-256, and its own
        epoch_000011/           the one before it, in case the newest is damaged
        journal/                the replay buffer, one part per checkpoint and rank
            rank_0_000011.npz
            rank_0_000012.npz

No pickle is written, and none is read: arrays are plain ones, the rest is JSON.
"""

import hashlib
import io
import json
import os
import re
import shutil
import sys
from pathlib import Path

import numpy as np

from common import UsageError
from common.mpi_tools import allgather, barrier, broadcast, num_procs, proc_id
from common.serialization import (
    printable,
    read_json,
    read_npz,
    sync_directory,
    write_atomically,
    write_json,
)

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
        self.journal = {}  # this rank's journal: file name -> SHA-256
        self.counts = [0]  # transitions stored at each save of the journal

    def save(self, epoch, state, buffer=None):
        """Save the state after `epoch` epochs.

        Args:
            epoch: number of finished epochs.
            state: this rank's tree (see `tree_to_bytes`).
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
        if buffer is not None:
            size = len(buffer.data)
            new = np.arange(max(self.counts[-1], buffer.count - size), buffer.count) % size
            part = {"count": buffer.count, "rows": buffer.data[new]}
            name = f"rank_{proc_id()}_{epoch:06d}.npz"
            self.journal[name] = _write(self.directory / "journal" / name, part)
            self.counts.append(buffer.count)
            needed = sum(count > buffer.count - size for count in self.counts[1:])
            self.journal = dict(list(self.journal.items())[-needed:])
        name = f"rank_{proc_id()}.npz"
        files = {f"{final.name}/{name}": _write(temporary / name, state)}
        files |= {f"journal/{name}": digest for name, digest in self.journal.items()}
        files = {name: digest for part in allgather(files) for name, digest in part.items()}
        if proc_id() == 0:
            manifest = {"epoch": epoch, "ranks": num_procs(), "files": files}
            write_json(temporary / "manifest.json", manifest | {"sha256": _digest(manifest)})
            shutil.rmtree(final, ignore_errors=True)  # a damaged one, found at the last start
            os.rename(temporary, final)
            sync_directory(self.directory)
            self._prune()
        barrier()

    def load(self, buffer=None):
        """Go back to the newest intact checkpoint.

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
                epoch, state, journal = self._read(self.directory / name)
            except CheckpointError:
                raise
            except (OSError, ValueError) as e:
                error = printable(f"{type(e).__name__}: {e}")
            errors = [e for e in allgather(error) if e]
            if not errors:
                for part in journal if buffer is not None else []:
                    start = part["count"] - len(part["rows"])
                    buffer.data[np.arange(start, part["count"]) % len(buffer.data)] = part["rows"]
                    buffer.count = part["count"]
                    self.counts.append(buffer.count)
                return epoch, state
            if proc_id() == 0:
                print(f"WARNING: checkpoint {name} is damaged ({errors[0]})", file=sys.stderr)
        if names:
            raise CheckpointError(f"no usable checkpoint in {self.directory}")
        return 0, None

    def _read(self, path):
        """Check all files of one checkpoint against its manifest and load this rank's."""
        manifest = _read_manifest(path)
        ranks = manifest.get("ranks")
        if ranks != num_procs():
            raise CheckpointError(f"{path} is of {ranks} ranks, and this run has {num_procs()}")
        mine, files = f"rank_{proc_id()}", manifest["files"]
        state = _load(path / f"{mine}.npz", files.get(f"{path.name}/{mine}.npz"))
        names = sorted(n for n in files if re.fullmatch(rf"journal/{mine}_\d+\.npz", n))
        journal = [_load(self.directory / n, files[n]) for n in names]
        self.journal = {Path(n).name: files[n] for n in names}
        return manifest["epoch"], state, journal

    def _prune(self):
        """Delete all checkpoints but the newest few, and the journal parts that none names."""
        epochs, named = sorted(self.directory.glob("epoch_*")), set()
        for path in epochs[:-KEEP]:
            shutil.rmtree(path, ignore_errors=True)
        for path in epochs[-KEEP:]:
            try:
                named |= set(_read_manifest(path)["files"])
            except (OSError, ValueError):
                return  # the older one is damaged: keep every part that it may name
        for path in (self.directory / "journal").glob("rank_*.npz"):
            if f"journal/{path.name}" not in named:
                path.unlink(missing_ok=True)


def _write(path, tree):
    """Write a tree to a file, synced, and return its SHA-256."""
    data = tree_to_bytes(tree)
    write_atomically(path, lambda f: f.write(data))
    return hashlib.sha256(data).hexdigest()


def _load(path, digest):
    """Read a tree from a file. Raises ValueError if its SHA-256 is not `digest`."""
    data = path.read_bytes()
    if hashlib.sha256(data).hexdigest() != digest:
        raise ValueError(f"{path.name} does not match its checksum")
    return tree_from_bytes(data)


def _digest(manifest):
    """SHA-256 of a manifest without its own."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _read_manifest(path):
    """The manifest in the directory of a checkpoint. Raises ValueError if it is damaged."""
    manifest = read_json(path / "manifest.json")
    digest, epoch = manifest.pop("sha256", None), manifest.get("epoch")
    if digest != _digest(manifest) or path.name != f"epoch_{epoch:06d}":
        raise ValueError("manifest.json does not match its checksum")
    return manifest
