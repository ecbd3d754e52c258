"""Group of one rank: every sum is the value itself, and no call waits."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import DTypeLike

from choros.comm.dtypes import mean_of, numeric
from choros.comm.group import Trace
from choros.errors import InvalidInputError
from choros.types import Array, aligned


class SingleRankGroup:
    """A single rank; implements ``choros.comm.group.Group`` without shared memory.

    The result of ``sum_slots`` is a read-only view of the slot itself, so it is valid until the slot is written.

    Attributes:
        rank: 0. size: 1.
        timeout, warn_after: float. doing: str. trace: Trace or None. Without effect, as no call waits.

    Example:
        >>> group = SingleRankGroup()
        >>> group.slot(2, "float32")[:] = [1, 2]
        >>> group.sum_slots(2, "float32").tolist()
        [1.0, 2.0]
    """

    kind = "one rank"

    def __init__(self, timeout: float = 300.0) -> None:
        self.rank = 0
        self.size = 1
        self.timeout = timeout
        self.warn_after = math.inf
        self.doing = ""
        self.trace: Trace | None = None
        self._memory = np.zeros(0, np.uint8)

    def slot(self, count: int, dtype: DTypeLike) -> Array:
        """Return a buffer of ``count`` values; always the same memory, until a call needs a larger one."""
        value_dtype = numeric(dtype)
        nbytes = count * value_dtype.itemsize
        if count < 0:
            raise InvalidInputError(f"A slot of {count} values was requested: give 0 or more.")
        if self._memory.size < nbytes:
            self._memory = aligned(nbytes, np.uint8)
        return self._memory[:nbytes].view(value_dtype)

    def sum_slots(self, count: int, dtype: DTypeLike) -> Array:
        """Return a read-only view of the slot."""
        view = self.slot(count, dtype)
        view.flags.writeable = False
        return view

    def sum(self, x: Array) -> Array:
        """Return a copy."""
        x = np.asarray(x)
        return np.array(x, numeric(x.dtype), order="C")

    def mean(self, x: Array) -> Array:
        """Return a copy, with the dtype of a mean over several ranks: float64 for integers."""
        return mean_of(np.asarray(x), 1, self.sum)

    def gather(self, x: bytes) -> list[bytes]:
        """Return a list with this rank's bytes."""
        return [bytes(x)]

    def broadcast(self, x: Array, root: int = 0) -> Array:
        """Return a copy."""
        if root != 0:
            raise InvalidInputError(f"Root {root} was given for a group of 1: give 0.")
        return np.array(x, order="C")

    def barrier(self) -> None:
        """Return at once."""

    def close(self) -> None:
        """Free the slot."""
        self._memory = np.zeros(0, np.uint8)
