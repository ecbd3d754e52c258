"""The optimizers' state of asynchronous workers at epochs' ends, for the callbacks of these epochs.

It is where callbacks run. A worker may be ahead of them by many epochs, where another one is slow. So the epoch that
callbacks see next and the one after it are kept whole, and later ones as long as there is room; of all others the
counts of steps are kept.
"""

from __future__ import annotations

from choros.training.async_control.center_snapshots import SLOTS
from choros.training.checkpoint.snapshot import Part
from choros.types import Array

_ROOM = 1 << 28


class EpochOptimizerStates:
    """The state by rank and epoch, and the latest.

    Args:
        room: int. Bytes for later epochs than the next two.

    Example: see ``tests/training/test_optimizer_seen.py``.
    """

    def __init__(self, room: int = _ROOM) -> None:
        self._room = room
        self._kept: dict[int, dict[int, Part]] = {}
        self._counts: dict[int, dict[int, Array]] = {}  # by epoch: place and value of rank 0's counts of steps
        self._latest: dict[int, tuple[int, Part]] = {}

    def put(self, rank: int, epoch: int, part: Part, seen: int) -> None:
        """Take what a rank left at the end of an epoch.

        Args:
            rank: int.
            epoch: int.
            part: "rows" that it trained; of rank 0 the "optimizer" variables, and the "average" of the weights if any.
            seen: the epoch whose end callbacks see next.
        """
        self._kept = {at: parts for at, parts in self._kept.items() if at >= seen}
        self._counts = {at: counts for at, counts in self._counts.items() if at >= seen}
        self._latest[rank] = epoch, part
        held = [each for parts in self._kept.values() for each in parts.values()]
        if epoch < seen + SLOTS or sum(map(_size, [*held, part])) <= self._room:
            self._kept.setdefault(epoch, {})[rank] = part
        if rank == 0:
            arrays = enumerate(part[1]["optimizer"])
            self._counts[epoch] = {at: array for at, array in arrays if array.dtype.kind in "iu" and array.size == 1}

    def last(self, rank: int) -> int:
        """Return the latest epoch whose end a rank has told of; -1 is none."""
        return self._latest[rank][0] if rank in self._latest else -1

    def optimizer(self, epoch: int) -> list[Array] | None:
        """Return rank 0's optimizer variables at the end of an epoch; None where it has not told of that.

        Where it was too far ahead, they are the latest, with that epoch's counts of steps.
        """
        if epoch not in self._counts:
            return None
        kept = self._kept.get(epoch, {}).get(0) or self._latest[0][1]
        return [self._counts[epoch].get(at, array) for at, array in enumerate(kept[1]["optimizer"])]

    def averages(self, epoch: int) -> dict[int, tuple[int, Array]]:
        """Return by rank the rows trained and the moving average of the weights, at the end of an epoch or later."""
        kept = self._kept.get(epoch, {})
        parts = {rank: kept.get(rank, latest) for rank, (_, latest) in self._latest.items()}
        return {
            rank: (facts["rows"], groups["average"][0]) for rank, (facts, groups) in parts.items() if groups["average"]
        }


def _size(part: Part) -> int:
    return sum(array.nbytes for arrays in part[1].values() for array in arrays)
