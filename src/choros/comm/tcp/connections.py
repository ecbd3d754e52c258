"""Messages over one TCP socket for each pair of ranks; groups of some of the ranks share the sockets.

On the wire a message is a header (group, tag, number of bytes) and the bytes. A socket is read only while a receive is
pending on it. A message that arrives before its receive is stored until the receive starts.
"""

from __future__ import annotations

import errno
import hashlib
import select
import socket
import struct
import threading
from collections import defaultdict, deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np

from choros.types import Array

_HEADER = struct.Struct("<Qqq")  # group, tag, bytes
_MAX_EARLY_BYTES = 1 << 40  # length limit of a message without a receive, which must be stored
_Key = tuple[int, int]


class Request:
    """One send or receive."""

    __slots__ = ("done", "key", "view")

    def __init__(self, key: _Key, view: memoryview) -> None:
        self.key, self.view, self.done = key, view, False


@dataclass
class _Connection:
    """The socket to one rank, with its queued sends and receives."""

    sock: socket.socket
    peer: str
    sends: deque[tuple[memoryview, Request | None]] = field(default_factory=deque)
    receives: dict[_Key, deque[Request]] = field(default_factory=lambda: defaultdict(deque))
    early: dict[_Key, deque[Array]] = field(default_factory=lambda: defaultdict(deque))
    header: bytearray = field(default_factory=lambda: bytearray(_HEADER.size))
    header_bytes: int = 0  # bytes of the header that have arrived
    key: _Key | None = None  # group and tag of the present message; None while its header arrives
    length: int = 0
    target: memoryview | None = None
    receiver: Request | None = None
    early_data: Array = field(default_factory=lambda: np.empty(0, np.uint8))
    pending: int = 0  # receives that are not done

    def receive(self, request: Request) -> None:
        """Receive the next message of the request's key into the request's buffer."""
        # Messages of one key stay in the order of their arrival: an early one must be used before the socket is read
        # further.
        if waiting := self.early.get(request.key):
            self._deliver(request, waiting.popleft())
            return
        self.receives[request.key].append(request)
        self.pending += 1

    def flush(self) -> None:
        """Send as many queued bytes as the kernel accepts now."""
        while self.sends:
            view, request = self.sends[0]
            # The kernel may accept a part. The rest stays at the head of the queue, as no other message may come
            # between.
            sent = self.sock.send(view)
            if sent < len(view):
                self.sends[0] = view[sent:], request
                continue
            self.sends.popleft()
            if request is not None:
                request.done = True

    def read(self) -> None:
        """Read arrived bytes while a receive is pending; ends by BlockingIOError if no more bytes are there."""
        while self.pending:  # without a pending receive the bytes stay in the kernel, which slows the sender down
            if self.key is None:
                self.header_bytes += self._recv_into(memoryview(self.header)[self.header_bytes :])
                # A stream has no message bounds: even the 24 bytes of a header may arrive in two parts.
                if self.header_bytes < _HEADER.size:
                    continue
                group, tag, self.length = _HEADER.unpack(self.header)
                self.key, self.header_bytes = (group, tag), 0
            if self.target is None:
                self._choose_target(self.key)
            # An empty message has an empty target. ``recv_into`` with an empty buffer returns 0, which means the end of
            # the stream.
            if self.target:
                self.target = self.target[self._recv_into(self.target) :]
            if not self.target:
                self._finish_message(self.key)

    def _choose_target(self, key: _Key) -> None:
        """Choose the buffer of the present message: that of its receive, or new memory."""
        if waiting := self.receives.get(key):
            # Into the caller's buffer at once, without a copy.
            self.receiver = waiting.popleft()
            self.target = self._checked_view(self.receiver, self.length)
        else:
            self.early_data = self._allocate(self.length)
            self.target = self.early_data.data

    def _allocate(self, length: int) -> Array:
        try:
            if 0 <= length <= _MAX_EARLY_BYTES:
                return np.empty(length, np.uint8)
        except MemoryError:
            pass
        raise ConnectionError(f"{self.peer} announced a message of {length} bytes, for which there is no memory")

    def _finish_message(self, key: _Key) -> None:
        """Complete the present message: mark its receive as done, or store the data."""
        self.target, self.key = None, None
        receiver, self.receiver = self.receiver, None
        if receiver is not None:
            receiver.done = True
            self.pending -= 1
        # ``receive`` queued the request, as ``early`` did not have this message yet.
        elif waiting := self.receives.get(key):  # its receive started while the data arrived
            self._deliver(waiting.popleft(), self.early_data)
            self.pending -= 1
        else:
            self.early[key].append(self.early_data)

    def _deliver(self, request: Request, data: Array) -> None:
        self._checked_view(request, data.size)[:] = data.data
        request.done = True

    def _checked_view(self, request: Request, length: int) -> memoryview:
        if not 0 <= length <= len(request.view):
            raise ConnectionError(f"{self.peer} sent {length} bytes where {len(request.view)} were expected")
        return request.view[:length]

    def _recv_into(self, target: memoryview) -> int:
        count = self.sock.recv_into(target)
        if not count:
            # With an errno, unlike the errors of a wrong length: ``_describe_lost`` then looks for other peers that
            # have gone.
            raise ConnectionResetError(errno.ECONNRESET, "it closed the connection")
        return count

    def drop_sends(self) -> None:
        """Discard the queued sends, after the peer closed the connection."""
        for _, request in self.sends:
            if request is not None:
                request.done = True
        self.sends.clear()

    def has_ended(self) -> bool:
        """Return whether the peer closed the connection, as far as the kernel knows now."""
        try:
            # Peek: the byte belongs to a message. No byte without an error means that the peer closed its end.
            return not self.sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True


