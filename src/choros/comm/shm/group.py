"""All ranks of one machine at once, in shared memory: each rank sums its own share of everybody's slots.

Of a vector of n values, rank r reduces the r-th of ``size`` shares over all slots into one result area that
everybody maps (reduce-scatter and all-gather without a message; Rabenseifner, ICCS 2004, has the scheme for
networks). So every value is summed once, by one rank, in the order of the ranks: all ranks see the same bits.

Two barriers make a meeting. A slot is read between the first and the second, so its owner may write it again
once it has passed the second; the result is written between the first and the second of the next meeting,
which all must have entered: it is good until the next call.
"""

from __future__ import annotations

import json
import math
import os
import resource
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple, Self

import numpy as np

from choros.comm.call_signature import BARRIER, BROADCAST, COLLECT, GATHER, SUM, SUM_SLOTS, Posted, difference, spell
from choros.comm.dtypes import add_in_order, dtype_code, mean_of, numeric
from choros.comm.group import Group, Trace
from choros.comm.host_identity import crowded, machine, spread
from choros.comm.shm.futex import SPIN
from choros.comm.shm.group_header import (
    FREE,
    GROUP,
    LINE_WORDS,
    LINES,
    GroupHeader,
    abort,
    given_up,
    head_bytes,
    open_stamped,
    stamp,
)
from choros.comm.shm.segment import LINE, Segment, align
from choros.errors import CallsDifferError, InvalidInputError, PeerLostError
from choros.types import Array

_PAGE = 4096
_BLOCK = 1 << 18  # bytes of one block, so that the partial sums of many ranks stay in a core's cache
_COLLECTED = 1 << 24  # bytes of a rank that are collected at a time, which bounds the memory of the slots
_SIZE, _ROOM, _OPEN = range(FREE, FREE + 3)  # open: slots take their pages when they are written
_Blocks = list[tuple[list[Array], Array]]


class _Plan(NamedTuple):
    """The views of one (count, dtype), made once: this rank's slot, the result, and its share in blocks."""

    dtype: np.dtype[Any]
    code: tuple[int, int]
    slot: Array
    result: Array
    whole: Array
    blocks: _Blocks


