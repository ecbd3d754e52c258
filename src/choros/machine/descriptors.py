"""The number of open files that a process may have."""

from __future__ import annotations

import resource
from contextlib import suppress

_ENOUGH = 65_536  # a process that loops over all possible descriptors should not loop over millions


def raise_descriptors(most: int = _ENOUGH) -> int:
    """Raise this process' soft limit of open files to its hard limit, at most to ``most``; return it.

    The default of 1,024 is reached at about a thousand ranks, each with a line to a process. Processes that are
    started from here inherit the limit.

    Args:
        most: descriptors. A higher limit than this stays as it is.

    Example:
        >>> raise_descriptors() >= 1024
        True
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return most
    wanted = most if hard == resource.RLIM_INFINITY else min(most, hard)
    if wanted > soft:
        with suppress(OSError, ValueError):  # refused by a container's rules: as before
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    return soft
