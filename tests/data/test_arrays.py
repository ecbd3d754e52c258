"""Arrays as a source: nested structures, any library's arrays, dtypes as in Keras, rows exactly divided."""

import itertools

import numpy as np
import pytest

from choros.data import ArraySource, make_source
from choros.data.permutation import permutation
from choros.errors import InvalidDataError

KW = {"seed": 3, "shuffle": True}


def _epoch(source, rank, size, synchronous, batch_size=4, epoch=0, **more):
    return list(
        source.epoch(
            rank=rank, size=size, synchronous=synchronous, batch_size=batch_size, epoch=epoch, **{**KW, **more}
        )
    )


@pytest.mark.parametrize("synchronous", [True, False])
@pytest.mark.parametrize("shuffle", [True, False])
def test_all_ranks_together_train_each_row_once_with_its_own_label_and_weight(synchronous, shuffle):
    for rows, size, batch_size in itertools.product((1, 3, 10, 23), (1, 2, 3, 5), (5, 8)):
        x = np.arange(rows * 2, dtype="float32").reshape(rows, 2)
        source = ArraySource(x, np.arange(rows), np.arange(rows) / 2)
        for epoch in range(2):
            seen = []
            for rank in range(size):
                for batch in _epoch(source, rank, size, synchronous, batch_size, epoch, shuffle=shuffle):
                    if batch.rows == 0:
                        assert batch.x is batch.y is batch.sample_weight is None
                        continue
                    assert len(batch.x) == len(batch.y) == batch.rows
                    np.testing.assert_array_equal(batch.x, x[batch.y])
                    np.testing.assert_array_equal(batch.sample_weight, (batch.y / 2).astype("float32"))
                    seen += batch.y.tolist()
            assert sorted(seen) == list(range(rows))


def test_together_the_ranks_make_the_batches_that_one_process_has():
    source = ArraySource(np.arange(11))
    first = [batch.x.tolist() for batch in _epoch(source, 0, 1, True)]
    order = permutation(11, 3, 0).tolist()
    assert first == [order[:4], order[4:8], order[8:]]
    for size in (2, 3, 5):
        ranks = [_epoch(source, rank, size, True) for rank in range(size)]
        joined = [[v for b in step if b.rows for v in b.x.tolist()] for step in zip(*ranks, strict=True)]
        assert joined == first
        assert [batch.total for batch in ranks[-1]] == [4, 4, 3]


def test_steps_beyond_one_pass_take_the_next_permutation():
    source = ArraySource(np.arange(8))
    batches = [batch.x.tolist() for batch in _epoch(source, 0, 1, True, steps=3)]
    first, second = permutation(8, 3, 0).tolist(), permutation(8, 3, 1).tolist()
    assert batches == [first[:4], first[4:], second[:4]]
    assert _epoch(source, 0, 1, True, epoch=1, steps=3)[0].x.tolist() == second[4:]


def test_nested_structures_keep_their_containers_order_and_gaps():
    a, b, c = np.arange(6.0), np.arange(12).reshape(6, 2), np.arange(6, dtype="uint8")
    source = ArraySource({"z": a, "a": [b, None]}, (c, {"t": a}))
    batch = _epoch(source, 1, 2, True)[0]
    assert list(batch.x) == ["z", "a"]
    assert isinstance(batch.x["a"], list)
    assert batch.x["a"][1] is None
    assert isinstance(batch.y, tuple)
    assert batch.y[0].dtype == np.uint8
    np.testing.assert_array_equal(batch.x["a"][0][:, 0], batch.x["z"] * 2)
    np.testing.assert_array_equal(batch.y[1]["t"], batch.x["z"])


def test_one_weight_array_serves_all_outputs_as_in_keras():
    weight = np.arange(4.0, dtype="float32")
    source = ArraySource(np.zeros(4), {"a": np.zeros(4), "b": np.zeros((4, 2))}, weight)
    assert source.sample_weight["a"] is source.sample_weight["b"]
    np.testing.assert_array_equal(source.sample_weight["a"], weight)


@pytest.mark.parametrize(
    ("values", "floatx", "expected"),
    [
        ("float64", "float32", "float32"),
        ("float16", "float32", "float32"),
        ("float32", "float64", "float64"),
        (">f8", "float32", "float32"),
        ("float64", "bfloat16", "float32"),
        ("int64", "float32", "int64"),
        (">i4", "float32", "int32"),
        ("uint8", "float32", "uint8"),
        ("bool", "float32", "bool"),
    ],
)
def test_dtypes_as_keras_has_them(values, floatx, expected):
    source = make_source(np.ones((3, 2), values), floatx=floatx)
    assert source.x.dtype == np.dtype(expected)
    assert source.x.dtype.isnative
    assert source.x.tolist() == np.ones((3, 2), expected).tolist()


def test_dtypes_are_those_of_keras_own_adapter():
    from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter

    for dtype in ("float64", "float16", "float32", "int64", "int8", "uint8", "bool"):
        data = np.ones((3, 2), dtype)
        (expected,) = next(iter(ArrayDataAdapter(data, np.ones(3), batch_size=3).get_numpy_iterator()))[:1]
        assert make_source(data, np.ones(3)).x.dtype == expected.dtype, dtype


