"""Codec of objects without pickle: JSON types, tuples, sets, bytes and arrays; it refuses every other type."""

from __future__ import annotations

import functools
import json
import struct
from typing import Any

import numpy as np

from choros.errors import InvalidInputError
from choros.types import Array, dtype_of

_LENGTH = struct.Struct("<Q")
_TYPE_KEY = "choros"  # key of an object that JSON cannot express; a dict that contains this key is encoded as pairs


def encode(value: object) -> bytes:
    """Return an object as bytes.

    Args:
        value: None, bool, int, float, complex, str, bytes, list, tuple, set, dict, numpy arrays and scalars, nested.

    Raises:
        InvalidInputError: a part of the object has another type; the message names the type and the part.

    Example:
        >>> decode(encode({"epoch": 3, "shape": (2, 5), "w": np.zeros(2)}))
        {'epoch': 3, 'shape': (2, 5), 'w': array([0., 0.])}
    """
    blobs: list[bytes] = []
    text = json.dumps(_to_json(value, "the object", blobs)).encode()
    return b"".join([_LENGTH.pack(len(text)), text, *blobs])


def decode(data: bytes) -> Any:
    """Return the object that ``encode`` encoded.

    Raises:
        InvalidInputError: ``encode`` did not write these bytes.
    """
    try:
        (length,) = _LENGTH.unpack(data[: _LENGTH.size])
        begin = _LENGTH.size + length
        return _from_json(json.loads(data[_LENGTH.size : begin]), memoryview(data)[begin:])
    except (struct.error, ValueError, KeyError, TypeError, IndexError, RecursionError, OverflowError) as error:
        raise InvalidInputError(f"{len(data)} bytes are not an encoded object: {error}") from None


def _to_json(value: Any, where: str, blobs: list[bytes]) -> object:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is complex:
        return {_TYPE_KEY: "complex", "parts": [value.real, value.imag]}
    if type(value) is list:
        return [_to_json(item, f"{where}[{i}]", blobs) for i, item in enumerate(value)]
    if type(value) is dict:
        if all(type(key) is str for key in value) and _TYPE_KEY not in value:
            return {key: _to_json(item, f"{where}[{key!r}]", blobs) for key, item in value.items()}
        pairs = [
            [_to_json(key, f"a key of {where}", blobs), _to_json(v, f"{where}[{key!r}]", blobs)]
            for key, v in value.items()
        ]
        return {_TYPE_KEY: "dict", "items": pairs}
    if type(value) in (tuple, set, frozenset):
        items = [_to_json(item, f"{where}[{i}]", blobs) for i, item in enumerate(value)]
        return {_TYPE_KEY: type(value).__name__, "items": items}
    if type(value) in (bytes, bytearray):
        return {_TYPE_KEY: type(value).__name__, **_blob(bytes(value), blobs)}
    if isinstance(value, (np.ndarray, np.generic)) and (
        value.dtype.kind in "biufcSUmM" or value.dtype.name == "bfloat16"
    ):
        array = np.asarray(value)
        kind = "array" if isinstance(value, np.ndarray) else "scalar"
        name = array.dtype.name if array.dtype.name == "bfloat16" else array.dtype.str
        return {_TYPE_KEY: kind, "dtype": name, "shape": list(array.shape), **_blob(array.tobytes(), blobs)}
    raise InvalidInputError(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which cannot be sent to other ranks: send "
        "numbers, text, bytes, lists, tuples, sets, dicts and numpy arrays."
    )


def _blob(data: bytes, blobs: list[bytes]) -> dict[str, int]:
    begin = sum(map(len, blobs))
    blobs.append(data)
    return {"begin": begin, "bytes": len(data)}


def _from_json(node: object, data: memoryview) -> Any:
    if isinstance(node, list):
        return [_from_json(item, data) for item in node]
    if not isinstance(node, dict):
        return node
    kind = node.get(_TYPE_KEY)
    if kind is None:
        return {key: _from_json(item, data) for key, item in node.items()}
    if kind == "complex":
        return complex(*node["parts"])
    if kind == "dict":
        return {_from_json(key, data): _from_json(value, data) for key, value in node["items"]}
    if kind in ("tuple", "set", "frozenset"):
        container = {"tuple": tuple, "set": set, "frozenset": frozenset}[kind]
        return container(_from_json(item, data) for item in node["items"])
    blob = bytes(data[node["begin"] : node["begin"] + node["bytes"]])
    if kind in ("bytes", "bytearray"):
        return blob if kind == "bytes" else bytearray(blob)
    array: Array = np.frombuffer(blob, dtype_of(node["dtype"])).reshape(node["shape"])
    return array.copy() if kind == "array" else array[()]


@functools.cache
def name_of(dtype: np.dtype[Any]) -> str:
    """Return ``dtype.name`` from a cache, as numpy needs microseconds for each access.

    Example:
        >>> name_of(np.dtype("float16"))
        'float16'
    """
    return dtype.name
