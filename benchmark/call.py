"""One run of a function for grid.py: `python call.py JSON`, the same on every rank.

The run directory of a function has a subdirectory `call`. Like a script's run directory, it holds
config.json, status.json and, while the function runs, a lock.
"""

import fcntl
import json
import os
import sys
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # to find benchmark and common
from benchmark.flags import load
from common.mpi_tools import mpi_abort, num_procs, proc_id
from common.run_dir import write_status
from common.serialization import write_json


def main(text):
    call = json.loads(text)
    directory = Path(call["directory"])
    record = directory / "call"
    record.mkdir(parents=True, exist_ok=True)
    if proc_id() == 0:
        lock = open(record / ".lock", "a")  # noqa: SIM115 - held until this process ends
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        write_json(record / "config.json", call["config"])
        write_status(record, "running", 0, 0)
    try:
        os.environ["GRID_IMPORTING"] = "1"  # a module that starts a sweep when imported is refused
        kwargs = json.loads(json.dumps(call["kwargs"]), object_hook=_read)
        function = load(*call["function"])
        del os.environ["GRID_IMPORTING"]
        if "logger_kwargs" in kwargs and (directory / "config.json").exists():
            kwargs["logger_kwargs"]["overwrite"] = True  # a function cannot resume: it starts anew
        # A function that returns False was stopped before its end.
        status = "interrupted" if function(**kwargs) is False else "finished"
    except BaseException as e:
        where = f" on rank {proc_id()} of {num_procs()}" if num_procs() > 1 else ""
        print(f"call.py: failed{where}\n{traceback.format_exc()}", file=sys.stderr, flush=True)
        write_status(record, "failed", 0, 0, f"{type(e).__name__}: {e}")
        mpi_abort(1)
    if proc_id() == 0:
        write_status(record, status, 0, 0)


def _read(table):
    """Decode what JSON cannot hold: functions, classes, functions that make an environment."""
    if table.keys() == {"$import"}:
        return load(*table["$import"])
    if table.keys() == {"$make"}:
        import gymnasium

        return lambda: gymnasium.make(table["$make"])
    return table


if __name__ == "__main__":
    main(sys.argv[1])
