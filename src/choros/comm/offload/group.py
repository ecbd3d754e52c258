"""Group that delegates large sums to a library: ``torch.distributed`` or JAX, with NCCL if available.

Another group, the control group, does the rest: it compares calls, detects missing and dead ranks, and moves bytes and
small sums. The library's call starts after all ranks have reached it. This module polls the call and never waits inside
the library. The call ends when all ranks have reported its end. So the death of a rank during the call is an error on
the other ranks within seconds, even if the library hangs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol, Self, cast

import numpy as np
from numpy.typing import DTypeLike

from choros.comm.call_signature import BROADCAST, SUM, SUM_SLOTS, Posted
from choros.comm.dtypes import dtype_code, mean_of, numeric
from choros.comm.gather_bytes import collect
from choros.comm.group import Group, Trace, abort_waits, kind_of
from choros.comm.offload.interface import CollectiveBackend, Poll
from choros.errors import InvalidInputError, PeerLostError
from choros.types import Array, aligned

_MIN_BYTES = 1 << 14  # for fewer bytes a frame of the control group is faster: it carries 16 KiB at most


class ControlGroup(Group, Protocol):
    """Interface of the control group: ``SharedGroup`` and all groups over messages implement it."""

    def agree(self, posted: Posted) -> None:
        """Return when every rank has called this, and check that all make the same call."""
        ...

    def wait_until_ready(self, ready: Callable[[], bool], posted: Posted) -> None:
        """Return when ``ready`` is true on every rank; check meanwhile whether the ranks live."""
        ...

    def leave_after_peers(self, limit: float) -> None:
        """Leave, then wait until all other ranks have left or died, for at most ``limit`` seconds."""
        ...


class OffloadGroup:
    """All ranks, with large sums by a library; implements ``choros.comm.group.Group``.

    The library chooses the order of the sum. The result is the same on all ranks, and equal to that of another group
    up to rounding.

    Args:
        control: ControlGroup. Closed together with this group.
        backend: CollectiveBackend. The library, among the same ranks.

    Attributes:
        rank, size: int. kind: str. The backend and the control group, for messages.
        timeout, warn_after: float. doing: str. trace: see ``choros.comm.group.Group``.

    Raises:
        PeerLostError: from each call; a rank died or left. CommTimeoutError: a rank did not call in time.

    Example, in a job of two ranks whose ``control`` is any group::

        group = OffloadGroup(control, TorchBackend(store, control.rank, 2, "127.0.0.1", nccl=False))
        group.sum(np.ones(1 << 20, "float32"))
    """

    def __init__(self, control: ControlGroup, backend: CollectiveBackend) -> None:
        self.control, self.backend = control, backend
        self.rank, self.size = control.rank, control.size
        self.kind = f"{backend.name} over {kind_of(control)}"
        self._memory = aligned(0, np.uint8)
        self._pending_polls: list[Poll] = []

    @property
    def timeout(self) -> float:
        """Seconds that one wait may last."""
        return self.control.timeout

    @timeout.setter
    def timeout(self, seconds: float) -> None:
        self.control.timeout = seconds

    @property
    def warn_after(self) -> float:
        """Seconds after which a wait is reported on stderr, once."""
        return self.control.warn_after

    @warn_after.setter
    def warn_after(self, seconds: float) -> None:
        self.control.warn_after = seconds

    @property
    def doing(self) -> str:
        """The present activity of this rank."""
        return self.control.doing

    @doing.setter
    def doing(self, text: str) -> None:
        self.control.doing = text

    @property
    def trace(self) -> Trace | None:
        """The receiver of the timing of every wait and reduction, or None."""
        return self.control.trace

    @trace.setter
    def trace(self, trace: Trace | None) -> None:
        self.control.trace = trace

    @property
    def broken(self) -> str:
        """The error after which the group cannot be used; "" before."""
        return str(getattr(self.control, "broken", ""))

    def give_up(self, reason: str) -> None:
        """Abort: this rank's waits, now or later, raise ``PeerLostError``; any thread may call."""
        abort_waits(self.control, reason)

    def _uses_backend(self, count: int, dtype: np.dtype[Any]) -> bool:
        return dtype.name in self.backend.dtypes and count * dtype.itemsize > _MIN_BYTES

    def slot(self, count: int, dtype: DTypeLike) -> Array:
        """Return the buffer of ``count`` values that ``sum_slots`` reads; the same memory until it must grow."""
        value_dtype = numeric(dtype)
        if not self._uses_backend(count, value_dtype):
            return self.control.slot(count, value_dtype)
        if self._memory.size < count * value_dtype.itemsize:
            self._memory = aligned(count * value_dtype.itemsize, np.uint8)
        return self._memory[: count * value_dtype.itemsize].view(value_dtype)

    def sum_slots(self, count: int, dtype: DTypeLike) -> Array:
        """Sum all slots; return a read-only view of the result, equal on every rank, valid until the next call."""
        value_dtype = numeric(dtype)
        if not self._uses_backend(count, value_dtype):
            return self.control.sum_slots(count, value_dtype)
        slot = self.slot(count, value_dtype)
        result = self._call((SUM_SLOTS, count, *dtype_code(value_dtype)), lambda: self.backend.sum(slot)).view()
        result.flags.writeable = False
        return result

    def sum(self, x: Array) -> Array:
        """Return the sum over ranks, a new array of the same shape and dtype."""
        x = np.asarray(x)
        dtype = numeric(x.dtype)
        if not self._uses_backend(x.size, dtype):
            return self.control.sum(x)
        flat = np.ascontiguousarray(x, dtype).reshape(-1)
        total = self._call((SUM, x.size, *dtype_code(dtype)), lambda: self.backend.sum(flat))
        # A copy: ``total`` may be memory of the library that the next call overwrites.
        return np.array(total).reshape(x.shape)

    def mean(self, x: Array) -> Array:
        """Return the mean over ranks, a new array; integers give float64, float16 is summed as float32."""
        return mean_of(np.asarray(x), self.size, self.sum)

    def broadcast(self, x: Array, root: int = 0) -> Array:
        """Return the root's array on every rank, a new array; shape and dtype must be equal on all ranks."""
        x = np.asarray(x)
        if x.nbytes <= _MIN_BYTES or not 0 <= root < self.size or x.dtype.hasobject:
            return self.control.broadcast(x, root)
        dtype = x.dtype.newbyteorder("=")
        flat = np.ascontiguousarray(x, dtype).reshape(-1)
        posted = (BROADCAST + 256 * root, x.size, *dtype_code(dtype))
        data = self._call(posted, lambda: self.backend.broadcast(flat.view(np.uint8), root))
        return np.array(data).view(dtype).reshape(x.shape)

    def _call(self, posted: Posted, start_call: Callable[[], Poll]) -> Array:
        """Run one call of the library on all ranks; return its result."""
        self.control.agree(posted)
        begin_ns = 0 if self.trace is None else time.monotonic_ns()
        results: list[Array] = []
        polls: list[Poll] = []

        def ready() -> bool:
            try:
                # The call starts inside the wait and not before it: an error of the library is then reported with the
                # rank that died.
                if not polls:
                    polls.append(start_call())
                result = polls[0]()
            # Any exception: each library has its own types, and all mean that this sum cannot end.
            except Exception as error:
                raise PeerLostError(f"rank {self.rank}: {self.backend.name} failed: {error}") from error
            if result is not None:
                results.append(result)
            return result is not None

        try:
            self.control.wait_until_ready(ready, posted)
        except BaseException:
            self._pending_polls = polls  # the library may still write to the buffers of the call: keep them alive
            raise
        if begin_ns and self.trace is not None:
            self.trace(("reduce", "reduce", begin_ns, time.monotonic_ns(), results[0].nbytes))
        return results[0]

    def gather(self, x: bytes) -> list[bytes]:
        """Return every rank's bytes, in the order of the ranks, on every rank."""
        return self.control.gather(x)

    def collect(self, x: Array, root: int = 0) -> list[Array]:
        """Return every rank's flat bytes, in the order of the ranks, on the root; an empty list on the others."""
        return collect(self.control, x, root)

    def barrier(self) -> None:
        """Return when every rank has called this."""
        self.control.barrier()

    def try_out(self) -> None:
        """Compute one large sum and check the result. All ranks call.

        Raises:
            PeerLostError: the sum is wrong.
        """
        total, expected = self.sum(np.full(_MIN_BYTES, self.rank + 1, np.float32)), self.size * (self.size + 1) // 2
        if not (total == expected).all():
            raise PeerLostError(f"{self.backend.name} sums to {total[0]:g} where {expected} is right.")

    def close(self) -> None:
        """Leave: ranks that wait for this one raise ``PeerLostError``."""
        self.backend.close()
        self.control.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def as_control_group(group: Group) -> ControlGroup:
    """Return the group if it can be the control group of a library.

    Raises:
        InvalidInputError: the group has no ``agree``, ``wait_until_ready`` or ``leave_after_peers``.
    """
    if not all(hasattr(group, name) for name in ("agree", "wait_until_ready", "leave_after_peers")):
        raise InvalidInputError(
            f"A {type(group).__name__} cannot have its sums made by another library: unset CHOROS_COMM."
        )
    return cast(ControlGroup, group)
