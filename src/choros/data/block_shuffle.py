"""The order of rows that are too many for one permutation: permuted blocks, then permuted rows within pools."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from choros.data.permutation import permutation

POOL_BLOCKS = 64
POOL_ROWS = 1 << 22  # their indices take 32 MB

Rows = npt.NDArray[np.int64]


def pools(sizes: Sequence[int] | Rows, blocks: int = POOL_BLOCKS, rows: int = POOL_ROWS) -> list[slice]:
    """Divide blocks into consecutive pools of at most ``blocks`` blocks and ``rows`` rows, but at least one block.

    Example:
        >>> pools([3, 3, 3, 9, 1], blocks=2, rows=8)
        [slice(0, 2, None), slice(2, 3, None), slice(3, 4, None), slice(4, 5, None)]
    """
    runs, first, pool_rows = [], 0, 0
    for i, size in enumerate(map(int, sizes)):
        if i > first and (i - first == blocks or pool_rows + size > rows):
            runs.append(slice(first, i))
            first, pool_rows = i, 0
        pool_rows += size
    if first < len(sizes):
        runs.append(slice(first, len(sizes)))
    return runs


class BlockOrder:
    """The order of rows in one pass over blocks. ``order[start:stop]`` gives the row indices at these positions.

    The blocks are permuted. Consecutive blocks form a pool (``pools``), and the rows of a pool are permuted. Only one
    pool is read at a time, and the next pool is known. If all blocks are in one pool, the order is a permutation of all
    rows.

    Args:
        starts: int64, shape (blocks + 1,). First row of each block, and the end of the last block.
        seed: not negative.
        turn: index of the pass. The order depends on ``seed`` and ``turn``.
        shuffle: False to keep the order of the rows. Pools are still used. Defaults to True.
        blocks: int64. Indices of the blocks. Defaults to all.
        enter: called before the first row of a pool is used, with the blocks of this pool and of the next one.

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
        self._current_pool = -1
        self._rows = np.empty(0, np.int64)

    def __getitem__(self, positions: slice) -> Rows:
        start, stop = positions.start, positions.stop
        parts = []
        while start < stop:
            pool = int(np.searchsorted(self._ends, start, "right"))
            self._enter_pool(pool)
            begin = int(self._ends[pool]) - len(self._rows)
            end = min(stop, int(self._ends[pool]))
            parts.append(self._rows[start - begin : end - begin])
            start = end
        return parts[0] if len(parts) == 1 else np.concatenate(parts or [np.empty(0, np.int64)])

    def _enter_pool(self, pool: int) -> None:
        if pool == self._current_pool:
            return
        pool_blocks, next_blocks = (
            self._blocks[self._pools[i]] if i < len(self._pools) else self._blocks[:0] for i in (pool, pool + 1)
        )
        if self._enter is not None:
            self._enter(pool_blocks, next_blocks)
        rows = np.concatenate([np.arange(int(self._starts[b]), int(self._starts[b + 1])) for b in pool_blocks])
        if self._shuffle:
            rows = rows[permutation(len(rows), *self._key, within=pool)]
        self._current_pool, self._rows = pool, rows
