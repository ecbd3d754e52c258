"""The features of this machine's processor: programs built for more end in SIGILL."""

from __future__ import annotations

from functools import cache
from pathlib import Path

# What compilers and numeric libraries ask for; the others (of power, of virtual machines) end no program.
_ASKED = ("sse4", "avx", "fma", "amx", "asimd", "sve")


@cache
def cpu_features() -> tuple[str, ...]:
    """The instruction sets of this machine's processor that numeric programs are built for.

    Returns:
        Names as Linux gives them, sorted; none where the system does not tell.

    Example:
        >>> cpu_features() == tuple(sorted(cpu_features()))
        True
    """
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ()
    flags = next((line.partition(":")[2].split() for line in lines if line.startswith(("flags", "Features"))), [])
    return tuple(sorted({flag for flag in flags if flag.startswith(_ASKED)}))