def test_tensors_of_every_backend():
    import jax.numpy as jnp
    import tensorflow as tf
    import torch

    rows = np.arange(6, dtype="float32").reshape(3, 2)
    tensors = {
        "jax": jnp.asarray(rows),
        "jax bfloat16": jnp.asarray(rows, "bfloat16"),
        "torch": torch.tensor(rows, requires_grad=True),
        "torch bfloat16": torch.tensor(rows, dtype=torch.bfloat16),
        "tensorflow": tf.constant(rows),
        "columns first": rows.T.copy().T,
    }
    for name, tensor in tensors.items():
        batch = _epoch(make_source(tensor), 0, 1, True, shuffle=False)[0]
        assert batch.x.dtype == np.float32, name
        np.testing.assert_array_equal(batch.x, rows, err_msg=name)


def test_a_series_becomes_a_column_and_a_frame_a_matrix():
    class Series:  # the shape of pandas' own, which need not be installed
        __module__ = "pandas.core.series"

        def __array__(self, dtype=None, copy=None):
            return np.arange(3.0)

    assert make_source(Series()).x.shape == (3, 1)


def test_a_batch_of_columns_first_memory_is_right_too():
    x = np.asfortranarray(np.arange(40.0, dtype="float32").reshape(10, 4))
    batch = _epoch(make_source(x, np.arange(10)), 0, 2, True)[0]
    np.testing.assert_array_equal(batch.x, x[batch.y])


def test_rows_in_order_are_views_and_read_only_ones_are_copied():
    x = np.arange(8.0, dtype="float32")
    assert np.shares_memory(_epoch(make_source(x), 0, 2, True, shuffle=False)[0].x, x)
    x.flags.writeable = False
    batch = _epoch(make_source(x), 0, 2, True, shuffle=False)[0]
    assert batch.x.flags.writeable
    assert not np.shares_memory(batch.x, x)


def test_steps_and_sample():
    source = make_source(np.arange(10), np.arange(10))
    assert [source.steps(b) for b in (1, 3, 10, 11)] == [10, 4, 1, 1]
    sample = source.sample(4)
    assert sample.x.tolist() == [0, 1, 2, 3]
    assert (sample.rows, sample.total) == (4, 4)
    assert source.sample(99).rows == 10


def _generator():
    yield np.zeros(3)


class _FakeLoader:
    __module__ = "grain._src.python.dataset"


REFUSED = [
    (lambda: None, "a function"),
    (_FakeLoader(), "grain"),
    ("train.csv", "a str"),
    (3, "a int"),
    (np.array(["2026-01-01"] * 2, "datetime64[D]"), "datetime64.* values, not numbers"),
    (np.array([{}, None]), "object values, not numbers"),
    (np.array(["2020-01-01"], "datetime64[D]"), "datetime64.* values, not numbers"),
    ([1, 2, 3], r"x is a list of 3 numbers: give numpy.array\(x\)"),
    (list(np.arange(3)), r"x is a list of 3 numbers: give numpy.array\(x\)"),
    (tuple(np.zeros(2, "float32")), r"x is a tuple of 2 numbers: give numpy.array\(x\)"),
    (["a", "b"], r"x is a list of 2 strings: give numpy.array\(x\)"),
    ({"a": [1.0, 2.0]}, r"x\['a'\] is a list of 2 numbers"),
    ([[1, 2], [3, 4]], r"x is a nested list of numbers: give numpy.array\(x\)"),
    (np.float32(3), "a single number"),
    ({(1, 2): np.zeros(3)}, "name the parts of a dict"),
    (np.ndarray, "the class ndarray"),
    ({}, "x holds no array"),
    (None, "x holds no array"),
]


@pytest.mark.parametrize(("x", "message"), REFUSED)
def test_what_is_no_array_is_refused_with_its_remedy(x, message):
    with pytest.raises(InvalidDataError, match=message):
        make_source(x)


def test_loaders_of_the_frameworks_are_refused_as_targets_by_name():
    import tensorflow as tf
    import torch

    data = torch.utils.data.TensorDataset(torch.zeros(4))
    for x, name in (
        (tf.data.Dataset.from_tensor_slices(np.zeros(4)), "a tf.data.Dataset"),
        (torch.utils.data.DataLoader(data), "a PyTorch DataLoader"),
        (data, "a PyTorch Dataset without a DataLoader"),
        (_generator(), "generator"),
        (iter([1]), "generator or iterator"),
        (tf.RaggedTensor.from_row_lengths([1.0, 2.0], [1, 1]), "a ragged tensor"),
        (tf.sparse.from_dense(np.ones((3, 3, 3))), "a sparse tensor of 3 axes"),
    ):
        with pytest.raises(InvalidDataError, match=name) as caught:
            make_source(np.zeros(4), x)
        assert "numpy" in str(caught.value) or "dense" in str(caught.value)
