"""TFRecord files of tf.train.Example, read without TensorFlow. A block has about 4 MB of records.

A record consists of the length of its data (8 bytes, little endian), a masked CRC32C of the length (4 bytes), the data,
and a masked CRC32C of the data (4 bytes); see TensorFlow's ``core/lib/io/record_writer.cc``. An Example is a protocol
buffer (``core/example/feature.proto``).
"""

from __future__ import annotations

import gzip
import struct
import zlib
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import islice
from typing import Any

import numpy as np

from choros.data.files.reader import Columns, FileReader
from choros.errors import InvalidDataError

try:
    import google_crc32c
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
except ImportError as error:
    raise InvalidDataError(
        f"TFRecord files are read by protobuf and google-crc32c ({error}): pip install protobuf google-crc32c."
    ) from error

_BLOCK = 1 << 22  # bytes of a block
_HEAD, _TAIL = 12, 4
_CUT = "{} ends in the middle of a record: it was not written to its end."
_GZIP, _ZLIB = b"\x1f\x8b", (b"\x78\x01", b"\x78\x5e", b"\x78\x9c", b"\x78\xda")


class RecordTable(FileReader):
    """TFRecord files, plain or compressed. Several files are concatenated; a compressed file is one block.

    A feature with one number in each record is a column of shape (rows,). With n numbers, the shape is (rows, n). A
    feature of bytes is a column of objects. A block has the index of its file, its start and end in bytes (end -1: the
    whole file), and the number of records.
    """

    kind, unit = "tfrecord", " from byte"

    def look(self, file: str) -> Iterator[list[int]]:
        """Yield the blocks of a file. Column names are unknown, as each record has its set of features."""
        return _stretches(file)

    def read(self, block: int, wanted: Sequence[str] | None) -> Iterator[Columns]:
        """Yield the records of a block."""
        yield self._columns(block, None, wanted)

    def peek(self) -> Columns:
        """Return the first records."""
        return self._columns(0, 32, None)

    def _columns(self, block: int, limit: int | None, wanted: Sequence[str] | None) -> Columns:
        number, begin, end, _ = self.blocks[block]
        path = self.files[number]
        with open(path, "rb") as file:
            file.seek(begin)
            text = file.read(end - begin) if end >= 0 else _unpacked(file.read(), path)
        parsed = [_features(record, path) for record in islice(records(text, path), limit)]
        names = list(parsed[0]) if wanted is None else [name for name in wanted if name in parsed[0]]
        return {name: _column([row.get(name) for row in parsed], name, path) for name in names}


def records(text: bytes, path: str) -> Iterator[bytes]:
    """Yield the data of each record in a sequence of records.

    Raises:
        InvalidDataError: a checksum is wrong, or the last record is incomplete.
    """
    at = 0
    while at < len(text):
        length = _length(text[at : at + _HEAD], path)
        body = text[at + _HEAD : at + _HEAD + length]
        at += _HEAD + length + _TAIL
        if at > len(text):
            raise InvalidDataError(_CUT.format(path))
        if _masked(body) != struct.unpack_from("<I", text, at - _TAIL)[0]:
            raise InvalidDataError(f"{path} is damaged: the checksum of a record is wrong.")
        yield body


def _length(head: bytes, path: str) -> int:
    """Return the length of a record's data, from its 12-byte header."""
    if len(head) < _HEAD:
        raise InvalidDataError(_CUT.format(path))
    length, checksum = struct.unpack("<QI", head)
    if _masked(head[:8]) != checksum:
        raise InvalidDataError(f"{path} is not a TFRecord file, or damaged: the checksum of a length is wrong.")
    return int(length)


def _masked(text: bytes) -> int:
    value: int = google_crc32c.value(text)
    return ((value >> 15 | value << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _stretches(path: str) -> Iterator[list[int]]:
    """Yield start, end and number of records of each block. Only the lengths of records are read."""
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
            at += _HEAD + _length(file.read(_HEAD), path) + _TAIL
            count += 1
            if at - begin >= _BLOCK or at >= end:
                yield [begin, at, count]
                begin, count = at, 0


def _is_packed(first: bytes) -> bool:
    """Return whether the first two bytes are those of a compressed file; as a length they would be 20 KB or more."""
    return first == _GZIP or first in _ZLIB


def _unpacked(text: bytes, path: str) -> bytes:
    try:
        return gzip.decompress(text) if text[:2] == _GZIP else zlib.decompress(text)
    except (OSError, EOFError, zlib.error) as error:
        raise InvalidDataError(f"{path} cannot be unpacked: {error}.") from error


@cache
def _example() -> Any:
    """Return a class for ``tf.train.Example``, created from its definition in a separate descriptor pool."""
    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="choros/example.proto", package="choros.example", syntax="proto3")

    def field(message: Any, number: int, name: str, kind: int | str, repeated: bool = False, **more: Any) -> None:
        label = kinds.LABEL_REPEATED if repeated else kinds.LABEL_OPTIONAL
        if isinstance(kind, str):
            more |= {"type_name": f".choros.example.{kind}"}
            kind = kinds.TYPE_MESSAGE
        message.field.add(name=name, number=number, type=kind, label=label, **more)

    feature = file.message_type.add(name="Feature")
    feature.oneof_decl.add(name="kind")
    for number, (name, kind) in enumerate(
        (("Bytes", kinds.TYPE_BYTES), ("Float", kinds.TYPE_FLOAT), ("Int64", kinds.TYPE_INT64)), 1
    ):
        field(file.message_type.add(name=f"{name}List"), 1, "value", kind, repeated=True)
        field(feature, number, f"{name.lower()}_list", f"{name}List", oneof_index=0)
    features = file.message_type.add(name="Features")
    entry = features.nested_type.add(name="FeatureEntry")
    entry.options.map_entry = True
    field(entry, 1, "key", kinds.TYPE_STRING)
    field(entry, 2, "value", "Feature")
    field(features, 1, "feature", "Features.FeatureEntry", repeated=True)
    field(file.message_type.add(name="Example"), 1, "features", "Features")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("choros.example.Example"))


def _features(text: bytes, path: str) -> dict[str, Any]:
    from google.protobuf.message import DecodeError

    try:
        features = _example().FromString(text).features.feature
    except DecodeError:
        raise InvalidDataError(f"{path} holds a record that is not a tf.train.Example.") from None
    return {name: _values(feature) for name, feature in sorted(features.items())}


def _values(feature: Any) -> Any:
    kind = feature.WhichOneof("kind")
    if kind == "bytes_list":
        return list(feature.bytes_list.value)
    if kind == "float_list":
        return np.array(feature.float_list.value, np.float32)
    return np.array(feature.int64_list.value, np.int64)


def _column(rows: list[Any], name: str, path: str) -> Any:
    """Return a feature of all records: a numeric array if all records have equally many numbers, else objects."""
    if any(row is None for row in rows):
        raise InvalidDataError(f"{path}: the feature {name!r} is not in every record.")
    lengths = {len(row) for row in rows}
    if isinstance(rows[0], list) or len(lengths) > 1:
        column = np.empty(len(rows), object)
        for i, row in enumerate(rows):
            column[i] = row[0] if isinstance(row, list) and len(row) == 1 else row
        return column
    stacked = np.stack(rows)
    return stacked[:, 0] if lengths == {1} else stacked
