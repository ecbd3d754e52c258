"""Processes of one machine: which ranks they are, whether one lives, and whether they have a core each."""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import NamedTuple

from choros.comm.shm.group_header import names

_STARTED = 19  # the place of the start time in what the kernel says
_UNKNOWN = ["0"] * 20


@cache
def machine() -> str:
    """Name this machine as one whose processes see each other: its name, this boot of it, this PID namespace.

    Example:
        >>> machine() == machine()
        True
    """
    found = [os.uname().nodename]
    for path, read in (
        ("/proc/sys/kernel/random/boot_id", lambda p: Path(p).read_text().strip()),
        ("/proc/self/ns/pid", os.readlink),
    ):
        try:
            found.append(read(path))
        except OSError:
            continue
    return " ".join(found)


class Process(NamedTuple):
    """A process of this machine. Its number may be given to another one once it has ended; the pair is its own."""

    pid: int
    started: int  # clock ticks since this machine's boot; 0 where that cannot be read

    @classmethod
    def mine(cls) -> Process:
        """Return the process that asks."""
        return cls(os.getpid(), int((_facts(os.getpid()) or _UNKNOWN)[_STARTED]))


def alive(process: Process) -> bool:
    """Return True if a process of this machine runs; False for a zombie too.

    Example:
        >>> mine = Process.mine()
        >>> alive(mine), alive(mine._replace(started=1))
        (True, False)
    """
    facts = _facts(process.pid)
    if facts is None:
        return not Path("/proc/self/stat").exists()
    return facts[0] not in ("Z", "X") and int(facts[_STARTED]) == process.started


def _facts(pid: int) -> list[str] | None:
    """Return what the kernel says of a process, from its state on; None where it says nothing."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def crowded(pids: Iterable[int]) -> bool:
    """Tell whether processes of this machine outnumber the cores that they may run on together.

    Args:
        pids: one for each rank; a process that holds several ranks counts as many times.

    Example:
        >>> crowded([os.getpid()])
        False
    """
    ranks = list(pids)
    cores: set[int] = set()
    for pid in set(ranks):
        try:
            cores |= os.sched_getaffinity(pid)
        except (AttributeError, OSError):  # macOS has no affinity; of a process that has ended nothing is known
            cores |= set(range(os.cpu_count() or 1))
    return len(ranks) > len(cores)


def spread(machines: list[str]) -> str:
    """Say in words which ranks are on which machine, or ``""`` where there is one.

    Args:
        machines: of each rank, what ``machine`` gave there.

    Example:
        >>> spread(["a 1", "a 1", "b 2"]), spread(["a 1"])
        ('ranks 0, 1 on a, rank 2 on b', '')
    """
    at = {where: [rank for rank, one in enumerate(machines) if one == where] for where in machines}
    if len(at) == 1:
        return ""
    return ", ".join(f"{names(ranks)} on {where.split()[0]}" for where, ranks in at.items())
