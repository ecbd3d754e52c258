"""Identity of this machine and its processes: machine name, process liveness, ranks in relation to cores."""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import NamedTuple

from choros.comm.shm.group_header import format_ranks

_START_TIME_FIELD = 19  # index of the start time in /proc/<pid>/stat, counted from the state
_NO_STAT = ["0"] * 20


@cache
def machine() -> str:
    """Return a name of this machine and PID namespace: host name, boot ID, namespace.

    Processes with the same name see each other's process IDs, so they can map each other's memory.

    Example:
        >>> machine() == machine()
        True
    """
    parts = [os.uname().nodename]
    # The host name alone is not enough: containers of several machines may have the same name, and containers of one
    # machine have separate PID namespaces, in which /proc/<pid>/fd of a peer does not exist.
    for path, read in (
        ("/proc/sys/kernel/random/boot_id", lambda p: Path(p).read_text().strip()),
        ("/proc/self/ns/pid", os.readlink),
    ):
        try:
            parts.append(read(path))
        except OSError:
            continue
    return " ".join(parts)


class Process(NamedTuple):
    """A process of this machine. The kernel may reuse the ID of an ended process; ID and start time are unique."""

    pid: int
    started: int  # clock ticks since this machine's boot; 0 if that cannot be read

    @classmethod
    def current(cls) -> Process:
        """Return the calling process."""
        return cls(os.getpid(), int((_proc_stat(os.getpid()) or _NO_STAT)[_START_TIME_FIELD]))


def alive(process: Process) -> bool:
    """Return True if a process of this machine runs; False for a zombie.

    Example:
        >>> process = Process.current()
        >>> alive(process), alive(process._replace(started=1))
        (True, False)
    """
    stat = _proc_stat(process.pid)
    # No /proc at all (macOS): then nothing is known, and a process must not be reported as dead.
    if stat is None:
        return not Path("/proc/self/stat").exists()
    # A zombie counts as dead: its memory and sockets are gone, and its parent may never collect it.
    return stat[0] not in ("Z", "X") and int(stat[_START_TIME_FIELD]) == process.started


def _proc_stat(pid: int) -> list[str] | None:
    """Return the fields of /proc/<pid>/stat from the state on; None if there is no such file."""
    # The command name in front may contain spaces and brackets, so the fields are counted from the last bracket.
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def oversubscribed(pids: Iterable[int]) -> bool:
    """Return whether ranks of this machine outnumber the cores on which they may run.

    Args:
        pids: process ID of each rank; a process with several ranks counts several times.

    Example:
        >>> oversubscribed([os.getpid()])
        False
    """
    all_pids = list(pids)
    cores: set[int] = set()
    for pid in set(all_pids):
        try:
            cores |= os.sched_getaffinity(pid)
        except (AttributeError, OSError):  # macOS has no affinity call; an ended process has no affinity
            cores |= set(range(os.cpu_count() or 1))
    return len(all_pids) > len(cores)


def describe_hosts(machines: list[str]) -> str:
    """Return a description of the ranks on each machine, or ``""`` for one machine.

    Args:
        machines: list of str. For each rank, the result of ``machine``.

    Example:
        >>> describe_hosts(["a 1", "a 1", "b 2"]), describe_hosts(["a 1"])
        ('ranks 0, 1 on a, rank 2 on b', '')
    """
    ranks_by_machine = {
        machine_name: [rank for rank, name in enumerate(machines) if name == machine_name] for machine_name in machines
    }
    if len(ranks_by_machine) == 1:
        return ""
    return ", ".join(
        f"{format_ranks(ranks)} on {machine_name.split()[0]}" for machine_name, ranks in ranks_by_machine.items()
    )
