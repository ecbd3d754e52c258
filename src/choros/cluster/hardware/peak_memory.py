"""The peak resident memory of a process."""

from __future__ import annotations

import sys
from pathlib import Path


def peak_memory(pid: int | None = None) -> int:
    """Return the peak resident memory of a process, including shared pages that it touched.

    It is ``VmHWM`` in ``/proc``, which starts at 0 after ``exec``. ``ru_maxrss`` does not start at 0: in a small
    process it is the memory of the parent.

    Args:
        pid: the process. Defaults to this process.

    Returns:
        Bytes. 0 if the process has ended or the system does not report it.

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
