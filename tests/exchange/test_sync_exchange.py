from __future__ import annotations

import numpy as np
import pytest

from choros.algorithms import ADAG, ALL, DOWNPOUR, EASGD, Averaging, DiLoCo, ExchangeInfo, LocalSGD
from choros.comm.single_rank_group import SingleRankGroup
from choros.param_server.rule_blocks import BLOCK
from choros.training.worker.exchange import SyncExchange

SIZES = [1, 2, 3, 5]
EVERY = [kind().bound(3, 0.01) for kind in ALL] + [DOWNPOUR(adagrad=True)]
every = pytest.mark.parametrize("algorithm", EVERY, ids=repr)


class BeforeAndSeen(DOWNPOUR):
    """An algorithm that none of ours is: it looks at what it saw, and is shown the center before the merge."""

    shows = "before"


def by_hand(algorithm, size, start, drifts, rows):
    """The same meetings on whole float64 vectors, straight from the three functions."""
    center, memory = start, algorithm.start(start, size)
    local, seen = [start] * size, [start] * size
    for drift in drifts:
        local = [x + d for x, d in zip(local, drift, strict=True)]
        weights = rows if algorithm.weighted else [1] * size
        proposals = [algorithm.propose(x, s, 4) for x, s in zip(local, seen, strict=True)]
        mean = sum(w * m for w, m in zip(weights, proposals, strict=True)) / sum(weights)
        before = center
        center, memory = algorithm.merge(before, mean, ExchangeInfo(size), memory)
        shown = before if algorithm.shows == "before" else center
        local, seen = [algorithm.adopt(x, shown) for x in local], [shown] * size
    return center, local


def exchanges_of(algorithm, drifts, rows, start):
    def work(group):
        exchange, local = SyncExchange(algorithm, group, start.copy()), start.copy()
        for drift in drifts:
            local += drift[group.rank]
            exchange.run(local, window=4, rows=rows[group.rank])
        return exchange, local

    return work


@every
@pytest.mark.parametrize("size", SIZES)
def test_is_what_the_three_functions_say_and_bit_equal_everywhere(algorithm, size, ranks, rng):
    """On a vector of two blocks, the last one partial, in float64 and float32."""
    start, drifts = rng.normal(size=BLOCK + 7), rng.normal(size=(3, size, BLOCK + 7))
    rows = [5 + 3 * rank for rank in range(size)]
    want, local = by_hand(algorithm, size, start, drifts, rows)
    for dtype, tolerance in (("float64", 1e-12), ("float32", 2e-4)):
        done = ranks(size, exchanges_of(algorithm, drifts.astype(dtype), rows, start.astype(dtype)))
        for rank, (exchange, ours) in enumerate(done):
            np.testing.assert_array_equal(exchange.center, done[0][0].center)
            for vector, other in zip(exchange.memory, done[0][0].memory, strict=True):
                np.testing.assert_array_equal(vector, other)
            np.testing.assert_allclose(exchange.center, want, rtol=tolerance, atol=tolerance)
            np.testing.assert_allclose(ours, local[rank], rtol=tolerance, atol=tolerance)
            assert exchange.center.dtype == ours.dtype == np.dtype(dtype)
            assert exchange.exchanges == 3
            assert exchange.seconds > 0


@pytest.mark.parametrize("algorithm", [BeforeAndSeen(), EASGD(alpha=0.2), DOWNPOUR()], ids=repr)
def test_seen_is_what_was_shown(algorithm, ranks, rng):
    start, drifts = rng.normal(size=9), rng.normal(size=(4, 2, 9))
    want, local = by_hand(algorithm, 2, start, drifts, [1, 1])
    for rank, (exchange, ours) in enumerate(ranks(2, exchanges_of(algorithm, drifts, [1, 1], start))):
        np.testing.assert_allclose(exchange.center, want)
        np.testing.assert_allclose(ours, local[rank])


@pytest.mark.parametrize("algorithm", [LocalSGD(), Averaging()], ids=repr)
def test_a_rank_of_no_rows_counts_nothing(algorithm, ranks):
    """Even where what it holds is not finite; and it goes on from the mean."""
    values = [1.0, np.nan, 4.0]

    def work(group):
        exchange, local = SyncExchange(algorithm, group, np.zeros(3)), np.full(3, values[group.rank])
        exchange.run(local, window=4, rows=[10, 0, 20][group.rank])
        return exchange.center, local

    for center, local in ranks(3, work):
        np.testing.assert_allclose(center, 3.0)
        np.testing.assert_array_equal(local, center)


def test_where_none_had_a_row_nothing_changes(ranks):
    def work(group):
        exchange, local = SyncExchange(LocalSGD(), group, np.full(3, 7.0)), np.full(3, float(group.rank))
        exchange.run(local, window=4, rows=0)
        return exchange.center, local, exchange.exchanges

    for rank, (center, local, exchanges) in enumerate(ranks(3, work)):
        np.testing.assert_array_equal(center, 7.0)
        np.testing.assert_array_equal(local, float(rank))
        assert exchanges == 1


