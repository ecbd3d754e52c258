"""Parameter server in shared memory: workers exchange with the center one at a time, without waiting for each other.

Every vector has two buffers. A merge holds a lock, which the kernel releases if the holder dies. It writes the spare
buffers and a spare header (valid buffers, clock, contributions of each rank). One aligned 8-byte store of the commit
word then makes them the center. So a worker may be killed at any moment: the center stays consistent, and the worker's
last contribution counts once or not at all.

This is the exchange of DOWNPOUR (Dean et al. 2012, NIPS, section 4.1) and of asynchronous EASGD (Zhang, Choromanska and
LeCun 2015, NIPS, algorithm 1). The rule defines the arithmetic.
"""

from __future__ import annotations

import time
from typing import Self

import numpy as np

from choros.algorithms import ExchangeInfo
from choros.comm.dtypes import dtype_code, dtype_name, read_only
from choros.comm.group import Trace
from choros.comm.shm.futex import SPIN, fence
from choros.comm.shm.group_header import PARAM_SERVER, abort, open_stamped, stamp
from choros.comm.shm.robust_lock import RobustLock
from choros.comm.shm.segment import Segment
from choros.errors import InvalidInputError, counted
from choros.param_server import layout as fields
from choros.param_server.fused_update import trace_rule
from choros.param_server.layout import Layout
from choros.param_server.merge_rule import MergeRule
from choros.param_server.rule_blocks import BlockRule
from choros.types import Array

_OPTIMISTIC_READS = 3
_WRITE_SECONDS = 1.0  # seconds to wait for a pending message that is being written; after that its writer has died


