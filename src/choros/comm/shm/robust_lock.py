"""Lock between processes that the holder's death releases.

The lock is a POSIX record lock on one byte of the segment's file (``fcntl.lockf``). The kernel releases it when the
holder ends, even by SIGKILL. No process waits for it inside the kernel. A waiter tries, then sleeps on a futex word
that each release changes. Each sleep is short, so the waiter notices a dead holder, an abort and the time limit.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Final

from choros.comm.group import Trace
from choros.comm.shm.futex import SPIN, Waiter
from choros.comm.shm.group_header import abort_reason, holder
from choros.comm.shm.segment import Segment
from choros.comm.tracing import Span
from choros.errors import CommTimeoutError, PeerLostError

# A record lock may cover a byte beyond the end of the file. The bytes from 0 on belong to the ranks (``GroupHeader``).
_LOCK_BYTE: Final = 1 << 30
# The holder's death releases the record lock but wakes no futex. So a waiter tries again after this many seconds; 5 ms
# is about the longest time for which the death of a holder delays the others.
_POLL_SECONDS: Final = 0.005


class RobustLock:
    """The lock of one segment.

    Args:
        segment: Segment. Its file carries the record lock.
        released, held: int. Indices of two words of the segment: a count of releases, and 1 + the holder's rank.
        name: str. Name of this process for messages, such as ``"rank 1"``.
        rank: int. Rank that is published while this process holds the lock; -1 for a controller.
        spin: float. Seconds to try without sleeping.

    Attributes:
        trace: Trace or None. Receives the timing of every wait for the lock.

    Example:
        >>> with Segment.create(4096) as segment:
        ...     lock = RobustLock(segment, 40, 41, "rank 0", 0)
        ...     with lock.hold(timeout=1.0, purpose="an exchange"):
        ...         segment.words[41]
        1
    """

    def __init__(self, segment: Segment, released: int, held: int, name: str, rank: int, spin: float = SPIN) -> None:
        self._segment = segment
        self._words = segment.words
        self._waiter = Waiter(self._words, segment.address, spin)
        self._release_count, self._holder_word = released, held
        self.trace: Trace | None = None
        self._name, self._rank = f"{name} on {os.uname().nodename}", rank

    @contextmanager
    def hold(self, timeout: float, purpose: str) -> Iterator[None]:
        """Hold the lock inside a ``with`` block.

        Raises:
            CommTimeoutError: the lock was not free within ``timeout`` seconds; the message names the holder.
            PeerLostError: the run was aborted.
        """
        # A record lock belongs to the process: a second thread would acquire it too. So a lock of this process keeps
        # its threads apart.
        acquired, thread_lock = False, self._segment.lock
        try:
            with Span(self.trace, "wait", "lock of the center") if self.trace else nullcontext():
                if not thread_lock.acquire(timeout=timeout):
                    raise CommTimeoutError(
                        f"{self._name}: another thread of this process has held the center for {timeout:.1f} s."
                    )
                self._acquire(timeout, purpose)
            acquired = True
            # For messages only. Nothing decides by this word, as it keeps the rank of a holder that was killed.
            self._words[self._holder_word] = self._rank + 1
            yield
        finally:
            # A KeyboardInterrupt may arrive between an acquire and the next line. So ``acquired`` may be False although
            # the record lock is held: it is unlocked in every case, which is harmless if it was not held.
            if thread_lock.acquire(blocking=False):  # succeeds if this thread or no thread has the lock
                # The holder's word is cleared before the unlock, else it could overwrite that of the next holder. The
                # count is published after the unlock, so a waiter that it wakes finds the lock free.
                if acquired:
                    self._words[self._holder_word] = 0
                # Only this process's locks are released: LOCK_UN on a byte that another process holds has no effect.
                fcntl.lockf(self._segment.fd, fcntl.LOCK_UN, 1, _LOCK_BYTE)
                # Two releasers may publish the same number. A waiter that loads it finds the lock free or held by a
                # later holder, which publishes again: each releaser reads the count after its unlock.
                if acquired:
                    self._waiter.publish(self._release_count, self._words[self._release_count] + 1)
                thread_lock.release()
                with suppress(RuntimeError):  # raised if the wait above had not acquired the lock
                    thread_lock.release()

    def _acquire(self, timeout: float, purpose: str) -> None:
        started = time.perf_counter()
        while True:
            # Load the count before the attempt: a release after the attempt changes it, so the sleep ends at once.
            releases = self._words[self._release_count]
            try:
                fcntl.lockf(self._segment.fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _LOCK_BYTE)
            # POSIX allows EAGAIN and EACCES for a lock that another process holds.
            except (BlockingIOError, PermissionError):
                waited = time.perf_counter() - started
                # LOCK_NB and a sleep, not F_SETLKW: a wait inside the kernel would see neither an abort nor the time
                # limit.
                self._check(waited, timeout, purpose)
                if waited >= self._waiter.spin:
                    self._waiter.sleep(self._release_count, releases, min(_POLL_SECONDS, max(timeout - waited, 0.001)))
            else:
                # The run may have been aborted during the wait. Then this process must not change the data.
                if (reason := abort_reason(self._words)) is not None:
                    fcntl.lockf(self._segment.fd, fcntl.LOCK_UN, 1, _LOCK_BYTE)
                    raise PeerLostError(f"{self._name}: the run was aborted before {purpose}: {reason}")
                return

    def _check(self, waited: float, timeout: float, purpose: str) -> None:
        if (reason := abort_reason(self._words)) is not None:
            raise PeerLostError(f"{self._name}: the run was aborted during the wait for {purpose}: {reason}")
        if waited >= timeout:
            # The process ID comes from the kernel. The word may be one holder behind.
            rank, pid = self._words[self._holder_word] - 1, holder(self._segment.fd, _LOCK_BYTE)
            waited_text = f"{self._name} waited {waited:.1f} s for {purpose}"
            if not pid:
                raise CommTimeoutError(
                    f"{waited_text}: the holder of the center has just released it or died, and the lock is contended. "
                    "Set a longer timeout."
                )
            name = f"rank {rank} (process {pid})" if rank >= 0 else f"a process without a rank (process {pid})"
            raise CommTimeoutError(
                f"{waited_text}: the center is held by {name}, which is alive, but busy or stopped. Look at that "
                "process, or set a longer timeout.",
                (rank,) if rank >= 0 else (),
            )
