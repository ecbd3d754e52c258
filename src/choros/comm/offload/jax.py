"""Sums by JAX: one compiled sum over a mesh of one device of each process (gloo on CPUs, NCCL on GPUs).

On GPUs and TPUs it has run on no machine yet.

JAX knows of the other processes through a service in rank 0's process. Where another rank dies, the group's ranks say
so as ever; where rank 0 dies, JAX itself ends all the others at once (SIGABRT), before they can.
"""

from __future__ import annotations

import atexit
import ctypes
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from choros.comm.offload.interface import Look
from choros.errors import InvalidInputError
from choros.types import Array

_RANKS = "ranks"


def check_unused() -> None:
    """See that JAX can still be told of other processes.

    Raises:
        InvalidInputError: it has been used, and was not told.
    """
    if jax.distributed.is_initialized():
        return
    now = jax.config.jax_num_cpu_devices
    try:
        jax.config.update("jax_num_cpu_devices", max(now, 0) + 1)  # which JAX refuses once it has been used
        jax.config.update("jax_num_cpu_devices", now)
    except RuntimeError:
        raise InvalidInputError(
            "JAX was used before this job's ranks met, and can no longer be told of the others: call "
            'choros.native.initialize("jax") at the top of the script, before the model and the first array are made, '
            "or unset CHOROS_COMM."
        ) from None


def start(first: str, rank: int, size: int, timeout: float, *, watched: bool = False, **options: Any) -> bool:
    """Start ``jax.distributed``, if that has not been done.

    Args:
        first: str. ``address:port`` of rank 0, which serves there.
        rank: int. This process.
        size: int. All of them.
        timeout: float. Seconds to wait for all.
        watched: bool. Another sees who has gone: JAX is to end nobody because of it, but for rank 0, which must leave
            last. Defaults to False.
        **options: of ``jax.distributed.initialize``.

    Returns:
        Whether it was started so that rank 0 must leave last; else JAX's processes wait for each other as they end.

    Raises:
        InvalidInputError: JAX has been used already, or was started for other ranks.
    """
    alone = False
    if not jax.distributed.is_initialized():
        check_unused()
        with suppress(AttributeError, ValueError):  # a JAX that has no choice
            jax.config.update("jax_cpu_collectives_implementation", "gloo")
            if watched:
                jax.config.update("jax_enable_preemption_service", False)  # which would ignore SIGTERM
                jax.config.update("jax_enable_recoverability", True)
                alone = True
        given = {"initialization_timeout": max(1, int(timeout)), "coordinator_bind_address": first, **options}
        jax.distributed.initialize(first, size, rank, **given)
    found = jax.process_index(), jax.process_count()
    if found != (rank, size):
        raise InvalidInputError(
            f"jax.distributed was started as process {found[0]} of {found[1]}, but this is rank {rank} of {size}. "
            'Leave its start to choros.native.initialize("jax").'
        )
    return alone


def leave() -> None:
    """Have JAX's service know that this process goes; it needs the service no more."""
    jax.distributed.shutdown()


class JaxCarrier:
    """Implements ``choros.comm.offload.interface.CollectiveBackend``; ``start`` was called.

    Args:
        ranks: the JAX processes that take part, in the order of the group.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self._ranks, self._under_way = tuple(ranks), False
        atexit.register(self.close)
        firsts = {}
        for each in sorted(jax.devices(), key=lambda one: one.id, reverse=True):
            firsts[each.process_index] = each
        self._mine = firsts[jax.process_index()]
        platform = self._mine.platform
        self.name = f"jax ({ {'cpu': 'gloo', 'gpu': 'NCCL', 'cuda': 'NCCL', 'rocm': 'RCCL'}.get(platform, platform) })"
        wide = bool(jax.config.jax_enable_x64)
        self.takes = ("float32", *(("float64",) if wide else ()))
        mesh = Mesh(np.array([firsts[rank] for rank in self._ranks]), (_RANKS,))
        self._rows = NamedSharding(mesh, PartitionSpec(_RANKS))

        def add(row: Any) -> Any:
            return jax.lax.psum(row[0], _RANKS)

        self._add = jax.jit(jax.shard_map(add, mesh=mesh, in_specs=PartitionSpec(_RANKS), out_specs=PartitionSpec()))

    def sum(self, x: Array) -> Look:
        """Begin the sum over ranks of a flat array."""
        row = jax.device_put(x[None], self._mine)
        whole = jax.make_array_from_single_device_arrays((len(self._ranks), x.size), self._rows, [row])
        summed = self._add(whole)

        self._under_way = True

        def look() -> Array | None:
            if not summed.is_ready():
                return None
            self._under_way = False
            return np.asarray(summed.addressable_data(0))

        return look

    def broadcast(self, x: Array, root: int) -> Look:
        """Begin to give all ranks the root's flat bytes: the others add zeros."""
        rest = -x.size % 4
        words = np.concatenate([x, np.zeros(rest, np.uint8)]) if rest else x
        words = words.view(np.int32)
        mine = self._ranks[root] == jax.process_index()
        sent = self.sum(words if mine else np.zeros_like(words))

        def look() -> Array | None:
            found = sent()
            return None if found is None else found.view(np.uint8)[: x.size]

        return look

    def among(self, ranks: Sequence[int]) -> JaxCarrier:
        """Return the carrier of some of the ranks, in that order."""
        return JaxCarrier([self._ranks[rank] for rank in ranks])

    def close(self) -> None:
        """Let JAX be; under a sum that has not ended its client stays, as freeing that would wait for it."""
        if self._under_way:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._mine.client))
        self._under_way = False
        atexit.unregister(self.close)
