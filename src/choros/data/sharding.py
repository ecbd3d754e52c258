"""The exact division of rows among ranks: every row once an epoch, none twice, for any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple


class BatchSlice(NamedTuple):
    """Rows ``order[start:stop]`` of pass number ``turn``, out of ``total`` rows that are trained at once."""

    turn: int
    start: int
    stop: int
    total: int


def share(n: int, rank: int, size: int) -> slice:
    """The contiguous part of ``n`` rows that is ``rank``'s; the first ``n mod size`` ranks have one row more.

    ``start = rank * (n // size) + min(rank, n mod size)``. The parts of all ranks, in order, are ``range(n)``;
    where there are fewer rows than ranks the last parts are empty.

    Args:
        n: How many rows there are.
        rank: Whose part.
        size: How many ranks there are.

    Returns:
        A slice with its start and stop set.

    Example:
        >>> [share(8, rank, 3) for rank in range(3)]
        [slice(0, 3, None), slice(3, 6, None), slice(6, 8, None)]
    """
    per_rank, remainder = divmod(n, size)
    start = rank * per_rank + min(rank, remainder)
    return slice(start, start + per_rank + (rank < remainder))


def visits(count: int | None, *, epoch: int, steps: int | None) -> Iterator[tuple[int, int]]:
    """Yield the (pass, index) pairs of one epoch, over ``count`` things that are gone through again and again.

    Epoch e is the stretch ``e * steps .. (e + 1) * steps`` of the endless row of passes, so an epoch of fewer steps
    than things goes on where the last one stopped, as in Keras, and an epoch of more goes on into the next pass.
    Without ``steps`` an epoch is exactly pass ``epoch``. ``count=None`` is an endless pass (``steps`` is needed).

    Args:
        count: Things in a pass.
        epoch: The epoch's number, from 0.
        steps: Things in an epoch.

    Example:
        >>> list(visits(3, epoch=1, steps=2))
        [(0, 2), (1, 0)]
    """
    length = count if steps is None else steps
    if length is None:
        raise ValueError("An endless pass needs steps.")
    for position in range(epoch * length, (epoch + 1) * length):
        yield divmod(position, count) if count is not None else (0, position)


def pieces(
    rows: int, *, rank: int, size: int, batch_size: int, epoch: int, steps: int | None = None
) -> Iterator[BatchSlice]:
    """Yield this rank's pieces of one epoch over ``rows`` rows.

    Global batch i is ``order[i * batch_size:(i + 1) * batch_size]``, and the rank has its ``share`` of it, which may be
    empty. Synchronous and asynchronous ranks divide alike: each has one piece of every global batch, so all make the
    same number of steps, and a rank's pieces have at most two lengths (the last global batch may be shorter).

    Args:
        rows: Rows in a pass.
        rank: Whose pieces.
        size: How many ranks there are.
        batch_size: Rows of a global batch.
        epoch: The epoch's number, from 0.
        steps: Global batches in an epoch. None is one pass.

    Example:
        >>> [piece[1:] for piece in pieces(10, rank=1, size=2, batch_size=4, epoch=0)]
        [(2, 4, 4), (6, 8, 4), (9, 10, 2)]
    """
    for turn, i in visits(-(-rows // batch_size), epoch=epoch, steps=steps):
        start = i * batch_size
        total = min(batch_size, rows - start)
        own_share = share(total, rank, size)
        yield BatchSlice(turn, start + own_share.start, start + own_share.stop, total)
