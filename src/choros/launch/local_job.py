"""Launch of the ranks of a job on this host, with their cores, threads, shared memory and environment variables."""

from __future__ import annotations

import os
import platform
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from choros.cluster import Place, Slots, is_this_machine, parse_slots, read_hostfile
from choros.cluster.hardware import kept_variables, plan, usable_cores, variables
from choros.errors import InvalidInputError, counted
from choros.launch.process.child_process import ExitStatus
from choros.launch.process.rank_limit import check_ranks
from choros.launch.process.rank_output import Output
from choros.launch.process.rank_supervisor import GRACE, JobResult
from choros.launch.process.rank_supervisor import run as run_ranks


@dataclass(frozen=True)
class LaunchOptions:
    """The options for starting a job's ranks.

    Attributes:
        size: int. The number of ranks.
        threads: int or None. Threads of each rank. Defaults to None, the number of its cores.
        bind: bool. Bind each rank to separate cores. Defaults to True.
        grace: float. Seconds between SIGTERM and SIGKILL. Defaults to 5.
        folder: str or None. Also write the output of each rank to ``folder/rank.N``. Defaults to None.
        timestamps: bool. Put the time before each line. Defaults to False.
        variables: dict. Environment variables of every rank.
    """

    size: int
    threads: int | None = None
    bind: bool = True
    grace: float = GRACE
    folder: str | None = None
    timestamps: bool = False
    variables: dict[str, str] | None = None


@dataclass(frozen=True)
class HostShare:
    """The ranks of a job that are on this host.

    Attributes:
        total: int. Ranks of the job. first: int. The first rank on this host. Defaults to 0.
        node, nodes: int. The number of this host, and of all hosts.
        variables: dict. Environment variables of every rank, instead of the shared memory of ranks of one host.
        share: (int, int). The part of this host's cores, and the number of parts, if this share is one rank only.
    """

    total: int
    first: int = 0
    node: int = 0
    nodes: int = 1
    variables: dict[str, str] | None = None
    share: tuple[int, int] = (0, 1)


def check_outside(advice: str) -> None:
    """Refuse to start ranks from a rank.

    Args:
        advice: the text on what to do instead.

    Raises:
        InvalidInputError: this process is a rank of a job.
    """
    place = Place.here()
    if place.size > 1:
        raise InvalidInputError(
            f"this process is already rank {place.rank} of {place.size} (started by {place.launcher}): {advice}"
        )


def slots_of(hosts: str | None, hostfile: str | None) -> Slots:
    """Return the hosts and their slots, from either form; an empty tuple if neither is given.

    Example:
        >>> slots_of("localhost:4", None), slots_of(None, None)
        ((('localhost', 4),), ())
    """
    return parse_slots(hosts) if hosts is not None else read_hostfile(hostfile) if hostfile is not None else ()


def size_of(requested: int | None, hosts: str | None, hostfile: str | None, *, here: bool = True) -> int | None:
    """Return the number of ranks to start.

    Args:
        requested: the requested number of ranks, or None.
        hosts: ``host:slots[,host:slots]``, or None.
        hostfile: the path of a host file, or None.
        here: refuse hosts other than this one. Defaults to True.

    Returns:
        The requested number, else the number of all slots; None if neither is given.

    Raises:
        InvalidInputError: ``hosts`` and ``hostfile`` are both given or cannot be read, name another host, or have
            fewer slots than ranks.

    Example:
        >>> size_of(None, "localhost:4", None), size_of(2, "localhost:4", None), size_of(3, None, None)
        (4, 2, 3)
    """
    if hosts is not None and hostfile is not None:
        raise InvalidInputError("give the hosts or a host file, not both")
    if hosts is None and hostfile is None:
        return requested
    listed_slots = slots_of(hosts, hostfile)
    other = next((name for name, _ in listed_slots if not is_this_machine(name)), None)
    if other is not None and here:
        raise InvalidInputError(
            f"{other} is not this machine ({platform.node()}), and only the command `choros run` starts ranks on other "
            "hosts: give localhost:SLOTS, or write the call into a script"
        )
    slots = sum(count for _, count in listed_slots)
    if requested is not None and requested > slots:
        raise InvalidInputError(f"{requested} ranks were asked for, but the hosts have {counted(slots, 'slot')}")
    return requested or slots


