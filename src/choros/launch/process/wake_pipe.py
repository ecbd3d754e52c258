"""A pipe that wakes a thread from a ``select`` or ``poll``."""

from __future__ import annotations

import os
import threading
from contextlib import suppress


class WakePipe:
    """A pipe whose reading end becomes readable when any thread or a signal handler calls ``wake``.

    Example:
        >>> pipe = WakePipe()
        >>> pipe.wake(), pipe.wake(), pipe.clear(), pipe.close(), pipe.wake()
        (None, None, None, None, None)
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # reentrant, because a signal handler may interrupt ``wake``
        self._reading, self._writing = os.pipe()
        # A full pipe must not block a signal handler. One byte in it is enough to wake the thread.
        os.set_blocking(self._writing, False)
        os.set_blocking(self._reading, False)

    def fileno(self) -> int:
        """Return the reading end, to wait on."""
        return self._reading

    def wake(self) -> None:
        """Make the reading end readable; thread-safe. Do nothing after ``close``."""
        with self._lock, suppress(BlockingIOError):
            if self._writing >= 0:
                os.write(self._writing, b".")

    def clear(self) -> None:
        """Read what ``wake`` has written."""
        with suppress(BlockingIOError):
            os.read(self._reading, 1 << 12)

    def close(self) -> None:
        """Close both ends."""
        with self._lock:
            os.close(self._reading)
            os.close(self._writing)
            self._reading = self._writing = -1
