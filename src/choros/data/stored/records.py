"""TFRecord files of tf.train.Example, read without TensorFlow: a block is some megabytes of records.

A record is its length (8 bytes, little endian), a masked CRC32C of that (4), the bytes, and a masked CRC32C of them
(TensorFlow, ``core/lib/io/record_writer.cc``); an Example is a protocol buffer (``core/example/feature.proto``).
"""

from __future__ import annotations

import gzip
import struct
import zlib
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np

from choros.data.stored.table import Columns, name_of
from choros.errors import BadData

try:
    import google_crc32c
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
except ImportError as error:
    raise BadData(
        f"TFRecord files are read by protobuf and google-crc32c ({error}): pip install protobuf google-crc32c."
    ) from error

_BLOCK = 1 << 22  # bytes of a block
_HEAD, _TAIL = 12, 4
_GZIP, _ZLIB = b"\x1f\x8b", (b"\x78\x01", b"\x78\x5e", b"\x78\x9c", b"\x78\xda")


class RecordTable:
    """TFRecord files, plain or compressed (then a block is a whole file); several files follow each other.

    A feature of one value a record is a column of numbers, of n values one of n numbers a row, of bytes one of bytes.

    Args:
        files: their paths.
        stretches: of each block, the number of its file, where it begins and ends there, and its records; None looks
            into the files.
    """

    def __init__(self, files: Sequence[str], stretches: list[list[int]] | None = None) -> None:
        self.files = list(files)
        self.name = name_of(self.files)
        if stretches is None:
            stretches = [[i, *part] for i, file in enumerate(self.files) for part in _stretches(file)]
        self._stretch = [part for part in stretches if part[3]]
        self.rows = [part[3] for part in self._stretch]

    def read(self, block: int, wanted: Sequence[str] | None) -> Iterator[Columns]:
        """Yield a block."""
        number, begin, end, _ = self._stretch[block]
        path = self.files[number]
        with open(path, "rb") as file:
            file.seek(begin)
            text = file.read(end - begin) if end >= 0 else _unpacked(file.read(), path)
        yield self._columns(records(text, path), wanted, path)

    def peek(self, wanted: Sequence[str] | None) -> Columns:
        """Return the first records."""
        number, begin, end, rows = self._stretch[0]
        path = self.files[number]
        with open(path, "rb") as file:
            text = file.read(end - begin) if end >= 0 else _unpacked(file.read(), path)
        found = records(text, path)
        return self._columns((next(found) for _ in range(min(rows, 32))), None, path)

    def _columns(self, found: Iterator[bytes], wanted: Sequence[str] | None, path: str) -> Columns:
        parsed = [_features(text, path) for text in found]
        names = list(parsed[0]) if wanted is None else [name for name in wanted if name in parsed[0]]
        return {name: _column([row.get(name) for row in parsed], name, path) for name in names}

    def where(self, block: int) -> str:
        """Return the file and the first byte."""
        number, begin, _, _ = self._stretch[block]
        return f"{self.files[number]} from byte {begin}"

    def names(self) -> list[tuple[str, list[str]]]:
        """Return nothing: each record says for itself what it has."""
        return []

    def spec(self) -> dict[str, Any]:
        """Return the files and their stretches."""
        return {"kind": "tfrecord", "files": self.files, "stretches": self._stretch}


def records(text: bytes, path: str) -> Iterator[bytes]:
    """Yield the records of whole ones one after the other.

    Raises:
        BadData: a checksum is wrong, or the last one is cut off.
    """
    at = 0
    while at < len(text):
        if at + _HEAD > len(text):
            raise BadData(f"{path} ends in the middle of a record: it was not written to its end.")
        length, sum_of_length = struct.unpack_from("<QI", text, at)
        if _masked(text[at : at + 8]) != sum_of_length:
            raise BadData(f"{path} is no TFRecord file, or damaged: the checksum of a length is wrong.")
        body = text[at + _HEAD : at + _HEAD + length]
        at += _HEAD + length + _TAIL
        if at > len(text):
            raise BadData(f"{path} ends in the middle of a record: it was not written to its end.")
        if _masked(body) != struct.unpack_from("<I", text, at - _TAIL)[0]:
            raise BadData(f"{path} is damaged: the checksum of a record is wrong.")
        yield body


