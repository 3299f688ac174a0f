"""A sweep as a Slurm job array: one task per run, requeued until the run is finished.

Options of sbatch are in the sweep's table [slurm]; they come after those below, and win over them.
Slurm warns a task two minutes before its limit; the run then ends its epoch, saves, and the task
puts itself back into the queue, where it resumes. Tasks that Slurm preempts or whose node dies are
put back by Slurm itself (--requeue), and resume too.
"""

import shlex
import subprocess
from pathlib import Path

from benchmark import launch
from common import UsageError

JOB = """\
#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --array=1-{count}
#SBATCH --ntasks={ranks}
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@120
#SBATCH --output={output}
{options}
export PYTHONUNBUFFERED=1
runs=(
{runs}
)
bash -c "${{runs[SLURM_ARRAY_TASK_ID - 1]}}" &
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


def job_script(runs, name, table, folder):
    """The job array as text: task i is the i-th run; its own output goes to a file in `folder`."""
    commands = [
        f"exec {shlex.join(run.command)} >>{shlex.quote(str(run.log))} 2>&1 </dev/null"
        for run in runs
    ]
    options = []
    for key, value in table.items():  # true is an option without a value, false none
        text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
        setting = "" if value is True else f"={shlex.quote(text)}"
        options += [f"#SBATCH --{key.replace('_', '-')}{setting}"] * (value is not False)
    return JOB.format(
        name=name,
        count=len(runs),
        ranks=runs[0].fixed["ranks"],
        output=shlex.quote(str(folder / "%A_%a.out")),
        options="\n".join(options),
        runs="\n".join(map(shlex.quote, commands)),
    )


def submit(runs, name, table, options):
    """Submit the runs that are not finished. Returns what was done, as text; the job if dry_run.

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
    folder = Path(options.data_dir, f"slurm_{name}").absolute()
    script = job_script(todo, name, table, folder)
    if options.dry_run:
        return script
    folder.mkdir(parents=True, exist_ok=True)
    for run in todo:
        launch.prepare(run)
    job = _slurm("sbatch", "--parsable", stdin=script).strip().split(";")[0]
    text = f"{name}: submitted job {job}, {len(todo)} of {len(runs)} runs"
    return f"{text}\nscancel {job} stops it; the same sweep again goes on"


def _slurm(*words, stdin=""):
    """What one of Slurm's programs prints."""
    try:
        done = subprocess.run(words, input=stdin, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as e:
        raise UsageError(f"--slurm needs Slurm's {words[0]}: {e}") from e
    if done.returncode:
        raise UsageError(f"{words[0]}: {' '.join(done.stderr.split())}")
    return done.stdout
