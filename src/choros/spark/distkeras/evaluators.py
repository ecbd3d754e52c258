"""The evaluators of dist-keras."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from pyspark.sql import functions as F

from choros.object_text import call_text
from choros.spark.distkeras.frames import column

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


class Evaluator(ABC):
    """The base class of evaluators, which compute a number from labels and predictions.

    Args:
        label_col, prediction_col: str.
    """

    def __init__(self, label_col: str = "label", prediction_col: str = "prediction") -> None:
        self.label_column, self.prediction_column = label_col, prediction_col

    def __repr__(self) -> str:
        return call_text(self, label_col=self.label_column, prediction_col=self.prediction_column)

    @abstractmethod
    def evaluate(self, dataframe: DataFrame) -> float:
        """Return the number."""


class AccuracyEvaluator(Evaluator):
    """The fraction of rows whose prediction equals the label.

    Args:
        label_col, prediction_col: str. Columns of class indices.
    """

    def evaluate(self, dataframe: DataFrame) -> float:
        """Return the fraction, computed in one Spark job; 0.0 without rows."""
        same = column(dataframe, self.label_column) == column(dataframe, self.prediction_column)
        return float(dataframe.agg(F.avg(same.cast("double"))).collect()[0][0] or 0.0)
