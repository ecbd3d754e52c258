"""Header of a shared segment: its kind, the abort flag, and for a group the barrier and the liveness of each rank.

The header consists of 64-bit words. Words 0 to 127 exist in every segment. In a group, a record of 16 words (two cache
lines) for each rank starts at word 128. The status texts (``RankStatus``) follow the records.

A live rank holds a POSIX record lock on one byte of the segment's file (fcntl(2)). The kernel releases the lock when
the process ends, however it ends, and every process can query it. So a liveness test needs no message from the peer.
"""

from __future__ import annotations

import fcntl
import logging
import math
import os
import struct
import sys
import time
from collections.abc import Callable
from typing import Final

from choros.comm.group import Trace
from choros.comm.shm.futex import POLL_SECONDS, SPIN, Waiter, fence
from choros.comm.shm.rank_status import STATUS_BYTES, RankStatus, state_of
from choros.comm.shm.segment import Segment
from choros.errors import CommTimeoutError, InvalidInputError, PeerLostError

logger = logging.getLogger(__name__)

MAGIC: Final = 0x43484F524F5331
GROUP: Final = 1
PARAM_SERVER: Final = 2
KINDS: Final = {GROUP: "a SharedGroup's", PARAM_SERVER: "a parameter server's"}
_MAGIC, _KIND, _ABORT, _REASON, _WAKE_FIRST, _WAKE_STEP, _WAKE_COUNT = range(7)
FIRST_FREE_WORD: Final = 16
_REASON_TEXT: Final = 64
RECORDS: Final = 128
# Two cache lines for each rank: a rank writes only its own lines, so a store does not take the line of a word on which
# another rank polls.
RECORD_WORDS: Final = 16
ARRIVED, PID, STATE = 0, 1, 2
POSTED: Final = 4
STATUS: Final = 12
JOINED, LEFT = 1, 2
# Seconds to look for a dead rank after a library reported a failure without naming a rank: its end may show only after
# the library's error.
FAILURE_GRACE: Final = 2.0
_MAX_SLEEP: Final = 5e-4  # seconds between two polls of a library: short beside a large sum, long beside a poll
_MAX_DESCRIBED: Final = 8  # missing ranks whose activity a message describes; of the others it gives the number
# struct flock of the C library
_FLOCK: Final = "hhqqi4x" if sys.platform == "linux" else "qqihh"


def head_bytes(size: int) -> int:
    """Return the bytes of the header of a group's segment, for ``size`` ranks."""
    return 8 * (RECORDS + size * RECORD_WORDS) + size * STATUS_BYTES


def stamp(segment: Segment, kind: int, wake_first: int, wake_step: int, wake_count: int) -> None:
    """Write the common header of a segment: its kind, and the words on which its users may sleep.

    Args:
        segment: Segment. New; its header is zero.
        kind: int. ``GROUP`` or ``PARAM_SERVER``.
        wake_first: int. Index of the first word that ``abort`` wakes.
        wake_step: int. Distance between these words.
        wake_count: int. Number of these words.
    """
    header = segment.words
    # The segment is new, so its magic number is 0 until the last store below.
    header[_KIND] = kind
    header[_WAKE_FIRST], header[_WAKE_STEP], header[_WAKE_COUNT] = wake_first, wake_step, wake_count
    header[_MAGIC] = MAGIC  # last: a reader that sees the magic number also sees the words above


def open_stamped(segment_or_fd: Segment | int, kind: int) -> tuple[Segment, bool]:
    """Check the header of a segment; return the segment and whether the caller owns it.

    Raises:
        InvalidInputError: the descriptor does not lead to a segment of this kind.
    """
    owned = isinstance(segment_or_fd, int)
    segment = Segment.attach(segment_or_fd) if isinstance(segment_or_fd, int) else segment_or_fd
    header = segment.words
    if header[_MAGIC] == MAGIC and header[_KIND] == kind:
        return segment, owned
    actual = KINDS.get(header[_KIND], "an unknown") if header[_MAGIC] == MAGIC else "no"
    fd = segment.fd
    # The error is raised with the traceback of this frame. A memoryview in it would keep the mapping alive.
    del header
    if owned:
        segment.close()
    raise InvalidInputError(f"Descriptor {fd} holds {actual} segment, and {KINDS[kind]} was expected.")


