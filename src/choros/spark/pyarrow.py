"""Conversion of Arrow batches to numpy arrays, without a copy if possible, and of arrays to Arrow batches."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from choros.errors import InvalidDataError, InvalidInputError
from choros.spark.feature_columns import ColumnSpec
from choros.spark.task_slots import setting
from choros.types import Array

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_ROWS_OF_BATCH = "spark.sql.execution.arrow.maxRecordsPerBatch"
_BYTES_OF_BATCH = "spark.sql.execution.arrow.maxBytesPerBatch"  # exists since Spark 4
_LARGEST = 2**31 - 1  # most bytes of a column with 32-bit offsets


def to_array(column: pa.Array, leaf: ColumnSpec) -> Array:
    """Return the rows of one column of a batch.

    Args:
        column: pa.Array, a column of a frame of ``normalise``.
        leaf: its description.

    Returns:
        Array of shape (rows, ...). It is read-only and a view of Arrow's memory, except for images with color channels.

    Raises:
        InvalidDataError: there are nulls, rows of different lengths or of a wrong shape, or invalid class indices.

    Example:
        >>> rows = pa.array([[1.0, 2.0], [3.0, 4.0]], pa.list_(pa.float32()))
        >>> to_array(rows, ColumnSpec("x", ("x",), "list")).tolist()
        [[1.0, 2.0], [3.0, 4.0]]
    """
    _refuse_nulls(column, leaf)
    rows = len(column)
    if leaf.kind == "image":
        images = _images(column, leaf)
    elif leaf.kind == "bytes":
        images = _bytes(column, leaf)
    else:
        sizes = list[int]()
        while pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
            sizes.append(_length(np.diff(column.offsets.to_numpy()), leaf))
            column = column.flatten()
            _refuse_nulls(column, leaf)
        images = column.to_numpy(zero_copy_only=True).reshape(rows, *sizes)
    if leaf.classes is not None:
        _refuse_no_class(images, leaf, leaf.classes)
    return _shaped(images, leaf)


def _refuse_nulls(column: pa.Array, leaf: ColumnSpec) -> None:
    if column.null_count:
        raise InvalidDataError(
            f"There are nulls in {leaf.description}: leave such rows out with nulls='drop' or dropna, or fill them "
            "(Imputer)."
        )


def _refuse_no_class(labels: Array, leaf: ColumnSpec, classes: int) -> None:
    wrong = (labels < 0) | (labels >= classes) | (labels != np.floor(labels))
    if leaf.ignored is not None:
        wrong &= labels != leaf.ignored
    if wrong.any():
        raise InvalidDataError(
            f"The label {labels[wrong][0]:g} in {leaf.description} is not a class: the model has {classes}, so labels "
            f"are whole numbers from 0 to {classes - 1} (StringIndexer makes such ones)."
        )


def _length(lengths: Array, leaf: ColumnSpec) -> int:
    if not lengths.size:
        return 0
    least, most = int(lengths.min()), int(lengths.max())
    if least != most:
        raise InvalidDataError(
            f"The rows of {leaf.description} have from {least} to {most} values: a batch needs rows of one length, "
            "so fill short ones up or cut long ones."
        )
    return most


def _bytes(column: pa.Array, leaf: ColumnSpec) -> Array:
    large = pa.types.is_large_binary(column.type)
    _, offsets, data = column.buffers()
    rows = len(column)
    places = np.frombuffer(offsets, np.int64 if large else np.int32)[column.offset : column.offset + rows + 1]
    size = _length(np.diff(places), leaf)
    flat = np.frombuffer(data, np.uint8)[places[0] : places[-1]] if rows and data is not None else np.empty(0, np.uint8)
    return flat.reshape(rows, size)


def _images(column: pa.Array, leaf: ColumnSpec) -> Array:
    parts = dict(zip([field.name for field in column.type], column.flatten(), strict=True))
    sizes = [_length(parts[name].to_numpy(), leaf) for name in ("height", "width", "nChannels")]
    values = _bytes(parts["data"], leaf)
    if values.shape[1] != int(np.prod(sizes)):
        raise InvalidDataError(f"The images of {leaf.description} are not 8 bits a channel: convert them first.")
    images = values.reshape(len(column), *sizes)
    if sizes[2] < 3:
        return images
    return images[..., [2, 1, 0, *range(3, sizes[2])]]  # Spark stores the channels as blue, green, red


def _shaped(array: Array, leaf: ColumnSpec) -> Array:
    if leaf.shape is None or array.shape[1:] == leaf.shape:
        return array
    if array.size != len(array) * int(np.prod(leaf.shape)):
        raise InvalidDataError(
            f"A row of {leaf.description} has the shape {array.shape[1:]}, but the model takes {leaf.shape}."
        )
    return array.reshape(len(array), *leaf.shape)


def batch_of(columns: Sequence[tuple[str, Any]]) -> Any:
    """Return an Arrow batch of named columns of Arrow or numpy. Arrays with several axes become lists.

    Example:
        >>> batch_of([("a", np.zeros((2, 3), "float32"))]).num_rows
        2
    """
    return pa.RecordBatch.from_arrays([_column(values) for _, values in columns], names=[name for name, _ in columns])


def struct_of(columns: Sequence[tuple[str, Any]]) -> Any:
    """Return one column of structs, whose fields are the named arrays.

    Example:
        >>> struct_of([("a", np.zeros(2)), ("b", np.ones((2, 1)))]).to_pylist()
        [{'a': 0.0, 'b': [1.0]}, {'a': 0.0, 'b': [1.0]}]
    """
    return pa.StructArray.from_arrays([_column(values) for _, values in columns], [name for name, _ in columns])


def _column(values: object) -> Any:
    if isinstance(values, (pa.Array, pa.ChunkedArray)):
        return values
    values = np.asarray(values)
    if values.ndim == 1:
        return pa.array(values)
    size = int(np.prod(values.shape[1:]))
    places = pa.array(np.arange(len(values) + 1, dtype=np.int32) * size)
    return pa.ListArray.from_arrays(places, pa.array(np.ascontiguousarray(values).reshape(-1)))


def hinted(call: Callable[[Any], Any], columns: int) -> Any:
    """Return a function of an iterator with the type hints from which Spark infers the kind of the UDF.

    Args:
        call: a function of an iterator of columns.
        columns: int. Number of columns.
    """

    def of_one(given: Iterator[pa.Array]) -> Iterator[pa.Array]:
        return call(given)  # type: ignore[no-any-return]

    def of_several(given: Iterator[tuple[pa.Array, ...]]) -> Iterator[pa.Array]:
        return call(given)  # type: ignore[no-any-return]

    return of_one if columns == 1 else of_several


def payload(rank: int, data: bytes, most: int) -> Iterator[Any]:
    """Yield a rank's bytes as rows (rank, part, payload) of at most ``most`` bytes."""
    parts: Sequence[bytes] = [data[at : at + most] for at in range(0, len(data), most)] or [b""]
    for number, part in enumerate(parts):
        yield pa.RecordBatch.from_arrays(
            [pa.array([rank], pa.int32()), pa.array([number], pa.int32()), pa.array([part], pa.binary())],
            names=["rank", "part", "payload"],
        )


