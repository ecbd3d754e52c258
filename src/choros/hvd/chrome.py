"""The timeline's file: what all ranks took down, as trace events of Chrome's format, which Perfetto opens too."""

from __future__ import annotations

import json
import os
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

Event = tuple[str, str, int, int, int]  # see choros.transport.Trace
Part = dict[str, Any]


def pack(rank: int, events: Iterable[Event], began: int, cut: bool = False) -> Part:
    """Return what one rank took down, ready to travel.

    Args:
        rank: int.
        events: each in the order of its end.
        began: int. When it began to, by ``time.monotonic_ns``.
        cut: bool. Whether older events were let go.
    """
    return {
        "rank": rank,
        "host": os.uname().nodename,
        "process": os.getpid(),
        "machine": _machine(),
        "clock": time.time_ns() - time.monotonic_ns(),
        "began": began,
        "cut": cut,
        "events": zlib.compress(json.dumps(list(events)).encode(), 1),
    }


def write(path: str, parts: Sequence[Part], mark_steps: bool) -> None:
    """Write the file, anew.

    Args:
        path: str.
        parts: what ``pack`` made, one a rank.
        mark_steps: bool. Whether to add an instant event at each step of an optimizer.

    Raises:
        OSError: it cannot be written.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as room:
        ...     write(f"{room}/t.json", [pack(0, [("call", "allreduce 'loss'", 5_000, 9_000, 12)], 5_000)], False)
        ...     json.loads(Path(f"{room}/t.json").read_text())["traceEvents"][-1]["dur"]
        4.0
    """
    shifts = [_shift(part, parts[0]) for part in parts]
    zero = min(part["began"] + shift for part, shift in zip(parts, shifts, strict=True))
    with open(path, "w") as file:
        file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        between = ""
        for part, shift in zip(parts, shifts, strict=True):
            for event in _lane(part, zero - shift, mark_steps):
                file.write(between + json.dumps(event))
                between = ",\n"
        file.write("\n]}\n")


def _machine() -> str:
    """What all processes have in common that share a monotonic clock."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return os.uname().nodename


def _shift(part: Part, first: Part) -> int:
    """Nanoseconds from a rank's clock to the first one's: none on one machine, else as their wall clocks tell."""
    return 0 if part["machine"] == first["machine"] else int(part["clock"] - first["clock"])


def _lane(part: Part, zero: int, mark_steps: bool) -> Iterator[dict[str, Any]]:
    """A rank's events, its name first. Perfetto keeps process 0 for the idle kernel: lanes are counted from 1."""
    lane = {"pid": part["rank"] + 1, "tid": 1}
    name = f"rank {part['rank']} on {part['host']} (process {part['process']})"
    yield {"ph": "M", "name": "process_name", **lane, "args": {"name": name}}
    yield {"ph": "M", "name": "process_sort_index", **lane, "args": {"sort_index": part["rank"]}}
    yield {"ph": "M", "name": "thread_name", **lane, "args": {"name": "collectives and reductions"}}
    events: list[Event] = json.loads(zlib.decompress(part["events"]))
    if part["cut"] and events:
        yield _instant("older events were let go", _microseconds(min(e[2] for e in events) - zero), lane, {})
    inside: list[Event] = []  # waits and reductions whose call has not ended yet
    steps = 0
    for event in events:
        kind, what, begin, end, nbytes = event
        facts: dict[str, Any] = {} if nbytes < 0 else {"bytes": nbytes}
        if kind in ("wait", "reduce"):
            inside.append(event)
        else:
            facts |= {f"{each}_us": _total(inside, each, begin) for each in ("wait", "reduce")}
            inside = []
        at = _microseconds(begin - zero)
        yield {"ph": "X", "name": what, "cat": kind, "ts": at, "dur": _microseconds(end - begin), **lane, "args": facts}
        if kind == "step":
            steps += 1
            if mark_steps:
                yield _instant(f"step {steps}", at, lane, {"step": steps})


def _instant(name: str, at: float, lane: dict[str, int], facts: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "i", "s": "p", "name": name, "cat": "mark", "ts": at, **lane, "args": facts}


def _total(events: Sequence[Event], kind: str, begin: int) -> float:
    return _microseconds(sum(e[3] - e[2] for e in events if e[0] == kind and e[2] >= begin))


def _microseconds(nanoseconds: int) -> float:
    return nanoseconds / 1000
