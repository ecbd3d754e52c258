"""The backend's profiler for a window of steps of a ``fit`` in this process."""

from __future__ import annotations

import os
import sys
from typing import Any

import keras

from choros.argument_checks import check_path
from choros.backends.profiler import StepProfiler, window_of
from choros.object_text import call_text


class Profile(keras.callbacks.Callback):  # type: ignore[misc]
    """Callback that runs the profiler of JAX, PyTorch or TensorFlow for a window of steps.

    It profiles this process: a plain ``fit``, that of ``make_parallel``, or a rank of a job. The workers of a
    ``Trainer`` are other processes: ``Trainer(profile=)`` profiles them. ``choros.backends.profiler.StepProfiler``
    describes the files. If the profiler cannot run, a warning is logged and training continues.

    Args:
        directory: str or path. Created if it is missing.
        profile_batches: (first, last), both inclusive, counted from 0 over all epochs of this ``fit``. The window
            should begin after compilation. Defaults to (10, 14). A window that the end of training cuts short is
            written too.

    Raises:
        InvalidInputError: ``directory`` is not a path, ``first`` is negative, or ``last`` is smaller than ``first``.

    Example:
        >>> callback = Profile("profile", profile_batches=(20, 22))
        >>> callback.first_step, callback.steps
        (20, 3)
    """

    def __init__(self, directory: str | os.PathLike[str], profile_batches: tuple[int, int] = (10, 14)) -> None:
        super().__init__()
        self.directory = check_path("directory", directory)
        self.first_step, self.steps = window_of(profile_batches)
        self.profiler: StepProfiler | None = None
        self._begun = 0

    def __repr__(self) -> str:
        return call_text(self, self.directory, profile_batches=(self.first_step, self.first_step + self.steps - 1))

    def mine(self) -> str | None:
        """Return the subdirectory for the files of this process; None if this process does not profile."""
        return ""

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Reset the step count to 0."""
        folder = self.mine()
        if folder is not None:
            process = folder.replace("-", " ") or "this process"
            path = os.path.join(self.directory, folder)
            self.profiler = StepProfiler(path, self.first_step, self.steps, process)

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Start the profiler at the first step of the window."""
        self._begun = batch
        if self.profiler is not None:
            self.profiler.before_step()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Count the steps of this call, and stop the profiler after the last step of the window."""
        if self.profiler is not None:
            self.profiler.after_step(lambda: _wait(logs), batch - self._begun + 1)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Stop the profiler if it still runs."""
        if self.profiler is not None:
            self.profiler.end()


def _wait(logs: dict[str, Any] | None) -> None:
    """Return when the device has calculated the logs."""
    if keras.backend.backend() == "jax":
        sys.modules["jax"].block_until_ready(logs)
