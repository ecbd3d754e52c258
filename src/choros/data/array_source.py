"""Arrays in memory as a source of batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from choros.argument_checks import check_whole
from choros.data.block_shuffle import BlockOrder
from choros.data.conversion import as_arrays, to_floatx
from choros.data.encoded_rows import decoded, is_sparse
from choros.data.memmap import block_rows, place_in_file
from choros.data.permutation import batch_order, permutation
from choros.data.sharding import BatchSlice, pieces
from choros.data.tree import is_nested, leaves, map_leaves
from choros.data.validation import check_arrays, check_batch, check_floatx
from choros.errors import InvalidDataError, counted
from choros.object_text import call_text
from choros.types import Array, ArrayTree, Batch


class ArraySource:
    """Nested arrays in an order that depends on (seed, epoch), divided exactly among ranks.

    Args:
        x: Nested arrays or tensors of any library. Memory-mapped files are read batch by batch. Rows of a sparse matrix
            become dense in their batch.
        y: The same, or None.
        sample_weight: One array for all of y, or one for each of its arrays, or None.
        floatx: Dtype to which floats are converted, as in Keras.
        block: Rows of a block. Blocks are permuted, then rows within pools of blocks (``BlockOrder``), so that a mapped
            file is read in contiguous parts. With 0, all rows are permuted at once. Defaults to 0; about 4 MB if mapped
            files are larger than half of the memory.

    Attributes:
        rows: int. Rows in a pass.
        block: int. Rows of a block, or 0.

    Raises:
        InvalidDataError: A part is not an array, or the arrays do not fit together.

    Example:
        >>> source = ArraySource(np.arange(5), np.arange(5))
        >>> batches = source.epoch(rank=1, size=2, synchronous=True, batch_size=3, seed=0, epoch=0, shuffle=False)
        >>> [(batch.x.tolist(), batch.rows, batch.total) for batch in batches]
        [([2], 1, 3), ([4], 1, 2)]
    """

    rows: int
    indexed = True
    ahead = 0

    def __init__(
        self,
        x: ArrayTree,
        y: ArrayTree = None,
        sample_weight: ArrayTree = None,
        floatx: str = "float32",
        block: int | None = None,
    ) -> None:
        check_floatx(floatx)
        x, y, weight = as_arrays(x, "x"), as_arrays(y, "y"), as_arrays(sample_weight, "sample_weight")
        self.rows = check_arrays(x, y, weight)
        if is_nested(y) and weight is not None and not is_nested(weight):
            leaf = weight
            weight = map_leaves(lambda _: leaf, y)
        self.floatx = floatx
        self._data: tuple[ArrayTree, ArrayTree, ArrayTree] = map_leaves(
            lambda a: a if place_in_file(a) else to_floatx(a, floatx), (x, y, weight)
        )
        self._cast = any(a.dtype != to_floatx(a[:0], floatx).dtype for _, a in leaves(self._data))
        arrays = (a for _, a in leaves(self._data))
        self.block = block_rows(arrays, self.rows) if block is None else check_whole("block", block, 0)
        self._sparse = any(is_sparse(a) for _, a in leaves(self._data))
        self._flat = not any(map(is_nested, self._data))

    def __repr__(self) -> str:
        x, y, weight = self._data
        return call_text(self, x, y) if weight is None else call_text(self, x, y, weight)

    @property
    def x(self) -> ArrayTree:
        """The inputs."""
        return self._data[0]

    @property
    def y(self) -> ArrayTree:
        """The targets, or None."""
        return self._data[1]

    @property
    def sample_weight(self) -> ArrayTree:
        """The weights, nested like ``y``, or None."""
        return self._data[2]

    def steps(self, batch_size: int) -> int:
        """Return the number of global batches in a pass: ``ceil(rows / batch_size)``."""
        return -(-self.rows // batch_size)

    def sample(self, batch_size: int) -> Batch:
        """Return the first rows, at most ``batch_size``, to build a model from. They are equal on every rank."""
        rows = min(self.rows, batch_size)
        return Batch(*self._cut(slice(0, rows)), rows=rows, total=rows)

    def taken(self, rows: Array) -> tuple[ArrayTree, ArrayTree, ArrayTree]:
        """Return copies of the given rows of x, y and sample_weight."""
        return self._pick(rows)

    def epoch(
        self,
        *,
        rank: int,
        size: int,
        synchronous: bool,
        batch_size: int,
        seed: int,
        epoch: int,
        shuffle: bool | str,
        steps: int | None = None,
    ) -> Iterator[Batch]:
        """Return one rank's share of each global batch of an epoch; see ``choros.data.sharding.pieces``.

        Args:
            rank: The rank.
            size: Number of ranks.
            synchronous: True for synchronous ranks. Arrays are divided equally in both modes.
            batch_size: Rows of a global batch.
            seed: Together with ``epoch``, it determines the order of the rows.
            epoch: Index of the epoch, from 0.
            shuffle: With False, the rows keep their order. With "batch", whole batches are permuted; a smaller last
                batch stays the last.
            steps: Global batches in an epoch. Defaults to one pass. With ``steps``, an epoch continues where the
                previous one ended.

        Returns:
            An iterator over batches. If the rank's share is empty, the batch has 0 rows and ``x`` is None. Without
            shuffling, the arrays may be views of the source: do not write to them.

        Raises:
            InvalidDataError: ``batch_size`` is not a whole number, or below 1.
        """
        check_batch(batch_size)
        parts = pieces(self.rows, rank=rank, size=size, batch_size=batch_size, epoch=epoch, steps=steps)
        if shuffle == "batch":
            return self.ordered(parts, lambda turn: batch_order(self.rows, batch_size, seed, turn))
        return self.batches(parts, seed, bool(shuffle))

    def batches(self, parts: Iterator[BatchSlice], seed: int, shuffle: bool) -> Iterator[Batch]:
        """Return the batches of these pieces. With ``shuffle``, the order of rows depends on (seed, pass)."""
        if not shuffle:
            return self._straight(parts)
        if self.block:
            starts = np.append(np.arange(0, self.rows, self.block), self.rows)
            return self.ordered(parts, lambda turn: BlockOrder(starts, seed, turn))
        return self.ordered(parts, lambda turn: permutation(self.rows, seed, turn))

    def part(self, rank: int, size: int, seed: int) -> ArraySource:
        """Return one of ``size`` disjoint shards as a copy: every ``size``-th row of a permutation from ``seed``.

        Raises:
            InvalidDataError: The shard has no rows.
        """
        rows = np.sort(permutation(self.rows, seed, 0)[rank::size])
        if not len(rows):
            raise InvalidDataError(
                f"{counted(self.rows, 'row')} cannot be divided among {size} members: give more rows."
            )
        x, y, weight = self._pick(rows)
        return ArraySource(x, y, weight, self.floatx, block=0)

    def _straight(self, parts: Iterator[BatchSlice]) -> Iterator[Batch]:
        for _, start, stop, total in parts:
            yield Batch(*self._cut(slice(start, stop)), rows=stop - start, total=total)

    def ordered(self, parts: Iterator[BatchSlice], order_of: Callable[[int], Any]) -> Iterator[Batch]:
        """Yield the batches of these pieces. ``order_of(turn)[start:stop]`` gives row indices in pass ``turn``."""
        turn, order = -1, None
        for piece in parts:
            if order is None or piece.turn != turn:
                turn, order = piece.turn, order_of(piece.turn)
            rows = piece.stop - piece.start
            yield Batch(*self._pick(order[piece.start : piece.stop]), rows=rows, total=piece.total)

    def _cut(self, rows: slice) -> tuple[ArrayTree, ArrayTree, ArrayTree]:
        if rows.start == rows.stop:
            return None, None, None
        return self._map(lambda a: _view(self._float(a[rows])))

    def _pick(self, rows: Array) -> tuple[ArrayTree, ArrayTree, ArrayTree]:
        if not len(rows):
            return None, None, None
        return self._map(lambda a: self._float(a.take(rows, axis=0) if a.flags.c_contiguous else a[rows]))

    def _float(self, part: Array) -> Array:
        part = decoded(part) if self._sparse else part
        return to_floatx(part, self.floatx) if self._cast else part

    def _map(self, function: Callable[[Array], Array]) -> tuple[ArrayTree, ArrayTree, ArrayTree]:
        x, y, weight = self._data
        if self._flat:  # at most three arrays: avoids the cost of a tree traversal for each batch
            return function(x), None if y is None else function(y), None if weight is None else function(weight)
        return map_leaves(function, x), map_leaves(function, y), map_leaves(function, weight)


def _view(part: Array) -> Array:
    """Return the view, or a copy if it is read-only: PyTorch warns about read-only arrays."""
    return part if part.flags.writeable else part.copy()