class SharedGroup:
    """The ranks of one machine that meet in one segment; implements ``choros.comm.group.Group``.

    Args:
        segment_or_fd: Segment, or the int of an inherited descriptor, which the group then owns.
        rank: int. Who this is, from 0; each rank joins once.
        timeout: float. Seconds that one wait may last.
        spin: float. Seconds to look before sleeping; None, the default: 0 where ranks outnumber the cores they may
            use, as is known once all have joined.

    Attributes:
        rank, size: int.
        timeout, warn_after: float. doing: str. trace: Trace. See ``choros.comm.group.Group``; may be set between calls.

    Raises:
        InvalidInputError: if the descriptor is not a group's segment, or the rank is taken or out of range.

    Example:
        >>> import numpy as np
        >>> from choros.comm.shm.segment import Segment
        >>> segment = SharedGroup.create(size=1, slot_bytes=1024)
        >>> group = SharedGroup(segment, rank=0)
        >>> group.slot(3, "float32")[:] = [1, 2, 3]
        >>> group.sum_slots(3, "float32").tolist(), group.gather(b"hello")
        ([1.0, 2.0, 3.0], [b'hello'])
        >>> group.close(); segment.close()
    """

    def __init__(
        self, segment_or_fd: Segment | int, rank: int, timeout: float = 300.0, *, spin: float | None = None
    ) -> None:
        self._segment, self._owned = open_stamped(segment_or_fd, GROUP)
        words = self._segment.words
        self.rank, self.size, self.slot_bytes = rank, words[_SIZE], words[_ROOM]
        try:
            if not 0 <= rank < self.size:
                raise InvalidInputError(f"Rank {rank} was given for a group of {self.size}: give 0 to {self.size - 1}.")
            self._board = GroupHeader(self._segment, rank, self.size, timeout, SPIN if spin is None else spin)
            self._spin_open = spin is None
        except BaseException:
            if self._owned:
                del words
                self._segment.close()
            raise
        self._plans: dict[tuple[int, Any], _Plan] = {}
        self._leaving, self._left = threading.RLock(), False
        if not words[_OPEN]:
            self._segment.touch(self._slot_offset(rank), self.slot_bytes)

    abort = staticmethod(abort)
    kind = "shared memory"

    @staticmethod
    def create(size: int, slot_bytes: int | None = None) -> Segment:
        """Make the segment of a group.

        Args:
            size: int. How many ranks.
            slot_bytes: int. Room of one slot: the bytes of the largest vector that ``slot`` is asked for. Defaults to
                all that this machine could hold; nothing is taken of it before it is written.

        Returns:
            Segment. Its head, ``size`` slots and one result area; memory is taken when it is first used.
        """
        if size < 1 or (slot_bytes is not None and slot_bytes < 0):
            raise InvalidInputError(
                f"A group of {size} ranks with slots of {slot_bytes} bytes cannot be: give 1 or more ranks."
            )
        room = align(max(_plenty() // (size + 1) if slot_bytes is None else slot_bytes, _PAGE), _PAGE)
        segment = Segment.create(_head(size) + (size + 1) * room, "choros-group")
        words = segment.words
        words[_SIZE], words[_ROOM], words[_OPEN] = size, room, slot_bytes is None
        stamp(segment, GROUP, LINES, LINE_WORDS, size)
        return segment

    @property
    def timeout(self) -> float:
        """Seconds that one wait may last."""
        return self._board.timeout

    @timeout.setter
    def timeout(self, seconds: float) -> None:
        self._board.timeout = seconds

    @property
    def warn_after(self) -> float:
        """Seconds after which a wait is told on stderr, once."""
        return self._board.warn_after

    @warn_after.setter
    def warn_after(self, seconds: float) -> None:
        self._board.warn_after = seconds

    @property
    def doing(self) -> str:
        """The present activity of this rank; the other ranks can read it."""
        return self._board.telling.doing

    @doing.setter
    def doing(self, text: str) -> None:
        self._board.telling.say(text)

    @property
    def trace(self) -> Trace | None:
        """The receiver of every wait and reduction."""
        return self._board.trace

    @trace.setter
    def trace(self, trace: Trace | None) -> None:
        self._board.trace = trace

    def _slot_offset(self, rank: int) -> int:
        return _head(self.size) + rank * self.slot_bytes

    def _plan(self, count: int, dtype: Any) -> _Plan:
        plan = self._plans.get((count, dtype))
        if plan is None:
            kind = numeric(dtype)
            if count < 0 or count * kind.itemsize > self.slot_bytes:
                raise InvalidInputError(
                    f"Rank {self.rank} asked for a slot of {count:,} {kind} values; this group's slots have room for "
                    f"{self.slot_bytes // kind.itemsize:,}. Create it with slot_bytes={count * kind.itemsize}."
                )
            if len(self._plans) >= 16:
                self._plans.clear()
            areas = [self._segment.array(kind, count, self._slot_offset(r)) for r in range(self.size + 1)]
            whole = areas.pop()
            result = whole.view()
            result.flags.writeable = False
            plan = _Plan(kind, dtype_code(kind), areas[self.rank], result, whole, self._share(areas, whole))
            self._plans[count, dtype] = plan
        return plan

    def _share(self, slots: list[Array], whole: Array) -> _Blocks:
        """This rank's contiguous share, which ends at cache lines, in blocks: (everybody's inputs, output)."""
        size, item = len(whole), whole.itemsize
        share = align(max(math.ceil(size / self.size), 1) * item) // item
        begin, end = min(self.rank * share, size), min((self.rank + 1) * share, size)
        block = share if self.size <= 2 else max(_BLOCK // item, LINE)
        edges = [slice(at, min(at + block, end)) for at in range(begin, end, block)]
        return [([slot[edge] for slot in slots], whole[edge]) for edge in edges]

    def _meet(self, posted: Posted) -> None:
        """The first barrier of a call, after which all know that all make the same call."""
        board = self._board
        board.check_given_up(lambda: spell(posted))
        board.post(posted)
        board.barrier(lambda: spell(posted))
        if self._spin_open:
            self._spin_open = False
            board.waiter.spin = 0.0 if crowded(board.pids()) else SPIN
        calls = [board.posted(r) for r in range(self.size)]
        if problem := difference(board.where, calls, board.telling.doing_of):
            board.barrier(lambda: "the end of a call that differed")
            raise CallsDifferError(problem, calls)

    def agree(self, posted: Posted) -> None:
        """Return when every rank has come, and all make the same call, which another than this group carries out."""
        self._meet(posted)

    def oversee(self, ready: Callable[[], bool], posted: Posted) -> None:
        """Return when ``ready`` is true on every rank; look meanwhile whether they live."""
        self._board.oversee(ready, lambda: spell(posted))

    def outlive(self, limit: float) -> None:
        """Leave, and return when all others have left or died, or so many seconds are over."""
        self._board.outlive(limit)

    def slot(self, count: int, dtype: Any) -> Array:
        """This rank's buffer of ``count`` values in the segment; always the same memory, never copied."""
        return self._plan(count, dtype).slot

    def sum_slots(self, count: int, dtype: Any, beyond: Callable[[Array], None] | None = None) -> Array:
        """Sum all slots; a read-only view of the result, bit-equal on every rank, good until the next call.

        Args:
            count: int. Values.
            dtype: their type.
            beyond: may change the result in place before any rank is given it; where ranks of several hosts add up.
        """
        plan = self._plan(count, dtype)
        self._reduce(plan, SUM_SLOTS, count, beyond)
        return plan.result

    def _reduce(self, plan: _Plan, kind: int, count: int, beyond: Callable[[Array], None] | None = None) -> None:
        self._meet((kind, count, *plan.code))
        trace = self._board.trace
        begin = 0 if trace is None else time.monotonic_ns()
        for inputs, out in plan.blocks:
            add_in_order(inputs, out)
        if trace is not None:
            trace(("reduce", "reduce", begin, time.monotonic_ns(), plan.whole.nbytes))
        self._board.barrier(lambda: "the end of a sum")
        if beyond is not None:
            beyond(plan.whole)
            self._board.barrier(lambda: "the sum of all hosts")

    def sum(self, x: Array) -> Array:
        """A new array of the same shape and dtype: the sum over ranks. Overwrites the slot.

        Raises:
            InvalidInputError: for values without a sum, or if the ranks' calls differ, on every rank.
            PeerLostError, CommTimeoutError: as every call.
        """
        x = np.asarray(x)
        kind = numeric(x.dtype)
        out = np.empty(x.shape, kind)
        source, target = x.reshape(-1), out.reshape(-1)
        step = self.slot_bytes // kind.itemsize
        for at in range(0, max(x.size, 1), step):
            plan = self._plan(min(step, x.size - at), kind)
            plan.slot[:] = source[at : at + step]
            self._reduce(plan, SUM, x.size)
            target[at : at + step] = plan.result
        return out

    def mean(self, x: Array) -> Array:
        """A new array: the mean over ranks; whole numbers give float64, float16 is summed as float32."""
        return mean_of(np.asarray(x), self.size, self.sum)

    def gather(self, x: bytes) -> list[bytes]:
        """Every rank's bytes, in the order of the ranks, on every rank."""
        pieces = [bytearray() for _ in range(self.size)]
        board = self._board
        areas = [self._segment.array("uint8", self.slot_bytes, self._slot_offset(r)) for r in range(self.size)]
        sent, longest = 0, 1
        while sent < longest:
            part = x[sent : sent + self.slot_bytes]
            areas[self.rank][: len(part)] = np.frombuffer(part, "uint8")
            self._meet((GATHER, len(x), 0, 0))
            lengths = [board.posted(r)[1] for r in range(self.size)]
            longest = max(lengths)
            for piece, length, area in zip(pieces, lengths, areas, strict=True):
                piece += area[: max(min(length - sent, self.slot_bytes), 0)].tobytes()
            sent += self.slot_bytes
            board.barrier(lambda: "the end of a gather")
        return [bytes(piece) for piece in pieces]

    def collect(self, x: Array, root: int = 0) -> list[Array]:
        """Every rank's flat bytes, in the order of the ranks, on the root; nothing on the others."""
        if not 0 <= root < self.size:
            raise InvalidInputError(f"Root {root} was given for a group of {self.size}: give 0 to {self.size - 1}.")
        room, board, pieces = min(self.slot_bytes, _COLLECTED), self._board, list[Array]()
        areas = [self._segment.array("uint8", room, self._slot_offset(r)) for r in range(self.size)]
        sent, longest = 0, 1
        while sent < longest:
            part = x[sent : sent + room]
            areas[self.rank][: len(part)] = part
            self._meet((COLLECT + 256 * root, x.size, 0, 0))
            lengths = [board.posted(r)[1] for r in range(self.size)]
            longest = max(lengths)
            if self.rank == root:
                pieces = pieces or [np.empty(length, np.uint8) for length in lengths]
                for piece, area in zip(pieces, areas, strict=True):
                    came = piece[sent : sent + room]
                    came[:] = area[: len(came)]
            sent += room
            board.barrier(lambda: "the end of a collect")
        return pieces

    def broadcast(self, x: Array, root: int = 0) -> Array:
        """Root's array on every rank, a new array; shape and dtype are the same everywhere."""
        x = np.asarray(x)
        x = x.astype(x.dtype.newbyteorder("="), copy=False)
        if not 0 <= root < self.size:
            raise InvalidInputError(f"Root {root} was given for a group of {self.size}: give 0 to {self.size - 1}.")
        if x.dtype.hasobject:
            raise InvalidInputError(
                f"{self._board.where}: an array of objects cannot be broadcast; send numbers or bytes."
            )
        out = np.array(x, order="C")
        target = out.reshape(-1).view("uint8")
        area = self._segment.array("uint8", self.slot_bytes, self._slot_offset(root))
        for at in range(0, max(len(target), 1), self.slot_bytes):
            part = target[at : at + self.slot_bytes]
            if self.rank == root:
                area[: len(part)] = part
            self._meet((BROADCAST + 256 * root, x.size, *dtype_code(x.dtype)))
            if self.rank != root:
                part[:] = area[: len(part)]
            self._board.barrier(lambda: "the end of a broadcast")
        return out

    def barrier(self) -> None:
        """Return when every rank has come."""
        self._meet((BARRIER, 0, 0, 0))

    @property
    def broken(self) -> str:
        """The reason why nothing works any more; "" while it does."""
        return self._board.broken or given_up(self._board.words) or ""

    def give_up(self, reason: str) -> None:
        """Have all ranks' waits, now or later, raise ``PeerLostError``; any thread may call."""
        with self._leaving:
            if not self._left:
                abort(self._segment, reason)

    def close(self) -> None:
        """Leave: ranks that still wait for this one are told so. Views of slot and result stay readable."""
        with self._leaving:
            self._left = True
            self._board.leave()
            self._plans.clear()
            if self._owned:
                self._segment.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _head(size: int) -> int:
    return align(head_bytes(size), _PAGE)


def _plenty() -> int:
    """Bytes that may be mapped without thinking: this machine's memory, less where a limit is set."""
    room = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for kind in (resource.RLIMIT_FSIZE, resource.RLIMIT_AS):
        limit, _ = resource.getrlimit(kind)
        if limit != resource.RLIM_INFINITY:
            room = min(room, limit // 4)
    return max(room, 1 << 22)


def share(group: Group, segment: Segment | None, root: int = 0) -> Segment:
    """Map the root's segment on every rank of a group, whoever started the ranks.

    Args:
        group: Group. Any, of ranks on one machine.
        segment: Segment. The root's; None elsewhere.
        root: int. Who has it.

    Returns:
        Segment. The root's own object on the root, a new one on the others, which they close.

    Raises:
        InvalidInputError: on every rank, if they are on several machines.
        PeerLostError: on every rank, if one of them cannot map it.

    Example:
        >>> from choros.comm.single_rank_group import SingleRankGroup
        >>> with Segment.create(64) as segment:
        ...     share(SingleRankGroup(), segment) is segment
        True
    """
    own = [os.getpid(), segment.fd] if group.rank == root and segment is not None else None
    said = [json.loads(text) for text in group.gather(json.dumps([machine(), own]).encode())]
    if apart := spread([where for where, _ in said]):
        raise InvalidInputError(
            f"Rank {group.rank} cannot share memory with all others, which takes one machine: {apart}."
        )
    address = said[root][1]
    problem, mapped = "", segment
    if address is None:
        problem = f"rank {root} gave no segment to share"
    elif group.rank != root:
        try:
            mapped = Segment.open_peer(*address)
        except (PeerLostError, InvalidInputError, OSError) as error:
            problem = f"rank {group.rank}: {error}"
    problems = [text.decode() for text in group.gather(problem.encode()) if text]
    if problems or mapped is None:
        if mapped is not None and mapped is not segment:
            mapped.close()
        raise PeerLostError(f"Rank {group.rank}: the segment of rank {root} is not mapped everywhere. {problems[0]}")
    return mapped
