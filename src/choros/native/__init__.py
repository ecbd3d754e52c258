"""JAX's and PyTorch's own distributed runtimes, started from the place that Choros finds, over the group it meets in.

Their own detection fails under Open MPI 5, PBS with MPICH, PALS, and wherever host names do not resolve. Choros itself
needs neither: this is for scripts that use ``jax.distributed`` or ``torch.distributed``, or NCCL on GPUs.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

from choros.cluster import Place
from choros.cluster.hardware.network_address import own_address
from choros.comm.bootstrap.discover_rank import find_place
from choros.comm.bootstrap.init import join
from choros.comm.tcp.auth_socket import free_port
from choros.errors import InvalidInputError

LIBRARIES = ("jax", "torch")


def initialize(library: str, timeout: float = 300.0, **options: Any) -> Place:
    """Start a library's own runtime on all ranks of this job; every rank calls, before it uses the library's devices.

    The ranks meet as they do for Choros (``choros where`` says in what), and take rank 0's address on the job's network
    (``CHOROS_NETWORK``) and a port that is free there. A process that is no rank of a job starts nothing.

    Args:
        library: str. "jax" (``jax.distributed.initialize``) or "torch" (``torch.distributed.init_process_group``).
        timeout: float. Seconds that the ranks wait for each other. Defaults to 300.
        **options: handed on: for "torch" ``backend`` ("nccl", "gloo"), for "jax" ``local_device_ids`` ...

    Returns:
        This rank's place.

    Raises:
        InvalidInputError: another library, one that is not installed, or ranks that have nothing to meet in.
        CommTimeoutError: not all ranks have come.

    Note:
        Keras 3.16 wraps models in DDP by itself where PyTorch's default process group exists; do not train by
        ``choros.hvd`` or a ``Trainer`` in the same process then.

    Example:
        >>> initialize("jax").size
        1
    """
    if library not in LIBRARIES:
        raise InvalidInputError(
            f"initialize({library!r}): give one of {', '.join(LIBRARIES)}; TensorFlow reads TF_CONFIG itself."
        )
    place = find_place(timeout)
    if place.size == 1:
        return place
    group = join(place.rank, place.size, timeout)
    address = own_address(os.environ.get("CHOROS_NETWORK", ""))
    mine = f"{address}:{free_port(address)}" if place.rank == 0 else ""
    first = group.gather(mine.encode())[0].decode()
    import_module(f"choros.native.{library}").start(first, place, timeout, options)
    return place
