"""The backend's own profiler, beside the timeline, for a window of steps of a ``fit``."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import keras

from choros.errors import BadInput
from choros.hvd.context import rank


class ProfileCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Runs the profiler of JAX, PyTorch or TensorFlow for a window of steps, on rank 0 or the ranks given.

    Rank N's files are in ``directory/rank-N``: JAX's and TensorFlow's as TensorBoard and XProf read them (JAX adds
    a ``.trace.json.gz`` for Perfetto), PyTorch's as ``trace.json`` for Perfetto. Where the profiler cannot run, as
    another one is running say, this is told on stderr and training goes on.

    Args:
        directory: str or path. Made where it is missing.
        first_step: int. Steps of this ``fit`` before the window, which should cover compilation. Defaults to 10.
        steps: int. Steps in the window. Defaults to 5. A window that the end of training cuts is written too.
        ranks: whole numbers. Who profiles. Defaults to rank 0.

    Raises:
        BadInput: numbers that make no window.

    Example:
        >>> callback = ProfileCallback("profile", first_step=20, steps=3)
        >>> callback.first_step, callback.steps
        (20, 3)
    """

    def __init__(
        self, directory: str | os.PathLike[str], first_step: int = 10, steps: int = 5, ranks: Sequence[int] = (0,)
    ) -> None:
        super().__init__()
        if first_step < 0 or steps < 1:
            raise BadInput(f"first_step={first_step} and steps={steps} make no window: give 0 or more, and 1 or more.")
        self.directory, self.first_step, self.steps = os.fspath(directory), first_step, steps
        self.ranks = list(ranks)
        self._stop: Callable[[], None] | None = None
        self._done, self._begun, self._over = 0, 0, True

    def on_train_begin(self, logs: Any = None) -> None:
        """Count from 0."""
        self._done, self._over = 0, rank() not in self.ranks

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Start, when it is time."""
        self._begun = batch
        if not self._over and self._stop is None and self._done >= self.first_step:
            self._stop = self._try("start", self._start)
            self._over = self._stop is None

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Count the steps of this call, and stop after the last one."""
        self._done += batch - self._begun + 1
        if self._stop is not None and self._done >= self.first_step + self.steps:
            if keras.backend.backend() == "jax":
                sys.modules["jax"].block_until_ready(logs)
            self._end()

    def on_train_end(self, logs: Any = None) -> None:
        """Stop, where the window was not over."""
        self._end()

    def _start(self) -> Callable[[], None]:
        where = os.path.join(self.directory, f"rank-{rank()}")
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
            print(
                f"choros: rank {rank()} could not {what} the profiler of {keras.backend.backend()}, and trains on "
                f"without: {type(error).__name__}: {error}",
                file=sys.stderr,
                flush=True,
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
