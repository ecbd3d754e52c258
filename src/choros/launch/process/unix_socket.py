"""Messages between two processes of one host: JSON, raw bytes and file descriptors over an AF_UNIX stream.

``frame`` defines the format. The descriptors are sent with the first bytes of the frame (``SCM_RIGHTS``). Two ends that
both send large messages do not deadlock, because an end that cannot write reads incoming data meanwhile.
"""

from __future__ import annotations

import array
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from choros.comm.fork_hooks import close_in_children
from choros.errors import CommTimeoutError, PeerLostError
from choros.launch.process.frame import MOST_FDS, PREFIX, Frame, Message, lengths_and_message, pack, unpack_prefix

STALLED = 300.0

_ANCILLARY = socket.CMSG_SPACE(MOST_FDS * array.array("i").itemsize)
_NO_SIGPIPE = getattr(socket, "MSG_NOSIGNAL", 0)  # an error instead of SIGPIPE if the other end is closed
_CLOEXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)  # child processes do not inherit received descriptors


class UnixConnection:
    """One end of a connection. Any thread may send; one thread receives at a time.

    Args:
        sock: a connected AF_UNIX stream socket; this object owns it from now on.
        peer: the name of the other end in errors. Defaults to "the other process".

    Example:
        >>> left, right = UnixConnection.pair()
        >>> left.send({"call": "x"}, [b"abc"])
        >>> right.receive(1.0)
        ({'call': 'x'}, [bytearray(b'abc')], [])
        >>> left.close(), right.close()
        (None, None)
    """

    def __init__(self, sock: socket.socket, peer: str = "the other process") -> None:
        sock.setblocking(False)
        self.peer = peer
        self._sock = sock
        self._sending = threading.Lock()
        self._receiving = threading.Lock()
        self._frames: deque[Frame] = deque()
        self._end_reason = ""  # the reason why nothing more can be received, or ""
        self._fds: list[int] = []
        self._broken_off = False  # a send was cut short, so the other end could not parse the next frame
        self._begin_frame()
        close_in_children(self._sock)

    @classmethod
    def pair(cls) -> tuple[UnixConnection, UnixConnection]:
        """Return two connections that are connected to each other."""
        left_end, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        return cls(left_end), cls(right)

    def fileno(self) -> int:
        """Return the socket's descriptor, to wait on; -1 when closed."""
        return self._sock.fileno()

    def send(
        self, message: Message, blobs: Sequence[Any] = (), fds: Sequence[int] = (), stalled: float = STALLED
    ) -> None:
        """Send one whole frame; wait as long as the other end keeps reading.

        Args:
            message: dict of JSON types.
            blobs: contiguous buffers (bytes, numpy arrays, memoryviews); not copied.
            fds: file descriptors of this process; the other end gets duplicates.
            stalled: seconds without progress after which the send fails. Defaults to 300.

        Raises:
            InvalidInputError: a part has a wrong type or is over a limit; nothing was sent.
            PeerLostError: the other end has closed the connection.
            CommTimeoutError: the other end read nothing for ``stalled`` seconds.
        """
        head, views = pack(message, blobs, fds)
        with self._sending:
            if self._broken_off:
                raise PeerLostError(f"an earlier message to {self.peer} was broken off, so no other can follow it")
            # Set until the whole frame is sent: after an error in the middle, the other end would take the next frame
            # for the rest of this one.
            self._broken_off = True
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
            view = memoryview(head)
            # The descriptors go with the first bytes that the kernel takes. A second call must not send them again.
            while rights:
                try:
                    view = view[self._sock.sendmsg([view], rights, _NO_SIGPIPE) :]
                    rights = []
                except BlockingIOError:
                    self._wait_until_writable(stalled)
                except OSError as error:
                    raise self._peer_lost(error) from None
            for part in (view, *views):
                self._write(part, stalled)
            self._broken_off = False

    def receive(self, timeout: float | None) -> Frame:
        """Return the next message.

        Args:
            timeout: seconds to wait; None waits as long as the other end lives.

        Returns:
            The message, its blobs, and its file descriptors, which the caller must close.

        Raises:
            PeerLostError: the other end has closed the connection, or sent something that is not a frame.
            CommTimeoutError: no whole message came in time.
        """
        limit = None if timeout is None else time.monotonic() + timeout
        if not self._receiving.acquire(timeout=-1 if timeout is None else max(0.0, timeout)):
            raise CommTimeoutError(f"another thread has been receiving from {self.peer} for {timeout} s")
        try:
            while True:
                if not self._frames:
                    self._read_available()
                if self._frames:
                    return self._frames.popleft()
                if self._end_reason:
                    raise PeerLostError(self._end_reason)
                remaining = None if limit is None else limit - time.monotonic()
                if remaining is not None and remaining <= 0:
                    raise CommTimeoutError(f"{self.peer} sent nothing for {timeout:g} s")
                _wait(self._sock, select.POLLIN, remaining)
        finally:
            self._receiving.release()

    @property
    def pending(self) -> bool:
        """True if ``receive`` would return without looking at the socket."""
        return bool(self._frames or self._end_reason)

    def poll(self) -> bool:
        """Return whether ``receive`` would return, or raise PeerLostError, without waiting."""
        if not self._receiving.acquire(blocking=False):
            return False
        try:
            if not self._frames:
                self._read_available()
            return bool(self._frames or self._end_reason)
        finally:
            self._receiving.release()

    def close(self) -> None:
        """Close the socket and all descriptors of messages that were not received; a second call does nothing."""
        self._end_reason = self._end_reason or f"the connection to {self.peer} is closed"
        self._sock.close()
        for fd in [fd for frame in self._frames for fd in frame[2]] + self._fds:
            os.close(fd)
        self._frames.clear()
        self._fds = []

    def _write(self, view: memoryview, stalled: float) -> None:
        while view:
            try:
                view = view[self._sock.send(view, _NO_SIGPIPE) :]
            except BlockingIOError:
                self._wait_until_writable(stalled)
            except OSError as error:
                raise self._peer_lost(error) from None

    def _peer_lost(self, error: OSError) -> PeerLostError:
        return PeerLostError(f"{self.peer} has closed the connection ({error.strerror or error})")

    def _wait_until_writable(self, stalled: float) -> None:
        """Wait until the socket is writable; meanwhile read incoming data, unless another thread does."""
        limit = time.monotonic() + stalled
        while True:
            acquired = self._receiving.acquire(blocking=False)
            try:
                # If both ends only wrote, both buffers could be full forever.
                reading = select.POLLIN if acquired and not self._end_reason else 0
                # Another thread receives now. If it stops, this thread must read, so it tries again soon.
                remaining = min(0.05, limit - time.monotonic()) if not acquired else limit - time.monotonic()
                ready = _wait(self._sock, select.POLLOUT | reading, max(0.0, remaining))
                if acquired and ready & select.POLLIN:
                    self._read_available()
            finally:
                if acquired:
                    self._receiving.release()
            # This includes an error of the socket, which the next write reports.
            if ready & ~select.POLLIN:
                return
            if time.monotonic() > limit:
                raise CommTimeoutError(
                    f"{self.peer} has read nothing for {stalled:g} s, so a message to it was given up"
                )

    def _begin_frame(self) -> None:
        """Prepare to read a new frame."""
        self._stage = "prefix"
        self._buffer = memoryview(bytearray(PREFIX.size))
        self._filled = 0
        self._fds = []
        self._expected_fds = 0
        self._message: Message = {}
        self._blobs: list[bytearray] = []
        self._next_blob = 0

    def _read_available(self) -> None:
        """Read all data that have arrived, without waiting."""
        while not self._end_reason:
            while self._filled < len(self._buffer):
                try:
                    count, rights, _, _ = self._sock.recvmsg_into([self._buffer[self._filled :]], _ANCILLARY, _CLOEXEC)
                except BlockingIOError:
                    return
                except OSError as error:
                    self._end_reason = f"the connection to {self.peer} broke ({error.strerror or error})"
                    return
                for level, kind, data in rights:
                    if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                        descriptors = array.array("i")
                        descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
                        self._fds += descriptors
                if count == 0:
                    at_start = self._stage == "prefix" and self._filled == 0
                    where = "" if at_start else " in mid-message"
                    self._end_reason = f"{self.peer} has closed the connection{where}"
                    return
                self._filled += count
            self._advance()

    def _advance(self) -> None:
        """Parse the part of the frame that is complete, and prepare to read the next one."""
        if self._stage == "prefix":
            try:
                head, self._count, self._expected_fds = unpack_prefix(self._buffer)
            except ValueError as error:
                self._end_reason = f"{self.peer} sent what is not a message of Choros: {error}"
                return
            self._stage = "head"
            self._buffer, self._filled = memoryview(bytearray(head)), 0
        elif self._stage == "head":
            self._stage = "blobs"
            try:
                lengths, self._message = lengths_and_message(self._buffer, self._count)
            except ValueError as error:
                self._end_reason = f"{self.peer} sent what is not a message of Choros: {error}"
                return
            self._blobs = [bytearray(length) for length in lengths]
        if self._stage == "blobs":
            if self._next_blob < len(self._blobs):
                self._buffer, self._filled = memoryview(self._blobs[self._next_blob]), 0
                self._next_blob += 1
            else:
                self._finish_frame()

    def _finish_frame(self) -> None:
        if len(self._fds) != self._expected_fds:
            self._end_reason = (
                f"{self.peer} sent {self._expected_fds} descriptors and {len(self._fds)} arrived: "
                "the limit on open files is reached (raise it with ulimit -n)"
            )
            return
        self._frames.append((self._message, self._blobs, self._fds))
        self._begin_frame()


def _wait(sock: socket.socket, events: int, seconds: float | None) -> int:
    """Wait for events of one socket; return the events, or 0 after ``seconds``."""
    poll = select.poll()
    poll.register(sock, events)
    ready = poll.poll(None if seconds is None else max(0.0, seconds) * 1000)
    return ready[0][1] if ready else 0
