"""The head of a segment: what it is, whether the run was given up, who has come, who lives.

Words of 64 bits. 0 to 127: what every segment has. From 128 on, one line of 16 words for each rank of a group, and
then a text for each (``telling``).
A rank shows that it lives by a POSIX record lock on one byte of the segment's file (fcntl(2)): the kernel
frees it when the process ends, however it ends, and anyone may ask whether it is held.
"""

from __future__ import annotations

import fcntl
import math
import os
import struct
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from choros.comm.group import Trace
from choros.comm.shm.futex import SLICE, SPIN, Waiter, fence
from choros.comm.shm.rank_status import TEXT, RankStatus, state_of
from choros.comm.shm.segment import Segment
from choros.errors import CommTimeoutError, InvalidInputError, PeerLostError

MAGIC: Final = 0x43484F524F5331
GROUP: Final = 1
CENTRE: Final = 2
KINDS: Final = {GROUP: "a SharedGroup's", CENTRE: "a parameter server's"}
_MAGIC, _KIND, _ABORT, _REASON, _WAKE_FIRST, _WAKE_STEP, _WAKE_COUNT = range(7)
FREE: Final = 16
_TEXT: Final = 64
LINES: Final = 128
LINE_WORDS: Final = 16
ARRIVED, PID, STATE = 0, 1, 2
POSTED: Final = 4
TOLD: Final = 12
JOINED, LEFT = 1, 2
GRACE: Final = 2.0  # seconds in which to find out who has gone, where a library only says that something failed
_NAP: Final = 5e-4  # seconds: the longest sleep between two looks at what a library does
_MOST: Final = 8  # missing ranks of which a message tells more than the number
_FLOCK: Final = "hhqqi4x" if sys.platform == "linux" else "qqihh"


def head_bytes(size: int) -> int:
    """Return the bytes of the head of a group's segment."""
    return 8 * (LINES + size * LINE_WORDS) + size * TEXT


def stamp(segment: Segment, kind: int, wake_first: int, wake_step: int, wake_count: int) -> None:
    """Write what every segment's head says: its kind, and the words on which its users may sleep."""
    words = segment.words
    words[_KIND] = kind
    words[_WAKE_FIRST], words[_WAKE_STEP], words[_WAKE_COUNT] = wake_first, wake_step, wake_count
    words[_MAGIC] = MAGIC  # last: a reader that sees it sees the words above, too


def open_stamped(segment_or_fd: Segment | int, kind: int) -> tuple[Segment, bool]:
    """Return the segment and whether the caller owns it, after a look at its head.

    Raises:
        InvalidInputError: if the descriptor leads to something else.
    """
    owned = isinstance(segment_or_fd, int)
    segment = Segment.attach(segment_or_fd) if isinstance(segment_or_fd, int) else segment_or_fd
    words = segment.words
    if words[_MAGIC] == MAGIC and words[_KIND] == kind:
        return segment, owned
    found = KINDS.get(words[_KIND], "an unknown") if words[_MAGIC] == MAGIC else "no"
    number = segment.fd
    del words
    if owned:
        segment.close()
    raise InvalidInputError(f"Descriptor {number} holds {found} segment, and {KINDS[kind]} was expected.")


def abort(segment: Segment, reason: str) -> None:
    """End the run: every rank that waits in this segment, now or later, raises ``PeerLostError`` with the reason.

    A controller that maps the segment without a rank may call it. The first reason stays.

    Args:
        segment: Segment. A group's or a centre's.
        reason: str. What the waiting ranks are told.

    Example:
        >>> from choros.comm.shm.group import SharedGroup
        >>> with SharedGroup.create(2, 64) as segment:
        ...     abort(segment, "rank 1 raised ValueError")
        ...     given_up(segment.words)
        'rank 1 raised ValueError'
    """
    words = segment.words
    if words[_MAGIC] != MAGIC:
        raise InvalidInputError(f"Descriptor {segment.fd} holds no segment of a group or a centre: nothing to give up.")
    if not words[_ABORT]:
        # Two processes may write a reason at once and mix their texts. The run ends all the same.
        room = 8 * (LINES - _TEXT)
        text = reason.encode()[:room]
        segment.array("uint8", len(text), 8 * _TEXT)[:] = list(text)
        words[_REASON] = len(text)
        Waiter(words, segment.address).publish(_ABORT, 1)
    # Ranks sleep on words of their own, which this call does not change. They look at the abort word when they wake.
    waiter = Waiter(words, segment.address)
    for k in range(words[_WAKE_COUNT]):
        waiter.wake(words[_WAKE_FIRST] + k * words[_WAKE_STEP])


