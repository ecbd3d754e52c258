"""Process group in shared memory: collectives among the ranks of one machine.

An all-reduce of n values works as follows. Rank r sums the r-th of ``size`` shares over all slots into one result area
that all ranks map. This is a reduce-scatter and an all-gather without messages (Rabenseifner, ICCS 2004, has the scheme
for networks). One rank sums each value, in the order of the ranks. So all ranks see the same bits.

Each call has two barriers. The ranks read the slots between the first and the second barrier. So a rank may write its
slot again after the second one. The next call writes the result area only after its first barrier, which all ranks
must have reached. So a result is valid until the rank's next call.
"""

from __future__ import annotations

import math
import os
import resource
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple, Self

import numpy as np

from choros.cluster.hardware.array_threads import for_each, part_length
from choros.comm.call_signature import (
    BARRIER,
    BROADCAST,
    COLLECT,
    GATHER,
    OPEN_SLOTS,
    SUM,
    SUM_SLOTS,
    Posted,
    describe_call,
    describe_difference,
)
from choros.comm.dtypes import add_in_order, dtype_code, mean_of, numeric
from choros.comm.group import Group, Trace
from choros.comm.host_identity import describe_hosts, machine, oversubscribed
from choros.comm.shared_values import gather_values
from choros.comm.shm.futex import SPIN
from choros.comm.shm.group_header import (
    FIRST_FREE_WORD,
    GROUP,
    RECORD_WORDS,
    RECORDS,
    GroupHeader,
    abort,
    abort_reason,
    head_bytes,
    open_stamped,
    stamp,
)
from choros.comm.shm.segment import CACHE_LINE, Segment, align
from choros.errors import CallsDifferError, InvalidInputError, PeerLostError
from choros.types import Array

_PAGE = 4096
_BLOCK_BYTES = 1 << 18  # bytes of one block: the partial sum stays in a core's cache while the ranks' values are added
_COLLECT_BYTES = 1 << 24  # bytes that one round of a collect moves for each rank: bounds the pages that slots take
# Lazy pages: a slot takes a page at the page's first write. Else each rank allocates its slot when it joins.
# These words are written before the magic number (``stamp``) and never again, so no reader needs a lock or a fence.
_SIZE, _SLOT_BYTES, _LAZY_PAGES = range(FIRST_FREE_WORD, FIRST_FREE_WORD + 3)
_Blocks = list[tuple[list[Array], Array]]


class _Plan(NamedTuple):
    """Cached views for one (count, dtype): all slots, this rank's, the result, and this rank's share in blocks."""

    dtype: np.dtype[Any]
    code: tuple[int, int]
    slots: list[Array]
    slot: Array
    result: Array
    total: Array
    blocks: _Blocks
    share_bytes: int


