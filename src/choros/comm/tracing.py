"""Timed operations of a rank, and the log that keeps their times for a timeline."""

from __future__ import annotations

import time
from collections import deque
from typing import Self

from choros.comm import trace_format
from choros.comm.group import Group, Trace

_MAX_EVENTS = 1_000_000  # about 200 MB


class EventLog:
    """The latest events of a rank, at most 1,000,000. ``append`` is a ``Trace``.

    Example:
        >>> log = EventLog()
        >>> with Span(log.append, "compute", "step"):
        ...     pass
        >>> import zlib
        >>> b'"name": "step", "cat": "compute"' in zlib.decompress(log.lane(rank=0, zero=0, title="training"))
        True
    """

    def __init__(self) -> None:
        self._events: deque[trace_format.Event] = deque(maxlen=_MAX_EVENTS)
        self.append = self._events.append

    def lane(self, rank: int, zero: int, title: str, mark_steps: bool = False) -> bytes:
        """Return the events as compressed JSON text; the arguments are those of ``trace_format.lane``."""
        cut = len(self._events) == _MAX_EVENTS
        return trace_format.lane(rank, self._events.copy(), zero, mark_steps, cut, title)


class Span:
    """Context manager that times an operation.

    Args:
        trace: Trace. Receives the event at the end.
        kind: str. "compute", "exchange", "wait" or "data".
        name: str. The name in the timeline.
        nbytes: int. Size of the data in bytes; -1, the default, if it is unknown.

    Example:
        >>> events = []
        >>> with Span(events.append, "exchange", "gradients", 12):
        ...     pass
        >>> [(kind, name, end >= begin, nbytes) for kind, name, begin, end, nbytes in events]
        [('exchange', 'gradients', True, 12)]
    """

    __slots__ = ("begin", "kind", "name", "nbytes", "trace")

    def __init__(self, trace: Trace, kind: str, name: str, nbytes: int = -1) -> None:
        self.trace, self.kind, self.name, self.nbytes, self.begin = trace, kind, name, nbytes, 0

    def __enter__(self) -> Self:
        self.begin = time.monotonic_ns()
        return self

    def __exit__(self, *_: object) -> None:
        self.trace((self.kind, self.name, self.begin, time.monotonic_ns(), self.nbytes))


class TracedOperation:
    """Context manager that names and times an operation of a group.

    The group's ``doing`` has the name while the operation lasts, and the group's trace receives the times.

    Args:
        group: Group.
        kind: str. "call", or "step" for a step of an optimizer.
        text: str. Description for messages. If it is not known yet, the block sets ``group.doing``. Defaults to "".
        nbytes: int. Size of the data in bytes; -1, the default, if it is unknown.

    Example:
        >>> from choros.comm.single_rank_group import SingleRankGroup
        >>> group, events = SingleRankGroup(), []
        >>> group.trace = events.append
        >>> with TracedOperation(group, "call", "allreduce 'loss'", 12):
        ...     group.doing
        "allreduce 'loss'"
        >>> group.doing, [(kind, name, end >= begin, nbytes) for kind, name, begin, end, nbytes in events]
        ('', [('call', "allreduce 'loss'", True, 12)])
    """

    __slots__ = ("begin", "group", "kind", "nbytes", "text")

    def __init__(self, group: Group, kind: str, text: str = "", nbytes: int = -1) -> None:
        self.group, self.kind, self.text, self.nbytes, self.begin = group, kind, text, nbytes, 0

    def __enter__(self) -> Self:
        group = self.group
        if self.text:
            group.doing = self.text
        if group.trace is not None:
            self.begin = time.monotonic_ns()
        return self

    def __exit__(self, *_: object) -> None:
        group = self.group
        # The trace may have been set or removed inside the block. Then there is no start time, or no receiver.
        if self.begin and group.trace is not None:
            group.trace((self.kind, group.doing or self.kind, self.begin, time.monotonic_ns(), self.nbytes))
        group.doing = ""
