"""JAX's distributed runtime: its start with all arguments given, so that its detection is not used, and its arrays."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from choros.cluster import Place
from choros.comm.offload.jax import start as start_runtime
from choros.types import Array


def start(first: str, place: Place, timeout: float, options: dict[str, Any]) -> None:
    """Start ``jax.distributed``, unless the ranks' group has started it already (``CHOROS_COMM=jax``).

    Args:
        first: ``address:port`` on which rank 0 serves.
        place: this rank's place.
        timeout: seconds to wait for all ranks.
        options: arguments of ``jax.distributed.initialize``.
    """
    start_runtime(first, place.rank, place.size, timeout, **options)


def process_count() -> int:
    """Return the number of processes of JAX's runtime."""
    return int(jax.process_count())


def device_count() -> int:
    """Return the number of devices of all processes."""
    return int(jax.device_count())


def whole(value: Any) -> Any:
    """Return an array with the whole value on this process's default device.

    Collective, if the parts of the value lie on several processes.
    """
    if value.is_fully_addressable or value.is_fully_replicated:
        host: Array = np.asarray(value)
    else:
        host = np.asarray(multihost_utils.process_allgather(value, tiled=True))
    return jax.numpy.asarray(host)
