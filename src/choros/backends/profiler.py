"""The backend's own profiler, for a window of steps of this process."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import keras

from choros.argument_checks import check_whole
from choros.errors import InvalidInputError

logger = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")


class StepProfiler:
    """The profiler of JAX, PyTorch or TensorFlow, run for a window of steps.

    TensorBoard and XProf read the files of JAX and TensorFlow. JAX adds a ``.trace.json.gz`` for Perfetto. PyTorch
    writes ``trace.json`` for Perfetto. If the profiler cannot run, for example because another profiler is running, a
    warning is logged and training continues.

    Args:
        directory: str. The directory of the files. Created when the window begins.
        first_step: int. Steps before the window.
        steps: int. Steps in the window.
        process: str. The name of this process in messages. Defaults to "this process".

    Attributes:
        running: bool. Whether the profiler runs.

    Example:
        >>> profiler = StepProfiler("profile", first_step=1, steps=1)
        >>> profiler.before_step(), profiler.running
        (None, False)
    """

    def __init__(self, directory: str, first_step: int, steps: int, process: str = "this process") -> None:
        self.directory, self.first_step, self.steps, self.process = directory, first_step, steps, process
        self._stop: Callable[[], None] | None = None
        self._done, self._over = 0, False

    @property
    def running(self) -> bool:
        """True between the first and the last step of the window."""
        return self._stop is not None

    def before_step(self) -> None:
        """Start the profiler if the window begins."""
        if not self._over and self._stop is None and self._done >= self.first_step:
            self._stop = self._attempt("start", self._start)
            self._over = self._stop is None

    def after_step(self, finish_steps: Callable[[], object], steps: int = 1) -> None:
        """Count steps, and stop the profiler after the last step of the window.

        Args:
            finish_steps: returns when the device has finished the steps. Called only at the end of the window.
            steps: int. The number of steps since ``before_step``. Defaults to 1.
        """
        self._done += steps
        if self._stop is not None and self._done >= self.first_step + self.steps:
            finish_steps()
            self.end()

    def end(self) -> None:
        """Stop the profiler, if it runs, and write its files."""
        if self._stop is not None:
            stop, self._stop, self._over = self._stop, None, True
            self._attempt("stop", stop)

    def _start(self) -> Callable[[], None]:
        os.makedirs(self.directory, exist_ok=True)
        return _PROFILERS[keras.backend.backend()](self.directory)

    def _attempt(self, action: str, call: Callable[[], ResultT]) -> ResultT | None:
        """Return the result of a call, or log a warning and return None if the call fails."""
        try:
            return call()
        # A failure of the profiler must not end the training.
        except Exception as error:
            logger.warning(
                f"{self.process} could not {action} the profiler of {keras.backend.backend()}, so training continues "
                f"without a profile: {type(error).__name__}: {error}"
            )
            return None


def window_of(profile_batches: tuple[int, int]) -> tuple[int, int]:
    """Return the steps before a window of batches, and the steps in it.

    Args:
        profile_batches: (first, last), both inclusive, counted from 0.

    Raises:
        InvalidInputError: ``first`` is negative, or ``last`` is smaller than ``first``.

    Example:
        >>> window_of((10, 14))
        (10, 5)
    """
    try:
        first, last = (check_whole("profile_batches", step, 0) for step in profile_batches)
    except (TypeError, ValueError):  # not two values, or not whole numbers
        first, last = 0, -1
    if last < first:
        raise InvalidInputError(
            f"profile_batches={profile_batches!r}: give a first step of 0 or more, and a last step that is not less."
        )
    return first, last - first + 1


def _jax(directory: str) -> Callable[[], None]:
    profiler: Any = sys.modules["jax"].profiler
    profiler.start_trace(directory)
    return lambda: profiler.stop_trace()


def _torch(directory: str) -> Callable[[], None]:
    profile: Any = sys.modules["torch"].profiler.profile()
    profile.start()

    def stop() -> None:
        profile.stop()
        profile.export_chrome_trace(os.path.join(directory, "trace.json"))

    return stop


def _tensorflow(directory: str) -> Callable[[], None]:
    profiler: Any = sys.modules["tensorflow"].profiler.experimental
    profiler.start(directory)
    return lambda: profiler.stop()


_PROFILERS = {"jax": _jax, "torch": _torch, "tensorflow": _tensorflow}
