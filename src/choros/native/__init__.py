"""Start of JAX's and PyTorch's distributed runtimes, with the ranks and the address that Choros finds.

The detection of these libraries fails under Open MPI 5, PBS with MPICH, PALS, and where host names do not resolve.
Choros needs neither runtime: this is for scripts that use ``jax.distributed``, ``torch.distributed``, or NCCL on GPUs.
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
from choros.native.model_parallel import ModelParallel

__all__ = ["LIBRARIES", "ModelParallel", "initialize"]

LIBRARIES = ("jax", "torch")


def initialize(library: str, timeout: float = 300.0, **options: Any) -> Place:
    """Start a library's distributed runtime on all ranks of this job.

    Every rank calls it before it uses the library's devices. The ranks first connect as Choros' ranks do
    (``choros where`` prints the transport). Rank 0 then sends its address on the job's network (``CHOROS_NETWORK``) and
    a free port to all ranks. A job of one rank starts nothing.

    Args:
        library: str. "jax" (``jax.distributed.initialize``) or "torch" (``torch.distributed.init_process_group``).
        timeout: float. Seconds that the ranks wait for each other. Defaults to 300.
        **options: passed to that function: for "torch" ``backend`` ("nccl", "gloo"), for "jax" ``local_device_ids`` ...

    Returns:
        This rank's place.

    Raises:
        InvalidInputError: ``library`` is another one, or the ranks have no transport.
        CommTimeoutError: not all ranks called it in time.

    Note:
        Keras 3.16 wraps models in DDP if PyTorch's default process group exists. Do not train by ``choros.hvd`` or a
        ``Trainer`` in the same process then.

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