class SharedMemoryParameterServer:
    """A worker's or a controller's access to the center; implements ``choros.comm.group.ParameterServer``.

    Args:
        segment_or_fd: Segment, or the int of an inherited descriptor, which this object then owns.
        rule: MergeRule. The algorithm. A controller needs it only for ``replace``, which then sets the
            rule's memory too.
        rank: int. The worker's rank; None for a controller, which does not exchange.
        workers: int. Number of workers; None takes it from the segment.
        timeout: float. Seconds to wait for the lock. Defaults to 300.
        spin: float. Seconds to try the lock before sleeping. Defaults to 50 us.

    Attributes:
        timeout: float. May be set between calls.
        position_word: int. This worker's position, which its next exchange commits (``center_state.encode_position``).

    Raises:
        InvalidInputError: the descriptor is not a center's segment, or ``rank`` or ``workers`` do not fit it.

    Example:
        >>> class Downpour:
        ...     shows, elementwise = "after", True
        ...     def propose(self, local, seen, window): return local - seen
        ...     def merge(self, center, message, info, memory): return center + message, memory
        ...     def adopt(self, local, shown): return shown
        >>> none = np.zeros(0)
        >>> segment = SharedMemoryParameterServer.create(np.zeros(3), none, (), workers=2)
        >>> one, two = (SharedMemoryParameterServer(segment, Downpour(), rank) for rank in (0, 1))
        >>> one.exchange(np.full(3, 5.0), np.zeros(3), 1, none)
        0
        >>> local, seen = np.full(3, 1.0), np.zeros(3)
        >>> two.exchange(local, seen, 1, none), local.tolist(), one.contributions
        (1, [6.0, 6.0, 6.0], [1, 1])
        >>> segment.close()
    """

    kind = "a center in shared memory"

    def __init__(
        self,
        segment_or_fd: Segment | int,
        rule: MergeRule | None = None,
        rank: int | None = None,
        workers: int | None = None,
        timeout: float = 300.0,
        *,
        spin: float = SPIN,
    ) -> None:
        self._segment, self._owned = open_stamped(segment_or_fd, PARAM_SERVER)
        self._words = self._segment.words
        self.workers = self._words[fields.WORKERS]
        self.count = self._words[fields.COUNT]
        self.statistics_size = self._words[fields.STATISTICS]
        self.rank, self.timeout = rank, timeout
        self._rule = BlockRule(rule) if rule is not None else None
        self._name = "the controller" if rank is None else f"rank {rank}"
        try:
            self._check_arguments(rule, rank, workers)
        except InvalidInputError:
            self.close()
            raise
        self._map_areas()
        lock_rank = -1 if rank is None else rank
        self._lock = RobustLock(self._segment, fields.RELEASED, fields.HOLDER, self._name, lock_rank, spin)
        self._clock_seen = 0
        # The own count of contributions: if the header's count is another, a second process exchanges under this rank.
        self._contributions = self._header()[self._contributions_index] if rank is not None else 0
        self.position_word = 0
        self._times_set = int(self._header()[fields.TIMES_SET])
        self._scratch: list[Array] = []
        if rank is not None:
            # Headers and buffers only: most runs write few pending messages, whose pages must take no memory before.
            self._segment.touch(0, self._pending_offset)

    def _check_arguments(self, rule: MergeRule | None, rank: int | None, workers: int | None) -> None:
        if workers is not None and workers != self.workers:
            raise InvalidInputError(
                f"{self._name} expects {counted(workers, 'worker')}; this center was created for {self.workers}."
            )
        if rank is not None and not 0 <= rank < self.workers:
            raise InvalidInputError(
                f"Rank {rank} was given for a center of {counted(self.workers, 'worker')}: give 0 to "
                f"{self.workers - 1}."
            )
        if rule is None and rank is not None:
            raise InvalidInputError(
                f"{self._name} gave no rule: a worker needs the algorithm, a controller has no rank."
            )

    def _map_areas(self) -> None:
        header, segment = self._words, self._segment
        dtype = dtype_name((header[fields.DTYPE], header[fields.DTYPE + 1]))
        statistics_dtype = dtype_name((header[fields.DTYPE_STATISTICS], header[fields.DTYPE_STATISTICS + 1]))
        vectors = [
            (dtype, self.count),
            (statistics_dtype, self.statistics_size),
            *[(dtype, self.count)] * header[fields.MEMORIES],
        ]
        layout = Layout.of(self.workers, [np.dtype(vector_dtype).itemsize * count for vector_dtype, count in vectors])
        self._headers = [segment.array("int64", layout.header_words, begin) for begin in layout.headers]
        self._buffers = [
            (segment.array(vector_dtype, count, pair[0]), segment.array(vector_dtype, count, pair[1]))
            for (vector_dtype, count), pair in zip(vectors, layout.areas, strict=True)
        ]
        # A rule gets read-only views of the committed buffers: a rule that writes in place fails before it changes the
        # center.
        self._read_only_buffers = [tuple(read_only(buffer) for buffer in pair) for pair in self._buffers]
        self._pending_offset = layout.pending
        self._pending = segment.array("int64", self.workers * fields.PENDING_WORDS, layout.pending).reshape(
            self.workers, fields.PENDING_WORDS
        )
        self._messages = [
            (
                segment.array(dtype, self.count, message_offset),
                segment.array(statistics_dtype, self.statistics_size, statistics_offset if self.statistics_size else 0),
            )
            for message_offset, statistics_offset in layout.messages
        ]
        self._clock_seen_index = fields.ACTIVE + len(vectors) + (self.rank or 0)
        self._contributions_index = self._clock_seen_index + self.workers
        self._position_index = self._contributions_index + self.workers

    abort = staticmethod(abort)

    @staticmethod
    def create(center: Array, statistics: Array, memory: tuple[Array, ...], workers: int) -> Segment:
        """Make the segment of a center.

        Args:
            center: flat float array. Initial center.
            statistics: flat float array. Initial averaged moving statistics; may be empty.
            memory: arrays of the center's size, from the rule's ``start``.
            workers: int. Number of workers.

        Returns:
            Segment. It has two buffers for each vector; the first ones have the initial values.

        Raises:
            InvalidInputError: a vector is not flat, not of floats, or has a wrong size; or ``workers`` is below 1.
        """
        for name, vector in [("center", center), ("statistics", statistics), *[("memory", m) for m in memory]]:
            if vector.ndim != 1 or vector.dtype.kind != "f" or (name == "memory" and vector.size != center.size):
                raise InvalidInputError(
                    f"A center was given {name} of shape {vector.shape} and type {vector.dtype}: "
                    "give flat float vectors, memory as long as the center."
                )
        if workers < 1:
            raise InvalidInputError(f"A center for {workers} workers is impossible: give 1 or more.")
        vectors = [center, statistics, *(m.astype(center.dtype, copy=False) for m in memory)]
        layout = Layout.of(workers, [vector.nbytes for vector in vectors])
        segment = Segment.create(layout.total, "choros-center")
        header = segment.words
        header[fields.WORKERS] = workers
        header[fields.COUNT] = len(center)
        header[fields.STATISTICS] = len(statistics)
        header[fields.MEMORIES] = len(memory)
        header[fields.DTYPE], header[fields.DTYPE + 1] = dtype_code(center.dtype)
        header[fields.DTYPE_STATISTICS], header[fields.DTYPE_STATISTICS + 1] = dtype_code(statistics.dtype)
        # The header is zero: it names buffer 0 of each vector, clock 0 and commit 0. So the first buffers are the
        # center.
        for vector, (first, _) in zip(vectors, layout.areas, strict=True):
            segment.array(vector.dtype, vector.size, first)[:] = vector
        # Last: a process that sees the magic number also sees sizes and values.
        stamp(segment, PARAM_SERVER, fields.RELEASED, 1, 1)
        return segment

    def _header(self) -> Array:
        # Only the parity selects a header. The full number lets a reader notice two commits during its copy.
        return self._headers[self._words[fields.COMMIT] % 2]

    @property
    def trace(self) -> Trace | None:
        """The receiver of the timing of every wait for the lock, or None."""
        return self._lock.trace

    @trace.setter
    def trace(self, trace: Trace | None) -> None:
        self._lock.trace = trace

    @property
    def clock(self) -> int:
        """The number of merges of the center, unless ``replace`` has set another number."""
        return int(self._header()[fields.CLOCK])

    @property
    def times_set(self) -> int:
        """The number of times that a controller had set the center when this worker last took it."""
        return self._times_set

    def blank(self) -> tuple[Array, Array]:
        """Return memory of the center's and the moving statistics' sizes, for ``read``."""
        return np.empty_like(self._buffers[0][0]), np.empty_like(self._buffers[1][0])

    @property
    def contributions(self) -> list[int]:
        """The number of merges of each rank's exchanges, as of the last commit."""
        first = self._contributions_index - (self.rank or 0)
        return [int(count) for count in self._header()[first : first + self.workers]]

    def exchange(self, local: Array, seen: Array, window: int, statistics: Array) -> int:
        """Propose, merge and adopt under the lock, in one pass over blocks where the rule is elementwise.

        If a controller set the center since this worker's last exchange, nothing is merged. The worker takes the center
        as it is, and its steps since its last exchange are lost. If the rule raises, the center is unchanged;
        ``local`` and ``seen`` may be partly updated.

        Args:
            local: this worker's vector; becomes the result of the rule's ``adopt``.
            seen: the center that this worker saw last; becomes the center that it is shown now, unless
                ``rule.uses_seen`` is False or the traced rule does not read it.
            window: int. Optimizer steps since the last exchange.
            statistics: its moving statistics; c <- c + (statistics - c) / workers, and statistics <- c.

        Returns:
            int. The staleness: merges by other workers since this worker last saw the center.

        Raises:
            InvalidInputError: the vectors do not fit, or this is a controller.
            CommTimeoutError: the lock was not free within the timeout; the message names the holder.
            PeerLostError: the run was aborted.
        """
        if self._rule is None or self.rank is None:
            raise InvalidInputError(
                "A controller reads the center; only a worker, which has a rule and a rank, exchanges."
            )
        self._check_vectors(local, statistics)
        self._check_vectors(seen, statistics)
        with self._lock.hold(self.timeout, "an exchange with the center"):
            # All changes go into a copy of the header and into spare buffers. A worker that is killed before the commit
            # leaves the center as it was; the next holder of the lock writes the same spare buffers again.
            commit = self._words[fields.COMMIT]
            header = self._headers[commit % 2].copy()
            # Inside the lock, as only there the header cannot change between the test and the merge.
            if header[self._contributions_index] != self._contributions:
                return self._handle_count_mismatch(header, statistics)
            # A message that was computed from a center before the set would bring the old values back.
            if header[fields.TIMES_SET] != self._times_set:
                self._clock_seen, self._times_set = self._copy_committed(commit, local, statistics)
                seen[:] = local
                # Also without a merge: the worker's progress is lost, and a restart must not repeat the batches before
                # this position.
                header[self._position_index] = self.position_word
                self._commit(commit, header)
                return 0
            staleness = int(header[fields.CLOCK]) - self._clock_seen
            info = ExchangeInfo(workers=1, staleness=staleness, sender=self.rank)
            self._merge(self._rule, header, local, seen, window, info)
            self._average(header, statistics)
            header[fields.CLOCK] += 1
            # Clock, contributions and position change with the same store as the center. If the worker dies here,
            # either all of them or none count, so a restart from the position neither loses nor repeats a contribution.
            header[self._clock_seen_index] = header[fields.CLOCK]
            header[self._contributions_index] += 1
            header[self._position_index] = self.position_word
            self._commit(commit, header)
        # After the lock: if the release raises (KeyboardInterrupt), the committed header is ahead of these counters,
        # and the next exchange refuses instead of merging twice.
        self._clock_seen, self._contributions = int(header[fields.CLOCK]), self._contributions + 1
        return staleness

    def publish_pending(self, local: Array, seen: Array, window: int, statistics: Array) -> None:
        """Publish the message that an exchange would merge now, for ``trial``; merge nothing, change no argument.

        The message is valid until this worker's next exchange. The arguments are those of ``exchange``.
        """
        if self._rule is None or self.rank is None:
            raise InvalidInputError(
                "A controller reads the center; only a worker, which has a rule and a rank, stores a message."
            )
        # A sequence lock: the version is odd during the write. Readers take no lock, so a worker that publishes a
        # message does not wait for a worker that runs a trial.
        record, (message, pending_statistics) = self._pending[self.rank], self._messages[self.rank]
        record[0] += 1 + record[0] % 2  # the version becomes odd, also if it stayed odd after a kill during a write
        fence()  # readers must see the odd version before any new value of the message
        self._rule.write_message(local, seen, window, message)
        pending_statistics[:] = statistics
        # Inside the odd version too: a reader uses these words to decide whether the message is already in the center.
        record[fields.PENDING_CONTRIBUTIONS] = self._contributions
        record[fields.PENDING_TIMES_SET] = self._times_set
        record[fields.PENDING_CLOCK] = self._clock_seen
        fence()  # readers that see the even version must also see the whole message
        record[0] += 1

    def trial(self, out: Array, statistics: Array) -> None:
        """Copy out the center as it would be after a merge of all pending messages; the center does not change.

        Args:
            out: receives the center.
            statistics: receives the averaged moving statistics.

        Raises:
            InvalidInputError: the vectors do not fit, or this is a controller.
            CommTimeoutError: the lock was not free within the timeout; the message names the holder.
        """
        if self._rule is None:
            raise InvalidInputError("A controller reads the center; only a worker, which has a rule, makes a trial.")
        self._check_vectors(out, statistics)
        with self._lock.hold(self.timeout, "a copy of the center"):
            header = self._header().copy()
            out[:] = self._buffers[0][int(header[fields.ACTIVE])]
            statistics[:] = self._buffers[1][int(header[fields.ACTIVE + 1])]
            valid_ranks = [rank for rank in range(self.workers) if self._pending_is_valid(header, rank)]
            memory_pairs = enumerate(self._buffers[2:] if valid_ranks else [], fields.ACTIVE + 2)
            memory = tuple(pair[int(header[i])].copy() for i, pair in memory_pairs)
        message, pending_statistics, clock = np.empty_like(out), np.empty_like(statistics), int(header[fields.CLOCK])
        # Outside the lock: a merge of all messages takes as many passes as there are workers, and no worker must wait
        # for it.
        for rank in valid_ranks:
            clock_seen = self._copy_pending(header, rank, message, pending_statistics)
            if clock_seen is None:  # it has exchanged meanwhile
                continue
            info = ExchangeInfo(workers=1, staleness=clock - clock_seen, sender=rank)
            with np.errstate(all="ignore"):
                self._rule.merge(self._rule.divide(message), info, out, memory, out, memory)
            statistics += (pending_statistics - statistics) / self.workers
            clock += 1

    def _pending_is_valid(self, header: Array, rank: int) -> bool:
        """Return whether a worker has a pending message that the center of this header does not contain."""
        version, contributions, times_set = self._pending[rank, :3].tolist()
        first = self._contributions_index - (self.rank or 0)
        return bool(version > 0 and contributions == header[first + rank] and times_set == header[fields.TIMES_SET])

    def _copy_pending(self, header: Array, rank: int, message: Array, pending_statistics: Array) -> int | None:
        """Copy a pending message; return the clock that its worker saw last, or None if it is not valid any more."""
        record, deadline = self._pending[rank], time.monotonic() + _WRITE_SECONDS
        while True:
            # The version is read before the check and after the copy: equal and even means no write in between. So a
            # message that replaces the checked one is rejected.
            version = int(record[0])
            fence()
            # Compared with the header that was copied with the center: a worker that has exchanged since is not in that
            # copy, but its pending message is of a later center.
            if not self._pending_is_valid(header, rank):
                return None
            clock_seen = int(record[fields.PENDING_CLOCK])
            message[:], pending_statistics[:] = self._messages[rank]
            fence()
            if version % 2 == 0 and int(record[0]) == version:
                return clock_seen
            if time.monotonic() > deadline:  # the worker was killed during the write
                return None
            # A sleep and no futex: a write takes microseconds, and this wait is rare.
            time.sleep(1e-4)

    def _handle_count_mismatch(self, header: Array, statistics: Array) -> int:
        """Handle an exchange whose number of contributions differs from the header's; a shard's server repeats it."""
        raise InvalidInputError(f"{self._name}: another process exchanges under this rank; give each its own.")

    def _commit(self, commit: int, header: Array) -> None:
        """Make a new header and its buffers the center, by one 8-byte store, which is atomic."""
        # Readers do not use this header: it is the one of the commit before. A reader that still copies it notices the
        # new commit word and rejects its copy.
        self._headers[(commit + 1) % 2][:] = header
        fence()  # the stores to buffers and header must come before the store that makes them the center
        # The buffers of the commit before are written next, by the next holder of the lock. The unlock and the lock are
        # system calls in between, so no reader sees those writes before this store.
        self._words[fields.COMMIT] = commit + 1

    def replace(self, center: Array, statistics: Array, after: int | None = None, clock: int | None = None) -> None:
        """Set the center and the moving statistics. This is neither a merge nor a contribution.

        Every worker's next exchange takes the center without a merge. So no older value mixes with it.

        Args:
            center: the new center.
            statistics: the new averaged moving statistics.
            after: int or None. Set the center only if it has been set this many times, so that a repeated request has
                no effect. None, the default, sets it in any case.
            clock: int or None. The new clock. None, the default, keeps the clock.
        """
        self._check_vectors(center, statistics)
        with self._lock.hold(self.timeout, "setting the center"):
            commit = self._words[fields.COMMIT]
            header = self._headers[commit % 2].copy()
            if after not in (None, header[fields.TIMES_SET]):
                return
            for i, vector in enumerate((center, statistics)):
                active = int(header[fields.ACTIVE + i])
                # Into the spare buffer, as in a merge: a reader without the lock may be copying the active one.
                self._buffers[i][1 - active][:] = vector
                header[fields.ACTIVE + i] = 1 - active
            self._replace_memory(header, center)
            header[fields.TIMES_SET] += 1
            if clock is not None:
                header[fields.CLOCK] = clock
            self._commit(commit, header)

    def _replace_memory(self, header: Array, center: Array) -> None:
        """Write the rule's memory for a center that was set, if the rule has a method ``replaced``."""
        replaced = getattr(self._rule.rule, "replaced", None) if self._rule is not None else None
        if replaced is None:
            return
        first_index = fields.ACTIVE + 2
        pairs = list(zip(self._read_only_buffers[2:], self._buffers[2:], strict=True))
        memory = tuple(read_only[header[first_index + i]] for i, (read_only, _) in enumerate(pairs))
        for i, (old, new) in enumerate(zip(memory, replaced(center, memory), strict=True)):
            if new is not old:
                active = int(header[first_index + i])
                pairs[i][1][1 - active][:] = new
                header[first_index + i] = 1 - active

    def _merge(
        self, rule: BlockRule, header: Array, local: Array, seen: Array, window: int, info: ExchangeInfo
    ) -> None:
        """Write the merge to the spare buffers; in the new header make the written buffers valid."""
        active = header[fields.ACTIVE : fields.ACTIVE + len(self._buffers)].tolist()
        pairs = list(zip(self._read_only_buffers, self._buffers, strict=True))
        del active[1], pairs[1]  # the moving statistics
        vectors = [read_only[active_index] for (read_only, _), active_index in zip(pairs, active, strict=True)]
        spares = [buffers[1 - active_index] for (_, buffers), active_index in zip(pairs, active, strict=True)]
        program = trace_rule(rule.rule, window, info, len(vectors) - 1) if rule.rule.elementwise else None
        with np.errstate(all="ignore"):
            if program is not None:
                program.run([local, seen, *vectors], spares, rule.blocks(self.count), self._scratch)
                changed = program.changed
            else:
                (center, *memory), (new_center, *new_memory) = vectors, spares
                messages = rule.messages(local, seen, window)
                changed = rule.merge(messages, info, center, memory, new_center, new_memory, (local, seen))
        for slot in (fields.ACTIVE, *(fields.ACTIVE + 2 + i for i in changed)):
            header[slot] = 1 - header[slot]

    def _average(self, header: Array, statistics: Array) -> None:
        """Moving statistics: c <- c + (statistics - c) / workers, statistics <- c."""
        if not self.statistics_size:
            return
        active = int(header[fields.ACTIVE + 1])
        old, new = self._buffers[1][active], self._buffers[1][1 - active]
        # With one worker ``old + (statistics - old)``, the formula below, may differ in the last bit.
        if self.workers == 1:
            new[:] = statistics
        else:
            np.subtract(statistics, old, out=new)
            new /= self.workers
            new += old
        statistics[:] = new
        header[fields.ACTIVE + 1] = 1 - active

    def read(self, out: Array, statistics: Array, *, adopt: bool = False) -> int:
        """Copy the center out. This works even if every worker was killed.

        A copy is valid if no merge was committed during the copy. After three invalid copies the read takes the lock.

        Args:
            out: receives the center.
            statistics: receives the averaged moving statistics.
            adopt: whether this rank trains on from this copy. Defaults to False: callbacks and validation read the
                center too, while the rank's own weights are older.

        Returns:
            int. The clock of what was copied.
        """
        self._check_vectors(out, statistics)
        # First without the lock, as a reader with the lock would delay every worker. The commit word is read before and
        # after the copy. The merge after the next commit overwrites the copied buffers. A busy center could do that
        # again and again, so the last attempt takes the lock.
        for _ in range(_OPTIMISTIC_READS):
            commit = self._words[fields.COMMIT]
            copied = self._copy_committed(commit, out, statistics)
            fence()
            if self._words[fields.COMMIT] == commit:
                break
        else:
            with self._lock.hold(self.timeout, "a read of the center"):
                copied = self._copy_committed(self._words[fields.COMMIT], out, statistics)
        if adopt:
            self._clock_seen, self._times_set = copied
        return copied[0]

    def _copy_committed(self, commit: int, out: Array, statistics: Array) -> tuple[int, int]:
        """Copy both vectors; return their clock, and the number of times that the center was set."""
        fence()  # the header must not be older than the commit word that selected it
        clock, times_set, center_index, statistics_index = self._headers[commit % 2][: fields.ACTIVE + 2].tolist()
        # Without the lock this header may be overwritten during the read. ``& 1`` keeps a torn index within the pair;
        # the caller then rejects the copy.
        out[:] = self._buffers[0][center_index & 1]
        statistics[:] = self._buffers[1][statistics_index & 1]
        return int(clock), int(times_set)

    def _check_vectors(self, vector: Array, statistics: Array) -> None:
        parts = ("a vector", vector, self._buffers[0]), ("statistics", statistics, self._buffers[1])
        for name, array, pair in parts:
            expected = pair[0]
            if array.shape != expected.shape or (expected.size and array.dtype != expected.dtype):
                raise InvalidInputError(
                    f"{self._name} gave {name} of shape {array.shape} and type {array.dtype}; "
                    f"the center's has {expected.shape} and {expected.dtype}."
                )

    def close(self) -> None:
        """Free this process's resources; the center exists as long as a process maps its segment."""
        if self._owned:
            self._segment.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
