"""Grid Engine: ``qsub``, and the MPI's ``mpiexec`` for the ranks, which finds Grid Engine's hosts itself."""

from __future__ import annotations

import re

from choros.launch.schedulers.job import Job
from choros.launch.schedulers.mpiexec import launch_line
from choros.launch.schedulers.scheduler import Scheduler
from choros.launch.schedulers.shell_script import body, clock, head


def script(job: Job) -> str:
    """Return the script of a job.

    The names of parallel environments and of GPU resources depend on the site. The script uses ``mpi``, unless there is
    a directive ``-pe NAME SLOTS``, and ``gpu``, unless a directive ``-l`` contains gpu. Comments in the script explain
    the settings that the site decides.

    Example:
        >>> print(script(Job(("python", "a.py"), "a", nodes=2, ranks_per_node=2, cores=4)).splitlines()[5])
        #$ -pe mpi 16
    """
    names_environment = any(line.split()[0] == "-pe" for line in job.directives)
    requests_gpus = any(line.startswith("-l") and "gpu" in line.lower() for line in job.directives)
    slots = job.size * job.cores
    lines = head(
        job,
        [
            f"-N {job.name}",
            "-cwd",
            "-j y",
            f"-o {job.name}-$JOB_ID.log",
            *([] if names_environment else [f"-pe mpi {slots}"]),
            *([f"-l gpu={job.gpus}"] if job.gpus and not requests_gpus else []),
            *([f"-l h_rt={clock(job.time)}"] if job.time else []),
            *([f"-P {job.account}"] if job.account else []),
            *([f"-q {job.queue}"] if job.queue else []),
            "-r y",
        ],
        "#$",
    )
    slots_per_host, total_gpus = slots // job.nodes, job.size * job.gpus
    if job.nodes > 1 and not names_environment:
        lines += [
            f"# The site's parallel environment decides on how many hosts {slots} slots lie (qconf -sp mpi):",
            f"# meant are {job.nodes}, by an allocation_rule of {slots_per_host}. Name one that has it by "
            f"-o '-pe NAME {slots}'.",
        ]
    if job.gpus and not requests_gpus:
        lines += [
            f"# gpu={job.gpus} is asked for each slot where the site's consumable is YES, once where it is JOB",
            f"# (qconf -sc): meant are {total_gpus} in all. Give what the site counts by -o '-l gpu=N'.",
        ]
    lines += body(job, launch_line(job), 99, "$JOB_ID")  # exit code 99: Grid Engine requeues the job
    return "\n".join(lines) + "\n"


def job_id(output: str) -> str:
    """Return the job's id from the output of ``qsub``.

    Example:
        >>> job_id('Your job 42 ("train") has been submitted')
        '42'
    """
    match = re.search(r"\b(\d+)\b", output)
    return match[1] if match else output.strip()


SGE = Scheduler(
    name="sge",
    program="qsub",
    beside="qconf",
    script=script,
    submit=lambda file: ["qsub", file],
    job_id=job_id,
    status=lambda job: ["qstat", "-j", job],
    cancel=lambda job: ["qdel", job],
    logs=lambda job: [f"*-{job}.log"],
    unknown=("do not exist",),
    silent=("unable to contact qmaster", "unable to send message to qmaster"),
    ending=".sge.sh",
)