def _masked(text: bytes) -> int:
    value: int = google_crc32c.value(text)
    return ((value >> 15 | value << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _stretches(path: str) -> Iterator[list[int]]:
    """Yield where each block begins and ends, and its records, from the records' lengths alone."""
    with open(path, "rb") as file:
        first = file.read(2)
        if _is_packed(first):
            file.seek(0)
            yield [0, -1, sum(1 for _ in records(_unpacked(file.read(), path), path))]
            return
        end = file.seek(0, 2)
        begin = at = count = 0
        while at < end:
            file.seek(at)
            head = file.read(_HEAD)
            if len(head) < _HEAD:
                raise BadData(f"{path} ends in the middle of a record: it was not written to its end.")
            length, checksum = struct.unpack("<QI", head)
            if _masked(head[:8]) != checksum:
                raise BadData(f"{path} is no TFRecord file, or damaged: the checksum of a length is wrong.")
            at += _HEAD + length + _TAIL
            count += 1
            if at - begin >= _BLOCK or at >= end:
                yield [begin, at, count]
                begin, count = at, 0


def _is_packed(first: bytes) -> bool:
    """Tell by its first two bytes whether a file is compressed; read as a length they would be 20 KB or more."""
    return first == _GZIP or first in _ZLIB


def _unpacked(text: bytes, path: str) -> bytes:
    try:
        return gzip.decompress(text) if text[:2] == _GZIP else zlib.decompress(text)
    except (OSError, EOFError, zlib.error) as error:
        raise BadData(f"{path} cannot be unpacked: {error}.") from error


@cache
def _example() -> Any:
    """Return the class of ``tf.train.Example``, made from its definition, in a pool of its own."""
    field = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="choros/example.proto", package="choros.example", syntax="proto3")
    for name, kind in (
        ("BytesList", field.TYPE_BYTES),
        ("FloatList", field.TYPE_FLOAT),
        ("Int64List", field.TYPE_INT64),
    ):
        file.message_type.add(name=name).field.add(name="value", number=1, type=kind, label=field.LABEL_REPEATED)
    feature = file.message_type.add(name="Feature")
    feature.oneof_decl.add(name="kind")
    for number, name in enumerate(("BytesList", "FloatList", "Int64List"), 1):
        feature.field.add(
            name=f"{name[:-4].lower()}_list",
            number=number,
            type=field.TYPE_MESSAGE,
            label=field.LABEL_OPTIONAL,
            type_name=f".choros.example.{name}",
            oneof_index=0,
        )
    features = file.message_type.add(name="Features")
    entry = features.nested_type.add(name="FeatureEntry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, type=field.TYPE_STRING, label=field.LABEL_OPTIONAL)
    value = {"type": field.TYPE_MESSAGE, "type_name": ".choros.example.Feature", "label": field.LABEL_OPTIONAL}
    entry.field.add(name="value", number=2, **value)
    features.field.add(
        name="feature",
        number=1,
        type=field.TYPE_MESSAGE,
        label=field.LABEL_REPEATED,
        type_name=".choros.example.Features.FeatureEntry",
    )
    example = file.message_type.add(name="Example")
    example.field.add(
        name="features",
        number=1,
        type=field.TYPE_MESSAGE,
        label=field.LABEL_OPTIONAL,
        type_name=".choros.example.Features",
    )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("choros.example.Example"))


def _features(text: bytes, path: str) -> dict[str, Any]:
    from google.protobuf.message import DecodeError

    try:
        found = _example().FromString(text).features.feature
    except DecodeError:
        raise BadData(f"{path} holds a record that is no tf.train.Example.") from None
    return {name: _values(feature) for name, feature in sorted(found.items())}


def _values(feature: Any) -> Any:
    kind = feature.WhichOneof("kind")
    if kind == "bytes_list":
        return list(feature.bytes_list.value)
    if kind == "float_list":
        return np.array(feature.float_list.value, np.float32)
    return np.array(feature.int64_list.value, np.int64)


def _column(rows: list[Any], name: str, path: str) -> Any:
    """Return a feature of all records: numbers where each has as many, else objects."""
    if any(row is None for row in rows):
        raise BadData(f"{path}: the feature {name!r} is not in every record.")
    lengths = {len(row) for row in rows}
    if isinstance(rows[0], list) or len(lengths) > 1:
        column = np.empty(len(rows), object)
        for i, row in enumerate(rows):
            column[i] = row[0] if isinstance(row, list) and len(row) == 1 else row
        return column
    whole = np.stack(rows)
    return whole[:, 0] if lengths == {1} else whole
