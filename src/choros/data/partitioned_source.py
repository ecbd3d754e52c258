"""Rows of which each rank holds some of its own, as tasks of Spark do: many, few or none.

An epoch has as many steps as one process would need. In each step every rank gives its share of the rows that it
holds, in an order of its own, so every row is trained once an epoch and a global batch has the size that was asked for,
but for one row a rank. What the ranks sum is weighed by rows, so the training is that of one process on these batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from choros.data.array_source import ArraySource
from choros.data.sharding import BatchSlice, visits
from choros.types import ArrayTree, Batch

_APART = 7919  # between the seeds of two ranks' orders


class PartitionedSource:
    """One rank's rows.

    Args:
        inner: this rank's rows, or None where it has none.
        counts: rows of each rank.
        first: some rows of any rank, to build a model from.

    Attributes:
        rows: int. Of all ranks.

    Example:
        >>> import numpy as np
        >>> held = [ArraySource(np.arange(5.0)), ArraySource(np.arange(5.0, 8.0)), None]
        >>> ranks = [PartitionedSource(own, [5, 3, 0], Batch(None, None, None, rows=1, total=1)) for own in held]
        >>> how = {"size": 3, "together": True, "batch_size": 4, "seed": 0, "epoch": 0, "shuffle": False}
        >>> [[batch.rows for batch in one.epoch(rank=rank, **how)] for rank, one in enumerate(ranks)]
        [[2, 3], [1, 2], [0, 0]]
    """

    indexed, ahead = True, 0

    def __init__(self, inner: ArraySource | None, counts: Sequence[int], first: Batch) -> None:
        self.inner, self.counts, self.first, self.rows = inner, list(counts), first, sum(counts)

    def steps(self, batch_size: int) -> int:
        """Global batches in a pass: ``ceil(rows / batch_size)``."""
        return -(-self.rows // batch_size)

    def sample(self, batch_size: int) -> Batch:
        """Some rows of any rank."""
        return self.first

    def part(self, rank: int, size: int, seed: int) -> ArraySource | None:
        """This rank's own rows, for a member of an ensemble."""
        return self.inner

    def epoch(
        self,
        *,
        rank: int,
        size: int,
        together: bool,
        batch_size: int,
        seed: int,
        epoch: int,
        shuffle: bool | str,
        steps: int | None = None,
    ) -> Iterator[Batch]:
        """One rank's batches of one epoch, as ``ArraySource.epoch``."""
        parts = self._shares(self.counts[rank], batch_size, epoch, steps)
        if self.inner is not None:
            return self.inner.batches(parts, seed + _APART * rank, bool(shuffle))
        return (Batch(None, None, None, rows=0, total=piece.total) for piece in parts)

    def _shares(self, mine: int, batch_size: int, epoch: int, steps: int | None) -> Iterator[BatchSlice]:
        count = self.steps(batch_size)
        for turn, i in visits(count, epoch=epoch, steps=steps):
            total = sum((i + 1) * rows // count - i * rows // count for rows in self.counts)
            yield BatchSlice(turn, i * mine // count, (i + 1) * mine // count, total)


def template(x: ArrayTree, y: ArrayTree = None, weight: ArrayTree = None, floatx: str = "float32") -> Batch:
    """Return a batch of some rows, for ``first``."""
    source = ArraySource(x, y, weight, floatx)
    return source.sample(source.rows)
