"""A callback that adds the speed of a run, and the shares of exchanging and waiting, to the logs of each epoch."""

from __future__ import annotations

from typing import Any

import keras

from choros.errors import warn
from choros.object_text import call_text


class RunMetrics(keras.callbacks.Callback):  # type: ignore[misc]
    """Callback that adds figures of all workers to the logs of each epoch of ``Trainer.fit``.

    Progress bar, ``History``, TensorBoard, CSVLogger and trackers show them like metrics:

    - ``samples_per_second``: rows that all workers together train in a second.
    - ``exchanging``: share of their time in exchanges, including the wait for other workers (0 to 1).
    - ``waiting``: share of their time in which they wait for data (0 to 1).
    - ``staleness``: asynchronous algorithms only. The mean number of exchanges by other workers between an exchange of
      a worker and its previous one.

    The time of an epoch begins with its first batch, and ends before validation and callbacks. The first step of each
    shape, which compiles, does not count. If a worker resumes within an epoch, its figures begin there.
    ``history.run`` has the figures of the whole run, for each worker.

    In other fits (plain Keras, ``choros.hvd``) it adds nothing, and warns.

    Example:
        >>> RunMetrics()
        RunMetrics()
    """

    # Read by ``Trainer``, which does not import this package.
    adds_run_metrics = True

    def __init__(self) -> None:
        super().__init__()
        self._warned = False

    def __repr__(self) -> str:
        return call_text(self)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Warn if the workers have added no figures."""
        if "exchanging" not in (logs or {}) and not self._warned:
            self._warned = True
            warn("RunMetrics adds figures in the fit of a choros.Trainer only: this fit has none.")