class SharedGroup:
    """The ranks of one machine, connected by one segment; implements ``choros.comm.group.Group``.

    Args:
        segment_or_fd: Segment, or the int of an inherited descriptor, which the group then owns.
        rank: int. This rank, from 0; each rank joins once.
        timeout: float. Seconds that one wait may last. Defaults to 300.
        spin: float. Seconds to poll before sleeping. Defaults to 50 us, or 0 if the ranks outnumber their cores; the
            first call decides.

    Attributes:
        rank, size: int.
        timeout, warn_after: float. doing: str. trace: Trace. See ``choros.comm.group.Group``; may be set between calls.

    Raises:
        InvalidInputError: the descriptor is not a group's segment, or the rank is taken or out of range.

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
        shared = self._segment.words
        self.rank, self.size, self.slot_bytes = rank, shared[_SIZE], shared[_SLOT_BYTES]
        try:
            if not 0 <= rank < self.size:
                raise InvalidInputError(f"Rank {rank} was given for a group of {self.size}: give 0 to {self.size - 1}.")
            self._header = GroupHeader(self._segment, rank, self.size, timeout, SPIN if spin is None else spin)
            # A rank that joins cannot know how many ranks share the cores, as the others may not have stored their
            # process IDs yet.
            self._spin_undecided = spin is None
        except BaseException:
            if self._owned:
                # The memoryview keeps the mapping alive: ``munmap`` runs when the last view is gone.
                del shared
                self._segment.close()
            raise
        self._plans: dict[tuple[int, Any], _Plan] = {}
        self._close_lock, self._closed = threading.RLock(), False
        # The rank that computes on the slot writes it first: the kernel places a page on the memory node of the CPU
        # that touches it first.
        if not shared[_LAZY_PAGES]:
            self._segment.touch(self._slot_offset(rank), self.slot_bytes)

    abort = staticmethod(abort)
    kind = "shared memory"

    @staticmethod
    def create(size: int, slot_bytes: int | None = None) -> Segment:
        """Make the segment of a group.

        Args:
            size: int. Number of ranks.
            slot_bytes: int. Capacity of one slot: the bytes of the largest vector for ``slot``. The default divides the
                machine's memory among the slots; a page takes memory at its first write.

        Returns:
            Segment. A header, ``size`` slots and one result area.

        Raises:
            InvalidInputError: ``size`` is below 1, or ``slot_bytes`` is negative.
        """
        if size < 1 or (slot_bytes is not None and slot_bytes < 0):
            raise InvalidInputError(
                f"A group of {size} ranks with slots of {slot_bytes} bytes cannot be created: give 1 or more ranks."
            )
        slot_bytes_aligned = align(
            max(_mappable_bytes() // (size + 1) if slot_bytes is None else slot_bytes, _PAGE), _PAGE
        )
        segment = Segment.create(_header_bytes(size) + (size + 1) * slot_bytes_aligned, "choros-group")
        header = segment.words
        header[_SIZE], header[_SLOT_BYTES], header[_LAZY_PAGES] = size, slot_bytes_aligned, slot_bytes is None
        stamp(segment, GROUP, RECORDS, RECORD_WORDS, size)
        return segment

    @property
    def timeout(self) -> float:
        """Seconds that one wait may last."""
        return self._header.timeout

    @timeout.setter
    def timeout(self, seconds: float) -> None:
        self._header.timeout = seconds

    @property
    def warn_after(self) -> float:
        """Seconds after which a wait is reported on stderr, once."""
        return self._header.warn_after

    @warn_after.setter
    def warn_after(self, seconds: float) -> None:
        self._header.warn_after = seconds

    @property
    def doing(self) -> str:
        """The present activity of this rank, which the other ranks can read."""
        return self._header.status.doing

    @doing.setter
    def doing(self, text: str) -> None:
        self._header.status.set(text)

    @property
    def trace(self) -> Trace | None:
        """The receiver of the timing of every wait and reduction, or None."""
        return self._header.trace

    @trace.setter
    def trace(self, trace: Trace | None) -> None:
        self._header.trace = trace

    def _slot_offset(self, rank: int) -> int:
        return _header_bytes(self.size) + rank * self.slot_bytes

    def _plan(self, count: int, dtype: np.typing.DTypeLike) -> _Plan:
        plan = self._plans.get((count, dtype))
        if plan is None:
            value_dtype = numeric(dtype)
            if count < 0 or count * value_dtype.itemsize > self.slot_bytes:
                raise InvalidInputError(
                    f"Rank {self.rank} requested a slot of {count:,} {value_dtype} values; this group's slots have "
                    f"room for {self.slot_bytes // value_dtype.itemsize:,}. Create the group with "
                    f"slot_bytes={count * value_dtype.itemsize}."
                )
            # Views are cheap to build again, so the whole cache is dropped instead of the oldest entry.
            if len(self._plans) >= 16:  # bounds the views that are kept alive; a training loop needs one or two plans
                self._plans.clear()
            areas = [self._segment.array(value_dtype, count, self._slot_offset(r)) for r in range(self.size + 1)]
            total = areas.pop()
            result = total.view()
            # All ranks map the same result area. A write by one rank would change what the others read.
            result.flags.writeable = False
            code, blocks = dtype_code(value_dtype), self._share_blocks(areas, total)
            share_bytes = sum(out.nbytes for _, out in blocks)
            plan = _Plan(value_dtype, code, areas, areas[self.rank], result, total, blocks, share_bytes)
            self._plans[count, dtype] = plan
        return plan

    def _share_blocks(self, slots: list[Array], total: Array) -> _Blocks:
        """Return this rank's contiguous share in blocks: (all ranks' inputs, output).

        A share ends at a cache line, so no two ranks write to the same line.
        """
        size, item_bytes = len(total), total.itemsize
        share = align(max(math.ceil(size / self.size), 1) * item_bytes) // item_bytes
        begin, end = min(self.rank * share, size), min((self.rank + 1) * share, size)
        # With two ranks there is one addition, which reads each value once: blocks would only add calls, so there is
        # one for each thread. With more ranks the partial sum is read again for each rank.
        block = part_length(share, item_bytes) if self.size <= 2 else max(_BLOCK_BYTES // item_bytes, CACHE_LINE)
        slices = [slice(start, min(start + block, end)) for start in range(begin, end, block)]
        return [([slot[part] for slot in slots], total[part]) for part in slices]

    def _begin_call(self, posted: Posted) -> None:
        """Pass the first barrier of a call and check that all ranks make the same call."""
        header = self._header
        # Before the post: a rank that arrives after an abort must not count as present at this call's barrier.
        header.check_aborted(lambda: describe_call(posted))
        header.post(posted)
        header.barrier(lambda: describe_call(posted))
        if self._spin_undecided:  # the process IDs of all ranks are known only after the first barrier
            self._spin_undecided = False
            header.waiter.spin = 0.0 if oversubscribed(header.pids()) else SPIN
        calls = [header.posted(r) for r in range(self.size)]
        if problem := describe_difference(header.where, calls, header.status.current):
            # Every rank raises below. Without this barrier a fast rank could change its status text while a slow rank
            # still reads the text for its message.
            header.barrier(lambda: "the end of a call that differed")
            raise CallsDifferError(problem, calls)

    def agree(self, posted: Posted) -> None:
        """Check that all ranks make the same call, which another library then carries out."""
        self._begin_call(posted)

    def wait_until_ready(self, ready: Callable[[], bool], posted: Posted) -> None:
        """Return when ``ready`` is true on every rank; check meanwhile whether the ranks live."""
        self._header.wait_until_ready(ready, lambda: describe_call(posted))

    def leave_after_peers(self, limit: float) -> None:
        """Leave, then wait until all other ranks have left or died, for at most ``limit`` seconds."""
        self._header.leave_after_peers(limit)

    def slot(self, count: int, dtype: np.typing.DTypeLike) -> Array:
        """Return this rank's buffer of ``count`` values in the segment; always the same memory, without a copy."""
        return self._plan(count, dtype).slot

    def sum_slots(
        self, count: int, dtype: np.typing.DTypeLike, combine_hosts: Callable[[Array], None] | None = None
    ) -> Array:
        """Sum all slots; return a read-only view of the result, bit-equal on every rank, valid until the next call.

        Args:
            count: int. Number of values.
            dtype: numpy dtype of the values.
            combine_hosts: called with this host's sum, which it may change in place, before the call returns on any
                rank. A group of several hosts adds the sums of the other hosts. Defaults to None.
        """
        plan = self._plan(count, dtype)
        self._reduce(plan, SUM_SLOTS, count, combine_hosts)
        return plan.result

    def _reduce(self, plan: _Plan, call: int, count: int, combine_hosts: Callable[[Array], None] | None = None) -> None:
        self._begin_call((call, count, *plan.code))
        trace = self._header.trace
        begin = 0 if trace is None else time.monotonic_ns()
        # In rank order, not "own slot first": floating-point addition is not associative, and all ranks must get the
        # same bits.
        for_each(add_in_order, plan.blocks, plan.share_bytes)
        if trace is not None:
            trace(("reduce", "reduce", begin, time.monotonic_ns(), plan.total.nbytes))
        # Until here slow ranks still read the slots, and other shares of the result are incomplete.
        self._header.barrier(lambda: "the end of a sum")
        if combine_hosts is not None:
            # On the host's first rank this writes to the result area that the others map. They wait in the barrier
            # below and do not read it meanwhile.
            combine_hosts(plan.total)
            self._header.barrier(lambda: "the sum of all hosts")  # until then the first rank changes the result

    def open_slots(self, count: int, dtype: np.typing.DTypeLike) -> list[Array]:
        """Return all ranks' slots, in the order of the ranks, for reading. ``close_slots`` must follow.

        In between no rank writes its slot. So all may read all slots, and write other memory that no rank reads then.

        Args:
            count: int. Number of values in a slot.
            dtype: numpy dtype of the values.
        """
        plan = self._plan(count, dtype)
        self._begin_call((OPEN_SLOTS, count, *plan.code))
        return plan.slots

    def close_slots(self) -> None:
        """Return when every rank has called this: from then on a rank may write its slot."""
        self._header.barrier(lambda: "close_slots")

    def sum(self, x: Array) -> Array:
        """Return the sum over ranks, a new array of the same shape and dtype. Overwrites the slot.

        Raises:
            InvalidInputError: the dtype has no sum; or the ranks' calls differ, on every rank.
            PeerLostError: a rank died or left. CommTimeoutError: a rank did not call within the time limit.
        """
        x = np.asarray(x)
        value_dtype = numeric(x.dtype)
        out = np.empty(x.shape, value_dtype)
        source, target = x.reshape(-1), out.reshape(-1)
        step = self.slot_bytes // value_dtype.itemsize
        # An empty array still makes one call: the other ranks wait for this rank at the barrier.
        for begin in range(0, max(x.size, 1), step):
            plan = self._plan(min(step, x.size - begin), value_dtype)
            plan.slot[:] = source[begin : begin + step]
            self._reduce(plan, SUM, x.size)
            target[begin : begin + step] = plan.result
        return out

    def mean(self, x: Array) -> Array:
        """Return the mean over ranks, a new array; integers give float64, float16 is summed as float32."""
        return mean_of(np.asarray(x), self.size, self.sum)

    def gather(self, x: bytes) -> list[bytes]:
        """Return every rank's bytes, in the order of the ranks, on every rank."""
        pieces = [bytearray() for _ in range(self.size)]
        header = self._header
        areas = [self._segment.array("uint8", self.slot_bytes, self._slot_offset(r)) for r in range(self.size)]
        # ``longest`` becomes known with the first round. All ranks then make the same number of rounds, however little
        # they send.
        sent, longest = 0, 1
        while sent < longest:
            chunk = x[sent : sent + self.slot_bytes]
            areas[self.rank][: len(chunk)] = np.frombuffer(chunk, "uint8")
            self._begin_call((GATHER, len(x), 0, 0))
            lengths = [header.posted(r)[1] for r in range(self.size)]
            longest = max(lengths)
            for piece, length, area in zip(pieces, lengths, areas, strict=True):
                piece += area[: max(min(length - sent, self.slot_bytes), 0)].tobytes()
            sent += self.slot_bytes
            header.barrier(lambda: "the end of a gather")
        return [bytes(piece) for piece in pieces]

    def collect(self, x: Array, root: int = 0) -> list[Array]:
        """Return every rank's flat bytes, in the order of the ranks, on the root; an empty list on the others."""
        if not 0 <= root < self.size:
            raise InvalidInputError(f"Root {root} was given for a group of {self.size}: give 0 to {self.size - 1}.")
        # A slot may be as large as the machine's memory (lazy pages). Rounds of 16 MiB touch few of its pages.
        chunk_bytes, header, pieces = min(self.slot_bytes, _COLLECT_BYTES), self._header, list[Array]()
        areas = [self._segment.array("uint8", chunk_bytes, self._slot_offset(r)) for r in range(self.size)]
        sent, longest = 0, 1
        while sent < longest:
            chunk = x[sent : sent + chunk_bytes]
            areas[self.rank][: len(chunk)] = chunk
            self._begin_call((COLLECT + 256 * root, x.size, 0, 0))
            lengths = [header.posted(r)[1] for r in range(self.size)]
            longest = max(lengths)
            if self.rank == root:
                pieces = pieces or [np.empty(length, np.uint8) for length in lengths]
                for piece, area in zip(pieces, areas, strict=True):
                    target = piece[sent : sent + chunk_bytes]
                    target[:] = area[: len(target)]
            sent += chunk_bytes
            header.barrier(lambda: "the end of a collect")
        return pieces

    def broadcast(self, x: Array, root: int = 0) -> Array:
        """Return the root's array on every rank, a new array; shape and dtype must be equal on all ranks."""
        x = np.asarray(x)
        x = x.astype(x.dtype.newbyteorder("="), copy=False)
        if not 0 <= root < self.size:
            raise InvalidInputError(f"Root {root} was given for a group of {self.size}: give 0 to {self.size - 1}.")
        if x.dtype.hasobject:
            raise InvalidInputError(
                f"{self._header.where}: an array of objects cannot be broadcast; send numbers or bytes."
            )
        # A copy on the root too: the result is a new array on every rank, and a caller may change it in place.
        out = np.array(x, order="C")
        target = out.reshape(-1).view("uint8")
        area = self._segment.array("uint8", self.slot_bytes, self._slot_offset(root))
        for begin in range(0, max(len(target), 1), self.slot_bytes):
            chunk = target[begin : begin + self.slot_bytes]
            # A rank may write here without a barrier: the previous call ended with one, so no rank reads the slots any
            # more.
            if self.rank == root:
                # Only the root's slot is written. The pages of the other ranks' slots stay unallocated.
                area[: len(chunk)] = chunk
            self._begin_call((BROADCAST + 256 * root, x.size, *dtype_code(x.dtype)))
            if self.rank != root:
                chunk[:] = area[: len(chunk)]
            self._header.barrier(lambda: "the end of a broadcast")
        return out

    def barrier(self) -> None:
        """Return when every rank has called this."""
        self._begin_call((BARRIER, 0, 0, 0))

    @property
    def broken(self) -> str:
        """The error after which the group cannot be used; "" before."""
        return self._header.broken or abort_reason(self._header.words) or ""

    def give_up(self, reason: str) -> None:
        """Abort: the waits of all ranks, now or later, raise ``PeerLostError``; any thread may call."""
        # The lock is reentrant: a signal handler that calls this may interrupt ``close`` in the main thread.
        with self._close_lock:  # a close in another thread would unmap the segment during the abort
            if not self._closed:
                abort(self._segment, reason)

    def close(self) -> None:
        """Leave: ranks that wait for this one raise ``PeerLostError``. Views of slot and result stay readable."""
        with self._close_lock:
            self._closed = True
            # Before the unmap, as it stores to the segment. The flag above keeps ``give_up`` of another thread away
            # from it.
            self._header.leave()
            self._plans.clear()
            if self._owned:
                self._segment.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _header_bytes(size: int) -> int:
    return align(head_bytes(size), _PAGE)


