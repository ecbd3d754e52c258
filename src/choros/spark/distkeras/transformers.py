"""dist-keras' transformers, made of SQL functions: no Python runs for any row."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from math import prod
from typing import Any

from pyspark.ml.functions import array_to_vector
from pyspark.sql import functions as F

from choros.errors import InvalidInputError
from choros.spark.distkeras.frames import array, column, legacy
from choros.spark.feature_columns import quoted


class Transformer(ABC):
    """The base class of what makes another frame of a frame."""

    def transform(self, dataframe: Any) -> Any:
        """Return the frame with another column; a bare ``toDF()`` on it gives itself."""
        return legacy(self._transform(dataframe))

    @abstractmethod
    def _transform(self, frame: Any) -> Any:
        """Return the frame with its column."""


class MinMaxTransformer(Transformer):
    """Brings values from one range to another one.

    Args:
        o_min, o_max: float. The range that they have.
        n_min, n_max: float. The range that they get.
        input_col, output_col: str.
        is_vector: bool. Whether the column holds vectors (or arrays), else numbers.
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
        self.o_max, self.n_max = float(o_max), float(n_max)
        self.scale = (n_max - n_min) / (o_max - o_min)
        self.input_column, self.output_column, self.is_vector = input_col, output_col, is_vector

    def _transform(self, frame: Any) -> Any:
        def moved(value: Any) -> Any:
            return (value - self.o_max) * self.scale + self.n_max

        if not self.is_vector:
            return frame.withColumn(self.output_column, moved(column(frame, self.input_column).cast("double")))
        made = F.transform(array(frame, self.input_column), moved)
        return frame.withColumn(self.output_column, array_to_vector(made))


class BinaryLabelTransformer(Transformer):
    """Makes the vector [1, 0] of one label, and [0, 1] of all others.

    Args:
        input_column, output_column: str.
        label: the one.
    """

    def __init__(self, input_column: str, output_column: str, label: Any) -> None:
        self.input_column, self.output_column, self.label = input_column, output_column, label

    def _transform(self, frame: Any) -> Any:
        is_it = column(frame, self.input_column) == F.lit(self.label)
        one, other = (F.array(F.lit(float(a)), F.lit(float(1 - a))) for a in (1, 0))
        return frame.withColumn(self.output_column, array_to_vector(F.when(is_it, one).otherwise(other)))


class StandardTransformer(Transformer):
    """Subtracts the mean of columns of numbers and divides by their (population's) standard deviation.

    Args:
        columns: names; one pass finds the figures of all.
        suffix: str. Of the names of the new columns.
    """

    def __init__(self, columns: Sequence[str], suffix: str = "_normalized") -> None:
        self.columns, self.suffix = list(columns), suffix

    def _transform(self, frame: Any) -> Any:
        asked = [one for c in self.columns for one in (F.avg(column(frame, c)), F.stddev_pop(column(frame, c)))]
        figures = frame.agg(*asked).collect()[0]
        made = {}
        for number, name in enumerate(self.columns):
            mean, deviation = figures[2 * number], figures[2 * number + 1]
            made[name + self.suffix] = (F.col(quoted(name)) - F.lit(mean)) / F.lit(deviation or 1.0)
        return frame.withColumns(made)


class DenseTransformer(Transformer):
    """Makes dense vectors of sparse ones.

    Args:
        input_col, output_col: str.
    """

    def __init__(self, input_col: str, output_col: str) -> None:
        self.input_column, self.output_column = input_col, output_col

    def _transform(self, frame: Any) -> Any:
        return frame.withColumn(self.output_column, array_to_vector(array(frame, self.input_column)))


class ReshapeTransformer(Transformer):
    """Makes nested arrays of vectors.

    Args:
        input_col, output_col: str.
        shape: of a row, for example (28, 28, 1).
    """

    def __init__(self, input_col: str, output_col: str, shape: Sequence[int]) -> None:
        if not shape or any(int(size) < 1 for size in shape):
            raise InvalidInputError(f"shape={tuple(shape)}: give whole numbers, 1 or more.")
        self.input_column, self.output_column, self.shape = input_col, output_col, [int(size) for size in shape]

    def _transform(self, frame: Any) -> Any:
        values, count = array(frame, self.input_column), prod(self.shape)
        wrong = F.raise_error(F.format_string(f"A row of %d values cannot have the shape {self.shape}", F.size(values)))
        return frame.withColumn(
            self.output_column, F.when(F.size(values) == count, nested(values, self.shape)).otherwise(wrong)
        )


def nested(values: Any, shape: Sequence[int]) -> Any:
    """Return nested arrays of a flat one."""
    if len(shape) == 1:
        return values
    each = prod(shape[1:])
    return F.transform(
        F.sequence(F.lit(0), F.lit(shape[0] - 1)),
        lambda number: nested(F.slice(values, number * each + 1, F.lit(each)), shape[1:]),
    )


class OneHotTransformer(Transformer):
    """Makes a vector of zeros with a one of each class number.

    Args:
        output_dim: int. How many classes there are.
        input_col, output_col: str.
    """

    def __init__(self, output_dim: int, input_col: str, output_col: str) -> None:
        self.input_column, self.output_column, self.output_dim = input_col, output_col, int(output_dim)

    def _transform(self, frame: Any) -> Any:
        number = column(frame, self.input_column).cast("int")
        wrong = F.raise_error(F.format_string(f"The label %d is none of 0 to {self.output_dim - 1}", number))
        made = F.transform(
            F.sequence(F.lit(0), F.lit(self.output_dim - 1)), lambda index: (index == number).cast("double")
        )
        inside = (number >= 0) & (number < self.output_dim)
        return frame.withColumn(self.output_column, array_to_vector(F.when(inside, made).otherwise(wrong)))


class LabelVectorTransformer(OneHotTransformer):
    """``OneHotTransformer`` by its first name.

    Args:
        output_dim: int. How many classes there are.
        input_col, output_col: str.
    """

    def __init__(self, output_dim: int, input_col: str = "label", output_col: str = "label_vectorized") -> None:
        super().__init__(output_dim, input_col, output_col)


LabelVectorTransformerUDF = LabelVectorTransformer


class LabelIndexTransformer(Transformer):
    """Makes a class number of a vector: the first that reaches a threshold, else that of the largest value.

    Args:
        output_dim: int. How many classes there are.
        input_col: str.
        output_col: str. By default both ``prediction_index`` and ``predicted_index``, which dist-keras' two generations
            have.
        default_index: int. For vectors without any.
        activation_threshold: float.
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

    def _transform(self, frame: Any) -> Any:
        values = array(frame, self.input_column)
        above = F.transform(values, lambda one: one >= self.activation_threshold)
        # by name: Spark 3.5's array_position takes no column for what is looked for
        reached = F.call_function("array_position", above, F.lit(True))
        largest = F.call_function("array_position", values, F.array_max(values))
        index = F.when(reached > 0, reached - 1).when(largest > 0, largest - 1).otherwise(self.default_index)
        return frame.withColumns(dict.fromkeys(self.output_columns, index.cast("double")))