class ConnectionMesh:
    """All sockets of a process.

    Args:
        sockets: for each peer rank, a socket and the peer's name for messages.
    """

    def __init__(self, sockets: dict[int, tuple[socket.socket, str]]) -> None:
        self.connections = {rank: _Connection(sock, peer) for rank, (sock, peer) in sockets.items()}
        self.lock, self.subgroup_counts = threading.RLock(), defaultdict[tuple[int, ...], int](int)
        for connection in self.connections.values():
            # One thread serves all sockets. A blocking send to a peer that sends to this rank at the same moment would
            # be a deadlock when both kernel buffers are full.
            connection.sock.setblocking(False)

    def progress(self) -> None:
        """Send and receive as many bytes as possible without blocking.

        Raises:
            ConnectionError: a peer closed its connection; the message names the peer.
        """
        with self.lock:
            for connection in self.connections.values():
                if connection.sends:
                    try:
                        connection.flush()
                    except BlockingIOError:
                        pass
                    except ConnectionError:
                        # The peer is lost, but its last messages may still be unread in the kernel. Read them first.
                        connection.drop_sends()
                if connection.pending:
                    try:
                        connection.read()
                    except BlockingIOError:
                        pass
                    except ConnectionError as error:
                        raise ConnectionError(self._describe_lost(connection, error)) from None

    def _describe_lost(self, connection: _Connection, error: ConnectionError) -> str:
        """Return a message on all lost peers: the one that failed first may not be the one noticed first."""
        if error.errno is None:
            return str(error)
        lost = [other.peer for other in self.connections.values() if other is connection or other.has_ended()]
        return (
            f"{' and '.join(lost)} {'has' if len(lost) == 1 else 'have'} gone ({error.strerror}): see their last output"
        )

    def sleep(self, seconds: float) -> None:
        """Sleep until a socket can make progress, or until the seconds are over."""
        # ``poll`` and not ``select``: FD_SETSIZE limits ``select`` to descriptors below 1,024, and a job has a socket
        # for each pair of ranks.
        poll = select.poll()
        with self.lock:
            for connection in self.connections.values():
                flags = (select.POLLIN if connection.pending else 0) | (select.POLLOUT if connection.sends else 0)
                if flags:
                    poll.register(connection.sock, flags)
        # Outside the lock: a thread that sends to another group must not wait for this sleep. The kernel counts whole
        # milliseconds.
        poll.poll(max(seconds * 1e3, 1.0))

    def close(self) -> None:
        """Close all sockets; sent data still arrive at the peers."""
        for connection in self.connections.values():
            with suppress(OSError):
                connection.sock.shutdown(socket.SHUT_WR)
                # A close with unread data makes the kernel reset the connection, and the peer may lose sent data.
                while connection.sock.recv(1 << 16):
                    pass
            connection.sock.close()


