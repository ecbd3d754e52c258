"""Objects as bytes: all that may travel comes back equal, and what may not is refused by its type."""

import math

import numpy as np
import pytest

from choros.comm.collectives import decode, encode
from choros.errors import InvalidInputError


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        -(2**80),
        0.1,
        math.inf,
        "täxt",
        b"\0raw",
        bytearray(b"x"),
        [1, [2, (3, "four")]],
        {"a": {1: 2, (3, 4): None}, "choros": "a key of our own"},
        {1, 2},
        frozenset({"a"}),
        (),
    ],
    ids=repr,
)
def test_plain_values(value):
    back = decode(encode(value))
    assert back == value
    assert type(back) is type(value)


@pytest.mark.parametrize(
    "kind", ["float16", "float32", "complex128", "int8", "uint64", "bool", "<U3", "S2", "M8[D]", ">f4"]
)
def test_arrays(kind):
    value = np.array([[0, 1, 1]]).astype(kind) if kind != "M8[D]" else np.array([["2020-01-01"]], kind)
    back = decode(encode({"x": value}))["x"]
    np.testing.assert_array_equal(back, value)
    assert back.dtype == value.dtype
    back[0, 0] = back[0, 0]  # its own memory, to be written
    scalar = decode(encode(value[0, 0]))
    assert scalar == value[0, 0]


def test_bfloat16():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    value = np.arange(3).astype(ml_dtypes.bfloat16)
    assert decode(encode(value)).dtype == value.dtype


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": [1, object()]}, r"the object\['a'\]\[1\] is a builtins.object"),
        (lambda: 1, "builtins.function"),
        (np.array([None]), "numpy.ndarray"),
        ({object(): 1}, "a key of the object"),
        (type("Mine", (dict,), {})(), "Mine"),
    ],
    ids=["nested", "function", "array of objects", "key", "subclass"],
)
def test_what_cannot_travel(value, message):
    with pytest.raises(InvalidInputError, match=message):
        encode(value)


@pytest.mark.parametrize("data", [b"", b"\x80\x04\x95", b"\xff" * 40, encode({"a": 1})[:-2]])
def test_bytes_that_are_none_of_ours(data):
    with pytest.raises(InvalidInputError, match="are not an encoded object"):
        decode(data)
