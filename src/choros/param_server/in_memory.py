"""Parameter server in this process's memory, for threads, for one worker, and for tests of the algorithms."""

from __future__ import annotations

import threading

import numpy as np

from choros.algorithms import Algorithm, ExchangeInfo
from choros.comm.group import Trace
from choros.errors import counted
from choros.param_server.rule_blocks import BlockRule
from choros.types import Array


class InMemoryParameterServer:
    """A parameter server in this process: the center, the algorithm's state, a lock, and a count of merges.

    Args:
        algorithm: Algorithm. Bound to the number of workers.
        center: flat float array. Initial values; copied.
        workers: int. Number of workers.
        statistics: flat float array. The mean of the workers' moving statistics, if the model has any; copied.

    Attributes:
        center, statistics: the arrays, changed in place under the lock.
        clock: int. Merges so far.
        clocks_seen: list of int. For each worker, the clock of its last exchange, or of the center that it adopted.

    Example:
        >>> from choros.algorithms import DynSGD
        >>> server = InMemoryParameterServer(DynSGD(), np.zeros(1), workers=2)
        >>> first, second = server.at(0), server.at(1)
        >>> first.exchange(np.ones(1), np.zeros(1), 8, np.zeros(0))
        0
        >>> second.exchange(np.ones(1), np.zeros(1), 8, np.zeros(0)), server.center.tolist()
        (1, [1.5])
    """

    def __init__(self, algorithm: Algorithm, center: Array, workers: int = 1, statistics: Array | None = None) -> None:
        self.algorithm, self.workers = algorithm, workers
        self.center = center.copy()
        self.statistics: Array = np.zeros(0, center.dtype) if statistics is None else statistics.copy()
        self.memory = tuple(algorithm.start(self.center, workers))
        self.clock = 0
        self.clocks_seen = [0] * workers
        self._lock = threading.Lock()
        self._rule = BlockRule(algorithm)

    def at(self, rank: int) -> InMemoryClient:
        """Return the handle through which one worker uses the center.

        Raises:
            ValueError: there is no such worker.
        """
        if not 0 <= rank < self.workers:
            raise ValueError(
                f"rank {rank} of a center for {counted(self.workers, 'worker')}: give 0 to {self.workers - 1}."
            )
        return InMemoryClient(self, rank)

    def exchange(self, rank: int, local: Array, seen: Array, window: int, statistics: Array) -> int:
        """Exchange with worker ``rank``. Change ``local``, ``statistics`` and (if it is used) ``seen`` in place."""
        with self._lock:
            staleness = self.clock - self.clocks_seen[rank]
            info = ExchangeInfo(1, staleness, rank)
            messages = self._rule.messages(local, seen, window)
            self._rule.merge(messages, info, self.center, self.memory, self.center, self.memory, (local, seen))
            if statistics.size:
                self.statistics += (statistics - self.statistics) / self.workers
                statistics[...] = self.statistics
            self.clock += 1
            self.clocks_seen[rank] = self.clock
        return staleness

    def read(self, out: Array, statistics: Array) -> int:
        """Copy the center into ``out`` and the statistics into ``statistics``; return the number of merges."""
        with self._lock:
            out[...], statistics[...] = self.center, self.statistics
            return self.clock


class InMemoryClient:
    """One worker's handle to an ``InMemoryParameterServer``. It implements ``choros.comm.group.ParameterServer``."""

    trace: Trace | None = None  # the lock is held for so short a time that waits are not reported

    def __init__(self, server: InMemoryParameterServer, rank: int) -> None:
        self._server, self._rank = server, rank

    def exchange(self, local: Array, seen: Array, window: int, statistics: Array) -> int:
        """Propose, merge and adopt under one lock; return the staleness."""
        return self._server.exchange(self._rank, local, seen, window, statistics)

    def read(self, out: Array, statistics: Array, *, adopt: bool = False) -> int:
        """Copy the center into ``out`` and the statistics into ``statistics``; return the number of merges."""
        clock = self._server.read(out, statistics)
        if adopt:
            self._server.clocks_seen[self._rank] = clock
        return clock

    def close(self) -> None:
        """Do nothing: this handle holds no resources."""
