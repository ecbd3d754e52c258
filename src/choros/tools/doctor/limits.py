"""Limits of this process: memory, processor time, open files, shared memory; control groups of both versions."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CONTROL, PROC = Path("/sys/fs/cgroup"), Path("/proc")
_NONE = 1 << 60  # the first version of control groups says "no limit" by a number as large as this


def memory(control: Path = CONTROL, proc: Path = PROC) -> dict[str, Any]:
    """The memory of this machine and what this process may take of it, in bytes.

    Args:
        control: where control groups are mounted.
        proc: where processes are described.

    Returns:
        ``total`` and ``available`` of the machine; ``limit``, the least of the control groups, and ``used`` of it,
        without the files that the kernel would give up; ``address_space``. None where there is none.

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
    """Return how many cores' time control groups allow, which affinity does not show; None for no limit.

    Args:
        control: where control groups are mounted.
        proc: where processes are described.

    Example:
        >>> quota() is None or quota() > 0
        True
    """
    found = []
    for folder in _groups(control, proc, "cpu"):
        both = _text(folder / "cpu.max").split()
        if not both:
            both = [_text(folder / "cpu.cfs_quota_us"), _text(folder / "cpu.cfs_period_us")]
        if len(both) == 2 and both[0].isdecimal() and both[1].isdecimal() and int(both[1]):
            found.append(int(both[0]) / int(both[1]))
    return min(found, default=None)


def shared_memory(path: str = "/dev/shm") -> dict[str, int] | None:
    """The size and the free bytes of ``/dev/shm``; None where there is none.

    Args:
        path: where it is mounted.

    Example:
        >>> shared_memory("/no/such/folder") is None
        True
    """
    try:
        found = os.statvfs(path)
    except OSError:
        return None
    return {"total": found.f_frsize * found.f_blocks, "free": found.f_frsize * found.f_bavail}


def open_files() -> dict[str, int]:
    """The limits of this process's open files; -1 for none.

    Example:
        >>> sorted(open_files())
        ['hard', 'soft']
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return {"soft": soft, "hard": hard}


def _groups(control: Path, proc: Path, controller: str) -> Iterator[Path]:
    """The folders of the control groups that this process is in, from its own upwards, for one controller."""
    for line in _text(proc / "self/cgroup").splitlines():
        _, names, path = line.split(":", 2)
        if names and controller not in names.split(","):
            continue
        roots = [control] if not names else [control / controller, control / names]
        for root in roots:
            folder = root / path.strip("/")
            while True:  # a container may see its own group as the root, under a path that is not there
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
