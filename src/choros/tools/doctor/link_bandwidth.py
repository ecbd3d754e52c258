"""The bandwidth between pairs of hosts, which shows the host with a slow network."""

from __future__ import annotations

import statistics
import time

import numpy as np

from choros.comm.group import Group
from choros.comm.shared_values import gather_values

_SIZES = (1_000_000, 16_000_000)  # bytes
_LONGEST = 0.25  # most seconds of the smaller size for which the larger one is tried


def links(group: Group, leaders: list[int], available_memory: int) -> dict[str, float]:
    """Measure the bandwidth of each host to its neighbors. Disjoint pairs are measured at the same time.

    Args:
        group: all ranks.
        leaders: one rank of each host.
        available_memory: bytes of memory that each rank may use.

    Returns:
        For each leader, the bytes per second that it sends while it receives as many, for the faster of its two
        neighbors. Empty if there is one host, or if the group cannot be divided.

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
                best = max(best, _rate(part(pair), available_memory))
    replies = gather_values(group, best)
    return {str(leader): replies[leader] for leader in leaders}


def _rate(pair: Group, available_memory: int) -> float:
    """Return the bytes per second of an all-reduce of two ranks.

    Each rank sends and receives half of the array, and then half of the result.
    """
    rate, took = 0.0, 0.0
    for size in _SIZES:
        if took > _LONGEST or 5 * size > available_memory:
            break
        x = np.ones(size // 4, np.float32)
        pair.sum(x)
        times = []
        for _ in range(3):
            pair.barrier()
            begun = time.perf_counter()
            pair.sum(x)
            times.append(time.perf_counter() - begun)
        took = max(gather_values(pair, statistics.median(times)))
        rate = size / took
    pair.close()
    return rate
