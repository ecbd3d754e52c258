"""A worker meets the centre when its own window is full."""

from __future__ import annotations

import time
from typing import Any

from choros.transport import Centre
from choros.types import Array


class Alone:
    """One worker's meetings with a centre that others meet too.

    Args:
        centre: Centre. Proposes, merges and adopts in one locked pass, and counts clock and staleness.
        seen: flat float array. The centre as this worker saw it when it began; kept, and changed in place.

    Attributes:
        seen: the centre as this worker last saw it.
        exchanges: int. Meetings so far.
        staleness: int. Merges by others between its meetings, in all; divided by ``exchanges`` the mean.
        seconds: float. Time spent in meetings, waiting for the lock included.

    Example:
        >>> import numpy as np
        >>> from choros.algorithms import AEASGD
        >>> from choros.exchange.memory import MemoryCentre
        >>> alone = Alone(MemoryCentre(AEASGD(alpha=0.25), np.zeros(1), workers=2).at(0), np.zeros(1))
        >>> local = np.ones(1)
        >>> alone.meet(local, window=8, others=np.zeros(0)), local.tolist()
        (0, [0.75])
    """

    def __init__(self, centre: Centre, seen: Array) -> None:
        self.centre, self.seen = centre, seen
        self.exchanges = 0
        self.staleness = 0
        self.seconds = 0.0

    def meet(self, local: Array, window: int, others: Array) -> int:
        """Bring what was learnt, take what the centre shows.

        Args:
            local: this worker's vector, changed in place.
            window: int. Its optimizer steps since the last meeting.
            others: its moving statistics, changed in place; may be empty.

        Returns:
            The staleness of this meeting: merges by others since this worker's last.
        """
        begun = time.perf_counter()
        staleness = self.centre.exchange(local, self.seen, window, others)
        self.exchanges += 1
        self.staleness += staleness
        self.seconds += time.perf_counter() - begun
        return staleness

    def state(self) -> dict[str, Any]:
        """Return a copy of what a restart needs of this worker; the centre keeps its own."""
        return {
            "seen": self.seen.copy(),
            "exchanges": self.exchanges,
            "staleness": self.staleness,
            "seconds": self.seconds,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from what ``state`` returned."""
        self.seen[...] = state["seen"]
        self.exchanges, self.staleness = int(state["exchanges"]), int(state["staleness"])
        self.seconds = float(state["seconds"])
