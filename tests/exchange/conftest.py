"""A group of threads: what ``choros.comm.group.Group`` asks for, with a barrier and a list."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

LIMIT = 20.0


class Shared:
    def __init__(self, size: int) -> None:
        self.size, self.slots = size, [np.zeros(0)] * size
        self.barrier = threading.Barrier(size, timeout=LIMIT)


class ThreadGroup:
    """One thread's place in the group. The result is read-only and is torn up by the next call."""

    def __init__(self, shared: Shared, rank: int) -> None:
        self.shared, self.rank, self.size = shared, rank, shared.size
        self.asked: list[int] = []
        self.result = np.zeros(0)

    def slot(self, count: int, dtype: Any) -> np.ndarray:
        self.asked.append(count)
        self.shared.slots[self.rank] = np.full(count, np.nan, dtype)
        return self.shared.slots[self.rank]

    def sum_slots(self, count: int, dtype: Any) -> np.ndarray:
        if self.result.size:
            self.result.flags.writeable = True
            self.result[:] = np.nan
        self.shared.barrier.wait()
        assert {(len(s), s.dtype) for s in self.shared.slots} == {(count, np.dtype(dtype))}
        total = self.shared.slots[0].copy()
        for slot in self.shared.slots[1:]:
            total += slot
        self.shared.barrier.wait()
        total.flags.writeable = False
        self.result = total
        return total


def run_ranks(size: int, work: Callable[[ThreadGroup], Any]) -> list[Any]:
    """Run ``work(group)`` in ``size`` threads; return what each gave, or raise what the first to fail raised."""
    shared, results, errors = Shared(size), [None] * size, []

    def run(rank: int) -> None:
        try:
            results[rank] = work(ThreadGroup(shared, rank))
        except BaseException as error:
            errors.append(error)
            shared.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
    for error in errors:
        if not isinstance(error, threading.BrokenBarrierError):
            raise error
    assert not errors
    return results


@pytest.fixture
def ranks() -> Callable[[int, Callable[[ThreadGroup], Any]], list[Any]]:
    return run_ranks


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(11)
