"""The timeline's file: the ranks' events in Chrome's trace event format, which Perfetto opens too.

Each rank formats its lane, so that rank 0 only has to concatenate the texts.
"""

from __future__ import annotations

import json
import os
import time
import zlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

Event = tuple[str, str, int, int, int]  # see choros.comm.group.Trace
Clock = tuple[str, int, int]
_ENCLOSING = ("call", "step", "exchange")  # events that contain waits and reductions


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


def zero_from(origin: Clock, local: Clock) -> int:
    """Return the value of this process's monotonic clock at the time 0 of all lanes, given by another process.

    Args:
        origin: the other process's ``clock()``. Its monotonic clock is the time 0.
        local: this process's ``clock()``.

    Example:
        >>> zero_from(("one", 500, 100), ("one", 501, 130)), zero_from(("one", 500, 100), ("two", 900, 20))
        (100, -300)
    """
    return origin[2] if origin[0] == local[0] else origin[2] + origin[1] - local[1]


def lane(
    rank: int,
    events: Collection[Event],
    zero: int,
    mark_steps: bool = False,
    cut: bool = False,
    title: str = "collectives and reductions",
) -> bytes:
    """Return the text of a rank's events, compressed by zlib.

    Args:
        rank: int.
        events: events in the order of their ends.
        zero: int. See ``zero_of``.
        mark_steps: bool. Whether to add an instant event at each step of an optimizer. Defaults to False.
        cut: bool. Whether older events were dropped. Defaults to False.
        title: str. The lane's title in the viewer.

    Example:
        >>> events = [("wait", "wait", 6_000, 7_000, -1), ("call", "allreduce 'loss'", 5_000, 9_000, 12)]
        >>> packed = lane(0, events, 5_000)
        >>> json.loads(zlib.decompress(packed).splitlines()[-1])["args"]
        {'bytes': 12, 'wait_us': 1.0, 'reduce_us': 0.0}
    """
    text = ",\n".join(map(json.dumps, _events(rank, events, zero, mark_steps, cut, title)))
    return zlib.compress(text.encode(), 1)


def write(path: str, lanes: Iterable[bytes]) -> None:
    """Write the file, replacing an existing one.

    Args:
        path: str. The file.
        lanes: the results of ``lane`` of all ranks, in rank order.

    Raises:
        OSError: it cannot be written.
    """
    with open(path, "w") as file:
        file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        for number, packed in enumerate(lanes):
            text = zlib.decompress(packed).decode()
            file.write(",\n" + text if number else text)
        file.write("\n]}\n")


def writable_path(path: str | os.PathLike[str]) -> str:
    """Return the absolute path of a timeline, if this process can write it. Leave the file as it is.

    Raises:
        OSError: the file cannot be written. TypeError, ValueError: ``path`` is not a path.
    """
    absolute = os.path.abspath(os.fsdecode(path))
    exists = os.path.exists(absolute)
    with open(absolute, "a"):
        pass
    if not exists:
        os.unlink(absolute)
    return absolute


def _events(
    rank: int, events: Collection[Event], zero: int, mark_steps: bool, cut: bool, title: str
) -> Iterator[dict[str, Any]]:
    """Yield a lane's names, then its events. Lanes count from 1, as Perfetto reserves process 0 for the kernel."""
    track = {"pid": rank + 1, "tid": 1}
    name = f"rank {rank} on {os.uname().nodename} (process {os.getpid()})"
    yield {"ph": "M", "name": "process_name", **track, "args": {"name": name}}
    yield {"ph": "M", "name": "process_sort_index", **track, "args": {"sort_index": rank}}
    yield {"ph": "M", "name": "thread_name", **track, "args": {"name": title}}

    def mark(name: str, ts: float) -> dict[str, Any]:
        return {"ph": "i", "s": "p", "name": name, "cat": "mark", "ts": ts, **track}

    if cut and events:
        yield mark("older events were dropped", (min(event[2] for event in events) - zero) / 1000)
    nested: list[Event] = []  # waits and reductions since the last call or step
    steps = data_nanoseconds = 0
    for event in events:
        kind, label, begin, end, nbytes = event
        facts: dict[str, Any] = {} if nbytes < 0 else {"bytes": nbytes}
        if kind in ("wait", "reduce"):
            nested.append(event)
        elif kind == "data":
            data_nanoseconds += end - begin
        elif kind in _ENCLOSING:
            facts |= {f"{phase}_us": _total(nested, phase, begin) for phase in ("wait", "reduce")}
            nested = []
        if kind == "step":
            facts["data_us"] = data_nanoseconds / 1000
        ts = (begin - zero) / 1000
        yield {"ph": "X", "name": label, "cat": kind, "ts": ts, "dur": (end - begin) / 1000, **track, "args": facts}
        if kind == "step":
            steps, data_nanoseconds = steps + 1, 0
            if mark_steps:
                yield mark(f"step {steps}", ts)


def _total(events: Sequence[Event], kind: str, begin: int) -> float:
    """Return the total microseconds of the events of a kind since a call began."""
    return sum(event[3] - event[2] for event in events if event[0] == kind and event[2] >= begin) / 1000
