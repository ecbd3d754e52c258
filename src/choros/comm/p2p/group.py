"""Process group over point-to-point messages between every pair of ranks.

In an all-reduce, rank r receives the r-th share of all ranks' values, adds them in the order of the ranks, and sends
the result to all (reduce-scatter and all-gather; Rabenseifner, ICCS 2004). So one rank sums each value, in the order in
which ``SharedGroup`` sums. All ranks have the same bits, and the same as under ``choros run``.

MPI_Allreduce does not guarantee that. The standard recommends the same result on all ranks but leaves the order open,
so it may change with the number of ranks, their placement and the library. And float16 and bfloat16 are not MPI types.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Self

import numpy as np
from numpy.typing import DTypeLike

from choros.comm.call_signature import BARRIER, BROADCAST, COLLECT, GATHER, SUM, SUM_SLOTS, Posted
from choros.comm.dtypes import add_in_order, dtype_code, mean_of, numeric
from choros.comm.p2p.interface import PointToPoint
from choros.comm.p2p.mesh import FullMesh
from choros.errors import InvalidInputError
from choros.types import Array, aligned

_PIECE_BYTES = 1 << 24  # bytes that are summed at a time: bounds the memory for the values of the other ranks


class MessageGroup(FullMesh):
    """Collectives over messages; implements ``choros.comm.group.Group``.

    Args:
        messages: PointToPoint. The transport of the ranks.
        timeout: float. Seconds that one wait may last. Defaults to 300.
        spin: float. Seconds to poll before sleeping. Defaults to 50 us, or 0 if a machine has more ranks than cores.

    Attributes:
        rank, size: int.
        timeout, warn_after: float. doing: str. trace: see ``FullMesh``; may be set between calls.

    Raises:
        CommTimeoutError: not all ranks joined within the time limit.
    """

    def __init__(self, messages: PointToPoint, timeout: float = 300.0, *, spin: float | None = None) -> None:
        super().__init__(messages, timeout, spin)
        self._slot_memory, self._result_memory = aligned(0, np.uint8), aligned(0, np.uint8)

    def part(self, ranks: Sequence[int]) -> MessageGroup:
        """Return a group of some of the ranks, in that order. These ranks alone call, all at the same time."""
        return MessageGroup(self.among(ranks), self.timeout, spin=self._spin)

    def among(self, ranks: Sequence[int]) -> PointToPoint:
        """Return the messages among some of the ranks. These ranks alone call, all at the same time."""
        return self._messages.part(ranks)

    @property
    def transport(self) -> str:
        """The transport of the messages: ``MPI`` or ``TCP``."""
        return self._messages.name

    @property
    def concurrent(self) -> bool:
        """True if several threads may send messages at the same time; see ``among``."""
        return self._messages.concurrent

    @property
    def kind(self) -> str:
        """The kind of the group, for messages."""
        return {"TCP": "sockets (TCP)"}.get(self.transport, self.transport)

    def agree(self, posted: Posted) -> None:
        """Check that all ranks make the same call, which another library then carries out."""
        self._begin_call(posted)

    # -- sums
    def slot(self, count: int, dtype: DTypeLike) -> Array:
        """Return a buffer of ``count`` values that is sent without a copy; the same memory until it must grow."""
        value_dtype = numeric(dtype)
        if count < 0:
            raise InvalidInputError(f"{self._rank_name} requested a slot of {count} values: give 0 or more.")
        if self._slot_memory.size < count * value_dtype.itemsize:
            self._slot_memory = aligned(count * value_dtype.itemsize, np.uint8)
        return self._slot_memory[: count * value_dtype.itemsize].view(value_dtype)

    def sum_slots(self, count: int, dtype: DTypeLike) -> Array:
        """Sum all slots; return a read-only view of the result, bit-equal on every rank, valid until the next call."""
        slot = self.slot(count, dtype)
        if self._result_memory.size < slot.nbytes:
            self._result_memory = aligned(slot.nbytes, np.uint8)
        result = self._result_memory[: slot.nbytes].view(slot.dtype)
        self._reduce(SUM_SLOTS, slot, result)
        result.flags.writeable = False
        return result

    def sum(self, x: Array) -> Array:
        """Return the sum over ranks, a new array of the same shape and dtype.

        Raises:
            InvalidInputError: the dtype has no sum; or the ranks' calls differ, on every rank.
            PeerLostError: a rank died or left. CommTimeoutError: a rank did not call within the time limit.
        """
        x = np.asarray(x)
        out = np.empty(x.shape, numeric(x.dtype))
        self._reduce(SUM, np.ascontiguousarray(x, out.dtype).reshape(-1), out.reshape(-1))
        return out

    def mean(self, x: Array) -> Array:
        """Return the mean over ranks, a new array; integers give float64, float16 is summed as float32."""
        return mean_of(np.asarray(x), self.size, self.sum)

    def _reduce(self, call: int, x: Array, out: Array) -> None:
        posted = (call, x.size, *dtype_code(x.dtype))
        if x.nbytes <= self._inline:  # the frame carries the values: one message instead of three
            self._begin_call(posted, x)
            # The values of this rank come from its own frame too, so all ranks add the same bytes in the same order.
            add_in_order([self._frame_data(rank, x.nbytes).view(x.dtype) for rank in range(self.size)], out)
            return
        self._begin_call(posted)
        started = 0 if self.trace is None else time.monotonic_ns()
        step = max(_PIECE_BYTES // x.itemsize, 1)
        for begin in range(0, x.size, step):
            self._reduce_piece(x[begin : begin + step], out[begin : begin + step], posted)
        self._record_trace("reduce", started, x.nbytes)

    def _reduce_piece(self, x: Array, out: Array, posted: Posted) -> None:
        shares, others = self._shares(x.size), self._others
        own_share = shares[self.rank]
        parts = [x[own_share] if rank == self.rank else np.empty_like(x[own_share]) for rank in range(self.size)]
        self._transfer([(rank, x[shares[rank]]) for rank in others], [(rank, parts[rank]) for rank in others], posted)
        add_in_order(parts, out[own_share])
        self._transfer(
            [(rank, out[own_share]) for rank in others], [(rank, out[shares[rank]]) for rank in others], posted
        )

    def _shares(self, count: int) -> list[slice]:
        # Every rank derives the same division from the count, which the frames have compared, so no lengths are sent.
        per_rank, remainder = divmod(count, self.size)
        return [
            slice(*bounds)
            for bounds in pairwise(rank * per_rank + min(rank, remainder) for rank in range(self.size + 1))
        ]

    # -- bytes and arrays as they are
    def gather(self, x: bytes) -> list[bytes]:
        """Return every rank's bytes, in the order of the ranks, on every rank."""
        data, posted = np.frombuffer(x, np.uint8), (GATHER, len(x), 0, 0)
        # A rank cannot know the lengths of the others. It sends its bytes with the frame if they fit, and all ranks
        # send them again if one rank's do not.
        calls = self._begin_call(posted, data if data.size <= self._inline else None)
        lengths = [call[1] for call in calls]
        if max(lengths) <= self._inline:  # true on all ranks or on none, as all know all lengths
            return [self._frame_data(rank, length).tobytes() for rank, length in enumerate(lengths)]
        pieces = [data if rank == self.rank else np.empty(length, np.uint8) for rank, length in enumerate(lengths)]
        self._transfer([(rank, data) for rank in self._others], [(rank, pieces[rank]) for rank in self._others], posted)
        return [piece.tobytes() for piece in pieces]

    def collect(self, x: Array, root: int = 0) -> list[Array]:
        """Return every rank's flat bytes, in the order of the ranks, on the root; an empty list on the others."""
        if not 0 <= root < self.size:
            raise InvalidInputError(f"Root {root} was given for a group of {self.size}: give 0 to {self.size - 1}.")
        posted = (COLLECT + 256 * root, x.size, 0, 0)
        lengths = [call[1] for call in self._begin_call(posted)]
        if self.rank != root:
            self._transfer([(root, x)], [], posted)
            return []
        pieces = [x if rank == root else np.empty(length, np.uint8) for rank, length in enumerate(lengths)]
        self._transfer([], [(rank, pieces[rank]) for rank in self._others], posted)
        return pieces

    def broadcast(self, x: Array, root: int = 0) -> Array:
        """Return the root's array on every rank, a new array; shape and dtype must be equal on all ranks."""
        x = np.asarray(x)
        if not 0 <= root < self.size:
            raise InvalidInputError(f"Root {root} was given for a group of {self.size}: give 0 to {self.size - 1}.")
        if x.dtype.hasobject:
            raise InvalidInputError(
                f"{self._rank_name}: an array of objects cannot be broadcast; send numbers or bytes."
            )
        out = np.array(x, x.dtype.newbyteorder("="), order="C")
        target = out.reshape(-1).view(np.uint8)
        posted = (BROADCAST + 256 * root, x.size, *dtype_code(out.dtype))
        if target.size <= self._inline:
            self._begin_call(posted, target)
            target[:] = self._frame_data(root, target.size)
            return out
        self._begin_call(posted)
        # Scatter, then all-gather: the root sends a different share to each rank, and each rank forwards its share. So
        # the root sends the array about twice, instead of once for each other rank.
        shares, is_root = [target[share] for share in self._shares(target.size)], self.rank == root
        own_share, others = shares[self.rank], [rank for rank in self._others if rank != root]
        self._transfer(
            [(rank, shares[rank]) for rank in others] if is_root else [], [] if is_root else [(root, own_share)], posted
        )
        forwards = [(rank, own_share) for rank in (self._others if is_root else others)]
        self._transfer(forwards, [] if is_root else [(rank, shares[rank]) for rank in self._others], posted)
        return out

    def barrier(self) -> None:
        """Return when every rank has called this."""
        self._begin_call((BARRIER, 0, 0, 0))

    # -- the end
    def close(self) -> None:
        """Leave: ranks that wait for this one raise ``PeerLostError``. Wait at most a second for the others."""
        self._finish(1.0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
