"""Values after the gradients in the same all-reduce: the metrics of all ranks, and rank 0's control message."""

from __future__ import annotations

import numpy as np

from choros.training.spec import FitConfig, TrainerControl
from choros.types import Array

_WORDS_PER_VALUE = 4  # 16-bit words of a float64; a float32 holds each of them exactly
_MAX_METRIC_WORDS = 1 << 16  # of all ranks' metrics; with more, the metrics are summed separately
_RATE_ONLY, _SENT_SEPARATELY = 1.0, 2.0  # notes: only a new learning rate; rank 0 sends the message separately


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
        self._metrics = 1 + _WORDS_PER_VALUE  # index of the first metric, after the note and the learning rate
        self.size = self._metrics + _WORDS_PER_VALUE * ranks * values

    @classmethod
    def of(cls, job: FitConfig, rank: int) -> GradientTail:
        """Return the layout for a job."""
        includes_metrics = not job.repeats and job.metric_values * job.workers * _WORDS_PER_VALUE <= _MAX_METRIC_WORDS
        return cls(rank, job.workers, job.metric_values if includes_metrics else 0)

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
            out[0] = _RATE_ONLY if rate_only else _SENT_SEPARATELY
            out[1 : self._metrics] = np.array([control.learning_rate or 0.0]).view(np.uint16)
        if self.values:
            begin = self._metrics + _WORDS_PER_VALUE * self.rank * self.values
            out[begin : begin + _WORDS_PER_VALUE * state.size] = state.view(np.uint16)

    def control(self, summed: Array) -> TrainerControl | None:
        """Return rank 0's control message: empty, or a new learning rate. None: rank 0 must send it separately."""
        note = summed.item(0)
        if note == _SENT_SEPARATELY:
            return None
        return (
            TrainerControl(learning_rate=_decode(summed[1 : self._metrics]).item())
            if note == _RATE_ONLY
            else TrainerControl()
        )

    def metrics(self, summed: Array) -> Array:
        """Return the sum of all ranks' metric states, added in the order of the ranks; float64 of ``values`` values."""
        total: Array = _decode(summed[self._metrics :]).reshape(self.ranks, self.values).sum(axis=0)
        return total


def _decode(values: Array) -> Array:
    """Return the float64 values that were written as 16-bit numbers."""
    return values.astype(np.uint16).view(np.float64)