def abort(segment: Segment, reason: str) -> None:
    """Abort the run: every rank that waits in this segment, now or later, raises ``PeerLostError`` with the reason.

    A controller that maps the segment without a rank may call this. The first reason stays.

    Args:
        segment: Segment. Of a group or a parameter server.
        reason: str. Reason for the waiting ranks.

    Example:
        >>> from choros.comm.shm.group import SharedGroup
        >>> with SharedGroup.create(2, 64) as segment:
        ...     abort(segment, "rank 1 raised ValueError")
        ...     abort_reason(segment.words)
        'rank 1 raised ValueError'
    """
    header = segment.words
    if header[_MAGIC] != MAGIC:
        raise InvalidInputError(
            f"Descriptor {segment.fd} holds no segment of a group or a parameter server: there is nothing to abort."
        )
    if not header[_ABORT]:
        # Two processes may write a reason at once and mix their texts. The abort flag is correct in either case.
        capacity = 8 * (RECORDS - _REASON_TEXT)
        # The text is written before the flag: a rank that sees the flag reads the text at once.
        text = reason.encode()[:capacity]
        segment.array("uint8", len(text), 8 * _REASON_TEXT)[:] = list(text)
        header[_REASON] = len(text)
        Waiter(header, segment.address).publish(_ABORT, 1)
    # Ranks sleep on words that this call does not change. A rank that wakes checks the abort word before it sleeps
    # again. A rank that misses this wake-up checks the abort word after POLL_SECONDS.
    waiter = Waiter(header, segment.address)
    for index in range(header[_WAKE_COUNT]):
        waiter.wake(header[_WAKE_FIRST] + index * header[_WAKE_STEP])


def abort_reason(words: memoryview) -> str | None:
    """Return the reason of the abort, or None if the run was not aborted."""
    if not words[_ABORT]:
        return None
    fence()  # the text must be read after the flag that publishes it
    return bytes(words.cast("B")[8 * _REASON_TEXT : 8 * _REASON_TEXT + words[_REASON]]).decode(errors="replace")


def has_joined(segment: Segment, rank: int) -> bool:
    """Return whether a rank has ever joined its group; a controller that maps the segment may call this.

    Args:
        segment: Segment. A group's.
        rank: int. The rank.

    Example:
        >>> from choros.comm.shm.group import SharedGroup
        >>> with SharedGroup.create(2, 64) as segment, SharedGroup(segment, 0):
        ...     has_joined(segment, 0), has_joined(segment, 1)
        (True, False)
    """
    # STATE never returns to 0, so a rank that joined and died still counts as joined.
    return bool(segment.words[RECORDS + rank * RECORD_WORDS + STATE])


def last_at_barriers(segment: Segment, ranks: int) -> int | None:
    """Return the rank for which the others wait at a barrier, or None; for a controller without a rank.

    Args:
        segment: Segment. A group's.
        ranks: int. Number of ranks.

    Example:
        >>> from choros.comm.shm.group import SharedGroup
        >>> with SharedGroup.create(2, 64) as segment:
        ...     last_at_barriers(segment, 2) is None
        True
    """
    # The counters are read one after another while ranks pass barriers. So the answer is a hint for a person or a time
    # limit, and no proof that this rank hangs.
    arrived = [segment.words[RECORDS + rank * RECORD_WORDS + ARRIVED] for rank in range(ranks)]
    return arrived.index(min(arrived)) if min(arrived) < max(arrived) else None


def holder(fd: int, byte: int) -> int:
    """Return the process that holds the record lock on a byte, or 0 where no other process does."""
    if sys.platform == "linux":
        # F_GETLK returns only locks that would conflict with the caller's. A lock of the calling process never does, so
        # callers test their own process ID first.
        query = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
        lock_type, _, _, _, pid = struct.unpack(_FLOCK, fcntl.fcntl(fd, fcntl.F_GETLK, query))
    else:
        query = struct.pack(_FLOCK, byte, 1, 0, fcntl.F_WRLCK, os.SEEK_SET)
        _, _, pid, lock_type, _ = struct.unpack(_FLOCK, fcntl.fcntl(fd, fcntl.F_GETLK, query))
    return 0 if lock_type == fcntl.F_UNLCK else int(pid)


