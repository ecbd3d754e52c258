"""The number of open files that a process may have."""

from __future__ import annotations

import resource
from contextlib import suppress

_MAX_DESCRIPTORS = 65_536  # some programs loop over all possible descriptors, so the limit must not be in the millions


def raise_descriptors(most: int = _MAX_DESCRIPTORS) -> int:
    """Raise this process's soft limit of open files to its hard limit, at most to ``most``. Return the soft limit.

    A process that has a connection to each rank reaches the default of 1,024 at about a thousand ranks. Child processes
    inherit the limit.

    Args:
        most: the highest new limit. A limit above it stays unchanged.

    Example:
        >>> raise_descriptors() >= 1024
        True
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return most
    wanted = most if hard == resource.RLIM_INFINITY else min(most, hard)
    if wanted > soft:
        with suppress(OSError, ValueError):  # a container may forbid this: the limit then stays
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    return soft
