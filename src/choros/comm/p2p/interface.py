"""Messages between every pair of ranks: what a ``Mesh`` is built on, whoever carries them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from choros.types import Array

FRAME, DATA = 24_101, 24_102  # tags: what a rank that leaves says is never taken for data


class PointToPoint(Protocol):
    """One rank's end. Nothing blocks; between two ranks, messages of one tag come in the order in which they were sent.

    Attributes:
        rank, size: int.
        name: str. What carries them, for people.
        errors: the exceptions that carrying raises.
        patience: float. Seconds that a rank which ends waits for the others to leave, as Python ends; 0: it need not.
    """

    rank: int
    size: int
    name: str
    errors: tuple[type[Exception], ...]
    patience: float

    def receive(self, array: Array, rank: int, tag: int) -> Any:
        """Have the next message of this tag from a rank, which may be shorter, written into flat bytes; a request."""
        ...

    def send(self, array: Array, rank: int, tag: int) -> Any:
        """Have flat bytes, which stay as they are until it has gone, sent; returns a request."""
        ...

    def done(self, requests: Sequence[Any]) -> bool:
        """Carry what can be carried now; whether all requests are done."""
        ...

    def came(self, request: Any) -> bool:
        """Return whether one request is done."""
        ...

    def rest(self, seconds: float) -> None:
        """Give up the core for so long, or until there is something to do."""
        ...

    def check_thread(self) -> str:
        """Return why this thread may not call, or ``""``."""
        ...

    def settle(self) -> None:
        """All ranks are there."""
        ...

    def part(self, ranks: Sequence[int]) -> PointToPoint:
        """Return the messages among some of the ranks, in that order; only they call, all at the same time."""
        ...

    def over(self) -> bool:
        """Return whether nothing can be carried any more."""
        ...

    def free(self, broken: bool) -> None:
        """Free what is held: all ranks have left, or a call has failed and nothing works any more."""
        ...
