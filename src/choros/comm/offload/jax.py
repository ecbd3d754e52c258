"""Sums by JAX: one compiled sum over a mesh with one device of each process (gloo on CPUs, NCCL on GPUs).

This module has not run on GPUs or TPUs yet.

JAX's processes find each other through a service in rank 0's process. If another rank dies, the control group reports
it as usual. If rank 0 dies, JAX itself ends all other processes at once (SIGABRT), before the group can report it.
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

from choros.comm.offload.interface import Poll
from choros.errors import InvalidInputError
from choros.types import Array

_RANKS = "ranks"


def check_unused() -> None:
    """Check that ``jax.distributed`` has started or can still start.

    Raises:
        InvalidInputError: JAX was used before ``jax.distributed`` was started.
    """
    if jax.distributed.is_initialized():
        return
    device_count = jax.config.jax_num_cpu_devices  # pyright: ignore[reportAttributeAccessIssue] - made at run time
    try:
        # JAX refuses this setting after its first use. So the attempt shows whether JAX has been used.
        jax.config.update("jax_num_cpu_devices", max(device_count, 0) + 1)
        jax.config.update("jax_num_cpu_devices", device_count)
    except RuntimeError:
        raise InvalidInputError(
            "JAX was used before this job's ranks connected, so it can no longer connect to the other processes: call "
            'choros.native.initialize("jax") at the top of the script, before the model and the first array are made, '
            "or unset CHOROS_COMM."
        ) from None


def start(coordinator: str, rank: int, size: int, timeout: float, *, watched: bool = False, **options: Any) -> bool:
    """Start ``jax.distributed`` if it has not been started.

    Args:
        coordinator: str. ``address:port`` of the service in rank 0.
        rank: int. This process.
        size: int. Number of processes.
        timeout: float. Seconds to wait for all processes.
        watched: bool. Whether a control group detects dead ranks. Then JAX must not end processes because another one
            died, except that rank 0 must leave last. Defaults to False.
        **options: arguments of ``jax.distributed.initialize``.

    Returns:
        bool. True if rank 0 must leave last. If False, JAX's processes wait for each other at exit.

    Raises:
        InvalidInputError: JAX was used already, or ``jax.distributed`` was started with another rank or size.
    """
    rank_zero_leaves_last = False
    if not jax.distributed.is_initialized():
        check_unused()
        with suppress(AttributeError, ValueError):  # this version of JAX has no such setting
            jax.config.update("jax_cpu_collectives_implementation", "gloo")
            if watched:
                jax.config.update("jax_enable_preemption_service", False)  # the service would ignore SIGTERM
                jax.config.update("jax_enable_recoverability", True)
                rank_zero_leaves_last = True
        settings = {"initialization_timeout": max(1, int(timeout)), "coordinator_bind_address": coordinator, **options}
        jax.distributed.initialize(coordinator, size, rank, **settings)
    actual = jax.process_index(), jax.process_count()
    if actual != (rank, size):
        raise InvalidInputError(
            f"jax.distributed was started as process {actual[0]} of {actual[1]}, but this is rank {rank} of {size}. "
            'Leave its start to choros.native.initialize("jax").'
        )
    return rank_zero_leaves_last


def leave() -> None:
    """Disconnect this process from JAX's service."""
    jax.distributed.shutdown()


class JaxBackend:
    """JAX's collectives; implements ``choros.comm.offload.interface.CollectiveBackend``. Call ``start`` first.

    Args:
        ranks: sequence of int. The JAX processes that take part, in the order of the group.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self._ranks, self._in_progress = tuple(ranks), False
        atexit.register(self.close)
        first_devices = {}
        # In descending order, so that the device with the lowest number stays in the dict.
        for device in sorted(jax.devices(), key=lambda device: device.id, reverse=True):
            first_devices[device.process_index] = device
        self._device = first_devices[jax.process_index()]
        platform = self._device.platform
        self.name = f"jax ({ {'cpu': 'gloo', 'gpu': 'NCCL', 'cuda': 'NCCL', 'rocm': 'RCCL'}.get(platform, platform) })"
        x64_enabled = bool(jax.config.jax_enable_x64)  # pyright: ignore[reportAttributeAccessIssue] - made at run time
        self.dtypes = ("float32", *(("float64",) if x64_enabled else ()))
        mesh = Mesh(np.array([first_devices[rank] for rank in self._ranks]), (_RANKS,))
        self._row_sharding = NamedSharding(mesh, PartitionSpec(_RANKS))

        def sum_row(row: jax.Array) -> jax.Array:
            return jax.lax.psum(row[0], _RANKS)

        self._sum_rows = jax.jit(
            jax.shard_map(sum_row, mesh=mesh, in_specs=PartitionSpec(_RANKS), out_specs=PartitionSpec())
        )

    def sum(self, x: Array) -> Poll:
        """Start the sum over ranks of a flat array."""
        row = jax.device_put(x[None], self._device)
        rows = jax.make_array_from_single_device_arrays((len(self._ranks), x.size), self._row_sharding, [row])
        summed = self._sum_rows(rows)

        self._in_progress = True

        def poll() -> Array | None:
            # ``is_ready`` and not ``block_until_ready``: a wait inside XLA cannot be interrupted when a peer dies.
            if not summed.is_ready():
                return None
            self._in_progress = False
            return np.asarray(summed.addressable_data(0))

        return poll

    def broadcast(self, x: Array, root: int) -> Poll:
        """Start the broadcast of the root's flat bytes: a sum in which the other ranks add zeros."""
        padding = -x.size % 4
        integers = np.concatenate([x, np.zeros(padding, np.uint8)]) if padding else x
        # As integers: a sum of floats with zeros would turn -0.0 into 0.0 and might change the bits of a NaN.
        integers = integers.view(np.int32)
        is_root = self._ranks[root] == jax.process_index()
        poll_sum = self.sum(integers if is_root else np.zeros_like(integers))

        def poll() -> Array | None:
            result = poll_sum()
            return None if result is None else result.view(np.uint8)[: x.size]

        return poll

    def among(self, ranks: Sequence[int]) -> JaxBackend:
        """Return the backend of some of the ranks, in that order."""
        return JaxBackend([self._ranks[rank] for rank in ranks])

    def close(self) -> None:
        """Release JAX. During a sum that has not ended, JAX's client stays alive: to free it would wait for the sum."""
        if self._in_progress:  # a leaked reference keeps the client alive for the rest of the process
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._device.client))
        self._in_progress = False
        atexit.unregister(self.close)
