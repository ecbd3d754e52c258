"""The program of a rank of ``choros tune``: the user's script, whose ``fit`` ends after the measured steps.

A callback is added to ``keras.Model.fit`` and to ``choros.Trainer.fit``. Rank 0 writes the median time of a step, and
then waits for its end by ``choros tune``.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import runpy
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import keras

import choros
from choros.cluster import Place
from choros.tools.tune.settings import TUNE, TuneSettings

_FOREVER = 3600.0  # seconds that a rank waits for its end


class StepTimer(keras.callbacks.Callback):  # type: ignore[misc]
    """Callback that times the steps after a warm-up, writes their median to a file, and then waits for its end.

    Args:
        settings: TuneSettings.
        lead: bool. Whether this process writes the result.
    """

    def __init__(self, settings: TuneSettings, lead: bool) -> None:
        super().__init__()
        self.settings, self.lead, self.times = settings, lead, list[float]()
        self._last = 0.0

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Record the time since the end of the last step. On JAX this waits for the step's metrics."""
        if logs:
            float(next(iter(logs.values())))
        now = time.perf_counter()
        self.times.append(now - self._last)
        self._last = now
        if len(self.times) >= self.settings.warmup + self.settings.steps:
            self._finish()

    def _finish(self) -> None:
        if self.lead:
            step = statistics.median(self.times[self.settings.warmup :])
            steps = (self.params or {}).get("steps")
            text = json.dumps({"step": step, "epoch": steps and steps * step})
            with open(f"{self.settings.path}.part", "w") as file:
                file.write(text)
            os.replace(file.name, self.settings.path)
        time.sleep(_FOREVER)


def add_callback(fit: Callable[..., Any], timer: StepTimer) -> Callable[..., Any]:
    """Return a function like ``fit`` that adds a callback."""
    signature = inspect.signature(fit)

    @functools.wraps(fit)
    def timed(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        callbacks = bound.arguments.get("callbacks") or []
        callbacks = callbacks if isinstance(callbacks, (list, tuple)) else [callbacks]
        if not any(isinstance(callback, StepTimer) for callback in callbacks):
            bound.arguments["callbacks"] = [*callbacks, timer]
        return fit(*bound.args, **bound.kwargs)

    return timed


def with_one_worker(init: Callable[..., None]) -> Callable[..., None]:
    """Return a function like ``Trainer.__init__`` that starts one worker: the only rank is to train alone."""
    signature = inspect.signature(init)

    @functools.wraps(init)
    def single(*args: Any, **kwargs: Any) -> None:
        bound = signature.bind(*args, **kwargs)
        bound.arguments["workers"] = 1
        init(*bound.args, **bound.kwargs)

    return single


def main() -> None:
    """Run the script or module of the command line."""
    place = Place.here()
    timer = StepTimer(TuneSettings.of(os.environ[TUNE]), place.rank == 0)
    keras.Model.fit = add_callback(keras.Model.fit, timer)
    choros.Trainer.fit = add_callback(choros.Trainer.fit, timer)  # type: ignore[method-assign]
    if place.size == 1:
        choros.Trainer.__init__ = with_one_worker(choros.Trainer.__init__)  # type: ignore[method-assign]
    module = sys.argv[1] == "-m"
    sys.argv = sys.argv[2:] if module else sys.argv[1:]
    if module:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        return
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
