"""``KerasEstimator``: a stage of Spark ML that trains a compiled Keras model on a DataFrame."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pyspark.ml import Estimator
from pyspark.ml.param import TypeConverters
from pyspark.ml.util import MLReadable, MLWritable
from pyspark.sql import functions as F
from pyspark.sql import types as T

from choros import algorithms
from choros.backends.host_values import host_value
from choros.errors import InvalidInputError
from choros.spark.algorithm_options import by_name
from choros.spark.feature_columns import check_frame, normalise, quoted
from choros.spark.frame_trainer import train
from choros.spark.ml_persistence import KerasReader, KerasWriter, written
from choros.spark.model import KerasModel
from choros.spark.params import ColumnParams, param
from choros.spark.prediction_columns import classed, features_of, inputs_of, outputs_of

if TYPE_CHECKING:
    import keras
    from pyspark.sql import DataFrame

_OF_MODEL = ("featuresCol", "predictionCol", "probabilityCol", "rawPredictionCol", "task", "predictBatchSize", "nulls")
_copying = threading.Lock()  # CrossValidator fits in several threads, and Keras' counters of names are global
_OPTIONS = ("window", "alpha", "rho", "momentum")


def _plain(algorithm: object) -> Any:
    """Return a form for JSON, so that grids of algorithms can be saved."""
    of_ours = isinstance(algorithm, (type, algorithms.Algorithm))
    return algorithms.to_config(by_name(algorithm)) if of_ours else algorithm


class KerasEstimator(Estimator, ColumnParams, MLReadable, MLWritable):  # type: ignore[misc,type-arg]
    """An estimator that trains a Keras model on a DataFrame, with one worker in each task, by any algorithm.

    All hyper-parameters are Params, so CrossValidator and ParamGridBuilder work. A copy of the given model is trained.

    Args:
        model: a compiled keras.Model.
        callbacks: Keras callbacks, or a function that creates them for each fit (required for CrossValidator). They run
            in the driver, and are not saved with the estimator.
        profile: pyspark ResourceProfile of the tasks (cores and GPUs), or None. It is not saved.
        params: the Params below by name. ``algorithm`` may also be an algorithm (``choros.AEASGD(window=32)``).

    Example:
        >>> estimator = KerasEstimator(model, algorithm="aeasgd", workers=2, epochs=2, batchSize=8, verbose=0)
        >>> fitted = Pipeline(stages=[estimator]).fit(frame)
        >>> len(fitted.stages[0].history.history["loss"])
        2
    """

    labelCol = param("labelCol", "the target: a column, a list of columns, or a dict; '' is none")
    weightCol = param("weightCol", "sample weights: a column, or a list or dict as the outputs are; '' is none")
    algorithm = param("algorithm", "an algorithm, its name or its configuration (choros.algorithms())", _plain)
    workers = param("workers", "workers that train at once; auto is all free task slots")
    epochs = param("epochs", "passes over the rows", TypeConverters.toInt, least=1)
    batchSize = param("batchSize", "rows of a global batch, divided among the workers", TypeConverters.toInt, least=1)
    learningRate = param("learningRate", "the optimizer's rate, not the compiled one", TypeConverters.toFloat, least=0)
    window = param("window", "optimizer steps between two exchanges", TypeConverters.toInt, least=0)
    alpha = param("alpha", "the elastic force of EASGD, AEASGD and EAMSGD", TypeConverters.toFloat, least=0)
    rho = param("rho", "alpha divided by the learning rate, as in dist-keras", TypeConverters.toFloat, least=0)
    momentum = param("momentum", "EAMSGD's momentum", TypeConverters.toFloat, least=0)
    algorithmOptions = param("algorithmOptions", "further hyper-parameters of the algorithm, by name")
    validationSplit = param("validationSplit", "share of the rows to validate with", TypeConverters.toFloat, least=0)
    validationCol = param("validationCol", "a boolean column that is true for rows to validate with")
    classWeight = param("classWeight", "a dict from class number to weight")
    seed = param("seed", "order of the rows, random layers and validation split", TypeConverters.toInt)
    shuffle = param("shuffle", "whether rows are in another order in each epoch", TypeConverters.toBoolean)
    strict = param("strict", "whether unstable settings are refused; else they warn", TypeConverters.toBoolean)
    verbose = param("verbose", "as in Keras", TypeConverters.toInt)
    maxRestarts = param(
        "maxRestarts", "how often a run is restarted after it lost a worker", TypeConverters.toInt, least=0
    )
    timeout = param("timeout", "seconds without a step after which a worker is hung", TypeConverters.toFloat, above=0)

    def __init__(
        self,
        model: keras.Model | None = None,
        *,
        callbacks: Sequence[keras.callbacks.Callback] | keras.callbacks.CallbackList | None = None,
        profile: object = None,
        **params: Any,
    ) -> None:
        super().__init__()
        self.keras_model, self.callbacks, self.profile = model, callbacks, profile
        self._setDefault(
            labelCol="label",
            weightCol="",
            algorithm="allreduce",
            workers="auto",
            epochs=1,
            batchSize=32,
            algorithmOptions={},
            validationSplit=0.0,
            validationCol="",
            shuffle=True,
            strict=True,
            verbose=0,
            maxRestarts=0,
            timeout=300.0,
        )
        self.setParams(**params)

    @property
    def keras_bytes(self) -> bytes:
        """The compiled model as the bytes of a ``.keras`` file."""
        return written(self._given())

    def write(self) -> KerasWriter:
        """Return a writer for this stage."""
        return KerasWriter(self)

    @classmethod
    def read(cls) -> KerasReader:
        """Return a reader for stages of this class."""
        return KerasReader(cls)

    def _given(self) -> Any:
        from choros.training.validation import check_model

        if self.keras_model is None:
            raise InvalidInputError(
                "This KerasEstimator has no model: give a compiled one, KerasEstimator(model, ...)."
            )
        check_model(self.keras_model)
        return self.keras_model

    def _fit(self, dataset: DataFrame) -> KerasModel:
        import keras

        check_frame(dataset)
        model, value = copied(self._given(), self.value("learningRate")), self.value
        rate = float(host_value(model.optimizer.learning_rate))
        options = {name: value(name) for name in _OPTIONS} | dict(value("algorithmOptions"))
        algorithm = by_name(value("algorithm"), learning_rate=rate, **options)
        weight = value("weightCol") or None
        if value("classWeight"):
            dataset, weight = weighed(dataset, value("labelCol"), weight, value("classWeight"))
        seed = value("seed")
        frame, columns = normalise(
            dataset,
            features_of(model, value("featuresCol")),
            value("labelCol") or None,
            weight,
            value("validationCol") or value("validationSplit"),
            inputs=inputs_of(model),
            outputs=outputs_of(model),
            seed=seed or 0,
            floatx="float64" if keras.config.floatx() == "float64" else "float32",
            nulls=value("nulls"),
        )
        trained, history, members = train(
            frame,
            model=model,
            columns=classed(columns, model),
            algorithm=algorithm,
            workers=1 if isinstance(algorithm, algorithms.Single) else value("workers"),
            batch_size=value("batchSize"),
            epochs=value("epochs"),
            seed=seed,
            shuffle=value("shuffle"),
            callbacks=self.callbacks() if callable(self.callbacks) else self.callbacks,
            strict=value("strict"),
            verbose=value("verbose"),
            max_restarts=value("maxRestarts"),
            timeout=value("timeout"),
            profile=self.profile,
        )
        made = KerasModel(mean_of(members) if members else trained, **{name: value(name) for name in _OF_MODEL})
        made.history, made.models = history, members
        made._resetUid(self.uid)
        return made


def copied(model: keras.Model, rate: float | None = None) -> keras.Model:
    """Return a copy of a compiled model.

    Args:
        model: keras.Model.
        rate: float or None. The learning rate of the copy. Defaults to that of the model.

    Raises:
        InvalidInputError: a rate was given, but the model is compiled with a learning rate schedule.
    """
    from choros.training.model_io.serialization import copy_model

    with _copying:
        copy = copy_model(model)
    if rate is not None:
        try:
            copy.optimizer.learning_rate = rate
        except TypeError as error:
            raise InvalidInputError(
                f"learningRate={rate}, but the model {model.name!r} is compiled with a schedule of rates: leave it "
                "out, or compile with a number."
            ) from error
    return copy


def weighed(dataset: DataFrame, label: Any, weight: Any, weights: Any) -> tuple[Any, str]:
    """Return the frame with a column of class weights, and the name of that column.

    Args:
        dataset: DataFrame.
        label: name of a column of class indices.
        weight: name of a column of weights that are multiplied with the class weights, or None.
        weights: dict from class index to weight; missing classes have the weight 1.

    Raises:
        InvalidInputError: there are several label columns or lists of weights, or labels are not numbers.
    """
    numbers = isinstance(label, str) and label in dataset.columns
    if not numbers or not isinstance(dataset.schema[label].dataType, T.NumericType) or isinstance(weight, (list, dict)):
        raise InvalidInputError(
            "classWeight is for one column of class numbers: give weightCol a column of weights instead."
        )
    product = F.lit(1.0)
    for name, factor in weights.items():
        product = F.when(F.col(quoted(label)) == int(name), float(factor)).otherwise(product)
    if weight:
        product = product * F.col(quoted(weight))
    return dataset.withColumn("choros_class_weight", product), "choros_class_weight"


def mean_of(models: list[Any]) -> keras.Model:
    """Return one model whose outputs are the means of the outputs of several models.

    Args:
        models: models of one architecture with known inputs.

    Raises:
        InvalidInputError: the inputs of the models are unknown.
    """
    import keras

    try:
        first = models[0]
        inputs = [keras.Input(tensor.shape[1:], dtype=tensor.dtype, name=tensor.name) for tensor in first.inputs]
        model_input = inputs if len(inputs) > 1 else inputs[0]
        for number, member in enumerate(models):
            member.name = f"member_{number}"
        outputs = [keras.tree.flatten(member(model_input)) for member in models]
    except (AttributeError, TypeError, ValueError) as error:
        raise InvalidInputError(
            "The members of an ensemble predict as one model only if their inputs are known: begin the model with "
            "an Input."
        ) from error
    means = [
        group[0] if len(group) == 1 else keras.layers.Average()(list(group)) for group in zip(*outputs, strict=True)
    ]
    model = keras.Model(inputs, means if len(means) > 1 else means[0])
    model.compile(first.optimizer.__class__(), first.loss)
    return model
