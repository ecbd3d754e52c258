"""Gather of each rank's bytes to one rank."""

from __future__ import annotations

import json
from typing import Protocol, runtime_checkable

import numpy as np

from choros.comm.group import Group
from choros.types import Array


@runtime_checkable
class SupportsCollect(Protocol):
    """A group that can gather bytes to one rank."""

    def collect(self, x: Array, root: int = 0) -> list[Array]:
        """Return every rank's flat bytes, in the order of the ranks, on the root; an empty list on the others."""
        ...


def collect(group: Group, x: Array, root: int = 0) -> list[Array]:
    """Return every rank's bytes, in the order of the ranks, on the root; an empty list on the others.

    A group of another package may have no ``collect``. Then each rank broadcasts its bytes, and only the root keeps
    them.

    Args:
        group: Group. All of its ranks call.
        x: flat uint8 array of any length. It must not change during the call.
        root: int. The rank that receives the bytes. Defaults to 0.

    Example:
        >>> from choros.comm.single_rank_group import SingleRankGroup
        >>> collect(SingleRankGroup(), np.arange(3, dtype="uint8"))
        [array([0, 1, 2], dtype=uint8)]
    """
    if isinstance(group, SupportsCollect):
        return group.collect(x, root)
    pieces = []
    for rank, length_text in enumerate(group.gather(json.dumps(x.size).encode())):
        piece = group.broadcast(x if rank == group.rank else np.empty(json.loads(length_text), np.uint8), rank)
        if group.rank == root:
            pieces.append(piece)
    return pieces
