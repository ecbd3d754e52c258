"""Starts the ranks of a job on this machine: their number, cores, threads, group, and Horovod's variables."""

from __future__ import annotations

import os
import platform
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from choros.cluster import Place, Slots, is_this_machine, parse_slots, read_hostfile
from choros.cluster.hardware import plan, usable_cores, variables
from choros.errors import InvalidInputError
from choros.launch.process.child_process import ExitStatus
from choros.launch.process.rank_output import Output
from choros.launch.process.rank_supervisor import GRACE, JobResult
from choros.launch.process.rank_supervisor import run as run_ranks


@dataclass(frozen=True)
class LaunchOptions:
    """The options for starting a job's ranks.

    Attributes:
        size: int. How many.
        threads: int or None. Threads of each rank; those of its cores when None.
        bind: bool. Bind each rank to cores of its own.
        grace: float. Seconds between SIGTERM and SIGKILL.
        folder: str or None. Keep what each rank prints in ``folder/rank.N``.
        timestamps: bool. Put the time before each line.
        variables: mapping. Set for every rank.
    """

    size: int
    threads: int | None = None
    bind: bool = True
    grace: float = GRACE
    folder: str | None = None
    timestamps: bool = False
    variables: Mapping[str, str] | None = None


@dataclass(frozen=True)
class HostShare:
    """The ranks of a job that are on this host.

    Attributes:
        total: int. Ranks of the job. first: int. The number of the first one here.
        node, nodes: int. This host among the job's.
        variables: mapping. Set for every rank, in place of the memory in which ranks of one host meet.
        on_failure: gets how the first rank that failed ended.
        share: tuple of int. Which part of how many of this host's cores is for its one rank here.
    """

    total: int
    first: int = 0
    node: int = 0
    nodes: int = 1
    variables: Mapping[str, str] | None = None
    on_failure: Callable[[ExitStatus], None] | None = None
    share: Sequence[int] = (0, 1)


def check_outside(advice: str) -> None:
    """Refuse to start ranks from a rank.

    Args:
        advice: what to do there instead.

    Raises:
        InvalidInputError: this process is a rank of a job.
    """
    here = Place.here()
    if here.size > 1:
        raise InvalidInputError(
            f"this process is already rank {here.rank} of {here.size} (started by {here.launcher}): {advice}"
        )


def slots_of(hosts: str | None, hostfile: str | None) -> Slots:
    """The hosts and their slots, however they were given; none where they were not.

    Example:
        >>> slots_of("localhost:4", None), slots_of(None, None)
        ((('localhost', 4),), ())
    """
    return parse_slots(hosts) if hosts is not None else read_hostfile(hostfile) if hostfile is not None else ()


def size_of(asked: int | None, hosts: str | None, hostfile: str | None, *, here: bool = True) -> int | None:
    """Return the number of ranks to start; hosts with slots may be given.

    Args:
        asked: how many were asked for.
        hosts: ``host:slots[,host:slots]``.
        hostfile: the path of a host file.
        here: refuse hosts that are not this machine. Defaults to True.

    Returns:
        The number asked for, else that of all slots; None where neither is given.

    Raises:
        InvalidInputError: hosts that cannot be read or are not this machine, or fewer slots than ranks.

    Example:
        >>> size_of(None, "localhost:4", None), size_of(2, "localhost:4", None), size_of(3, None, None)
        (4, 2, 3)
    """
    if hosts is not None and hostfile is not None:
        raise InvalidInputError("give the hosts or a host file, not both")
    if hosts is None and hostfile is None:
        return asked
    given = slots_of(hosts, hostfile)
    other = next((name for name, _ in given if not is_this_machine(name)), None)
    if other is not None and here:
        raise InvalidInputError(
            f"{other} is not this machine ({platform.node()}), and only the command `choros run` starts ranks on other "
            "hosts: give localhost:SLOTS, or write the call into a script"
        )
    slots = sum(count for _, count in given)
    if asked is not None and asked > slots:
        raise InvalidInputError(
            f"{asked} ranks were asked for, but the hosts have {slots} slot{'s' if slots > 1 else ''}"
        )
    return asked or slots


