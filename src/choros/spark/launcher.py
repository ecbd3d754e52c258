"""``choros.Spark``: workers of a ``Trainer`` in tasks of a Spark cluster, for arrays, files and PyDatasets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from choros.argument_checks import check_whole
from choros.errors import InvalidInputError
from choros.object_text import call_text

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from choros.launch.specs import LaunchPreferences
    from choros.training.executors.executor import FitResult
    from choros.training.spec import FitRequest

_CONNECT, _CLASSIC = 120 << 20, 2 << 30  # most bytes of model and data in a stage's closure


class Spark:
    """A launcher whose workers are the tasks of one barrier stage. Callbacks, progress and output are in the driver.

    The model, the data and their code are part of Spark's closure. Classic Spark and Spark Connect both support this.
    It needs no socket from the executors to the driver and no shared directory, and classic Spark sends large closures
    from executor to executor. Arrays must therefore fit into the memory of each worker; Spark Connect limits them to
    120 MB. Larger data must be in files that all executors can read (``choros.files``), or in a DataFrame
    (``choros.spark.KerasEstimator``). If the executors cannot connect to the driver, copies of the callbacks run in the
    task of rank 0, and the driver gets the history at the end.

    Args:
        where: a SparkSession, the URL of a cluster (``"spark://head:7077"``, ``"yarn"``, ``"local[2]"``) or of Spark
            Connect (``"sc://head:15002"``). Defaults to the running session, else one configured by ``spark-submit`` or
            ``SPARK_REMOTE``.
        restarts: int. Number of restarts, from the last epoch, after a task failed. Defaults to 0.
        profile: pyspark ResourceProfile of the tasks (cores and GPUs), or None.
        **settings: settings of a session that is started here, as in ``choros.spark.session``.

    Raises:
        InvalidInputError: ``where`` is a string, but no URL of Spark.

    Example:
        >>> Spark("spark://head:7077", spark_executor_memory="2g")
        Spark('spark://head:7077')
    """

    def __init__(self, where: Any = None, *, restarts: int = 0, profile: Any = None, **settings: Any) -> None:
        if isinstance(where, str) and not where.startswith(("spark://", "sc://", "local", "yarn", "k8s://")):
            raise InvalidInputError(
                f"Spark({_without_parameters(where)!r}): give a SparkSession, or a URL such as 'spark://head:7077' or 'sc://head'."
            )
        if where is not None and not isinstance(where, str) and not hasattr(where, "createDataFrame"):
            raise InvalidInputError(f"Spark({where!r:.80}): give a SparkSession, or a URL such as 'spark://head:7077'.")
        self.restarts = check_whole("restarts", restarts, 0)
        self.where, self.profile, self.settings = where, profile, settings
        self._session: object = None if where is None or isinstance(where, str) else where

    def __repr__(self) -> str:
        where = _without_parameters(self.where) if isinstance(self.where, str) else self.where
        # Without the settings, which may hold passwords.
        return call_text(self, *([] if where is None else [where]), restarts=self.restarts or None)

    @property
    def session(self) -> SparkSession:
        """The SparkSession, started at the first access.

        Raises:
            InvalidInputError: a session on another cluster is running.
        """
        if self._session is None:
            from choros.spark.java import session
            from choros.spark.task_slots import is_connect

            made = session(self.where or "", **self.settings)
            master = "" if is_connect(made) else made.sparkContext.master
            if self.where and master not in ("", self.where):
                raise InvalidInputError(
                    f"A session on {master} is running in this process, not on {self.where}: stop it first "
                    "(session.stop()), or train there: choros.Spark(session)."
                )
            self._session = made
        return self._session

    def size(self) -> int:
        """Return the number of tasks that can run now."""
        from choros.spark.task_slots import choose_workers

        return choose_workers(self.session, "auto")

    def executor(self, preferences: LaunchPreferences) -> SparkExecutor:
        """Return the executor for the fits of a ``Trainer`` on this cluster."""
        return SparkExecutor(self, preferences)


def _without_parameters(url: str) -> str:
    """Return a URL of Spark Connect without its parameters, among which may be a token."""
    server, separator, _ = url.partition(";")
    return f"{server};..." if separator else url


@dataclass(frozen=True)
class SparkExecutor:
    """An executor that trains in the tasks of a Spark cluster. The data is sent with the tasks.

    Attributes:
        launcher: Spark.
        preferences: LaunchPreferences.
    """

    launcher: Spark
    preferences: LaunchPreferences
    packs_model, remote_members = True, True

    def run(self, request: FitRequest) -> FitResult:
        """Train; see ``choros.training.executors.executor.Executor``.

        Raises:
            InvalidInputError: model and data are too large for a closure; or as for ``choros.spark.barrier.run``.
            WorkerFailedError: a task failed, and no restart was left. The model's weights are restored.
        """
        from choros.spark.executor import SparkRun
        from choros.spark.feature_columns import normalise
        from choros.spark.task_data import BroadcastData
        from choros.spark.task_slots import is_connect
        from choros.training.payload import load_payload

        session, launcher = self.launcher.session, self.launcher
        request, payload = load_payload(request, on_this_host=False)
        most = _CONNECT if is_connect(session) else _CLASSIC
        size = sum(array.nbytes for array in payload.arrays) + sum(map(len, (payload.model.code, *payload.blobs)))
        if size > most:
            raise InvalidInputError(
                f"Model and data are {size >> 20} MB, of which Spark takes {most >> 20} MB along: give choros.files "
                "that all executors see, or train on a DataFrame with choros.spark.KerasEstimator."
            )
        workers = request.job.workers
        frame, columns = normalise(session.range(0, workers, 1, workers), "id")  # one row for each task
        rows = BroadcastData(payload.arrays, payload.blobs, request.job.seed)
        how = (launcher.profile, launcher.restarts, self.preferences.network, self.preferences.echo)
        return SparkRun(request, session, rows, frame, columns, True, *how).run()

    def close(self) -> None:
        """Do nothing: the user closes the session."""
