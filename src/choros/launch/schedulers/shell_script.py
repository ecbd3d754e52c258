"""Parts of shell scripts that several schedulers share."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from choros.launch.schedulers.job import Job

# The variables in which each MPI's launcher sets the rank and the local rank.
RANK = {
    "srun": "$SLURM_PROCID",
    "pals": "${PALS_RANKID:-$PMI_RANK}",
    "openmpi": "$OMPI_COMM_WORLD_RANK",
    "jsrun": "$JSM_NAMESPACE_RANK",
    "flux": "$FLUX_TASK_RANK",
    "pod": "$JOB_COMPLETION_INDEX",
    "": "$PMI_RANK",
}
LOCAL_RANK = {
    "srun": "$SLURM_LOCALID",
    "pals": "${PALS_LOCAL_RANKID:-$PMI_LOCAL_RANK}",
    "openmpi": "$OMPI_COMM_WORLD_LOCAL_RANK",
    "jsrun": "$JSM_NAMESPACE_LOCAL_RANK",
    "flux": "$FLUX_TASK_LOCAL_ID",
    "": "$MPI_LOCALRANKID",
}

_LIMITS_GPUS = ("srun", "flux", "jsrun", "pod")  # these launchers limit each rank to its GPUs themselves


def last_line(output: str) -> str:
    r"""Return the last line of a command's output: a site may print others before it.

    Example:
        >>> last_line("Welcome\n17\n"), last_line("")
        ('17', '')
    """
    return output.strip().rpartition("\n")[2].strip()


def clock(seconds: int) -> str:
    """Return seconds as HH:MM:SS.

    Example:
        >>> clock(3700), clock(100 * 3600)
        ('01:01:40', '100:00:00')
    """
    return f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"


def head(job: Job, directives: Sequence[str], mark: str) -> list[str]:
    """Return the first lines: the shell, comments on the origin, and the directives, the user's last."""
    written = [f"# Written by: {job.written_by}"] if job.written_by else []
    sources = [f"# {job.site.name}, as read in {source}" for source in job.site.source]
    lines = [*directives, *job.site.directives, *job.directives]
    return ["#!/bin/bash", *written, *sources, *(f"{mark} {line}" for line in lines)]


def body(job: Job, launch: str, resubmit: str | int, identity: str, *, clocked: bool = True) -> list[str]:
    """Return the script's commands: set-up, variables, the launch of the ranks, and the requeue of the job.

    Args:
        job: the job.
        launch: the command that starts the ranks.
        resubmit: the command that requeues the job (the script exits with 75 if it fails); or the exit code on which
            the scheduler requeues the job.
        identity: the job's id as a shell expression: a variable, or a command substitution.
        clocked: whether to export ``CHOROS_STOP_AT``, because the scheduler sends no signal before the limit. Defaults
            to True.
    """
    lines = [*job.setup]
    lines += [f"export {name}={shlex.quote(value)}" for name, value in job.exports().items()]
    if clocked and job.time and job.signal:
        lines.append(f"export CHOROS_STOP_AT=$(($(date +%s) + {job.time} - {job.signal}))")
    requeue_lines = [f"    exit {resubmit}"]
    if isinstance(resubmit, str):
        requeue_lines = [
            f"    {resubmit} && exit 0",
            '    echo "choros: the job could not be requeued: submit it again to resume" >&2',
            "    exit 75",
        ]
    return [
        *lines,
        f'export CHOROS_REQUEUE="$PWD/.choros-requeue-{identity}"',
        'rm -f "$CHOROS_REQUEUE"',
        launch,
        "code=$?",
        'if [ -e "$CHOROS_REQUEUE" ]; then',
        '    rm -f "$CHOROS_REQUEUE"',
        '    echo "choros: stopped before the time limit, the state is saved; the requeued job resumes"',
        *requeue_lines,
        "fi",
        'echo "choros: the ranks ended with code $code"',
        "exit $code",
    ]


def rank_command(job: Job, launcher: str) -> str:
    r"""Return the command that the launcher starts for each rank: a shell that replaces itself by the rank.

    The shell ignores SIGUSR2, the signal before the time limit, because it would end scripts that do not handle it.

    Args:
        job: the job.
        launcher: a key of ``RANK``.

    Example:
        >>> rank_command(Job(("python", "a b.py"), "a"), "srun")
        'bash -c \'trap "" USR2; exec "$@"\' rank python \'a b.py\''
    """
    return f"bash -c {shlex.quote(rank_script(job, launcher))} rank {shlex.join(job.command)}"


def rank_script(job: Job, launcher: str) -> str:
    """Return the text of the shell that becomes a rank; the shell's arguments are the rank's command."""
    parts = ['trap "" USR2']
    if job.gpus and job.site.visible and (launcher not in _LIMITS_GPUS or job.site.gpu_order):
        order = job.site.gpu_order or tuple(map(str, range(job.ranks_per_node * job.gpus)))
        name = job.site.visible
        local = LOCAL_RANK.get(launcher, LOCAL_RANK[""])
        parts += [
            f"all=({' '.join(order)})",
            f'[ -z "${name}" ] || IFS=, read -ra all <<<"${name}"' if not job.site.gpu_order else "",
            f'mine=("${{all[@]:$(({local} * {job.gpus})):{job.gpus}}}")',
            f'export {name}="$(IFS=,; echo "${{mine[*]}}")"',
        ]
    if job.gpus > 1:  # without it a rank would choose a GPU by its local rank
        parts.append("export CHOROS_OWN_GPUS=1")
    wrapped = " ".join(wrap_words(job.wrap, RANK.get(launcher, RANK[""])))
    parts.append(f'exec {wrapped} "$@"' if wrapped else 'exec "$@"')
    return "; ".join(part for part in parts if part)


def wrap_words(arguments: Sequence[str], rank: str) -> list[str]:
    """Return the words of a wrapper command, quoted for the shell, with the rank in place of ``%r``.

    Example:
        >>> wrap_words(["vtune", "-r", "out.%r", "--", "a$b"], "$R")
        ['vtune', '-r', 'out."$R"', '--', "'a$b'"]
    """
    return [
        f'"{rank}"'.join(shlex.quote(part) if part else "" for part in argument.split("%r")) or "''"
        for argument in arguments
    ]
