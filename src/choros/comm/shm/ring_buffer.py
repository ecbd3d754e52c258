"""Messages from one process to several, through a ring of slots in shared memory; who is slow holds the writer up.

Word 0 counts the messages written, word 1 is set when the writer has gone, word 2 + r counts those that reader r has
let go. Message i lies in slot i mod depth and is overwritten when all readers have let go of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np

from choros.comm.shm.futex import Waiter
from choros.comm.shm.segment import Segment, align
from choros.errors import CommTimeoutError, InvalidDataError, PeerLostError
from choros.types import Array

_LENGTH: Final = 64  # bytes at the head of a slot: the length of the message
_WRITTEN, _GONE, _TAKEN = range(3)


class Ring:
    """One end of a ring.

    Args:
        segment: Segment. Made by ``Ring.create``.
        readers: int. How many there are.
        depth: int. Slots.

    Example:
        >>> ring = Ring.create(readers=1, depth=2, nbytes=64)
        >>> ring.put(5, lambda memory: memory.__setitem__(slice(None), [1, 2, 3, 4, 5]), lambda waited: None)
        >>> ring.take(0, timeout=1.0).tolist()
        [1, 2, 3, 4, 5]
        >>> ring.let_go(0)
        >>> ring.close()
    """

    def __init__(self, segment: Segment, readers: int, depth: int) -> None:
        self.segment, self.readers, self.depth = segment, readers, depth
        self._words = segment.words
        self._waiter = Waiter(self._words, segment.address)
        self._head = align(8 * (_TAKEN + readers))
        self._slot = (segment.nbytes - self._head) // depth // 64 * 64

    @classmethod
    def create(cls, readers: int, depth: int, nbytes: int) -> Ring:
        """Make a ring for messages of up to ``nbytes``; memory is taken when it is first written."""
        slot = align(_LENGTH + nbytes)
        return cls(Segment.create(align(8 * (_TAKEN + readers)) + depth * slot, "choros-ring"), readers, depth)

    def put(self, nbytes: int, write: Callable[[Array], None], check: Callable[[float], None]) -> None:
        """Write a message, when there is room for it.

        Args:
            nbytes: its length.
            write: given the memory, puts it there.
            check: called now and then while there is no room, with the seconds waited; raises to give up.

        Raises:
            InvalidDataError: it is longer than a slot.
        """
        if nbytes > self._slot - _LENGTH:
            raise InvalidDataError(
                f"A batch takes {nbytes / 1e6:.1f} MB, and {(self._slot - _LENGTH) / 1e6:.1f} were set aside for one, "
                "going by the first: give batches of more equal size."
            )
        # The slot is free when every reader has let go of the message in it. A slow reader holds the writer up, and no
        # message is lost.
        number = self._words[_WRITTEN]
        for reader in range(self.readers):
            self._waiter.wait(_TAKEN + reader, number - self.depth + 1, 1.0, check)
        at = self._head + number % self.depth * self._slot
        self.segment.array(np.int64, 1, at)[0] = nbytes
        write(self.segment.array(np.uint8, nbytes, at + _LENGTH))
        self._waiter.publish(_WRITTEN, number + 1)

    def take(self, reader: int, timeout: float) -> Array:
        """Return this reader's next message, as it lies in the slot, until ``let_go``.

        Raises:
            PeerLostError: the writer has gone.
            CommTimeoutError: none came in time.
        """

        def check(waited: float) -> None:
            if self._words[_GONE]:
                raise PeerLostError("The process that reads the data has stopped.")
            if waited > timeout:
                raise CommTimeoutError(f"No batch came from the data for {waited:.0f} s.")

        number = self._words[_TAKEN + reader]
        self._waiter.wait(_WRITTEN, number + 1, timeout, check)
        at = self._head + number % self.depth * self._slot
        return self.segment.array(np.uint8, int(self.segment.array(np.int64, 1, at)[0]), at + _LENGTH)

    def let_go(self, reader: int) -> None:
        """Let the message that was taken be overwritten."""
        self._waiter.publish(_TAKEN + reader, self._words[_TAKEN + reader] + 1)

    def leave(self) -> None:
        """Let the readers know that no message will come any more."""
        self._waiter.publish(_GONE, 1)
        self._waiter.wake(_WRITTEN)  # on which the readers sleep

    def close(self) -> None:
        """Let the memory go."""
        self._words.release()
        self.segment.close()
