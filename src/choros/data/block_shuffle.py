"""The order of rows that are too many for one permutation: permuted blocks, and permuted rows within a pool of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from choros.data.permutation import permutation

POOL_BLOCKS = 64
POOL_ROWS = 1 << 22  # their numbers take 32 MB

Rows = npt.NDArray[np.int64]


def pools(sizes: Sequence[int] | Rows, blocks: int = POOL_BLOCKS, rows: int = POOL_ROWS) -> list[slice]:
    """Return consecutive runs of at most ``blocks`` blocks and ``rows`` rows, each of one block or more.

    Example:
        >>> pools([3, 3, 3, 9, 1], blocks=2, rows=8)
        [slice(0, 2, None), slice(2, 3, None), slice(3, 4, None), slice(4, 5, None)]
    """
    runs, first, held = [], 0, 0
    for i, size in enumerate(map(int, sizes)):
        if i > first and (i - first == blocks or held + size > rows):
            runs.append(slice(first, i))
            first, held = i, 0
        held += size
    if first < len(sizes):
        runs.append(slice(first, len(sizes)))
    return runs


class BlockOrder:
    """One pass over rows that lie in blocks; ``order[start:stop]`` are the numbers of the rows at those positions.

    The blocks are permuted, consecutive ones make a pool (``pools``), and the rows of a pool are permuted: so at any
    moment one pool is read, and what is ahead is known. Where all blocks are in one pool that is a global permutation.

    Args:
        starts: int64, (blocks + 1,). Where each block begins, and where the last one ends.
        seed: not negative.
        turn: the pass' number; with ``seed`` it makes the order.
        shuffle: False keeps the rows' own order, in pools too.
        blocks: int64. Which blocks; None is all.
        enter: called with the blocks of a pool before its first row is asked for, and with those of the one after it.

    Example:
        >>> order = BlockOrder(np.array([0, 3, 6]), seed=1, turn=0)
        >>> sorted(order[0:4].tolist() + order[4:6].tolist())
        [0, 1, 2, 3, 4, 5]
    """

    def __init__(
        self,
        starts: Rows,
        seed: int,
        turn: int,
        shuffle: bool = True,
        blocks: Rows | None = None,
        enter: Callable[[Rows, Rows], None] | None = None,
    ) -> None:
        self._starts, self._shuffle, self._enter = starts, shuffle, enter
        self._key = (seed, turn)
        blocks = np.arange(len(starts) - 1) if blocks is None else blocks
        self._blocks = blocks[permutation(len(blocks), seed, turn, shuffle)]
        sizes = np.diff(starts)[self._blocks]
        self._pools = pools(sizes)
        self._ends = np.cumsum([int(sizes[pool].sum()) for pool in self._pools])
        self._now = -1
        self._rows = np.empty(0, np.int64)

    def __getitem__(self, positions: slice) -> Rows:
        start, stop = positions.start, positions.stop
        parts = []
        while start < stop:
            pool = int(np.searchsorted(self._ends, start, "right"))
            self._go_to(pool)
            begin = int(self._ends[pool]) - len(self._rows)
            end = min(stop, int(self._ends[pool]))
            parts.append(self._rows[start - begin : end - begin])
            start = end
        return parts[0] if len(parts) == 1 else np.concatenate(parts or [np.empty(0, np.int64)])

    def _go_to(self, pool: int) -> None:
        if pool == self._now:
            return
        pool_blocks, after = (
            self._blocks[self._pools[i]] if i < len(self._pools) else self._blocks[:0] for i in (pool, pool + 1)
        )
        if self._enter is not None:
            self._enter(pool_blocks, after)
        rows = np.concatenate([np.arange(self._starts[b], self._starts[b + 1]) for b in pool_blocks])
        if self._shuffle:
            rows = rows[permutation(len(rows), *self._key, within=pool)]
        self._now, self._rows = pool, rows
