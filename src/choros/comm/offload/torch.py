"""Sums by ``torch.distributed``: NCCL where each rank has a CUDA device of its own, else gloo.

Keras wraps a model in ``DistributedDataParallel`` by itself where PyTorch's default process group exists. So there is
none: each carrier is a backend's process group by itself, over a store that the default group knows nothing of.

The part with NCCL has run on no machine yet; it waits for one that has two GPUs.
"""

from __future__ import annotations

import atexit
import ctypes
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from torch import distributed

from choros.comm.offload.interface import Look
from choros.errors import CommTimeoutError, InvalidInputError
from choros.types import Array, aligned

_END = timedelta(minutes=1)  # to wait for what has ended, which tells of an error
_NEVER = timedelta(days=1)  # whoever looks has a limit of its own


def device() -> str:
    """Return what tells this process's CUDA device from all others, or ``""`` where it has none.

    Example:
        >>> isinstance(device(), str)
        True
    """
    if not torch.cuda.is_available() or not distributed.is_nccl_available():
        return ""
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)


def open_store(address: str, port: int, size: int, hears: int | None, timeout: float) -> Any:
    """Return the store by which the ranks' PyTorchs find each other. It asks nobody for a secret.

    Args:
        address: str. Rank 0's.
        port: int. Where it hears.
        size: int. All ranks.
        hears: int. On rank 0, which serves it, the descriptor of a socket that hears there, now the store's.
        timeout: float. Seconds to wait for it.

    Raises:
        InvalidInputError: this PyTorch has no ``torch.distributed``.
        CommTimeoutError: rank 0's does not answer.
    """
    if not distributed.is_available():
        raise InvalidInputError(
            "This PyTorch was built without torch.distributed: install another, or unset CHOROS_COMM."
        )
    try:
        return distributed.TCPStore(
            address,
            port,
            size,
            hears is not None,
            timeout=timedelta(seconds=timeout),
            wait_for_workers=False,
            master_listen_fd=hears,
        )
    except (distributed.DistError, RuntimeError) as error:
        raise CommTimeoutError(f"PyTorch's store at {address}:{port} does not answer: {error}") from None


class TorchCarrier:
    """Implements ``choros.comm.offload.interface.CollectiveBackend``.

    Args:
        store: of ``open_store``.
        rank, size: int.
        address: str. Of this host, where gloo is to be reached.
        nccl: bool. Use NCCL on the current CUDA device.
    """

    def __init__(self, store: Any, rank: int, size: int, address: str, nccl: bool) -> None:
        self.name = "torch (NCCL)" if nccl else "torch (gloo)"
        self.takes = ("float32", "float64", *(("float16", "bfloat16") if nccl else ()))
        self._store, self._rank, self._address, self._nccl = store, rank, address, nccl
        self._ranks: tuple[int, ...] = tuple(range(size))
        self._made: dict[tuple[int, ...], int] = {}
        self._memory = aligned(0, np.uint8)
        self._device = torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")
        self._group, self._under_way = self._start(store, rank, size), False
        atexit.register(self.close)

    def _start(self, store: Any, rank: int, size: int) -> Any:
        if self._nccl:
            options = distributed.ProcessGroupNCCL.Options()
            options._timeout = _NEVER
            return distributed.ProcessGroupNCCL(store, rank, size, options)
        options = distributed.ProcessGroupGloo._Options()
        options._timeout, options._threads = _NEVER, 1
        options._devices = [distributed.ProcessGroupGloo.create_device(hostname=self._address)]
        return distributed.ProcessGroupGloo(store, rank, size, options)

    def sum(self, x: Array) -> Look:
        """Begin the sum over ranks of a flat array."""
        how = distributed.AllreduceOptions()
        how.timeout = _NEVER
        tensor, result = self._copied(x)
        return self._looking(self._group.allreduce([tensor], how), tensor, result)

    def broadcast(self, x: Array, root: int) -> Look:
        """Begin to give all ranks the root's flat bytes."""
        how = distributed.BroadcastOptions()
        how.rootRank, how.rootTensor, how.timeout = root, 0, _NEVER
        tensor, result = self._copied(x)
        return self._looking(self._group.broadcast([tensor], how), tensor, result)

    def _copied(self, x: Array) -> tuple[Any, Array]:
        """The values where the library may overwrite them, and the host's memory in which the result is to be."""
        if self._memory.size < x.nbytes:
            self._memory = aligned(x.nbytes, np.uint8)
        result = self._memory[: x.nbytes].view(x.dtype)
        result[:] = x
        small = x.dtype.name == "bfloat16"  # which PyTorch takes of numpy only as bits
        tensor = torch.from_numpy(result.view(np.int16) if small else result)
        tensor = tensor.view(torch.bfloat16) if small else tensor
        return tensor.to(self._device), result

    def _looking(self, work: Any, tensor: Any, result: Array) -> Look:
        self._under_way = True

        def look() -> Array | None:
            if not work.is_completed():
                return None
            work.wait(_END)
            self._under_way = False
            if self._nccl:
                small = tensor.dtype == torch.bfloat16
                found = tensor.view(torch.int16) if small else tensor
                torch.from_numpy(result.view(np.int16) if small else result).copy_(found)
            return result

        return look

    def among(self, ranks: Sequence[int]) -> TorchCarrier:
        """Return the carrier of some of the ranks, in that order; only they call, all at the same time."""
        those = tuple(self._ranks[rank] for rank in ranks)
        self._made[those] = self._made.get(those, 0) + 1
        store = distributed.PrefixStore(f"{those}/{self._made[those]}", self._store)
        made = TorchCarrier(store, list(ranks).index(self._rank), len(those), self._address, self._nccl)
        made._ranks = those
        return made

    def close(self) -> None:
        """Free the connections; under a call that has not ended they stay, as freeing them would wait for it."""
        if self._under_way:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._group))
        self._group, self._under_way = None, False
        atexit.unregister(self.close)
