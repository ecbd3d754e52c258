"""The form in which a source travels to workers: JSON for its structure, raw bytes for arrays, no pickle of arrays.

The arrays are written once into memory that all workers map (64-byte aligned, so that a backend may use them where
they lie); each worker makes read-only views of them and a source from those. Arrays that are a mapped file are not
copied: each worker maps the file. Files go by their names.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    pass

ALIGN = 64


def pack(
    source: Any, arrays: list[Array] | None = None, blobs: list[bytes] | None = None, here: bool = True
) -> tuple[dict[str, Any], list[Array], list[bytes]]:
    """Take a source apart: a description that JSON can hold, its arrays, and blobs.

    An array that occurs twice is packed once, also when it is in another source that was packed into the same lists.
    A PyDataset is one blob, by cloudpickle, and so is the ``decode`` of files and an ``augment``: these go over the
    parent's pipe, never over a socket.

    Args:
        source: What ``make_source`` gave.
        arrays: The list to append to; a new one if None.
        blobs: The same.
        here: Whether it travels to processes of this machine only, which share what is decoded of files.

    Returns:
        ``(spec, arrays, blobs)``.

    Raises:
        NotSerializableError: The PyDataset or ``decode`` holds something that cannot travel; the message says what.

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
            spec["kind"] = "pydataset"
        spec["blob"] = _code(source.decode if isinstance(source, FileSource) else source.dataset, blobs)
        return spec, arrays, blobs
    places = {_identity(array): i for i, array in enumerate(arrays)}
    if isinstance(source, StreamSource):  # the caller reads it; workers build their models from its first batch
        first = source.sample()
        tree = _spec((first.x, first.y, first.sample_weight), arrays, places)
        return {"kind": "stream", "data": tree, "rows": first.rows}, arrays, blobs
    tree = _spec((source.x, source.y, source.sample_weight), arrays, places)
    return {"kind": "arrays", "data": tree, "floatx": source.floatx, "block": source.block}, arrays, blobs


def unpack(spec: dict[str, Any], arrays: Sequence[Array], blobs: Sequence[bytes]) -> Any:
    """The source that ``pack`` took apart; of a stream, its first batch.

    Args:
        spec: What ``pack`` returned, also after a journey through JSON.
        arrays: The arrays, or views of them.
        blobs: The blobs, from our own parent only.

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
            return PyDatasetSource(code, weights, spec["floatx"])
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
    """Return the place of each array in one stretch of memory, and the number of bytes that all take.

    Example:
        >>> layout([np.zeros(3, "uint8"), np.zeros((2, 2), "float32")])[1]
        80
    """
    entries: list[dict[str, Any]] = []
    end = 0
    for array in arrays:
        offset = -(-end // ALIGN) * ALIGN
        entries.append({"dtype": array.dtype.name, "shape": list(array.shape), "offset": offset})
        end = offset + array.nbytes
    return entries, end


def write(entries: Sequence[dict[str, Any]], arrays: Sequence[Array], buffer: Buffer) -> None:
    """Copy the arrays to their places in ``buffer`` (anything writable: a mmap, a bytearray, a memoryview)."""
    for entry, array in zip(entries, arrays, strict=True):
        np.copyto(at(entry, buffer), array)


def views(entries: Sequence[dict[str, Any]], buffer: Buffer) -> list[Array]:
    """The arrays in ``buffer``, read-only and without a copy.

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
    """Return one array in ``buffer``, without a copy."""
    return np.ndarray(tuple(entry["shape"]), np.dtype(entry["dtype"]), buffer, entry["offset"])


def _identity(array: Array) -> tuple[Any, ...]:
    """Equal for two arrays that are the same memory seen in the same way."""
    return array.__array_interface__["data"][0], array.shape, array.strides, array.dtype.str


def flat(batch: Batch) -> tuple[Any, list[Array]]:
    """A batch's structure in JSON's terms, and its arrays.

    Example:
        >>> flat(Batch({"a": np.ones(2)}, np.zeros(2), None, rows=2, total=2))[0]
        ['tuple', [['dict', [['a', 0]]], 1, None]]
    """
    arrays: list[Array] = []
    return _spec((batch.x, batch.y, batch.sample_weight), arrays, {}, mapped=False), arrays


def nested(tree: ArrayTree, arrays: Sequence[Array]) -> tuple[ArrayTree, ArrayTree, ArrayTree]:
    """``(x, y, sample_weight)`` of a batch that ``flat`` took apart."""
    x, y, weight = _build(tree, arrays)
    return x, y, weight


def _spec(structure: ArrayTree, arrays: list[Array], places: dict[tuple[Any, ...], int], mapped: bool = True) -> Any:
    """The structure in JSON's terms: None, the number of an array, its place in a file, or ``[container, parts]``."""
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


def _code(code: Any, blobs: list[bytes]) -> int | None:
    """Append what is code, by cloudpickle, and return its number; None for none."""
    if code is None:
        return None
    try:
        blob = dumps(code)
    except Exception as error:
        name = f"function {code.__name__}" if hasattr(code, "__name__") else f"dataset {type(code).__name__}"
        raise NotSerializableError(
            f"The {name} cannot travel to the workers ({type(error).__name__}: {error}): "
            f"let it open files, locks and connections when it reads its first batch, not when it is made."
        ) from error
    blobs.append(blob)
    return len(blobs) - 1
