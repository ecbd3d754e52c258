"""A second look, while training, at whether the loss is a mean over rows: rows of another kind may come late.

From one batch of halves ``a`` and ``b`` come four of the same shape, so that nothing is compiled: for a mean of what
each row gives by itself, with divisors ``n``,

    n L(a, b) + n L(b, a) = n L(a, a) + n L(b, b)

holds exactly, also with random layers, which draw the same for the same place of a row. It does not hold where each
half divides by something else, as by its valid entries, or where rows are compared.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from choros.backend.trial import plain, refusal, source, tolerance
from choros.types import Array, Batch

EVERY = 500  # steps between two looks, as one takes the time of four steps


class Recheck:
    """Looks at one batch once in ``EVERY`` steps.

    Args:
        replica: built, which reduces gradients.
        rank: int. This rank.
        workers: int. How many there are; they take turns.
    """

    def __init__(self, replica: Any, rank: int, workers: int) -> None:
        self.replica, self.rank, self.workers = replica, rank, workers
        model = getattr(replica, "model", None)
        apt = hasattr(replica, "attempt") and workers > 1 and not replica.others  # moving statistics couple the rows
        self.active = apt and not plain(model) and replica.weigher.refusal is None
        self.steps, self.looks = 0, 0

    def __call__(self, batch: Batch) -> None:
        """Count a step, and look at its batch where it is due.

        Raises:
            NotExact: names where the loss comes from, and what to do.
        """
        if not self.active:
            return
        self.steps += 1
        if self.steps % EVERY:
            return
        self.looks += 1
        if self.looks % self.workers != self.rank or batch.rows < 4:
            return
        off = self.look(batch)
        if off is not None:
            raise refusal(source(self.replica.model), off, "return a mean over rows")

    def look(self, batch: Batch) -> float | None:
        """Return how far the sums are apart, relative to the gradient; None where they agree."""
        replica, half = self.replica, batch.rows // 2
        a, b = np.arange(half), np.arange(half, 2 * half)
        rest = np.arange(2 * half, batch.rows)
        held = [*replica.model.non_trainable_variables, *replica.metric_variables]
        before = [np.array(value) for value in replica._values(held)]
        generators = [np.array(state) for state in replica.generators()]
        logs = replica._logs
        apart, scale = np.zeros(replica.size), 0.0
        for rows, sign in (((a, b), 1), ((b, a), 1), ((a, a), -1), ((b, b), -1)):
            other = replica.pack(_taken(batch, np.concatenate([*rows, rest])))
            arrays, _, n = replica._gradients(other, batch.rows)
            replica._assign(held, before)
            replica.set_generators(generators)
            for where, array in zip(replica.slices, arrays, strict=True):
                if array is not None:
                    apart[where] += sign * n * np.asarray(array, np.float64).reshape(-1)
                    scale += float(np.square(n * np.asarray(array, np.float64)).sum())
        replica._logs = logs
        off = float(np.linalg.norm(apart)) / max(np.sqrt(scale), 1e-12)
        return off if np.isfinite(off) and off > tolerance(replica.model) else None


def _taken(batch: Batch, rows: Array) -> Batch:
    import keras

    take: Callable[[Any], Any] = lambda leaf: None if leaf is None else np.asarray(leaf)[rows]  # noqa: E731
    x, y, weight = (keras.tree.map_structure(take, part) for part in (batch.x, batch.y, batch.sample_weight))
    return Batch(x, y, weight, rows=batch.rows, total=batch.total)
