"""A centre in shared memory that workers meet one at a time, each when it comes.

Every vector has two buffers. A merge, under a lock that its holder's death opens, writes the spare ones and a
spare header (which buffers count, the clock, who contributed how often); one aligned store of the commit word
makes them the centre. So a worker killed at any moment leaves a whole centre, in which its last contribution
counts once or not at all.

The meeting in its own time is that of DOWNPOUR (Dean et al. 2012, NIPS, section 4.1) and of asynchronous EASGD
(Zhang, Choromanska and LeCun 2015, NIPS, algorithm 1); what happens in it is the rule's.
"""

from __future__ import annotations

import time
from typing import Any, Self

import numpy as np

from choros.algorithms import ExchangeInfo
from choros.comm.dtypes import blocks, dtype_code, dtype_name, read_only
from choros.comm.group import Rule
from choros.comm.shm.futex import SPIN, fence
from choros.comm.shm.group_header import CENTRE, abort, open_stamped, stamp
from choros.comm.shm.robust_lock import RobustLock
from choros.comm.shm.segment import Segment
from choros.errors import InvalidInputError
from choros.param_server import layout as at
from choros.param_server.fused_update import follow
from choros.param_server.layout import Layout
from choros.types import Array

BLOCK = 1 << 15
_OPTIMISTIC = 3
_WRITES = 1.0  # seconds in which a worker has written what it leaves


