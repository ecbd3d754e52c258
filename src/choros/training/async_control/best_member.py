"""The complete state of an Ensemble's best member at an epoch's end, saved for callbacks while members continue.

There are two slots, for an epoch and the next one, as in ``training/async_control/center_snapshots.py``. A member that
ends an epoch writes the epoch's slot if it is better than the members that ended the epoch earlier. It first waits
until the callbacks of the epoch two before have run, because that epoch used the same slot.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from choros.backends.optimizers import model_variables
from choros.comm.shm.segment import Segment, align
from choros.data import serialization
from choros.training.async_control.center_snapshots import SLOTS
from choros.training.async_control.control_block import ControlBlock
from choros.types import Array

if TYPE_CHECKING:
    import keras

# The header: the bytes of a slot, then for each slot its epoch + 1 (0: empty), the member's rank and its score.
_HEADER_WORDS = 16
_WORDS_PER_SLOT = 3


class BestMemberSlots:
    """The two slots of the best member, in one segment.

    Args:
        segment: Segment. Created by ``create``, or attached.
        entries: layout of the arrays of ``Replica.snapshot``.
        control_block: ControlBlock, whose lock guards the slots.

    Example:
        >>> entries, nbytes = serialization.layout([np.zeros(2)])
        >>> control_block = ControlBlock.create(2, 1, 1)
        >>> kept = BestMemberSlots(BestMemberSlots.create(nbytes), entries, control_block)
        >>> kept.put(3, 0, 0.5, lambda: [np.ones(2)])
        >>> kept.put(3, 1, 0.7, lambda: [np.zeros(2)])
        >>> kept.put(3, 1, math.nan, lambda: [np.zeros(2)])
        >>> kept.rank(3), kept.read(3)[0].tolist(), kept.read(None)[0].tolist(), kept.read(2)
        (0, [1.0, 1.0], [1.0, 1.0], None)
        >>> kept.close()
        >>> control_block.close()
    """

    def __init__(self, segment: Segment, entries: Any, control_block: ControlBlock) -> None:
        self.segment, self.entries, self.control_block = segment, entries, control_block
        self._header = segment.array(np.float64, _HEADER_WORDS, 0)
        slot_bytes = int(self._header[0])
        self._slots = [segment.array(np.uint8, slot_bytes, 8 * _HEADER_WORDS + i * slot_bytes) for i in range(SLOTS)]

    @staticmethod
    def create(nbytes: int) -> Segment:
        """Create both slots, empty, for a model of ``nbytes`` bytes."""
        slot_bytes = align(max(nbytes, 1))
        segment = Segment.create(8 * _HEADER_WORDS + SLOTS * slot_bytes, "choros-best")
        segment.array(np.float64, _HEADER_WORDS, 0)[0] = slot_bytes
        return segment

    def put(self, epoch: int, rank: int, score: float, snapshot: Callable[[], list[Array]]) -> None:
        """Save a member's state at an epoch's end, if it is the best of those that have ended the epoch.

        Args:
            epoch: int.
            rank: int. The rank of the member.
            score: float. Its validation loss, or its training loss without validation. Lower is better; NaN is worst.
            snapshot: returns the arrays of its model and its optimizer. Called only if they are saved.
        """
        slot_header = self._slot_header(epoch)
        key = order(score, rank)
        with self.control_block.locked():
            # Ties go to the lower rank, so the result does not depend on the order in which members end.
            if int(slot_header[0]) == epoch + 1 and order(float(slot_header[2]), int(slot_header[1])) <= key:
                return
            slot_header[0] = 0  # if this process is killed while it writes, the slot stays invalid
            serialization.write(self.entries, snapshot(), self._slots[epoch % SLOTS])
            slot_header[:] = epoch + 1, rank, score

    def rank(self, epoch: int) -> int:
        """Return the rank of the best member of an epoch that all members have ended."""
        return int(self._slot_header(epoch)[1])

    def read(self, epoch: int | None) -> list[Array] | None:
        """Return a copy of the state saved for an epoch, or for the latest one (None). Return None if there is none."""
        with self.control_block.locked():
            if epoch is None:
                epoch = max(int(self._slot_header(i)[0]) for i in range(SLOTS)) - 1
            if epoch < 0 or int(self._slot_header(epoch)[0]) != epoch + 1:
                return None
            return [np.array(view) for view in serialization.views(self.entries, self._slots[epoch % SLOTS])]

    def show(self, model: keras.Model, epoch: int | None) -> None:
        """Load the state saved for an epoch, else the latest one, into a model; its learning rate stays."""
        state = self.read(epoch) or self.read(None)
        rate = model.optimizer.learning_rate
        for variable, value in zip(model_variables(model), state or [], strict=state is not None):
            # Callbacks own the learning rate of the model that they see.
            if variable is not rate:
                variable.assign(value)

    def _slot_header(self, epoch: int) -> Array:
        first = 1 + _WORDS_PER_SLOT * (epoch % SLOTS)
        values: Array = self._header[first : first + _WORDS_PER_SLOT]
        return values

    def close(self) -> None:
        """Free the segment."""
        self._slots, self._header = [], np.empty(0)
        self.segment.close()


def order(score: float, rank: int) -> tuple[float, int]:
    """Return the sort key of a member: the lowest loss is the best, and NaN is the worst."""
    return (math.inf if math.isnan(score) else score), rank


def best_of(scores: Sequence[float]) -> int:
    """Return the rank of the best member.

    Example:
        >>> best_of([math.nan, 0.5, 0.5])
        1
    """
    return min(range(len(scores)), key=lambda rank: order(scores[rank], rank))
