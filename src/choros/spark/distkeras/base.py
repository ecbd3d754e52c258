"""The base classes of dist-keras' trainers: arguments with the meaning in dist-keras, and training by Choros.

The batch size is that of each worker. Optimizers named by a string have the learning rates of Keras 2. Settings at
which an algorithm may diverge only give a warning, so that old notebooks run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from choros import algorithms
from choros.errors import InvalidInputError, counted, warn, warn_without_effect
from choros.spark.distkeras.utils import history_executor, history_executors_average
from choros.spark.feature_columns import check_frame, normalise
from choros.spark.frame_trainer import train
from choros.spark.prediction_columns import classed, features_of, inputs_of, outputs_of
from choros.spark.task_slots import refuse_dynamic, slots
from choros.types import Array

if TYPE_CHECKING:
    import keras
    from pyspark.sql import DataFrame, SparkSession

    from choros.algorithms.base import Algorithm

    OptimizerLike: TypeAlias = str | keras.optimizers.Optimizer
    LossLike: TypeAlias = str | keras.Loss | Callable[..., Any]
    Metrics: TypeAlias = Sequence[str | keras.Metric] | None
    LossWeights: TypeAlias = list[float] | dict[str, float] | None
    Columns: TypeAlias = str | list[str]

RATES = {
    "sgd": 0.01,
    "rmsprop": 0.001,
    "adagrad": 0.01,
    "adadelta": 1.0,
    "adam": 0.001,
    "adamax": 0.002,
    "nadam": 0.002,
}


class Trainer:
    """The base class of all trainers of dist-keras.

    Args:
        keras_model: keras.Model; a copy is trained and returned.
        loss: as in ``model.compile``.
        worker_optimizer: a name, with Keras 2's learning rate, or a Keras optimizer.
        metrics: as in ``model.compile``. Defaults to ["accuracy"].
        loss_weights: as in ``model.compile``.

    Attributes:
        history: keras.callbacks.History of the last training, with ``run``, or None.
    """

    def __init__(
        self,
        keras_model: keras.Model,
        loss: LossLike,
        worker_optimizer: OptimizerLike,
        metrics: Metrics = None,
        loss_weights: LossWeights = None,
    ) -> None:
        if isinstance(metrics, (str, int)) and not isinstance(metrics, bool):
            raise InvalidInputError(f"metrics={metrics!r}: name the arguments behind the loss, as in batch_size=64.")
        self.master_model, self.loss, self.worker_optimizer = keras_model, loss, worker_optimizer
        self.metrics = ["accuracy"] if metrics is None else metrics
        self.loss_weights = loss_weights
        self.features_column: Columns = "features"
        self.label_column: Columns = "label"
        self.num_workers, self.batch_size, self.num_epoch = 1, 32, 1
        self.history: Any = None
        self._records: list[dict[str, Any]] = []
        self._began = self._ended = 0.0

    @property
    def algorithm(self) -> Algorithm:
        """The Choros algorithm of this trainer."""
        return algorithms.Single()

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(num_workers={self.num_workers}, batch_size={self.batch_size} for each worker, "
            f"num_epoch={self.num_epoch}; by choros.{self.algorithm!r})"
        )

    def train(self, dataframe: DataFrame, shuffle: bool = False) -> Any:
        """Train on a DataFrame.

        Args:
            dataframe: DataFrame.
            shuffle: bool. Whether the order of rows changes in each epoch. Defaults to False.

        Returns:
            The trained keras.Model; for ``EnsembleTrainer`` a list of models.

        Raises:
            InvalidInputError: an argument or the data is invalid.
            WorkerFailedError: a worker failed.
        """
        check_frame(dataframe)
        model, algorithm = self._compiled(), self.algorithm
        workers = self._workers(dataframe.sparkSession)
        frame, columns = normalise(
            dataframe,
            features_of(model, self.features_column),
            self.label_column,
            inputs=inputs_of(model),
            outputs=outputs_of(model),
        )
        self.record_training_start()
        try:
            trained, self.history, members = train(
                frame,
                model=model,
                columns=classed(columns, model),
                algorithm=algorithm,
                workers=workers,
                batch_size=int(self.batch_size) * workers,
                epochs=int(self.num_epoch),
                shuffle=bool(shuffle),
                strict=False,
                verbose=0,
            )
        finally:
            self.record_training_end()
        self._remember()
        return members if isinstance(algorithm, algorithms.Ensemble) and members else trained

    def _workers(self, session: SparkSession) -> int:
        """Return the requested number of workers, limited to the task slots. dist-keras ran further workers later."""
        refuse_dynamic(session)
        available, requested = slots(session)[0], int(self.num_workers)
        if requested > available >= 1:
            warn(
                f"num_workers={requested}, but this cluster has {counted(available, 'task slot')}: num_workers is "
                f"{available}.",
                RuntimeWarning,
            )
            return available
        return requested

    def _compiled(self) -> keras.Model:
        import keras

        keras_model = self.master_model
        if not isinstance(keras_model, keras.Model):
            raise InvalidInputError(f"keras_model is of type {type(keras_model).__name__}: give a keras.Model.")
        model = keras.models.clone_model(keras_model)
        if keras_model.built:
            model.set_weights(keras_model.get_weights())
        model.compile(
            _optimizer(self.worker_optimizer), self.loss, metrics=self.metrics, loss_weights=self.loss_weights
        )
        return model

    def _remember(self) -> None:
        figures = self.history.history
        names = [name for name in figures if not name.startswith("val_")]
        names.sort(key=lambda name: name != "loss")
        now = time.time()
        for epoch, row in enumerate(zip(*(figures[name] for name in names), strict=True)):
            self.add_history(
                {"worker_id": 0, "iteration": epoch + 1, "history": [float(value) for value in row], "timestamp": now}
            )

    def record_training_start(self) -> None:
        """Record the time at which training started."""
        self._began = time.time()

    def record_training_end(self) -> None:
        """Record the time at which training ended."""
        self._ended = time.time()

    def get_training_time(self) -> float:
        """Return the duration of the last training in seconds."""
        return self._ended - self._began

    def set_model(self, model: keras.Model) -> None:
        """Set the model to train."""
        self.master_model = model

    def get_history(self) -> list[dict[str, Any]]:
        """Return one record for each epoch: ``history`` has the loss and metrics of all rows, ``iteration`` counts."""
        return self._records

    def has_history(self) -> bool:
        """Return whether there are records."""
        return bool(self._records)

    def add_history(self, history: dict[str, Any]) -> None:
        """Add a record."""
        self._records.append(history)

    def get_averaged_history(self) -> Array:
        """Return the loss and metrics of each epoch, as an array of shape (epochs, values)."""
        return history_executors_average(self._records)

    def get_executor_history(self, executor_id: int) -> list[dict[str, Any]]:
        """Return the records of one worker. Choros has only values over all workers, with the worker id 0."""
        return history_executor(self._records, executor_id)

    def set_max_prefetch(self, max_mini_batches: int) -> None:
        """Do nothing but warn: rows are on the local disk of the worker."""
        self._warn_without_effect("set_max_prefetch", "rows are on the local disk of the worker")

    def _warn_without_effect(self, name: str, reason: str) -> None:
        warn_without_effect(type(self).__name__, reason, **{name: True})


class DistributedTrainer(Trainer):
    """The base class of the trainers with several workers.

    Args:
        keras_model, worker_optimizer, loss, metrics, loss_weights: see ``Trainer``.
        num_workers: int. If the cluster has fewer task slots, their number is used, with a warning. Defaults to 2.
        batch_size: int. Batch size of each worker. Defaults to 32.
        features_col, label_col, num_epoch: see ``SingleTrainer``.
        master_port: int. Without effect: Choros chooses its ports. Another value than 5000 gives a warning.
        more: hyper-parameters of the algorithm.
        given: the same by name; and ``learning_rate``, as dist-keras took it for every trainer. Where the rule has no
            elastic force it has no effect, in dist-keras either, and gives a warning.
    """

    own: tuple[tuple[str, Any], ...] = ()

    def __init__(
        self,
        keras_model: keras.Model,
        worker_optimizer: OptimizerLike,
        loss: LossLike,
        metrics: Metrics = None,
        num_workers: int = 2,
        batch_size: int = 32,
        features_col: Columns = "features",
        label_col: Columns = "label",
        num_epoch: int = 1,
        *more: Any,
        master_port: int = 5000,
        loss_weights: LossWeights = None,
        **given: Any,
    ) -> None:
        super().__init__(keras_model, loss, worker_optimizer, metrics, loss_weights)
        self.num_workers, self.batch_size, self.num_epoch = num_workers, batch_size, num_epoch
        self.features_column, self.label_column, self.master_port = features_col, label_col, master_port
        self.parallelism_factor = 1
        names = [name for name, _ in self.own]
        values = dict(self.own) | dict(zip(names, more, strict=False))
        if wrong := [name for name in given if name not in (*names, "learning_rate")]:
            raise InvalidInputError(
                f"{type(self).__name__} has no argument {wrong[0]!r}: it has {', '.join(names) or 'none'}."
            )
        values |= given
        if master_port != 5000:
            self._warn_without_effect("master_port", "Choros chooses its ports")
        if "learning_rate" in given:
            self._warn_of_rate()
        for name, value in values.items():
            setattr(self, name, value)

    @property
    def num_updates(self) -> int:
        """The number of exchanges of the workers with the center variable in the last training."""
        return 0 if self.history is None else int(self.history.run.exchanges)

    def set_num_epoch(self, num_epoch: int) -> None:
        """Set the number of epochs."""
        self.num_epoch = num_epoch

    def get_num_epoch(self) -> int:
        """Return the number of epochs."""
        return self.num_epoch

    def set_num_workers(self, num_workers: int) -> None:
        """Set the number of workers."""
        self.num_workers = num_workers

    def get_num_workers(self) -> int:
        """Return the number of workers."""
        return self.num_workers

    def set_minibatch_size(self, size: int) -> None:
        """Set the batch size of each worker."""
        self.batch_size = size

    def get_minibatch_size(self) -> int:
        """Return the batch size of each worker."""
        return self.batch_size

    def get_features_column(self) -> Columns:
        """Return the columns of features."""
        return self.features_column

    def get_label_column(self) -> Columns:
        """Return the column of labels."""
        return self.label_column

    def set_learning_rate(self, learning_rate: float) -> None:
        """Set the learning rate of the elastic force. The workers use the rate of the optimizer.

        A rule without an elastic force has no use for it, and a warning says so.
        """
        self._warn_of_rate()
        self.learning_rate = learning_rate

    def get_learning_rate(self) -> float:
        """Return the learning rate of the elastic force; 0 if there is none."""
        return float(getattr(self, "learning_rate", 0.0))

    def set_parallelism_factor(self, factor: int) -> None:
        """Store the number. It has no effect, as rows are distributed evenly; above 1 a warning says so."""
        if factor != 1:
            self._warn_without_effect("parallelism_factor", "rows are distributed evenly over the workers")
        self.parallelism_factor = factor

    def get_parallelism_factor(self) -> int:
        """Return the stored number."""
        return self.parallelism_factor

    def _warn_of_rate(self) -> None:
        if "rho" not in dict(self.own):
            self._warn_without_effect("learning_rate", "the workers use the learning rate of worker_optimizer")


def _optimizer(optimizer: Any) -> Any:
    """Return a new optimizer. An optimizer named by a string has the learning rate of Keras 2."""
    import keras

    if isinstance(optimizer, str):
        rate = RATES.get(optimizer.lower())
        made = keras.optimizers.get(optimizer)
        if rate is not None:
            made.learning_rate = rate  # pyright: ignore[reportOptionalMemberAccess] - None only for None
        return made
    return type(optimizer).from_config(optimizer.get_config())
