"""SLURM: ``sbatch``, and ``srun`` for the ranks."""

from __future__ import annotations

import re
import shlex

from choros.cluster.hardware import MPICH_UNDER_PMI2, PMI
from choros.errors import InvalidInputError, suggestion
from choros.launch.schedulers.job import Job
from choros.launch.schedulers.option_names import named
from choros.launch.schedulers.scheduler import Scheduler
from choros.launch.schedulers.shell_script import body, clock, head, last_line, rank_command

# Values of srun --mpi= that SLURM has; a cluster has those for which its SLURM was built, by `srun --mpi=list`.
SRUN_MPI = ("none", "pmi2", "pmix", "pmix_v2", "pmix_v3", "pmix_v4", "pmix_v5", "cray_shasta")
_ENDED_STATES = (
    "COMPLETED",
    "FAILED",
    "CANCELLED",
    "TIMEOUT",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "BOOT_FAIL",
    "DEADLINE",
    "PREEMPTED",
)


def script(job: Job) -> str:
    """Return the script of a job.

    Example:
        >>> "srun --kill-on-bad-exit=1" in script(Job(("python", "train.py"), "train"))
        True
    """
    limits = [f"--time={clock(job.time)}"] if job.time else []
    names = [f"--account={job.account}"] if job.account else []
    names += [f"{job.site.queue_option}={job.queue}"] if job.queue else []
    signal = [f"--signal=USR2@{job.signal}"] if job.signal else []
    lines = head(
        job,
        [
            f"--job-name={job.name}",
            f"--nodes={job.nodes}",
            f"--ntasks-per-node={job.ranks_per_node}",
            f"--cpus-per-task={job.cpus}",
            *([f"--threads-per-core={job.threads_per_core}"] if job.threads_per_core else []),
            *_gpus(job),
            *limits,
            *names,
            f"--output={job.name}-%j.log",
            "--open-mode=append",
            "--requeue",
            *signal,
        ],
        "#SBATCH",
    )
    if PMI.get(job.mpi) == "pmi2" and job.mpi == "mpich":
        lines += [f'export {name}="${{{name}:-{value}}}"' for name, value in MPICH_UNDER_PMI2.items()]
    lines += body(job, _srun(job), 'scontrol requeue "$SLURM_JOB_ID"', "$SLURM_JOB_ID", clocked=False)
    return "\n".join(lines) + "\n"


def _gpus(job: Job) -> list[str]:
    if not job.gpus:
        return []
    site = [line.replace("{gpus}", str(job.gpus)) for line in job.site.gpu_directives]
    return site or [f"--gpus-per-task={job.gpus}"]


def _srun(job: Job) -> str:
    """Return the ``srun`` line; it repeats options that srun does not take from sbatch."""
    bind = job.site.bind.get(str(job.ranks_per_node), job.site.bind.get("other", ""))
    command = ["srun", "--kill-on-bad-exit=1", "--label"]
    command += [f"--mpi={PMI.get(job.mpi, job.mpi)}"] if job.mpi else []
    command += [f"--nodes={job.nodes}", f"--ntasks-per-node={job.ranks_per_node}", f"--cpus-per-task={job.cpus}"]
    command += [*_gpus(job), *shlex.split(bind), *job.site.launch]
    return f"{shlex.join(command)} {rank_command(job, 'srun')}"


def srun_mpi_warning(mpi: str) -> str:
    """Return a warning if SLURM has no value of ``srun --mpi=`` for an MPI, else "".

    Args:
        mpi: ``Job.mpi``.

    Raises:
        InvalidInputError: srun would print its list and start nothing.

    Example:
        >>> srun_mpi_warning("mpich"), srun_mpi_warning("pmix_v5")
        ('', '')
        >>> srun_mpi_warning("pmi3").partition(": ")[2]
        'did you mean pmix? srun refuses a value that `srun --mpi=list` does not print on the cluster'
    """
    if mpi == "list":
        raise InvalidInputError(
            f"{named('mpi', mpi)}: give a value, of those that `srun --mpi=list` prints on the cluster"
        )
    if not mpi or mpi in PMI or mpi in SRUN_MPI:
        return ""
    hint = suggestion(mpi, (*PMI, *SRUN_MPI))
    return (
        f"{named('mpi', mpi)} is not a value that SLURM has: {hint}{'' if hint.endswith('?') else ';'} srun refuses a "
        "value that `srun --mpi=list` does not print on the cluster"
    )


def describe(output: str) -> str:
    """Return the output of ``scontrol show job --oneliner`` as one readable line.

    Example:
        >>> describe("JobId=7 JobName=a JobState=RUNNING RunTime=00:01:02 TimeLimit=01:00:00 NodeList=n[1-2]")
        'job 7 (a): RUNNING, 00:01:02 of 01:00:00, on n[1-2]'
    """
    fields = _fields(output)
    state, reason = fields.get("JobState", "unknown"), fields.get("Reason", "None")
    text = f"job {fields.get('JobId', '?')} ({fields.get('JobName', '?')}): {state}"
    text += f" ({reason})" if reason != "None" else ""
    text += f", {fields.get('RunTime', '?')} of {fields.get('TimeLimit', '?')}"
    nodes = fields.get("NodeList", "(null)")
    text += f", on {nodes}" if nodes not in ("(null)", "") else ""
    text += f", restarts {fields['Restarts']}" if fields.get("Restarts", "0") != "0" else ""
    code = fields.get("ExitCode", "0:0") if state in _ENDED_STATES else "0:0"
    return text + (f", exit code {code.partition(':')[0]}" if code != "0:0" else "")


def ended(output: str) -> bool:
    """Return whether the job has ended, from the output of ``scontrol``; an unknown job has ended.

    Example:
        >>> ended("JobState=COMPLETED"), ended("JobState=PENDING"), ended("")
        (True, False, True)
    """
    return _fields(output).get("JobState", "COMPLETED") in _ENDED_STATES


def _fields(output: str) -> dict[str, str]:
    return dict(re.findall(r"(\w+)=(\S*)", output.partition("\n")[0]))


SLURM = Scheduler(
    name="slurm",
    program="sbatch",
    script=script,
    submit=lambda file: ["sbatch", "--parsable", file],
    job_id=lambda output: last_line(output).partition(";")[0],
    status=lambda job: ["scontrol", "show", "job", "--oneliner", job],
    cancel=lambda job: ["scancel", job],
    logs=lambda job: [f"*-{job}.log"],
    describe=describe,
    log_of=lambda output: _fields(output).get("StdOut", ""),
    ended=ended,
    unknown=("invalid job id",),
    silent=("a configuration source", "ontact slurm controller"),
    ending=".slurm.sh",
)
