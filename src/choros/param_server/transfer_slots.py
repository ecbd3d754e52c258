"""Vectors of a sharded center by messages between ranks, as those of MPI, instead of by the socket of a host's server.

MPI's messages are sent and received only by processes that MPI started, and a host's server is not one of them. So the
host's first rank moves each vector between a message and memory that it shares with its server (``VectorRelay``).
Headers, moving statistics, errors and the restart of a server use the server's socket, as without messages.

The server requests each transfer by its number, which counts the transfers of a worker in one direction. A request for
a number that was requested before starts nothing. So a server that was restarted may repeat a request, and each
message is sent and received once.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from choros.comm.messages import Done, encode
from choros.comm.p2p.interface import PointToPoint, RequestHandle, pieces
from choros.comm.shm.futex import POLL_SECONDS, Waiter, fence
from choros.comm.shm.segment import Segment, align
from choros.comm.tcp.rpc import Handler
from choros.errors import CommTimeoutError, InvalidInputError, PeerLostError, brief
from choros.param_server.messages import TRANSFERS, Fetch, TransferReply
from choros.param_server.shard_service import ParameterShard, reply_vector
from choros.param_server.shared_memory import SharedMemoryParameterServer
from choros.types import Array

logger = logging.getLogger(__name__)

PUSH, PULL = 24_103, 24_104  # tags: a worker's vector for the server, and the server's for the worker
_PAGE, _WORDS_PER_RANK = 4096, 8  # 64-bit words of a rank: a cache line
# Words of the first cache line: a count of requests, and 1 after a failure of the relay.
_REQUESTS, _FAILED = 0, 1
# Words of a rank: the numbers of the transfers that were requested and done, and the source of the vector to send.
_PUSH_REQUESTED, _PUSHED, _PULL_REQUESTED, _PULLED, _SOURCE = range(5)
_SLOT, _REPLY = 0, 1  # sources of a vector to send
_BUSY_SECONDS, _SLEEP_SECONDS = 0.2, 5e-4  # polls of a transfer: first without a sleep, then with this sleep
_END_SECONDS = 1.0  # seconds that transfers may take to end after ``close``


class TransferSlots:
    """One vector for each rank, and the state of its transfers, in memory of a server and of its host's first rank.

    Args:
        segment: Segment. Made by ``create``.
        center: SharedMemoryParameterServer. The host's shard.
    """

    def __init__(self, segment: Segment, center: SharedMemoryParameterServer) -> None:
        vector, (first, slot_bytes) = center.blank()[0], _sizes(center)
        self._vectors = [
            segment.array(vector.dtype, vector.size, first + rank * slot_bytes) for rank in range(center.workers)
        ]
        self._words = segment.words
        # No spin: a transfer crosses the network, and the other end of the wait may need this core.
        self._waiter = Waiter(self._words, segment.address, spin=0.0)
        self._locks = [threading.Lock() for _ in range(center.workers)]
        self._connections = [0] * center.workers

    @staticmethod
    def create(center: SharedMemoryParameterServer) -> Segment:
        """Make the segment; ranks without transfers take no memory."""
        first, slot_bytes = _sizes(center)
        return Segment.create(first + center.workers * slot_bytes, "choros-transfers")

    # -- the server
    def new_connection(self, rank: int) -> int:
        """Count a new connection of a rank; return its number for ``hold``."""
        self._connections[rank] += 1
        return self._connections[rank]

    @contextmanager
    def hold(self, rank: int, connection: int) -> Iterator[None]:
        """Keep a rank's slot for one request of its latest connection. An earlier one may still have a request."""
        with self._locks[rank]:
            # A worker that connected again repeats its request. The thread of its broken connection may still wait for
            # a vector, and must not use the slot afterwards.
            if connection != self._connections[rank]:
                raise PeerLostError(f"Rank {rank} has connected again.")
            yield

    def receive(self, rank: int, number: int, timeout: float) -> Array:
        """Return a worker's vector of this number, once it has arrived.

        Raises:
            CommTimeoutError: it did not arrive in time. PeerLostError: the messages of the host's first rank failed.
        """
        self._request(rank, _PUSH_REQUESTED, number)
        self._wait(rank, _PUSHED, number, timeout)
        return self._vectors[rank]

    def put(self, rank: int, vector: Array) -> int:
        """Copy a vector to the rank's slot; return the source for ``send``."""
        self._vectors[rank][:] = vector
        return _SLOT

    def send(self, rank: int, number: int, source: int, timeout: float) -> None:
        """Send the worker the vector of a source, as the transfer of this number. Errors: as ``receive``."""
        # Only for a new number: a repeated request must not change the source of a transfer that is under way.
        if number == self._word(rank, _PULL_REQUESTED) + 1:
            self._words[_index(rank, _SOURCE)] = source
        self._request(rank, _PULL_REQUESTED, number)
        self._wait(rank, _PULLED, number, timeout)

    def _request(self, rank: int, word: int, number: int) -> None:
        last_number = self._word(rank, word)
        if number not in (last_number, last_number + 1):
            raise InvalidInputError(f"Transfer {number} of rank {rank} was requested after transfer {last_number}.")
        self._waiter.publish(_index(rank, word), number)
        # Two threads may publish the same count. The relay still misses nothing: a thread publishes its rank's number
        # before it reads the count, and the relay reads the count before it looks at the ranks.
        self._waiter.publish(_REQUESTS, self._words[_REQUESTS] + 1)

    def _wait(self, rank: int, word: int, number: int, timeout: float) -> None:
        def check(waited: float) -> None:
            if self._words[_FAILED]:
                raise PeerLostError(f"The messages of {os.uname().nodename}'s first rank failed: see its output.")
            if waited >= timeout:
                direction = "from" if word == _PUSHED else "to"
                raise CommTimeoutError(
                    f"No message {direction} rank {rank} passed {os.uname().nodename}'s first rank within {waited:.1f} "
                    "s: look at both processes, or set a longer timeout.",
                    (rank,),
                )

        self._waiter.wait(_index(rank, word), number, timeout, check)

    # -- the host's first rank
    def vector(self, rank: int) -> Array:
        """Return the slot of a rank."""
        return self._vectors[rank]

    def next_transfer(self, rank: int) -> tuple[bool, bool] | None:
        """Return whether the next transfer of a rank is a push, and whether it uses the slot; None if there is none."""
        is_push = self._word(rank, _PUSH_REQUESTED) > self._word(rank, _PUSHED)
        if not is_push and self._word(rank, _PULL_REQUESTED) <= self._word(rank, _PULLED):
            return None
        fence()  # the source, and the vector, were stored before the request
        return is_push, is_push or self._word(rank, _SOURCE) == _SLOT

    def finish(self, rank: int, is_push: bool) -> None:
        """Count a transfer as done."""
        index = _index(rank, _PUSHED if is_push else _PULLED)
        self._waiter.publish(index, self._words[index] + 1)

    def fail(self) -> None:
        """Record that no transfer can be done any more."""
        # No wake-up: the waiting threads check this word at least every POLL_SECONDS.
        self._words[_FAILED] = 1

    def request_count(self) -> int:
        """Return the number of requests; see ``wait_for_request``."""
        return self._words[_REQUESTS]

    def wait_for_request(self, count: int) -> None:
        """Sleep for at most 50 ms, while ``request_count`` is this number."""
        self._waiter.sleep(_REQUESTS, count, POLL_SECONDS)

    def wake(self) -> None:
        """End a sleep of ``wait_for_request``."""
        self._waiter.publish(_REQUESTS, self._words[_REQUESTS] + 1)

    def _word(self, rank: int, word: int) -> int:
        return self._words[_index(rank, word)]


