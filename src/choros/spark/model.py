"""``KerasModel``: a stage of Spark ML that applies a Keras model in the executors that hold the rows."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from pyspark.ml import Model
from pyspark.ml.functions import array_to_vector
from pyspark.ml.util import MLReadable, MLWritable
from pyspark.sql import functions as F
from pyspark.sql import types as T

import choros
from choros.errors import InvalidInputError
from choros.spark.feature_columns import check_frame, letters, normalise, quoted
from choros.spark.ml_persistence import KerasReader, KerasWriter, written
from choros.spark.params import ColumnParams
from choros.spark.predict import PredictTask, answer, predict
from choros.spark.prediction_columns import describe, features_of, inputs_of
from choros.spark.task_process import keras_here
from choros.training.model_io.serialization import PackedModel, pack_with_weights
from choros.types import Array

if TYPE_CHECKING:
    import keras
    from pyspark.sql import DataFrame


class KerasModel(Model, ColumnParams, MLReadable, MLWritable):  # type: ignore[misc,type-arg]
    """A trained Keras model that adds columns of predictions to DataFrames, also to streams.

    All columns are kept. A classifier adds ``prediction`` (the class index as a double) and ``probability`` (a vector).
    If its loss takes logits, it also adds ``rawPrediction``. A regression of one value adds ``prediction``. Any other
    output is a vector in ``rawPrediction``. With several outputs, an underscore and the output's name are appended.

    Args:
        model: keras.Model, built.
        params: ``featuresCol`` ("features"), ``predictionCol``, ``probabilityCol``, ``rawPredictionCol`` ("" omits the
            column), ``task`` ("auto", "classification", "regression", "raw"), ``predictBatchSize`` (1,024 rows),
            ``nulls`` ("error" or "drop").

    Attributes:
        history: keras.callbacks.History of the training, or None.
        models: list of keras.Model. The members, after training by Ensemble; the prediction is their mean.

    Example:
        >>> predicted = KerasModel(model, featuresCol="features").transform(frame)
        >>> predicted.columns
        ['features', 'label', 'prediction', 'probability']
    """

    def __init__(self, model: keras.Model | None = None, **params: Any) -> None:
        super().__init__()
        self._model, self._written = model, dict[str, Any]()
        self.history: Any = None
        self.models: list[Any] = []
        self.setParams(**params)

    @property
    def keras_model(self) -> keras.Model:
        """The Keras model."""
        if self._model is None:
            raise InvalidInputError("This KerasModel has no model: give one, KerasModel(model), or load a saved one.")
        return self._model

    @keras_model.setter
    def keras_model(self, model: keras.Model) -> None:
        self._model, self._written = model, {}

    @property
    def keras_bytes(self) -> bytes:
        """The model as the bytes of a ``.keras`` file."""
        return written(self.keras_model)

    def write(self) -> KerasWriter:
        """Return a writer for this stage."""
        return KerasWriter(self)

    @classmethod
    def read(cls) -> KerasReader:
        """Return a reader for stages of this class."""
        return KerasReader(cls)

    def _packed(self) -> tuple[PackedModel, list[Array]]:
        """Return the model and its weights."""
        if "bytes" not in self._written:
            self._written["bytes"] = pack_with_weights(self.keras_model)
        packed: tuple[PackedModel, list[Array]] = self._written["bytes"]
        return packed

    def _transform(self, dataset: DataFrame) -> DataFrame:
        check_frame(dataset)
        model = self.keras_model
        features = features_of(model, self.value("featuresCol"))
        task, *names = (self.value(name) for name in _OUTPUTS)
        outputs = describe(model, task, *names)
        pairs = [pair for output in outputs for pair in output.names()]
        made, named, same = dict(pairs), [name for name, _ in pairs], letters(dataset)
        if twice := [
            (first, two) for i, first in enumerate(named) for two in named[i + 1 :] if same(first) == same(two)
        ]:
            raise InvalidInputError(
                f"This model would add columns {twice[0][0]!r} and {twice[0][1]!r}: name them differently."
            )
        existing = {same(name): name for name in dataset.columns}
        if clash := [existing[same(name)] for name in made if same(name) in existing]:
            raise InvalidInputError(
                f"The frame has a column {clash[0]!r} already: drop it, or name what this model adds otherwise."
            )
        import keras

        fields = dataset.schema.fields
        wide, columns = normalise(
            dataset,
            features,
            inputs=inputs_of(model),
            floatx="float64" if keras.config.floatx() == "float64" else "float32",
            nulls=self.value("nulls"),
            keep=True,
        )
        order = PredictTask(
            *self._packed(),
            keras_here(),
            choros.__version__,
            columns,
            len(fields),
            outputs,
            int(self.value("predictBatchSize")),
        )
        added = [T.StructField(name, T.ArrayType(T.DoubleType()) if v else T.DoubleType()) for name, v in made.items()]
        predicted = _by_columns(wide, order, added) if _ARROW_UDF else _by_rows(wide, order, added, fields)
        vectors = {name: array_to_vector(F.col(quoted(name))) for name, vector in made.items() if vector}
        return predicted.withColumns(vectors) if vectors else predicted


_OUTPUTS = ("task", "predictionCol", "probabilityCol", "rawPredictionCol")


_ARROW_UDF = hasattr(F, "arrow_udf")  # since Spark 4.1
_MADE = "choros_made"


def _by_columns(wide: DataFrame, order: PredictTask, added: list[Any]) -> DataFrame:
    """Send only the columns that the model reads to Python; all other columns stay in the JVM."""
    from choros.spark.pyarrow import hinted

    leaves = order.columns.leaves
    made = F.arrow_udf(hinted(partial(answer, order), len(leaves)), T.StructType(added))
    # marked as nondeterministic: else Spark would compute the prediction twice for a filter on it
    wide = wide.withColumn(_MADE, made.asNondeterministic()(*map(F.col, leaves)))
    output = wide.select("*", *(F.col(f"{_MADE}.{quoted(output.name)}").alias(output.name) for output in added))
    return output.drop(*leaves, _MADE)  # drop instead of select, as names of the kept columns may be ambiguous


def _by_rows(wide: DataFrame, order: PredictTask, added: list[Any], fields: list[Any]) -> DataFrame:
    """Send whole rows to Python and back, with temporary unique names."""
    names = [f"choros_kept{number}" for number in range(len(fields))]
    fields_kept = [
        T.StructField(name, field.dataType, field.nullable, field.metadata)
        for name, field in zip(names, fields, strict=True)
    ]
    made = wide.toDF(*names, *order.columns.leaves).mapInArrow(
        partial(predict, order), T.StructType([*fields_kept, *added])
    )
    return made.toDF(*(field.name for field in [*fields, *added]))