def format_ranks(ranks: list[int] | tuple[int, ...]) -> str:
    """Return ``"rank 2"`` or ``"ranks 1, 2"``."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


class GroupHeader:
    """One rank's view of a group's header: join, barriers, liveness checks, leave.

    Args:
        segment: Segment. Stamped as a group's.
        rank: int. This rank; the byte of that number is locked until ``leave``.
        size: int. Number of ranks.
        timeout: float. Seconds that one wait may last.
        spin: float. Seconds to poll before sleeping.

    Attributes:
        status: RankStatus. Activities of all ranks.
        warn_after: float. Seconds after which a wait is reported on stderr, once; infinite by default.
        trace: Trace or None. Receives each wait.
        broken: str. Error after which the group cannot be used; "" before.

    Raises:
        InvalidInputError: the rank was taken before.
    """

    def __init__(self, segment: Segment, rank: int, size: int, timeout: float, spin: float = SPIN) -> None:
        self.rank, self.size, self.timeout = rank, size, timeout
        self.words = segment.words
        self.waiter = Waiter(self.words, segment.address, spin)
        self.where = f"rank {rank} on {os.uname().nodename}"
        # Each process counts its own barriers. The counters agree because every rank makes the same calls in the same
        # order.
        self.barrier_count = 0
        self.warn_after, self._warned = math.inf, 0
        self.trace: Trace | None = None
        self.broken = ""
        self._segment, self._fd = segment, segment.fd
        self._others = [other for other in range(size) if other != rank]
        self._own_record = self._record(rank)
        status_records = [self._record(other) + STATUS for other in range(size)]
        self.status = RankStatus(self.words, status_records, 8 * self._record(size), rank)
        # Not only the lock below: a rank that died has left no lock, and a second process under its number would start
        # its barrier count at 0 while the others are further.
        if self.words[self._own_record + STATE]:
            raise InvalidInputError(
                f"Rank {rank} of this group was already taken by process {self.words[self._own_record + PID]}: "
                "each rank joins once; create a new group for a new run."
            )
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
        except OSError:
            raise InvalidInputError(
                f"Rank {rank} of this group is held by process {holder(self._fd, rank)}: "
                "give each process its own rank."
            ) from None
        # The lock first, then the process ID, then STATE: a peer that reads JOINED must find the lock held and the ID
        # valid, or it would report a rank as dead that is just starting.
        self.words[self._own_record + PID] = os.getpid()
        self.words[self._own_record + STATE] = JOINED

    def pids(self) -> list[int]:
        """Return the process ID of each rank; valid after the first barrier."""
        return [self.words[self._record(rank) + PID] for rank in range(self.size)]

    def _record(self, rank: int) -> int:
        return RECORDS + rank * RECORD_WORDS

    def post(self, call: tuple[int, int, int, int]) -> None:
        """Write the signature of this rank's next call; the other ranks read it after the next barrier."""
        # Two places in turn: a fast rank posts its next call while a slow rank still reads the last one. The fast rank
        # cannot be two calls ahead, as the barrier between two calls needs the slow rank.
        offset = self._own_record + POSTED + 4 * (self.barrier_count % 2)
        words = self.words
        words[offset], words[offset + 1], words[offset + 2], words[offset + 3] = call

    def posted(self, rank: int) -> tuple[int, int, int, int]:
        """Return the signature that a rank posted before the last barrier."""
        offset = self._record(rank) + POSTED + 4 * ((self.barrier_count - 1) % 2)
        words = self.words
        return words[offset], words[offset + 1], words[offset + 2], words[offset + 3]

    def barrier(self, describe_call: Callable[[], str]) -> None:
        """Return when every rank has called this.

        Args:
            describe_call: returns the call's name; called only to build an error message.

        Raises:
            PeerLostError: an awaited rank died or left, or the run was aborted.
            CommTimeoutError: the time limit passed; the message names the missing ranks.
        """
        if self.broken:
            raise PeerLostError(
                f"{self.where}: this group failed before, so {self._activity(describe_call)} cannot start: "
                f"{self.broken}"
            )
        # Each rank increments its own counter and no other. A counter never decreases. So no rank resets a barrier, and
        # a late rank finds the counters of the others at or above its target.
        self.barrier_count += 1
        target = self.barrier_count
        begin = 0 if self.trace is None else time.monotonic_ns()
        # The fence in ``publish`` orders this rank's slot and posted call before its arrival.
        self.waiter.publish(self._own_record + ARRIVED, target)
        try:
            # The order of the waits does not matter: the barrier ends when the last rank arrives, and the check covers
            # all missing ranks, not only this one.
            for other in self._others:
                arrived = self._record(other) + ARRIVED
                if self.words[arrived] < target:
                    self.waiter.wait(
                        arrived, target, self.timeout, lambda waited: self._check_peers(waited, target, describe_call)
                    )
            fence()  # also if no wait was needed: loads from here on must return what the others wrote before
        except BaseException as error:
            # This rank's counter is already at the target. A later call would pass the wrong barrier.
            self.broken = f"{type(error).__name__}: {error}"
            raise
        finally:
            if begin and self.trace is not None:
                self.trace(("wait", "wait", begin, time.monotonic_ns(), -1))

    def _activity(self, describe_call: Callable[[], str]) -> str:
        """Return the activity that the caller set, else the name of the call."""
        return self.status.doing or describe_call()

    def _check_peers(self, waited: float, target: int, describe_call: Callable[[], str]) -> None:
        words = self.words
        # Abort before death: the reason names the first cause, while a rank that the abort ended would be reported as
        # dead.
        if (reason := abort_reason(words)) is not None:
            raise PeerLostError(
                f"{self.where}: the run was aborted while it waited at {self._activity(describe_call)}: {reason}"
            )
        missing = [other for other in self._others if words[self._record(other) + ARRIVED] < target]
        if waited >= 0.9 * POLL_SECONDS:  # the liveness query is a system call for each rank: not in the first check
            for other in missing:
                self._check_alive(other, target, describe_call)
        if missing and waited >= self.timeout:
            raise CommTimeoutError(
                f"{self.where} waited {waited:.1f} s at {self._activity(describe_call)} for "
                f"{self._describe_missing(missing)} of {self.size}. "
                f"{self._last_activities(missing)}Look at those processes, or set a longer timeout.",
                tuple(missing),
            )
        if missing and waited >= self.warn_after and self._warned != target:
            self._warned = target
            logger.warning(
                f"{self.where} has waited {waited:.1f} s at {self._activity(describe_call)} for "
                f"{self._describe_missing(missing)} of {self.size}. {self._last_activities(missing)}It waits for up "
                f"to {self.timeout:g} s in all."
            )

    def _describe_missing(self, missing: list[int]) -> str:
        unjoined = [rank for rank in missing if not self.words[self._record(rank) + STATE]]
        joined = [rank for rank in missing if rank not in unjoined]
        parts = [f"{format_ranks(joined)} (alive, but busy or stopped)"] if joined else []
        parts += [f"{format_ranks(unjoined)} (never joined)"] if unjoined else []
        return " and ".join(parts)

    def _last_activities(self, missing: list[int]) -> str:
        """Return the last activities of missing ranks; nothing if none has set any."""
        if not self.status.doing:
            return ""
        joined = [rank for rank in missing if self.words[self._record(rank) + STATE]]
        pids = [self.words[self._record(rank) + PID] for rank in joined]
        activities = [
            f"rank {rank} (process {pid}, {state_of(pid)}): {self.status.describe(rank)}"
            for rank, pid in zip(joined[:_MAX_DESCRIBED], pids, strict=False)
        ]
        activities += [f"and {len(joined) - _MAX_DESCRIBED} more"] if len(joined) > _MAX_DESCRIBED else []
        return f"{'; '.join(activities)}. ".replace("rank", "Rank", 1) if activities else ""

    def _check_alive(self, other: int, target: int, describe_call: Callable[[], str]) -> None:
        record = self._record(other)
        state, pid = self.words[record + STATE], self.words[record + PID]
        # A thread of this process may be the awaited rank (tests do this); the kernel reports no lock of the caller's
        # process.
        if state == JOINED and (pid == os.getpid() or holder(self._fd, other)):
            return
        # The rank may have reached this barrier and ended after ``missing`` was read. Then this barrier is complete;
        # the next one reports the rank.
        if not state or self.words[record + ARRIVED] >= target:
            return
        # STATE is read again: a rank stores LEFT before it unlocks, so an unlocked rank without LEFT has died.
        event = "left" if self.words[record + STATE] == LEFT else "died"
        raise PeerLostError(
            f"{self.where}: rank {other} (process {pid}) {event} while it was awaited at "
            f"{self._activity(describe_call)}. This group cannot be used any more; see the last output of rank {other}."
        )

    def wait_until_ready(self, ready: Callable[[], bool], describe_call: Callable[[], str]) -> None:
        """Return when ``ready`` is true on every rank; check meanwhile whether the ranks live.

        Args:
            ready: polled with short sleeps; raises ``PeerLostError`` if it cannot become true.
            describe_call: returns the call's name; called only to build an error message.

        Raises:
            PeerLostError, CommTimeoutError: as ``barrier``.
        """
        target, started, last_check = self.barrier_count + 1, time.perf_counter(), 0.0
        try:
            while not self._poll(ready, target, describe_call):
                waited = time.perf_counter() - started
                # The library has no wake-up for another process, so this polls. The sleep grows with the wait and
                # delays the end by at most an eighth.
                time.sleep(min(max(waited / 8, 2e-5), _MAX_SLEEP))
                if waited - last_check >= POLL_SECONDS:
                    last_check = waited
                    self._check_peers(waited, target, describe_call)
                    if waited >= self.timeout:
                        raise CommTimeoutError(
                            f"{self.where}: {self._activity(describe_call)} did not end within {waited:.1f} s.", ()
                        )
        except BaseException as error:
            self.broken = f"{type(error).__name__}: {error}"
            raise
        # ``ready`` speaks for this rank only. The result may be used, and the buffers written again, when all ranks are
        # ready.
        self.barrier(describe_call)

    def _poll(self, ready: Callable[[], bool], target: int, describe_call: Callable[[], str]) -> bool:
        """Call ``ready``; if it fails because a rank died, raise an error that names the rank."""
        try:
            return ready()
        except PeerLostError:
            # The library's error names no rank. Look for one that died, and report that one as the cause.
            started = time.perf_counter()
            while time.perf_counter() - started < FAILURE_GRACE:
                # With POLL_SECONDS as the time waited, this check queries the record locks.
                self._check_peers(POLL_SECONDS, target, describe_call)
                time.sleep(_MAX_SLEEP)
            raise

    def leave_after_peers(self, limit: float) -> None:
        """Leave, then wait until all other ranks have left or died, for at most ``limit`` seconds."""
        if self._segment.closed:
            return
        # Leave first: two ranks that waited for each other before they left would both wait until the limit.
        self.leave()
        started, words = time.perf_counter(), self.words
        limit = min(limit, FAILURE_GRACE) if self.broken else limit
        # STATE alone is not enough: a rank that was killed stays JOINED. The record lock shows that it still lives.
        while any(words[self._record(rank) + STATE] == JOINED and holder(self._fd, rank) for rank in self._others):
            if time.perf_counter() - started >= limit:
                return
            time.sleep(0.02)

    def check_aborted(self, describe_call: Callable[[], str]) -> None:
        """Raise ``PeerLostError`` if the run was aborted."""
        if self.words[_ABORT]:
            raise PeerLostError(
                f"{self.where}: the run was aborted before {self._activity(describe_call)}: {abort_reason(self.words)}"
            )

    def leave(self) -> None:
        """Mark this rank as left and release its record lock. In a forked child that inherited this, do nothing."""
        # A forked child has this object too, but record locks are not inherited. Its LEFT would make the others report
        # a rank that still runs.
        if self.words[self._own_record + PID] == os.getpid() and self.words[self._own_record + STATE] == JOINED:
            # Before the unlock: a rank without a record lock that has not left counts as dead.
            self.words[self._own_record + STATE] = LEFT
            if not self._segment.closed:
                fcntl.lockf(self._fd, fcntl.LOCK_UN, 1, self.rank)
            # Ranks sleep on this word. Without the wake-up they would notice the departure only after POLL_SECONDS.
            self.waiter.wake(self._own_record + ARRIVED)
