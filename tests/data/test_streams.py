"""Sources of batches: each batch is divided, the order is kept, the end is detected."""

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from choros.data import ArraySource, StreamSource, files, make_source, make_validation, prefetch
from choros.data.conversion import is_stream
from choros.data.validation import check
from choros.errors import InvalidDataError

X, Y = np.arange(20, dtype="float32").reshape(10, 2), np.arange(10)


def batches(size=4):
    for top in range(0, 10, size):
        yield X[top : top + size], Y[top : top + size]


def loader(size=4):
    return DataLoader(TensorDataset(torch.tensor(X), torch.tensor(Y)), batch_size=size)


def epoch(source, rank=0, size=1, synchronous=True, steps=None):
    how = dict(rank=rank, size=size, synchronous=synchronous, batch_size=0, seed=0, epoch=0, shuffle=True, steps=steps)
    return [(b.y if b.y is None else b.y.tolist(), b.rows, b.total) for b in source.epoch(**how)]


def test_each_batch_is_divided_in_order():
    both = [epoch(StreamSource(batches()), rank, 2) for rank in range(2)]
    assert both[0] == [([0, 1], 2, 4), ([4, 5], 2, 4), ([8], 1, 2)]
    assert both[1] == [([2, 3], 2, 4), ([6, 7], 2, 4), ([9], 1, 2)]
    third = epoch(StreamSource(batches()), 2, 3)
    assert third[-1] == (None, 0, 2)


def test_asynchronous_ranks_have_the_same_shares():
    for rank in range(3):
        assert epoch(StreamSource(batches()), rank, 3, synchronous=False) == epoch(StreamSource(batches()), rank, 3)


@pytest.mark.parametrize("make", [batches, loader])
def test_the_sample_is_trained_too(make):
    source = make_source(make())
    np.testing.assert_array_equal(source.sample(2).x, X[:4])
    assert [rows for _, rows, _ in epoch(source)] == [4, 4, 2]


def test_what_can_be_iterated_again_is_for_each_epoch_and_goes_on_within_steps():
    source = StreamSource(loader())
    assert source.steps() == 3
    assert epoch(source) == epoch(source)
    assert [y for y, _, _ in epoch(source, steps=2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [y for y, _, _ in epoch(source, steps=2)] == [[8, 9], [0, 1, 2, 3]]


def test_a_generator_goes_on_and_its_end_is_an_error_where_steps_were_asked_for():
    source = StreamSource(batches())
    assert source.steps() is None
    assert len(epoch(source, steps=2)) == 2
    with pytest.raises(
        InvalidDataError, match="A generator ended after 3 batches, in the middle of an epoch of 2 steps"
    ):
        epoch(source, steps=2)
    with pytest.raises(
        InvalidDataError, match="can be gone through once, and 2 epochs were asked for: give steps_per_epoch"
    ):
        StreamSource(batches()).check(2, None)
    import tensorflow as tf

    endless = StreamSource(tf.data.Dataset.from_tensors((X, Y)).repeat())
    with pytest.raises(InvalidDataError, match="without an end was given: give steps_per_epoch"):
        endless.check(1, None)
    endless.check(1, 3)
    StreamSource(batches()).check(1, None)
    StreamSource(batches()).check(2, 5)


def test_validation_is_read_once_as_arrays():
    source = make_validation(loader(3), None)
    assert isinstance(source, ArraySource)
    np.testing.assert_array_equal(source.x, X)
    np.testing.assert_array_equal(make_validation(batches(3), 2).y, Y[:6])
    with pytest.raises(InvalidDataError, match="do not make one array"):
        make_validation((np.ones((2, n)), np.ones(2)) for n in (3, 4))


class Bad(IterableDataset):
    def __iter__(self):
        yield {"a": 1}


@pytest.mark.parametrize(
    ("stream", "message"),
    [
        (iter([]), "yields no batch"),
        (iter([3]), "batch 1 of the list_iterator given as x is of type int: yield"),
        (iter([(X, Y[:3])]), "In batch 1 .*: x has 10 rows and y has 3"),
        (range(3), "batch 1 of the range given as x is of type int"),
    ],
)
def test_malformed_batches(stream, message):
    with pytest.raises(InvalidDataError, match=message):
        make_source(stream).sample(1)


def test_what_goes_beside_a_stream():
    check(batches(), batch_size=1)
    with pytest.raises(InvalidDataError, match="y was given beside a generator: let it have y instead"):
        check(batches(), Y)
    with pytest.raises(InvalidDataError, match="validation_split cannot cut a DataLoader"):
        check(loader(), validation_split=0.2)
    weights = make_source(batches(), class_weight={1: 5.0}).sample(4).sample_weight
    assert weights.tolist() == [1, 5, 1, 1]
    for no in ([1, 2], {"a": 1}, "text", X, torch.ones(2), torch.utils.data.DataLoader):
        assert not is_stream(no)


def test_what_can_be_indexed_says_so(tmp_path):
    np.save(tmp_path / "x.npy", np.zeros((4, 2)))
    (tmp_path / "a.csv").write_text("a,b\n1,2\n")
    stream = iter([(np.ones(2),)])
    inputs = [np.zeros(3), np.load(tmp_path / "x.npy", mmap_mode="r"), files(tmp_path / "a.csv"), prefetch(np.zeros(3))]
    assert [make_source(result).indexed for result in inputs] == [True] * 4
    assert not make_source(prefetch(stream)).indexed


def test_grain(tmp_path):
    """Its three kinds of data sets, each gone through once an epoch."""
    import grain
    from grain.python import Batch as InBatches
    from grain.python import DataLoader as GrainLoader
    from grain.python import IndexSampler, NoSharding

    class Rows:
        def __len__(self):
            return 10

        def __getitem__(self, i):
            return X[i], Y[i]

    rows = grain.MapDataset.source(Rows()).batch(4)
    sampler = IndexSampler(10, shuffle=False, num_epochs=1, shard_options=NoSharding())
    values = GrainLoader(data_source=Rows(), sampler=sampler, operations=[InBatches(4)], worker_count=0)
    for data in (rows, rows.to_iter_dataset(), values):
        source = make_source(data)
        assert not source.indexed
        for _ in range(2):
            assert epoch(source) == [([0, 1, 2, 3], 4, 4), ([4, 5, 6, 7], 4, 4), ([8, 9], 2, 2)]
        assert epoch(source, rank=1, size=2) == [([2, 3], 2, 4), ([6, 7], 2, 4), ([9], 1, 2)]


def test_steps_may_be_all_batches_of_a_pass():
    """The next epoch then begins the next pass, whose first batch tells that the last one was over."""
    source = make_source(loader())
    for _ in range(3):
        assert epoch(source, steps=3) == [([0, 1, 2, 3], 4, 4), ([4, 5, 6, 7], 4, 4), ([8, 9], 2, 2)]
    with pytest.raises(InvalidDataError, match="ended after 3 batches, in the middle of an epoch of 4 steps"):
        epoch(make_source(batches()), steps=4)
