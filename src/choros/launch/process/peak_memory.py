"""Peak resident memory, as a worker reports it of itself and a caller watches it from outside."""

from __future__ import annotations


def peak_memory(pid: int | None = None) -> int:
    """``VmHWM`` of a process: unlike ``ru_maxrss`` it does not count what the parent had before ``exec``.

    Args:
        pid: the process; this one when None.

    Returns:
        Bytes; 0 where the process has ended or the system does not tell.

    Example:
        >>> import sys
        >>> peak_memory() > 1_000_000 or sys.platform != "linux"
        True
    """
    try:
        with open(f"/proc/{'self' if pid is None else pid}/status", "rb") as status:
            for line in status:
                if line.startswith(b"VmHWM:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0