def _sizes(center: SharedMemoryParameterServer) -> tuple[int, int]:
    """Return the offset of the first slot, and the bytes of a slot."""
    return align(8 * _WORDS_PER_RANK * (1 + center.workers), _PAGE), align(center.blank()[0].nbytes, _PAGE)


def _index(rank: int, word: int) -> int:
    return _WORDS_PER_RANK * (1 + rank) + word


def serve_transfers(slots: TransferSlots, shard: ParameterShard, handler: Handler) -> Handler:
    """Return a handler of requests whose first array, or whose reply's first array, is sent by a message.

    Such a request comes in a ``Transfer``. The ``TransferReply`` has the source of the reply's vector. The worker then
    sends a ``Fetch`` of that source, and this sends the vector. So a request that is repeated because its reply was
    lost has not sent a vector yet. All other requests are passed to the handler as they are.

    Args:
        slots: TransferSlots.
        shard: ParameterShard. The shard on behalf of the worker of one connection.
        handler: serves the request with all arrays.
    """
    rank = shard.rank
    assert rank is not None  # noqa: S101 - a shard on behalf of a worker has its rank
    connection = slots.new_connection(rank)

    def handle(header: dict[str, Any], arrays: list[Array]) -> tuple[dict[str, Any], Sequence[Array]]:
        if not TRANSFERS.has(header):
            return handler(header, arrays)
        envelope = TRANSFERS.decode(header, arrays)
        # Not under ``hold``: the source is kept by the numbers, and a send may wait long for the worker.
        if isinstance(envelope, Fetch):
            slots.send(rank, envelope.number, envelope.source, shard.timeout)
            return encode(Done())
        source = None
        with slots.hold(rank, connection):
            vectors = envelope.arrays
            if envelope.number is not None:
                vectors = [slots.receive(rank, envelope.number, shard.timeout), *vectors]
            reply, shown = handler(envelope.request, vectors)
            if shown:
                source = _REPLY if shard.is_reply(shown[0]) else slots.put(rank, shown[0])
        return encode(TransferReply(source, reply, list(shown[1:])))

    return handle