def start(
    command: Sequence[str],
    wish: LaunchOptions,
    *,
    own: Sequence[Mapping[str, str]] | None = None,
    own_fds: Sequence[Sequence[int]] | None = None,
    announce: bool = True,
    verbose: bool = False,
    part: HostShare | None = None,
) -> JobResult:
    """Run a command as the ranks of a job: each with its place, its cores, its threads, and the group of all.

    Args:
        command: the program and its arguments.
        wish: how.
        own: for each rank, variables of its own.
        own_fds: for each rank, descriptors that only it inherits.
        announce: say which rank failed.
        verbose: say what each rank gets.
        part: where these are some of a job's ranks, the others being on other hosts.

    Returns:
        What has become of the run.

    Raises:
        InvalidInputError: a wish that cannot be met; nothing was started.
    """
    size, part = wish.size, part or HostShare(total=wish.size)
    which, shares = part.share
    bindings = plan(max(size, shares), wish.threads, wish.bind)[which : which + size]
    # what the user exported holds, unless threads are asked for
    keep = {} if wish.threads else dict(os.environ)
    crowded = not bindings[0].cores or max(size, shares) * bindings[0].threads > len(usable_cores())
    from choros.comm.shm.group import SharedGroup
    from choros.comm.shm.group_header import abort, has_joined

    segment = SharedGroup.create(size)
    environment = [
        {
            **variables(binding.threads, keep=keep, shared=crowded),
            **(wish.variables or {}),
            **horovod_place(rank, size, part),
            **({"CHOROS_SLOT": str(which)} if shares > 1 else {}),
            **(part.variables or {"CHOROS_COMM_FD": str(segment.fd)}),
            **(own[rank] if own else {}),
        }
        for rank, binding in enumerate(bindings)
    ]

    def ended(rank: int) -> None:
        if not has_joined(segment, rank):  # who waits for it would wait in vain
            abort(segment, f"rank {rank} ended before it met the others")

    try:
        output = Output(size, wish.folder, wish.timestamps, part.first, part.total)
        for rank, binding in enumerate(bindings if verbose else ()):
            cores = ",".join(map(str, binding.cores)) or "any"
            who = f"rank {part.first + rank} of {part.total}"
            output.say(f"choros run: {who}: cores {cores}; threads {binding.threads}; {shlex.join(command)}")
        return run_ranks(
            command,
            size,
            environment=environment,
            cores=[binding.cores for binding in bindings],
            pass_fds=(segment.fd,),
            own_fds=own_fds,
            grace=wish.grace,
            output=output,
            announce=announce,
            on_end=ended,
            on_failure=part.on_failure,
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
    """Horovod's variables for what its launcher has options for; what is None stays as it is.

    Args:
        start_timeout: seconds that the first meeting may wait for all ranks.
        timeline: the file of the timeline.
        mark_cycles: mark cycles in it.
        stall_off: do not look for ranks that stall.
        stall_warning: seconds after which a stall is told.
        stall_shutdown: seconds after which a stall ends the job; 0 for never.

    Returns:
        Names and values.

    Example:
        >>> horovod_variables(stall_off=True, stall_warning=90.0)
        {'HOROVOD_STALL_CHECK_DISABLE': '1', 'HOROVOD_STALL_CHECK_TIME_SECONDS': '90'}
    """
    found: dict[str, Any] = {
        "HOROVOD_START_TIMEOUT": start_timeout,
        "HOROVOD_TIMELINE": timeline,
        "HOROVOD_TIMELINE_MARK_CYCLES": mark_cycles,
        "HOROVOD_STALL_CHECK_DISABLE": stall_off,
        "HOROVOD_STALL_CHECK_TIME_SECONDS": stall_warning,
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": stall_shutdown,  # Horovod's name
    }
    return {name: _text(value) for name, value in found.items() if value is not None}


def _text(value: Any) -> str:
    """A value as a variable holds it: whole numbers without a point, True as 1."""
    return value if isinstance(value, str) else str(int(value)) if value == int(value) else str(value)


def horovod_place(rank: int, size: int, part: HostShare) -> dict[str, str]:
    """The place under Horovod's names, which scripts read before they import anything."""
    place = {"RANK": part.first + rank, "SIZE": part.total, "LOCAL_RANK": rank, "LOCAL_SIZE": size}
    place |= {"CROSS_RANK": part.node, "CROSS_SIZE": part.nodes}
    return {f"HOROVOD_{name}": str(value) for name, value in place.items()}
