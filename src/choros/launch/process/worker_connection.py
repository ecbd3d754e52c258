"""The worker's end of the connection, the first argument of each function that the caller calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from choros.comm.messages import Messages
from choros.launch.process.frame import Frame, Message
from choros.launch.process.unix_socket import UnixConnection


@dataclass(frozen=True)
class WorkerStarted:
    """First event of a worker: its process has started and serves calls."""

    rank: int
    pid: int


@dataclass(frozen=True)
class Call:
    """Request to call a function, which continues until it returns or raises.

    Attributes:
        function: str. The module and the name, as in ``"package.module:function"``.
        arguments: dict. Passed to the function as they are.
        module_path: list of str. The caller's ``sys.path``.
    """

    function: str
    arguments: dict[str, Any]
    module_path: list[str]


@dataclass(frozen=True)
class ExitRequest:
    """Request that the worker end, also within a call."""


class ShutdownRequested(SystemExit):
    """Request of the caller that this worker end; ``WorkerConnection.receive`` raises it, also within a call."""


_EXIT = Messages(ExitRequest)


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
        if _EXIT.has(frame[0]):
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
