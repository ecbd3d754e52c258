"""A model's variables in shared memory, mapped by the process that called ``fit`` and its workers.

Large variables that training does not change are not copied. They are in a separate segment, which the caller writes
once. Each worker maps it privately, and its model uses this memory: the kernel copies a page only when it is written.
If such a variable changes all the same, a comparison finds it, and it is written to the common segment.

Workers receive the descriptors before the initial values are written. A worker copies a variable as soon as it is
written, while the caller writes the next ones.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any, Self

import numpy as np

from choros.comm.shm.futex import Waiter
from choros.comm.shm.segment import CACHE_LINE, Segment, align
from choros.data import serialization
from choros.errors import PeerLostError
from choros.types import Array

_CHUNK_BYTES = 1 << 20
_FILLED_WORD = 0  # index of the word that counts the variables whose initial values have been written


class SharedWeights:
    """All variables of a model, in two segments.

    Args:
        layout: ``layout`` of the process that created the segments; JSON values.
        common: Segment. A cache line with the number of variables that ``fill`` has written, one byte for each
            variable, not 0 once ``write`` has written it, and then all variables. Memory for frozen variables is
            allocated only when they change.
        frozen: Segment. The initial values of the frozen variables.
        unwritten: the values of all variables, which ``fill`` writes. Defaults to (): another process writes them.

    Example:
        >>> weights = SharedWeights.create([np.zeros(3), np.ones(2)], frozen=[1])
        >>> same = SharedWeights.attach(weights.layout, os.dup(weights.common.fd), os.dup(weights.frozen.fd))
        >>> arrays, lent = same.lend()
        >>> weights.fill()
        >>> arrays[1][0] = 5  # visible only in the process that attached
        >>> lent, weights.views()
        ([1], [array([0., 0., 0.]), array([1., 1.])])
        >>> same.write(arrays)
        >>> weights.views(), list(weights.changed())
        ([array([0., 0., 0.]), array([5., 1.])], [0, 1])
        >>> same.close()
        >>> weights.close()
    """

    def __init__(
        self, layout: dict[str, Any], common: Segment, frozen: Segment, unwritten: Sequence[Array] = ()
    ) -> None:
        self.layout, self.common, self.frozen = layout, common, frozen
        self.entries: list[dict[str, Any]] = layout["entries"]
        self.nbytes: int = layout["nbytes"]
        self._frozen_entries = {index: {**self.entries[index], "offset": offset} for index, offset in layout["frozen"]}
        self._waiter = Waiter(common.words, common.address, spin=0.0)  # the writing takes longer than a spin
        self._flags = common.array(np.uint8, len(self.entries), CACHE_LINE)
        self._start = CACHE_LINE + align(len(self.entries))
        self._values = common.array(np.uint8, self.nbytes, self._start)
        self._initial_values = frozen.array(np.uint8, frozen.nbytes, 0)
        self._parent = os.getppid()
        self._unwritten = unwritten

    @classmethod
    def create(cls, arrays: Sequence[Array], frozen: Sequence[int] = ()) -> Self:
        """Create the segments for all variables, whose values ``fill`` writes later.

        Args:
            arrays: the values. They must not change until ``fill`` has returned.
            frozen: indices of variables that training is not expected to change.
        """
        changing = [index for index in range(len(arrays)) if index not in set(frozen)]
        order = [*changing, *frozen]
        placed, nbytes = serialization.layout([arrays[index] for index in order])
        entries = [entry for _, entry in sorted(zip(order, placed, strict=True), key=lambda pair: pair[0])]
        fixed, fixed_bytes = serialization.layout([arrays[index] for index in frozen])
        offsets = [[index, entry["offset"]] for index, entry in zip(frozen, fixed, strict=True)]
        layout = {"entries": entries, "nbytes": nbytes, "frozen": offsets}
        common = Segment.create(CACHE_LINE + align(len(arrays)) + max(nbytes, CACHE_LINE), "choros-weights")
        return cls(layout, common, Segment.create(max(fixed_bytes, CACHE_LINE), "choros-frozen"), arrays)

    @classmethod
    def attach(cls, layout: dict[str, Any], common: int, frozen: int) -> Self:
        """Map the segments by the descriptors that this process inherited; the frozen one privately."""
        return cls(layout, Segment.attach(common), Segment.attach(frozen, private=True))

    def fill(self) -> None:
        """Write the initial values of all variables, in order of their indices. Workers may wait for them meanwhile."""
        for index, array in enumerate(self._unwritten):
            if (entry := self._frozen_entries.get(index)) is not None:
                self.frozen.write(array, entry["offset"])
            else:
                self.common.write(array, self._start + self.entries[index]["offset"])
            self._waiter.publish(_FILLED_WORD, index + 1)
        self._unwritten = ()

    def wait(self, index: int) -> None:
        """Return when the initial value of a variable has been written.

        Raises:
            PeerLostError: the process that writes them, this worker's parent, has ended.
        """

        def check(_: float) -> None:
            # Linux kills a worker whose parent ends. On other systems nothing else would end this wait.
            if os.getppid() != self._parent:
                raise PeerLostError("The process that called fit ended while it sent the model's weights.")

        self._waiter.wait(_FILLED_WORD, index + 1, math.inf, check)

    def initial_values(self) -> dict[int, Array]:
        """Return the initial values of frozen variables, by index, without a copy."""
        return {index: serialization.at(entry, self._initial_values) for index, entry in self._frozen_entries.items()}

    def lend(self) -> tuple[list[Array], list[int]]:
        """Return the last written values of all variables, and the indices of those whose memory a model may use.

        These are the frozen variables that no process has changed. In an attached process that memory is private. An
        array has its values after ``wait(index)``.
        """
        arrays, initial = self.views(), self.initial_values()
        lent = [index for index in initial if not self._flags[index]]
        for index in lent:
            arrays[index] = initial[index]
        return arrays, lent

    def read(self) -> list[Array]:
        """Return copies of the values of all variables. Each is copied as soon as it is there."""
        copies = []
        for index, array in enumerate(self.views()):
            self.wait(index)
            copies.append(np.array(array))
        return copies

    def views(self) -> list[Array]:
        """Return the last written values of all variables, read-only and without a copy."""
        arrays = serialization.views(self.entries, self._values)
        for index, array in self.initial_values().items():
            if not self._flags[index]:
                array.flags.writeable = False
                arrays[index] = array
        return arrays

    def changed(self) -> list[int]:
        """Return the indices of all variables without frozen ones that have their initial value; [] before ``fill``."""
        if self._unwritten:  # ``fill`` was interrupted
            return []
        return [index for index in range(len(self.entries)) if index not in self._frozen_entries or self._flags[index]]

    def write(self, arrays: Sequence[Array]) -> None:
        """Write all variables, without frozen ones that have their initial value."""
        for index, array in enumerate(arrays):
            entry = self._frozen_entries.get(index)
            if entry is not None and not self._flags[index] and self._has_initial_value(entry, array):
                continue
            view = serialization.at(self.entries[index], self._values)
            if view.dtype == array.dtype and view.shape == array.shape:  # unlike ``copyto``, it causes no page faults
                self.common.write(array, self._start + self.entries[index]["offset"])
            else:
                np.copyto(view, array)
            self._flags[index] = 1

    def _has_initial_value(self, entry: dict[str, Any], array: Array) -> bool:
        """Return whether a frozen variable has its initial bits. A private mapping may have been written."""
        unchanged = serialization.at(entry, self._initial_values)
        if array.ctypes.data == unchanged.ctypes.data and not self.frozen.written(entry["offset"], unchanged.nbytes):
            return True
        data, buffer = np.ascontiguousarray(array).reshape(-1).view(np.uint8), np.empty(_CHUNK_BYTES, np.uint8)
        for start in range(0, data.size, _CHUNK_BYTES):
            part = data[start : start + _CHUNK_BYTES]
            # Read from the file, because this process's private mapping may be the changed copy.
            if os.preadv(self.frozen.fd, [buffer[: part.size].data], entry["offset"] + start) != part.size:
                return False
            if not np.array_equal(part, buffer[: part.size]):
                return False
        return True

    def close(self) -> None:
        """Release the segments. A model that uses their memory keeps it alive."""
        self._flags = self._values = self._initial_values = np.empty(0, np.uint8)
        self._waiter.words = memoryview(b"").cast("q")
        self.common.close()
        self.frozen.close()
