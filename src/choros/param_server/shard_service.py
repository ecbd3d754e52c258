"""A host's part of the centre as its server holds it for a worker of another host: what is asked twice is done once.

A worker whose connection broke cannot know whether its exchange was committed. So it says how many it has made, and
the header, which the store that commits an exchange makes count one more, tells: as many, and this one is merged; one
more, and it was merged already, and the worker is given what it was shown then, to the bit. That lies in a segment of
its own, written before the commit; a worker asks for its next exchange when it has this one's answer, so one room for
each is enough. It is where the answer is sent from: nothing is copied once more.
"""

from __future__ import annotations

from typing import Any

from choros.comm.group import Rule
from choros.comm.shm.segment import Segment, align
from choros.errors import InvalidInputError
from choros.param_server import layout as at
from choros.param_server.shared_memory import SharedMemoryParameterServer
from choros.types import Array

_PAGE = 4096


class Served:
    """A rule as the serving host needs it: a message has come, and the worker adopts what it is shown itself."""

    uses_seen = True  # "seen" is where what is shown goes

    def __init__(self, rule: Rule) -> None:
        self.shows, self.elementwise, self.merge = rule.shows, rule.elementwise, rule.merge
        self.replaced = getattr(rule, "replaced", lambda centre, memory: memory)

    def propose(self, local: Any, seen: Any, window: int) -> Any:
        """Return the message as it came."""
        return local

    def adopt(self, local: Any, shown: Any) -> Any:
        """Leave the message as it is."""
        return local


def answers(centre: SharedMemoryParameterServer) -> Segment:
    """Make the segment in which a server keeps the last answer to each rank; those that never ask take no memory.

    Args:
        centre: the host's part.
    """
    return Segment.create(centre.workers * _rooms(centre)[1], "choros-answers")


def _rooms(centre: SharedMemoryParameterServer) -> tuple[int, int]:
    """Return the bytes of what is shown, and of that and the moving statistics, in whole pages."""
    shown, mean = (align(vector.nbytes, _PAGE) for vector in centre.blank())
    return shown, max(shown + mean, _PAGE)


class ParameterShard(SharedMemoryParameterServer):
    """The centre's part, held with the rank of a worker that is elsewhere and keeps its own counts.

    Args:
        segment: Segment. The part.
        rule: Rule. The algorithm.
        rank: int. The worker's.
        workers: int. Of the job.
        kept: Segment. Made by ``answers``.
        timeout: float. Seconds to wait for the lock.

    Example: see ``tests/transport/test_served_centre.py``.
    """

    def __init__(
        self, segment: Segment, rule: Rule, rank: int, workers: int, kept: Segment, timeout: float = 300.0
    ) -> None:
        super().__init__(segment, Served(rule), rank, workers, timeout, spin=0.0)
        (vector, others), (shown, both) = self.blank(), _rooms(self)
        self._shown = kept.array(vector.dtype, vector.size, rank * both)
        self._mean = kept.array(others.dtype, others.size, rank * both + (shown if others.size else 0))
        self._given: Array | None = None

    def answer(self, head: dict[str, Any], arrays: list[Array]) -> tuple[dict[str, Any], list[Array]]:
        """Answer one question; the same one, asked again, has the same answer and is done once.

        Args:
            head: what is asked: "exchange", "pending", "trial", "read", "replace" or "times" (how often it was set).
            arrays: a message or a vector, and moving statistics.

        Raises:
            InvalidInputError: it asks for something else.
        """
        if head["op"] == "exchange":
            self._sent, self._last_seen, self._set = int(head["sent"]), int(head["clock"]), int(head["set"])
            message, others = arrays
            self._given, self.place = others, int(head["place"])
            try:
                staleness = self.exchange(message, self._shown, int(head["window"]), others)
            finally:
                self._given = None
            taken = self._set != int(head["set"])
            return {"staleness": staleness, "taken": taken, **self._counts()}, [self._shown, others]
        if head["op"] == "pending":
            self._sent, self._last_seen, self._set = int(head["sent"]), int(head["clock"]), int(head["set"])
            message, others = arrays
            self.leave(message, message, int(head["window"]), others)
            return {}, []
        if head["op"] == "trial":
            vector, others = self.blank()
            self.trial(vector, others)
            return {}, [vector, others]
        if head["op"] == "read":
            vector, others = self.blank()
            self.read(vector, others)
            return self._counts(), [vector, others]
        if head["op"] == "times":
            return {"set": int(self._header()[at.SET])}, []
        if head["op"] == "replace":
            vector, others = arrays
            self.replace(vector, others, after=int(head["set"]))
            return {}, []
        raise InvalidInputError(f"A centre was asked to {head['op']!r}.")

    def _counts(self) -> dict[str, int]:
        return {"clock": self._last_seen, "set": self._set}

    def _again(self, header: Array, others: Array) -> int:
        """It was committed, and the answer did not arrive: give what was shown then."""
        if header[self._sent_at] != self._sent + 1:
            return super()._again(header, others)
        others[:] = self._mean
        before, self._last_seen = self._last_seen, int(header[self._seen_at])
        return self._last_seen - 1 - before

    def _commit(self, commit: int, header: Array) -> None:
        if self._given is not None:
            self._mean[:] = self._given
        super()._commit(commit, header)

    def _saw(self, clock: int, times_set: int) -> int:
        self._last_seen, self._set = clock, times_set
        return clock
