"""Sums by ``torch.distributed``: NCCL where each rank has a CUDA device of its own, else gloo.

Keras wraps a model in ``DistributedDataParallel`` by itself if PyTorch's default process group exists. So this module
does not make one. It creates the process groups of gloo and NCCL directly, over a separate store.

The NCCL part has not run yet, as it needs a machine with two GPUs.
"""

from __future__ import annotations

import atexit
import ctypes
from collections.abc import Sequence
from datetime import timedelta

import numpy as np
import torch
from torch import distributed

from choros.comm.offload.interface import Poll
from choros.errors import CommTimeoutError, InvalidInputError
from choros.types import Array, aligned

_RESULT_TIMEOUT = timedelta(minutes=1)  # for ``wait`` on a call that has ended: it returns at once, or raises its error
_NO_TIMEOUT = timedelta(days=1)  # the control group has the time limit


def device() -> str:
    """Return a unique name of this process's CUDA device, or ``""`` without CUDA or NCCL.

    Example:
        >>> isinstance(device(), str)
        True
    """
    if not torch.cuda.is_available() or not distributed.is_nccl_available():
        return ""
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)


def open_store(address: str, port: int, size: int, listen_fd: int | None, timeout: float) -> distributed.Store:
    """Return the store through which the ranks' PyTorch libraries find each other. The store checks no secret.

    Args:
        address: str. Rank 0's address.
        port: int. Rank 0's port.
        size: int. Number of ranks.
        listen_fd: int or None. On rank 0, which serves the store, the descriptor of a listening socket at that port;
            the store then owns it. None on the other ranks.
        timeout: float. Seconds to wait for rank 0.

    Raises:
        InvalidInputError: this PyTorch was built without ``torch.distributed``.
        CommTimeoutError: rank 0's store does not answer.
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
            listen_fd is not None,
            timeout=timedelta(seconds=timeout),
            wait_for_workers=False,
            master_listen_fd=listen_fd,
        )
    except (distributed.DistError, RuntimeError) as error:
        raise CommTimeoutError(f"PyTorch's store at {address}:{port} does not answer: {error}") from None


class TorchBackend:
    """Implements ``choros.comm.offload.interface.CollectiveBackend``.

    Args:
        store: of ``open_store``.
        rank, size: int.
        address: str. Of this host, where gloo is to be reached.
        nccl: bool. Use NCCL on the current CUDA device.
    """

    def __init__(self, store: distributed.Store, rank: int, size: int, address: str, nccl: bool) -> None:
        self.name = "torch (NCCL)" if nccl else "torch (gloo)"
        self.dtypes = ("float32", "float64", *(("float16", "bfloat16") if nccl else ()))
        self._store, self._rank, self._address, self._nccl = store, rank, address, nccl
        self._ranks: tuple[int, ...] = tuple(range(size))
        self._subgroup_counts: dict[tuple[int, ...], int] = {}
        self._memory = aligned(0, np.uint8)
        self._device = torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")
        self._group: distributed.ProcessGroup = self._start(store, rank, size)
        self._in_progress = False
        atexit.register(self.close)

    def _start(self, store: distributed.Store, rank: int, size: int) -> distributed.ProcessGroup:
        # The classes of the libraries have the calls of ProcessGroup, which the annotations of PyTorch omit.
        if self._nccl:
            options = distributed.ProcessGroupNCCL.Options()
            # A time limit of NCCL would end the process by its watchdog before the control group can name the missing
            # rank.
            options._timeout = _NO_TIMEOUT
            return distributed.ProcessGroupNCCL(store, rank, size, options)  # pyright: ignore[reportReturnType]
        # PyTorch's annotations lack this class.
        options = distributed.ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
        # One thread: the rank's cores belong to the model, and a call at a time needs no more.
        options._timeout, options._threads = _NO_TIMEOUT, 1
        # The address is given: gloo would otherwise resolve the host name, which is 127.0.1.1 on Debian.
        options._devices = [distributed.ProcessGroupGloo.create_device(hostname=self._address)]
        return distributed.ProcessGroupGloo(store, rank, size, options)  # pyright: ignore[reportReturnType]

    def sum(self, x: Array) -> Poll:
        """Start the sum over ranks of a flat array."""
        options = distributed.AllreduceOptions()
        options.timeout = _NO_TIMEOUT
        tensor, result = self._to_device(x)
        return self._poll_of(self._group.allreduce([tensor], options), tensor, result)

    def broadcast(self, x: Array, root: int) -> Poll:
        """Start the broadcast of the root's flat bytes."""
        options = distributed.BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = root, 0, _NO_TIMEOUT
        tensor, result = self._to_device(x)
        return self._poll_of(self._group.broadcast([tensor], options), tensor, result)

    def _to_device(self, x: Array) -> tuple[torch.Tensor, Array]:
        """Return a device copy of the values, which the library overwrites, and host memory for the result."""
        if self._memory.size < x.nbytes:
            self._memory = aligned(x.nbytes, np.uint8)
        result = self._memory[: x.nbytes].view(x.dtype)
        # A copy: an all-reduce works in place, and the caller's slot must keep its values.
        result[:] = x
        is_bfloat16 = x.dtype.name == "bfloat16"  # torch.from_numpy rejects it: pass the bits
        tensor = torch.from_numpy(result.view(np.int16) if is_bfloat16 else result)
        tensor = tensor.view(torch.bfloat16) if is_bfloat16 else tensor
        return tensor.to(self._device), result

    def _poll_of(self, work: distributed.Work, tensor: torch.Tensor, result: Array) -> Poll:
        self._in_progress = True

        def poll() -> Array | None:
            if not work.is_completed():
                return None
            # ``is_completed`` is also true after a failure; ``wait`` then raises the error.
            work.wait(_RESULT_TIMEOUT)
            self._in_progress = False
            if self._nccl:
                is_bfloat16 = tensor.dtype == torch.bfloat16
                bits = tensor.view(torch.int16) if is_bfloat16 else tensor
                torch.from_numpy(result.view(np.int16) if is_bfloat16 else result).copy_(bits)
            return result

        return poll

    def among(self, ranks: Sequence[int]) -> TorchBackend:
        """Return the backend of some of the ranks, in that order. These ranks alone call, all at the same time."""
        job_ranks = tuple(self._ranks[rank] for rank in ranks)
        self._subgroup_counts[job_ranks] = self._subgroup_counts.get(job_ranks, 0) + 1
        # A prefix with a count: keys of an earlier group of the same ranks are still in the store and name closed
        # sockets.
        store = distributed.PrefixStore(f"{job_ranks}/{self._subgroup_counts[job_ranks]}", self._store)
        backend = TorchBackend(store, list(ranks).index(self._rank), len(job_ranks), self._address, self._nccl)
        backend._ranks = job_ranks
        return backend

    def close(self) -> None:
        """Free the connections. During a call they stay open, as to free them would wait for the call."""
        if self._in_progress:  # a leaked reference keeps it alive for the rest of the process
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._group))
        self._group = None  # pyright: ignore[reportAttributeAccessIssue] - no call follows
        self._in_progress = False
        atexit.unregister(self.close)
