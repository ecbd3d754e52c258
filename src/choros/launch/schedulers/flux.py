"""Flux: ``flux batch``, and ``flux run`` for the ranks."""

from __future__ import annotations

import shlex

from choros.launch.schedulers.job import Job
from choros.launch.schedulers.scheduler import Scheduler
from choros.launch.schedulers.shell_script import body, head, last_line, rank_command


def script(job: Job) -> str:
    """Return the script of a job.

    Example:
        >>> "flux run" in script(Job(("python", "train.py"), "train"))
        True
    """
    lines = head(
        job,
        [
            f"--job-name={job.name}",
            f"--nodes={job.nodes}",
            f"--nslots={job.size}",
            f"--cores-per-slot={job.cores}",
            *([f"--gpus-per-slot={job.gpus}"] if job.gpus else []),
            *([f"--time-limit={job.time}s"] if job.time else []),
            *([f"--bank={job.account}"] if job.account else []),
            *([f"--queue={job.queue}"] if job.queue else []),
            f"--output={job.name}-{{{{id}}}}.log",
        ],
        "# flux:",
    )
    command = ["flux", "run", "--label-io", f"--nodes={job.nodes}", f"--ntasks={job.size}"]
    command += [f"--cores-per-task={job.cores}", *([f"--gpus-per-task={job.gpus}"] if job.gpus else [])]
    command += ["-o", "cpu-affinity=per-task", *(["-o", "gpu-affinity=per-task"] if job.gpus else []), *job.site.launch]
    line = f"{shlex.join(command)} {rank_command(job, 'flux')}"
    resubmit = (
        f'cd "$begun_in" && flux --parent batch {shlex.quote(job.script)}'  # --setup may have changed the directory
    )
    lines += ["begun_in=$PWD", *body(job, line, resubmit, "$(flux getattr jobid)")]
    return "\n".join(lines) + "\n"


FLUX = Scheduler(
    name="flux",
    program="flux",
    script=script,
    submit=lambda file: ["flux", "batch", file],
    job_id=last_line,
    status=lambda job: ["flux", "jobs", job],
    cancel=lambda job: ["flux", "cancel", job],
    logs=lambda job: [f"*-{job}.log"],
    ended=lambda output: any(f" {state} " in output for state in ("CD", "CA", "F", "TO")) or not output.strip(),
    unknown=("unknown", "not found"),
    silent=("nable to connect to Flux",),
    ending=".flux.sh",
)
