"""The processor time of other programs during a measurement."""

from __future__ import annotations

import os
import resource
import time


class LoadMeter:
    """A measure of the cores that other programs use, from its creation on.

    The difference of two figures: the time in which the machine's cores were busy, and the processor time of this
    process and of the child processes that have ended. Without ``/proc/stat`` (not Linux) it measures nothing.

    Example:
        >>> meter = LoadMeter()
        >>> 0.0 <= meter.cores() <= os.cpu_count()
        True
    """

    def __init__(self) -> None:
        self._begun = time.perf_counter()
        self._others = _seconds_of_others()

    def cores(self) -> float:
        """Return the number of cores that other programs have used on average. All own children must have ended."""
        seconds = time.perf_counter() - self._begun
        used = (_seconds_of_others() - self._others) / max(seconds, 1e-9)
        return min(max(used, 0.0), float(os.cpu_count() or 1))


def _seconds_of_others() -> float:
    try:
        with open("/proc/stat") as file:
            user, nice, system, _, _, *interrupts = map(int, file.readline().split()[1:8])
    except OSError:
        return 0.0
    busy = (user + nice + system + sum(interrupts)) / os.sysconf("SC_CLK_TCK")
    usages = [resource.getrusage(which) for which in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return busy - sum(usage.ru_utime + usage.ru_stime for usage in usages)