@pytest.mark.parametrize("algorithm", [EASGD(alpha=0.25), DiLoCo()], ids=repr)
def test_the_unweighted_count_every_worker_alike(algorithm, ranks):
    def work(group, rows):
        exchange, local = SyncExchange(algorithm, group, np.zeros(2)), np.full(2, 1.0 + group.rank)
        exchange.run(local, window=4, rows=rows[group.rank])
        return exchange.center

    uneven, even = ranks(2, lambda g: work(g, [0, 9])), ranks(2, lambda g: work(g, [5, 5]))
    np.testing.assert_array_equal(uneven[0], even[0])
    assert uneven[0].any()


def test_one_worker_keeps_its_vector_to_the_last_bit(rng):
    """Law 3: no weight is multiplied in and divided out again."""
    exchange, local = SyncExchange(LocalSGD(), SingleRankGroup(), np.zeros(1000, "float32")), rng.normal(size=1000)
    local = local.astype("float32")
    saved = local.copy()
    exchange.run(local, window=8, rows=77)
    np.testing.assert_array_equal(local, saved)
    np.testing.assert_array_equal(exchange.center, saved)


def test_the_center_is_the_callers_array_and_may_be_set(ranks):
    """Weights that a callback sets are a new center, from which the next contribution counts."""

    def work(group):
        center = np.zeros(2)
        exchange = SyncExchange(DOWNPOUR(), group, center)
        assert exchange.center is center
        exchange.center[:] = 10.0
        local = exchange.center + 1.0
        exchange.run(local, window=4, rows=1)
        return exchange.center

    for center in ranks(2, work):
        np.testing.assert_array_equal(center, 12.0)


@pytest.mark.parametrize(
    "algorithm", [DiLoCo(), DOWNPOUR(adagrad=True), ADAG(), EASGD(alpha=0.2), BeforeAndSeen()], ids=repr
)
def test_goes_on_from_a_state_as_if_nothing_had_been(algorithm, ranks, rng):
    start, drifts = rng.normal(size=6), rng.normal(size=(4, 2, 6))

    def work(group):
        exchange, local = SyncExchange(algorithm, group, start.copy()), start.copy()
        for turn, drift in enumerate(drifts):
            if turn == 2:
                state, other = exchange.state(), SyncExchange(algorithm, group, np.zeros(6))
                exchange.center[:] = np.nan  # a state is a copy
                other.restore(state)
                exchange = other
            local += drift[group.rank]
            exchange.run(local, window=4, rows=1)
        return exchange

    straight = ranks(2, exchanges_of(algorithm, drifts, [1, 1], start))
    for (plain, _), resumed in zip(straight, ranks(2, work), strict=True):
        np.testing.assert_array_equal(plain.center, resumed.center)
        assert resumed.exchanges == 4


def test_what_does_not_fit_is_refused():
    exchange = SyncExchange(LocalSGD(), SingleRankGroup(), np.zeros(3, "float32"))
    for wrong in (np.zeros(4, "float32"), np.zeros(3, "float64")):
        with pytest.raises(ValueError, match="rank 0: the vector has shape"):
            exchange.run(wrong, window=1, rows=1)


def test_the_weight_travels_in_the_slot(ranks):
    """[n_r x, n_r]: one sum, not two; the unweighted send no more than the vector."""

    def work(algorithm):
        def asked(group):
            exchange = SyncExchange(algorithm, group, np.zeros(5))
            exchange.run(np.ones(5), window=1, rows=2)
            return group.asked

        return asked

    assert ranks(2, work(LocalSGD())) == [[6], [6]]
    assert ranks(2, work(DiLoCo())) == [[5], [5]]


def test_no_temporary_is_as_large_as_the_model():
    import tracemalloc

    size = 40 * BLOCK
    exchange, local = (
        SyncExchange(EASGD(alpha=0.2), SingleRankGroup(), np.zeros(size, "float32")),
        np.ones(size, "float32"),
    )
    exchange.run(local, window=1, rows=1)  # the group's slot is made here
    tracemalloc.start()
    try:
        exchange.run(local, window=1, rows=1)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < local.nbytes / 4


@pytest.mark.parametrize("algorithm", [BeforeAndSeen(), DOWNPOUR()], ids=repr)
def test_a_center_that_was_set_is_what_all_saw_last(algorithm):
    exchange = SyncExchange(algorithm, SingleRankGroup(), np.zeros(2))
    exchange.replace(np.full(2, 3.0))
    exchange.run(np.full(2, 4.0), 1, 8)
    assert exchange.center.tolist() == [4.0, 4.0]
