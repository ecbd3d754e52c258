"""The timeline's file: the ranks' events in Chrome's trace event format, which Perfetto opens too.

Each rank formats its lane, so that rank 0 only has to concatenate the texts.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

Event = tuple[str, str, int, int, int]  # see choros.comm.group.Trace
Clock = tuple[str, int, int]


def clock() -> Clock:
    """Return this host's id, the wall clock minus the monotonic clock, and the monotonic clock, in nanoseconds."""
    try:
        machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        machine = os.uname().nodename
    now = time.monotonic_ns()
    return machine, time.time_ns() - now, now


def zero_of(rank: int, clocks: Sequence[Clock]) -> int:
    """Return the value of a rank's monotonic clock at the time 0 of all lanes, the earliest of all clocks.

    Ranks of one host share one monotonic clock. The clocks of other hosts are aligned to rank 0's by wall clocks.

    Example:
        >>> clocks = [("one", 500, 100), ("one", 500, 130), ("two", 900, 20)]
        >>> [zero_of(rank, clocks) for rank in range(3)]
        [100, 100, -300]
    """
    shifts = [0 if machine == clocks[0][0] else offset - clocks[0][1] for machine, offset, _ in clocks]
    return min(now + shift for (_, _, now), shift in zip(clocks, shifts, strict=True)) - shifts[rank]


def lane(rank: int, events: Collection[Event], zero: int, mark_steps: bool = False, cut: bool = False) -> str:
    """Return the text of a rank's events.

    Args:
        rank: int.
        events: events in the order of their ends.
        zero: int. See ``zero_of``.
        mark_steps: bool. Whether to add an instant event at each step of an optimizer. Defaults to False.
        cut: bool. Whether older events were dropped. Defaults to False.

    Example:
        >>> text = lane(0, [("wait", "wait", 6_000, 7_000, -1), ("call", "allreduce 'loss'", 5_000, 9_000, 12)], 5_000)
        >>> json.loads(text.splitlines()[-1])["args"]
        {'bytes': 12, 'wait_us': 1.0, 'reduce_us': 0.0}
    """
    return ",\n".join(map(json.dumps, _events(rank, events, zero, mark_steps, cut)))


def write(path: str, lanes: Iterable[str]) -> None:
    """Write the file, replacing an existing one.

    Args:
        path: str. The file.
        lanes: the texts of all ranks, in rank order.

    Raises:
        OSError: it cannot be written.
    """
    with open(path, "w") as file:
        file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        for number, text in enumerate(lanes):
            file.write(",\n" + text if number else text)
        file.write("\n]}\n")


def _events(rank: int, events: Collection[Event], zero: int, mark_steps: bool, cut: bool) -> Iterator[dict[str, Any]]:
    """Yield a lane's names, then its events. Lanes count from 1, as Perfetto reserves process 0 for the kernel."""
    track = {"pid": rank + 1, "tid": 1}
    name = f"rank {rank} on {os.uname().nodename} (process {os.getpid()})"
    yield {"ph": "M", "name": "process_name", **track, "args": {"name": name}}
    yield {"ph": "M", "name": "process_sort_index", **track, "args": {"sort_index": rank}}
    yield {"ph": "M", "name": "thread_name", **track, "args": {"name": "collectives and reductions"}}

    def mark(what: str, at: float) -> dict[str, Any]:
        return {"ph": "i", "s": "p", "name": what, "cat": "mark", "ts": at, **track}

    if cut and events:
        yield mark("older events were dropped", (min(event[2] for event in events) - zero) / 1000)
    inside: list[Event] = []  # waits and reductions since the last call or step
    steps = fed = 0
    for event in events:
        kind, label, begin, end, nbytes = event
        facts: dict[str, Any] = {} if nbytes < 0 else {"bytes": nbytes}
        if kind in ("wait", "reduce"):
            inside.append(event)
        elif kind == "data":
            fed += end - begin
        else:
            facts |= {f"{phase}_us": _total(inside, phase, begin) for phase in ("wait", "reduce")}
            inside = []
        if kind == "step":
            facts["data_us"] = fed / 1000
        at = (begin - zero) / 1000
        yield {"ph": "X", "name": label, "cat": kind, "ts": at, "dur": (end - begin) / 1000, **track, "args": facts}
        if kind == "step":
            steps, fed = steps + 1, 0
            if mark_steps:
                yield mark(f"step {steps}", at)


def _total(events: Sequence[Event], kind: str, begin: int) -> float:
    """The total microseconds of the events of a kind since a call began."""
    return sum(event[3] - event[2] for event in events if event[0] == kind and event[2] >= begin) / 1000
