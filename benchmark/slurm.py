"""A sweep as a Slurm job array: one task per run, requeued until the run is finished.

Slurm warns a task some time before its limit; the run then ends its epoch, saves, and the task
puts itself back into the queue, where it resumes. Tasks that Slurm preempts or whose node dies are
put back by Slurm itself (--requeue), and resume too.
"""

import os
import shlex
import subprocess
import time
from pathlib import Path

from benchmark import launch
from common import UsageError

JOB = """\
#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --array=1-{count}{limit}
#SBATCH --ntasks={ranks}
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@{signal}
#SBATCH --output=task_%a.out
{options}
cd {cwd} || exit 1
{setup}
export PYTHONUNBUFFERED=1
bash -c "$(sed -n "$SLURM_ARRAY_TASK_ID"p {directory}/runs.sh)" &
run=$!

# The signal reaches this shell alone; mpirun tells the run's ranks.
requeue=
trap 'requeue=yes; kill -TERM "$run"' USR1
trap 'kill -TERM "$run"' TERM

# A trapped signal ends `wait`, so wait until the run is gone.
while kill -0 "$run" 2>/dev/null; do wait "$run"; code=$?; done
if [ "$requeue" ] && [ "$code" -ne 0 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit "$code"
"""
# Keys of a sweep's [slurm] table; all others are options of sbatch, as `time` or `cpus_per_task`.
# setup: shell lines to run before; max_running: tasks that run at a time; signal: seconds before
# the time limit at which runs are told to stop.
KEYS = ("setup", "max_running", "signal")


def check(table):
    """Raise UsageError if a value of the [slurm] table is of the wrong type."""
    for key, value in table.items():
        if not isinstance(value, list if key == "setup" else int | str):
            raise UsageError(f"slurm.{key}: expected {'a list' if key == 'setup' else 'one value'}")


def job_files(runs, name, table, directory):
    """The files of a job array: {name: text}.

    `directory`: where the files will lie. Line i of runs.sh is the command of task i.
    """
    given = {key.replace("_", "-"): value for key, value in table.items() if key not in KEYS}
    job = JOB.format(
        name=name,
        count=len(runs),
        limit=f"%{table['max_running']}" if "max_running" in table else "",
        ranks=runs[0].fixed["ranks"],
        signal=table.get("signal", 120),
        options="\n".join(f"#SBATCH --{key}={value}" for key, value in given.items()),
        cwd=shlex.quote(os.getcwd()),
        setup="\n".join(map(str, table.get("setup", []))),
        directory=shlex.quote(str(directory)),
    )
    commands = [
        f"exec {shlex.join(run.command)} >>{shlex.quote(str(run.log))} 2>&1 </dev/null\n"
        for run in runs
    ]
    return {"job.sh": job, "runs.sh": "".join(commands)}


def submit(runs, name, table, options):
    """Write and submit the runs that are not finished. Returns what was done, as text.

    Raises:
        UsageError: there is no sbatch, it refuses, or the sweep is in the queue already.
    """
    if not options.dry_run:
        queued = _slurm("squeue", "--noheader", "--me", f"--name={name}", "--format=%i").split()
        if queued:
            raise UsageError(f"{name} is in the queue already: job {' '.join(queued)}")
    todo = [run for run in runs if launch.settle(run, options.retry_failed)]
    if not todo:
        return f"{name}: nothing to submit, no run is left to do"
    directory = Path(
        options.data_dir, f"slurm_{name}", time.strftime("%Y-%m-%d_%H-%M-%S")
    ).absolute()
    files = job_files(todo, name, table, directory)
    if options.dry_run:
        return "\n".join(f"# {directory / file}\n{text}" for file, text in files.items())
    directory.mkdir(parents=True, exist_ok=True)
    for run in todo:
        launch.prepare(run)
    for file, text in files.items():
        (directory / file).write_text(text, encoding="utf-8")
    # --chdir: where the tasks' own output goes.
    job = _slurm("sbatch", "--parsable", f"--chdir={directory}", str(directory / "job.sh"))
    job = job.strip().split(";")[0]
    text = f"{name}: submitted job {job}, {len(todo)} of {len(runs)} runs, with {directory}"
    return f"{text}\nscancel {job} stops it; the same sweep again goes on"


def _slurm(*words):
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as e:
        raise UsageError(f"--slurm needs Slurm's {words[0]}: {e}") from e
    if done.returncode:
        raise UsageError(f"{words[0]}: {' '.join(done.stderr.split())}")
    return done.stdout
