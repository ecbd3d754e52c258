"""A centre in this process' memory: for threads, for one worker, and for the tests of the maths."""

from __future__ import annotations

import threading

import numpy as np

from choros.algorithms import Algorithm, Meeting
from choros.exchange.blocks import blocks
from choros.types import Array


class MemoryCentre:
    """The centre, its memory, one lock, one clock, and when each worker last met it.

    Args:
        algorithm: Algorithm. Bound to the number of workers.
        centre: flat float array. Where it starts; copied.
        workers: int. How many meet it.
        others: flat float array. The averaged moving statistics, where the model has some; copied.

    Attributes:
        centre, others: the arrays, changed in place under the lock.
        clock: int. Merges so far.

    Example:
        >>> from choros.algorithms import DynSGD
        >>> centre = MemoryCentre(DynSGD(), np.zeros(1), workers=2)
        >>> first, second = centre.at(0), centre.at(1)
        >>> first.exchange(np.ones(1), np.zeros(1), 8, np.zeros(0))
        0
        >>> second.exchange(np.ones(1), np.zeros(1), 8, np.zeros(0)), centre.centre.tolist()
        (1, [1.5])
    """

    def __init__(self, algorithm: Algorithm, centre: Array, workers: int = 1, others: Array | None = None) -> None:
        self.algorithm, self.workers = algorithm, workers
        self.centre = centre.copy()
        self.others: Array = np.zeros(0, centre.dtype) if others is None else others.copy()
        self.memory = tuple(algorithm.start(self.centre, workers))
        self.clock = 0
        self._met = [0] * workers
        self._lock = threading.Lock()
        self._blocks = blocks(algorithm, centre.size)

    def at(self, rank: int) -> Seat:
        """Return the centre as one worker meets it.

        Raises:
            ValueError: there is no such worker.
        """
        if not 0 <= rank < self.workers:
            raise ValueError(f"rank {rank} of a centre for {self.workers} workers: give 0 to {self.workers - 1}.")
        return Seat(self, rank)

    def exchange(self, rank: int, local: Array, seen: Array, window: int, others: Array) -> int:
        """Meet worker ``rank``; ``local``, ``seen`` and ``others`` are changed in place."""
        algorithm, before = self.algorithm, self.algorithm.shows == "before"
        with self._lock:
            staleness = self.clock - self._met[rank]
            meeting = Meeting(1, staleness, rank)
            for part in self._blocks:
                old, held = self.centre[part], tuple(vector[part] for vector in self.memory)
                message = algorithm.propose(local[part], seen[part], window)
                new, memory = algorithm.merge(old, message, meeting, held)
                shown = old if before else new
                local[part] = algorithm.adopt(local[part], shown)
                if algorithm.uses_seen:
                    seen[part] = shown
                for view, vector in zip(held, memory, strict=True):
                    if vector is not view:
                        view[...] = vector
                self.centre[part] = new
            if others.size:
                self.others += (others - self.others) / self.workers
                others[...] = self.others
            self.clock += 1
            self._met[rank] = self.clock
        return staleness

    def read(self, out: Array, others: Array) -> int:
        """Copy the centre and the moving statistics out; returns the clock."""
        with self._lock:
            out[...], others[...] = self.centre, self.others
            return self.clock


class Seat:
    """One worker's way to a ``MemoryCentre``: what ``choros.transport.Centre`` asks for."""

    def __init__(self, centre: MemoryCentre, rank: int) -> None:
        self._centre, self._rank = centre, rank

    def exchange(self, local: Array, seen: Array, window: int, others: Array) -> int:
        """Propose, merge and adopt in one locked pass; returns the staleness."""
        return self._centre.exchange(self._rank, local, seen, window, others)

    def read(self, out: Array, others: Array) -> int:
        """Copy the centre out; returns the clock."""
        return self._centre.read(out, others)

    def close(self) -> None:
        """Hold nothing."""