def given_up(words: memoryview) -> str | None:
    """Return the reason for which the run was given up, or None."""
    if not words[_ABORT]:
        return None
    return bytes(words.cast("B")[8 * _TEXT : 8 * _TEXT + words[_REASON]]).decode(errors="replace")


def joined(segment: Segment, rank: int) -> bool:
    """Return whether a rank has ever joined its group; a controller that maps the segment may call this.

    Args:
        segment: Segment. A group's.
        rank: int. Who.

    Example:
        >>> from choros.comm.shm.group import SharedGroup
        >>> with SharedGroup.create(2, 64) as segment, SharedGroup(segment, 0):
        ...     joined(segment, 0), joined(segment, 1)
        (True, False)
    """
    return bool(segment.words[LINES + rank * LINE_WORDS + STATE])


def last_at_barriers(segment: Segment, ranks: int) -> int | None:
    """Return the rank for which the others wait at a barrier, or None; for a controller without a rank.

    Args:
        segment: Segment. A group's.
        ranks: int. How many there are.

    Example:
        >>> from choros.comm.shm.group import SharedGroup
        >>> with SharedGroup.create(2, 64) as segment:
        ...     last_at_barriers(segment, 2) is None
        True
    """
    arrived = [segment.words[LINES + rank * LINE_WORDS + ARRIVED] for rank in range(ranks)]
    return arrived.index(min(arrived)) if min(arrived) < max(arrived) else None


def holder(fd: int, byte: int) -> int:
    """Return the process that holds the record lock on a byte, or 0 where no other process does."""
    if sys.platform == "linux":
        asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
        kind, _, _, _, pid = struct.unpack(_FLOCK, fcntl.fcntl(fd, fcntl.F_GETLK, asked))
    else:
        asked = struct.pack(_FLOCK, byte, 1, 0, fcntl.F_WRLCK, os.SEEK_SET)
        _, _, pid, kind, _ = struct.unpack(_FLOCK, fcntl.fcntl(fd, fcntl.F_GETLK, asked))
    return 0 if kind == fcntl.F_UNLCK else int(pid)


