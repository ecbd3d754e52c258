"""Server side of one shard of the center, for workers of other hosts. A repeated request is carried out once.

A worker whose connection broke does not know whether its exchange was committed. So each request has the number of the
worker's contributions. The store that commits an exchange also increments that number in the header. If the numbers are
equal, the exchange is merged now. If the header's number is one higher, it was merged before, and the server sends the
same reply again, bit-equal. An exchange that only takes a center that was set changes no number. A repeated one takes
the center again, which may be newer.

The reply is kept in a separate segment, written before the commit. A worker sends its next exchange only after it has
received this reply. So one reply for each worker is enough. The server sends it from there without another copy.
"""

from __future__ import annotations

from typing import Any, Literal

from choros.algorithms import Vector
from choros.comm.messages import Done
from choros.comm.shm.segment import Segment, align
from choros.param_server import layout as fields
from choros.param_server.merge_rule import MergeRule
from choros.param_server.messages import (
    CenterReply,
    Exchange,
    ExchangeReply,
    PublishPending,
    ReadCenter,
    ReadTimesSet,
    ReplaceCenter,
    TimesSetReply,
    Trial,
    TrialReply,
)
from choros.param_server.shared_memory import SharedMemoryParameterServer
from choros.types import Array

_PAGE = 4096


class ShardRule:
    """The rule on the server: the message comes from the worker, and the worker adopts the shown center itself."""

    uses_seen = True  # the exchange writes the shown center to ``seen``, which is the reply

    def __init__(self, rule: MergeRule) -> None:
        self.shows: Literal["before", "after"] = rule.shows
        self.elementwise, self.merge = rule.elementwise, rule.merge
        self.replaced = getattr(rule, "replaced", lambda center, memory: memory)

    def propose(self, local: Vector, seen: Vector, window: int) -> Vector:
        """Return the worker's message."""
        return local

    def adopt(self, local: Vector, shown: Vector) -> Vector:
        """Return the message unchanged."""
        return local


def reply_segment(center: SharedMemoryParameterServer) -> Segment:
    """Make the segment for the last reply to each rank; ranks without requests take no memory.

    Args:
        center: SharedMemoryParameterServer. The host's shard.
    """
    return Segment.create(center.workers * _reply_sizes(center)[1], "choros-replies")


def reply_vector(replies: Segment, center: SharedMemoryParameterServer, rank: int) -> Array:
    """Return the memory of the vector of the last reply to a rank."""
    vector, _ = center.blank()
    return replies.array(vector.dtype, vector.size, rank * _reply_sizes(center)[1])


def _reply_sizes(center: SharedMemoryParameterServer) -> tuple[int, int]:
    """Return the bytes of the shown vector, and of that plus the moving statistics, in whole pages."""
    shown_bytes, statistics_bytes = (align(vector.nbytes, _PAGE) for vector in center.blank())
    return shown_bytes, max(shown_bytes + statistics_bytes, _PAGE)


class ParameterShard(SharedMemoryParameterServer):
    """A shard of the center, used on behalf of a worker of another host, which keeps the counters.

    Args:
        segment: Segment. The shard.
        rule: MergeRule. The algorithm.
        rank: int. The worker's rank.
        workers: int. Number of workers of the job.
        replies: Segment. Made by ``reply_segment``.
        timeout: float. Seconds to wait for the lock. Defaults to 300.

    Example: see ``tests/transport/test_served_center.py``.
    """

    def __init__(
        self, segment: Segment, rule: MergeRule, rank: int, workers: int, replies: Segment, timeout: float = 300.0
    ) -> None:
        # No spin: a server has a thread for each worker, and a spinning thread keeps the GIL from the holder of the
        # lock.
        super().__init__(segment, ShardRule(rule), rank, workers, timeout, spin=0.0)
        (_, statistics), (shown, reply_bytes) = self.blank(), _reply_sizes(self)
        self._reply_vector = reply_vector(replies, self, rank)
        self._reply_statistics = replies.array(
            statistics.dtype, statistics.size, rank * reply_bytes + (shown if statistics.size else 0)
        )
        self._request_statistics: Array | None = None

    def reply(self, request: Any) -> object:
        """Serve one of ``SHARD_REQUESTS``; return the reply. A repeated request is carried out once."""
        match request:
            case Exchange():
                return self._reply_to_exchange(request)
            case PublishPending(window, contributions, clock, times_set, message, statistics):
                self._set_counters(contributions, clock, times_set)
                # ``ShardRule.propose`` returns its first argument. The second one is not read.
                self.publish_pending(message, message, window, statistics)
                return Done()
            case Trial():
                vector, statistics = self.blank()
                self.trial(vector, statistics)
                return TrialReply(vector, statistics)
            case ReadCenter():
                vector, statistics = self.blank()
                self.read(vector, statistics, adopt=True)  # the worker decides what it does with the counters
                return CenterReply(self._clock_seen, self._times_set, vector, statistics)
            case ReadTimesSet():
                header = self._header()
                return TimesSetReply(int(header[fields.TIMES_SET]), int(header[fields.CLOCK]))
            case ReplaceCenter(times_set, clock, center, statistics):
                self.replace(center, statistics, after=times_set, clock=clock)
                return Done()
        raise AssertionError(f"no reply to {type(request).__name__}")

    def _reply_to_exchange(self, request: Exchange) -> ExchangeReply:
        # The worker sends its counters with each request, so a server that was restarted needs no state of its own.
        self._set_counters(request.contributions, request.clock, request.times_set)
        statistics = self._request_statistics = request.statistics
        self.position_word = request.position_word
        try:
            staleness = self.exchange(request.message, self._reply_vector, request.window, statistics)
        finally:
            self._request_statistics = None
        taken = self._times_set != request.times_set
        return ExchangeReply(staleness, taken, self._clock_seen, self._times_set, self._reply_vector, statistics)

    def _set_counters(self, contributions: int, clock: int, times_set: int) -> None:
        self._contributions, self._clock_seen, self._times_set = contributions, clock, times_set

    def is_reply(self, vector: Array) -> bool:
        """Return whether a vector that ``reply`` returned is in the segment of replies."""
        return vector is self._reply_vector

    def _handle_count_mismatch(self, header: Array, statistics: Array) -> int:
        """Return the staleness of an exchange that was committed but whose reply was lost; restore the reply."""
        if header[self._contributions_index] != self._contributions + 1:
            return super()._handle_count_mismatch(header, statistics)
        statistics[:] = self._reply_statistics
        before, self._clock_seen = self._clock_seen, int(header[self._clock_seen_index])
        return self._clock_seen - 1 - before

    def _commit(self, commit: int, header: Array) -> None:
        if self._request_statistics is not None:
            # Before the commit: after it the exchange counts as done, and a repeated request is answered from this
            # memory. The vector is there already, as the exchange wrote it to ``_reply_vector``.
            self._reply_statistics[:] = self._request_statistics
        super()._commit(commit, header)
