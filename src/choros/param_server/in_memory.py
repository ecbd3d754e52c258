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
        others: flat float array. The mean of the workers' moving statistics, if the model has any; copied.

    Attributes:
        center, others: the arrays, changed in place under the lock.
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

    def __init__(self, algorithm: Algorithm, center: Array, workers: int = 1, others: Array | None = None) -> None:
        self.algorithm, self.workers = algorithm, workers
        self.center = center.copy()
        self.others: Array = np.zeros(0, center.dtype) if others is None else others.copy()
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

    def exchange(self, rank: int, local: Array, seen: Array, window: int, others: Array) -> int:
        """Exchange with worker ``rank``. Change ``local``, ``others`` and (if it is used) ``seen`` in place."""
        with self._lock:
            staleness = self.clock - self.clocks_seen[rank]
            info = ExchangeInfo(1, staleness, rank)
            messages = self._rule.messages(local, seen, window)
            self._rule.merge(messages, info, self.center, self.memory, self.center, self.memory, (local, seen))
            if others.size:
                self.others += (others - self.others) / self.workers
                others[...] = self.others
            self.clock += 1
            self.clocks_seen[rank] = self.clock
        return staleness

    def read(self, out: Array, others: Array) -> int:
        """Copy the center into ``out`` and the statistics into ``others``; return the number of merges."""
        with self._lock:
            out[...], others[...] = self.center, self.others
            return self.clock


class InMemoryClient:
    """One worker's handle to an ``InMemoryParameterServer``. It implements ``choros.comm.group.ParameterServer``."""

    trace: Trace | None = None  # the lock is held for so short a time that waits are not reported

    def __init__(self, server: InMemoryParameterServer, rank: int) -> None:
        self._server, self._rank = server, rank

    def exchange(self, local: Array, seen: Array, window: int, others: Array) -> int:
        """Propose, merge and adopt under one lock; return the staleness."""
        return self._server.exchange(self._rank, local, seen, window, others)

    def read(self, out: Array, others: Array, *, adopt: bool = False) -> int:
        """Copy the center into ``out`` and the statistics into ``others``; return the number of merges."""
        clock = self._server.read(out, others)
        if adopt:
            self._server.clocks_seen[self._rank] = clock
        return clock

    def close(self) -> None:
        """Do nothing: this handle holds no resources."""
