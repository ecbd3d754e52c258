"""Export and import of a parameter server's whole state, and each worker's position at its last exchange.

One store commits a worker's position together with its contribution. So a worker that restarts from its position
contributes no batch twice and skips none.
"""

from __future__ import annotations

from collections.abc import Callable

from choros.param_server import layout as fields
from choros.param_server.shared_memory import SharedMemoryParameterServer
from choros.types import Array


def encode_position(epoch: int, batch: int) -> int:
    """Return a position (epoch, batch) as a 64-bit word of the center's header; 0 is reserved for no position.

    Example:
        >>> decode_position(encode_position(3, 17)), decode_position(0)
        ((3, 17), None)
    """
    return 1 + (epoch << 32 | batch)


def decode_position(value: int) -> tuple[int, int] | None:
    """Return the position (epoch, batch) of a word; None for 0."""
    return divmod(value - 1, 1 << 32) if value else None


def position_of(center: SharedMemoryParameterServer, rank: int) -> tuple[int, int] | None:
    """Return a worker's position (epoch, batch) at its last exchange; None if it had none."""
    index = center._position_index - (center.rank or 0) + rank
    return decode_position(int(center._header()[index]))


def set_positions(center: SharedMemoryParameterServer, epoch: int, batch: int) -> None:
    """Set the start position of all workers, before any worker exchanges."""
    first = center._position_index - (center.rank or 0)
    # In place and without a commit: no worker exchanges yet, so no process reads the header meanwhile.
    center._header()[first : first + center.workers] = encode_position(epoch, batch)


def export_state(
    center: SharedMemoryParameterServer, meanwhile: Callable[[], None] | None = None
) -> tuple[Array, list[Array]]:
    """Return copies of the header and of all vectors: the center, the moving statistics and the rule's memory.

    Args:
        center: the parameter server.
        meanwhile: called while no worker can commit an exchange.

    Raises:
        CommTimeoutError: the lock was not free within the timeout.
    """
    with center._lock.hold(center.timeout, "a copy of the center"):
        header = center._header().copy()
        vectors = [pair[int(header[fields.ACTIVE + i])].copy() for i, pair in enumerate(center._buffers)]
        if meanwhile is not None:
            meanwhile()
    return header, vectors


def import_state(center: SharedMemoryParameterServer, header: Array, vectors: list[Array]) -> None:
    """Restore the result of ``export_state``, before any worker exchanges."""
    for pair, vector in zip(center._buffers, vectors, strict=True):
        # Buffer 0 for all, whatever was valid at the export: the indices below are set to 0.
        pair[0][:] = vector
    current = center._header()
    current[:] = header
    current[fields.ACTIVE : fields.ACTIVE + len(vectors)] = 0
    center._times_set = int(current[fields.TIMES_SET])


def refresh(center: SharedMemoryParameterServer) -> None:
    """Read the counters again, in a worker before its first exchange, after ``import_state`` by a controller."""
    center._contributions = int(center._header()[center._contributions_index])
    center._times_set = int(center._header()[fields.TIMES_SET])


def lock_holder(center: SharedMemoryParameterServer) -> int:
    """Return the rank that holds the lock, or that held it when it died; -1 for none."""
    return int(center._words[fields.HOLDER]) - 1
