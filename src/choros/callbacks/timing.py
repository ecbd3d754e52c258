"""Times of steps and epochs, with the names and figures of keras_experiments and keras-multi-gpu."""

from __future__ import annotations

import statistics
import time
from typing import Any

import keras

from choros.argument_checks import check_whole
from choros.console import write_line
from choros.errors import counted
from choros.object_text import call_text


class BatchTiming(keras.callbacks.Callback):  # type: ignore[misc]
    """Callback that times every step and epoch, and prints one line per epoch and one at the end.

    The first steps compile, but they hardly change the median of the steps. The overhead of an epoch is the time
    beyond its number of steps times their median: compilation, validation, other callbacks, waiting for data.

    Args:
        warmup: int. First steps of training that ``steps`` leaves out. Defaults to 1.
        verbose: 0 or 1. Defaults to 1.

    Attributes:
        steps: list of float. Seconds of each step, without the warm-up.
        epochs: list of float. Seconds of each epoch.
        median: float. Median of ``steps``, in seconds; NaN before the first step.
        overhead: list of float. For each epoch, its seconds minus its number of steps times the median of its steps.
        total: float. Seconds of all epochs; ``total_but_first``: of all epochs but the first.

    Raises:
        InvalidInputError: ``warmup`` is not a whole number, or negative.

    Example:
        >>> import numpy as np
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        >>> model.compile("sgd", "mse")
        >>> timing = BatchTiming(verbose=0)
        >>> _ = model.fit(np.ones((8, 2)), np.ones(8), batch_size=2, epochs=2, verbose=0, callbacks=[timing])
        >>> len(timing.steps), len(timing.epochs), timing.total_but_first < timing.total
        (7, 2, True)
    """

    def __init__(self, warmup: int = 1, verbose: int = 1) -> None:
        super().__init__()
        self.warmup, self.verbose = check_whole("warmup", warmup, 0, "steps"), verbose
        self._forget()

    def __repr__(self) -> str:
        return call_text(self, warmup=self.warmup, verbose=self.verbose)

    def _forget(self) -> None:
        self.steps: list[float] = []
        self.epochs: list[float] = []
        self.overhead: list[float] = []
        self._left_out = 0
        self._here: list[float] = []

    @property
    def median(self) -> float:
        """Median seconds of a step."""
        return statistics.median(self.steps) if self.steps else float("nan")

    @property
    def total(self) -> float:
        """Seconds of all epochs."""
        return sum(self.epochs)

    @property
    def total_but_first(self) -> float:
        """Seconds of all epochs but the first."""
        return sum(self.epochs[1:])

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Clear all times."""
        self._forget()

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Start an epoch's clock."""
        self._epoch, self._here = time.perf_counter(), []

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Start a step's clock."""
        self._step = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Stop the step's clock, and record the time unless the step is a warm-up."""
        taken = time.perf_counter() - self._step
        self._here.append(taken)
        if self._left_out < self.warmup:
            self._left_out += 1
        else:
            self.steps.append(taken)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Stop the epoch's clock, and print the epoch's line."""
        self.epochs.append(time.perf_counter() - self._epoch)
        usual = statistics.median(self._here) * len(self._here) if self._here else 0.0
        self.overhead.append(max(0.0, self.epochs[-1] - usual))
        self._write(f"epoch {epoch + 1}: {self._epoch_text()}")

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Print the line for all epochs."""
        if self.epochs:
            self._write(self._end_text())

    def _epoch_text(self) -> str:
        return f"{self.epochs[-1]:.2f} s, {self.overhead[-1]:.2f} s of it not in steps"

    def _end_text(self) -> str:
        return (
            f"{counted(len(self.epochs), 'epoch')} in {self.total:.2f} s "
            f"({self.total_but_first:.2f} s without the first), a step {1e3 * self.median:.2f} ms (median)"
        )

    def _write(self, text: str) -> None:
        if self.verbose:
            write_line(f"{type(self).__name__}: {text}")


class SamplesPerSec(BatchTiming):
    """Callback that measures rows per second, from the median step without the warm-up.

    Args:
        batch_size: int. Rows per step: of the global batch under a Trainer, of one rank's batch under ``choros.hvd``.
        warmup, verbose: as for ``BatchTiming``.

    Attributes:
        samples_per_sec: float. Rows per second.

    Raises:
        InvalidInputError: ``batch_size`` is not a whole number or below 1, or ``warmup`` is invalid.
    """

    def __init__(self, batch_size: int, warmup: int = 1, verbose: int = 1) -> None:
        super().__init__(warmup, verbose)
        self.batch_size = check_whole("batch_size", batch_size, 1, "rows")

    def __repr__(self) -> str:
        return call_text(self, self.batch_size, warmup=self.warmup, verbose=self.verbose)

    @property
    def samples_per_sec(self) -> float:
        """Rows per second."""
        return self.batch_size / self.median

    def _epoch_text(self) -> str:
        return f"{self.samples_per_sec:,.0f} samples/s (median)"

    def _end_text(self) -> str:
        return f"{self.samples_per_sec:,.0f} samples/s (median of {counted(len(self.steps), 'step')})"
