"""Values behind the gradients in one sum: the metrics of all ranks, and rank 0's note of what callbacks decided."""

from __future__ import annotations

import numpy as np

from choros.training.spec import FitConfig, TrainerControl
from choros.types import Array

_WORDS = 4  # numbers of 16 bits that a float64 is written as; a float32 holds each of them exactly
_LARGE = 1 << 16  # values; with more the metrics have a sum of their own
_RATE, _MORE = 1.0, 2.0  # notes: a new learning rate and nothing else; orders that have to be asked for


class Tail:
    """The layout of these values in a slot. Each rank writes its own places and zeros into all others.

    So the sum holds what each rank wrote, to the bit. A float64 is written as the four 16-bit numbers that its bytes
    are: a float32 would not hold it.

    Args:
        rank: int. This rank.
        ranks: int. How many there are.
        values: int. Most values of a rank's metric state; 0 where the metrics do not travel here.

    Attributes:
        rate_alone: bool. Whether a new learning rate may be taken between the gradients and the optimizer.

    Example:
        >>> tail = Tail(0, 1, 2)
        >>> slot = np.empty(tail.size, np.float32)
        >>> tail.write(slot, TrainerControl(learning_rate=0.1), np.array([1 / 3, 2.0]))
        >>> tail.orders(slot) == TrainerControl(learning_rate=0.1), (tail.metrics(slot) == [1 / 3, 2.0]).all()
        (True, np.True_)
    """

    def __init__(self, rank: int, ranks: int, values: int) -> None:
        self.rank, self.ranks, self.values, self.rate_alone = rank, ranks, values, True
        self._metrics = 1 + _WORDS  # where they begin: behind the note and the learning rate
        self.size = self._metrics + _WORDS * ranks * values

    @classmethod
    def of(cls, job: FitConfig, rank: int) -> Tail:
        """Return the layout of a job."""
        carried = not job.repeats and job.metric_values * job.workers * _WORDS <= _LARGE
        return cls(rank, job.workers, job.metric_values if carried else 0)

    def write(self, out: Array, orders: TrainerControl | None, state: Array) -> None:
        """Write this rank's values.

        Args:
            out: of ``size`` values.
            orders: on rank 0 what callbacks decided, or None.
            state: the metric state, float64.
        """
        out[:] = 0
        if orders is not None and orders != TrainerControl():
            alone = self.rate_alone and orders == TrainerControl(learning_rate=orders.learning_rate)
            out[0] = _RATE if alone else _MORE
            out[1 : self._metrics] = np.array([orders.learning_rate or 0.0]).view(np.uint16)
        if self.values:
            begin = self._metrics + _WORDS * self.rank * self.values
            out[begin : begin + _WORDS * state.size] = state.view(np.uint16)

    def orders(self, summed: Array) -> TrainerControl | None:
        """Return rank 0's note: nothing, or a new learning rate; None where there is more, which rank 0 has."""
        note = summed.item(0)
        if note == _MORE:
            return None
        return (
            TrainerControl(learning_rate=_joined(summed[1 : self._metrics]).item())
            if note == _RATE
            else TrainerControl()
        )

    def metrics(self, summed: Array) -> Array:
        """Return the sum of all ranks' metric states, in the order of the ranks."""
        total: Array = _joined(summed[self._metrics :]).reshape(self.ranks, self.values).sum(axis=0)
        return total


def _joined(words: Array) -> Array:
    """Return the float64 values that were written as numbers of 16 bits."""
    return words.astype(np.uint16).view(np.float64)
