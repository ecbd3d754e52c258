"""Messages over one socket a pair of ranks; groups of some of the ranks use the same sockets.

On the wire a message is a head (which group, which tag, how many bytes) and the bytes. Nothing is read of a socket of
which nothing is awaited; what comes there before what is awaited is kept aside until it is asked for.
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
from typing import Any

import numpy as np

from choros.types import Array

_HEAD = struct.Struct("<Qqq")  # group, tag, bytes
_MOST = 1 << 40  # bytes of a message that nobody awaits yet
_Key = tuple[int, int]


class Request:
    """One message that is to go or to come."""

    __slots__ = ("done", "key", "view")

    def __init__(self, key: _Key, view: memoryview) -> None:
        self.key, self.view, self.done = key, view, False


@dataclass
class _Line:
    """The socket to one rank, and what is under way on it."""

    end: socket.socket
    who: str
    out: deque[tuple[memoryview, Request | None]] = field(default_factory=deque)
    wanted: dict[_Key, deque[Request]] = field(default_factory=lambda: defaultdict(deque))
    early: dict[_Key, deque[Array]] = field(default_factory=lambda: defaultdict(deque))
    head: bytearray = field(default_factory=lambda: bytearray(_HEAD.size))
    got: int = 0  # bytes of the head
    key: _Key | None = None  # of the message that comes now
    length: int = 0
    into: memoryview | None = None
    taker: Request | None = None
    aside: Array = field(default_factory=lambda: np.empty(0, np.uint8))
    awaited: int = 0  # requests that are not done

    def ask(self, request: Request) -> None:
        """Have the next message of a key written where the request says."""
        if kept := self.early.get(request.key):
            self._give(request, kept.popleft())
            return
        self.wanted[request.key].append(request)
        self.awaited += 1

    def push(self) -> None:
        """Send what the system takes now."""
        while self.out:
            view, request = self.out[0]
            sent = self.end.send(view)
            if sent < len(view):
                self.out[0] = view[sent:], request
                continue
            self.out.popleft()
            if request is not None:
                request.done = True

    def pull(self) -> None:
        """Take what has come, as long as something is awaited."""
        while self.awaited:
            if self.key is None:
                self.got += self._read(memoryview(self.head)[self.got :])
                if self.got < _HEAD.size:
                    continue
                group, tag, self.length = _HEAD.unpack(self.head)
                self.key, self.got = (group, tag), 0
            if self.into is None:
                self._aim(self.key)
            if self.into:
                self.into = self.into[self._read(self.into) :]
            if not self.into:
                self._end(self.key)

    def _aim(self, key: _Key) -> None:
        """Choose where the message that comes now goes."""
        if asked := self.wanted.get(key):
            self.taker = asked.popleft()
            self.into = self._fit(self.taker, self.length)
        else:
            self.aside = self._room(self.length)
            self.into = self.aside.data

    def _room(self, length: int) -> Array:
        try:
            if 0 <= length <= _MOST:
                return np.empty(length, np.uint8)
        except MemoryError:
            pass
        raise ConnectionError(f"{self.who} announced a message of {length} bytes, for which there is no room here")

    def _end(self, key: _Key) -> None:
        """The message has come."""
        self.into, self.key = None, None
        taker, self.taker = self.taker, None
        if taker is not None:
            taker.done = True
            self.awaited -= 1
        elif asked := self.wanted.get(key):  # asked for meanwhile
            self._give(asked.popleft(), self.aside)
            self.awaited -= 1
        else:
            self.early[key].append(self.aside)

    def _give(self, request: Request, data: Array) -> None:
        self._fit(request, data.size)[:] = data.data
        request.done = True

    def _fit(self, request: Request, length: int) -> memoryview:
        if not 0 <= length <= len(request.view):
            raise ConnectionError(f"{self.who} sent {length} bytes where {len(request.view)} were expected")
        return request.view[:length]

    def _read(self, into: memoryview) -> int:
        count = self.end.recv_into(into)
        if not count:
            raise ConnectionResetError(errno.ECONNRESET, "it closed the connection")
        return count

    def drop(self) -> None:
        """Send nothing more: nobody is there."""
        for _, request in self.out:
            if request is not None:
                request.done = True
        self.out.clear()

    def ended(self) -> bool:
        """Return whether the connection is at its end, as far as is known now."""
        try:
            return not self.end.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True


class ConnectionMesh:
    """All sockets of a process.

    Args:
        ends: by rank, a socket and what to call who is behind it.
    """

    def __init__(self, ends: dict[int, tuple[socket.socket, str]]) -> None:
        self.lines = {rank: _Line(end, who) for rank, (end, who) in ends.items()}
        self.lock, self.made = threading.RLock(), defaultdict[tuple[int, ...], int](int)
        for line in self.lines.values():
            line.end.setblocking(False)

    def carry(self) -> None:
        """Carry what can be carried now.

        Raises:
            OSError: a rank has gone; names it.
        """
        with self.lock:
            for line in self.lines.values():
                if line.out:
                    try:
                        line.push()
                    except BlockingIOError:
                        pass
                    except ConnectionError:  # what it said before it went may still lie here, to be read first
                        line.drop()
                if line.awaited:
                    try:
                        line.pull()
                    except BlockingIOError:
                        pass
                    except ConnectionError as error:
                        raise ConnectionError(self._gone(line, error)) from None

    def _gone(self, line: _Line, error: ConnectionError) -> str:
        """Say who has gone: all of them, as one that was noticed late may be the cause."""
        if error.errno is None:
            return str(error)
        gone = [one.who for one in self.lines.values() if one is line or one.ended()]
        return (
            f"{' and '.join(gone)} {'has' if len(gone) == 1 else 'have'} gone ({error.strerror}): see what they printed"
        )

    def rest(self, seconds: float) -> None:
        """Sleep until something comes or can go, or the time is over."""
        poll = select.poll()
        with self.lock:
            for line in self.lines.values():
                flags = (select.POLLIN if line.awaited else 0) | (select.POLLOUT if line.out else 0)
                if flags:
                    poll.register(line.end, flags)
        poll.poll(max(seconds * 1e3, 1.0))

    def close(self) -> None:
        """Close all; what has been sent still arrives."""
        for line in self.lines.values():
            with suppress(OSError):
                line.end.shutdown(socket.SHUT_WR)
                while line.end.recv(1 << 16):  # what lies here unread would make the system cut the connection off
                    pass
            line.end.close()


class TcpMessages:
    """The messages among some ranks; implements ``choros.comm.p2p.interface.PointToPoint``.

    Args:
        links: ConnectionMesh. By rank of the job.
        me: int. This rank of the job.
        ranks: int. Which ranks of the job are in it, in their order here.
        group: int. What tells their messages from other groups'.
    """

    name, patience = "TCP", 0.0
    errors: tuple[type[Exception], ...] = (OSError,)

    def __init__(self, links: ConnectionMesh, me: int, ranks: Sequence[int], group: int = 0) -> None:
        self._links, self._me, self._ranks, self._group = links, me, tuple(ranks), group
        self.rank, self.size = self._ranks.index(me), len(self._ranks)
        self.rest, self._freed = links.rest, False

    def receive(self, array: Array, rank: int, tag: int) -> Any:
        """Have a message written into flat bytes."""
        request = Request((self._group, tag), array.data)
        with self._links.lock:
            self._links.lines[self._ranks[rank]].ask(request)
        return request

    def send(self, array: Array, rank: int, tag: int) -> Any:
        """Have flat bytes sent."""
        request = Request((self._group, tag), array.data)
        head = memoryview(_HEAD.pack(self._group, tag, array.nbytes))
        with self._links.lock:
            out = self._links.lines[self._ranks[rank]].out
            out.append((head, None if array.nbytes else request))
            if array.nbytes:
                out.append((request.view, request))
        return request

    def done(self, requests: Sequence[Any]) -> bool:
        """Carry what can be carried now; whether all requests are done."""
        self._links.carry()
        return all(request.done for request in requests)

    def came(self, request: Any) -> bool:
        """Return whether one request is done."""
        return bool(request.done)

    def check_thread(self) -> str:
        """Any thread may call."""
        return ""

    def settle(self) -> None:
        """Nothing is to be done."""

    def part(self, ranks: Sequence[int]) -> TcpMessages:
        """The messages among some of the ranks, on the same sockets."""
        among = tuple(self._ranks[rank] for rank in ranks)
        with self._links.lock:
            self._links.made[among] += 1
            name = repr((self._group, among, self._links.made[among])).encode()
        return TcpMessages(
            self._links, self._me, among, int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little")
        )

    def over(self) -> bool:
        """Return whether the sockets are closed."""
        return self._freed

    def free(self, broken: bool) -> None:
        """Close the sockets, where these are the messages of the whole job."""
        self._freed = True
        if not self._group:
            self._links.close()
