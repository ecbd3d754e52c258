"""Sharded parameter server: each host has one contiguous shard of the center and serves it to other hosts.

A worker runs ``propose`` and ``adopt`` itself. Only its message and the shown center cross the network, once in each
direction. The host merges the message under the same lock as for its own workers, so the result is the same. With
several shards a worker sends to all hosts before it waits for a reply. Clock and staleness are counted for each shard.
A request may be repeated after the restart of a server: see ``choros.param_server.shard_service``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, Protocol, TypeVar

import numpy as np

from choros.comm.group import Trace
from choros.comm.messages import Done, decode, encode
from choros.comm.tracing import Span
from choros.errors import ChorosError, InvalidInputError
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
from choros.param_server.rule_blocks import BlockRule
from choros.param_server.shared_memory import SharedMemoryParameterServer
from choros.types import Array, aligned

_NO_VALUES = np.zeros(0, np.float32)
_T = TypeVar("_T")


class ShardConnection(Protocol):
    """Interface of a connection to a host: ``choros.comm.tcp.reconnecting_client.ReconnectingClient``.

    Another one is ``choros.param_server.transfer_client.TransferClient``, which sends vectors by messages.
    """

    timeout: float

    def request(self, header: dict[str, Any], arrays: Sequence[Array] = ()) -> tuple[dict[str, Any], list[Array]]:
        """Send a request; return the reply."""
        ...

    def send(self, header: dict[str, Any], arrays: Sequence[Array] = ()) -> None:
        """Send a request; ``receive`` returns its reply."""
        ...

    def receive(self) -> tuple[dict[str, Any], list[Array]]:
        """Return the reply of the last request."""
        ...

    def close(self) -> None:
        """Close the connection."""
        ...


class _RemoteShard:
    """A shard on another host, and this worker's counters for it, which each exchange sends."""

    def __init__(self, part: slice, connection: ShardConnection) -> None:
        self.part, self.connection = part, connection
        self.contributions = self.clock = self.times_set = 0
        self.message, self.awaits_reply = _NO_VALUES, False

    def send(self, request: object) -> None:
        """Send a request; ``receive`` returns its reply."""
        self.connection.send(*encode(request))
        self.awaits_reply = True

    def receive(self, kind: type[_T]) -> _T:
        """Return the reply of the last request, which is of this kind. Update the counters from it."""
        # Before the receive: if it raises, no reply will come, and ``receive_all`` must not wait for one.
        self.awaits_reply = False
        reply = decode(kind, *self.connection.receive())
        if isinstance(reply, ExchangeReply):
            self.clock, self.times_set = reply.clock, reply.times_set
            self.contributions += not reply.taken
        return reply

    def counters(self) -> tuple[int, int, int]:
        """Return the counters: contributions, the clock seen last, and the number of times that the center was set."""
        return self.contributions, self.clock, self.times_set


