"""One run of a function for grid.py: `python call.py RUN_DIRECTORY`, the same on every rank.

The run directory of a function has a subdirectory `call`. Like a script's run directory, it holds
config.json, status.json and, while the function runs, a lock. `function.pkl` in it is the function
and its arguments: grid.py has written it just before.
"""

import fcntl
import pickle
import sys
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # to find common
from common.files import RUN_FILES, find, write_json
from common.mpi import abort, broadcast, num_procs, proc_id, reduce


def main(directory):
    record, taken = Path(directory, "call"), False
    if proc_id() == 0:
        lock = open(record / ".lock", "a")  # noqa: SIM115 - held until this process ends
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            taken = True
    if broadcast(taken):
        sys.exit(2)
    status_path = record / "status.json"
    note = lambda word, error=None: write_json(  # noqa: E731
        status_path, {"status": word, "epoch": 0, "epochs": 0, "error": error}
    )
    try:
        if proc_id() == 0:
            note("running")
        with open(record / "function.pkl", "rb") as f:
            sys.path[:] = pickle.load(f)  # modules are found where grid.py finds them
            function, kwargs = pickle.load(f)
        if "logger_kwargs" in kwargs and find(directory, RUN_FILES):
            kwargs["logger_kwargs"]["overwrite"] = True  # a function cannot resume: it starts anew
        # A function that returns False was stopped before its end.
        status = "interrupted" if function(**kwargs) is False else "finished"
        reduce(0)  # all ranks have come here: none was killed
    except BaseException as e:
        where = f" on rank {proc_id()} of {num_procs()}" if num_procs() > 1 else ""
        print(f"call.py: failed{where}\n{traceback.format_exc()}", file=sys.stderr, flush=True)
        note("failed", f"{type(e).__name__}: {e}")
        abort(1)
    if proc_id() == 0:
        note(status)
    sys.exit(0 if status == "finished" else 143)  # as a script after SIGTERM


if __name__ == "__main__":
    main(sys.argv[1])
