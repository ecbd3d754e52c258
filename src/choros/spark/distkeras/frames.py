"""DataFrames with the behavior in dist-keras: ``toDF()`` without names works, and vectors may be arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pyspark.ml.functions import vector_to_array
from pyspark.sql import functions as F
from pyspark.sql import types as T

from choros.errors import InvalidDataError
from choros.spark.feature_columns import is_vector, quoted

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame


def legacy(frame: DataFrame) -> DataFrame:
    """Make ``toDF()`` without names return the frame itself, as old notebooks call it on RDDs; return the frame."""
    named = frame.toDF

    def toDF(*names: Any) -> DataFrame:
        return named(*names) if names else frame

    frame.toDF = toDF
    return frame


def column(frame: DataFrame, name: str) -> Column:
    """Return a column.

    Raises:
        InvalidDataError: the frame has no column with this name.
    """
    if name not in frame.columns:
        raise InvalidDataError(f"The frame has no column {name!r}. It has {', '.join(frame.columns)}.")
    return F.col(quoted(name))


def array(frame: DataFrame, name: str) -> Column:
    """Return a column of vectors or arrays as arrays of doubles.

    Raises:
        InvalidDataError: the column holds neither vectors nor arrays.
    """
    found_column, kind = column(frame, name), frame.schema[name].dataType
    if is_vector(kind):
        return vector_to_array(found_column)
    if isinstance(kind, T.ArrayType):
        return found_column.cast("array<double>")
    raise InvalidDataError(
        f"The column {name!r} is of type {kind.simpleString()}: give a column of vectors or of arrays."
    )
