"""A lock between processes that its holder's death opens.

A POSIX record lock on one byte of the segment's file (``fcntl.lockf``): the kernel frees it when its holder
ends, also by SIGKILL. It is only ever tried, never waited for in the kernel: a waiter sleeps on a futex word
that each release changes, in slices, so that it sees a dead holder, an abort and the time limit.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

from choros.comm.shm.futex import SPIN, Waiter
from choros.comm.shm.group_header import given_up, holder
from choros.comm.shm.segment import Segment
from choros.errors import CommTimeoutError, PeerLostError

# Record locks may lie beyond the end of a file. The bytes from 0 on belong to the ranks (``GroupHeader``).
_BYTE: Final = 1 << 30
# A death frees the kernel's lock, but wakes no futex. A waiter that slept without a limit would not see it.
_SLICE: Final = 0.005


class RobustLock:
    """One lock of one segment.

    Args:
        segment: Segment. Whose file carries the lock.
        released, held: int. Two words of the segment: a count of releases, and 1 + the holder's rank.
        who: str. This process, for messages (``"rank 1"``).
        rank: int. What others are told while this process holds it; -1 for a controller.
        spin: float. Seconds to try again and again before sleeping.

    Example:
        >>> with Segment.create(4096) as segment:
        ...     lock = RobustLock(segment, 40, 41, "rank 0", 0)
        ...     with lock.hold(timeout=1.0, what="an exchange"):
        ...         segment.words[41]
        1
    """

    def __init__(self, segment: Segment, released: int, held: int, who: str, rank: int, spin: float = SPIN) -> None:
        self._segment = segment
        self._words = segment.words
        self._waiter = Waiter(self._words, segment.address, spin)
        self._released, self._held = released, held
        self._who, self._rank = f"{who} on {os.uname().nodename}", rank

    @contextmanager
    def hold(self, timeout: float, what: str) -> Iterator[None]:
        """Hold the lock inside a ``with`` block.

        Raises:
            CommTimeoutError: after ``timeout`` seconds; names the holder.
            PeerLostError: if the run was given up.
        """
        # A record lock belongs to the process: a second thread of it would get the lock too. So threads take turns.
        acquired, threads = False, self._segment.lock
        try:
            if not threads.acquire(timeout=timeout):
                raise CommTimeoutError(
                    f"{self._who}: another thread of this process has held the centre for {timeout:.1f} s."
                )
            self._acquire(timeout, what)
            acquired = True
            self._words[self._held] = self._rank + 1
            yield
        finally:
            # a KeyboardInterrupt may come between either lock and the line after it: so neither line is proof of it
            if threads.acquire(blocking=False):  # this thread has it already, or no thread
                if acquired:
                    self._words[self._held] = 0
                fcntl.lockf(self._segment.fd, fcntl.LOCK_UN, 1, _BYTE)
                if acquired:
                    self._waiter.publish(self._released, self._words[self._released] + 1)
                threads.release()
                with suppress(RuntimeError):  # no thread had it
                    threads.release()

    def _acquire(self, timeout: float, what: str) -> None:
        begin = time.perf_counter()
        while True:
            # Read before the attempt: a release between attempt and sleep changes the word, so the sleep ends at once.
            count = self._words[self._released]
            try:
                fcntl.lockf(self._segment.fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _BYTE)
            except (BlockingIOError, PermissionError):
                waited = time.perf_counter() - begin
                self._check(waited, timeout, what)
                if waited >= self._waiter.spin:
                    self._waiter.sleep(self._released, count, min(_SLICE, max(timeout - waited, 0.001)))
            else:
                # The run may have been given up while this process waited; then nothing is merged any more.
                if (reason := given_up(self._words)) is not None:
                    fcntl.lockf(self._segment.fd, fcntl.LOCK_UN, 1, _BYTE)
                    raise PeerLostError(f"{self._who}: the run was given up before {what}: {reason}")
                return

    def _check(self, waited: float, timeout: float, what: str) -> None:
        if (reason := given_up(self._words)) is not None:
            raise PeerLostError(f"{self._who}: the run was given up while it waited for {what}: {reason}")
        if waited >= timeout:
            rank, pid = self._words[self._held] - 1, holder(self._segment.fd, _BYTE)
            name = f"rank {rank}" if rank >= 0 else "the controller"
            raise CommTimeoutError(
                f"{self._who} waited {waited:.1f} s for {what}: the centre is held by {name} (process {pid}), "
                "which is alive, but busy or stopped. See what it is doing, or set a longer timeout.",
                (rank,) if rank >= 0 else (),
            )
