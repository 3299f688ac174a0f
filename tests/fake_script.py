"""A script with the command line and files of those in algos/ that learns nothing: what grid.py's
tests run.

Return after epoch k with seed s: 100 s + k, whatever was interrupted on the way.
"""

import sys
import time
from dataclasses import field
from pathlib import Path
from typing import Literal

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))

from pydantic.dataclasses import dataclass

from common import UsageError, run
from common.args import JsonDict, NonNegFloat, NonNegInt, PosInt, Sizes, Unit


@dataclass
class Args:
    exp_name: str | None = None  # name of the experiment
    seed: NonNegInt = 0  # random seed
    data_dir: str = "data"  # directory that holds the run directories
    datestamp: bool = False  # put date and time into the run directory's name
    resume: bool | str = False  # continue the run that the directory holds
    overwrite: bool = False  # replace it
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
    fail_at: int = -1  # raise in this epoch, unless there is a file called "fixed" in data_dir
    refuse: bool = False  # bad input: exit code 2 before anything is made


def train(args):
    if args.refuse:
        raise UsageError("refused")
    logger = run.start(args, __file__)
    for epoch in range(logger.load_state({}), args.epochs):
        time.sleep(args.epoch_seconds)
        if epoch == args.fail_at and not Path(args.data_dir, "fixed").exists():
            raise RuntimeError("it broke")
        logger.log_tabular("Epoch", epoch)
        logger.log_tabular("AverageEpRet", 100 * args.seed + epoch + 1)
        logger.log_tabular("TotalEnvInteracts", (epoch + 1) * args.steps_per_epoch)
        logger.log_tabular("Time", logger.time())
        logger.dump_tabular()
        stop = run.stop_requested()
        if stop or logger.save_due():
            logger.save_state({}, {})
        if stop:
            break
    return logger.close()


if __name__ == "__main__":
    run.main(train, Args)
