"""PBS (OpenPBS, PBS Professional): ``qsub``, and an ``mpiexec`` for the ranks."""

from __future__ import annotations

import shlex

from choros.launch.schedulers.file_systems import FILE_SYSTEMS
from choros.launch.schedulers.job import Job
from choros.launch.schedulers.mpiexec import launch_line
from choros.launch.schedulers.scheduler import Scheduler
from choros.launch.schedulers.shell_script import body, clock, head, last_line


def script(job: Job) -> str:
    """Return the script of a job.

    Example:
        >>> print(script(Job(("python", "a.py"), "a", nodes=2, ranks_per_node=4)).splitlines()[2])
        #PBS -l select=2:ncpus=4:mpiprocs=4:ompthreads=1
    """
    chunk = job.site.select or _chunk(job)
    lines = head(
        job,
        [
            f"-N {job.name}",
            f"-l {chunk.format(nodes=job.nodes)}",
            "-l place=scatter",
            *([f"-l walltime={clock(job.time)}"] if job.time else []),
            *([f"-A {job.account}"] if job.account else []),
            *([f"-q {job.queue}"] if job.queue else []),
            *([f"{FILE_SYSTEMS}{job.filesystems}"] if job.filesystems else []),
            "-j oe",
            "-k doe",
            "-r y",
        ],
        "#PBS",
    )
    line = launch_line(job, "PBS_NODEFILE")
    resubmit = f'cd "$PBS_O_WORKDIR" && qsub {shlex.quote(job.script)}'  # --setup may have changed the directory
    lines += ['cd "$PBS_O_WORKDIR" || exit 1', *body(job, line, resubmit, "$PBS_JOBID")]
    return "\n".join(lines) + "\n"


def _chunk(job: Job) -> str:
    cores = job.ranks_per_node * job.cores * (job.threads_per_core or 1)
    gpus = f":ngpus={job.ranks_per_node * job.gpus}" if job.gpus else ""
    return f"select={{nodes}}:ncpus={cores}:mpiprocs={job.ranks_per_node}:ompthreads={job.threads}{gpus}"


PBS = Scheduler(
    name="pbs",
    program="qsub",
    beside="pbsnodes",
    script=script,
    submit=lambda file: ["qsub", file],
    job_id=last_line,
    status=lambda job: ["qstat", job],
    cancel=lambda job: ["qdel", job],
    logs=lambda job: [f"*.o{job.partition('.')[0]}"],
    unknown=("unknown job", "job has finished"),
    silent=("annot connect to server", "onnection refused"),
    ending=".pbs.sh",
)
