"""A gather of each rank's bytes to one rank."""

from __future__ import annotations

import json
from typing import Protocol, runtime_checkable

import numpy as np

from choros.comm.group import Group
from choros.types import Array


@runtime_checkable
class Collecting(Protocol):
    """A group that can gather bytes to one rank."""

    def collect(self, x: Array, root: int = 0) -> list[Array]:
        """Every rank's flat bytes, in the order of the ranks, on the root; nothing on the others."""
        ...


def collect(group: Group, x: Array, root: int = 0) -> list[Array]:
    """Return every rank's bytes, in the order of the ranks, on the root; an empty list on the others.

    A group of another package may have no ``collect``: then the bytes are broadcast, rank by rank, and only the root
    keeps them.

    Args:
        group: the ranks; all of them call.
        x: flat bytes, of any length. They must not change during the call.
        root: the rank that gets them.

    Example:
        >>> from choros.comm.single_rank_group import SingleRankGroup
        >>> collect(SingleRankGroup(), np.arange(3, dtype="uint8"))
        [array([0, 1, 2], dtype=uint8)]
    """
    if isinstance(group, Collecting):
        return group.collect(x, root)
    pieces = []
    for rank, text in enumerate(group.gather(json.dumps(x.size).encode())):
        piece = group.broadcast(x if rank == group.rank else np.empty(json.loads(text), np.uint8), rank)
        if group.rank == root:
            pieces.append(piece)
    return pieces
