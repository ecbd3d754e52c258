"""Figures of a run: its times without start-up, and the figures of the timeline of its workers."""

from __future__ import annotations

import bisect
import json
import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

KINDS = ("compute", "data", "exchange", "wait")  # in the order in which a lane is painted: waits lie within exchanges
SHOWN = 1.0  # seconds of a lane that the report keeps


def steady(times: Sequence[float]) -> tuple[list[float], float]:
    """Return the times at which epochs ended, without compiling, and the seconds of compiling.

    The first epoch compiles. The seconds by which it took longer than the median of the others count as compiling, for
    every algorithm and for plain ``fit`` alike. The time of a single epoch is returned as it is.

    Args:
        times: seconds at which the epochs ended, increasing.

    Example:
        >>> steady([5.0, 6.0, 7.0])
        ([1.0, 2.0, 3.0], 4.0)
        >>> steady([5.0])
        ([5.0], 0.0)
    """
    if len(times) < 2:
        return list(times), 0.0
    usual = median(later - earlier for earlier, later in pairwise(times))
    extra = max(0.0, times[0] - usual)
    return [time - extra for time in times], extra


@dataclass(frozen=True)
class Timeline:
    """The figures of the timeline of a run.

    Attributes:
        exchanging, waiting: float. Shares of the time after the first epoch that workers spent in exchanges, and
            waiting for data; mean over the workers.
        sent: tuple of int. Bytes that all workers had exchanged at the end of each epoch.
        staleness: tuple of int. At index s, the number of exchanges with staleness s; empty if synchronous.
        lanes: for each worker tuples (kind, begin, end): its operations in the first second after the first epoch, in
            seconds from the beginning of that second.
    """

    exchanging: float
    waiting: float
    sent: tuple[int, ...]
    staleness: tuple[int, ...]
    lanes: tuple[tuple[tuple[str, float, float], ...], ...]


def read_timeline(path: str | os.PathLike[str], epochs: int, asynchronous: bool) -> Timeline:
    """Read the file that ``Trainer(timeline=)`` wrote.

    Args:
        path: the file.
        epochs: int. Number of epochs.
        asynchronous: bool. Whether workers exchanged with a center, so that exchanges have a staleness.
    """
    by_rank: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for event in json.loads(Path(path).read_text())["traceEvents"]:
        if event["ph"] == "X":
            by_rank[event["pid"]].append(event)
    ranks = [sorted(by_rank[rank], key=lambda event: event["ts"]) for rank in sorted(by_rank)]
    ends = [_epoch_ends(events, epochs) for events in ranks]
    begins = [end[0] if end else 0.0 for end in ends]
    exchanging = [_share(events, "exchange", start) for events, start in zip(ranks, begins, strict=True)]
    waiting = [_share(events, "data", start) for events, start in zip(ranks, begins, strict=True)]
    begin = max(begins, default=0.0)
    sent = [_sent(events, end) for events, end in zip(ranks, ends, strict=True)]
    return Timeline(
        exchanging=sum(exchanging) / max(len(ranks), 1),
        waiting=sum(waiting) / max(len(ranks), 1),
        sent=tuple(map(sum, zip(*sent, strict=False))),
        staleness=_staleness(ranks) if asynchronous else (),
        lanes=tuple(_lane(events, begin) for events in ranks),
    )


def _end(event: dict[str, Any]) -> float:
    return float(event["ts"] + event["dur"])


def steps_of(event: dict[str, Any]) -> int:
    """Return the number of training steps of an event of a timeline.

    Example:
        >>> [steps_of({"cat": "compute", "name": name}) for name in ("step", "gradients", "16 steps", "optimizer")]
        [1, 1, 16, 0]
    """
    if event["cat"] != "compute":
        return 0
    count, _, noun = event["name"].partition(" ")
    return int(count) if noun == "steps" and count.isdigit() else int(event["name"] in ("step", "gradients"))


def _epoch_ends(events: list[dict[str, Any]], epochs: int) -> list[float]:
    """Return the microsecond at which each epoch's last step and its exchange had ended on a rank."""
    steps = [place for place, event in enumerate(events) for _ in range(steps_of(event))]
    each = len(steps) // max(epochs, 1)
    if not each:
        return []
    following = []
    for place in (steps[epoch * each] for epoch in range(1, epochs) if epoch * each < len(steps)):
        while place and events[place - 1]["cat"] == "data":  # the batch of the next epoch
            place -= 1
        following.append(float(events[place]["ts"]))
    return [*following, max(map(_end, events))]


def _share(events: list[dict[str, Any]], kind: str, begin: float) -> float:
    """Return the share of a rank's time after ``begin`` in events of a kind."""
    later = [event for event in events if event["ts"] >= begin]
    total = max(map(_end, later), default=begin) - begin
    return sum(float(event["dur"]) for event in later if event["cat"] == kind) / total if total > 0 else 0.0


def _sent(events: list[dict[str, Any]], ends: list[float]) -> list[int]:
    """Return the bytes that a rank had exchanged at each epoch's end."""
    sizes = [(_end(e), int(e["args"].get("bytes", 0))) for e in events if e["cat"] == "exchange"]
    return [sum(size for end, size in sizes if end <= limit) for limit in ends]


def _staleness(ranks: list[list[dict[str, Any]]]) -> tuple[int, ...]:
    """Return a histogram of the exchanges by others between two exchanges of a rank, in the order of their ends."""
    ends = [sorted(_end(event) for event in events if event["cat"] == "exchange") for events in ranks]
    counts: dict[int, int] = defaultdict(int)
    for rank, ends_of_rank in enumerate(ends):
        before = float("-inf")
        for end in ends_of_rank:
            others = (other for place, other in enumerate(ends) if place != rank)
            counts[sum(bisect.bisect(other, end) - bisect.bisect(other, before) for other in others)] += 1
            before = end
    return tuple(counts[stale] for stale in range(max(counts, default=-1) + 1))


def _lane(events: list[dict[str, Any]], begin: float) -> tuple[tuple[str, float, float], ...]:
    """Return the events of a rank in the shown second, cut to it, in the order in which they are painted."""
    limit = begin + 1e6 * SHOWN
    shown = [e for e in events if e["cat"] in KINDS and _end(e) > begin and e["ts"] < limit and e["dur"] > 0]
    shown.sort(key=lambda event: KINDS.index(event["cat"]))
    return tuple(
        (e["cat"], round((max(e["ts"], begin) - begin) / 1e6, 5), round((min(_end(e), limit) - begin) / 1e6, 5))
        for e in shown
    )
