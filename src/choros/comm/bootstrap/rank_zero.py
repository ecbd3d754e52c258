"""Work that rank 0 of a job does before the other ranks: downloads, caches, files that all ranks read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from choros.argument_checks import check_number
from choros.comm.bootstrap.discover_rank import find_place
from choros.comm.bootstrap.init import join


@contextmanager
def rank_zero_first(timeout: float = 1800.0) -> Iterator[None]:
    """Run the block on rank 0 first, then on the other ranks.

    Use it for a data set that one rank downloads to a shared disk and that all ranks then read. If the block raises on
    rank 0, the other ranks run it as well. Outside a job the block runs at once.

    Args:
        timeout: float. Seconds to wait for rank 0. Defaults to 1,800.

    Raises:
        CommTimeoutError: rank 0 took longer than ``timeout``.
        PeerLostError: rank 0 ended.

    Example:
        >>> with rank_zero_first():
        ...     pass  # (x, y), _ = keras.datasets.mnist.load_data()
    """
    place = find_place(check_number("timeout", timeout, "a number of seconds"))
    if place.size == 1:
        yield
        return
    group = join(place.rank, place.size, timeout)
    old_timeout, group.timeout, group.doing = group.timeout, timeout, "waiting for rank 0, which goes first"
    try:
        if place.rank:
            group.barrier()
    finally:
        group.timeout, group.doing = old_timeout, ""
    try:
        yield
    finally:
        if not place.rank:
            group.barrier()
