"""All ranks of a job at once, by messages between every pair of them.

Of a sum, rank r gets the r-th share of everybody's values, adds them up in the order of the ranks, and sends the result
to all (reduce-scatter and all-gather; Rabenseifner, ICCS 2004). So each value is summed once, by one rank, in the order
in which ``SharedGroup`` sums: all ranks have the same bits, and the same as under ``choros run``. MPI_Allreduce would
not do: the standard asks for the same result on all ranks but leaves the order open (so it may change with the number
of ranks, their places and the library), and float16 and bfloat16 are none of its types.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Self

import numpy as np

from choros.comm.call_signature import BARRIER, BROADCAST, COLLECT, GATHER, SUM, SUM_SLOTS, Posted
from choros.comm.dtypes import add_in_order, dtype_code, mean_of, numeric
from choros.comm.p2p.interface import PointToPoint
from choros.comm.p2p.mesh import FullMesh
from choros.errors import InvalidInputError
from choros.types import Array, aligned

_PIECE = 1 << 24  # bytes that are summed at a time, which bounds the memory for what comes from others


class MessageGroup(FullMesh):
    """The ranks that messages connect; implements ``choros.comm.group.Group``.

    Args:
        messages: PointToPoint. Who carries them, among whom.
        timeout: float. Seconds that one wait may last.
        spin: float. Seconds to look before sleeping; by default 0 where a machine has more ranks than cores.

    Attributes:
        rank, size: int.
        timeout, warn_after: float. doing: str. trace: as ``FullMesh`` says; may be set between calls.

    Raises:
        CommTimeoutError: not all ranks have come.
    """

    def __init__(self, messages: PointToPoint, timeout: float = 300.0, *, spin: float | None = None) -> None:
        super().__init__(messages, timeout, spin)
        self._memory, self._sums = aligned(0, np.uint8), aligned(0, np.uint8)

    def part(self, ranks: Sequence[int]) -> MessageGroup:
        """Return the group of some of the ranks, in that order; only they call, all at the same time."""
        return MessageGroup(self.among(ranks), self.timeout, spin=self._spin)

    def among(self, ranks: Sequence[int]) -> PointToPoint:
        """Return the messages of some of the ranks, for a group of them; only they call, all at the same time."""
        return self._messages.part(ranks)

    @property
    def carrier(self) -> str:
        """The carrier of the messages: ``MPI`` or ``TCP``."""
        return self._messages.name

    @property
    def kind(self) -> str:
        """The kind of the group, for people."""
        return {"TCP": "sockets (TCP)"}.get(self.carrier, self.carrier)

    def agree(self, posted: Posted) -> None:
        """Return when every rank has come, and all make the same call, which another than this group carries out."""
        self._meet(posted)

    # -- sums
    def slot(self, count: int, dtype: Any) -> Array:
        """A buffer of ``count`` values that is sent as it lies; the same memory until a larger one is asked for."""
        kind = numeric(dtype)
        if count < 0:
            raise InvalidInputError(f"{self._where} asked for a slot of {count} values: give 0 or more.")
        if self._memory.size < count * kind.itemsize:
            self._memory = aligned(count * kind.itemsize, np.uint8)
        return self._memory[: count * kind.itemsize].view(kind)

    def sum_slots(self, count: int, dtype: Any) -> Array:
        """Sum all slots; a read-only view of the result, bit-equal on every rank, good until the next call."""
        slot = self.slot(count, dtype)
        if self._sums.size < slot.nbytes:
            self._sums = aligned(slot.nbytes, np.uint8)
        result = self._sums[: slot.nbytes].view(slot.dtype)
        self._reduce(SUM_SLOTS, slot, result)
        result.flags.writeable = False
        return result

    def sum(self, x: Array) -> Array:
        """A new array of the same shape and dtype: the sum over ranks.

        Raises:
            InvalidInputError: for values without a sum, or if the ranks' calls differ, on every rank.
            PeerLostError, CommTimeoutError: as every call.
        """
        x = np.asarray(x)
        out = np.empty(x.shape, numeric(x.dtype))
        self._reduce(SUM, np.ascontiguousarray(x, out.dtype).reshape(-1), out.reshape(-1))
        return out

    def mean(self, x: Array) -> Array:
        """A new array: the mean over ranks; whole numbers give float64, float16 is summed as float32."""
        return mean_of(np.asarray(x), self.size, self.sum)

    def _reduce(self, call: int, x: Array, out: Array) -> None:
        posted = (call, x.size, *dtype_code(x.dtype))
        if x.nbytes <= self._inline:
            self._meet(posted, x)
            add_in_order([self._framed(rank, x.nbytes).view(x.dtype) for rank in range(self.size)], out)
            return
        self._meet(posted)
        begin = 0 if self.trace is None else time.monotonic_ns()
        step = max(_PIECE // x.itemsize, 1)
        for at in range(0, x.size, step):
            self._reduce_piece(x[at : at + step], out[at : at + step], posted)
        self._told("reduce", begin, x.nbytes)

    def _reduce_piece(self, x: Array, out: Array, posted: Posted) -> None:
        shares, others = self._shares(x.size), self._others
        mine = shares[self.rank]
        parts = [x[mine] if rank == self.rank else np.empty_like(x[mine]) for rank in range(self.size)]
        self._carry([(r, x[shares[r]]) for r in others], [(r, parts[r]) for r in others], posted)
        add_in_order(parts, out[mine])
        self._carry([(r, out[mine]) for r in others], [(r, out[shares[r]]) for r in others], posted)

    def _shares(self, count: int) -> list[slice]:
        each, more = divmod(count, self.size)
        return [slice(*ends) for ends in pairwise(r * each + min(r, more) for r in range(self.size + 1))]

    # -- bytes and arrays as they are
    def gather(self, x: bytes) -> list[bytes]:
        """Every rank's bytes, in the order of the ranks, on every rank."""
        data, posted = np.frombuffer(x, np.uint8), (GATHER, len(x), 0, 0)
        said = self._meet(posted, data if data.size <= self._inline else None)
        lengths = [one[1] for one in said]
        if max(lengths) <= self._inline:
            return [self._framed(rank, length).tobytes() for rank, length in enumerate(lengths)]
        pieces = [data if rank == self.rank else np.empty(length, np.uint8) for rank, length in enumerate(lengths)]
        self._carry([(r, data) for r in self._others], [(r, pieces[r]) for r in self._others], posted)
        return [piece.tobytes() for piece in pieces]

    def collect(self, x: Array, root: int = 0) -> list[Array]:
        """Every rank's flat bytes, in the order of the ranks, on the root; nothing on the others."""
        if not 0 <= root < self.size:
            raise InvalidInputError(f"Root {root} was given for a group of {self.size}: give 0 to {self.size - 1}.")
        posted = (COLLECT + 256 * root, x.size, 0, 0)
        lengths = [one[1] for one in self._meet(posted)]
        if self.rank != root:
            self._carry([(root, x)], [], posted)
            return []
        pieces = [x if rank == root else np.empty(length, np.uint8) for rank, length in enumerate(lengths)]
        self._carry([], [(rank, pieces[rank]) for rank in self._others], posted)
        return pieces

    def broadcast(self, x: Array, root: int = 0) -> Array:
        """Root's array on every rank, a new array; shape and dtype are the same everywhere."""
        x = np.asarray(x)
        if not 0 <= root < self.size:
            raise InvalidInputError(f"Root {root} was given for a group of {self.size}: give 0 to {self.size - 1}.")
        if x.dtype.hasobject:
            raise InvalidInputError(f"{self._where}: an array of objects cannot be broadcast; send numbers or bytes.")
        out = np.array(x, x.dtype.newbyteorder("="), order="C")
        target = out.reshape(-1).view(np.uint8)
        posted = (BROADCAST + 256 * root, x.size, *dtype_code(out.dtype))
        if target.size <= self._inline:
            self._meet(posted, target)
            target[:] = self._framed(root, target.size)
            return out
        self._meet(posted)
        # the root deals out shares, and each is passed on by who got it
        shares, lead = [target[share] for share in self._shares(target.size)], self.rank == root
        mine, others = shares[self.rank], [rank for rank in self._others if rank != root]
        self._carry([(r, shares[r]) for r in others] if lead else [], [] if lead else [(root, mine)], posted)
        passed = [(r, mine) for r in (self._others if lead else others)]
        self._carry(passed, [] if lead else [(r, shares[r]) for r in self._others], posted)
        return out

    def barrier(self) -> None:
        """Return when every rank has come."""
        self._meet((BARRIER, 0, 0, 0))

    # -- the end
    def close(self) -> None:
        """Leave: ranks that wait for this one are told so. Waits a second at most for the others to leave too."""
        self._end(1.0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