def refuse_large_batches(session: SparkSession, batches: Sequence[Any]) -> None:
    """Refuse rows so large that an Arrow batch of Spark would have more than 2 GB in one column.

    Spark limits only the number of rows in a batch, and the offsets of a column have 32 bits.

    Args:
        session: SparkSession.
        batches: list of pyarrow.RecordBatch with the first rows of the frame.

    Raises:
        InvalidInputError: a column is too large. The message names it and the setting that limits the rows.
    """
    rows = sum(batch.num_rows for batch in batches)
    limit = int(setting(session, _ROWS_OF_BATCH, "10000"))
    bound = re.match(r"\d+", setting(session, _BYTES_OF_BATCH, "0"))  # Spark accepts only a number as the default
    if not rows or (bound and 0 < int(bound[0]) <= _LARGEST):
        return
    for number, name in enumerate(batches[0].schema.names):
        size = sum(batch.column(number).nbytes for batch in batches) // rows
        if size * (limit if limit > 0 else rows) > _LARGEST:
            raise InvalidInputError(
                f"A row of the column {name!r} has about {size:,} bytes, so that {limit:,} rows, one of Spark's Arrow "
                f'batches, exceed 2 GB: session.conf.set("{_ROWS_OF_BATCH}", {max(2**28 // size, 1)}).'
            )


def few(frame: DataFrame) -> list[Any]:
    """Return the rows of a small frame as Arrow batches. Spark 3.5 lacks ``toArrow``, so rows are collected there."""
    if hasattr(frame, "toArrow"):
        batches: list[Any] = frame.toArrow().to_batches()
        return batches
    from pyspark.sql.pandas.types import to_arrow_schema

    rows = [row.asDict(recursive=True) for row in frame.collect()]
    return [pa.RecordBatch.from_pylist(rows, schema=to_arrow_schema(frame.schema))]
