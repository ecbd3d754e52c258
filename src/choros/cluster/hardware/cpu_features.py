"""The CPU features of this machine. A program that was compiled for missing features ends with SIGILL."""

from __future__ import annotations

from functools import cache
from pathlib import Path

# The features that compilers and numeric libraries use. Others (power, virtual machines) do not matter to programs.
_NUMERIC = ("sse4", "avx", "fma", "amx", "asimd", "sve")


@cache
def cpu_features() -> tuple[str, ...]:
    """Return the instruction sets of this machine's CPU that numeric programs use.

    Returns:
        The names in Linux, sorted. Empty if the system does not list them.

    Example:
        >>> cpu_features() == tuple(sorted(cpu_features()))
        True
    """
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ()
    flags = next((line.partition(":")[2].split() for line in lines if line.startswith(("flags", "Features"))), [])
    return tuple(sorted({flag for flag in flags if flag.startswith(_NUMERIC)}))
