"""Interface of point-to-point messages between every pair of ranks, which ``FullMesh`` uses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from choros.types import Array

RequestHandle = Any  # an implementation's own object, such as mpi4py's Request; callers only hand it back
FRAME, DATA = 24_101, 24_102  # tags: two tags, so that a leave message, which is a frame, is never received as data
MAX_MESSAGE_BYTES = 1 << 30  # bytes of one message: MPI counts with 32 bits


def pieces(array: Array) -> list[Array]:
    """Return the bytes of a flat array in pieces, each short enough for one message.

    Example:
        >>> [piece.size for piece in pieces(np.zeros(3))]
        [24]
    """
    flat = array.view(np.uint8)
    return [flat[begin : begin + MAX_MESSAGE_BYTES] for begin in range(0, flat.size, MAX_MESSAGE_BYTES)]


class PointToPoint(Protocol):
    """Point-to-point messages of one rank. No method blocks.

    Messages of one tag between two ranks arrive in the order of their sends.

    Attributes:
        rank, size: int.
        name: str. Name of the transport, for messages.
        errors: tuple of exception types that the transport raises.
        patience: float. Seconds that a rank waits at exit for the others to leave; 0 if it need not wait.
        concurrent: bool. Whether several threads may call at the same time.
    """

    rank: int
    size: int
    name: str
    errors: tuple[type[Exception], ...]
    patience: float
    concurrent: bool

    def receive(self, array: Array, rank: int, tag: int) -> RequestHandle:
        """Start to receive the rank's next message of this tag into a flat uint8 array; return a request.

        The message may be shorter than the array.
        """
        ...

    def send(self, array: Array, rank: int, tag: int) -> RequestHandle:
        """Start to send a flat uint8 array; return a request. The array must not change until the request is done."""
        ...

    def done(self, requests: Sequence[RequestHandle]) -> bool:
        """Make progress on all messages; return whether all requests are done."""
        ...

    def is_done(self, request: RequestHandle) -> bool:
        """Return whether one request is done."""
        ...

    def sleep(self, seconds: float, /) -> None:
        """Sleep for the seconds, or until a message can make progress."""
        ...

    def check_thread(self) -> str:
        """Return the reason why this thread may not call, or ``""``."""
        ...

    def settle(self) -> None:
        """Finish the setup that needs all ranks; called once, after all ranks have joined."""
        ...

    def part(self, ranks: Sequence[int]) -> PointToPoint:
        """Return the messages among some of the ranks, in that order. These ranks alone call, all at the same time."""
        ...

    def is_closed(self) -> bool:
        """Return whether the transport has ended."""
        ...

    def free(self, broken: bool) -> None:
        """Free the resources. All ranks have left, or ``broken`` is true because a call has failed."""
        ...
