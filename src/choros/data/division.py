"""The exact division of rows among ranks: every row once an epoch, none twice, for any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple


class Piece(NamedTuple):
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
    each, more = divmod(n, size)
    start = rank * each + min(rank, more)
    return slice(start, start + each + (rank < more))


def visits(count: int | None, *, epoch: int, first: int, stride: int, steps: int | None) -> Iterator[tuple[int, int]]:
    """The (pass, index) pairs of one rank in one epoch, over ``count`` things that are gone through again and again.

    Epoch e is the stretch ``e * steps .. (e + 1) * steps`` of the endless row of passes, so an epoch of fewer steps
    than things goes on where the last one stopped, as in Keras, and an epoch of more goes on into the next pass.
    Without ``steps`` an epoch is exactly pass ``epoch``. ``count=None`` is an endless pass (``steps`` is needed).

    Args:
        count: Things in a pass.
        epoch: The epoch's number, from 0.
        first: The first of the stretch that is this rank's.
        stride: The distance to its next.
        steps: Things in an epoch, over all ranks.

    Example:
        >>> list(visits(3, epoch=1, first=0, stride=1, steps=2))
        [(0, 2), (1, 0)]
    """
    length = count if steps is None else steps
    if length is None:
        raise ValueError("An endless pass needs steps.")
    for position in range(epoch * length + first, (epoch + 1) * length, stride):
        yield divmod(position, count) if count is not None else (0, position)


def pieces(
    rows: int, *, rank: int, size: int, together: bool, batch_size: int, epoch: int, steps: int | None = None
) -> Iterator[Piece]:
    """This rank's pieces of one epoch over ``rows`` rows.

    Together, global batch i is ``order[i * batch_size:(i + 1) * batch_size]`` and the rank has its ``share`` of it,
    which may be empty. Alone, the order is cut into own batches of ``batch_size // size`` rows (the last may be
    shorter) and own batch i goes to worker i mod size.

    Args:
        rows: Rows in a pass.
        rank: Whose pieces.
        size: How many ranks there are.
        together: Whether a global batch is divided among the ranks.
        batch_size: Rows of a global batch.
        epoch: The epoch's number, from 0.
        steps: Global batches in an epoch; alone that is ``steps * size`` own batches. None is one pass.

    Example:
        >>> [piece[1:] for piece in pieces(10, rank=1, size=2, together=True, batch_size=4, epoch=0)]
        [(2, 4, 4), (6, 8, 4), (9, 10, 2)]
        >>> [piece[1:] for piece in pieces(10, rank=1, size=2, together=False, batch_size=6, epoch=0)]
        [(3, 6, 3), (9, 10, 1)]
    """
    if together:
        for turn, i in visits(-(-rows // batch_size), epoch=epoch, first=0, stride=1, steps=steps):
            start = i * batch_size
            total = min(batch_size, rows - start)
            mine = share(total, rank, size)
            yield Piece(turn, start + mine.start, start + mine.stop, total)
        return
    own = batch_size // size
    mine_in_all = None if steps is None else steps * size
    for turn, i in visits(-(-rows // own), epoch=epoch, first=rank, stride=size, steps=mine_in_all):
        start = i * own
        stop = min(start + own, rows)
        yield Piece(turn, start, stop, stop - start)
