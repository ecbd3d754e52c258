from __future__ import annotations

import threading

import numpy as np
import pytest

from choros.algorithms import ADAG, AEASGD, ALL, DOWNPOUR, DynSGD, ExchangeInfo, LocalSGD
from choros.param_server.rule_blocks import BLOCK
from choros.param_server.shared_memory import SharedMemoryParameterServer
from choros.training.worker.exchange import AsyncExchange, InMemoryParameterServer

WORKERS = 3
ORDER = [0, 1, 0, 2, 2, 1, 0, 0, 1, 2, 1, 0]  # a fixed asynchronous interleaving
EVERY = [kind().bound(WORKERS, 0.01) for kind in ALL] + [DOWNPOUR(adagrad=True), ADAG(eta=0.5)]
every = pytest.mark.parametrize("algorithm", EVERY, ids=repr)
NONE = np.zeros(0)


def by_hand(algorithm, start, drifts):
    center, memory = start, algorithm.start(start, WORKERS)
    local, seen, seen_clock = [start] * WORKERS, [start] * WORKERS, [0] * WORKERS
    for clock, (k, drift) in enumerate(zip(ORDER, drifts, strict=True)):
        local[k] = local[k] + drift
        before = center
        message = algorithm.propose(local[k], seen[k], 4)
        center, memory = algorithm.merge(before, message, ExchangeInfo(1, clock - seen_clock[k], k), memory)
        seen[k] = before if algorithm.shows == "before" else center
        local[k], seen_clock[k] = algorithm.adopt(local[k], seen[k]), clock + 1
    return center, local


def in_order(seats, start, drifts):
    workers, local = [AsyncExchange(seat, start.copy()) for seat in seats], [start.copy() for _ in seats]
    staleness = []
    for k, drift in zip(ORDER, drifts, strict=True):
        local[k] += drift
        staleness.append(workers[k].run(local[k], 4, np.zeros(0, start.dtype)))
    return workers, local, staleness


@every
@pytest.mark.parametrize("size", [5, BLOCK + 7])
def test_is_what_the_three_functions_say(algorithm, size, rng):
    start, drifts = rng.normal(size=size), rng.normal(size=(len(ORDER), size))
    want, want_local = by_hand(algorithm, start, drifts)
    center = InMemoryParameterServer(algorithm, start, WORKERS)
    _, local, _ = in_order([center.at(k) for k in range(WORKERS)], start, drifts)
    np.testing.assert_allclose(center.center, want, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(local, want_local, rtol=1e-12, atol=1e-12)


@every
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_shared_center_gives_the_same_bits(algorithm, dtype, rng):
    start = rng.normal(size=BLOCK + 7).astype(dtype)
    drifts = rng.normal(size=(len(ORDER), start.size)).astype(dtype)
    inside = InMemoryParameterServer(algorithm, start, WORKERS)
    _, ours, stale = in_order([inside.at(k) for k in range(WORKERS)], start, drifts)
    memory = algorithm.start(start, WORKERS)
    with SharedMemoryParameterServer.create(start, np.zeros(0, dtype), memory, WORKERS) as segment:
        seats = [SharedMemoryParameterServer(segment, algorithm, k, WORKERS) for k in range(WORKERS)]
        _, expected, stale_too = in_order(seats, start, drifts)
        out = np.empty_like(start)
        assert seats[0].read(out, np.zeros(0, dtype)) == len(ORDER)
    np.testing.assert_array_equal(out, inside.center)
    np.testing.assert_array_equal(expected, ours)
    assert stale == stale_too


def test_counts_exchanges_staleness_and_seconds(rng):
    center = InMemoryParameterServer(DynSGD(), np.zeros(2), WORKERS)
    workers, _, staleness = in_order([center.at(k) for k in range(WORKERS)], np.zeros(2), np.ones((len(ORDER), 2)))
    assert staleness == [0, 1, 1, 3, 0, 3, 3, 0, 2, 4, 1, 3]
    assert [w.exchanges for w in workers] == [ORDER.count(k) for k in range(WORKERS)]
    assert [w.staleness for w in workers] == [
        sum(s for s, o in zip(staleness, ORDER, strict=True) if o == k) for k in range(3)
    ]
    assert all(w.seconds > 0 for w in workers)
    assert center.clock == len(ORDER)


def test_threads_lose_nothing():
    """Law 2 under contention: four workers add whole numbers; the center has the sum of them all."""
    center, turns, size = InMemoryParameterServer(DOWNPOUR(), np.zeros(BLOCK + 3), 4), 50, BLOCK + 3
    workers = [AsyncExchange(center.at(k), np.zeros(size)) for k in range(4)]

    def work(k):
        local = np.zeros(size)
        for _ in range(turns):
            local += k + 1
            workers[k].run(local, 1, NONE)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    np.testing.assert_array_equal(center.center, turns * (1 + 2 + 3 + 4))
    assert center.clock == 4 * turns == sum(w.exchanges for w in workers)


def test_moving_statistics_are_averaged_at_each_meeting():
    """c <- c + (others - c) / p, and the worker goes on with c."""
    center = InMemoryParameterServer(AEASGD(alpha=0.3), np.zeros(1), 2, statistics=np.zeros(2))
    others = np.array([4.0, 8.0])
    AsyncExchange(center.at(1), np.zeros(1)).run(np.zeros(1), 1, others)
    np.testing.assert_array_equal(others, [2.0, 4.0])
    np.testing.assert_array_equal(center.statistics, [2.0, 4.0])


def test_read_copies_and_tells_the_clock():
    center = InMemoryParameterServer(DOWNPOUR(), np.zeros(2), 1, statistics=np.ones(1))
    seat = center.at(0)

    seat.exchange(np.ones(2), np.zeros(2), 1, np.ones(1))
    out, others = np.empty(2), np.empty(1)
    assert seat.read(out, others) == 1
    out[:] = 5.0
    np.testing.assert_array_equal(center.center, 1.0)
    np.testing.assert_array_equal(others, 1.0)
    seat.close()


def test_a_worker_goes_on_from_its_state(rng):
    start = rng.normal(size=3)
    center = InMemoryParameterServer(DOWNPOUR(), start, 1)
    exchange, local = AsyncExchange(center.at(0), start.copy()), start + 1.0
    exchange.run(local, 8, NONE)
    state = exchange.state()
    resumed = AsyncExchange(center.at(0), np.zeros(3))
    resumed.restore(state)
    exchange.seen[:] = np.nan  # a state is a copy
    local += 1.0
    resumed.run(local, 8, NONE)
    np.testing.assert_allclose(center.center, start + 2.0)
    assert resumed.exchanges == 2


def test_a_rank_that_is_none_is_refused():
    with pytest.raises(ValueError, match="give 0 to 1"):
        InMemoryParameterServer(LocalSGD(), np.zeros(1), 2).at(2)
