"""Ring buffer in shared memory: one writer, several readers. A slow reader makes the writer wait.

Word 0 counts the messages written. Word 1 is set when the writer has closed. Word 2 + r counts the messages that
reader r has released. Message i uses slot i mod depth; the writer overwrites it after all readers have released it.
Each counter has one writer, so no lock is needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

import numpy as np

from choros.comm.shm.futex import Waiter
from choros.comm.shm.segment import Segment, align
from choros.errors import CommTimeoutError, InvalidDataError, PeerLostError
from choros.types import Array

_LENGTH: Final = 64  # bytes at the start of a slot: the message's length, on a cache line so that data are aligned
_WRITTEN, _CLOSED, _RELEASED = range(3)


class Ring:
    """One end of a ring buffer, for the writer or for a reader.

    Args:
        segment: Segment. Made by ``Ring.create``.
        readers: int. Number of readers.
        depth: int. Number of slots.

    Example:
        >>> ring = Ring.create(readers=1, depth=2, nbytes=64)
        >>> ring.put(5, lambda memory: memory.__setitem__(slice(None), [1, 2, 3, 4, 5]), lambda waited: None)
        >>> ring.take(0, timeout=1.0).tolist()
        [1, 2, 3, 4, 5]
        >>> ring.release(0)
        >>> ring.close()
    """

    def __init__(self, segment: Segment, readers: int, depth: int) -> None:
        self.segment, self.readers, self.depth = segment, readers, depth
        self._words = segment.words
        # The spin of a barrier is kept here: reader and writer take turns within microseconds when data are small.
        self._waiter = Waiter(self._words, segment.address)
        self._header_bytes = align(8 * (_RELEASED + readers))
        self._slot_bytes = (segment.nbytes - self._header_bytes) // depth // 64 * 64

    @classmethod
    def create(cls, readers: int, depth: int, nbytes: int) -> Ring:
        """Make a ring for messages of up to ``nbytes`` bytes. A page takes memory at its first write."""
        slot_bytes = align(_LENGTH + nbytes)
        return cls(Segment.create(align(8 * (_RELEASED + readers)) + depth * slot_bytes, "choros-ring"), readers, depth)

    def put(self, nbytes: int, write: Callable[[Array], None], check: Callable[[float], None]) -> None:
        """Wait for a free slot, then write a message.

        Args:
            nbytes: int. Length of the message in bytes.
            write: called with the slot's memory, a uint8 array of ``nbytes``; writes the message into it.
            check: called with the seconds waited, before every sleep (at least every 50 ms); raises to stop waiting.

        Raises:
            InvalidDataError: the message is longer than a slot.
        """
        if nbytes > self._slot_bytes - _LENGTH:
            raise InvalidDataError(
                f"A batch takes {nbytes / 1e6:.1f} MB, but a slot has {(self._slot_bytes - _LENGTH) / 1e6:.1f} MB, by "
                "the size of the first batch: give batches of more equal size."
            )
        # The slot is free when every reader has released the message in it. A slow reader makes the writer wait, so no
        # message is lost.
        # The writer alone changes this word, so it needs no fence to read its own count.
        index = self._words[_WRITTEN]
        for reader in range(self.readers):
            # Without a time limit: only ``check`` ends this wait early.
            self._waiter.wait(_RELEASED + reader, index - self.depth + 1, math.inf, check)
        offset = self._header_bytes + index % self.depth * self._slot_bytes
        self.segment.array(np.int64, 1, offset)[0] = nbytes
        # If ``write`` raises, the count stays. The readers never see the slot, and the next ``put`` uses it again.
        write(self.segment.array(np.uint8, nbytes, offset + _LENGTH))
        self._waiter.publish(_WRITTEN, index + 1)  # last: a reader that sees the count also sees length and data

    def take(self, reader: int, timeout: float) -> Array:
        """Return this reader's next message without a copy: a uint8 view of the slot, valid until ``release``.

        Raises:
            PeerLostError: the writer has closed.
            CommTimeoutError: no message came within ``timeout`` seconds.
        """

        def check(waited: float) -> None:
            # ``wait`` tests the count first, so a message that is ready is taken. One that is written between that test
            # and this load is lost. That is acceptable: the writer leaves only after an error, which ends the run.
            if self._words[_CLOSED]:
                raise PeerLostError("The process that reads the data has stopped.")
            if waited > timeout:
                raise CommTimeoutError(
                    f"No batch came from the data for {waited:.0f} s: make the data faster, or give a larger timeout."
                )

        # The count is in shared memory and not in this object: a new object of this reader continues at the message
        # that was not released.
        index = self._words[_RELEASED + reader]
        self._waiter.wait(_WRITTEN, index + 1, timeout, check)
        offset = self._header_bytes + index % self.depth * self._slot_bytes
        return self.segment.array(np.uint8, int(self.segment.array(np.int64, 1, offset)[0]), offset + _LENGTH)

    def release(self, reader: int) -> None:
        """Release the message that ``take`` returned; the writer may overwrite its slot."""
        # The fence in ``publish`` ends this reader's loads from the slot before the writer may overwrite it.
        self._waiter.publish(_RELEASED + reader, self._words[_RELEASED + reader] + 1)

    def leave(self) -> None:
        """Tell the readers that no message follows."""
        self._waiter.publish(_CLOSED, 1)
        self._waiter.wake(_WRITTEN)  # readers sleep on this word, and check _CLOSED when they wake

    def close(self) -> None:
        """Unmap the memory."""
        # A memoryview that stays exported would keep the mapping alive.
        self._words.release()
        self.segment.close()
