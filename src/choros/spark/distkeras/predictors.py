"""dist-keras' predictors. They add a vector of the model's output, computed in batches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from choros.object_text import call_text
from choros.spark.distkeras.frames import legacy
from choros.spark.model import KerasModel
from choros.spark.prediction_columns import outputs_of

if TYPE_CHECKING:
    import keras
    from pyspark.sql import DataFrame

    from choros.spark.distkeras.base import Columns


class Predictor(ABC):
    """The base class of predictors, which add predictions to a DataFrame.

    Args:
        keras_model: keras.Model.
    """

    def __init__(self, keras_model: keras.Model) -> None:
        self.model = keras_model

    def __repr__(self) -> str:
        return call_text(self, self.model)

    @abstractmethod
    def predict(self, dataframe: DataFrame) -> DataFrame:
        """Return the frame with predictions."""


class ModelPredictor(Predictor):
    """A predictor that adds a vector of the model's first output.

    Args:
        keras_model: keras.Model.
        features_col: str, or a list of names, one for each input. Defaults to "features".
        output_col: str. An existing column with this name is replaced. Defaults to "prediction".
    """

    def __init__(
        self, keras_model: keras.Model, features_col: Columns = "features", output_col: str = "prediction"
    ) -> None:
        super().__init__(keras_model)
        self.features_column, self.output_column = features_col, output_col

    def __repr__(self) -> str:
        return call_text(self, self.model, features_col=self.features_column, output_col=self.output_column)

    def predict(self, dataframe: DataFrame) -> DataFrame:
        """Return the frame with predictions; ``toDF()`` without names returns the frame itself."""
        first = [name for name, _ in outputs_of(self.model) or [("", ())]][:1]
        stage = KerasModel(
            self.model,
            featuresCol=self.features_column,
            task="raw",
            predictionCol="",
            probabilityCol="",
            rawPredictionCol=dict.fromkeys(first, self.output_column),
        )
        return legacy(stage.transform(dataframe.drop(self.output_column)))

    transform = predict
