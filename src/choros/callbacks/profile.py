"""The backend's profiler for a window of steps of a ``fit`` in this process."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from typing import Any

import keras

from choros.errors import InvalidInputError

logger = logging.getLogger(__name__)


class Profile(keras.callbacks.Callback):  # type: ignore[misc]
    """Callback that runs the profiler of JAX, PyTorch or TensorFlow for a window of steps.

    TensorBoard and XProf read the files of JAX and TensorFlow. JAX adds a ``.trace.json.gz`` for Perfetto. PyTorch
    writes ``trace.json`` for Perfetto. If the profiler cannot run, for example because another profiler is running,
    the callback prints a message on stderr and training continues. It profiles this process: a plain ``fit``, that of
    ``make_parallel``, or a rank of a job. The workers of a ``Trainer`` are other processes and are not profiled.

    Args:
        directory: str or path. Created if it is missing.
        profile_batches: (first, last), both inclusive, counted from 0 over all epochs of this ``fit``. The window
            should begin after compilation. Defaults to (10, 14). A window that the end of training cuts short is
            written too.

    Raises:
        InvalidInputError: ``first`` is negative, or ``last`` is smaller than ``first``.

    Example:
        >>> callback = Profile("profile", profile_batches=(20, 22))
        >>> callback.first_step, callback.steps
        (20, 3)
    """

    def __init__(self, directory: str | os.PathLike[str], profile_batches: tuple[int, int] = (10, 14)) -> None:
        super().__init__()
        first, last = profile_batches
        if first < 0 or last < first:
            raise InvalidInputError(
                f"profile_batches=({first}, {last}): give a first step of 0 or more, and a last step that is not less."
            )
        self.directory, self.first_step, self.steps = os.fspath(directory), first, last - first + 1
        self._stop: Callable[[], None] | None = None
        self._done, self._begun, self._over = 0, 0, True

    def mine(self) -> str | None:
        """Return the subdirectory for the files of this process; None if this process does not profile."""
        return ""

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Reset the step count to 0."""
        self._done, self._over = 0, self.mine() is None

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Start the profiler at the first step of the window."""
        self._begun = batch
        if not self._over and self._stop is None and self._done >= self.first_step:
            self._stop = self._try("start", self._start)
            self._over = self._stop is None

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Count the steps of this call, and stop the profiler after the last step of the window."""
        self._done += batch - self._begun + 1
        if self._stop is not None and self._done >= self.first_step + self.steps:
            if keras.backend.backend() == "jax":
                sys.modules["jax"].block_until_ready(logs)
            self._end()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Stop the profiler if it still runs."""
        self._end()

    def _start(self) -> Callable[[], None]:
        where = os.path.join(self.directory, self.mine() or "")
        os.makedirs(where, exist_ok=True)
        return _PROFILERS[keras.backend.backend()](where)

    def _end(self) -> None:
        if self._stop is not None:
            stop, self._stop, self._over = self._stop, None, True
            self._try("stop", stop)

    def _try(self, what: str, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as error:
            process_name = (self.mine() or "this process").replace("-", " ")
            logger.warning(
                f"{process_name} could not {what} the profiler of {keras.backend.backend()}, so training "
                f"continues "
                f"without a profile: {type(error).__name__}: {error}"
            )


def _jax(where: str) -> Callable[[], None]:
    profiler: Any = sys.modules["jax"].profiler
    profiler.start_trace(where)
    return lambda: profiler.stop_trace()


def _torch(where: str) -> Callable[[], None]:
    profile: Any = sys.modules["torch"].profiler.profile()
    profile.start()

    def stop() -> None:
        profile.stop()
        profile.export_chrome_trace(os.path.join(where, "trace.json"))

    return stop


def _tensorflow(where: str) -> Callable[[], None]:
    profiler: Any = sys.modules["tensorflow"].profiler.experimental
    profiler.start(where)
    return lambda: profiler.stop()


_PROFILERS = {"jax": _jax, "torch": _torch, "tensorflow": _tensorflow}
