"""A centre's whole state, taken and put back; and where each worker was at its last exchange.

A worker's place is committed with its contribution, by one store: so one that begins anew from its place brings nothing
twice, and leaves nothing out.
"""

from __future__ import annotations

from choros.param_server import layout as at
from choros.param_server.shared_memory import SharedMemoryParameterServer
from choros.types import Array


def word(epoch: int, batch: int) -> int:
    """Return a place as a word of the centre's header.

    Example:
        >>> place(word(3, 17)), place(0)
        ((3, 17), None)
    """
    return 1 + (epoch << 32 | batch)


def place(word: int) -> tuple[int, int] | None:
    """Return the place that a word is; None where none was said."""
    return divmod(word - 1, 1 << 32) if word else None


def place_of(centre: SharedMemoryParameterServer, rank: int) -> tuple[int, int] | None:
    """Return where a worker was at its last exchange."""
    own = centre._place_at - (centre.rank or 0) + rank
    return place(int(centre._header()[own]))


def begin_at(centre: SharedMemoryParameterServer, epoch: int, batch: int) -> None:
    """Say of all workers, before they exchange, where they begin."""
    first = centre._place_at - (centre.rank or 0)
    centre._header()[first : first + centre.workers] = word(epoch, batch)


def take(centre: SharedMemoryParameterServer) -> tuple[Array, list[Array]]:
    """Return copies of the header, and of the centre, the moving statistics and the rule's memory, by whoever holds it.

    Raises:
        CommTimeoutError: if the centre stays held.
    """
    with centre._lock.hold(centre.timeout, "a copy of the centre"):
        header = centre._header().copy()
        vectors = [pair[int(header[at.ACTIVE + i])].copy() for i, pair in enumerate(centre._buffers)]
    return header, vectors


def put(centre: SharedMemoryParameterServer, header: Array, vectors: list[Array]) -> None:
    """Go on from what ``take`` gave, before any worker exchanges."""
    for pair, vector in zip(centre._buffers, vectors, strict=True):
        pair[0][:] = vector
    own = centre._header()
    own[:] = header
    own[at.ACTIVE : at.ACTIVE + len(vectors)] = 0
    centre._set = int(own[at.SET])


def look_again(centre: SharedMemoryParameterServer) -> None:
    """Take up, as a worker that has yet to exchange, what was put into the centre after it had come."""
    centre._sent = int(centre._header()[centre._sent_at])
    centre._set = int(centre._header()[at.SET])


def holder(centre: SharedMemoryParameterServer) -> int:
    """Return the rank that holds the lock, or held it when it died; -1 where none does."""
    return int(centre._words[at.HELD]) - 1
