"""Asynchronous exchange: each worker exchanges with the center after each of its windows of steps."""

from __future__ import annotations

import time
from typing import Any

from choros.comm.group import ParameterServer
from choros.types import Array


class AsyncExchange:
    """One worker's asynchronous exchanges with a center that all workers share.

    Args:
        center: ParameterServer. Runs propose, merge and adopt under one lock, and returns the staleness.
        seen: flat float array. The center when this worker began. It is kept, and changed in place.

    Attributes:
        seen: the center at this worker's last exchange, if the algorithm uses it; else as given.
        exchanges: int. Exchanges so far.
        staleness: int. Sum over all exchanges of the merges by other workers since the one before.
        seconds: float. Time spent in exchanges, including waiting for the lock.

    Example:
        >>> import numpy as np
        >>> from choros.algorithms import AEASGD
        >>> from choros.param_server.in_memory import InMemoryParameterServer
        >>> server = InMemoryParameterServer(AEASGD(alpha=0.25), np.zeros(1), workers=2)
        >>> exchange = AsyncExchange(server.at(0), np.zeros(1))
        >>> local = np.ones(1)
        >>> exchange.run(local, window=8, statistics=np.zeros(0)), local.tolist()
        (0, [0.75])
    """

    def __init__(self, center: ParameterServer, seen: Array) -> None:
        self.center, self.seen = center, seen
        self.exchanges = 0
        self.staleness = 0
        self.seconds = 0.0

    def run(self, local: Array, window: int, statistics: Array) -> int:
        """Send this worker's update to the center, and adopt the center's answer.

        Args:
            local: this worker's vector, changed in place.
            window: int. Its optimizer steps since the last exchange.
            statistics: this worker's moving statistics (as of BatchNorm), changed in place. May be empty.

        Returns:
            The staleness of this exchange: merges by other workers since this worker's last one.
        """
        begun = time.perf_counter()
        staleness = self.center.exchange(local, self.seen, window, statistics)
        self.exchanges += 1
        self.staleness += staleness
        self.seconds += time.perf_counter() - begun
        return staleness

    def state(self) -> dict[str, Any]:
        """Return a copy of this worker's state for a checkpoint. The center's state is not in it."""
        return {
            "seen": self.seen.copy(),
            "exchanges": self.exchanges,
            "staleness": self.staleness,
            "seconds": self.seconds,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Restore the state that ``state`` returned."""
        self.seen[...] = state["seen"]
        self.exchanges, self.staleness = int(state["exchanges"]), int(state["staleness"])
        self.seconds = float(state["seconds"])
