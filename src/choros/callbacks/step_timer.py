"""A measurement of some steps of a ``fit``, for ``choros tune``."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import keras


class StepTimer(keras.callbacks.Callback):  # type: ignore[misc]
    """Callback that times the steps after a warm-up, over the epochs of all fits, and reports their times once.

    Args:
        warmup: int. Steps before the measurement, which compile.
        steps: int. Measured steps.
        report: called with the seconds of each measured step, and the number of steps of an epoch or None.

    Example:
        >>> import numpy as np
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        >>> model.compile("sgd", "mse")
        >>> timer = StepTimer(1, 2, lambda seconds, steps: print(len(seconds), steps))
        >>> _ = model.fit(np.ones((8, 2)), np.ones(8), batch_size=2, verbose=0, callbacks=[timer])
        2 4
    """

    def __init__(self, warmup: int, steps: int, report: Callable[[list[float], int | None], None]) -> None:
        super().__init__()
        self.warmup, self.steps, self.report, self.times = warmup, steps, report, list[float]()
        self._last = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Record the time since the end of the last step, whose metrics the device must have finished."""
        if logs:
            float(next(iter(logs.values())))
        now = time.perf_counter()
        self.times.append(now - self._last)
        self._last = now
        if len(self.times) == self.warmup + self.steps:
            self.report(self.times[self.warmup :], (self.params or {}).get("steps"))
