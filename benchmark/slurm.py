"""A sweep as a Slurm job array: one task a run, requeued until the run is finished.

Slurm warns a task some time before its limit; the run then ends its epoch, saves, and the task
puts itself back into the queue, where it resumes. Tasks that Slurm preempts or whose node dies are
put back by Slurm itself (--requeue), and resume too.
"""

import os
import shlex
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from benchmark import launch
from common import UsageError
from common.args import NonNegInt, PosInt, check_args
from common.serialization import check_inside


@dataclass
class Slurm:
    """The [slurm] table of a sweep."""

    partition: str = ""
    time: str | int = ""  # as sbatch has it: minutes, or "[days-]hours:minutes:seconds"
    mem: str | int = ""
    cpus_per_rank: PosInt = 1
    launcher: Literal["mpirun", "srun"] = "mpirun"
    signal: PosInt = 120  # seconds before the time limit at which runs are told to stop
    max_running: NonNegInt = 0  # tasks that run at a time; 0 for no limit
    directives: tuple[str, ...] = ()  # further options of sbatch, as ["--account=rl"]
    setup: tuple[str, ...] = ()  # shell lines to run before, as ["module load gcc"]


JOB = """\
#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --array=1-{count}{limit}
#SBATCH --ntasks={ranks}
#SBATCH --cpus-per-task={cpus}
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@{signal}
#SBATCH --output=task_%a.out
{directives}
cd {cwd} || exit 1
{setup}
bash {directory}/run_"$SLURM_ARRAY_TASK_ID".sh &
run=$!

# The signal reaches this shell alone; the run's ranks are told by mpirun, or Slurm for srun's.
stop() {{ {stop}; }}
requeue=
trap 'requeue=yes; stop' USR1
trap 'stop' TERM

# A trapped signal ends `wait`, so wait until the run is gone.
while kill -0 "$run" 2>/dev/null; do wait "$run"; code=$?; done
if [ "$requeue" ] && [ "$code" -ne 0 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit "$code"
"""


def check(table):
    """The [slurm] table as a Slurm. UsageError names a wrong key or value."""
    try:
        options = Slurm(**table)
        check_args(options)
    except (TypeError, UsageError) as e:
        raise UsageError(f"slurm: {e}") from e
    return options


def job_files(runs, name, options, directory):
    """The files of a job array: {file name: text}, job.sh and run_1.sh to run_<n>.sh.

    All runs must have the same number of ranks. `directory`: where the files will lie.
    """
    ranks, srun = runs[0].num_cpu, options.launcher == "srun"
    given = {key: getattr(options, key) for key in ("partition", "time", "mem")}
    directives = [f"--{key}={value}" for key, value in given.items() if value]
    launcher = ["srun", "--mpi=pmi2", f"--ntasks={ranks}"] if srun else None
    files = {
        "job.sh": JOB.format(
            name=name,
            count=len(runs),
            limit=f"%{options.max_running}" if options.max_running else "",
            ranks=ranks,
            cpus=options.cpus_per_rank,
            signal=options.signal,
            directives="\n".join(f"#SBATCH {line}" for line in (*directives, *options.directives)),
            cwd=shlex.quote(os.getcwd()),
            setup="\n".join(options.setup),
            directory=shlex.quote(str(directory)),
            # Slurm takes a SIGTERM as an order to kill srun's step; SIGUSR1 just reaches the ranks.
            stop='scancel --signal=USR1 "$SLURM_JOB_ID"' if srun else 'kill -TERM "$run"',
        )
    }
    for i, run in enumerate(runs, 1):
        words, log = shlex.join(launch.command(run, launcher)), shlex.quote(str(run.log))
        files[f"run_{i}.sh"] = (
            f"mkdir -p {shlex.quote(str(run.directory))}\n"
            f"exec >> {log} 2>&1 < /dev/null\n"
            f'echo "--- $(date "+%F %T") Slurm job $SLURM_JOB_ID"\n'
            f"export PYTHONUNBUFFERED=1\n"
            f"exec {words}\n"
        )
    return files


def submit(runs, name, options, data_dir, retry_failed=False, dry_run=False):
    """Write and submit the runs that are not finished. Returns what was done, as text.

    Raises:
        UsageError: there is no sbatch, it refuses, or the sweep is in the queue already.
    """
    if not dry_run:
        queued = _slurm("squeue", "--noheader", "--me", f"--name={name}", "--format=%i").split()
        if queued:
            raise UsageError(f"{name} is in the queue already: job {' '.join(queued)}")
    todo = launch.sort_out(runs, retry_failed)
    if not todo:
        return f"{name}: nothing to submit, no run is left to do"
    if len({run.num_cpu for run in todo}) > 1:
        raise UsageError("the runs of a job array need the same number of ranks: set num_cpu")
    directory = Path(data_dir, f"slurm_{name}", time.strftime("%Y-%m-%d_%H-%M-%S")).absolute()
    check_inside(data_dir, directory)
    files = job_files(todo, name, options, directory)
    if dry_run:
        return "\n".join(f"# {directory / file}\n{text}" for file, text in files.items())
    directory.mkdir(parents=True, exist_ok=True)
    for file, text in files.items():
        (directory / file).write_text(text, encoding="utf-8")
    # --chdir: where the tasks' own output goes.
    job = _slurm("sbatch", "--parsable", f"--chdir={directory}", str(directory / "job.sh"))
    job = job.strip().split(";")[0]
    return (
        f"{name}: submitted job {job}, {len(todo)} of {len(runs)} runs\n"
        f"    squeue --job {job}     what waits and runs\n"
        f"    scancel {job}          stops it; the same sweep again goes on\n"
        f"    {directory}"
    )


def _slurm(*words):
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as e:
        raise UsageError(f"--slurm needs Slurm's {words[0]}: {e}") from e
    if done.returncode:
        raise UsageError(f"{words[0]}: {' '.join(done.stderr.split())}")
    return done.stdout