def start(
    command: Sequence[str],
    options: LaunchOptions,
    *,
    own: Sequence[Mapping[str, str]] | None = None,
    own_fds: Sequence[Sequence[int]] | None = None,
    announce: bool = True,
    verbose: bool = False,
    part: HostShare | None = None,
    on_failure: Callable[[ExitStatus], None] | None = None,
) -> JobResult:
    """Run a command as the ranks of a job, each with its rank, cores, threads and the shared memory of all.

    Args:
        command: the program and its arguments.
        options: the options of the launch.
        own: for each rank, environment variables of this rank only.
        own_fds: for each rank, file descriptors that only this rank inherits.
        announce: print which rank failed. Defaults to True.
        verbose: print the cores, threads and command of each rank. Defaults to False.
        part: the ranks on this host, if the job has ranks on other hosts. Defaults to all ranks.
        on_failure: function of the ExitStatus of the first rank that failed.

    Returns:
        The outcome of the run.

    Raises:
        InvalidInputError: the options cannot be satisfied; nothing was started.
    """
    size, part = options.size, part or HostShare(total=options.size)
    index, shares = part.share
    check_ranks(max(size, shares))
    bindings = plan(max(size, shares), options.threads, options.bind)[index : index + size]
    # Variables that the user exported have priority, unless ``options.threads`` is set.
    base_environment = kept_variables(os.environ, options.threads)
    crowded = not bindings[0].cores or max(size, shares) * bindings[0].threads > len(usable_cores())
    from choros.comm.shm.group import SharedGroup
    from choros.comm.shm.group_header import abort, has_joined

    # Created here and inherited by the ranks, so it needs no name, and the system frees it when all processes have
    # ended.
    segment = SharedGroup.create(size)
    environment = [
        {
            **variables(binding.threads, keep=base_environment, shared=crowded, bound=bool(binding.cores)),
            **(options.variables or {}),
            **horovod_place(rank, size, part),
            **({"CHOROS_SLOT": str(index)} if shares > 1 else {}),
            **(part.variables or {"CHOROS_COMM_FD": str(segment.fd)}),
            **(own[rank] if own else {}),
        }
        for rank, binding in enumerate(bindings)
    ]

    def abort_if_not_joined(rank: int) -> None:
        if not has_joined(segment, rank):  # the other ranks would wait until their timeout
            others = "the other" if size == 2 else "the others"
            abort(segment, f"rank {rank} ended before it connected to {others}")

    try:
        output = Output(size, options.folder, options.timestamps, part.first, part.total)
        for rank, binding in enumerate(bindings if verbose else ()):
            cores = ",".join(map(str, binding.cores)) or "any"
            rank_name = f"rank {part.first + rank} of {part.total}"
            output.say(f"choros run: {rank_name}: cores {cores}; threads {binding.threads}; {shlex.join(command)}")
        return run_ranks(
            command,
            size,
            environment=environment,
            cores=[binding.cores for binding in bindings],
            pass_fds=(segment.fd,),
            own_fds=own_fds,
            grace=options.grace,
            output=output,
            announce=announce,
            on_end=abort_if_not_joined,
            on_failure=on_failure,
            first=part.first,
            total=part.total,
        )
    finally:
        segment.close()


def horovod_variables(
    *,
    start_timeout: float | None = None,
    timeline: str | None = None,
    mark_cycles: bool | None = None,
    stall_off: bool | None = None,
    stall_warning: float | None = None,
    stall_shutdown: float | None = None,
) -> dict[str, str]:
    """Return Horovod's environment variables for options of its launcher; options that are None are left out.

    Args:
        start_timeout: seconds that ``hvd.init`` may wait for all ranks.
        timeline: the file of the timeline.
        mark_cycles: mark cycles in the timeline.
        stall_off: turn off stall checks.
        stall_warning: seconds of waiting before a stall is reported.
        stall_shutdown: seconds of waiting before a stall ends the job; 0 for the default.

    Returns:
        Dict of names and values.

    Example:
        >>> horovod_variables(stall_off=True, stall_warning=90.0)
        {'HOROVOD_STALL_CHECK_DISABLE': '1', 'HOROVOD_STALL_CHECK_TIME_SECONDS': '90'}
    """
    variables: dict[str, Any] = {
        "HOROVOD_START_TIMEOUT": start_timeout,
        "HOROVOD_TIMELINE": timeline,
        "HOROVOD_TIMELINE_MARK_CYCLES": mark_cycles,
        "HOROVOD_STALL_CHECK_DISABLE": stall_off,
        "HOROVOD_STALL_CHECK_TIME_SECONDS": stall_warning,
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": stall_shutdown,  # Horovod's name
    }
    return {name: _text(value) for name, value in variables.items() if value is not None}


def _text(value: Any) -> str:
    """Return a value as text for a variable: integers without a decimal point, True as 1."""
    return value if isinstance(value, str) else str(int(value)) if value == int(value) else str(value)


def horovod_place(rank: int, size: int, part: HostShare) -> dict[str, str]:
    """Return rank and sizes under Horovod's names, which some scripts read before they import anything."""
    place = {"RANK": part.first + rank, "SIZE": part.total, "LOCAL_RANK": rank, "LOCAL_SIZE": size}
    place |= {"CROSS_RANK": part.node, "CROSS_SIZE": part.nodes}
    return {f"HOROVOD_{name}": str(value) for name, value in place.items()}
