"""Objects as bytes without pickle: what JSON has, tuples, sets, bytes, arrays; anything else is refused by type."""

from __future__ import annotations

import functools
import json
import struct
from typing import Any

import numpy as np

from choros.errors import InvalidInputError
from choros.types import Array, dtype_of

_LENGTH = struct.Struct("<Q")
_TAG = "choros"  # the key of what JSON does not have; a dict that has it travels as pairs


def encode(value: Any) -> bytes:
    """Return an object's bytes.

    Args:
        value: None, bool, int, float, complex, str, bytes, list, tuple, set, dict, numpy arrays and scalars, nested.

    Raises:
        InvalidInputError: names the type that cannot travel, and where it is.

    Example:
        >>> decode(encode({"epoch": 3, "shape": (2, 5), "w": np.zeros(2)}))
        {'epoch': 3, 'shape': (2, 5), 'w': array([0., 0.])}
    """
    blobs: list[bytes] = []
    text = json.dumps(_plain(value, "the object", blobs)).encode()
    return b"".join([_LENGTH.pack(len(text)), text, *blobs])


def decode(data: bytes) -> Any:
    """Return the object that ``encode`` wrote.

    Raises:
        InvalidInputError: bytes that ``encode`` did not write.
    """
    try:
        (length,) = _LENGTH.unpack(data[: _LENGTH.size])
        begin = _LENGTH.size + length
        return _object(json.loads(data[_LENGTH.size : begin]), memoryview(data)[begin:])
    except (struct.error, ValueError, KeyError, TypeError, IndexError, RecursionError, OverflowError) as error:
        raise InvalidInputError(f"{len(data)} bytes are no object of choros: {error}") from None


def _plain(value: Any, where: str, blobs: list[bytes]) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is complex:
        return {_TAG: "complex", "parts": [value.real, value.imag]}
    if type(value) is list:
        return [_plain(item, f"{where}[{i}]", blobs) for i, item in enumerate(value)]
    if type(value) is dict:
        if all(type(key) is str for key in value) and _TAG not in value:
            return {key: _plain(item, f"{where}[{key!r}]", blobs) for key, item in value.items()}
        pairs = [
            [_plain(key, f"a key of {where}", blobs), _plain(v, f"{where}[{key!r}]", blobs)] for key, v in value.items()
        ]
        return {_TAG: "dict", "items": pairs}
    if type(value) in (tuple, set, frozenset):
        items = [_plain(item, f"{where}[{i}]", blobs) for i, item in enumerate(value)]
        return {_TAG: type(value).__name__, "items": items}
    if type(value) in (bytes, bytearray):
        return {_TAG: type(value).__name__, **_blob(bytes(value), blobs)}
    if isinstance(value, (np.ndarray, np.generic)) and (
        value.dtype.kind in "biufcSUmM" or value.dtype.name == "bfloat16"
    ):
        array = np.asarray(value)
        kind = "array" if isinstance(value, np.ndarray) else "scalar"
        name = array.dtype.name if array.dtype.name == "bfloat16" else array.dtype.str
        return {_TAG: kind, "dtype": name, "shape": list(array.shape), **_blob(array.tobytes(), blobs)}
    raise InvalidInputError(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which cannot go to other ranks: send "
        "numbers, text, bytes, lists, tuples, sets, dicts and numpy arrays."
    )


def _blob(data: bytes, blobs: list[bytes]) -> dict[str, int]:
    begin = sum(map(len, blobs))
    blobs.append(data)
    return {"begin": begin, "bytes": len(data)}


def _object(node: Any, data: memoryview) -> Any:
    if isinstance(node, list):
        return [_object(item, data) for item in node]
    if not isinstance(node, dict):
        return node
    kind = node.get(_TAG)
    if kind is None:
        return {key: _object(item, data) for key, item in node.items()}
    if kind == "complex":
        return complex(*node["parts"])
    if kind == "dict":
        return {_object(key, data): _object(value, data) for key, value in node["items"]}
    if kind in ("tuple", "set", "frozenset"):
        made = {"tuple": tuple, "set": set, "frozenset": frozenset}[kind]
        return made(_object(item, data) for item in node["items"])
    part = bytes(data[node["begin"] : node["begin"] + node["bytes"]])
    if kind in ("bytes", "bytearray"):
        return part if kind == "bytes" else bytearray(part)
    array: Array = np.frombuffer(part, dtype_of(node["dtype"])).reshape(node["shape"])
    return array.copy() if kind == "array" else array[()]


@functools.cache
def name_of(dtype: np.dtype[Any]) -> str:
    """Return ``dtype.name``, which numpy takes microseconds to say each time.

    Example:
        >>> name_of(np.dtype("float16"))
        'float16'
    """
    return dtype.name
