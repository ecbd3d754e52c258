"""Limits of one host: the number of ranks, with a warning long before it, and the open files of a process."""

from __future__ import annotations

import contextlib
import errno
import os
import platform
import resource
from collections.abc import Iterator
from pathlib import Path

from choros.cluster.hardware import usable_cores
from choros.errors import InvalidInputError, counted

_RANKS_PER_CORE = 64  # the most ranks for each core
_RANKS_PER_SMALL_HOST = 256  # the most ranks of a host with few cores
_CROWDED_PER_CORE = 4  # ranks for each core above which a warning is given
_FILES_PER_RANK = 4  # descriptors of the launcher for each rank: its two pipes, its process, its answer


def check_ranks(count: int, remedy: str = "ask for fewer, or for more hosts (-H)") -> None:
    """Refuse more ranks than one host can have, before any is started.

    More ranks than cores are allowed: 64 for each core, and 256 in any case, unless the system allows fewer processes
    or open files.

    Args:
        count: the number of ranks on this host.
        remedy: the text on what to do instead.

    Raises:
        InvalidInputError: there are more; the message has the limit and its reason.

    Example:
        >>> check_ranks(8)
        >>> check_ranks(99_999_999)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        choros.errors.InvalidInputError: 99999999 ranks were asked for, but ... takes at most ...
    """
    limits = _limits()
    reason = min(limits, key=lambda name: limits[name])
    if count > limits[reason]:
        raise InvalidInputError(
            f"{count} ranks were asked for, but {platform.node()} takes at most {max(limits[reason], 1)} ({reason}): "
            f"{remedy}"
        )


def crowding(count: int, kind: str, fewer: str) -> str:
    """Return a warning if there are far more processes than cores, else "".

    Args:
        count: the number of processes on this host.
        kind: the processes, for the message: "workers" or "ranks".
        fewer: the argument that gives a smaller number, such as "workers=".

    Example:
        >>> crowding(1, "workers", "workers=")
        ''
    """
    cores = len(usable_cores())
    if count <= _CROWDED_PER_CORE * cores:
        return ""
    on = counted(cores, "core")
    return (
        f"{count} {kind} share {on} of {platform.node()}: more than {_CROWDED_PER_CORE} for each core take turns, so a "
        f"step is slower than with {fewer}{cores}. Give {fewer}{cores}, or use more hosts"
    )


@contextlib.contextmanager
def open_files_explained() -> Iterator[None]:
    """Raise an error with the limit and the remedy if this process cannot open another file or socket.

    Raises:
        InvalidInputError: no descriptor is free.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        raise InvalidInputError(
            f"This process on {platform.node()} cannot open another file or socket (its limit is "
            f"{resource.getrlimit(resource.RLIMIT_NOFILE)[0]}): close files and connections, or raise the limit "
            "(ulimit -n)."
        ) from error


def _limits() -> dict[str, int]:
    """Return the largest numbers of ranks on this host, by their reasons."""
    cores = len(usable_cores())
    rule = f"{_RANKS_PER_CORE} for each of its cores, {cores} here, or {_RANKS_PER_SMALL_HOST}"
    limits = {rule: max(_RANKS_PER_SMALL_HOST, _RANKS_PER_CORE * cores)}
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)  # processes of Choros raise their soft limit
    processes, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if files != resource.RLIM_INFINITY:
        limits[f"the limit of open files is {files}, see ulimit -Hn"] = files // _FILES_PER_RANK
    if processes != resource.RLIM_INFINITY and os.geteuid():  # root has no limit
        limits[f"the limit of your processes is {processes}, see ulimit -u"] = processes
    for file in ("/proc/sys/kernel/pid_max", "/proc/sys/kernel/threads-max", "/sys/fs/cgroup/pids.max"):
        if (number := _number(file)) is not None:
            limits[f"{file} is {number}"] = number
    return limits


def _number(file: str) -> int | None:
    try:
        text = Path(file).read_text(encoding="ascii").strip()
    except (OSError, ValueError):  # not on this system
        return None
    return int(text) if text.isdecimal() else None
