"""A source comes out of its packing as it went in, through JSON and one stretch of memory."""

import json
import mmap
import threading

import keras
import numpy as np
import pytest

from choros.data import ArraySource, PyDatasetSource
from choros.data.serialization import ALIGN, layout, pack, unpack, views, write
from choros.errors import NotSerializableError


def _journey(source):
    spec, arrays, blobs = pack(source)
    spec = json.loads(json.dumps(spec))
    entries, nbytes = layout(arrays)
    entries = json.loads(json.dumps(entries))
    memory = mmap.mmap(-1, max(nbytes, 1))
    write(entries, arrays, memory)
    return unpack(spec, views(entries, memory), blobs), entries, nbytes


def _same(a, b):
    assert type(a) is type(b)
    if isinstance(a, dict):
        assert list(a) == list(b)
        for key in a:
            _same(a[key], b[key])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for value, other in zip(a, b, strict=True):
            _same(value, other)
    elif a is not None:
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


RNG = np.random.default_rng(0)
STRUCTURES = [
    (RNG.random((7, 3)), None, None),
    (RNG.random((7, 3), dtype="float32"), np.arange(7), np.ones(7)),
    (
        {"z": RNG.random((7, 2, 2)), "a": [np.arange(7, dtype="uint8"), None], 3: (np.ones(7, bool),)},
        np.arange(7),
        None,
    ),
    (([np.asfortranarray(RNG.random((7, 5)))],), {"y": np.arange(14)[::2]}, {"y": np.arange(7, dtype="int16")}),
    (np.ones((7, 0)), np.arange(7.0), None),
]


@pytest.mark.parametrize("data", STRUCTURES, ids=range(len(STRUCTURES)))
def test_round_trip(data):
    source = ArraySource(*data)
    back, entries, nbytes = _journey(source)
    _same(source.x, back.x)
    _same(source.y, back.y)
    _same(source.sample_weight, back.sample_weight)
    assert back.rows == source.rows
    ends = [e["offset"] + int(np.prod(e["shape"])) * np.dtype(e["dtype"]).itemsize for e in entries]
    assert all(e["offset"] % ALIGN == 0 for e in entries)
    assert all(end <= e["offset"] for end, e in zip(ends, entries[1:], strict=False))
    assert nbytes == max(ends)


def test_float64_sources_stay_float64():
    back, *_ = _journey(ArraySource(np.ones(3), floatx="float64"))
    assert back.x.dtype == np.float64
    assert back.floatx == "float64"


def test_what_comes_out_uses_the_memory_and_cannot_write_to_it():
    spec, arrays, blobs = pack(ArraySource(np.arange(5)))
    entries, nbytes = layout(arrays)
    memory = bytearray(nbytes)
    write(entries, arrays, memory)
    source = unpack(spec, views(entries, memory), blobs)
    memory[0] = 9
    assert source.x[0] == 9
    with pytest.raises(ValueError, match="read-only"):
        source.x[0] = 1


def test_the_same_array_is_packed_once_also_over_two_sources():
    x, y = np.arange(4.0, dtype="float32"), np.arange(4)
    spec, arrays, blobs = pack(ArraySource([x, x, x[::-1]], y))
    assert len(arrays) == 3
    other, arrays, blobs = pack(ArraySource(x, y), arrays, blobs)
    assert len(arrays) == 3
    assert unpack(other, arrays, blobs).x is arrays[0]
    np.testing.assert_array_equal(unpack(spec, arrays, blobs).x[2], x[::-1])


class Held(keras.utils.PyDataset):
    def __init__(self, held=None, **kwargs):
        super().__init__(**kwargs)
        self.held = held

    def __len__(self):
        return 2

    def __getitem__(self, index):
        return np.full((2, 3), index), np.zeros(2, int)


Held.__module__ = "__main__"  # as in a notebook: it must travel by value


def test_a_py_dataset_travels_whole():
    source = PyDatasetSource(Held("something", workers=2), {0: 2.0, np.int64(1): 3}, "float64")
    back, entries, nbytes = _journey(source)
    assert (entries, nbytes) == ([], 0)
    assert (back.dataset.held, back.dataset.workers) == ("something", 2)
    assert (back.class_weight, back.floatx) == ({0: 2.0, 1: 3.0}, "float64")
    assert back.sample().sample_weight.tolist() == [2.0, 2.0]


def test_a_py_dataset_that_cannot_travel_is_refused_by_name():
    with pytest.raises(NotSerializableError, match=r"The dataset Held cannot be sent .*lock"):
        pack(PyDatasetSource(Held(threading.Lock())))
