"""The peak resident memory of a process."""

from __future__ import annotations

import sys
from pathlib import Path


def peak_memory(pid: int | None = None) -> int:
    """The most resident memory that a process has had, shared pages that it touched included.

    Taken from ``VmHWM`` in ``/proc``, which begins anew at ``exec``; ``ru_maxrss`` does not, and so counts what the
    parent of a small process had.

    Args:
        pid: the process; this one when None.

    Returns:
        Bytes; 0 where the process is gone or the system does not tell.

    Example:
        >>> peak_memory() > 1_000_000
        True
    """
    try:
        status = Path(f"/proc/{'self' if pid is None else pid}/status").read_text()
    except OSError:
        status = ""
    for line in status.splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    if pid is not None or sys.platform == "win32":
        return 0
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