def _mappable_bytes() -> int:
    """Return the bytes that a segment may map: this machine's memory, or a quarter of a lower resource limit."""
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    # A memfd is a file: ``ftruncate`` beyond RLIMIT_FSIZE fails with EFBIG, and a mapping beyond RLIMIT_AS fails with
    # ENOMEM. A quarter leaves room for the framework's own mappings.
    for resource_kind in (resource.RLIMIT_FSIZE, resource.RLIMIT_AS):
        limit, _ = resource.getrlimit(resource_kind)
        if limit != resource.RLIM_INFINITY:
            available = min(available, limit // 4)
    return max(available, 1 << 22)


def share(group: Group, segment: Segment | None, root: int = 0) -> Segment:
    """Map the root's segment on every rank of a group, independent of the launcher.

    Args:
        group: Group. Any group of ranks on one machine.
        segment: Segment. The segment on the root; None on the others.
        root: int. The rank that has the segment. Defaults to 0.

    Returns:
        Segment. The same object on the root; on the others a new one, which they must close.

    Raises:
        InvalidInputError: on every rank, if the ranks are on several machines.
        PeerLostError: on every rank, if a rank cannot map the segment.

    Example:
        >>> from choros.comm.single_rank_group import SingleRankGroup
        >>> with Segment.create(64) as segment:
        ...     share(SingleRankGroup(), segment) is segment
        True
    """
    # Process ID and descriptor number identify the memfd, which has no name. The root stays inside the gathers below
    # until all ranks have opened it, so the kernel cannot reuse either number meanwhile.
    local_address = [os.getpid(), segment.fd] if group.rank == root and segment is not None else None
    replies = gather_values(group, [machine(), local_address])
    if hosts := describe_hosts([host for host, _ in replies]):
        raise InvalidInputError(
            f"Rank {group.rank} cannot share memory with all others, as that requires one machine: {hosts}."
        )
    address = replies[root][1]
    problem, mapped = "", segment
    if address is None:
        problem = f"rank {root} gave no segment to share"
    elif group.rank != root:
        try:
            mapped = Segment.open_peer(*address)
        except (PeerLostError, InvalidInputError, OSError) as error:
            problem = f"rank {group.rank}: {error}"
    # A second gather: a rank that raised alone would leave the others waiting in the first call of the new group.
    problems = [text.decode() for text in group.gather(problem.encode()) if text]
    if problems or mapped is None:
        if mapped is not None and mapped is not segment:
            mapped.close()
        raise PeerLostError(f"Rank {group.rank}: the segment of rank {root} is not mapped everywhere. {problems[0]}")
    return mapped
