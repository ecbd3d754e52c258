"""Choros: train one Keras 3 model with many workers.

    >>> import choros
    >>> choros.algorithms()["AEASGD"]  # doctest: +ELLIPSIS
    '...'

Nothing heavy is imported before it is used: no framework, not even numpy. Import it before Keras: where nothing names a
backend that is installed and only one is, it chooses that one (see ``choros.backend_choice``). A rank of a job gets its
GPU then (see ``choros.device_choice``).
"""

from __future__ import annotations

import gc
import importlib
from typing import TYPE_CHECKING, Any

from choros.backend_choice import choose as _choose
from choros.device_choice import allocate_as_needed as _allocate_as_needed
from choros.device_choice import choose_when_imported as _choose_device_when_imported

if TYPE_CHECKING:
    from choros import algorithms, callbacks, data, errors, hvd, launchers, native, parallel, spark
    from choros.algorithms import (
        ADAG,
        AEASGD,
        AGN,
        DOWNPOUR,
        EAMSGD,
        EASGD,
        AllReduce,
        Averaging,
        DiLoCo,
        DynSGD,
        Ensemble,
        LocalSGD,
        Single,
    )
    from choros.checking import check
    from choros.checkpoints import Checkpoint
    from choros.cluster import Place
    from choros.data import files, prefetch
    from choros.errors import BadInput, ChorosError, WorkerFailed
    from choros.hvd.rows import shard
    from choros.launchers import Mpiexec, Srun, Ssh
    from choros.runner import run
    from choros.spark.launcher import Spark
    from choros.trainer import Trainer
    from choros.training.first import rank0_first
    from choros.training.pool import WorkerPool
    from choros.training.record import RunRecord, WorkerRecord

__version__ = "0.1.0"

_ALGORITHMS = "ADAG AEASGD AGN AllReduce Averaging DOWNPOUR DiLoCo DynSGD EAMSGD EASGD Ensemble LocalSGD Single"
_PACKAGES = ("algorithms", "callbacks", "data", "errors", "hvd", "launchers", "native", "parallel", "spark")
_WHERE = {
    **dict.fromkeys(_ALGORITHMS.split(), "choros.algorithms"),
    **dict.fromkeys(("BadInput", "ChorosError", "WorkerFailed"), "choros.errors"),
    "Checkpoint": "choros.checkpoints",
    "Place": "choros.cluster",
    **dict.fromkeys(("files", "prefetch"), "choros.data"),
    **dict.fromkeys(("Mpiexec", "Srun", "Ssh"), "choros.launchers"),
    "check": "choros.checking",
    "rank0_first": "choros.training.first",
    "run": "choros.runner",
    "shard": "choros.hvd.rows",
    "Spark": "choros.spark.launcher",
    "Trainer": "choros.trainer",
    "WorkerPool": "choros.training.pool",
    "RunRecord": "choros.training.record",
    "WorkerRecord": "choros.training.record",
}

__all__ = [
    "ADAG",
    "AEASGD",
    "AGN",
    "DOWNPOUR",
    "EAMSGD",
    "EASGD",
    "AllReduce",
    "Averaging",
    "BadInput",
    "Checkpoint",
    "ChorosError",
    "DiLoCo",
    "DynSGD",
    "Ensemble",
    "LocalSGD",
    "Mpiexec",
    "Place",
    "RunRecord",
    "Single",
    "Spark",
    "Srun",
    "Ssh",
    "Trainer",
    "WorkerFailed",
    "WorkerPool",
    "WorkerRecord",
    "algorithms",
    "callbacks",
    "check",
    "data",
    "errors",
    "files",
    "hvd",
    "launchers",
    "native",
    "parallel",
    "prefetch",
    "rank0_first",
    "run",
    "shard",
    "spark",
]


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(_imported(_WHERE[name]), name)
    if name in _PACKAGES:
        return _imported(f"choros.{name}")
    raise AttributeError(f"module 'choros' has no attribute {name!r}")


def _imported(name: str) -> Any:
    """Import a module while garbage rests; all that is there then counts as old.

    To look through all of Keras for garbage takes 0.1 s of each rank, and what is imported is none.
    """
    running = gc.isenabled()
    gc.disable()
    try:
        return importlib.import_module(name)
    finally:
        if not gc.get_freeze_count():
            gc.freeze()
            gc.unfreeze()
        if running:
            gc.enable()


def __dir__() -> list[str]:
    return sorted(__all__)


_choose()
_allocate_as_needed()
_choose_device_when_imported()
