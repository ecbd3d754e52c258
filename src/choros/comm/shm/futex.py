"""Wait until a shared 64-bit word reaches a value: spin for a moment, then sleep on a futex.

A futex (futex(2)) is a kernel queue keyed by the address of a 32-bit word: here the low half of the awaited word.
A sleep lasts ``POLL_SECONDS`` at most. After each sleep the caller's ``check`` tests whether the run was aborted,
whether the awaited peers live, and whether the time limit has passed. So no wait lasts for ever.
"""

from __future__ import annotations

import ctypes
import platform
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

# The kernel wakes no waiter when a peer dies or a controller aborts elsewhere. So a waiter wakes itself this often and
# checks. One check costs a few system calls, which is nothing beside 50 ms.
POLL_SECONDS = 0.05
# A barrier of ranks that run at the same time ends within microseconds; a sleep and a wake-up would take longer.
SPIN = 50e-6
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1
# Several ranks sleep on one word (all ranks of a barrier on the slowest one), so a wake-up must reach all of them. The
# kernel reads the number as a positive int.
_ALL_WAITERS = 1 << 30
_IS_X86 = platform.machine().lower() in ("x86_64", "amd64", "i386", "i686")
# libc has no function for futex(2), and the number differs between architectures. ``timespec`` below has two 64-bit
# fields, so a 32-bit process must poll instead.
_SYSCALL_NUMBERS = {"x86_64": 202, "amd64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221, "s390x": 238}
_FUTEX_SYSCALL = (
    _SYSCALL_NUMBERS.get(platform.machine().lower()) if sys.platform == "linux" and sys.maxsize > 2**32 else None
)
# The kernel compares 32 bits only. The low half changes with every step of a counter; the high half would not.
_LOW_HALF = 0 if sys.byteorder == "little" else 4
_fence_lock = threading.Lock()


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_int64), ("nanoseconds", ctypes.c_int64))


def fence() -> None:
    """Order the loads and stores before this call before those after it, as other processes see them.

    x86 needs no instruction: it keeps stores in order with stores and loads in order with loads. It may still delay a
    store past a later load of another word; no caller depends on that order.
    """
    if not _IS_X86:
        # Python has no fence instruction. The first release publishes all earlier stores, and the second acquire
        # cannot be reordered before that release. So two rounds of a lock make a full fence.
        for _ in range(2):
            _fence_lock.acquire()
            _fence_lock.release()


class Waiter:
    """Wait operations and wake operations on the words of one segment.

    Args:
        words: memoryview of signed 64-bit integers (``Segment.words``).
        address: int. Address of the first word (``Segment.address``).
        spin: float. Seconds to poll without sleeping. Use 0 if ranks outnumber the cores: a rank that spins would
            occupy the core that the awaited rank needs.

    Example:
        >>> from choros.comm.shm.segment import Segment
        >>> with Segment.create(4096) as segment:
        ...     waiter = Waiter(segment.words, segment.address)
        ...     waiter.publish(3, 1)
        ...     waiter.wait(3, 1, 1.0, lambda waited: None)
    """

    def __init__(self, words: memoryview, address: int, spin: float = SPIN) -> None:
        self.words = words
        self.spin = spin
        self._address = address + _LOW_HALF
        self._syscall: Any = None
        if _FUTEX_SYSCALL is not None:
            long, pointer = ctypes.c_long, ctypes.c_void_p
            # ``CDLL`` releases the GIL during the call. With ``PyDLL`` a sleeping rank would stop all threads of its
            # process.
            self._syscall = ctypes.CDLL(None).syscall
            self._syscall.restype = long
            self._syscall.argtypes = [long, pointer, long, long, pointer, pointer, long]

    def publish(self, index: int, value: int) -> None:
        """Store a word after all earlier stores, and wake all waiters of the word."""
        fence()  # a waiter that sees the new value must also see the data written before it
        # One aligned 64-bit store: on every supported CPU a reader sees the old or the new value, never a mixture.
        self.words[index] = value
        self.wake(index)

    def wake(self, index: int) -> None:
        """Wake all processes that sleep on a word."""
        # No FUTEX_PRIVATE_FLAG: the waiters are other processes, so the kernel must find the word by its file and
        # offset. It has a full barrier before it looks for waiters, so the store in ``publish`` cannot be delayed past
        # that look.
        if self._syscall is not None:
            self._syscall(_FUTEX_SYSCALL, self._address + 8 * index, _FUTEX_WAKE, _ALL_WAITERS, None, None, 0)

    def wait(self, index: int, target: int, limit: float, check: Callable[[float], None]) -> None:
        """Return when the word is at least ``target``.

        Args:
            index: int. Index of the word.
            target: int. The value that the word must reach.
            limit: float. The time limit of ``check`` in seconds. No sleep lasts beyond it, so that ``check`` can raise
                in time. A ``check`` that does not raise then is called every millisecond. ``math.inf`` sets no limit.
            check: called with the seconds waited so far, before every sleep; raises to end the wait.
        """
        shared = self.words
        # The word is tested before ``check``: a value that is already there counts, even if its writer has died since.
        if shared[index] < target:
            started = time.perf_counter()
            spin_until = started + self.spin
            while time.perf_counter() < spin_until:
                # Three loads for each reading of the clock: the clock is the slower of the two.
                if shared[index] >= target or shared[index] >= target or shared[index] >= target:
                    break
            # A loop, as a sleep also ends for other reasons: the time is over, a signal arrived (EINTR), or the word
            # changed but has not reached the target yet.
            while (current := shared[index]) < target:
                waited = time.perf_counter() - started
                check(waited)
                # ``current`` must be the value that was compared with the target. A new load here could return the
                # awaited value, and the sleep would then wait for the value after it.
                self.sleep(index, current, min(POLL_SECONDS, max(limit - waited, 0.001)))
        fence()  # the loads that follow must not return data from before the word reached its target

    def sleep(self, index: int, value: int, seconds: float) -> None:
        """Sleep while the word has this value, until a wake-up or until the seconds are over."""
        # The result of the system call is ignored on purpose: a wake-up, EAGAIN, EINTR and ETIMEDOUT all make the
        # caller test the word again.
        if self._syscall is None:
            # No futex on this system: poll. 200 us bounds the delay of a wake-up.
            with suppress(InterruptedError):
                time.sleep(min(seconds, 200e-6))
            return
        whole_seconds = int(seconds)
        duration = _Timespec(whole_seconds, int((seconds - whole_seconds) * 1e9))
        # The kernel compares the word with ``expected`` again, under its own lock. If the word changed since the
        # caller's load, the sleep ends at once. So no wake-up is lost between the load and the sleep.
        expected = value & 0xFFFFFFFF
        self._syscall(
            _FUTEX_SYSCALL, self._address + 8 * index, _FUTEX_WAIT, expected, ctypes.addressof(duration), None, 0
        )
