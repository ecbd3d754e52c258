"""The exact division of rows among ranks: every row exactly once in an epoch, for any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple


class BatchSlice(NamedTuple):
    """One rank's rows ``order[start:stop]`` of pass ``turn``, in a global batch of ``total`` rows."""

    turn: int
    start: int
    stop: int
    total: int


def share(n: int, rank: int, size: int) -> slice:
    """Return the contiguous share of ``n`` rows of a rank. The first ``n mod size`` ranks have one more row.

    ``start = rank * (n // size) + min(rank, n mod size)``. The shares of all ranks, in order, are ``range(n)``. With
    fewer rows than ranks, the last shares are empty.

    Args:
        n: Number of rows.
        rank: The rank.
        size: Number of ranks.

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
    """Yield the (pass, index) pairs of one epoch over ``count`` items, which are iterated in repeated passes.

    Epoch e has the positions ``e * steps .. (e + 1) * steps`` in the infinite sequence of passes. With fewer steps than
    items, an epoch continues where the previous one ended, as in Keras. With more steps, it continues in the next pass.
    Without ``steps``, an epoch is exactly pass ``epoch``.

    Args:
        count: Items in a pass; None for a pass without an end, which requires ``steps``.
        epoch: Index of the epoch, from 0.
        steps: Items in an epoch; None for one pass.

    Raises:
        ValueError: Both ``count`` and ``steps`` are None.

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
    """Yield the slices of one rank in one epoch over ``rows`` rows.

    Global batch i is ``order[i * batch_size:(i + 1) * batch_size]``. The rank has its ``share`` of it, which may be
    empty. The division is equal for synchronous and asynchronous ranks. Each rank has one slice of every global batch,
    so all ranks make the same number of steps. The slices of a rank have at most two lengths, as only the last global
    batch may be shorter.

    Args:
        rows: Rows in a pass.
        rank: The rank.
        size: Number of ranks.
        batch_size: Rows of a global batch.
        epoch: Index of the epoch, from 0.
        steps: Global batches in an epoch. Defaults to one pass.

    Example:
        >>> [piece[1:] for piece in pieces(10, rank=1, size=2, batch_size=4, epoch=0)]
        [(2, 4, 4), (6, 8, 4), (9, 10, 2)]
    """
    for turn, i in visits(-(-rows // batch_size), epoch=epoch, steps=steps):
        start = i * batch_size
        total = min(batch_size, rows - start)
        rank_share = share(total, rank, size)
        yield BatchSlice(turn, start + rank_share.start, start + rank_share.stop, total)
