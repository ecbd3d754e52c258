"""The program of a rank of ``choros tune``: the user's script, whose ``fit`` ends after the measured steps.

A callback is added to ``keras.Model.fit`` and to ``choros.Trainer.fit``. In the trial of plain ``fit`` the latter calls
the former. Rank 0 writes the median time of a step, and
then waits for its end by ``choros tune``. If the script ends before, it writes the numbers of fits and steps.
"""

from __future__ import annotations

import functools
import inspect
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import choros
from choros.callbacks.step_timer import StepTimer
from choros.cluster import Place
from choros.launch.process.python_target import run_target
from choros.tools.tune.settings import SEEN, TUNE, TuneSettings

_FOREVER = 3600.0  # seconds that a rank waits for its end
_TRAINER_FIT = choros.Trainer.fit


def write_result(path: str, times: list[float], steps: int | None) -> None:
    """Write the result of a trial to a file, which then appears as a whole.

    Args:
        path: str. The file.
        times: list of float. Seconds of each measured step.
        steps: int or None. Steps of an epoch.
    """
    step = statistics.median(times)
    low, _, high = statistics.quantiles(times, method="inclusive") if len(times) > 1 else [step] * 3
    # Of the median of independent normal values: 1.96 times 1.25 standard deviations, each 1 / 1.35 of the quartiles'
    # difference, over the root of their number. One outlier does not change the quartiles.
    uncertainty = 1.96 * 1.25 * (high - low) / 1.35 / math.sqrt(len(times))
    with open(f"{path}.part", "w") as file:
        json.dump({"step": step, "epoch": steps and steps * step, "uncertainty": uncertainty}, file)
    os.replace(file.name, path)


def with_argument(function: Callable[..., Any], name: str, change: Callable[[Any], Any]) -> Callable[..., Any]:
    """Return a function like the given one that changes one of its arguments.

    Args:
        function: any function with a parameter of this name.
        name: str.
        change: returns the new value; called with the given value, or None.

    Example:
        >>> with_argument(lambda x, y=1: (x, y), "y", lambda y: 7)(1)
        (1, 7)
    """
    position = list(inspect.signature(function).parameters).index(name)

    @functools.wraps(function)
    def changed(*args: Any, **kwargs: Any) -> Any:
        if position < len(args):
            return function(*args[:position], change(args[position]), *args[position + 1 :], **kwargs)
        return function(*args, **{**kwargs, name: change(kwargs.get(name))})

    return changed


def add_timer(callbacks: Any, timer: StepTimer) -> list[Any]:
    """Return the argument ``callbacks`` of ``fit`` as a list that has the timer once."""
    callbacks = callbacks or []
    callbacks = list(callbacks) if isinstance(callbacks, (list, tuple)) else [callbacks]
    return callbacks if timer in callbacks else [*callbacks, timer]


def plain_fit(trainer: choros.Trainer, *args: Any, **kwargs: Any) -> Any:
    """Train the model of a Trainer by ``model.fit`` of Keras; arguments that only Choros has are left out."""
    given = inspect.signature(_TRAINER_FIT).bind_partial(trainer, *args, **kwargs).arguments
    known = inspect.signature(trainer.model.fit).parameters
    return trainer.model.fit(**{name: value for name, value in given.items() if name in known})


def main() -> None:
    """Run the script or module of the command line with a timer in each fit."""
    import keras

    place, settings = Place.here(), TuneSettings.of(os.environ[TUNE])

    def report(times: list[float], steps: int | None) -> None:
        """Write the result on rank 0, and wait for the end of this process."""
        if place.rank == 0:
            write_result(settings.path, times, steps)
        time.sleep(_FOREVER)

    fits = 0

    def timed(callbacks: Any) -> list[Any]:
        """Count a fit, and add the timer to its callbacks."""
        nonlocal fits
        fits += 1
        return add_timer(callbacks, timer)

    timer = StepTimer(settings.warmup, settings.steps, report)
    owners: tuple[Any, ...] = (keras.Model, choros.Trainer)
    for owner in owners:
        owner.fit = with_argument(owner.fit, "callbacks", timed)
    if settings.plain:
        choros.Trainer.fit = plain_fit  # type: ignore[method-assign,assignment]
    if place.size == 1:  # the only rank trains alone, and starts no workers
        choros.Trainer.__init__ = with_argument(  # type: ignore[method-assign]
            choros.Trainer.__init__, "workers", lambda workers: 1
        )
    try:
        run_target(sys.argv[1:])
    finally:
        with suppress(OSError):  # the folder is gone if this trial was ended
            if place.rank == 0:
                text = json.dumps({"fits": fits, "steps": len(timer.times)})
                Path(f"{settings.path}{SEEN}").write_text(text)


if __name__ == "__main__":
    main()