class SharedMemoryParameterServer:
    """One worker's (or a controller's) hold on the centre; implements ``choros.comm.group.ParameterServer``.

    Args:
        segment_or_fd: Segment, or the int of an inherited descriptor, which this object then owns.
        rule: Rule. The algorithm; a controller, which only reads, needs none.
        rank: int. Who contributes; None for a controller.
        workers: int. How many contribute; None takes it from the segment.
        timeout: float. Seconds to wait for the lock.
        spin: float. Seconds to try before sleeping.

    Attributes:
        timeout: float. May be set between calls.
        place: int. Where this worker is; kept with what its next exchange commits (``choros.param_server.snapshot``).

    Raises:
        InvalidInputError: if the descriptor is not a centre's segment, or rank or workers do not fit it.

    Example:
        >>> class Downpour:
        ...     shows, elementwise = "after", True
        ...     def propose(self, local, seen, window): return local - seen
        ...     def merge(self, centre, message, meeting, memory): return centre + message, memory
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

    kind = "a centre in shared memory"

    def __init__(
        self,
        segment_or_fd: Segment | int,
        rule: Rule | None = None,
        rank: int | None = None,
        workers: int | None = None,
        timeout: float = 300.0,
        *,
        spin: float = SPIN,
    ) -> None:
        self._segment, self._owned = open_stamped(segment_or_fd, CENTRE)
        self._words = self._segment.words
        self.workers, self.count, self.others = self._words[at.WORKERS], self._words[at.COUNT], self._words[at.OTHERS]
        self.rank, self.timeout, self._rule = rank, timeout, rule
        self._who = "the controller" if rank is None else f"rank {rank}"
        try:
            self._check_place(rule, rank, workers)
        except InvalidInputError:
            self.close()
            raise
        self._map()
        number = -1 if rank is None else rank
        self._lock = RobustLock(self._segment, at.RELEASED, at.HELD, self._who, number, spin)
        self._last_seen = 0
        self._sent = self._header()[self._sent_at] if rank is not None else 0
        self._met, self.place = False, 0
        self._set = int(self._header()[at.SET])
        self._scratch: list[Array] = []
        if rank is not None:
            self._segment.touch(0, self._segment.nbytes)

    def _check_place(self, rule: Rule | None, rank: int | None, workers: int | None) -> None:
        if workers is not None and workers != self.workers:
            raise InvalidInputError(
                f"{self._who} expects {workers} workers; this centre was created for {self.workers}."
            )
        if rank is not None and not 0 <= rank < self.workers:
            raise InvalidInputError(f"Rank {rank} was given for a centre of {self.workers} workers.")
        if rule is None and rank is not None:
            raise InvalidInputError(
                f"{self._who} gave no rule: a worker needs the algorithm, a controller has no rank."
            )

    def _map(self) -> None:
        words, segment = self._words, self._segment
        kind = dtype_name((words[at.DTYPE], words[at.DTYPE + 1]))
        kind_others = dtype_name((words[at.DTYPE_OTHERS], words[at.DTYPE_OTHERS + 1]))
        vectors = [(kind, self.count), (kind_others, self.others), *[(kind, self.count)] * words[at.MEMORIES]]
        layout = Layout.of(self.workers, [np.dtype(k).itemsize * n for k, n in vectors])
        self._headers = [segment.array("int64", layout.header_words, begin) for begin in layout.headers]
        self._buffers = [
            (segment.array(k, n, pair[0]), segment.array(k, n, pair[1]))
            for (k, n), pair in zip(vectors, layout.areas, strict=True)
        ]
        self._fixed = [tuple(read_only(buffer) for buffer in pair) for pair in self._buffers]
        self._pending = segment.array("int64", self.workers * at.LEFT, layout.pending).reshape(self.workers, at.LEFT)
        self._messages = [
            (
                segment.array(kind, self.count, message),
                segment.array(kind_others, self.others, mean if self.others else 0),
            )
            for message, mean in layout.messages
        ]
        self._seen_at = at.ACTIVE + len(vectors) + (self.rank or 0)
        self._sent_at = self._seen_at + self.workers
        self._place_at = self._sent_at + self.workers
        self._blocks = blocks(self.count, BLOCK)

    abort = staticmethod(abort)

    @staticmethod
    def create(centre: Array, others: Array, memory: tuple[Array, ...], workers: int) -> Segment:
        """Make the segment of a centre.

        Args:
            centre: flat float array. Where the centre starts.
            others: flat float array. The averaged moving statistics; may be empty.
            memory: arrays of the centre's size. What the rule's ``start`` gave.
            workers: int. How many contribute.

        Returns:
            Segment. Two buffers for each vector, the first ones filled.

        Raises:
            InvalidInputError: for vectors that are not flat, not of floats, or whose sizes do not fit.
        """
        for name, vector in [("centre", centre), ("others", others), *[("memory", m) for m in memory]]:
            if vector.ndim != 1 or vector.dtype.kind != "f" or (name == "memory" and vector.size != centre.size):
                raise InvalidInputError(
                    f"A centre was given {name} of shape {vector.shape} and type {vector.dtype}: "
                    "give flat float vectors, memory as long as the centre."
                )
        if workers < 1:
            raise InvalidInputError(f"A centre of {workers} workers was asked for: give 1 or more.")
        vectors = [centre, others, *(m.astype(centre.dtype, copy=False) for m in memory)]
        layout = Layout.of(workers, [vector.nbytes for vector in vectors])
        segment = Segment.create(layout.total, "choros-centre")
        words = segment.words
        words[at.WORKERS], words[at.COUNT], words[at.OTHERS], words[at.MEMORIES] = (
            workers,
            len(centre),
            len(others),
            len(memory),
        )
        words[at.DTYPE], words[at.DTYPE + 1] = dtype_code(centre.dtype)
        words[at.DTYPE_OTHERS], words[at.DTYPE_OTHERS + 1] = dtype_code(others.dtype)
        for vector, (first, _) in zip(vectors, layout.areas, strict=True):
            segment.array(vector.dtype, vector.size, first)[:] = vector
        stamp(segment, CENTRE, at.RELEASED, 1, 1)
        return segment

    def _header(self) -> Array:
        return self._headers[self._words[at.COMMIT] % 2]

    @property
    def clock(self) -> int:
        """The number of merges of the center."""
        return int(self._header()[at.CLOCK])

    @property
    def times_set(self) -> int:
        """The number of times that a controller had set the center when this worker last took it."""
        return self._set

    def blank(self) -> tuple[Array, Array]:
        """Return memory of the centre's and the moving statistics' sizes, for ``read``."""
        return np.empty_like(self._buffers[0][0]), np.empty_like(self._buffers[1][0])

    @property
    def contributions(self) -> list[int]:
        """The number of merges of each rank's exchanges, as of the last commit."""
        first = self._sent_at - (self.rank or 0)
        return [int(count) for count in self._header()[first : first + self.workers]]

    def exchange(self, local: Array, seen: Array, window: int, others: Array) -> int:
        """Propose, merge and adopt under the lock, in one pass over blocks where the rule is elementwise.

        Where the centre was set since this worker last saw it, nothing is merged: what the worker learnt is void, and
        it takes the centre as it is. If the rule raises, the centre is as before; ``local`` and ``seen`` may be half
        updated.

        Args:
            local: this worker's vector; becomes what the rule's ``adopt`` returns.
            seen: the centre as it last saw it; becomes what it was shown, unless ``rule.uses_seen`` is False or the
                rule is seen not to look at it.
            window: int. The optimizer steps since the last exchange.
            others: its moving statistics; c <- c + (others - c) / workers, and others <- c.

        Returns:
            int. The staleness: merges by others since this worker last saw the centre.

        Raises:
            InvalidInputError: for vectors that do not fit, or on a controller.
            CommTimeoutError: if the lock stays held; names the holder.
            PeerLostError: if the run was given up.
        """
        if self._rule is None or self.rank is None:
            raise InvalidInputError(
                "A controller reads the centre; only a worker, which has a rule and a rank, exchanges."
            )
        self._fit(local, others)
        self._fit(seen, others)
        with self._lock.hold(self.timeout, "an exchange with the centre"):
            # All changes go into a copy of the header and into spare buffers. A worker that is killed before the commit
            # leaves the center as it was; the next holder of the lock writes the same spare buffers again.
            commit = self._words[at.COMMIT]
            header = self._headers[commit % 2].copy()
            if header[self._sent_at] != self._sent:
                return self._again(header, others)
            if header[at.SET] != self._set:
                self._last_seen, self._set = self._copy(commit, local, others)
                seen[:] = local
                header[self._place_at] = self.place
                self._commit(commit, header)
                return 0
            staleness = int(header[at.CLOCK]) - self._last_seen
            told = ExchangeInfo(workers=1, staleness=staleness, sender=self.rank)
            self._merge(self._rule, header, local, seen, window, told)
            self._average(header, others)
            header[at.CLOCK] += 1
            header[self._seen_at] = header[at.CLOCK]
            header[self._sent_at] += 1
            header[self._place_at] = self.place
            self._commit(commit, header)
        self._last_seen, self._sent, self._met = int(header[at.CLOCK]), self._sent + 1, True
        return staleness

    def leave(self, local: Array, seen: Array, window: int, others: Array) -> None:
        """Leave what an exchange now would bring, for ``trial``; nothing is merged, and the arguments stay as they are.

        It counts until this worker's next exchange. The arguments are those of ``exchange``.
        """
        if self._rule is None or self.rank is None:
            raise InvalidInputError(
                "A controller reads the centre; only a worker, which has a rule and a rank, leaves a message."
            )
        # A sequence lock: the count is odd while the message is written. Readers take no lock, so a worker that leaves
        # a message does not wait for one that makes a trial.
        head, (message, mean) = self._pending[self.rank], self._messages[self.rank]
        head[0] += 1 + head[0] % 2  # also where one was killed here
        fence()
        for part in self._blocks if self._rule.elementwise else [slice(0, self.count)]:
            message[part] = self._rule.propose(local[part], seen[part], window)
        mean[:] = others
        head[at.LEFT_SENT], head[at.LEFT_SET], head[at.LEFT_SEEN] = self._sent, self._set, self._last_seen
        fence()
        head[0] += 1

    def trial(self, out: Array, others: Array) -> None:
        """Copy out the centre as it would be with what all workers have left since their last exchange; none is kept.

        Args:
            out: receives the centre.
            others: receives the averaged moving statistics.

        Raises:
            InvalidInputError: for vectors that do not fit, or on a controller.
            CommTimeoutError: if the lock stays held; names the holder.
        """
        if self._rule is None:
            raise InvalidInputError("A controller reads the centre; only a worker, which has a rule, makes a trial.")
        self._fit(out, others)
        with self._lock.hold(self.timeout, "a copy of the centre"):
            header = self._header().copy()
            out[:] = self._buffers[0][int(header[at.ACTIVE])]
            others[:] = self._buffers[1][int(header[at.ACTIVE + 1])]
            left = [rank for rank in range(self.workers) if self._counts_still(header, rank)]
            rest = enumerate(self._buffers[2:] if left else [], at.ACTIVE + 2)
            memory = tuple(pair[int(header[i])].copy() for i, pair in rest)
        message, mean, clock = np.empty_like(out), np.empty_like(others), int(header[at.CLOCK])
        for rank in left:
            seen = self._copy_left(header, rank, message, mean)
            if seen is None:  # it has exchanged meanwhile
                continue
            told = ExchangeInfo(workers=1, staleness=clock - seen, sender=rank)
            with np.errstate(all="ignore"):
                for part in self._blocks if self._rule.elementwise else [slice(0, self.count)]:
                    was = tuple(vector[part] for vector in memory)
                    new, now = self._rule.merge(out[part], message[part], told, was)
                    for old, fresh in zip(was, now, strict=True):
                        if fresh is not old:
                            old[...] = fresh
                    out[part] = new
            others += (mean - others) / self.workers
            clock += 1

    def _counts_still(self, header: Array, rank: int) -> bool:
        """Tell whether what a worker left is not in the centre of this header, and would be taken."""
        turn, sent, times_set = self._pending[rank, :3].tolist()
        first = self._sent_at - (self.rank or 0)
        return bool(turn > 0 and sent == header[first + rank] and times_set == header[at.SET])

    def _copy_left(self, header: Array, rank: int, message: Array, mean: Array) -> int | None:
        """Copy what a worker left; returns the clock that it saw last, or None where that counts no more."""
        head, limit = self._pending[rank], time.monotonic() + _WRITES
        while self._counts_still(header, rank):
            turn, seen = int(head[0]), int(head[at.LEFT_SEEN])
            fence()  # the count is read before the values and after them: equal and even means no write in between
            message[:], mean[:] = self._messages[rank]
            fence()
            if turn % 2 == 0 and int(head[0]) == turn:
                return seen
            if time.monotonic() > limit:  # it was killed while it wrote
                break
            time.sleep(1e-4)
        return None

    def _again(self, header: Array, others: Array) -> int:
        """Answer an exchange of a rank that has made another number of them than it knows of."""
        raise InvalidInputError(f"{self._who}: another process exchanges under this rank; give each its own.")

    def _commit(self, commit: int, header: Array) -> None:
        """Make a new header, and the buffers that it names, the centre: by one store, which is never half done."""
        self._headers[(commit + 1) % 2][:] = header
        fence()  # buffers and header are in memory before the word that makes them the center
        self._words[at.COMMIT] = commit + 1

    def replace(self, centre: Array, others: Array, after: int | None = None) -> None:
        """Set the centre and the moving statistics, whole; neither a merge nor a contribution, the clock stays.

        Every worker's next exchange takes it as it is and merges nothing, so nothing of before is mixed into it.

        Args:
            centre: what the centre becomes.
            others: what the averaged moving statistics become.
            after: how often the centre had been set; where it has been since, this is done already. None is any.
        """
        self._fit(centre, others)
        with self._lock.hold(self.timeout, "setting the centre"):
            commit = self._words[at.COMMIT]
            header = self._headers[commit % 2].copy()
            if after not in (None, header[at.SET]):
                return
            for i, vector in enumerate((centre, others)):
                active = int(header[at.ACTIVE + i])
                self._buffers[i][1 - active][:] = vector
                header[at.ACTIVE + i] = 1 - active
            self._replace_memory(header, centre)
            header[at.SET] += 1
            self._commit(commit, header)

    def _replace_memory(self, header: Array, centre: Array) -> None:
        """Write the memory that goes with a centre which was set, where the rule has another one for it."""
        replaced = getattr(self._rule, "replaced", None)
        if replaced is None:
            return
        first = at.ACTIVE + 2
        pairs = list(zip(self._fixed[2:], self._buffers[2:], strict=True))
        kept = tuple(fixed[header[first + i]] for i, (fixed, _) in enumerate(pairs))
        for i, (old, new) in enumerate(zip(kept, replaced(centre, kept), strict=True)):
            if new is not old:
                active = int(header[first + i])
                pairs[i][1][1 - active][:] = new
                header[first + i] = 1 - active

    def _merge(self, rule: Rule, header: Array, local: Array, seen: Array, window: int, told: Any) -> None:
        """Write the spare buffers and flip, in the header to be, those that were written."""
        active = header[at.ACTIVE : at.ACTIVE + len(self._buffers)].tolist()
        del active[1], (pairs := list(zip(self._fixed, self._buffers, strict=True)))[1]  # the moving statistics
        vectors = [fixed[a] for (fixed, _), a in zip(pairs, active, strict=True)]
        spares = [buffers[1 - a] for (_, buffers), a in zip(pairs, active, strict=True)]
        program = follow(rule, window, told, len(vectors) - 1) if rule.elementwise else None
        with np.errstate(all="ignore"):
            if program is not None:
                program.run([local, seen, *vectors], spares, self._blocks, self._scratch)
                changed = program.changed
            else:
                changed = self._call(rule, local, seen, vectors, spares, window, told)
        for slot in (at.ACTIVE, *(at.ACTIVE + 2 + i for i in changed)):
            header[slot] = 1 - header[slot]

    def _call(
        self, rule: Rule, local: Array, seen: Array, vectors: list[Array], spares: list[Array], window: int, told: Any
    ) -> list[int]:
        """Call the rule itself, block by block or on whole vectors; returns which memory was written."""
        (centre, *kept), (spare, *room) = vectors, spares
        changed: list[int] = []
        before, keep_seen = rule.shows == "before", getattr(rule, "uses_seen", True)
        for part in self._blocks if rule.elementwise else [slice(0, self.count)]:
            mine, old = local[part], centre[part]
            message = rule.propose(mine, seen[part], window)
            was = tuple(vector[part] for vector in kept)
            new, now = rule.merge(old, message, told, was)
            if len(now) != len(was):
                raise InvalidInputError(
                    f"{self._who}: merge returned {len(now)} memory vectors and was given {len(was)}."
                )
            spare[part] = new
            for i, vector in enumerate(now):
                if vector is not was[i] and i not in changed:
                    room[i][: part.start] = kept[i][: part.start]
                    changed.append(i)
                if i in changed:
                    room[i][part] = vector
            shown = old if before else new
            local[part] = rule.adopt(mine, shown)
            if keep_seen:
                seen[part] = shown
        return changed

    def _average(self, header: Array, others: Array) -> None:
        """Moving statistics: c <- c + (others - c) / workers, others <- c."""
        if not self.others:
            return
        active = int(header[at.ACTIVE + 1])
        old, new = self._buffers[1][active], self._buffers[1][1 - active]
        if self.workers == 1:
            new[:] = others
        else:
            np.subtract(others, old, out=new)
            new /= self.workers
            new += old
        others[:] = new
        header[at.ACTIVE + 1] = 1 - active

    def read(self, out: Array, others: Array) -> int:
        """Copy the centre out, whole; works also when every worker was killed.

        A copy counts if no second merge began meanwhile; after three that do not, the lock is taken. A worker's
        read before its first exchange is the centre that it has seen, from which its staleness counts.

        Args:
            out: receives the centre.
            others: receives the averaged moving statistics.

        Returns:
            int. The clock of what was copied.
        """
        self._fit(out, others)
        # Without the lock first: a reader would delay every worker. The commit word is read before and after the copy.
        # The merge after the next commit overwrites the copied buffers; a busy center could do so again and again, so
        # the last attempt takes the lock.
        for _ in range(_OPTIMISTIC):
            commit = self._words[at.COMMIT]
            copied = self._copy(commit, out, others)
            fence()
            if self._words[at.COMMIT] == commit:
                return self._saw(*copied)
        with self._lock.hold(self.timeout, "a read of the centre"):
            return self._saw(*self._copy(self._words[at.COMMIT], out, others))

    def _copy(self, commit: int, out: Array, others: Array) -> tuple[int, int]:
        """Copy both vectors; returns their clock, and how often the centre had been set."""
        fence()
        clock, times_set, first, second = self._headers[commit % 2][: at.ACTIVE + 2].tolist()
        out[:] = self._buffers[0][first & 1]
        others[:] = self._buffers[1][second & 1]
        return int(clock), int(times_set)

    def _saw(self, clock: int, times_set: int) -> int:
        if not self._met:
            self._last_seen, self._set = clock, times_set
        return clock

    def _fit(self, vector: Array, others: Array) -> None:
        for name, given, pair in (("vector", vector, self._buffers[0]), ("others", others, self._buffers[1])):
            want = pair[0]
            if given.shape != want.shape or (want.size and given.dtype != want.dtype):
                raise InvalidInputError(
                    f"{self._who} gave a {name} of shape {given.shape} and type {given.dtype}; "
                    f"the centre's has {want.shape} and {want.dtype}."
                )

    def close(self) -> None:
        """Free what this process holds; the centre lives on while anyone maps it."""
        if self._owned:
            self._segment.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
