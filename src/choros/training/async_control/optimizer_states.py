"""The optimizers' state of asynchronous workers at epochs' ends, for the callbacks of these epochs.

The process that runs the callbacks holds it. If one worker is slow, another one may be many epochs ahead of the
callbacks. So the complete state is held for the next two epochs of the callbacks, and for later ones while memory
allows. For all other epochs, only rank 0's counts of steps are held.
"""

from __future__ import annotations

from choros.training.async_control.center_snapshots import SLOTS
from choros.training.checkpoint.snapshot import Part
from choros.types import Array

_MAX_BYTES = 1 << 28  # 256 MiB


class EpochOptimizerStates:
    """The optimizers' state by rank and epoch, and the latest state of each rank.

    Args:
        max_bytes: int. Most bytes of all states, if epochs after the next two are held. Defaults to 256 MiB.

    Example: see ``tests/training/test_optimizer_seen.py``.
    """

    def __init__(self, max_bytes: int = _MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._states: dict[int, dict[int, Part]] = {}
        self._counts: dict[int, dict[int, Array]] = {}  # by epoch: index and value of rank 0's counts of steps
        self._latest: dict[int, tuple[int, Part]] = {}

    def put(self, rank: int, epoch: int, part: Part, next_epoch: int) -> None:
        """Take a rank's state at the end of an epoch, and drop the states of epochs before ``next_epoch``.

        Args:
            rank: int.
            epoch: int.
            part: the "rows" that the rank trained; "optimizer" variables (of rank 0, at least) and the moving "average"
                of the weights, or empty lists.
            next_epoch: the next epoch whose end callbacks will see.
        """
        self._states = {key: parts for key, parts in self._states.items() if key >= next_epoch}
        self._counts = {key: counts for key, counts in self._counts.items() if key >= next_epoch}
        self._latest[rank] = epoch, part
        held_parts = [held for parts in self._states.values() for held in parts.values()]
        if epoch < next_epoch + SLOTS or sum(map(_size, [*held_parts, part])) <= self._max_bytes:
            self._states.setdefault(epoch, {})[rank] = part
        # Callbacks of each epoch must see that epoch's counts, also if its complete state is not held.
        if rank == 0:
            arrays = enumerate(part[1]["optimizer"])
            self._counts[epoch] = {
                index: array for index, array in arrays if array.dtype.kind in "iu" and array.size == 1
            }

    def last(self, rank: int) -> int:
        """Return the latest epoch for which a rank has sent its state; -1 if there is none."""
        return self._latest[rank][0] if rank in self._latest else -1

    def optimizer(self, epoch: int) -> list[Array] | None:
        """Return rank 0's optimizer variables at the end of an epoch; None if it has not sent them.

        If rank 0 was too far ahead, they are its latest variables, with that epoch's counts of steps.
        """
        if epoch not in self._counts:
            return None
        state = self._states.get(epoch, {}).get(0) or self._latest[0][1]
        return [self._counts[epoch].get(index, array) for index, array in enumerate(state[1]["optimizer"])]

    def averages(self, epoch: int) -> dict[int, tuple[int, Array]]:
        """Return, by rank, the rows trained and the moving average of the weights at the end of an epoch.

        For a rank whose state of that epoch is not held, they are its latest ones.
        """
        states = self._states.get(epoch, {})
        parts = {rank: states.get(rank, latest) for rank, (_, latest) in self._latest.items()}
        return {
            rank: (facts["rows"], groups["average"][0]) for rank, (facts, groups) in parts.items() if groups["average"]
        }


def _size(part: Part) -> int:
    return sum(array.nbytes for arrays in part[1].values() for array in arrays)
