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
import sys
import time
from collections.abc import Callable
from typing import Any

import choros
from choros.callbacks.step_timer import StepTimer
from choros.cluster import Place
from choros.tools.tune.settings import TUNE, TuneSettings

_FOREVER = 3600.0  # seconds that a rank waits for its end


def write_result(path: str, step: float, steps: int | None) -> None:
    """Write the result of a trial to a file, which then appears as a whole.

    Args:
        path: str. The file.
        step: float. Median seconds of a step.
        steps: int or None. Steps of an epoch.
    """
    with open(f"{path}.part", "w") as file:
        json.dump({"step": step, "epoch": steps and steps * step}, file)
    os.replace(file.name, path)


def add_callback(fit: Callable[..., Any], timer: StepTimer) -> Callable[..., Any]:
    """Return a function like ``fit`` that adds a callback."""
    signature = inspect.signature(fit)

    @functools.wraps(fit)
    def timed(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        callbacks = bound.arguments.get("callbacks") or []
        callbacks = callbacks if isinstance(callbacks, (list, tuple)) else [callbacks]
        if timer not in callbacks:
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
    import keras

    place, settings = Place.here(), TuneSettings.of(os.environ[TUNE])

    def report(step: float, steps: int | None) -> None:
        """Write the result on rank 0, and wait for the end of this process."""
        if place.rank == 0:
            write_result(settings.path, step, steps)
        time.sleep(_FOREVER)

    timer = StepTimer(settings.warmup, settings.steps, report)
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