class _Transfer(NamedTuple):
    is_push: bool
    requests: list[RequestHandle]
    begun: float


class VectorRelay:
    """A thread of a host's first rank that moves vectors between messages and the memory of the host's server.

    Args:
        slots: TransferSlots.
        messages: PointToPoint. Messages among all ranks, which several threads may use.
        replies: Segment. The server's replies.
        center: SharedMemoryParameterServer. The host's shard.
        ranks: the ranks of other hosts.

    Example: see ``tests/transport/test_served_center.py``.
    """

    def __init__(
        self,
        slots: TransferSlots,
        messages: PointToPoint,
        replies: Segment,
        center: SharedMemoryParameterServer,
        ranks: Iterable[int],
    ) -> None:
        self._slots, self._messages = slots, messages
        self._replies = {rank: reply_vector(replies, center, rank) for rank in ranks}
        self._transfers: dict[int, _Transfer] = {}
        self._closed_at = 0.0
        self._thread = threading.Thread(target=self._run, name="choros-vectors", daemon=True)
        self._thread.start()
        # The thread calls MPI, so it must end before MPI_Finalize.
        atexit.register(self.close)

    def _run(self) -> None:
        try:
            while not self._closed_at or (self._transfers and time.monotonic() - self._closed_at < _END_SECONDS):
                # Before the look at the ranks: a request that comes after it changes the count, so the sleep below ends
                # at once.
                count = self._slots.request_count()
                for rank in self._replies.keys() - self._transfers.keys():
                    self._start(rank)
                if self._transfers:
                    self._poll()
                else:
                    self._slots.wait_for_request(count)
        except Exception as error:  # without the thread each transfer would wait for its time limit
            self._slots.fail()
            rank_name = f"rank {self._messages.rank} on {os.uname().nodename}"
            logger.error(f"{rank_name}: {self._messages.name} failed at a vector of the center: {brief(error)}")

    def _start(self, rank: int) -> None:
        transfer = self._slots.next_transfer(rank)
        if transfer is None:
            return
        is_push, uses_slot = transfer
        vector = self._slots.vector(rank) if uses_slot else self._replies[rank]
        start, tag = (self._messages.receive, PUSH) if is_push else (self._messages.send, PULL)
        requests = [start(piece, rank, tag) for piece in pieces(vector)]
        self._transfers[rank] = _Transfer(is_push, requests, time.monotonic())

    def _poll(self) -> None:
        for rank, transfer in list(self._transfers.items()):
            if self._messages.done(transfer.requests):
                del self._transfers[rank]
                self._slots.finish(rank, transfer.is_push)
        if self._transfers:
            # A message of a library without hardware support arrives only while both ends call the library.
            if time.monotonic() - max(transfer.begun for transfer in self._transfers.values()) < _BUSY_SECONDS:
                os.sched_yield()
            else:
                self._messages.sleep(_SLEEP_SECONDS)

    def close(self) -> None:
        """End the thread, after the server has ended. Memory of an unfinished message stays until the process ends."""
        atexit.unregister(self.close)
        self._closed_at = self._closed_at or time.monotonic()
        self._slots.wake()
        self._thread.join(2 * _END_SECONDS)
        keep_unfinished(self._transfers, self._slots)


_unfinished: list[object] = []


def keep_unfinished(requests: Any, memory: object) -> None:
    """Keep the memory of requests that did not end: the library may still read it or write to it."""
    if requests:
        _unfinished.append((requests, memory))
