"""LSF: ``bsub``, and ``jsrun`` or an ``mpiexec`` for the ranks."""

from __future__ import annotations

import re
import shlex

from choros.launch.schedulers.job import Job
from choros.launch.schedulers.mpiexec import launch_line
from choros.launch.schedulers.scheduler import Scheduler
from choros.launch.schedulers.shell_script import body, head, rank_command


def script(job: Job) -> str:
    """Return the script of a job.

    Example:
        >>> print(script(Job(("python", "a.py"), "a", nodes=2, ranks_per_node=6, mpi="jsrun")).splitlines()[2])
        #BSUB -nnodes 2
    """
    minutes = -(-job.time // 60)  # LSF takes whole minutes
    lines = head(
        job,
        [
            f"-J {job.name}",
            *_resource_options(job),
            *([f"-W {minutes // 60}:{minutes % 60:02}"] if job.time else []),
            *([f"-P {job.account}"] if job.account else []),
            *([f"-q {job.queue}"] if job.queue else []),
            f"-o {job.name}-%J.log",
            "-r",
        ],
        "#BSUB",
    )
    line = _jsrun(job) if _uses_jsrun(job) else launch_line(job, "LSB_DJOB_HOSTFILE")
    lines += body(job, line, 'brequeue "$LSB_JOBID"', "$LSB_JOBID")
    return "\n".join(lines) + "\n"


def _uses_jsrun(job: Job) -> bool:
    return job.mpi == "jsrun"


def _resource_options(job: Job) -> list[str]:
    if _uses_jsrun(job):
        return [f"-nnodes {job.nodes}"]
    resources = f'-R "span[ptile={job.ranks_per_node}] affinity[core({job.cores})]"'
    gpus = [f'-gpu "num={job.gpus}/task"'] if job.gpus else []
    return [f"-n {job.size}", resources, *gpus]


def _jsrun(job: Job) -> str:
    command = ["jsrun", "-n", str(job.size), "-r", str(job.ranks_per_node), "-a", "1", "-c", str(job.cores)]
    command += ["-g", str(job.gpus)] if job.gpus else []
    return f"{shlex.join([*command, '-b', 'rs', *job.site.launch])} {rank_command(job, 'jsrun')}"


def job_id(output: str) -> str:
    """Return the job's id from the output of ``bsub``.

    Example:
        >>> job_id("Job <42> is submitted to queue <normal>.")
        '42'
    """
    match = re.search(r"<(\d+)>", output)
    return match[1] if match else output.strip()


LSF = Scheduler(
    name="lsf",
    program="bsub",
    script=script,
    submit=lambda file: ["sh", "-c", 'exec bsub <"$0"', file],
    job_id=job_id,
    status=lambda job: ["bjobs", job],
    cancel=lambda job: ["bkill", job],
    logs=lambda job: [f"*-{job}.log"],
    ended=lambda output: any(f" {state} " in output for state in ("DONE", "EXIT")) or not output.strip(),
    unknown=("is not found",),
    silent=("LSF is down",),
    ending=".lsf.sh",
)
