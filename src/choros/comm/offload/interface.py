"""Interface of a library that computes an ``OffloadGroup``'s sums: PyTorch (gloo, NCCL) or JAX. Imports neither."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from choros.types import Array

# Poll of a call: returns None while the call runs, then its result. The result is valid until the backend's next call.
Poll = Callable[[], Array | None]


class CollectiveBackend(Protocol):
    """Collectives of a library on one rank. No method blocks; all ranks make the same calls in the same order.

    Attributes:
        name: str. The library and its transport, for messages: ``torch (gloo)``.
        dtypes: tuple of str. Names of the dtypes that the library can sum.
    """

    name: str
    dtypes: tuple[str, ...]

    def sum(self, x: Array) -> Poll:
        """Start the sum over ranks of a flat array, which must not change meanwhile; the poll raises errors."""
        ...

    def broadcast(self, x: Array, root: int) -> Poll:
        """Start the broadcast of the root's flat uint8 array; on the other ranks only the length of ``x`` counts."""
        ...

    def among(self, ranks: Sequence[int]) -> CollectiveBackend:
        """Return the backend of some of the ranks, in that order. These ranks alone call, all at the same time."""
        ...

    def close(self) -> None:
        """Free the resources without a wait for a call that has not ended, as such a call may hang."""
        ...
