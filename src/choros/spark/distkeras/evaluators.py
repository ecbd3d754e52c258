"""dist-keras' evaluators."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from pyspark.sql import functions as F

from choros.spark.distkeras.frames import column


class Evaluator(ABC):
    """The base class of what makes a figure of labels and predictions.

    Args:
        label_col, prediction_col: str.
    """

    def __init__(self, label_col: str = "label", prediction_col: str = "prediction") -> None:
        self.label_column, self.prediction_column = label_col, prediction_col

    @abstractmethod
    def evaluate(self, dataframe: Any) -> float:
        """Return the figure."""


class AccuracyEvaluator(Evaluator):
    """The share of the rows whose prediction is the label.

    Args:
        label_col, prediction_col: str. Columns of class numbers.
    """

    def evaluate(self, dataframe: Any) -> float:
        """Return the share, found in one job."""
        same = column(dataframe, self.label_column) == column(dataframe, self.prediction_column)
        return float(dataframe.agg(F.avg(same.cast("double"))).collect()[0][0] or 0.0)
