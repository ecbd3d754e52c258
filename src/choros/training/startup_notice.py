"""Messages while workers start, and the clock of Keras' progress bar, which begins with the training."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import keras

logger = logging.getLogger(__name__)


class StartupNotice:
    """Messages of a ``fit`` with ``verbose``: that workers start and, on a terminal, that they are ready.

    Args:
        workers: str. The workers, such as "2 workers (jax)"; "" if ``fit`` starts none, so that there is no message.
    """

    def __init__(self, workers: str) -> None:
        self._workers, self._begun_at = workers, time.perf_counter()
        if workers:
            logger.info(f"starting {workers} ...")

    def ready(self) -> None:
        """Report that all workers are ready, if stderr is a terminal."""
        if self._workers and sys.stderr is not None and sys.stderr.isatty():
            logger.info(f"{self._workers} ready after {time.perf_counter() - self._begun_at:.1f} s")

    @staticmethod
    def restart_bars(callbacks: Iterable[keras.callbacks.Callback]) -> None:
        """Restart the clocks of Keras' progress bars, after the first step, which compiles."""
        import keras

        for callback in callbacks:
            if isinstance(callback, keras.callbacks.ProgbarLogger):
                callback.progbar = None  # made again at the next batch
