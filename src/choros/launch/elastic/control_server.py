"""The driver's connections to the processes of an elastic job: one socket for each, for messages in both directions."""

from __future__ import annotations

import json
import queue
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from choros.comm.messages import header_of
from choros.comm.tcp.auth_socket import AuthListener
from choros.comm.tcp.rpc import RpcConnection
from choros.errors import ChorosError, CommTimeoutError
from choros.launch.elastic.messages import OF_PROCESSES, Connected, ProcessGreeting

_NO_TIMEOUT = 1e9  # seconds: a process may be silent for as long as it lives
_MAX_QUEUED_BYTES = 1 << 23  # for one process, which does not read
_CLOSE_SECONDS = 2.0  # in which ``close`` sends the queued messages of all processes


class ControlServer:
    """Server that accepts processes that know the job's secret, and receives their messages.

    Args:
        listener: AuthListener. Accepts the connections; closed by ``close``.
        on_message: function called in a thread after each message is put into ``received``.

    Attributes:
        received: queue of (number of the process, message). A new connection adds ``Connected``.

    Example:
        >>> from choros.comm.tcp.auth_socket import dial
        >>> from choros.launch.elastic.messages import Ping, ProcessGreeting
        >>> control_server = ControlServer(AuthListener("127.0.0.1", b"a secret", ProcessGreeting))
        >>> socket = dial(control_server.address, b"a secret", ProcessGreeting(3), 5.0)
        >>> process = RpcConnection(socket, "the control server", 5.0)
        >>> control_server.received.get(timeout=5.0), control_server.send(3, Ping()), process.receive()[0]
        ((3, Connected()), True, {'op': 'Ping'})
        >>> control_server.close(), process.close()
        (None, None)
    """

    def __init__(
        self, listener: AuthListener[ProcessGreeting], on_message: Callable[[], object] = lambda: None
    ) -> None:
        self.address, self._listener, self._on_message = listener.address, listener, on_message
        self.received: queue.SimpleQueue[tuple[int, object]] = queue.SimpleQueue()
        self._connections: dict[int, _ProcessConnection] = {}
        self._closed = False
        threading.Thread(target=self._accept, name="choros-control", daemon=True).start()

    def send(self, number: int, message: object) -> bool:
        """Queue a message for a process. Return False if it is not connected, or does not read."""
        connection = self._connections.get(number)
        return connection is not None and connection.send(header_of(message))

    def close(self) -> None:
        """Stop accepting, send queued messages for at most 2 s, then close all connections."""
        self._closed = True
        self._listener.close()
        limit, connections = time.monotonic() + _CLOSE_SECONDS, list(self._connections.values())
        for connection in connections:
            connection.finish()
        for connection in connections:
            connection.close(limit - time.monotonic())

    def _accept(self) -> None:
        while not self._closed:
            try:
                greeting, sock = self._listener.next_peer(1.0)
            except CommTimeoutError:
                continue
            number = greeting.member
            # Each process connects once. A second connection with its number cannot be its own.
            if number in self._connections:
                sock.close()
                continue
            connection = self._connections[number] = _ProcessConnection(sock, f"process {number} of the job")
            self._receive(number, Connected())
            threading.Thread(target=self._listen, args=(number, connection), name="choros-listen", daemon=True).start()

    def _listen(self, number: int, connection: _ProcessConnection) -> None:
        with suppress(ChorosError, ValueError):  # the process has ended; the driver sees its exit status
            while True:
                self._receive(number, OF_PROCESSES.decode(connection.channel.receive()[0]))

    def _receive(self, number: int, message: object) -> None:
        self.received.put((number, message))
        self._on_message()


class _ProcessConnection:
    """The socket to one process, with a thread that sends, so that the driver never blocks on a slow process."""

    def __init__(self, sock: socket.socket, peer: str) -> None:
        self.channel, self._socket = RpcConnection(sock, peer, _NO_TIMEOUT), sock
        self._queue: queue.SimpleQueue[tuple[int, dict[str, Any]] | None] = queue.SimpleQueue()
        self._lock, self._queued_bytes, self._broken = threading.Lock(), 0, False
        self._thread = threading.Thread(target=self._send, name="choros-send", daemon=True)
        self._thread.start()

    def send(self, head: dict[str, Any]) -> bool:
        """Queue a message. Return False if the connection is broken, or the process does not read."""
        size = len(json.dumps(head))
        with self._lock:
            # An empty queue takes a message of any size, else a large message could never be sent.
            if self._broken or (self._queued_bytes and self._queued_bytes + size > _MAX_QUEUED_BYTES):
                return False
            self._queued_bytes += size
        self._queue.put((size, head))
        return True

    def finish(self) -> None:
        """End the thread that sends, once it has sent all queued messages."""
        self._queue.put(None)

    def close(self, seconds: float) -> None:
        """Wait at most ``seconds`` for queued messages to be sent, then close the socket."""
        self._thread.join(max(seconds, 0.0))
        with suppress(OSError):  # the other end has closed it
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that sends, and the one that listens
        self.channel.close()

    def _send(self) -> None:
        while (item := self._queue.get()) is not None:
            size, head = item
            try:
                self.channel.send(head)
            except (ChorosError, ValueError):
                self._broken = True
                return
            with self._lock:
                self._queued_bytes -= size