def names(ranks: list[int] | tuple[int, ...]) -> str:
    """Return ``"rank 2"`` or ``"ranks 1, 2"``."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


class GroupHeader:
    """One rank's hold on a group's head: it joins, meets the others at barriers, and leaves.

    Args:
        segment: Segment. Stamped as a group's.
        rank: int. Who this is; the byte of that number is locked until ``leave``.
        size: int. How many ranks there are.
        timeout: float. Seconds that a wait may last.
        spin: float. Seconds to look before sleeping.

    Attributes:
        telling: RankStatus. What this rank and the others are about.
        warn_after: float. Seconds after which a wait is told on stderr, once; never by default.
        trace: Trace. Is told of each wait; None by default.
        broken: str. Why nothing works here any more; "" while it does.

    Raises:
        InvalidInputError: if the rank was taken before.
    """

    def __init__(self, segment: Segment, rank: int, size: int, timeout: float, spin: float = SPIN) -> None:
        self.rank, self.size, self.timeout = rank, size, timeout
        self.words = segment.words
        self.waiter = Waiter(self.words, segment.address, spin)
        self.where = f"rank {rank} on {os.uname().nodename}"
        self.meetings = 0
        self.warn_after, self._warned = math.inf, 0
        self.trace: Trace | None = None
        self.broken = ""
        self._segment, self._fd = segment, segment.fd
        self._others = [other for other in range(size) if other != rank]
        self._mine = self._line(rank)
        lines = [self._line(each) + TOLD for each in range(size)]
        self.telling = RankStatus(self.words, lines, 8 * self._line(size), rank)
        if self.words[self._mine + STATE]:
            raise InvalidInputError(
                f"Rank {rank} of this group was already taken by process {self.words[self._mine + PID]}: "
                "each rank joins once; create a new group for a new run."
            )
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
        except OSError:
            raise InvalidInputError(
                f"Rank {rank} of this group is held by process {holder(self._fd, rank)}: "
                "give each process its own rank."
            ) from None
        self.words[self._mine + PID] = os.getpid()
        self.words[self._mine + STATE] = JOINED

    def pids(self) -> list[int]:
        """Return the process of each rank, once all have joined."""
        return [self.words[self._line(rank) + PID] for rank in range(self.size)]

    def _line(self, rank: int) -> int:
        return LINES + rank * LINE_WORDS

    def post(self, what: tuple[int, int, int, int]) -> None:
        """Write what this rank is about to do; the others read it after the next barrier."""
        # Two places in turn: a fast rank posts its next call while a slow one still reads the last one. It cannot be
        # two calls ahead, as the barrier between needs the slow rank.
        at = self._mine + POSTED + 4 * (self.meetings % 2)
        words = self.words
        words[at], words[at + 1], words[at + 2], words[at + 3] = what

    def posted(self, rank: int) -> tuple[int, int, int, int]:
        """Read what a rank wrote before the barrier that has just been passed."""
        at = self._line(rank) + POSTED + 4 * ((self.meetings - 1) % 2)
        words = self.words
        return words[at], words[at + 1], words[at + 2], words[at + 3]

    def barrier(self, what: Callable[[], str]) -> None:
        """Return when every rank has come.

        Args:
            what: names the call for an error's message; called only then.

        Raises:
            PeerLostError: if a rank that is awaited died or left, or the run was given up.
            CommTimeoutError: if the time is over; names who is missing.
        """
        if self.broken:
            raise PeerLostError(
                f"{self.where}: this group failed before, so it cannot meet at {self._at(what)}: {self.broken}"
            )
        # Counters only grow, and each rank writes its own. So no rank resets a barrier, and a late rank still finds the
        # others at or above its target.
        self.meetings += 1
        target = self.meetings
        begin = 0 if self.trace is None else time.monotonic_ns()
        self.waiter.publish(self._mine + ARRIVED, target)
        try:
            for other in self._others:
                line = self._line(other)
                if self.words[line] < target:
                    self.waiter.wait(line, target, self.timeout, lambda waited: self._check(waited, target, what))
            fence()  # also where nobody was awaited: what the others wrote is read from here on
        except BaseException as error:
            self.broken = f"{type(error).__name__}: {error}"
            raise
        finally:
            if begin and self.trace is not None:
                self.trace(("wait", "wait", begin, time.monotonic_ns(), -1))

    def _at(self, what: Callable[[], str]) -> str:
        """Return the present activity of this rank, in its own words if it has set any."""
        return self.telling.doing or what()

    def _check(self, waited: float, target: int, what: Callable[[], str]) -> None:
        words = self.words
        if (reason := given_up(words)) is not None:
            raise PeerLostError(f"{self.where}: the run was given up while it waited at {self._at(what)}: {reason}")
        missing = [other for other in self._others if words[self._line(other)] < target]
        if waited >= 0.9 * SLICE:
            for other in missing:
                self._check_alive(other, target, what)
        if missing and waited >= self.timeout:
            raise CommTimeoutError(
                f"{self.where} waited {waited:.1f} s at {self._at(what)} for {self._who(missing)} of {self.size}. "
                f"{self._fates(missing)}See what they are doing, or set a longer timeout.",
                tuple(missing),
            )
        if missing and waited >= self.warn_after and self._warned != target:
            self._warned = target
            with suppress(OSError, ValueError):  # nobody reads it
                print(
                    f"choros: {self.where} has waited {waited:.1f} s at {self._at(what)} for {self._who(missing)} of "
                    f"{self.size}. {self._fates(missing)}It waits for up to {self.timeout:g} s in all.",
                    file=sys.stderr,
                    flush=True,
                )

    def _who(self, missing: list[int]) -> str:
        never = [other for other in missing if not self.words[self._line(other) + STATE]]
        ever = [other for other in missing if other not in never]
        parts = [f"{names(ever)} (alive, but busy or stopped)"] if ever else []
        parts += [f"{names(never)} (never joined)"] if never else []
        return " and ".join(parts)

    def _fates(self, missing: list[int]) -> str:
        """Return the last activities of missing ranks; nothing if none has set any."""
        if not self.telling.doing:
            return ""
        ever = [other for other in missing if self.words[self._line(other) + STATE]]
        pids = [self.words[self._line(other) + PID] for other in ever]
        said = [
            f"rank {other} (process {pid}, {state_of(pid)}): {self.telling.said(other)}"
            for other, pid in zip(ever[:_MOST], pids, strict=False)
        ]
        said += [f"and {len(ever) - _MOST} more"] if len(ever) > _MOST else []
        return f"{'; '.join(said)}. ".replace("rank", "Rank", 1) if said else ""

    def _check_alive(self, other: int, target: int, what: Callable[[], str]) -> None:
        line = self._line(other)
        state, pid = self.words[line + STATE], self.words[line + PID]
        if state == JOINED and (pid == os.getpid() or holder(self._fd, other)):
            return
        # It may have arrived and ended after the first look. Then it is not missing here; the next barrier reports it.
        if not state or self.words[line] >= target:
            return
        fate = "left" if self.words[line + STATE] == LEFT else "died"
        raise PeerLostError(
            f"{self.where}: rank {other} (process {pid}) {fate} while it was awaited at {self._at(what)}. "
            f"This group cannot go on; see what rank {other} printed last."
        )

    def oversee(self, ready: Callable[[], bool], what: Callable[[], str]) -> None:
        """Return when ``ready`` is true on every rank; look meanwhile whether they live.

        Args:
            ready: is asked again and again, sleeping in between; raises ``PeerLostError`` where it cannot become true.
            what: names the call for an error's message.

        Raises:
            PeerLostError, CommTimeoutError: as ``barrier``.
        """
        target, begin, looked = self.meetings + 1, time.perf_counter(), 0.0
        try:
            while not self._asked(ready, target, what):
                waited = time.perf_counter() - begin
                time.sleep(min(max(waited / 8, 2e-5), _NAP))
                if waited - looked >= SLICE:
                    looked = waited
                    self._check(waited, target, what)
                    if waited >= self.timeout:
                        raise CommTimeoutError(f"{self.where}: {self._at(what)} did not end within {waited:.1f} s.", ())
        except BaseException as error:
            self.broken = f"{type(error).__name__}: {error}"
            raise
        self.barrier(what)

    def _asked(self, ready: Callable[[], bool], target: int, what: Callable[[], str]) -> bool:
        """Ask; where it cannot become true, and that is because a rank has gone, tell of that one."""
        try:
            return ready()
        except PeerLostError:
            begin = time.perf_counter()
            while time.perf_counter() - begin < GRACE:
                self._check(SLICE, target, what)
                time.sleep(_NAP)
            raise

    def outlive(self, limit: float) -> None:
        """Leave, and return when all others have left or died, or so many seconds are over."""
        if self._segment.closed:
            return
        self.leave()
        begin, words = time.perf_counter(), self.words
        limit = min(limit, GRACE) if self.broken else limit
        while any(words[self._line(r) + STATE] == JOINED and holder(self._fd, r) for r in self._others):
            if time.perf_counter() - begin >= limit:
                return
            time.sleep(0.02)

    def check_given_up(self, what: Callable[[], str]) -> None:
        """Raise ``PeerLostError`` if the run was given up."""
        if self.words[_ABORT]:
            raise PeerLostError(f"{self.where}: the run was given up before {self._at(what)}: {given_up(self.words)}")

    def leave(self) -> None:
        """Say that this rank will not come again, and let its byte go."""
        if self.words[self._mine + PID] == os.getpid() and self.words[self._mine + STATE] == JOINED:
            self.words[self._mine + STATE] = LEFT  # before the unlock: else others would take this rank for dead
            if not self._segment.closed:
                fcntl.lockf(self._fd, fcntl.LOCK_UN, 1, self.rank)
            self.waiter.wake(self._mine + ARRIVED)
