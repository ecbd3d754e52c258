"""The script line that starts the ranks by ``mpiexec``, for schedulers without a launcher of ranks."""

from __future__ import annotations

import shlex

from choros.errors import InvalidInputError, nearest
from choros.launch.schedulers.job import Job
from choros.launch.schedulers.option_names import named
from choros.launch.schedulers.shell_script import rank_command

KNOWN = ("mpich", "intel", "mvapich", "openmpi", "pals")


def launch_line(job: Job, hosts: str = "") -> str:
    """Return ``mpiexec`` with its options, and the command of a rank.

    Args:
        job: the job; ``job.mpi`` names the MPI of mpiexec. Defaults to MPICH if empty.
        hosts: the variable with the path of the host file, if mpiexec does not find the hosts itself. Defaults to "".

    Raises:
        InvalidInputError: ``job.mpi`` is not known here.

    Example:
        >>> launch_line(Job(("python", "a.py"), "a", nodes=2, ranks_per_node=2), "PBS_NODEFILE")[:45]
        'mpiexec -n 4 -ppn 2 -f "$PBS_NODEFILE" bash -'
    """
    mpi = job.mpi or "mpich"
    if mpi not in KNOWN:
        near = nearest(mpi, KNOWN)
        hint = f": did you mean {near}?" if near else ""
        raise InvalidInputError(f"{named('mpi', mpi)} is none of {', '.join(KNOWN)}, whose mpiexec is known{hint}")
    bind = job.site.bind.get(str(job.ranks_per_node), job.site.bind.get("other", ""))
    if mpi == "pals":
        options = [
            "--ppn",
            str(job.ranks_per_node),
            "--depth",
            str(job.threads),
            *shlex.split(bind or "--cpu-bind depth"),
        ]
    elif mpi == "openmpi":
        options = ["--map-by", f"ppr:{job.ranks_per_node}:node:PE={job.cores}", *shlex.split(bind)]
        variables = ["CHOROS_REQUEUE", *(["CHOROS_STOP_AT"] if job.time and job.signal else [])]
        options += [option for name in (*job.exports(), *variables) for option in ("-x", name)]
    else:
        options = ["-ppn", str(job.ranks_per_node), *shlex.split(bind)]
    file = [f'{"--hostfile" if mpi == "openmpi" else "-f"} "${hosts}"'] if hosts and mpi != "pals" else []
    command = [
        shlex.join(["mpiexec", "-n", str(job.size), *options, *job.site.launch]),
        *file,
        rank_command(job, _kind(mpi)),
    ]
    return " ".join(command)


def _kind(mpi: str) -> str:
    return mpi if mpi in ("pals", "openmpi") else ""