class ShardedParameterServer:
    """One worker's client of a sharded center; implements ``choros.comm.group.ParameterServer``.

    Args:
        rule: MergeRule. The algorithm.
        parts: for each shard, its slice of the vector and its server. The server is a SharedMemoryParameterServer of
            this host, or a ShardConnection to another host. The first shard has the moving statistics.
        messages: str. Name of the messages by which vectors are sent, as "MPI"; "", the default, for the connections'
            sockets.

    Attributes:
        timeout: float. Seconds to wait for a reply or a lock.
        position_word: int. The worker's position, which its next exchange commits (``center_state.encode_position``).

    Raises:
        InvalidInputError: several shards of a rule that is not elementwise.

    Example: see ``tests/transport/test_sharded_center.py``.
    """

    def __init__(
        self,
        rule: MergeRule,
        parts: Sequence[tuple[slice, SharedMemoryParameterServer | ShardConnection]],
        messages: str = "",
    ) -> None:
        self._rule, self._by_messages = BlockRule(rule), f", vectors by {messages}" if messages else ""
        self._local_shards = [
            (index, slice_, server)
            for index, (slice_, server) in enumerate(parts)
            if isinstance(server, SharedMemoryParameterServer)
        ]
        self._remote_shards = [
            (index, _RemoteShard(slice_, server))
            for index, (slice_, server) in enumerate(parts)
            if not isinstance(server, SharedMemoryParameterServer)
        ]
        self._servers: list[SharedMemoryParameterServer | ShardConnection] = [server for _, server in parts]
        self.position_word = 0
        self._trace: Trace | None = None
        if len(parts) > 1 and not rule.elementwise:
            raise InvalidInputError(f"{type(rule).__name__} looks at the whole vector: its center cannot be divided.")

    @property
    def kind(self) -> str:
        """The kind of the center, for messages."""
        divided = len(self._servers) > 1
        kind = f"a center divided among {len(self._servers)} hosts" if divided else "a center on the first host"
        return kind + self._by_messages

    def exchange(self, local: Array, seen: Array, window: int, statistics: Array) -> int:
        """Propose, merge and adopt; return the first shard's staleness.

        See ``SharedMemoryParameterServer.exchange``.
        """
        staleness = 0
        with self.no_reply_left(ExchangeReply):
            for index, shard in self._remote_shards:
                message = self._propose(shard, local[shard.part], seen[shard.part], window)
                shard_statistics = statistics_of_shard(index, statistics)
                shard.send(Exchange(window, self.position_word, *shard.counters(), message, shard_statistics))
            for index, part, server in self._local_shards:
                server.position_word = self.position_word
                shard_staleness = server.exchange(
                    local[part], seen[part], window, statistics_of_shard(index, statistics)
                )
                staleness = shard_staleness if index == 0 else staleness
        for index, shard, reply in self.receive_all(ExchangeReply):
            self._adopt(local[shard.part], seen[shard.part], reply.shown, reply.taken)
            statistics_of_shard(index, statistics)[:] = reply.statistics
            staleness = reply.staleness if index == 0 else staleness
        return staleness

    def publish_pending(self, local: Array, seen: Array, window: int, statistics: Array) -> None:
        """Publish the message of an exchange for ``trial``. See ``SharedMemoryParameterServer.publish_pending``."""
        with self.no_reply_left(Done):
            for index, shard in self._remote_shards:
                message = self._propose(shard, local[shard.part], seen[shard.part], window)
                shard.send(PublishPending(window, *shard.counters(), message, statistics_of_shard(index, statistics)))
            for index, part, server in self._local_shards:
                server.publish_pending(local[part], seen[part], window, statistics_of_shard(index, statistics))
        self.receive_all(Done)

    def trial(self, out: Array, statistics: Array) -> None:
        """Copy out the center with all pending messages. See ``SharedMemoryParameterServer.trial``."""
        with self.no_reply_left(TrialReply):
            for _, shard in self._remote_shards:
                shard.send(Trial())
            for index, part, server in self._local_shards:
                server.trial(out[part], statistics_of_shard(index, statistics))
        for index, shard, reply in self.receive_all(TrialReply):
            out[shard.part] = reply.center
            statistics_of_shard(index, statistics)[:] = reply.statistics

    @property
    def trace(self) -> Trace | None:
        """The receiver of the timing of every wait for a lock or for another host, or None."""
        return self._trace

    @trace.setter
    def trace(self, trace: Trace | None) -> None:
        self._trace = trace
        for _, _, server in self._local_shards:
            server.trace = trace

    @contextmanager
    def no_reply_left(self, reply: type[object]) -> Iterator[None]:
        """Receive the replies to the requests of this context if it raises.

        An unread reply would be taken for the reply to the next request, and a worker reads the center after an error.

        Args:
            reply: the class of the replies.
        """
        try:
            yield
        except BaseException:
            with suppress(ChorosError):
                self.receive_all(reply)
            raise

    def receive_all(self, kind: type[_T]) -> list[tuple[int, _RemoteShard, _T]]:
        """Return the replies to all requests that were sent, or raise the first error after all hosts have replied.

        Args:
            kind: the class of the replies.
        """
        replies: list[tuple[int, _RemoteShard, _T]] = []
        first_error = None
        for index, shard in self._remote_shards:
            if not shard.awaits_reply:
                continue
            try:
                with Span(self._trace, "wait", f"reply of shard {index}") if self._trace else nullcontext():
                    replies.append((index, shard, shard.receive(kind)))
            except ChorosError as error:
                # All replies are read before the error is raised: an unread one would be taken for the reply to the
                # next request.
                first_error = first_error or error
        if first_error is not None:
            raise first_error
        return replies

    def _propose(self, shard: _RemoteShard, local: Array, seen: Array, window: int) -> Array:
        """Return the message for a shard. It must not change until the reply arrives, as it may be sent again."""
        if shard.message.size != local.size or shard.message.dtype != local.dtype:
            shard.message = aligned(local.size, local.dtype)
        self._rule.write_message(local, seen, window, shard.message)
        return shard.message

    def _adopt(self, local: Array, seen: Array, shown: Array, taken: bool) -> None:
        """Continue from the shown center: take it as it is if it was set (``taken``), else call the rule's adopt."""
        if taken:
            local[:] = seen[:] = shown
        else:
            self._rule.adopt(local, seen, shown)

    def read(self, out: Array, statistics: Array, *, adopt: bool = False) -> int:
        """Copy the center out, each shard consistent in itself; return the first shard's clock.

        See ``SharedMemoryParameterServer.read``.
        """
        clock = 0
        with self.no_reply_left(CenterReply):
            for _, shard in self._remote_shards:
                shard.send(ReadCenter())
            for index, part, server in self._local_shards:
                shard_clock = server.read(out[part], statistics_of_shard(index, statistics), adopt=adopt)
                clock = shard_clock if index == 0 else clock
        for index, shard, reply in self.receive_all(CenterReply):
            out[shard.part] = reply.center
            statistics_of_shard(index, statistics)[:] = reply.statistics
            if adopt:
                shard.clock, shard.times_set = reply.clock, reply.times_set
            clock = reply.clock if index == 0 else clock
        return clock

    def replace(self, center: Array, statistics: Array) -> None:
        """Set the center and the moving statistics; every worker's next exchange takes them without a merge.

        Each host first returns how many times its shard was set. It sets the shard only if that number is unchanged. So
        a repeated request has no effect. If another process set the shard meanwhile, that value stays.

        A worker's exchange may reach one shard before the set and another one after it. Only the first of them counts
        it as a merge. So all shards get the same clock, as a checkpoint requires.
        """
        with self.no_reply_left(TimesSetReply):
            for _, shard in self._remote_shards:
                shard.send(ReadTimesSet())
        times_set_before = self.receive_all(TimesSetReply)
        clocks = [server.clock for _, _, server in self._local_shards]
        clock = max(clocks + [reply.clock for _, _, reply in times_set_before])
        with self.no_reply_left(Done):
            for index, shard, reply in times_set_before:
                shard_statistics = statistics_of_shard(index, statistics)
                shard.send(ReplaceCenter(reply.times_set, clock, center[shard.part], shard_statistics))
            for index, part, server in self._local_shards:
                server.replace(center[part], statistics_of_shard(index, statistics), clock=clock)
        self.receive_all(Done)

    @property
    def timeout(self) -> float:
        """Seconds to wait for a reply or a lock."""
        return float(self._servers[0].timeout)

    @timeout.setter
    def timeout(self, seconds: float) -> None:
        for server in self._servers:
            server.timeout = seconds

    def close(self) -> None:
        """Close all connections and free this rank's resources."""
        for server in self._servers:
            server.close()


def statistics_of_shard(part: int, statistics: Array) -> Array:
    """Return a shard's moving statistics: the first shard has all of them, the others none."""
    return statistics if part == 0 else statistics[:0]
