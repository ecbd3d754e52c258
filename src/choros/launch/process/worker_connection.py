"""The worker's end of the connection, the first argument of each function that the caller calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from choros.launch.process.frame import Frame, Message
from choros.launch.process.unix_socket import UnixConnection


class ShutdownRequested(SystemExit):
    """Request of the caller that this worker end; ``WorkerConnection.receive`` raises it, also within a call."""


class WorkerConnection:
    """A worker's connection with the caller.

    Attributes:
        rank, size: int. The rank of this worker, and the number of workers of the pool.
    """

    def __init__(self, wire: UnixConnection, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self._wire = wire

    def send(self, message: Message, blobs: Sequence[Any] = (), fds: Sequence[int] = ()) -> None:
        """Send an event to the caller; see ``UnixConnection.send``."""
        self._wire.send(message, blobs, fds)

    def receive(self, timeout: float | None) -> Frame:
        """Return the caller's next message, its blobs and its descriptors; see ``UnixConnection.receive``.

        Raises:
            ShutdownRequested: the caller asks this worker to end; do not catch it.
        """
        frame = self._wire.receive(timeout)
        if frame[0].get("call") == "exit":
            raise ShutdownRequested(0)
        return frame

    def fileno(self) -> int:
        """Return the connection's descriptor, to wait on."""
        return self._wire.fileno()

    @property
    def pending(self) -> bool:
        """True if a frame has been read from the connection and not yet been received."""
        return self._wire.pending

    def poll(self) -> bool:
        """Return whether ``receive`` would return without waiting."""
        return self._wire.poll()
