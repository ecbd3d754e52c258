"""Every row once an epoch, none twice: for any rows, batch and number of ranks."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from choros.data.permutation import permutation
from choros.data.sharding import pieces, share, visits

SIZES = (1, 2, 3, 4, 5, 7, 9)


@pytest.mark.parametrize("size", SIZES)
def test_shares_are_contiguous_whole_and_even(size):
    for n in range(40):
        parts = [share(n, rank, size) for rank in range(size)]
        assert [i for part in parts for i in range(n)[part]] == list(range(n))
        lengths = [part.stop - part.start for part in parts]
        assert max(lengths) - min(lengths) <= 1
        assert lengths == sorted(lengths, reverse=True)  # the first ranks have the row more


def _all(rows, size, batch_size, epoch=0, steps=None):
    return [
        list(pieces(rows, rank=rank, size=size, batch_size=batch_size, epoch=epoch, steps=steps))
        for rank in range(size)
    ]


@given(rows=st.integers(1, 200), batch_size=st.integers(1, 70), size=st.integers(1, 12), epoch=st.integers(0, 3))
def test_every_row_once_and_the_ranks_pieces_make_the_global_batch(rows, batch_size, size, epoch):
    ranks = _all(rows, size, batch_size, epoch)
    assert {len(parts) for parts in ranks} == {-(-rows // batch_size)}
    seen = []
    for i, step in enumerate(zip(*ranks, strict=True)):
        expected = list(range(rows))[i * batch_size : (i + 1) * batch_size]
        assert [row for piece in step for row in range(piece.start, piece.stop)] == expected
        lengths = [piece.stop - piece.start for piece in step]
        assert max(lengths) - min(lengths) <= 1
        assert {(piece.total, piece.turn) for piece in step} == {(len(expected), epoch)}
        seen += expected
    assert seen == list(range(rows))
    for parts in ranks:  # each length is a program that JAX compiles
        assert len({piece.stop - piece.start for piece in parts}) <= 2


@given(
    rows=st.integers(1, 60),
    batch_size=st.integers(1, 20),
    size=st.integers(1, 6),
    steps=st.integers(1, 11),
    epochs=st.integers(1, 12),
)
def test_steps_continue_where_the_last_epoch_stopped_so_no_row_is_forgotten(rows, batch_size, size, steps, epochs):
    in_a_pass = -(-rows // batch_size)
    seen = np.zeros((epochs * steps // in_a_pass + 1, rows), int)
    for epoch in range(epochs):
        ranks = _all(rows, size, batch_size, epoch, steps)
        assert {len(parts) for parts in ranks} == {steps}
        for piece in itertools.chain(*ranks):
            seen[piece.turn, piece.start : piece.stop] += 1
    assert seen.max() == 1
    assert (seen[: epochs * steps // in_a_pass] == 1).all()


@given(rows=st.integers(1, 60), batch_size=st.integers(1, 20), size=st.integers(1, 6), first=st.integers(0, 60))
def test_a_run_cut_short_after_any_batch_has_trained_whole_global_batches(rows, batch_size, size, first):
    ranks = _all(rows, size, batch_size)
    begun, rest = (
        [row for parts in ranks for piece in parts[part] for row in range(piece.start, piece.stop)]
        for part in (slice(first), slice(first, None))
    )
    assert sorted(begun) == list(range(min(rows, first * batch_size)))
    assert sorted(begun + rest) == list(range(rows))


def test_a_batch_that_does_not_divide_is_dealt_out_whole():
    assert [[p.stop - p.start for p in parts] for parts in _all(14, 4, 7)] == [[2, 2], [2, 2], [2, 2], [1, 1]]


def test_one_pass_of_steps_is_the_epoch_without_steps():
    assert _all(10, 3, 4, epoch=2, steps=3) == _all(10, 3, 4, epoch=2)


def test_fewer_rows_than_workers():
    assert [[piece.stop - piece.start for piece in parts] for parts in _all(2, 4, 8)] == [[1], [1], [0], [0]]


def test_an_endless_pass_needs_steps():
    assert list(visits(None, epoch=2, steps=2)) == [(0, 4), (0, 5)]
    with pytest.raises(ValueError, match="needs steps"):
        list(visits(None, epoch=0, steps=None))


PINNED = {
    (8, 1, 0): [2, 4, 7, 5, 0, 6, 3, 1],
    (10, 0, 0): [3, 2, 1, 8, 6, 0, 7, 4, 5, 9],
    (10, 0, 1): [7, 4, 5, 1, 9, 8, 6, 2, 0, 3],
    (10, 7, 3): [2, 4, 7, 3, 5, 1, 8, 9, 0, 6],
}


@pytest.mark.parametrize(("key", "expected"), PINNED.items())
def test_the_order_never_changes(key, expected):
    rows, seed, epoch = key
    assert permutation(rows, seed, epoch).tolist() == expected


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 64, 65, 1000, 4096])
def test_the_order_is_a_permutation_and_differs_by_seed_and_epoch(rows):
    order = permutation(rows, 5, 2)
    assert order.dtype == np.int64
    assert sorted(order.tolist()) == list(range(rows))
    assert permutation(rows, 5, 2, shuffle=False).tolist() == list(range(rows))
    if rows > 60:
        assert order.tolist() != permutation(rows, 5, 3).tolist()
        assert order.tolist() != permutation(rows, 6, 2).tolist()


def test_the_order_is_uniform():
    first = np.bincount([permutation(5, seed, 0)[0] for seed in range(2000)], minlength=5)
    assert abs(first - 400).max() < 5 * np.sqrt(400)  # five deviations; the seeds are fixed
