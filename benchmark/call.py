"""One run of a function for grid.py: `python call.py JSON`, the same on every rank.

call.json in the run directory says which call it was and how it ended.
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
from common.serialization import write_json


def main(text):
    os.environ["GRID_IMPORTING"] = "1"  # a module that starts a sweep when imported is refused
    directory, status = Path(json.loads(text)["directory"]), "failed"

    def record(status, error=None):
        state = {"status": status, "epoch": 0, "error": error, "config": call["record"]}
        write_json(directory / "call.json", state)

    try:
        call = json.loads(text)
        directory.mkdir(parents=True, exist_ok=True)
        if proc_id() == 0:
            lock = open(directory / ".call.lock", "a")  # noqa: SIM115 - held until this process ends
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            record("running")
        kwargs = json.loads(json.dumps(call["kwargs"]), object_hook=_imported)
        function = load(*call["function"])
        del os.environ["GRID_IMPORTING"]
        if call["logger_kwargs"]:
            kwargs["logger_kwargs"] = {"output_dir": str(directory), "exp_name": call["exp_name"]}
            if (directory / "config.json").exists():  # a function cannot resume: it starts anew
                kwargs["logger_kwargs"]["overwrite"] = True
        if call["env_fn"]:
            env_name = kwargs.pop("env_name")
            kwargs["env_fn"] = lambda: __import__("gymnasium").make(env_name)
        # A function that returns False was stopped before its end.
        status = "interrupted" if function(**kwargs) is False else "finished"
    except BaseException as e:
        where = f" on rank {proc_id()} of {num_procs()}" if num_procs() > 1 else ""
        print(f"call.py: failed{where}\n{traceback.format_exc()}", file=sys.stderr, flush=True)
        record("failed", f"{type(e).__name__}: {e}")
        mpi_abort(1)
    if proc_id() == 0:
        record(status)


def _imported(table):
    return load(*table["$import"]) if table.keys() == {"$import"} else table


if __name__ == "__main__":
    main(sys.argv[1])
