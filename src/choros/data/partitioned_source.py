"""Data that is partitioned over ranks, as over Spark tasks. A rank may hold many rows, few rows or none.

An epoch has as many steps as in one process. In each step every rank trains a share of the rows that it holds, in an
order that differs by rank. Every row is trained once in an epoch. A global batch has the requested size, up to one row
for each rank. Sums over ranks are weighted by rows, so the training equals that of one process on the same batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from choros.data.array_source import ArraySource
from choros.data.sharding import BatchSlice, visits
from choros.object_text import call_text
from choros.types import ArrayTree, Batch

_SEED_STEP = 7919  # difference between the seeds of consecutive ranks


class PartitionedSource:
    """The rows of one rank.

    Args:
        inner: this rank's rows, or None if it has none.
        counts: number of rows of each rank.
        first: some rows of any rank, to build a model from.

    Attributes:
        rows: int. Number of rows of all ranks.

    Example:
        >>> import numpy as np
        >>> held = [ArraySource(np.arange(5.0)), ArraySource(np.arange(5.0, 8.0)), None]
        >>> ranks = [PartitionedSource(rows, [5, 3, 0], Batch(None, None, None, rows=1, total=1)) for rows in held]
        >>> options = {"size": 3, "synchronous": True, "batch_size": 4, "seed": 0, "epoch": 0, "shuffle": False}
        >>> [[batch.rows for batch in source.epoch(rank=rank, **options)] for rank, source in enumerate(ranks)]
        [[2, 3], [1, 2], [0, 0]]
    """

    indexed, ahead = True, 0

    def __init__(self, inner: ArraySource | None, counts: Sequence[int], first: Batch) -> None:
        self.inner, self.counts, self.first, self.rows = inner, list(counts), first, sum(counts)

    def __repr__(self) -> str:
        return call_text(self, self.inner, self.counts)

    def steps(self, batch_size: int) -> int:
        """Return the number of global batches in a pass: ``ceil(rows / batch_size)``."""
        return -(-self.rows // batch_size)

    def sample(self, batch_size: int) -> Batch:
        """Return some rows of any rank; ``batch_size`` is not used."""
        return self.first

    def part(self, rank: int, size: int, seed: int) -> ArraySource | None:
        """Return this rank's rows, for a member of an ensemble; None if it has none."""
        return self.inner

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
        """Return one rank's batches of one epoch, as ``ArraySource.epoch``."""
        parts = self._shares(self.counts[rank], batch_size, epoch, steps)
        if self.inner is not None:
            return self.inner.batches(parts, seed + _SEED_STEP * rank, bool(shuffle))
        return (Batch(None, None, None, rows=0, total=piece.total) for piece in parts)

    def _shares(self, local_rows: int, batch_size: int, epoch: int, steps: int | None) -> Iterator[BatchSlice]:
        count = self.steps(batch_size)
        for turn, i in visits(count, epoch=epoch, steps=steps):
            total = sum((i + 1) * rows // count - i * rows // count for rows in self.counts)
            yield BatchSlice(turn, i * local_rows // count, (i + 1) * local_rows // count, total)


def template(x: ArrayTree, y: ArrayTree = None, weight: ArrayTree = None, floatx: str = "float32") -> Batch:
    """Return all given rows as one batch, for the argument ``first``."""
    source = ArraySource(x, y, weight, floatx)
    return source.sample(source.rows)
