"""Rows that ranks hold themselves: every one is trained once an epoch, however unevenly they are held."""

import itertools

import numpy as np
import pytest

from choros.data import ArraySource, PartitionedSource
from choros.data.partitioned_source import template

COUNTS = [[5, 3], [10, 10], [1, 0, 30], [7, 0, 0, 1], [64, 63, 65], [2, 100]]


def ranks(counts):
    starts = np.concatenate([[0], np.cumsum(counts)])
    first = template(np.zeros((2, 1)), np.zeros(2))
    values = [
        ArraySource(np.arange(a, b)[:, None], np.arange(a, b)) if b > a else None for a, b in itertools.pairwise(starts)
    ]
    return [PartitionedSource(value, counts, first) for value in values]


def epoch(source, rank, size, synchronous, batch_size, epoch=0, shuffle=True, steps=None, seed=1):
    how = {"batch_size": batch_size, "seed": seed, "epoch": epoch, "shuffle": shuffle, "steps": steps}
    return list(source.epoch(rank=rank, size=size, synchronous=synchronous, **how))


@pytest.mark.parametrize("synchronous", [True, False])
@pytest.mark.parametrize("batch_size", [4, 8, 50, 1000])
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_every_row_once_an_epoch(counts, batch_size, synchronous):
    sources, size = ranks(counts), len(counts)
    for number in range(2):
        each = [epoch(source, rank, size, synchronous, batch_size, number) for rank, source in enumerate(sources)]
        seen = [int(y) for batches in each for batch in batches if batch.rows for y in batch.y]
        assert sorted(seen) == list(range(sum(counts)))
        assert {len(batches) for batches in each} == {-(-sum(counts) // batch_size)}
        for step in zip(*each, strict=True):
            rows = sum(batch.rows for batch in step)
            assert {batch.total for batch in step} == {rows}
            assert rows <= batch_size + size - 1
        for batches in each:
            assert len({batch.rows for batch in batches}) <= 2


def test_orders_differ_by_epoch_by_rank_and_by_seed_and_are_repeatable():
    sources = ranks([50, 50])

    def order(rank, number, seed):
        return [int(y) % 50 for batch in epoch(sources[rank], rank, 2, True, 20, number, seed=seed) for y in batch.y]

    orders = [order(rank, number, seed) for rank in (0, 1) for number in (0, 1) for seed in (1, 2)]
    assert len({tuple(result) for result in orders}) == 8
    assert order(1, 1, 2) == order(1, 1, 2)


@pytest.mark.parametrize("synchronous", [True, False])
def test_an_epoch_of_fewer_steps_goes_on_where_the_last_one_stopped(synchronous):
    sources = ranks([12, 8])
    for rank, source in enumerate(sources):
        complete = [int(y) for batch in epoch(source, rank, 2, synchronous, 4, shuffle=False) for y in batch.y]
        parts = [epoch(source, rank, 2, synchronous, 4, number, False, 2) for number in range(4)]
        results = [int(y) for batches in parts for batch in batches for y in batch.y]
        assert results[: len(complete)] == complete[: len(results)]
