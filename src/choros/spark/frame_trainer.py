"""Training on a DataFrame, in the driver: an executor whose workers are the tasks of one barrier stage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np

from choros.data import serialization
from choros.data.partitioned_source import template
from choros.errors import InvalidDataError, InvalidInputError
from choros.spark.executor import SparkRun
from choros.spark.feature_columns import Columns
from choros.spark.row_store import RowStore, local_folder
from choros.spark.task_data import PartitionRows
from choros.spark.task_slots import choose_workers
from choros.trainer import Trainer
from choros.training.executors.executor import FitResult
from choros.training.spec import FitRequest
from choros.types import Batch

if TYPE_CHECKING:
    import keras
    from pyspark.sql import DataFrame, SparkSession

    from choros.algorithms.base import Algorithm

_FIRST = 32  # rows that the driver reads


class Frame:
    """The ``x`` of a fit with ``FrameExecutor``: the rows of a DataFrame, which stay on the cluster.

    Args:
        frame: DataFrame, a result of ``choros.spark.feature_columns.normalise``.
        columns: the meaning of its columns.
        floatx: str. Dtype to which floats are converted. Defaults to "float32".

    Raises:
        InvalidDataError: the frame has no rows.
    """

    brings_targets, indexed, ahead, rows = True, True, 0, None

    def __init__(self, frame: DataFrame, columns: Columns, floatx: str = "float32") -> None:
        self.frame, self.columns = frame, columns
        from choros.spark.pyarrow import few, refuse_large_batches

        spill = RowStore(columns, local_folder(0))
        try:
            rows = few(frame.limit(_FIRST))
            refuse_large_batches(frame.sparkSession, rows)
            spill.fill(rows)
            data = [spill.data(spill.forms(), part) for part in ((False, True) if columns.marked else (False,))]
            some = next((entry for entry in data if entry.rows), None)
            if some is None:
                raise InvalidDataError("The frame has no rows to train with.")
            batch = template(some.x, some.y, some.weight, floatx)
            x, y, weight = serialization.nested(*_copied(batch))
            self.first = Batch(x, y, weight, rows=batch.rows, total=batch.rows)
        finally:
            spill.close()

    def check(self) -> None:
        """Do nothing: the rows cannot have changed."""

    def with_class_weight(self, class_weight: object) -> Any:
        """Refuse class weights: a frame has a column of weights.

        Raises:
            InvalidInputError: always.
        """
        raise InvalidInputError("class_weight is for arrays: give the frame a column of weights (weightCol).")

    def steps(self, batch_size: int) -> int | None:
        """Return None: the number of rows is known only after the tasks have counted them."""
        return None

    def sample(self, batch_size: int) -> Batch:
        """Return the first rows; ``batch_size`` is not used."""
        return self.first

    def part(self, rank: int, size: int, seed: int) -> Frame:
        """Return the frame itself: a member of an ensemble trains the rows of its task."""
        return self


@dataclass(frozen=True)
class FrameExecutor:
    """An executor that trains on the rows of a ``Frame`` in the tasks of a Spark session. Each task holds some rows.

    Attributes:
        session: SparkSession.
        max_restarts: int. Number of restarts, from the last epoch, after a task failed. Defaults to 0.
        profile: pyspark ResourceProfile of the tasks, or None.
        partitioned: bool. Whether the frame has one partition for each worker, which is then kept. Defaults to False.
        network: str. As in ``Trainer``. Defaults to "", the default address of the driver.
    """

    session: SparkSession
    max_restarts: int = 0
    profile: Any = None
    partitioned: bool = False
    network: str = ""
    packs_model, remote_members = True, True

    def run(self, request: FitRequest) -> FitResult:
        """Train; see ``choros.training.executors.executor.Executor``."""
        frame = cast("Frame", request.source)
        rows = PartitionRows(serialization.flat(frame.first))
        how = (self.partitioned, self.profile, self.max_restarts, self.network)
        return SparkRun(request, self.session, rows, frame.frame, frame.columns, *how).run()

    def close(self) -> None:
        """Do nothing: the user closes the session."""


def train(
    frame: DataFrame,
    *,
    model: keras.Model,
    columns: Columns,
    algorithm: Algorithm | type[Algorithm] | str = "allreduce",
    workers: int | str = "auto",
    mode: Literal["sync", "async"] | None = None,
    max_restarts: int = 0,
    profile: object = None,
    partitioned: bool = False,
    network: str | None = None,
    timeout: float = 300.0,
    first_timeout: float = 1800.0,
    strict: bool = True,
    **fit: Any,
) -> tuple[Any, Any, list[Any]]:
    """Train a model on the rows of a DataFrame, which stay in their executors.

    Args:
        frame: DataFrame, a result of ``choros.spark.feature_columns.normalise``. Marked rows are for validation.
        model: a compiled ``keras.Model``, whose weights are changed.
        columns: the meaning of the frame's columns.
        algorithm: as in ``choros.Trainer``.
        workers: int, or "auto" for all free task slots. Defaults to "auto".
        mode: as in ``choros.Trainer``.
        max_restarts: int, as in ``FrameExecutor``. Defaults to 0.
        profile: as in ``FrameExecutor``.
        partitioned: bool, as in ``FrameExecutor``.
        network: as in ``choros.Trainer``.
        timeout: float, as in ``choros.Trainer``. Seconds.
        first_timeout: float, as in ``choros.Trainer``. Seconds.
        strict: bool, as in ``choros.Trainer``.
        **fit: arguments of ``choros.Trainer.fit``: batch_size, epochs, callbacks, verbose, seed, shuffle,
            steps_per_epoch, validation_steps, validation_batch_size, validation_freq, initial_epoch.

    Returns:
        The trained model, its ``keras.callbacks.History`` (with ``run``), and the members of an Ensemble, else [].

    Raises:
        InvalidInputError, InvalidDataError: an argument or the data is invalid.
        WorkerFailedError: a task failed, and no restart was left.
    """
    import keras

    session = frame.sparkSession
    count = choose_workers(session, workers) if profile is None or workers == "auto" else int(workers)
    how: dict[str, Any] = {"mode": mode, "timeout": timeout, "first_timeout": first_timeout, "strict": strict}
    executor = FrameExecutor(session, max_restarts, profile, partitioned, network or "")
    trainer = Trainer(model, algorithm, count, network=network, executor=executor, **how)
    rows = Frame(frame, columns, keras.config.floatx())
    history = trainer.fit(rows, validation_data=rows if columns.marked else None, **fit)
    return model, history, trainer.models


def _copied(batch: Batch) -> tuple[Any, list[Any]]:
    tree, arrays = serialization.flat(batch)
    return tree, [np.array(array) for array in arrays]
