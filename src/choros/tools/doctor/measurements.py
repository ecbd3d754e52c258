"""Measurements that the ranks make together: memory and group bandwidth, latency, clocks, and slow ranks.

Every rank makes the same calls in the same order; what it decides on (how much, how often, once more) is the same on
all, because it is taken from what all have gathered.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from choros.comm.group import Group
from choros.tools.doctor.rules.speed import ATTEMPTS, MISSES, SLOW_CPU, SLOW_WALL, slowest

# What all ranks measured, as JSON holds it.
Measures = dict[str, Any]

SIZES = (1_000, 4_000_000, 100_000_000)  # bytes that are summed
_PAUSE = 0.6  # seconds before ranks of which one looks slow compute again: what only passes by is not told
_ROUNDS, _REPEATS = 10, 1000  # some 10 ms a round
_LONGEST = 5.0  # seconds that one sum may take, by what the smaller one took


def measure(group: Group, room: int, engines: dict[str, Group]) -> Measures:
    """Measure everything that does not need a framework.

    Args:
        group: all ranks.
        room: bytes of memory that each rank may take.
        engines: in what the ranks meet, by name; none where there is one rank.

    Returns:
        ``work`` (a list of attempts: seconds by the clock and of the processor, of each rank), ``memory`` (GB/s of each
        rank, all at once), ``clock`` (between how many seconds each rank's clock is ahead of rank 0's), ``engines``
        (for each ``gather``, seconds, and ``sum``, seconds by bytes), ``wrong`` (the ranks with a wrong sum).

    Example:
        >>> from choros.comm.single_rank_group import SingleRankGroup
        >>> found = measure(SingleRankGroup(), 1 << 24, {})
        >>> len(found["work"]), found["clock"], found["engines"]
        (1, [[0.0, 0.0]], {})
    """
    found: Measures = {"work": attempts(group), "memory": tell(group, memory_bandwidth(room // 4))}
    found["clock"] = clocks(group) if group.size > 1 else [[0.0, 0.0]]
    found["engines"], wrong = {}, set()
    for name, engine in engines.items():
        found["engines"][name], mistaken = collectives(engine, room // 5)
        wrong |= set(mistaken)
    found["wrong"] = sorted(wrong)
    return found


def tell(group: Group, what: Any) -> list[Any]:
    """Return what every rank sends, in the order of the ranks, as JSON.

    Example:
        >>> from choros.comm.single_rank_group import SingleRankGroup
        >>> tell(SingleRankGroup(), {"a": 1})
        [{'a': 1}]
    """
    return [json.loads(text) for text in group.gather(json.dumps(what).encode())]


# -- the processor
def work() -> tuple[float, float]:
    """The same computation on every rank, in short rounds.

    Returns:
        The medians of the rounds' seconds by the clock, and of this thread's processor.
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
    """Let all ranks compute at the same time; again, up to ``ATTEMPTS`` times in all, where one looks slow.

    Args:
        group: all ranks.

    Returns:
        For each attempt the seconds of every rank, by the clock (``wall``) and of the processor (``cpu``).
    """
    made: list[dict[str, list[float]]] = []
    good = 0
    while len(made) < ATTEMPTS:
        time.sleep(_PAUSE if made else 0.0)
        group.barrier()
        said = tell(group, work())
        made.append({"wall": [wall for wall, _ in said], "cpu": [cpu for _, cpu in said]})
        if slowest(made[-1]["wall"])[1] < SLOW_WALL and slowest(made[-1]["cpu"])[1] < SLOW_CPU:
            good += 1
        if good == (1 if len(made) == 1 else MISSES + 1):
            break
    return made


def memory_bandwidth(room: int) -> float:
    """Copy within memory.

    Args:
        room: bytes that may be taken.

    Returns:
        GB/s, read and written.
    """
    size = min(max(room // 2, 1 << 20), 1 << 25)
    x, y = np.ones(size, np.uint8), np.ones(size, np.uint8)
    rate = statistics.median(_timed(lambda: np.copyto(y, x)) for _ in range(9))
    return round(2 * size / rate / 1e9, 3)


# -- the clocks
def clocks(group: Group, rounds: int = 24) -> list[list[float]]:
    """Return by how much each rank's clock is ahead of rank 0's: at least, and at most.

    Whatever a rank saw before a barrier was before whatever another saw after it. So a slow rank makes the bounds wide,
    and never wrong.

    Args:
        group: all ranks.
        rounds: how often they meet.

    Returns:
        Two numbers of seconds for each rank.
    """
    stamps = []
    for _ in range(rounds):
        before = time.time()
        group.barrier()
        stamps.append((before, time.time()))
    said = tell(group, stamps)
    first = said[0]
    return [
        [
            max(before - zero_after for (before, _), (_, zero_after) in zip(mine, first, strict=True)),
            min(after - zero_before for (_, after), (zero_before, _) in zip(mine, first, strict=True)),
        ]
        if rank
        else [0.0, 0.0]
        for rank, mine in enumerate(said)
    ]


# -- the group
def collectives(group: Group, room: int) -> tuple[dict[str, Any], list[int]]:
    """The latency and the bandwidth of a group, the sums being checked.

    Args:
        group: two ranks or more.
        room: bytes of the largest sum.

    Returns:
        Seconds of a ``gather`` of 8 bytes and of a ``sum`` by its bytes, the slowest rank's; ranks with a wrong sum.
    """
    group.barrier()
    gather = statistics.median(_timed(lambda: group.gather(b"8 bytes!")) for _ in range(50))
    slow = max(tell(group, gather))
    sums: dict[str, float] = {}
    wrong: list[int] = []
    expected = group.size * (group.size + 1) // 2
    before = 0.0
    for size in SIZES:
        if size > max(room, SIZES[0]) or (sums and before * size / int(list(sums)[-1]) > _LONGEST):
            break
        x = np.full(size // 4, group.rank + 1, np.float32)
        group.barrier()
        times, right = [], bool((group.sum(x) == expected).all())  # the first one takes the memory
        for _ in range(20 if size == SIZES[0] else 3):
            begun = time.perf_counter()
            total = group.sum(x)
            times.append(time.perf_counter() - begun)
            right = right and bool((total == expected).all())
        said = tell(group, [statistics.median(times), right])
        before = max(each for each, _ in said)
        sums[str(size)] = before
        wrong += [rank for rank, (_, good) in enumerate(said) if not good]
    return {"gather": slow, "sum": sums}, sorted(set(wrong))


def _timed(call: Callable[[], object]) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun
