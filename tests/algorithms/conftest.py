"""Workers that exchange without a process, for tests of the algorithms."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from choros.algorithms import Algorithm, ExchangeInfo


@dataclass
class Simulation:
    """A center and its workers, which exchange by ``exchange(k)`` or ``exchange_all()``; whole vectors, any library."""

    algorithm: Algorithm
    start: Any
    workers: int
    local: list[Any] = field(init=False)
    staleness: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.center = self.start
        self.memory = self.algorithm.start(self.start, self.workers)
        self.local = [self.start] * self.workers
        self.seen = [self.start] * self.workers
        self.last = [0] * self.workers
        self.clock = 0
        self.staleness = []

    def exchange(self, k: int, window: int = 1) -> None:
        message = self.algorithm.propose(self.local[k], self.seen[k], window)
        info = ExchangeInfo(1, self.clock - self.last[k], k)
        self.staleness.append(info.staleness)
        self._merge(message, info, [k])
        self.clock += 1
        self.last[k] = self.clock

    def exchange_all(self, window: int = 1, rows: list[int] | None = None) -> None:
        weights = rows if rows is not None and self.algorithm.weighted else [1] * self.workers
        proposals = [self.algorithm.propose(x, s, window) for x, s in zip(self.local, self.seen, strict=True)]
        message = sum(n * m for n, m in zip(weights, proposals, strict=True)) / sum(weights)
        self._merge(message, ExchangeInfo(self.workers), list(range(self.workers)))

    def _merge(self, message: Any, info: ExchangeInfo, members: list[int]) -> None:
        before = self.center
        self.center, self.memory = self.algorithm.merge(before, message, info, self.memory)
        shown = before if self.algorithm.shows == "before" else self.center
        for k in members:
            self.local[k], self.seen[k] = self.algorithm.adopt(self.local[k], shown), shown


@pytest.fixture
def simulation() -> type[Simulation]:
    return Simulation


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)