class TcpMessages:
    """Messages among some ranks; implements ``choros.comm.p2p.interface.PointToPoint``.

    Args:
        mesh: ConnectionMesh. The connections, by rank of the job.
        job_rank: int. This process's rank in the job.
        ranks: sequence of int. The ranks of the job that are members, in the order of the group.
        group: int. Number of the group in message headers. Defaults to 0, the group of all ranks.
    """

    name, patience, concurrent = "TCP", 0.0, False
    errors: tuple[type[Exception], ...] = (OSError,)

    def __init__(self, mesh: ConnectionMesh, job_rank: int, ranks: Sequence[int], group: int = 0) -> None:
        self._mesh, self._job_rank, self._ranks, self._group = mesh, job_rank, tuple(ranks), group
        self.rank, self.size = self._ranks.index(job_rank), len(self._ranks)
        self.sleep, self._freed = mesh.sleep, False

    def receive(self, array: Array, rank: int, tag: int) -> Request:
        """Start to receive a message into a flat uint8 array."""
        request = Request((self._group, tag), array.data)
        with self._mesh.lock:
            self._mesh.connections[self._ranks[rank]].receive(request)
        return request

    def send(self, array: Array, rank: int, tag: int) -> Request:
        """Start to send a flat uint8 array."""
        request = Request((self._group, tag), array.data)
        header = memoryview(_HEADER.pack(self._group, tag, array.nbytes))
        with self._mesh.lock:
            sends = self._mesh.connections[self._ranks[rank]].sends
            # Header and data are queued under one lock: a message of another thread between them would break the
            # stream.
            sends.append((header, None if array.nbytes else request))
            if array.nbytes:
                sends.append((request.view, request))
        return request

    def done(self, requests: Sequence[Request]) -> bool:
        """Make progress on all messages; return whether all requests are done."""
        self._mesh.progress()
        return all(request.done for request in requests)

    def is_done(self, request: Request) -> bool:
        """Return whether one request is done."""
        return request.done

    def check_thread(self) -> str:
        """Return ``""``: any thread may call."""
        return ""

    def settle(self) -> None:
        """Do nothing: the sockets need no further setup."""

    def part(self, ranks: Sequence[int]) -> TcpMessages:
        """Return the messages among some of the ranks, on the same sockets."""
        members = tuple(self._ranks[rank] for rank in ranks)
        with self._mesh.lock:
            # The number is part of the label: a second group of the same members must not receive late messages of the
            # first. All members count alike, as they make the same calls.
            self._mesh.subgroup_counts[members] += 1
            label = repr((self._group, members, self._mesh.subgroup_counts[members])).encode()
        return TcpMessages(
            self._mesh,
            self._job_rank,
            members,
            int.from_bytes(hashlib.blake2b(label, digest_size=8).digest(), "little"),
        )

    def is_closed(self) -> bool:
        """Return whether the sockets are closed."""
        return self._freed

    def free(self, broken: bool) -> None:
        """Close the sockets, if this is the group of all ranks."""
        self._freed = True
        # Subgroups share the sockets, so only the group of all ranks may close them.
        if not self._group:
            self._mesh.close()
