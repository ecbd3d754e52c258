"""``choros.Spark``: a ``Trainer``'s workers as tasks of a Spark cluster, for arrays, files and PyDatasets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from choros.errors import InvalidInputError

if TYPE_CHECKING:
    from choros.launch.specs import LaunchPreferences
    from choros.training.executors.executor import FitResult
    from choros.training.spec import FitRequest

_CONNECT, _CLASSIC = 120 << 20, 2 << 30  # bytes of data that Spark takes along with a stage


class Spark:
    """Workers that are the tasks of one barrier stage; callbacks, progress and what the workers print are here.

    The model, the data and their code travel within Spark's own closure: it is the one way that classic Spark and Spark
    Connect have in common, needs no socket from the executors to here and no directory that all share, and classic
    Spark hands large ones from executor to executor. So arrays are to fit into the memory of each worker, and through
    Spark Connect they have 120 MB; larger data are files that all executors see (``choros.files``), or a DataFrame
    (``choros.spark.KerasEstimator``). Where the executors do not reach this process, the callbacks travel too, run in
    rank 0's task, and the history comes at the end.

    Args:
        where: a SparkSession, a cluster's URL (``"spark://head:7077"``, ``"yarn"``, ``"local[2]"``) or Spark Connect's
            (``"sc://head:15002"``). Defaults to the session that is running, else to the one that ``spark-submit`` or
            ``SPARK_REMOTE`` tells of.
        max_restarts: int. How often a run whose task failed begins again at its last epoch. Defaults to 0.
        profile: pyspark ResourceProfile of the tasks (their cores and GPUs), or None.
        **settings: of a session that is started here, as in ``choros.spark.session``.

    Raises:
        InvalidInputError: no URL of Spark.

    Example:
        >>> Spark("spark://head:7077", spark_executor_memory="2g")
        Spark('spark://head:7077')
    """

    def __init__(self, where: Any = None, *, max_restarts: int = 0, profile: Any = None, **settings: Any) -> None:
        if isinstance(where, str) and not where.startswith(("spark://", "sc://", "local", "yarn", "k8s://")):
            raise InvalidInputError(
                f"Spark({where!r}): give a SparkSession, or a URL such as 'spark://head:7077' or 'sc://head'."
            )
        self.where, self.max_restarts, self.profile, self.settings = where, max_restarts, profile, settings
        self._session: Any = None if where is None or isinstance(where, str) else where

    def __repr__(self) -> str:
        return f"Spark({self.where!r})" if isinstance(self.where, str) else "Spark()"

    @property
    def session(self) -> Any:
        """The SparkSession, started when it is asked for first."""
        if self._session is None:
            from choros.spark.java import session
            from choros.spark.task_slots import is_connect

            made = session(self.where or "", **self.settings)
            there = "" if is_connect(made) else made.sparkContext.master
            if self.where and there not in ("", self.where):
                raise InvalidInputError(
                    f"A session on {there} is running in this process, not on {self.where}: stop it first "
                    "(session.stop()), or train there: choros.Spark(session)."
                )
            self._session = made
        return self._session

    def size(self) -> int:
        """Return the number of tasks that can run now."""
        from choros.spark.task_slots import choose_workers

        return choose_workers(self.session, "auto")

    def executor(self, preferences: LaunchPreferences) -> SparkExecutor:
        """Return what runs the fits of a ``Trainer`` on this cluster."""
        return SparkExecutor(self, preferences)


@dataclass(frozen=True)
class SparkExecutor:
    """The tasks of a Spark cluster, for data that travel with them.

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
            InvalidInputError: more data than Spark takes along, or what ``choros.spark.barrier.run`` says.
            WorkerFailedError: a task failed, and there was no restart left; the model's weights are as they were.
        """
        from choros.spark.executor import SparkRun
        from choros.spark.feature_columns import normalise
        from choros.spark.task_data import BroadcastData
        from choros.spark.task_slots import is_connect
        from choros.training.payload import load_payload

        session, launcher = self.launcher.session, self.launcher
        request, payload = load_payload(request, here=False)
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
        how = (launcher.profile, launcher.max_restarts, self.preferences.network, self.preferences.echo)
        return SparkRun(request, session, rows, frame, columns, True, *how).run()

    def close(self) -> None:
        """Do nothing: the session is the user's."""
