"""Every row once an epoch, none twice: for any rows, batch, number of ranks, together and alone."""

import itertools

import numpy as np
import pytest

from choros.data.division import pieces, share, visits
from choros.data.order import permutation

ROWS = (1, 2, 3, 5, 7, 8, 16, 17, 31, 100)
BATCHES = (1, 2, 3, 4, 7, 8, 16, 33, 128)
SIZES = (1, 2, 3, 4, 5, 7, 9)


@pytest.mark.parametrize("size", SIZES)
def test_shares_are_contiguous_whole_and_even(size):
    for n in range(40):
        parts = [share(n, rank, size) for rank in range(size)]
        assert [i for part in parts for i in range(n)[part]] == list(range(n))
        lengths = [part.stop - part.start for part in parts]
        assert max(lengths) - min(lengths) <= 1
        assert lengths == sorted(lengths, reverse=True)  # the first ranks have the row more


def _all(rows, size, together, batch_size, epoch=0, steps=None):
    return [
        list(pieces(rows, rank=r, size=size, together=together, batch_size=batch_size, epoch=epoch, steps=steps))
        for r in range(size)
    ]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("epoch", [0, 3])
def test_together_every_row_once_and_the_ranks_batches_make_the_global_one(size, epoch):
    for rows, batch_size in itertools.product(ROWS, BATCHES):
        ranks = _all(rows, size, True, batch_size, epoch)
        assert {len(parts) for parts in ranks} == {-(-rows // batch_size)}
        seen = []
        for i, step in enumerate(zip(*ranks, strict=True)):
            expected = list(range(rows))[i * batch_size : (i + 1) * batch_size]
            assert [row for piece in step for row in range(piece.start, piece.stop)] == expected
            assert {piece.total for piece in step} == {len(expected)}
            assert {piece.turn for piece in step} == {epoch}
            seen += expected
        assert seen == list(range(rows))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("epoch", [0, 3])
def test_alone_every_row_once_and_own_batch_i_goes_to_worker_i_mod_size(size, epoch):
    for rows, batch_size in itertools.product(ROWS, BATCHES):
        if batch_size < size:
            continue
        own = batch_size // size
        ranks = _all(rows, size, False, batch_size, epoch)
        dealt = {}
        for rank, parts in enumerate(ranks):
            for k, piece in enumerate(parts):
                dealt[rank + k * size] = piece
                assert piece.total == piece.stop - piece.start >= 1
                assert piece.turn == epoch
        assert sorted(dealt) == list(range(-(-rows // own)))
        for i, piece in dealt.items():
            assert (piece.start, piece.stop) == (i * own, min((i + 1) * own, rows))


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("steps", [1, 2, 3, 5, 11])
def test_steps_go_on_where_the_last_epoch_stopped_so_no_row_is_forgotten(together, steps):
    rows, size, batch_size, epochs = 10, 2, 4, 30
    seen = np.zeros((1000, rows), int)
    for epoch in range(epochs):
        ranks = _all(rows, size, together, batch_size, epoch, steps)
        assert [len(parts) for parts in ranks] == [steps, steps]
        for piece in itertools.chain(*ranks):
            seen[piece.turn, piece.start : piece.stop] += 1
    assert seen.max() == 1
    own = batch_size if together else batch_size // size
    whole = epochs * steps * (1 if together else size) // -(-rows // own)
    assert (seen[:whole] == 1).all()


def test_one_pass_of_steps_is_the_epoch_without_steps():
    assert _all(10, 3, True, 4, epoch=2, steps=3) == _all(10, 3, True, 4, epoch=2)


def test_fewer_rows_than_workers():
    together = _all(2, 4, True, 8)
    assert [[piece.stop - piece.start for piece in parts] for parts in together] == [[1], [1], [0], [0]]
    alone = _all(2, 4, False, 8)
    assert [[piece[1:] for piece in parts] for parts in alone] == [[(0, 2, 2)], [], [], []]


def test_an_endless_pass_needs_steps():
    assert list(visits(None, epoch=2, first=1, stride=2, steps=4)) == [(0, 9), (0, 11)]
    with pytest.raises(ValueError, match="needs steps"):
        list(visits(None, epoch=0, first=0, stride=1, steps=None))


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
