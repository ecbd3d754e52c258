"""Values behind the gradients in one sum: the metrics of all ranks, and rank 0's note of what callbacks decided."""

from __future__ import annotations

from typing import Any

import numpy as np

from choros.training.job import Job, Orders
from choros.types import Array

_PARTS = 3  # float32 values that together are one float64
_LARGE = 1 << 16  # values; with more the metrics have a sum of their own
_RATE, _MORE = 1.0, 2.0  # notes: a new learning rate and nothing else; orders that have to be asked for


class Tail:
    """The layout of these values in a slot. Each rank writes its own places and zeros into all others.

    So the sum holds what each rank wrote, to the bit. A float64 that a float32 slot cannot hold is written as the sum
    of three values.

    Args:
        rank: int. This rank.
        ranks: int. How many there are.
        values: int. Most values of a rank's metric state; 0 where the metrics do not travel here.
        dtype: of the slot: float32 or float64.

    Attributes:
        rate_alone: bool. Whether a new learning rate may be taken between the gradients and the optimizer.

    Example:
        >>> tail = Tail(0, 1, 2, np.float32)
        >>> slot = np.empty(tail.size, np.float32)
        >>> tail.write(slot, Orders(learning_rate=0.1), np.array([1 / 3, 2.0]))
        >>> tail.orders(slot), (tail.metrics(slot) == [1 / 3, 2.0]).all()
        (Orders(stop=False, learning_rate=0.1, weights=False), np.True_)
    """

    def __init__(self, rank: int, ranks: int, values: int, dtype: Any) -> None:
        self.rank, self.ranks, self.values, self.rate_alone = rank, ranks, values, True
        self.parts = 1 if np.dtype(dtype) == np.float64 else _PARTS
        self.size = self.parts * (2 + ranks * values)

    @classmethod
    def of(cls, job: Job, rank: int, dtype: Any) -> Tail:
        """Return the layout of a job."""
        carried = not job.repeats and job.metric_values * job.workers * _PARTS <= _LARGE
        return cls(rank, job.workers, job.metric_values if carried else 0, dtype)

    def write(self, out: Array, orders: Orders | None, state: Array) -> None:
        """Write this rank's values.

        Args:
            out: of ``size`` values.
            orders: on rank 0 what callbacks decided, or None.
            state: the metric state.
        """
        out[:] = 0
        places = out.reshape(self.parts, -1)
        if orders is not None and orders != Orders():
            alone = self.rate_alone and not (orders.stop or orders.weights)
            note = _RATE if alone else _MORE
            _split(np.array([note, orders.learning_rate or 0.0]), places[:, :2])
        if self.values:
            begin = 2 + self.rank * self.values
            _split(state, places[:, begin : begin + state.size])

    def orders(self, summed: Array) -> Orders | None:
        """Return rank 0's note: nothing, or a new learning rate; None where there is more, which rank 0 has."""
        note, rate = _joined(summed.reshape(self.parts, -1)[:, :2]).tolist()
        if note == _MORE:
            return None
        return Orders(learning_rate=rate) if note == _RATE else Orders()

    def metrics(self, summed: Array) -> Array:
        """Return the sum of all ranks' metric states, in the order of the ranks."""
        each = _joined(summed.reshape(self.parts, -1)[:, 2:]).reshape(self.ranks, self.values)
        total: Array = each[0].copy()
        for state in each[1:]:
            total += state
        return total


def _split(values: Array, out: Array) -> None:
    """Write float64 values as sums of values of the output's type; where they are not finite the first says so."""
    rest = np.asarray(values, np.float64)
    with np.errstate(all="ignore"):
        for row in out:
            row[:] = rest
            rest = np.where(np.isfinite(row), rest - row, 0.0)


def _joined(parts: Array) -> Array:
    wide = parts.astype(np.float64)
    total: Array = wide[-1]
    for row in wide[-2::-1]:
        total = row + total
    return total
