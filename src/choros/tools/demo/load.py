"""The processor time of other programs during a measurement."""

from __future__ import annotations

import os
import resource
import time

from choros.cluster.hardware import usable_cores


class LoadMeter:
    """A measure of the cores that other programs use, from its creation on.

    The difference of two figures: the time in which the cores that this process may use were busy, and the processor
    time of this process and of the child processes that have ended. Without ``/proc/stat`` (not Linux) it measures
    nothing.

    Example:
        >>> meter = LoadMeter()
        >>> 0.0 <= meter.cores() <= len(usable_cores())
        True
    """

    def __init__(self) -> None:
        self._begun = time.perf_counter()
        self._others = _seconds_of_others()

    def cores(self) -> float:
        """Return the number of cores that other programs have used on average. All own children must have ended."""
        seconds = time.perf_counter() - self._begun
        used = (_seconds_of_others() - self._others) / max(seconds, 1e-9)
        return min(max(used, 0.0), float(len(usable_cores())))


def _seconds_of_others() -> float:
    try:
        with open("/proc/stat") as file:
            ticks = {name: numbers for name, *numbers in map(str.split, file)}
        counts = [map(int, ticks[f"cpu{core}"][:7]) for core in usable_cores()]
    except (OSError, KeyError):  # a container may show other numbers of cores
        return 0.0
    busy = 0
    for user, nice, system, _, _, *interrupts in counts:
        busy += user + nice + system + sum(interrupts)
    usages = [resource.getrusage(which) for which in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return busy / os.sysconf("SC_CLK_TCK") - sum(usage.ru_utime + usage.ru_stime for usage in usages)
