"""A PyDataset as a source: batches divided or dealt out, hooks called alike on all ranks, no thread left."""

import random
import threading

import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from choros.data import PyDatasetSource, make_source
from choros.data.conversion import is_py_dataset
from choros.data.permutation import permutation
from choros.data.validation import check, split, unpack
from choros.errors import InvalidDataError


class Rows(keras.utils.PyDataset):
    """Ten rows in batches of four; y is the row's number."""

    def __init__(self, rows=10, batch=4, **kwargs):
        super().__init__(**kwargs)
        self.order = np.arange(rows)
        self.batch = batch
        self.events = []

    def __len__(self):
        return -(-len(self.order) // self.batch)

    def __getitem__(self, index):
        y = self.order[index * self.batch : (index + 1) * self.batch]
        return np.stack([y, y], 1).astype("float64"), y

    def on_epoch_begin(self):
        self.events.append("begin")

    def on_epoch_end(self):
        self.events.append("end")


class Endless(Rows):
    num_batches = None

    def __getitem__(self, index):
        return np.full((2, 1), index), np.full(2, index)


def _epoch(source, rank, size, synchronous, epoch=0, shuffle=False, **more):
    return list(
        source.epoch(rank=rank, size=size, synchronous=synchronous, seed=5, epoch=epoch, shuffle=shuffle, **more)
    )


def test_a_py_dataset_is_recognised_without_importing_keras():
    assert is_py_dataset(Rows())
    assert not is_py_dataset(Rows)
    assert not is_py_dataset([1])
    assert isinstance(make_source(Rows()), PyDatasetSource)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_together_the_shares_of_the_ranks_are_the_batch(size, shuffle, threads):
    before = threading.active_count()
    ranks = [_epoch(PyDatasetSource(Rows(workers=threads)), r, size, True, 2, shuffle) for r in range(size)]
    order = permutation(3, 5, 2, shuffle)
    expected = [np.arange(10)[i * 4 : i * 4 + 4].tolist() for i in order]
    joined = [[v for b in step if b.rows for v in b.y.tolist()] for step in zip(*ranks, strict=True)]
    assert joined == expected
    for batches in ranks:
        assert [batch.total for batch in batches] == [len(rows) for rows in expected]
        for batch in batches:
            assert (batch.x is None) == (batch.rows == 0)
            assert batch.x is None or batch.x.dtype == np.float32
    assert threading.active_count() == before


class Counted(Rows):
    """Counts how often each batch is read."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.reads = []

    def __getitem__(self, index):
        self.reads.append(index)
        return super().__getitem__(index)


@given(
    rows=st.integers(1, 90),
    batch=st.integers(1, 13),
    size=st.integers(1, 6),
    threads=st.sampled_from([1, 3]),
    steps=st.none() | st.integers(1, 20),
    shuffle=st.booleans(),
    synchronous=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_every_rank_has_a_share_of_the_size_of_arrays_in_every_step(
    rows, batch, size, threads, steps, shuffle, synchronous
):
    sources = [PyDatasetSource(Counted(rows, batch, workers=threads)) for _ in range(size)]
    ranks = [_epoch(source, r, size, synchronous, 1, shuffle, steps=steps) for r, source in enumerate(sources)]
    count = -(-rows // batch)
    length = count if steps is None else steps
    assert {len(batches) for batches in ranks} == {length}
    for batches in ranks:
        for part in batches:
            assert part.total // size <= part.rows <= -(-part.total // size)
            assert part.rows == (0 if part.y is None else len(part.y))
    seen = sorted(v for batches in ranks for part in batches if part.rows for v in part.y)
    wanted = [
        order[i % count] for i in range(length, 2 * length) for order in [permutation(count, 5, i // count, shuffle)]
    ]
    assert seen == sorted(v for i in wanted for v in range(i * batch, min(rows, (i + 1) * batch)))
    reads = sorted(index for source in sources for index in source.dataset.reads)
    if synchronous:
        assert reads == sorted(wanted * size)
    else:  # each batch once, but those at the end that cannot be dealt out evenly
        assert len(reads) == length + (length % size) * (size - 1)


def test_a_member_of_an_ensemble_has_batches_as_it_has_them_of_arrays():
    members = [PyDatasetSource(Rows(35, 7)).part(rank, 2, 0) for rank in range(2)]
    sizes = [[part.rows for part in _epoch(member, 0, 1, True)] for member in members]
    assert sizes == [[4, 3] * 3, [4, 3] * 2]
    rows = [v for member in members for part in _epoch(member, 0, 1, True, steps=4) for v in part.y]
    assert sorted(rows) == list(range(28))  # an epoch of four steps: two batches each


def test_hooks_are_called_once_an_epoch_also_when_it_is_given_up():
    source = PyDatasetSource(Rows(workers=2))
    _epoch(source, 0, 1, True)
    stream = source.epoch(rank=0, size=1, synchronous=True, seed=0, epoch=1, shuffle=False)
    next(stream)
    stream.close()
    assert source.dataset.events == ["end", *["begin", "end"] * 2]  # Keras calls it before the first epoch, too
    assert not [t for t in threading.enumerate() if t.name.startswith("choros-data")]


def test_a_dataset_that_shuffles_itself_does_so_alike_on_all_ranks():
    class Shuffled(Rows):
        def on_epoch_end(self):
            np.random.shuffle(self.order)
            other = self.order.tolist()
            random.shuffle(other)
            self.order = np.array(other)

    sources = [PyDatasetSource(Shuffled()) for _ in range(2)]
    orders = []
    for rank, source in enumerate(sources):
        np.random.seed(rank)
        random.seed(rank)
        _epoch(source, rank, 2, True, epoch=0)
        untouched = np.random.RandomState(rank).rand(), random.Random(rank).random()
        assert (np.random.rand(), random.random()) == untouched
        orders.append(source.dataset.order.tolist())
    assert orders[0] == orders[1] != list(range(10))
    _epoch(sources[0], 0, 2, True, epoch=1)
    assert sources[0].dataset.order.tolist() != orders[1]


def test_a_dataset_without_end_needs_steps_and_goes_on():
    source = PyDatasetSource(Endless())
    assert source.steps() is None
    with pytest.raises(InvalidDataError, match=r"Endless has no end .* give steps_per_epoch"):
        _epoch(source, 0, 1, True)
    assert [int(b.y[0]) for b in _epoch(source, 0, 1, True, epoch=2, shuffle=True, steps=3)] == [6, 7, 8]
    assert [int(b.y[0]) for b in _epoch(source, 1, 2, False, epoch=0, steps=5)] == [1, 1, 3, 3, 4]


def test_steps_continue_in_the_next_pass():
    source = PyDatasetSource(Rows())
    first = [int(b.y[0]) // 4 for b in _epoch(source, 0, 1, True, epoch=0, steps=2)]
    second = [int(b.y[0]) // 4 for b in _epoch(source, 0, 1, True, epoch=1, steps=2)]
    assert first + second == [0, 1, 2, 0]


def test_class_weights_and_one_weight_for_all_outputs():
    source = make_source(Rows(), class_weight={1: 3.0})
    assert source.sample().sample_weight.tolist() == [1.0, 3.0, 1.0, 1.0]

    class Two(Rows):
        def __getitem__(self, index):
            x, y = super().__getitem__(index)
            return {"in": x}, {"a": y, "b": y}, np.ones(len(y))

    batch = _epoch(PyDatasetSource(Two()), 1, 3, True)[0]
    assert batch.x["in"].shape == (1, 2)
    assert batch.sample_weight["a"].tolist() == batch.sample_weight["b"].tolist() == [1.0]


@pytest.mark.parametrize("batch", [np.ones((2, 3)), {"a": np.ones((2, 3))}, (np.ones((2, 3)),), [np.ones((2, 3))]])
def test_batches_of_inputs_only(batch):
    class Inputs(Rows):
        def __getitem__(self, index):
            return batch

    sample = PyDatasetSource(Inputs()).sample()
    assert (sample.rows, sample.y, sample.sample_weight) == (2, None, None)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (None, "batch 0 of Odd is of type NoneType"),
        ((1, 2, 3, 4), "batch 0 of Odd is of type tuple"),
        ((np.ones(3), np.ones(2)), "In batch 0 of Odd: x has 3 rows and y has 2"),
        ((np.array(["2026-01-01"], "datetime64[D]"), None), "x of batch 0 of Odd holds datetime64"),
    ],
)
def test_a_malformed_batch_is_named(batch, message):
    class Odd(Rows):
        def __getitem__(self, index):
            return batch

    with pytest.raises(InvalidDataError, match=message):
        PyDatasetSource(Odd()).sample()


def test_what_does_not_go_with_a_py_dataset_is_refused():
    with pytest.raises(InvalidDataError, match="y was given beside a Rows"):
        make_source(Rows(), np.ones(10))
    with pytest.raises(InvalidDataError, match="sample_weight was given beside a Rows"):
        check(Rows(), None, np.ones(10))
    with pytest.raises(InvalidDataError, match="validation_split cannot cut a PyDataset"):
        check(Rows(), validation_split=0.5)
    with pytest.raises(InvalidDataError, match="validation_split cannot cut a PyDataset"):
        split(Rows(), None, None, 0.5)
    with pytest.raises(InvalidDataError, match="Rows has no batches"):
        make_source(Rows(rows=0))
    with pytest.raises(InvalidDataError, match=r"give a keras\.utils.PyDataset"):
        PyDatasetSource(np.ones(3))
    dataset = Rows()
    assert unpack(dataset) == (dataset, None, None)
