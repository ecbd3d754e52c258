"""The warning about arguments of a ``Trainer`` that have no effect."""

from __future__ import annotations

import logging
import os
from functools import cache
from typing import TYPE_CHECKING, Any

from choros.comm.bootstrap.select import MPI, SHARED
from choros.errors import warn_without_effect

if TYPE_CHECKING:
    from choros.algorithms import Algorithm

logger = logging.getLogger(__name__)

PROFILED = (10, 14)  # the default of ``profile_batches``


def warn_of_unused_arguments(
    algorithm: Algorithm, workers: int | None, arguments: dict[str, Any], pool: object, launcher: object, job: str
) -> None:
    """Warn once of each argument of a ``Trainer`` and of its algorithm that was given and has no effect.

    Args:
        algorithm: the algorithm.
        workers: the argument of ``Trainer``.
        arguments: the arguments ``threads``, ``bind``, ``devices``, ``echo``, ``profile`` and ``profile_batches``.
        pool: the argument of ``Trainer``.
        launcher: the launcher or executor, or None for workers of this machine.
        job: str. The launcher of the job that this process is a rank of; "" for none.
    """
    for argument, reason in algorithm.unused().items():
        warn_without_effect(type(algorithm).__name__, reason, **{argument: True})
    if type(algorithm).__name__ == "Single":
        warn_without_effect("Trainer", "Single has one worker", workers=workers not in (None, 1))
    has_window = arguments["profile"] is None and arguments["profile_batches"] not in (PROFILED, [*PROFILED])
    warn_without_effect("Trainer", "no directory is given by profile=", profile_batches=has_window)
    settings = {
        "threads": arguments["threads"] is not None,
        "bind": not arguments["bind"],
        "echo": not arguments["echo"],
        "devices": arguments["devices"] != "auto",
    }
    if pool is not None:
        warn_without_effect("Trainer", "the workers of pool= have the settings of the pool", **settings)
    elif job:
        settings["devices"] = arguments["devices"] in ("cpu", "gpu")  # "shared" has an effect
        warn_without_effect("Trainer", f"this process is a rank of a job that {job} started", **settings)
    elif launcher is not None:
        devices = settings["devices"]
        warn_without_effect("Trainer", "the ranks choose their devices themselves", devices=devices)
    transport = os.environ.get("CHOROS_COMM", "")
    if not job and launcher is None and transport not in ("", SHARED, MPI):  # for MPI, ``find_place`` logs it
        _log_local(transport)


@cache
def _log_local(transport: str) -> None:
    """Log once that local workers do not use the transport. Not a warning: a site may set the variable for jobs."""
    logger.warning(
        f"CHOROS_COMM={transport} has no effect on the workers of a Trainer on this machine, which exchange by shared "
        "memory: it is for the ranks of a job. Unset it, or start this script with choros run, mpiexec or torchrun"
    )
