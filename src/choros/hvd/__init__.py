"""Horovod's names for Keras 3: ``import choros.hvd as hvd`` in place of ``import horovod.keras as hvd``.

The package has ``init``, ``rank``, ``size`` and process sets; collectives on arrays and tensors of numpy, Keras, JAX,
PyTorch and TensorFlow; ``DistributedOptimizer`` and the gradient tape; callbacks, ``load_model``, elastic state and the
timeline. Names that need Keras are imported at their first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from choros.hvd.alltoall_rows import alltoall
from choros.hvd.collectives import (
    Adasum,
    Average,
    Max,
    Min,
    Product,
    Sum,
    allgather,
    allgather_object,
    allreduce,
    barrier,
    broadcast,
    broadcast_object,
    broadcast_variables,
    grouped_allgather,
    grouped_allreduce,
    grouped_reducescatter,
    join,
    reducescatter,
)
from choros.hvd.compression import Compression
from choros.hvd.context import (
    ProcessSet,
    add_process_set,
    cross_rank,
    cross_size,
    global_process_set,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    rank,
    remove_process_set,
    shutdown,
    size,
)

if TYPE_CHECKING:
    from choros.hvd import callbacks, elastic
    from choros.hvd.model_loading import load_model, shard
    from choros.hvd.model_state import broadcast_global_variables
    from choros.hvd.optimizer import DistributedOptimizer, PartialDistributedOptimizer
    from choros.hvd.sync_batch_norm import SyncBatchNormalization
    from choros.hvd.tape import DistributedGradientTape, PartialDistributedGradientTape
    from choros.hvd.timeline import start_timeline, stop_timeline
    from choros.launch.run_function import run

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "Max",
    "Min",
    "PartialDistributedGradientTape",
    "PartialDistributedOptimizer",
    "ProcessSet",
    "Product",
    "Sum",
    "SyncBatchNormalization",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_variables",
    "callbacks",
    "cross_rank",
    "cross_size",
    "elastic",
    "global_process_set",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "load_model",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "rank",
    "reducescatter",
    "remove_process_set",
    "run",
    "shard",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
]

_PROBES = {
    **dict.fromkeys(("gloo_built", "gloo_enabled", "ddl_built", "ccl_built", "cuda_built", "rocm_built"), False),
    "nccl_built": 0,
}
_LAZY_MODULES = {
    "DistributedOptimizer": "optimizer",
    "PartialDistributedOptimizer": "optimizer",
    "DistributedGradientTape": "tape",
    "PartialDistributedGradientTape": "tape",
    "SyncBatchNormalization": "sync_batch_norm",
    "broadcast_global_variables": "model_state",
    "load_model": "model_loading",
    "shard": "model_loading",
    "start_timeline": "timeline",
    "stop_timeline": "timeline",
}
_REPLACEMENTS = {
    "BroadcastGlobalVariablesHook": "hvd.broadcast_variables(model.variables, root_rank) before training",
    "broadcast_": "hvd.broadcast_variables([variable], root_rank)",
    "broadcast_object_fn": "hvd.broadcast_object(obj, root_rank)",
    "rank_op": "hvd.rank()",
    "size_op": "hvd.size()",
    "local_rank_op": "hvd.local_rank()",
    "local_size_op": "hvd.local_size()",
    "process_set_included_op": "ProcessSet.included()",
    "gpu_available": "the backend's own list of devices",
    "check_num_rank_power_of_2": "nothing is needed, Adasum raises an error unless the number of ranks is a power of 2",
    "broadcast_parameters": "hvd.broadcast_variables(model.variables, root_rank), with a Keras model on PyTorch",
    "broadcast_optimizer_state": "hvd.broadcast_variables(optimizer.variables, root_rank)",
    **dict.fromkeys(
        (
            "allreduce_",
            "allreduce_async",
            "allreduce_async_",
            "grouped_allreduce_",
            "grouped_allreduce_async",
            "grouped_allreduce_async_",
            "sparse_allreduce_async",
            "poll",
        ),
        "hvd.allreduce, which returns when it is done",
    ),
    **dict.fromkeys(
        (
            *("allgather_async", "broadcast_async", "broadcast_async_", "alltoall_async", "reducescatter_async"),
            *("grouped_allgather_async", "grouped_reducescatter_async"),
        ),
        "the name without _async, which returns when it is done",
    ),
    "synchronize": "nothing is needed, as every collective returns when it is done",
    "DistributedAdasumOptimizer": "hvd.allreduce(gradient, op=hvd.Adasum) in a loop of your own",
    "handle_average_backwards_compatibility": "op=hvd.Average or op=hvd.Sum",
    "num_rank_is_power_2": "nothing is needed, Adasum raises an error unless the number of ranks is a power of 2",
    "get_process_set_ids_and_ranks": "hvd.global_process_set and the sets that hvd.add_process_set returned",
    **dict.fromkeys(("sycl_built", "check_extension"), "nothing is needed, as there is nothing to build"),
    **dict.fromkeys(
        ("tf_data_service", "send_to_data_service", "TfDataServiceConfig"), "hvd.shard, which gives each rank its rows"
    ),
}


def __getattr__(name: str) -> Any:
    if name in _PROBES:  # ranks communicate by shared memory, sockets or MPI, without these libraries
        return lambda *_: _PROBES[name]
    if name in _LAZY_MODULES:
        return getattr(importlib.import_module(f"choros.hvd.{_LAZY_MODULES[name]}"), name)
    if name == "run":
        return importlib.import_module("choros.launch.run_function").run
    if name in ("callbacks", "elastic"):
        return importlib.import_module(f"choros.hvd.{name}")
    if name in _REPLACEMENTS:
        instead = _REPLACEMENTS[name]
        raise AttributeError(f"choros.hvd has no {name}: {'' if instead.startswith('nothing') else 'use '}{instead}.")
    raise AttributeError(f"module 'choros.hvd' has no attribute {name!r}")
