"""Collective measurements of the ranks: memory and group bandwidth, latency, clocks, and slow ranks.

Every rank makes the same calls in the same order. Decisions, such as a repetition, are based on gathered values, so
they are equal on all ranks.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from choros.comm.group import Group
from choros.comm.shared_values import gather_values
from choros.tools.doctor.rules.speed import ATTEMPTS, MISSES, SLOW_CPU, SLOW_WALL, slowest

# The measurements of all ranks, in JSON types.
Measures = dict[str, Any]

SIZES = (1_000, 4_000_000, 100_000_000)  # bytes of the arrays that are summed
_PAUSE = 0.6  # seconds before a repetition after a slow rank was seen, so that short disturbances end
_ROUNDS, _REPEATS = 10, 1000  # about 10 ms for a round
_LONGEST = 5.0  # most seconds of one sum, estimated from the smaller one


def measure(group: Group, available_memory: int, engines: dict[str, Group]) -> Measures:
    """Run all measurements that need no framework.

    Args:
        group: all ranks.
        available_memory: bytes of memory that each rank may use.
        engines: the groups by which ranks communicate, by name; empty for one rank.

    Returns:
        ``work``: a list of attempts, with wall-clock and CPU seconds of each rank. ``memory``: GB/s of each rank, all
        at the same time. ``clock``: bounds in seconds by which each rank's clock is ahead of rank 0's. ``engines``: for
        each engine the seconds of ``gather``, and of ``sum`` by bytes. ``wrong``: the ranks with a wrong sum.

    Example:
        >>> from choros.comm.single_rank_group import SingleRankGroup
        >>> found = measure(SingleRankGroup(), 1 << 24, {})
        >>> len(found["work"]), found["clock"], found["engines"]
        (1, [[0.0, 0.0]], {})
    """
    measures: Measures = {
        "work": attempts(group),
        "memory": gather_values(group, memory_bandwidth(available_memory // 4)),
    }
    measures["clock"] = clocks(group) if group.size > 1 else [[0.0, 0.0]]
    measures["engines"], wrong = {}, set()
    for name, engine in engines.items():
        measures["engines"][name], mistaken = collectives(engine, available_memory // 5)
        wrong |= set(mistaken)
    measures["wrong"] = sorted(wrong)
    return measures


# -- CPU and memory
def work() -> tuple[float, float]:
    """Run a fixed computation in short rounds.

    Returns:
        The medians over the rounds of wall-clock seconds, and of CPU seconds of this thread.
    """
    x = np.linspace(1.0, 2.0, 1 << 15, dtype="float32")
    y = np.empty_like(x)
    times = []
    for _ in range(_ROUNDS):
        clock, processor = time.perf_counter(), time.thread_time()
        for _ in range(_REPEATS):
            np.sqrt(x, out=y)
            np.multiply(y, y, out=y)
        times.append((time.perf_counter() - clock, time.thread_time() - processor))
    return statistics.median(wall for wall, _ in times), statistics.median(cpu for _, cpu in times)


def attempts(group: Group) -> list[dict[str, list[float]]]:
    """Run the computation on all ranks at the same time; repeat it up to ``ATTEMPTS`` times if a rank seems slow.

    Args:
        group: all ranks.

    Returns:
        For each attempt the seconds of every rank: wall-clock time (``wall``) and CPU time (``cpu``).
    """
    made: list[dict[str, list[float]]] = []
    good = 0
    while len(made) < ATTEMPTS:
        time.sleep(_PAUSE if made else 0.0)
        group.barrier()
        times = gather_values(group, work())
        made.append({"wall": [wall for wall, _ in times], "cpu": [cpu for _, cpu in times]})
        if slowest(made[-1]["wall"])[1] < SLOW_WALL and slowest(made[-1]["cpu"])[1] < SLOW_CPU:
            good += 1
        if good == (1 if len(made) == 1 else MISSES + 1):
            break
    return made


def memory_bandwidth(available_memory: int) -> float:
    """Measure the bandwidth of a copy in memory.

    Args:
        available_memory: bytes of memory that may be used.

    Returns:
        GB/s, as the sum of bytes read and written.
    """
    size = min(max(available_memory // 2, 1 << 20), 1 << 25)
    x, y = np.ones(size, np.uint8), np.ones(size, np.uint8)
    rate = statistics.median(_timed(lambda: np.copyto(y, x)) for _ in range(9))
    return round(2 * size / rate / 1e9, 3)


# -- the clocks
def clocks(group: Group, rounds: int = 24) -> list[list[float]]:
    """Return lower and upper bounds by which each rank's clock is ahead of rank 0's.

    The time of a rank before a barrier precedes the time of another rank after it. A slow rank therefore widens the
    bounds, but does not make them wrong.

    Args:
        group: all ranks.
        rounds: number of barriers. Defaults to 24.

    Returns:
        Two numbers of seconds for each rank.
    """
    stamps = []
    for _ in range(rounds):
        before = time.time()
        group.barrier()
        stamps.append((before, time.time()))
    replies = gather_values(group, stamps)
    first = replies[0]
    return [
        [
            max(before - zero_after for (before, _), (_, zero_after) in zip(rank_stamps, first, strict=True)),
            min(after - zero_before for (_, after), (zero_before, _) in zip(rank_stamps, first, strict=True)),
        ]
        if rank
        else [0.0, 0.0]
        for rank, rank_stamps in enumerate(replies)
    ]


# -- the group
def collectives(group: Group, available_memory: int) -> tuple[dict[str, Any], list[int]]:
    """Measure the latency and the bandwidth of a group, and check its sums.

    Args:
        group: a group of two ranks or more.
        available_memory: most bytes of a sum.

    Returns:
        The seconds of a ``gather`` of 8 bytes, and of a ``sum`` by its bytes, on the slowest rank; and the ranks with a
        wrong sum.
    """
    group.barrier()
    gather = statistics.median(_timed(lambda: group.gather(b"8 bytes!")) for _ in range(50))
    slow = max(gather_values(group, gather))
    sums: dict[str, float] = {}
    wrong: list[int] = []
    expected = group.size * (group.size + 1) // 2
    before = 0.0
    for size in SIZES:
        if size > max(available_memory, SIZES[0]) or (sums and before * size / int(list(sums)[-1]) > _LONGEST):
            break
        x = np.full(size // 4, group.rank + 1, np.float32)
        group.barrier()
        times, right = [], bool((group.sum(x) == expected).all())  # not timed: the first sum allocates memory
        for _ in range(20 if size == SIZES[0] else 3):
            begun = time.perf_counter()
            total = group.sum(x)
            times.append(time.perf_counter() - begun)
            right = right and bool((total == expected).all())
        replies = gather_values(group, [statistics.median(times), right])
        before = max(seconds for seconds, _ in replies)
        sums[str(size)] = before
        wrong += [rank for rank, (_, good) in enumerate(replies) if not good]
    return {"gather": slow, "sum": sums}, sorted(set(wrong))


def _timed(call: Callable[[], object]) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun
