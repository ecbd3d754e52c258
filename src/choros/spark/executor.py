"""Training in a barrier stage, controlled by the driver: callbacks run in the driver, and a failed run restarts."""

from __future__ import annotations

import secrets
import threading
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from choros.backends.host_values import to_host
from choros.console import write_line
from choros.errors import InvalidInputError, WorkerFailedError, named_type
from choros.pickling import dumps
from choros.spark import barrier
from choros.spark.feature_columns import Columns
from choros.spark.task_data import BroadcastData, PartitionRows
from choros.spark.task_errors import Cancelled
from choros.spark.task_process import keras_here
from choros.spark.task_slots import is_connect
from choros.spark.train_task import TrainTask, results
from choros.training.async_control.best_member import best_of
from choros.training.callback_runner import CallbackRunner
from choros.training.executors.callback_server import CONTROLLED, CallbackServer, Reply
from choros.training.executors.executor import FitResult
from choros.training.executors.restart_policy import RestartPolicy
from choros.training.payload import put, shown, unpack_members
from choros.training.run_record import RunRecord
from choros.training.spec import FitConfig, FitRequest

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from choros.comm.tcp.rpc import RpcAddress


@dataclass
class _Attempt:
    """The outcome of a barrier stage that runs in a thread: the results of the tasks, or the error."""

    found: list[bytes] | None = None
    error: BaseException | None = None


class _Spoken(CallbackServer):
    """The callback server in the driver, to which rank 0 connects."""

    def __init__(self, plan: FitRequest) -> None:
        super().__init__(plan.model, plan.job, plan.callbacks)

    def answer(self, request: object, rank: int) -> Reply:
        """Refuse every request of a task: the stage's closure contains all data.

        Raises:
            InvalidInputError: always.
        """
        raise InvalidInputError(f"Task {rank} sent the driver {named_type(request)}.")


@dataclass(frozen=True)
class SparkRun:
    """One fit on the tasks of a barrier stage. Call ``run`` once.

    Raises:
        InvalidInputError: ``max_restarts`` is negative.

    Attributes:
        plan: FitRequest. The fit.
        session: SparkSession.
        rows: PartitionRows or BroadcastData. The source of the tasks' batches.
        frame: DataFrame, a result of ``choros.spark.feature_columns.normalise``.
        columns: Columns. The meaning of the frame's columns.
        partitioned: bool. Whether the frame has one partition for each worker, which is then kept. Defaults to False.
        profile: pyspark ResourceProfile of the tasks, or None.
        max_restarts: int. Number of restarts, from the last epoch, after a task failed. Defaults to 0.
        network: str. As in ``choros.Trainer``. Defaults to "", the default address of the driver.
        echo: bool. Whether the output of the tasks is shown in the driver. Defaults to False.
    """

    plan: FitRequest
    session: SparkSession
    rows: PartitionRows | BroadcastData
    frame: DataFrame
    columns: Columns
    partitioned: bool = False
    profile: Any = None
    max_restarts: int = 0
    network: str = ""
    echo: bool = False

    def __post_init__(self) -> None:
        if self.max_restarts < 0:
            raise InvalidInputError(f"max_restarts={self.max_restarts}: give a whole number, 0 or more.")

    def run(self) -> FitResult:
        """Train; see ``choros.training.executors.executor.Executor``.

        Raises:
            WorkerFailedError: a task failed, and no restart was left. The model's weights are restored.
        """
        plan, restart_policy = self.plan, RestartPolicy(self.max_restarts, self.plan.job.workers)
        # The driver keeps each epoch's center without the workers' positions. So a restart needs a center with whole
        # epochs.
        job = replace(plan.job, whole_epochs=restart_policy.left > 0)
        initial = to_host(plan.model.variables)
        line = _Spoken(plan)
        try:
            with line.opened(self.network, on_this_host=False) as home:
                while True:
                    try:
                        answers = self._attempt(self._rank(job, home, line), line)
                        break
                    except Cancelled:
                        raise
                    except WorkerFailedError as error:
                        epoch = plan.callbacks.epoch if line.begun else job.initial_epoch
                        if not restart_policy.left or epoch is None:
                            raise
                        restart_policy.count(error, (epoch, 0), True)
                        job = replace(job, initial_epoch=epoch, initial_batch=0)
        except WorkerFailedError as error:
            error.weights = line.last()
            for variable, value in zip(plan.model.variables, initial, strict=True):
                variable.assign(value)
            raise
        except KeyboardInterrupt:
            put(plan.model, line.latest)
            raise
        record, models, lanes = self._result(answers)
        return FitResult(replace(record, restarts=tuple(restart_policy.done)), models, lanes)

    def _rank(self, job: FitConfig, home: RpcAddress, line: CallbackServer) -> TrainTask:
        plan = self.plan
        # After a failure, the tasks start from the last weights that rank 0 has sent.
        if line.latest:
            put(plan.model, line.latest)
        callbacks = None
        with suppress(Exception):  # callbacks that cannot be pickled run only in the driver
            callbacks = dumps(plan.callbacks.user)
        return TrainTask(
            job.json(),
            plan.written,
            keras_here(),
            [array.tobytes() for array in shown(plan.model)],
            home,
            callbacks,
            self.rows,
            plan.callbacks.steps,
            bool(plan.callbacks.user),
            self.echo,
        )

    def _attempt(self, work: TrainTask, line: CallbackServer) -> list[bytes]:
        """Run the stage in a thread, and the callbacks in this thread until the stage ends."""
        stage, tag = _Attempt(), f"choros-{secrets.token_hex(4)}"

        def run() -> None:
            try:
                _mark(self.session, tag)
                stage.found = barrier.run(
                    self.frame,
                    work,
                    self.plan.job.workers,
                    columns=self.columns,
                    partitioned=self.partitioned,
                    profile=self.profile,
                    timeout=self.plan.job.first_timeout,
                )
            except BaseException as error:
                stage.error = error

        thread = threading.Thread(target=run, name="choros-spark", daemon=True)
        thread.start()
        try:
            while thread.is_alive():
                received = line.next(0.05)
                if received is not None and isinstance(received.message, CONTROLLED):
                    line.apply_control(received)
        except BaseException:
            # The stage would continue on the cluster without this process.
            _cancel(self.session, tag)
            raise
        if stage.error is not None:
            raise stage.error
        assert stage.found is not None  # noqa: S101 - one of the two is there
        return stage.found

    def _result(self, answers: list[bytes]) -> tuple[RunRecord, list[Any], list[bytes]]:
        """Set the model's weights and the history from the results of the tasks.

        Returns:
            The record, the members of an ensemble, and the lanes of a timeline.
        """
        plan, models = self.plan, list[Any]()
        result, arrays = results(answers[0])
        lanes, arrays = [lane.tobytes() for lane in arrays[: result.lanes]], arrays[result.lanes :]
        callback_runner, all_stats = plan.callbacks, result.all_stats
        trained = result
        if plan.job.ensemble:
            members = [results(payload) for payload in answers]
            scores = [member.score for member, _ in members]
            all_stats = [replace(member.all_stats[0], rank=rank) for rank, (member, _) in enumerate(members)]
            trained = members[best_of(scores)][0]
            models = unpack_members(plan.model, scores, [weights for _, weights in members])
        else:
            put(plan.model, arrays)
        if trained.epochs is not None:
            callback_runner.history.epoch, callback_runner.history.history = trained.epochs, trained.history
            _print_epochs(callback_runner)
        else:
            callback_runner.end()
        record = RunRecord.of(plan.algorithm, plan.job.mode, all_stats, 0.0, result.losses, result.transport)
        return record, models, lanes


def _print_epochs(callback_runner: CallbackRunner) -> None:
    """Print the epochs if a progress bar was requested, but the tasks did not reach the driver."""
    import keras

    if not any(isinstance(callback, keras.callbacks.ProgbarLogger) for callback in callback_runner.list.callbacks):
        return
    history = callback_runner.history
    for number, epoch in enumerate(history.epoch):
        logs = [f"{name}: {figures[number]:.4f}" for name, figures in history.history.items() if number < len(figures)]
        write_line(f"Epoch {epoch + 1}/{callback_runner.epochs} - {' - '.join(logs)}")


def _mark(session: SparkSession, tag: str) -> None:
    if is_connect(session):
        session.addTag(tag)
    else:
        session.sparkContext.setJobGroup(tag, "choros: training a Keras model", True)


def _cancel(session: SparkSession, tag: str) -> None:
    if is_connect(session):
        session.interruptTag(tag)
    else:
        session.sparkContext.cancelJobGroup(tag)
