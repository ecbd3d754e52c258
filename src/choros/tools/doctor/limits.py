"""Limits of this process: memory, CPU time, open files, shared memory; with control groups of versions 1 and 2."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CONTROL, PROC = Path("/sys/fs/cgroup"), Path("/proc")
_NONE = 1 << 60  # in version 1 of control groups, a number as large as this means "no limit"


def memory(control: Path = CONTROL, proc: Path = PROC) -> dict[str, Any]:
    """Return the memory of this machine and the limits of this process, in bytes.

    Args:
        control: mount point of control groups.
        proc: mount point of ``/proc``.

    Returns:
        ``total`` and ``available`` of the machine. ``limit`` and ``used`` of the control group with the least free
        memory; ``used`` excludes inactive page cache. ``address_space``, the limit of addresses. None for no limit.

    Example:
        >>> found = memory()
        >>> found["limit"] is None or found["limit"] > 0
        True
    """
    total, available = _meminfo(proc, "MemTotal"), _meminfo(proc, "MemAvailable")
    limits: list[tuple[int, int]] = []
    for folder in _groups(control, proc, "memory"):
        limit = _number(folder / "memory.max") or _number(folder / "memory.limit_in_bytes")
        if limit is not None and limit < _NONE:
            used = _number(folder / "memory.current") or _number(folder / "memory.usage_in_bytes") or 0
            cached = sum(_stat(folder / "memory.stat", name) for name in ("inactive_file", "total_inactive_file"))
            limits.append((limit, max(used - cached, 0)))
    limit, used = min(limits, key=lambda one: one[0] - one[1], default=(None, 0))
    space, _ = resource.getrlimit(resource.RLIMIT_AS)
    return {
        "total": total,
        "available": available,
        "limit": limit,
        "used": used,
        "address_space": None if space == resource.RLIM_INFINITY else space,
    }


def quota(control: Path = CONTROL, proc: Path = PROC) -> float | None:
    """Return the CPU time that control groups allow, in cores; None for no limit. The affinity mask does not show it.

    Args:
        control: mount point of control groups.
        proc: mount point of ``/proc``.

    Example:
        >>> quota() is None or quota() > 0
        True
    """
    limits = []
    for folder in _groups(control, proc, "cpu"):
        both = _text(folder / "cpu.max").split()
        if not both:
            both = [_text(folder / "cpu.cfs_quota_us"), _text(folder / "cpu.cfs_period_us")]
        if len(both) == 2 and both[0].isdecimal() and both[1].isdecimal() and int(both[1]):
            limits.append(int(both[0]) / int(both[1]))
    return min(limits, default=None)


def shared_memory(path: str = "/dev/shm") -> dict[str, int] | None:
    """Return the size and the free bytes of ``/dev/shm``; None if it does not exist.

    Args:
        path: the mount point.

    Example:
        >>> shared_memory("/no/such/folder") is None
        True
    """
    try:
        status = os.statvfs(path)
    except OSError:
        return None
    return {"total": status.f_frsize * status.f_blocks, "free": status.f_frsize * status.f_bavail}


def open_files() -> dict[str, int]:
    """Return the soft and hard limits of open files of this process; -1 for no limit.

    Example:
        >>> sorted(open_files())
        ['hard', 'soft']
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return {"soft": soft, "hard": hard}


def _groups(control: Path, proc: Path, controller: str) -> Iterator[Path]:
    """Yield the directories of this process's control groups for one controller, from the innermost to the root."""
    for line in _text(proc / "self/cgroup").splitlines():
        _, names, path = line.split(":", 2)
        if names and controller not in names.split(","):
            continue
        roots = [control] if not names else [control / controller, control / names]
        for root in roots:
            folder = root / path.strip("/")
            while True:  # in a container, the path may not exist, as the group is mounted as the root
                if folder.is_dir():
                    yield folder
                if folder == root:
                    break
                folder = folder.parent


def _meminfo(proc: Path, name: str) -> int | None:
    for line in _text(proc / "meminfo").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return None


def _stat(path: Path, name: str) -> int:
    rows = (line.split() for line in _text(path).splitlines())
    return next((int(row[1]) for row in rows if len(row) == 2 and row[0] == name), 0)


def _number(path: Path) -> int | None:
    text = _text(path)
    return int(text) if text.isdecimal() else None


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
