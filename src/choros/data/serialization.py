"""Serialization of a source for workers: JSON for its structure, raw bytes for arrays. Arrays are not pickled.

The arrays are written once into shared memory that all workers map. They are aligned to 64 bytes, so that a backend can
use them in place. Each worker creates a source from read-only views. Memory-mapped arrays are not copied: each worker
maps the file. For a source of files, the names of the files are sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from choros.data.array_source import ArraySource
from choros.data.files import FileSource, reopen
from choros.data.memmap import open_place, place_in_file
from choros.data.prefetch import PrefetchSource
from choros.data.pydataset_source import PyDatasetSource
from choros.data.stream_source import StreamSource
from choros.errors import NotSerializableError
from choros.pickling import dumps, loads
from choros.types import Array, ArrayTree, Batch

Buffer = Any  # an object with Python's buffer protocol: bytes, memoryview, mmap

ALIGN = 64


def pack(
    source: Any, arrays: list[Array] | None = None, blobs: list[bytes] | None = None, here: bool = True
) -> tuple[dict[str, Any], list[Array], list[bytes]]:
    """Serialize a source as a description for JSON, a list of arrays, and a list of blobs.

    An array that occurs twice is stored once, also if sources share the lists. A PyDataset, the ``decode`` of files and
    an ``augment`` are blobs of cloudpickle. They are sent through the parent's pipe, never through a socket.

    Args:
        source: A result of ``make_source``.
        arrays: The list to which arrays are appended. Defaults to a new list.
        blobs: The list to which blobs are appended. Defaults to a new list.
        here: Whether all workers are on this machine; they then share the decoded rows of files. Defaults to True.

    Returns:
        ``(spec, arrays, blobs)``.

    Raises:
        NotSerializableError: A PyDataset, ``decode`` or ``augment`` cannot be pickled. The message contains the reason.

    Example:
        >>> shared = np.zeros(3, "float32")
        >>> spec, arrays, blobs = pack(ArraySource({"a": shared, "b": shared}))
        >>> spec["data"][1][0], len(arrays)
        (['dict', [['a', 0], ['b', 0]]], 1)
    """
    arrays = [] if arrays is None else arrays
    blobs = [] if blobs is None else blobs
    if isinstance(source, PrefetchSource):
        inner = pack(source.inner, arrays, blobs, here)[0]
        return (
            {"kind": "ahead", "inner": inner, "depth": source.depth, "blob": _code(source.augment, blobs)},
            arrays,
            blobs,
        )
    if isinstance(source, PyDatasetSource | FileSource):
        weights = source.class_weight
        spec: dict[str, Any] = {"classes": None, "floatx": source.floatx}
        if weights is not None:
            spec["classes"] = [[int(label), float(weight)] for label, weight in weights.items()]
        if isinstance(source, FileSource):
            first = _spec(source.first, arrays, {}, mapped=False)
            spec |= {"kind": "files", **source.spec(here), "first": first}
        else:
            spec |= {"kind": "pydataset", "evaluates": source.evaluates}
        spec["blob"] = _code(source.decode if isinstance(source, FileSource) else source.dataset, blobs)
        return spec, arrays, blobs
    places = {_identity(array): i for i, array in enumerate(arrays)}
    if isinstance(source, StreamSource):  # the driver reads the stream; workers build models from its first batch
        first = source.sample()
        tree = _spec((first.x, first.y, first.sample_weight), arrays, places)
        return {"kind": "stream", "data": tree, "rows": first.rows}, arrays, blobs
    tree = _spec((source.x, source.y, source.sample_weight), arrays, places)
    return {"kind": "arrays", "data": tree, "floatx": source.floatx, "block": source.block}, arrays, blobs


def unpack(spec: dict[str, Any], arrays: Sequence[Array], blobs: Sequence[bytes]) -> Any:
    """Return the source that ``pack`` serialized; for a stream, its first batch.

    Args:
        spec: The description that ``pack`` returned, also after a conversion to JSON and back.
        arrays: The arrays, or views of them.
        blobs: The blobs. They are unpickled, so they must come from the parent process.

    Example:
        >>> source = unpack(*pack(ArraySource((np.ones(2, "float32"), None))))
        >>> source.x
        (array([1., 1.], dtype=float32), None)
    """
    code = None if spec.get("blob") is None else loads(blobs[spec["blob"]])
    if spec["kind"] == "ahead":
        return PrefetchSource(unpack(spec["inner"], arrays, blobs), spec["depth"], code)
    if spec["kind"] in ("files", "pydataset"):
        weights = None if spec["classes"] is None else dict(spec["classes"])
        if spec["kind"] == "pydataset":
            dataset = PyDatasetSource(code, weights, spec["floatx"])
            dataset.evaluates = spec["evaluates"]
            return dataset
        return FileSource(
            reopen(spec["table"]),
            **dict(zip(("x", "y", "sample_weight"), spec["choice"], strict=True)),
            decode=code,
            floatx=spec["floatx"],
            spill=spec["spill"],
            spill_dir=spec["spill_dir"],
            class_weight=weights,
            first=nested(spec["first"], arrays),
        )
    x, y, weight = nested(spec["data"], arrays)
    if spec["kind"] == "stream":
        return Batch(x, y, weight, rows=spec["rows"], total=spec["rows"])
    return ArraySource(x, y, weight, spec["floatx"], spec["block"])


def layout(arrays: Sequence[Array]) -> tuple[list[dict[str, Any]], int]:
    """Return the dtype, shape and offset of each array in one buffer, and the size of the buffer in bytes.

    Example:
        >>> layout([np.zeros(3, "uint8"), np.zeros((2, 2), "float32")])[1]
        80
    """
    entries: list[dict[str, Any]] = []
    end = 0
    for array in arrays:
        offset = -(-end // ALIGN) * ALIGN
        entries.append({"dtype": _dtype_in_json(array.dtype), "shape": list(array.shape), "offset": offset})
        end = offset + array.nbytes
    return entries, end


def write(entries: Sequence[dict[str, Any]], arrays: Sequence[Array], buffer: Buffer) -> None:
    """Copy the arrays to their offsets in a writable buffer (an mmap, bytearray or memoryview)."""
    for entry, array in zip(entries, arrays, strict=True):
        np.copyto(at(entry, buffer), array)


def views(entries: Sequence[dict[str, Any]], buffer: Buffer) -> list[Array]:
    """Return read-only views of the arrays in ``buffer``, without a copy.

    Example:
        >>> arrays = [np.arange(3, dtype="int64"), np.ones(2, "float32")]
        >>> entries, nbytes = layout(arrays)
        >>> memory = bytearray(nbytes)
        >>> write(entries, arrays, memory)
        >>> views(entries, memory)
        [array([0, 1, 2]), array([1., 1.], dtype=float32)]
    """
    leaves_read = [at(entry, buffer) for entry in entries]
    for array in leaves_read:
        array.flags.writeable = False
    return leaves_read


def at(entry: dict[str, Any], buffer: Buffer) -> Array:
    """Return a view of one array in ``buffer``, without a copy."""
    return np.ndarray(tuple(entry["shape"]), _dtype_from_json(entry["dtype"]), buffer, entry["offset"])


def _dtype_in_json(dtype: np.dtype[Any]) -> Any:
    """Return a dtype as its name (also those of ``ml_dtypes``), text of numpy, or fields of encoded rows."""
    if dtype.names is not None:
        return [[name, dtype[name].base.str, list(dtype[name].shape)] for name in dtype.names]
    return dtype.str if dtype.kind == "S" else dtype.name


def _dtype_from_json(value: Any) -> np.dtype[Any]:
    if isinstance(value, list):
        return np.dtype([(name, kind, tuple(shape)) for name, kind, shape in value])
    dtype: np.dtype[Any] = np.dtype(value)
    return dtype


def _identity(array: Array) -> tuple[Any, ...]:
    """Return a key that is equal for two arrays with the same memory, shape, strides and dtype."""
    return array.__array_interface__["data"][0], array.shape, array.strides, array.dtype.str


def flat(batch: Batch) -> tuple[Any, list[Array]]:
    """Return a batch's structure in JSON types, and its arrays.

    Example:
        >>> flat(Batch({"a": np.ones(2)}, np.zeros(2), None, rows=2, total=2))[0]
        ['tuple', [['dict', [['a', 0]]], 1, None]]
    """
    arrays: list[Array] = []
    return _spec((batch.x, batch.y, batch.sample_weight), arrays, {}, mapped=False), arrays


def nested(tree: ArrayTree, arrays: Sequence[Array]) -> tuple[ArrayTree, ArrayTree, ArrayTree]:
    """Return ``(x, y, sample_weight)`` of a batch that ``flat`` has serialized."""
    x, y, weight = _build(tree, arrays)
    return x, y, weight


def _spec(structure: ArrayTree, arrays: list[Array], places: dict[tuple[Any, ...], int], mapped: bool = True) -> Any:
    """Return the structure in JSON types: None, an array's index, its place in a file, or ``[container, parts]``."""
    if structure is None:
        return None
    if isinstance(structure, dict):
        return ["dict", [[key, _spec(value, arrays, places, mapped)] for key, value in structure.items()]]
    if isinstance(structure, list | tuple):
        kind = "list" if isinstance(structure, list) else "tuple"
        return [kind, [_spec(value, arrays, places, mapped) for value in structure]]
    place = place_in_file(structure) if mapped else None
    if place is not None:
        return place
    key = _identity(structure)
    if key not in places:
        places[key] = len(arrays)
        arrays.append(structure)
    return places[key]


def _build(spec: Any, arrays: Sequence[Array]) -> Any:
    if spec is None:
        return None
    if isinstance(spec, int):
        return arrays[spec]
    if isinstance(spec, dict):
        return open_place(spec)
    kind, parts = spec
    if kind == "dict":
        return {key: _build(part, arrays) for key, part in parts}
    built = [_build(part, arrays) for part in parts]
    return built if kind == "list" else tuple(built)


def _code(code: object, blobs: list[bytes]) -> int | None:
    """Append an object as a blob of cloudpickle, and return its index; return None for None."""
    if code is None:
        return None
    try:
        blob = dumps(code)
    except Exception as error:
        function = getattr(code, "__name__", None)
        name = f"dataset {type(code).__name__}" if function is None else f"function {function}"
        raise NotSerializableError(
            f"The {name} cannot be sent to the workers ({type(error).__name__}: {error}): let it open files, locks "
            "and connections when it reads its first batch, not when it is made."
        ) from error
    blobs.append(blob)
    return len(blobs) - 1
