"""Wait until a shared 64-bit word reaches a value: spin for a moment, then sleep on a futex.

A futex (futex(2)) is a kernel queue keyed by the address of a 32-bit word: here the low half of the word that
is awaited. The sleep is cut into slices, and after each the caller's ``check`` looks whether the run was given
up, whether the awaited peers live, and whether the time is over, so that nothing hangs for ever.
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

SLICE = 0.05
SPIN = 50e-6
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1
_EVERYONE = 1 << 30
_X86 = platform.machine().lower() in ("x86_64", "amd64", "i386", "i686")
_NUMBERS = {"x86_64": 202, "amd64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221, "s390x": 238}
_NUMBER = _NUMBERS.get(platform.machine().lower()) if sys.platform == "linux" and sys.maxsize > 2**32 else None
_LOW = 0 if sys.byteorder == "little" else 4
_turn = threading.Lock()


class _Time(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_int64), ("nanoseconds", ctypes.c_int64))


def fence() -> None:
    """Order what was written or read before this call before what comes after it.

    x86 keeps stores in order and loads in order by itself. Elsewhere two turns of a lock do it: the first
    turn's release publishes what came before, and the second turn's acquire cannot pass it.
    """
    if not _X86:
        for _ in range(2):
            _turn.acquire()
            _turn.release()


class Waiter:
    """Waits for, and wakes those who wait for, the words of one segment.

    Args:
        words: memoryview of signed 64-bit integers (``Segment.words``).
        address: int. Where ``words`` begins (``Segment.address``).
        spin: float. Seconds to look again and again before sleeping. 0 where ranks outnumber the cores:
            there, a rank that spins keeps the one it waits for from running.

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
        self._address = address + _LOW
        self._call: Any = None
        if _NUMBER is not None:
            number, pointer = ctypes.c_long, ctypes.c_void_p
            self._call = ctypes.CDLL(None).syscall
            self._call.restype = number
            self._call.argtypes = [number, pointer, number, number, pointer, pointer, number]

    def publish(self, index: int, value: int) -> None:
        """Store a word, after everything written before it, and wake all who wait for it."""
        fence()
        self.words[index] = value
        self.wake(index)

    def wake(self, index: int) -> None:
        """Wake all who sleep on a word."""
        if self._call is not None:
            self._call(_NUMBER, self._address + 8 * index, _FUTEX_WAKE, _EVERYONE, None, None, 0)

    def wait(self, index: int, target: int, limit: float, check: Callable[[float], None]) -> None:
        """Return when the word is at least ``target``.

        Args:
            index: int. Which word.
            target: int. The value that it must reach.
            limit: float. Seconds after which ``check`` is sure to be called once more.
            check: called with the seconds waited so far, after every sleep; raises to end the wait.
        """
        words = self.words
        if words[index] < target:
            begin = time.perf_counter()
            end = begin + self.spin
            while time.perf_counter() < end:
                if words[index] >= target or words[index] >= target or words[index] >= target:
                    break
            while (now := words[index]) < target:
                waited = time.perf_counter() - begin
                check(waited)
                self.sleep(index, now, min(SLICE, max(limit - waited, 0.001)))
        fence()

    def sleep(self, index: int, value: int, seconds: float) -> None:
        """Sleep while the word has this value, until it is woken or the seconds are over."""
        if self._call is None:
            with suppress(InterruptedError):
                time.sleep(min(seconds, 200e-6))
            return
        whole = int(seconds)
        span = _Time(whole, int((seconds - whole) * 1e9))
        # The kernel compares the word again under its own lock. A change since the caller looked ends the sleep at
        # once, so no wake-up is lost.
        low = value & 0xFFFFFFFF
        self._call(_NUMBER, self._address + 8 * index, _FUTEX_WAIT, low, ctypes.addressof(span), None, 0)
