"""The network between hosts, two of them at a time: so it is known which host has the slow one."""

from __future__ import annotations

import statistics
import time

import numpy as np

from choros.comm.group import Group
from choros.tools.doctor.measurements import tell

_SIZES = (1_000_000, 16_000_000)  # bytes
_LONGEST = 0.25  # seconds that the smaller may take, for the larger to be tried


def links(group: Group, leaders: list[int], room: int) -> dict[str, float]:
    """The bandwidth of each host to its neighbours, all pairs that have nothing in common at the same time.

    Args:
        group: all ranks.
        leaders: one rank of each host.
        room: bytes of memory that each may take.

    Returns:
        By leader the bytes a second that it sends while it receives as many, to the better of its two neighbours; none
        where there is one host, or the group makes no smaller ones.

    Example:
        >>> from choros.comm.single_rank_group import SingleRankGroup
        >>> links(SingleRankGroup(), [0], 1 << 20)
        {}
    """
    part = getattr(group, "part", None)
    if len(leaders) < 2 or part is None:
        return {}
    best = 0.0
    for first in (0, 1):
        group.barrier()
        for pair in (leaders[at : at + 2] for at in range(first, len(leaders) - 1, 2)):
            if group.rank in pair:
                best = max(best, _rate(part(pair), room))
    said = tell(group, best)
    return {str(leader): said[leader] for leader in leaders}


def _rate(pair: Group, room: int) -> float:
    """The bytes a second of a sum of two: each sends half of it, gets half, and the same again for the result."""
    rate, took = 0.0, 0.0
    for size in _SIZES:
        if took > _LONGEST or 5 * size > room:
            break
        x = np.ones(size // 4, np.float32)
        pair.sum(x)
        times = []
        for _ in range(3):
            pair.barrier()
            begun = time.perf_counter()
            pair.sum(x)
            times.append(time.perf_counter() - begun)
        took = max(tell(pair, statistics.median(times)))
        rate = size / took
    pair.close()
    return rate
