"""Values after the gradients in the same all-reduce: the metrics of all ranks, and rank 0's control message."""

from __future__ import annotations

import numpy as np

from choros.training.spec import FitConfig, TrainerControl
from choros.types import Array

_WORDS = 4  # 16-bit numbers that represent a float64; a float32 holds each of them exactly
_LARGE = 1 << 16  # most values of metrics; more values use a separate sum
_RATE, _MORE = 1.0, 2.0  # notes: only a new learning rate; a control message that rank 0 must send separately


class GradientTail:
    """The layout of the values after the gradients in a slot. Each rank writes to separate places, and zeros elsewhere.

    So the sum holds the values of each rank exactly. The slot may be float32, which cannot hold a float64. So a float64
    is written as four 16-bit numbers, the words of its bytes.

    Args:
        rank: int. This rank.
        ranks: int. Number of ranks.
        values: int. Most values of a rank's metric state; 0 if the metrics are summed separately.

    Attributes:
        rate_alone: bool. Whether a new learning rate may be set between the gradients and the optimizer's step.
        size: int. Number of values of the layout.

    Example:
        >>> tail = GradientTail(0, 1, 2)
        >>> slot = np.empty(tail.size, np.float32)
        >>> tail.write(slot, TrainerControl(learning_rate=0.1), np.array([1 / 3, 2.0]))
        >>> tail.control(slot) == TrainerControl(learning_rate=0.1), (tail.metrics(slot) == [1 / 3, 2.0]).all()
        (True, np.True_)
    """

    def __init__(self, rank: int, ranks: int, values: int) -> None:
        self.rank, self.ranks, self.values, self.rate_alone = rank, ranks, values, True
        self._metrics = 1 + _WORDS  # index of the first metric, after the note and the learning rate
        self.size = self._metrics + _WORDS * ranks * values

    @classmethod
    def of(cls, job: FitConfig, rank: int) -> GradientTail:
        """Return the layout for a job."""
        carried = not job.repeats and job.metric_values * job.workers * _WORDS <= _LARGE
        return cls(rank, job.workers, job.metric_values if carried else 0)

    def write(self, out: Array, control: TrainerControl | None, state: Array) -> None:
        """Write this rank's values.

        Args:
            out: float array of ``size`` values.
            control: on rank 0 the control message, or None.
            state: flat float64 array. The metric state, of at most ``values`` values if these are not 0.
        """
        out[:] = 0
        if control is not None and control != TrainerControl():
            rate_only = self.rate_alone and control == TrainerControl(learning_rate=control.learning_rate)
            out[0] = _RATE if rate_only else _MORE
            out[1 : self._metrics] = np.array([control.learning_rate or 0.0]).view(np.uint16)
        if self.values:
            begin = self._metrics + _WORDS * self.rank * self.values
            out[begin : begin + _WORDS * state.size] = state.view(np.uint16)

    def control(self, summed: Array) -> TrainerControl | None:
        """Return rank 0's control message: empty, or a new learning rate. None: rank 0 must send it separately."""
        note = summed.item(0)
        if note == _MORE:
            return None
        return (
            TrainerControl(learning_rate=_joined(summed[1 : self._metrics]).item())
            if note == _RATE
            else TrainerControl()
        )

    def metrics(self, summed: Array) -> Array:
        """Return the sum of all ranks' metric states, added in the order of the ranks; float64 of ``values`` values."""
        total: Array = _joined(summed[self._metrics :]).reshape(self.ranks, self.values).sum(axis=0)
        return total


def _joined(values: Array) -> Array:
    """Return the float64 values that were written as 16-bit numbers."""
    return values.astype(np.uint16).view(np.float64)
