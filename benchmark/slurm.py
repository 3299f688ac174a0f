"""A sweep as a Slurm job array: one task a run, requeued until the run is finished.

Slurm warns a task some time before its limit; the run then ends its epoch, saves, and the task
puts itself back into the queue, where it resumes. Tasks that Slurm preempts or whose node dies are
put back by Slurm itself (--requeue), and resume too.
"""

import os
import re
import shlex
import shutil
import subprocess
import time
from pathlib import Path

from benchmark import launch
from common import UsageError
from common.serialization import check_inside

# Keys of a sweep's [slurm] table and what each must be.
KEYS = {
    "partition": str,
    "time": (str, int),  # as sbatch has it: minutes, or "[days-]hours:minutes:seconds"
    "mem": (str, int),
    "cpus_per_rank": int,
    "launcher": str,  # "mpirun" or "srun"
    "signal": int,  # seconds before the time limit at which runs are told to stop
    "max_running": int,  # tasks that run at a time
    "directives": list,  # further options of sbatch, as ["--account=rl", "--gres=gpu:1"]
    "setup": list,  # shell lines to run before, as ["module load gcc"]
}

JOB = """\
#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --array=1-{count}{limit}
#SBATCH --ntasks={ranks}
#SBATCH --cpus-per-task={cpus}
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@{signal}
#SBATCH --output="{directory}/task_%a.out"
{directives}
cd {cwd} || exit 1
{setup}
bash "{directory}/run_$SLURM_ARRAY_TASK_ID.sh" &
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
    """The [slurm] table with defaults filled in. UsageError names a wrong key or value."""
    for key, value in table.items():
        if key not in KEYS:
            raise UsageError(f"slurm: unknown key {key}; there are {', '.join(KEYS)}")
        if not isinstance(value, KEYS[key]) or isinstance(value, bool):
            names = {int: "int", list: "list", str: "string"}.get(KEYS[key], "int or string")
            raise UsageError(f"slurm.{key}: expected {names}, got {value!r}")
        if isinstance(value, int) and value < 1:
            raise UsageError(f"slurm.{key}: must be at least 1, got {value}")
        words = value if isinstance(value, list) else [str(value)]
        if any(not isinstance(word, str) or set(word) & set("\n\0") for word in words):
            raise UsageError(f"slurm.{key}: expected strings of one line, got {value!r}")
        if key in ("partition", "time", "mem") and not re.fullmatch(r"[\w.:,+-]+", str(value)):
            raise UsageError(f"slurm.{key}: not a value for sbatch: {value!r}")
    for directive in table.get("directives", []):
        if not directive.startswith("-"):
            raise UsageError(
                f"slurm.directives: expected options as --account=x, got {directive!r}"
            )
    table = {"cpus_per_rank": 1, "launcher": "mpirun", "signal": 120, **table}
    if table["launcher"] not in ("mpirun", "srun"):
        raise UsageError(f'slurm.launcher: expected "mpirun" or "srun", got {table["launcher"]!r}')
    return table


def job_files(runs, name, table, directory):
    """The files of a job array: {file name: text}, job.sh and run_1.sh to run_<n>.sh.

    All runs must have the same number of ranks. `directory`: where the files will lie.
    """
    ranks = runs[0].num_cpu
    options = {"partition": "--partition", "time": "--time", "mem": "--mem"}
    directives = [f"#SBATCH {options[k]}={table[k]}" for k in options if k in table]
    directives += [f"#SBATCH {line}" for line in table.get("directives", [])]
    srun = table["launcher"] == "srun"
    launcher = ["srun", "--mpi=pmi2", f"--ntasks={ranks}"] if srun else None
    files = {
        "job.sh": JOB.format(
            name=name,
            count=len(runs),
            limit=f"%{table['max_running']}" if "max_running" in table else "",
            ranks=ranks,
            cpus=table["cpus_per_rank"],
            signal=table["signal"],
            directives="\n".join(directives),
            cwd=shlex.quote(os.getcwd()),
            setup="\n".join(table.get("setup", [])),
            directory=directory,
            # Slurm takes a SIGTERM as an order to kill srun's step; SIGUSR1 just reaches the ranks.
            stop='scancel --signal=USR1 "$SLURM_JOB_ID"' if srun else 'kill -TERM "$run"',
        )
    }
    for i, run in enumerate(runs, 1):
        words, log = shlex.join(launch.command(run, launcher)), shlex.quote(str(run.log))
        files[f"run_{i}.sh"] = (
            f"mkdir -p {shlex.quote(str(run.directory))}\n"
            f"exec >> {log} 2>&1 < /dev/null\n"
            f'echo "{launch.LOG_HEAD}$(date "+%F %T") Slurm job $SLURM_JOB_ID"\n'
            f"export PYTHONUNBUFFERED=1\n"
            f"exec {words}\n"
        )
    return files


def submit(runs, name, table, data_dir, retry_failed=False, dry_run=False):
    """Write and submit the runs that are not finished. Returns what was done, as text.

    Raises:
        UsageError: there is no sbatch, it refuses, or the sweep is in the queue already.
    """
    todo = []
    for run in runs:
        word, _ = launch.status(run)
        if word in ("new", "interrupted", "too short") or (word == "failed" and retry_failed):
            todo.append(run)
    if len({run.num_cpu for run in todo}) > 1:
        raise UsageError("the runs of a job array need the same number of ranks: set num_cpu")
    # Runs that are at work are not left to do: what is queued comes before what is left.
    if not dry_run and shutil.which("sbatch"):
        queued = _slurm("squeue", "--noheader", "--me", f"--name={name}", "--format=%i").split()
        if queued:
            raise UsageError(f"{name} is in the queue already: job {' '.join(queued)}")
    if not todo:
        return f"{name}: nothing to submit, no run is left to do"
    directory = Path(data_dir, f"slurm_{name}", time.strftime("%Y-%m-%d_%H-%M-%S")).absolute()
    check_inside(data_dir, directory)
    while directory.exists():  # submitted twice within a second
        directory = directory.with_name(directory.name + "+")
    if set(str(directory)) & set('%"$`\\\n'):
        raise UsageError(f"this path would confuse Slurm or its shell: {directory}")
    files = job_files(todo, name, table, directory)
    if dry_run:
        return "\n".join(f"# {directory / file}\n{text}" for file, text in files.items())
    if not shutil.which("sbatch"):
        raise UsageError("--slurm needs Slurm's sbatch, and there is none on PATH")
    directory.mkdir(parents=True)
    for file, text in files.items():
        (directory / file).write_text(text, encoding="utf-8")
    job = _slurm("sbatch", "--parsable", str(directory / "job.sh")).strip().split(";")[0]
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
        raise UsageError(f"{words[0]}: {e}") from e
    if done.returncode:
        raise UsageError(f"{words[0]}: {' '.join(done.stderr.split())}")
    return done.stdout
