"""Work of one rank of a job before the others: downloads, caches, files that all read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from choros.comm.bootstrap.discover_rank import find_place
from choros.comm.bootstrap.init import join


@contextmanager
def rank_zero_first(timeout: float = 1800.0) -> Iterator[None]:
    """Let rank 0 go through the block first, and the others after it, when what it made is there.

    For data sets that are downloaded once and then read from the disk that all ranks share; so each rank has the same
    lines. Where rank 0's block raises, the others try themselves. Outside a job there is nobody to wait for.

    Args:
        timeout: float. Seconds to wait for rank 0. Defaults to 1,800.

    Raises:
        CommTimeoutError: rank 0 took longer.
        PeerLostError: rank 0 has ended.

    Example:
        >>> with rank_zero_first():
        ...     pass  # (x, y), _ = keras.datasets.mnist.load_data()
    """
    place = find_place(timeout)
    if place.size == 1:
        yield
        return
    group = join(place.rank, place.size, timeout)
    before, group.timeout, group.doing = group.timeout, timeout, "waiting for rank 0, which goes first"
    try:
        if place.rank:
            group.barrier()
    finally:
        group.timeout, group.doing = before, ""
    try:
        yield
    finally:
        if not place.rank:
            group.barrier()
