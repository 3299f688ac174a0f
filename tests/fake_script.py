"""A script that keeps the contract of algos/ and learns nothing: what grid.py's tests run.

Return after epoch k with seed s: 100 s + k, whatever was interrupted on the way.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import shutil
import signal
import sys
import time
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:  # grid.py reads these names; importing them takes longer than a whole test
    from common.args import JsonDict, NonNegFloat, NonNegInt, PosInt, Sizes, Unit


@dataclass
class Args:
    exp_name: str | None = None  # name of the experiment
    seed: NonNegInt = 0  # random seed
    data_dir: str = "data"  # directory that holds the run directories
    datestamp: bool = False  # put date and time into the run directory's name
    resume: bool = False  # continue the run that the directory holds
    num_cpu: PosInt = 1  # ranks
    compile: bool = False  # a boolean
    env_id: str = "Hopper-v4"  # environment
    env_kwargs: JsonDict = field(default_factory=dict)  # JSON
    epochs: PosInt = 3  # number of epochs
    steps_per_epoch: PosInt = 12  # steps
    gamma: Unit = 0.99  # discount
    hidden_sizes: Sizes = (64, 64)  # layers
    activation: Literal["tanh", "relu"] = "tanh"  # activation
    alpha: NonNegFloat | Literal["auto"] = 0.2  # temperature
    epoch_seconds: NonNegFloat = 0.0  # how long an epoch takes
    forget: bool = False  # delete the checkpoints of a finished run
    fail_at: int = -1  # raise in this epoch, unless there is a file called "fixed" in data_dir
    refuse: bool = False  # bad input: exit code 2 before anything is made


def parse_args():
    parser = argparse.ArgumentParser()
    for f in fields(Args):
        flag = "--" + f.name.replace("_", "-")
        default = f.default if f.name not in ("env_kwargs",) else {}
        if isinstance(default, bool):
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=default)
        elif f.name == "hidden_sizes":
            parser.add_argument(flag, type=int, nargs="*", default=list(default))
        elif f.name == "env_kwargs":
            parser.add_argument(flag, type=json.loads, default=default)
        else:
            kind = str if f.name in ("exp_name", "alpha") else type(default)
            parser.add_argument(flag, type=kind, default=default)
    return parser.parse_args()


def ended(run):
    try:
        return json.loads((run / "status.json").read_text())["status"] != "running"
    except FileNotFoundError:
        return False


def main():
    args = parse_args()
    rank, ranks = int(os.environ.get("PMI_RANK", 0)), int(os.environ.get("PMI_SIZE", 1))
    if args.refuse:
        print("fake_script.py: error: refused", file=sys.stderr)
        sys.exit(2)
    run = Path(args.data_dir, args.exp_name, f"{args.exp_name}_s{args.seed}")
    if args.datestamp:
        stamp = os.environ["SWEEP_DATESTAMP"]
        run = Path(args.data_dir, f"{stamp[:10]}_{args.exp_name}", f"{stamp}-{run.name}")
    run.mkdir(parents=True, exist_ok=True)
    stop = []
    for signum in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(signum, lambda *_: sys.exit(143) if stop else stop.append(143))
    if rank:  # the other ranks are only there
        while not stop and not ended(run):
            time.sleep(0.02)
        sys.exit(0)

    lock = open(run / ".lock", "a+")  # noqa: SIM115 - held while we run
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        sys.exit(f"{run} is in use")
    if (run / "config.json").exists() and not args.resume:
        sys.exit(f"{run} holds a run")

    def write(name, value):
        (run / f"{name}.tmp").write_text(json.dumps(value))
        os.replace(run / f"{name}.tmp", run / name)

    def status(word, error=None):
        state = {"status": word, "epoch": epoch, "epochs": args.epochs, "error": error}
        write("status.json", state)

    config = {**vars(args), "script": "fake_script.py", "ranks": ranks}
    config["alpha"] = args.alpha if args.alpha == "auto" else float(args.alpha)
    progress = run / "progress.txt"
    if not progress.exists():
        progress.write_text("Epoch\tAverageEpRet\tTotalEnvInteracts\tTime\n")
    epoch = len(progress.read_text().splitlines()) - 1
    write("config.json", config)
    (run / "checkpoint" / "epoch_000000").mkdir(parents=True, exist_ok=True)
    status("running")
    print(f"epoch {epoch} with {os.environ.get('PYTHONUNBUFFERED')}", flush=True)
    while epoch < args.epochs and not stop:
        end = time.monotonic() + args.epoch_seconds
        while time.monotonic() < end:
            time.sleep(0.01)
        if epoch == args.fail_at and not Path(args.data_dir, "fixed").exists():
            status("failed", "RuntimeError: it broke")
            raise RuntimeError("it broke")
        epoch += 1
        with open(progress, "a") as f:
            steps = epoch * args.steps_per_epoch
            f.write(f"{epoch - 1}\t{100 * args.seed + epoch}\t{steps}\t{time.time()}\n")
    if args.forget and epoch >= args.epochs:
        shutil.rmtree(run / "checkpoint")
    status("finished" if epoch >= args.epochs else "interrupted")
    if epoch < args.epochs:
        sys.exit(143)


if __name__ == "__main__":
    main()
