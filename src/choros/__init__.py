"""Choros: train one Keras 3 model with many workers.

    >>> import choros
    >>> choros.algorithms()["AEASGD"]  # doctest: +ELLIPSIS
    '...'

Heavy modules are imported at first use: no framework, not even numpy, is imported here. Import Choros before Keras. If
no setting names an installed backend and exactly one is installed, Choros chooses it (see ``choros.backend_choice``).
The import also prepares the choice of a rank's GPU (see ``choros.device_choice``).
"""

from __future__ import annotations

import gc
import importlib
from typing import TYPE_CHECKING, Any

from choros.backend_choice import choose as _choose
from choros.console import add_handler as _add_handler
from choros.device_choice import allocate_as_needed as _allocate_as_needed
from choros.device_choice import choose_when_imported as _choose_device_when_imported

if TYPE_CHECKING:
    from choros import algorithms, callbacks, cluster, data, errors, hvd, launch, native, parallel, spark
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
        list_algorithms,
    )
    from choros.cluster import Place
    from choros.comm.bootstrap.rank_zero import rank_zero_first
    from choros.data import files, prefetch
    from choros.errors import ChorosError, InvalidInputError, WorkerFailedError
    from choros.hvd.rank_shard import shard
    from choros.launch.ray_cluster.launcher import Ray
    from choros.launch.run_function import run
    from choros.launch.specs import Mpiexec, Srun, Ssh
    from choros.launch.submit_function import SubmittedJob, submit
    from choros.spark.launcher import Spark
    from choros.tools.check import check
    from choros.trainer import Trainer
    from choros.training.checkpoint import Checkpoint
    from choros.training.executors.idle_workers import close
    from choros.training.executors.worker_pool import WorkerPool
    from choros.training.run_record import RunRecord, WorkerRecord

__version__ = "0.1.0"

_ALGORITHMS = "ADAG AEASGD AGN AllReduce Averaging DOWNPOUR DiLoCo DynSGD EAMSGD EASGD Ensemble LocalSGD Single"
_PACKAGES = ("algorithms", "callbacks", "cluster", "data", "errors", "hvd", "launch", "native", "parallel", "spark")
_MODULE_OF = {
    **dict.fromkeys(_ALGORITHMS.split(), "choros.algorithms"),
    **dict.fromkeys(("InvalidInputError", "ChorosError", "WorkerFailedError"), "choros.errors"),
    "list_algorithms": "choros.algorithms",
    "Checkpoint": "choros.training.checkpoint",
    "Place": "choros.cluster",
    **dict.fromkeys(("files", "prefetch"), "choros.data"),
    **dict.fromkeys(("Mpiexec", "Srun", "Ssh"), "choros.launch.specs"),
    "check": "choros.tools.check",
    "close": "choros.training.executors.idle_workers",
    "rank_zero_first": "choros.comm.bootstrap.rank_zero",
    "Ray": "choros.launch.ray_cluster.launcher",
    "run": "choros.launch.run_function",
    **dict.fromkeys(("SubmittedJob", "submit"), "choros.launch.submit_function"),
    "shard": "choros.hvd.rank_shard",
    "Spark": "choros.spark.launcher",
    "Trainer": "choros.trainer",
    "WorkerPool": "choros.training.executors.worker_pool",
    "RunRecord": "choros.training.run_record",
    "WorkerRecord": "choros.training.run_record",
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
    "Checkpoint",
    "ChorosError",
    "DiLoCo",
    "DynSGD",
    "Ensemble",
    "InvalidInputError",
    "LocalSGD",
    "Mpiexec",
    "Place",
    "Ray",
    "RunRecord",
    "Single",
    "Spark",
    "Srun",
    "Ssh",
    "SubmittedJob",
    "Trainer",
    "WorkerFailedError",
    "WorkerPool",
    "WorkerRecord",
    "algorithms",
    "callbacks",
    "check",
    "close",
    "cluster",
    "data",
    "errors",
    "files",
    "hvd",
    "launch",
    "list_algorithms",
    "native",
    "parallel",
    "prefetch",
    "rank_zero_first",
    "run",
    "shard",
    "spark",
    "submit",
]


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        return getattr(_import_module(_MODULE_OF[name]), name)
    if name in _PACKAGES:
        return _import_module(f"choros.{name}")
    # obj=None: with the module, some tracebacks of Python would show its suggestion too.
    raise AttributeError(f"module 'choros' has no attribute {name!r}{_suggestion(name)}", name=name, obj=None)


def _suggestion(name: str) -> str:
    """Return a hint with the most similar public name, or ""."""
    if name.startswith("_"):  # libraries look for such names in every module
        return ""
    from choros.errors import nearest

    similar = nearest(name, __all__)
    return f": did you mean {similar!r}?" if similar else ""


def _import_module(name: str) -> Any:
    """Import a module without garbage collection, and move all objects to the oldest generation afterwards.

    A collection over all of Keras takes 0.1 s on each rank and finds nothing.
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
    return sorted([*__all__, "__version__"])


_add_handler()
_choose()
_allocate_as_needed()
_choose_device_when_imported()
