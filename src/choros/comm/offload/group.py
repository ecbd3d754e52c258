"""A group whose large sums are made by a library of its own: ``torch.distributed`` or JAX, with NCCL where there is.

Everything else stays with the group that is there already, the wide one: who is missing, whether all make the same
call, who has gone, bytes, small sums. A library's call begins once all ranks have come to it, is looked at and never
waited for inside, and is over when all ranks have said so; so a rank that dies in the middle is an error on the
others within seconds, whatever the library does then.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol, Self

import numpy as np

from choros.comm.call_signature import BROADCAST, SUM, SUM_SLOTS, Posted
from choros.comm.dtypes import dtype_code, mean_of, numeric
from choros.comm.gather_bytes import collect
from choros.comm.group import Group, Trace, kind_of
from choros.comm.offload.interface import CollectiveBackend, Look
from choros.errors import InvalidInputError, PeerLostError
from choros.types import Array, aligned

_LEAST = 1 << 14  # bytes: for fewer a message of the wide group is quicker


class ControlGroup(Group, Protocol):
    """The interface of the underlying group: ``SharedGroup`` and all groups of messages have it."""

    def agree(self, posted: Posted) -> None:
        """Return when every rank has come, and all make the same call."""
        ...

    def oversee(self, ready: Callable[[], bool], posted: Posted) -> None:
        """Return when ``ready`` is true on every rank; look meanwhile whether they live."""
        ...

    def outlive(self, limit: float) -> None:
        """Leave, and return when all others have left or died, or the seconds are over."""
        ...


class OffloadGroup:
    """All ranks, whose large sums a library makes; implements ``choros.comm.group.Group``.

    The library adds in an order of its own: the result is the same on all ranks, and equal to that of another group up
    to rounding.

    Args:
        wide: the group beneath, closed with this one.
        carrier: CollectiveBackend. The library, among the same ranks.

    Attributes:
        rank, size: int. kind: str. What carries the sums and what the rest, for people.
        timeout, warn_after: float. doing: str. trace: as ``choros.comm.group.Group`` says.

    Raises:
        PeerLostError, CommTimeoutError: from each call; a rank has gone or does not come.

    Example, in a job of two ranks whose ``wide`` is any group::

        group = OffloadGroup(wide, TorchCarrier(store, wide.rank, 2, "127.0.0.1", nccl=False))
        group.sum(np.ones(1 << 20, "float32"))
    """

    def __init__(self, wide: ControlGroup, carrier: CollectiveBackend) -> None:
        self.wide, self.carrier = wide, carrier
        self.rank, self.size = wide.rank, wide.size
        self.kind = f"{carrier.name} over {kind_of(wide)}"
        self._memory = aligned(0, np.uint8)
        self._kept: list[Look] = []

    @property
    def timeout(self) -> float:
        """Seconds that one wait may last."""
        return self.wide.timeout

    @timeout.setter
    def timeout(self, seconds: float) -> None:
        self.wide.timeout = seconds

    @property
    def warn_after(self) -> float:
        """Seconds after which a wait is told on stderr, once."""
        return self.wide.warn_after

    @warn_after.setter
    def warn_after(self, seconds: float) -> None:
        self.wide.warn_after = seconds

    @property
    def doing(self) -> str:
        """The present activity of this rank."""
        return self.wide.doing

    @doing.setter
    def doing(self, text: str) -> None:
        self.wide.doing = text

    @property
    def trace(self) -> Trace | None:
        """The receiver of every wait and reduction."""
        return self.wide.trace

    @trace.setter
    def trace(self, trace: Trace | None) -> None:
        self.wide.trace = trace

    @property
    def broken(self) -> str:
        """The reason why nothing works any more; "" while it does."""
        return str(getattr(self.wide, "broken", ""))

    def give_up(self, reason: str) -> None:
        """Have this rank's waits, now or later, raise ``PeerLostError``; any thread may call."""
        if hasattr(self.wide, "give_up"):
            self.wide.give_up(reason)

    def _carried(self, count: int, kind: np.dtype[Any]) -> bool:
        return kind.name in self.carrier.takes and count * kind.itemsize > _LEAST

    def slot(self, count: int, dtype: Any) -> Array:
        """A buffer of ``count`` values that ``sum_slots`` reads; the same memory until a larger one is asked for."""
        kind = numeric(dtype)
        if not self._carried(count, kind):
            return self.wide.slot(count, kind)
        if self._memory.size < count * kind.itemsize:
            self._memory = aligned(count * kind.itemsize, np.uint8)
        return self._memory[: count * kind.itemsize].view(kind)

    def sum_slots(self, count: int, dtype: Any) -> Array:
        """Sum all slots; a read-only view of the result, equal on every rank, good until the next call."""
        kind = numeric(dtype)
        if not self._carried(count, kind):
            return self.wide.sum_slots(count, kind)
        slot = self.slot(count, kind)
        result = self._call((SUM_SLOTS, count, *dtype_code(kind)), lambda: self.carrier.sum(slot)).view()
        result.flags.writeable = False
        return result

    def sum(self, x: Array) -> Array:
        """A new array of the same shape and dtype: the sum over ranks."""
        x = np.asarray(x)
        kind = numeric(x.dtype)
        if not self._carried(x.size, kind):
            return self.wide.sum(x)
        flat = np.ascontiguousarray(x, kind).reshape(-1)
        found = self._call((SUM, x.size, *dtype_code(kind)), lambda: self.carrier.sum(flat))
        return np.array(found).reshape(x.shape)

    def mean(self, x: Array) -> Array:
        """A new array: the mean over ranks; whole numbers give float64, float16 is summed as float32."""
        return mean_of(np.asarray(x), self.size, self.sum)

    def broadcast(self, x: Array, root: int = 0) -> Array:
        """Root's array on every rank, a new array; shape and dtype are the same everywhere."""
        x = np.asarray(x)
        if x.nbytes <= _LEAST or not 0 <= root < self.size or x.dtype.hasobject:
            return self.wide.broadcast(x, root)
        kind = x.dtype.newbyteorder("=")
        flat = np.ascontiguousarray(x, kind).reshape(-1)
        posted = (BROADCAST + 256 * root, x.size, *dtype_code(kind))
        found = self._call(posted, lambda: self.carrier.broadcast(flat.view(np.uint8), root))
        return np.array(found).view(kind).reshape(x.shape)

    def _call(self, posted: Posted, begin: Callable[[], Look]) -> Array:
        """Have the library do what all ranks have come for."""
        self.wide.agree(posted)
        started = 0 if self.trace is None else time.monotonic_ns()
        found: list[Array] = []
        looks: list[Look] = []

        def ready() -> bool:
            try:
                if not looks:
                    looks.append(begin())
                result = looks[0]()
            except Exception as error:
                raise PeerLostError(f"rank {self.rank}: {self.carrier.name} failed: {error}") from error
            if result is not None:
                found.append(result)
            return result is not None

        try:
            self.wide.oversee(ready, posted)
        except BaseException:
            self._kept = looks  # the library may still write there
            raise
        if started and self.trace is not None:
            self.trace(("reduce", "reduce", started, time.monotonic_ns(), found[0].nbytes))
        return found[0]

    def gather(self, x: bytes) -> list[bytes]:
        """Every rank's bytes, in the order of the ranks, on every rank."""
        return self.wide.gather(x)

    def collect(self, x: Array, root: int = 0) -> list[Array]:
        """Every rank's flat bytes, in the order of the ranks, on the root; nothing on the others."""
        return collect(self.wide, x, root)

    def barrier(self) -> None:
        """Return when every rank has come."""
        self.wide.barrier()

    def try_out(self) -> None:
        """Make one large sum and look whether it is right; all ranks call.

        Raises:
            PeerLostError: it is not.
        """
        found, wanted = self.sum(np.full(_LEAST, self.rank + 1, np.float32)), self.size * (self.size + 1) // 2
        if not (found == wanted).all():
            raise PeerLostError(f"{self.carrier.name} sums to {found[0]:g} where {wanted} is right.")

    def close(self) -> None:
        """Leave: ranks that wait for this one are told so."""
        self.carrier.close()
        self.wide.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def wide_of(group: Group) -> ControlGroup:
    """Return the group, if large sums of its ranks can be made by a library.

    Raises:
        InvalidInputError: it cannot watch over another's calls.
    """
    if not all(hasattr(group, name) for name in ("agree", "oversee", "outlive")):
        raise InvalidInputError(
            f"A {type(group).__name__} cannot have its sums made by another library: unset CHOROS_COMM."
        )
    found: Any = group
    wide: ControlGroup = found
    return wide
