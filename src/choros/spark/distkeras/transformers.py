"""dist-keras' transformers, implemented with SQL functions: no Python code runs for a row."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any

from pyspark.ml.functions import array_to_vector
from pyspark.sql import functions as F

from choros.errors import InvalidInputError
from choros.object_text import call_text
from choros.spark.distkeras.frames import array, column, legacy
from choros.spark.feature_columns import quoted

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame


class Transformer(ABC):
    """The base class of transformers, which add columns to a DataFrame."""

    def transform(self, dataframe: DataFrame) -> DataFrame:
        """Return the frame with new columns; ``toDF()`` without names returns the frame itself."""
        return legacy(self._transform(dataframe))

    @abstractmethod
    def _transform(self, frame: DataFrame) -> DataFrame:
        """Return the frame with the new columns."""


class MinMaxTransformer(Transformer):
    """A transformer that scales values linearly from one range to another.

    Args:
        o_min, o_max: float. The old range.
        n_min, n_max: float. The new range.
        input_col, output_col: str.
        is_vector: bool. True for a column of vectors or arrays, False for numbers. Defaults to True.

    Raises:
        InvalidInputError: ``o_min`` equals ``o_max``.
    """

    def __init__(
        self,
        o_min: float,
        o_max: float,
        n_min: float,
        n_max: float,
        input_col: str,
        output_col: str,
        is_vector: bool = True,
    ) -> None:
        if o_min == o_max:
            raise InvalidInputError(f"o_min and o_max are both {o_min}: give a range.")
        self._ranges = (o_min, o_max, n_min, n_max)
        self.o_max, self.n_max = float(o_max), float(n_max)
        self.scale = (n_max - n_min) / (o_max - o_min)
        self.input_column, self.output_column, self.is_vector = input_col, output_col, is_vector

    def __repr__(self) -> str:
        return call_text(self, *self._ranges, self.input_column, self.output_column, is_vector=self.is_vector)

    def _transform(self, frame: DataFrame) -> DataFrame:
        def moved(value: Any) -> Column:
            return (value - self.o_max) * self.scale + self.n_max

        if not self.is_vector:
            return frame.withColumn(self.output_column, moved(column(frame, self.input_column).cast("double")))
        made = F.transform(array(frame, self.input_column), moved)
        return frame.withColumn(self.output_column, array_to_vector(made))


class BinaryLabelTransformer(Transformer):
    """A transformer that converts one label to the vector [1, 0], and all others to [0, 1].

    Args:
        input_column, output_column: str.
        label: the label for [1, 0].
    """

    def __init__(self, input_column: str, output_column: str, label: object) -> None:
        self.input_column, self.output_column, self.label = input_column, output_column, label

    def __repr__(self) -> str:
        return call_text(self, self.input_column, self.output_column, self.label)

    def _transform(self, frame: DataFrame) -> DataFrame:
        is_it = column(frame, self.input_column) == F.lit(self.label)
        weight, other = (F.array(F.lit(float(a)), F.lit(float(1 - a))) for a in (1, 0))
        return frame.withColumn(self.output_column, array_to_vector(F.when(is_it, weight).otherwise(other)))


class StandardTransformer(Transformer):
    """A transformer that subtracts the mean of each column, and divides by the population standard deviation.

    Args:
        columns: names of columns of numbers. One Spark job computes the values of all.
        suffix: str. The suffix of the new columns' names. Defaults to "_normalized".
    """

    def __init__(self, columns: Sequence[str], suffix: str = "_normalized") -> None:
        self.columns, self.suffix = list(columns), suffix

    def __repr__(self) -> str:
        return call_text(self, self.columns, suffix=self.suffix)

    def _transform(self, frame: DataFrame) -> DataFrame:
        aggregates = [
            aggregate for c in self.columns for aggregate in (F.avg(column(frame, c)), F.stddev_pop(column(frame, c)))
        ]
        figures = frame.agg(*aggregates).collect()[0]
        made = {}
        for number, name in enumerate(self.columns):
            mean, deviation = figures[2 * number], figures[2 * number + 1]
            made[name + self.suffix] = (F.col(quoted(name)) - F.lit(mean)) / F.lit(deviation or 1.0)
        return frame.withColumns(made)


class DenseTransformer(Transformer):
    """A transformer that converts sparse vectors to dense vectors.

    Args:
        input_col, output_col: str.
    """

    def __init__(self, input_col: str, output_col: str) -> None:
        self.input_column, self.output_column = input_col, output_col

    def __repr__(self) -> str:
        return call_text(self, self.input_column, self.output_column)

    def _transform(self, frame: DataFrame) -> DataFrame:
        return frame.withColumn(self.output_column, array_to_vector(array(frame, self.input_column)))


class ReshapeTransformer(Transformer):
    """A transformer that converts vectors to nested arrays.

    Args:
        input_col, output_col: str.
        shape: the shape of a row, for example (28, 28, 1).

    Raises:
        InvalidInputError: the shape is empty, or a size is below 1.
    """

    def __init__(self, input_col: str, output_col: str, shape: Sequence[int]) -> None:
        if not shape or any(int(size) < 1 for size in shape):
            raise InvalidInputError(f"shape={tuple(shape)}: give whole numbers, 1 or more.")
        self.input_column, self.output_column, self.shape = input_col, output_col, [int(size) for size in shape]

    def __repr__(self) -> str:
        return call_text(self, self.input_column, self.output_column, self.shape)

    def _transform(self, frame: DataFrame) -> DataFrame:
        values, count = array(frame, self.input_column), prod(self.shape)
        wrong = F.raise_error(F.format_string(f"A row of %d values cannot have the shape {self.shape}", F.size(values)))
        return frame.withColumn(
            self.output_column, F.when(F.size(values) == count, nested(values, self.shape)).otherwise(wrong)
        )


def nested(values: object, shape: Sequence[int]) -> Any:
    """Return an expression for a flat array as nested arrays."""
    if len(shape) == 1:
        return values
    row_size = prod(shape[1:])
    return F.transform(
        F.sequence(F.lit(0), F.lit(shape[0] - 1)),
        lambda number: nested(F.slice(values, number * row_size + 1, F.lit(row_size)), shape[1:]),
    )


class OneHotTransformer(Transformer):
    """A transformer that converts class indices to one-hot vectors.

    Args:
        output_dim: int. Number of classes.
        input_col, output_col: str.
    """

    def __init__(self, output_dim: int, input_col: str, output_col: str) -> None:
        self.input_column, self.output_column, self.output_dim = input_col, output_col, int(output_dim)

    def __repr__(self) -> str:
        return call_text(self, self.output_dim, self.input_column, self.output_column)

    def _transform(self, frame: DataFrame) -> DataFrame:
        number = column(frame, self.input_column).cast("int")
        wrong = F.raise_error(F.format_string(f"The label %d is none of 0 to {self.output_dim - 1}", number))
        made = F.transform(
            F.sequence(F.lit(0), F.lit(self.output_dim - 1)), lambda index: (index == number).cast("double")
        )
        inside = (number >= 0) & (number < self.output_dim)
        return frame.withColumn(self.output_column, array_to_vector(F.when(inside, made).otherwise(wrong)))


class LabelVectorTransformer(OneHotTransformer):
    """The earlier name of ``OneHotTransformer``.

    Args:
        output_dim: int. Number of classes.
        input_col, output_col: str. Defaults to "label" and "label_vectorized".
    """

    def __init__(self, output_dim: int, input_col: str = "label", output_col: str = "label_vectorized") -> None:
        super().__init__(output_dim, input_col, output_col)


LabelVectorTransformerUDF = LabelVectorTransformer


class LabelIndexTransformer(Transformer):
    """A transformer that converts a vector to a class index.

    The index is that of the first value that reaches a threshold, else that of the largest value.

    Args:
        output_dim: int. Number of classes.
        input_col: str. Defaults to "prediction".
        output_col: str. Defaults to both ``prediction_index`` and ``predicted_index``, the names in the two
            generations of dist-keras.
        default_index: int. The index for vectors without values. Defaults to 0.
        activation_threshold: float. Defaults to 0.55.
    """

    def __init__(
        self,
        output_dim: int,
        input_col: str = "prediction",
        output_col: str | None = None,
        default_index: int = 0,
        activation_threshold: float = 0.55,
    ) -> None:
        self.output_dim, self.input_column = int(output_dim), input_col
        self.output_columns = ["prediction_index", "predicted_index"] if output_col is None else [output_col]
        self.default_index, self.activation_threshold = default_index, float(activation_threshold)

    def __repr__(self) -> str:
        return call_text(
            self,
            self.output_dim,
            self.input_column,
            output_col=self.output_columns[0] if len(self.output_columns) == 1 else None,
            default_index=self.default_index,
            activation_threshold=self.activation_threshold,
        )

    def _transform(self, frame: DataFrame) -> DataFrame:
        values = array(frame, self.input_column)
        above = F.transform(values, lambda one: one >= self.activation_threshold)
        # called by name, as array_position of pyspark 3.5 does not accept a column as the value to find
        reached = F.call_function("array_position", above, F.lit(True))
        largest = F.call_function("array_position", values, F.array_max(values))
        index = F.when(reached > 0, reached - 1).when(largest > 0, largest - 1).otherwise(self.default_index)
        return frame.withColumns(dict.fromkeys(self.output_columns, index.cast("double")))
