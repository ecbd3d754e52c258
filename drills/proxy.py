"""A network that fails on demand: connections of a drill's ranks go through this process, which cuts or delays them."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from typing import Any

_RESET = struct.pack("ii", 1, 0)  # closing then resets the connection, as a firewall does


class Proxy:
    """Connects whoever comes to the address that it asks for first, in a line; one thread a direction.

    Attributes:
        port: int. On the loopback.
    """

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._ends: set[socket.socket] = set()
        self._lock, self._until, self._each = threading.Lock(), 0.0, 0.0
        threading.Thread(target=self._welcome, daemon=True).start()

    def cut(self) -> int:
        """Reset all connections; returns how many there were."""
        with self._lock:
            ends, self._ends = self._ends, set()
        for end in ends:
            with contextlib.suppress(OSError):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                end.shutdown(socket.SHUT_RDWR)
            end.close()
        return len(ends) // 2

    def delay(self, each: float, within: float) -> None:
        """For a while, keep each piece back for so long.

        Args:
            each: float. Seconds.
            within: float. Seconds from now for which this goes on.
        """
        self._each, self._until = each, time.monotonic() + within

    @property
    def open(self) -> int:
        """Connections that there are."""
        return len(self._ends) // 2

    def close(self) -> None:
        """Let nobody else in, and cut all."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()

    def _welcome(self) -> None:
        while True:
            try:
                end, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._join, args=(end,), daemon=True).start()

    def _join(self, end: socket.socket) -> None:
        line = b""
        try:
            while not line.endswith(b"\n"):
                line += end.recv(1)
            host, _, port = line.decode().strip().rpartition(":")
            far = socket.create_connection((host, int(port)), timeout=5.0)
            far.settimeout(None)
        except OSError:
            end.close()
            return
        for each in (end, far):
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._lock:
            self._ends |= {end, far}
        threading.Thread(target=self._pump, args=(far, end), daemon=True).start()
        self._pump(end, far)

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while piece := source.recv(1 << 16):
                if time.monotonic() < self._until:
                    time.sleep(self._each)
                sink.sendall(piece)
        with self._lock:
            self._ends -= {source, sink}
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()


def go_through(port: int) -> None:
    """Have this process's connections go through a proxy.

    Args:
        port: int. Its.
    """
    plain: Any = socket.create_connection

    def create_connection(address: tuple[str, int], *values: Any, **how: Any) -> socket.socket:
        end: socket.socket = plain(("127.0.0.1", port), *values, **how)
        end.sendall(f"{address[0] or '127.0.0.1'}:{address[1]}\n".encode())
        return end

    socket.create_connection = create_connection  # type: ignore[assignment]
