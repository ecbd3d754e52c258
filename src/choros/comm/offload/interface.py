"""Libraries that carry a ``OffloadGroup``'s sums: PyTorch's gloo and NCCL, and JAX's collectives. Imports neither."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from choros.types import Array

# Looks whether a call has been made: its result, which is the carrier's until its next call, or None.
Look = Callable[[], Array | None]


class CollectiveBackend(Protocol):
    """One rank's end of a library's collectives. Nothing blocks; all ranks make the same calls in the same order.

    Attributes:
        name: str. The library and what it uses, for people: ``torch (gloo)``.
        takes: names of the dtypes that it can sum.
    """

    name: str
    takes: tuple[str, ...]

    def sum(self, x: Array) -> Look:
        """Begin the sum over ranks of flat ``x``, which stays as it is meanwhile; looking raises what went wrong."""
        ...

    def broadcast(self, x: Array, root: int) -> Look:
        """Begin to give all ranks the root's flat bytes; the other ranks' are only as long."""
        ...

    def among(self, ranks: Sequence[int]) -> CollectiveBackend:
        """Return the carrier of some of the ranks, in that order; only they call, all at the same time."""
        ...

    def close(self) -> None:
        """Free what is held; a call that has not ended, as it may hang, is not waited for."""
        ...
