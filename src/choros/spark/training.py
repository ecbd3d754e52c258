"""The driver's side of training on a DataFrame: a ``Trainer`` whose workers are the tasks of one barrier stage."""

from __future__ import annotations

import secrets
import sys
import threading
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from choros.cluster import Place
from choros.data import packing
from choros.data.held import template
from choros.errors import BadData, BadInput, WorkerFailed
from choros.spark import barrier
from choros.spark.columns import Columns
from choros.spark.process import keras_here
from choros.spark.rank import Rank, results
from choros.spark.slots import choose_workers, is_connect
from choros.spark.spill import Spill, local_folder
from choros.trainer import Trainer
from choros.training.conductor import values
from choros.training.job import Job, Plan, Tally
from choros.training.line import Line, Told
from choros.training.record import RunRecord
from choros.training.sent import put, shown
from choros.training.travel import fresh_clone, pack_code
from choros.types import Batch

_FIRST = 32  # rows that the driver looks at


class Frame:
    """What ``FrameTrainer.fit`` takes as ``x``: the rows of a frame, which stay on the cluster.

    Args:
        frame: DataFrame, as ``choros.spark.columns.normalise`` made it.
        columns: what its columns mean.
        floatx: str. What floating point numbers become.
    """

    brings_targets, indexed, ahead, rows = True, True, 0, None

    def __init__(self, frame: Any, columns: Columns, floatx: str = "float32") -> None:
        self.frame, self.columns = frame, columns
        from choros.spark.pyarrow import few

        spill = Spill(columns, local_folder(0))
        try:
            spill.fill(few(frame.limit(_FIRST)))
            data = [spill.data(spill.forms(), part) for part in ((False, True) if columns.marked else (False,))]
            some = next((one for one in data if one.rows), None)
            if some is None:
                raise BadData("The frame has no rows to train with.")
            batch = template(some.x, some.y, some.weight, floatx)
            x, y, weight = packing.nested(*_copied(batch))
            self.first = Batch(x, y, weight, rows=batch.rows, total=batch.rows)
        finally:
            spill.close()

    def check(self) -> None:
        """Nothing can have changed."""

    def with_class_weight(self, class_weight: Any) -> Any:
        """Frames carry weights in a column of their own."""
        raise BadInput("class_weight is for arrays: give the frame a column of weights (weightCol).")

    def steps(self, batch_size: int) -> int | None:
        """Not known before the rows are counted, on the cluster."""
        return None

    def sample(self, batch_size: int) -> Batch:
        """The first rows."""
        return self.first

    def part(self, rank: int, size: int, seed: int) -> Frame:
        """Members of an ensemble have the rows that their tasks hold."""
        return self


@dataclass
class Attempt:
    """A barrier stage under way, in a thread.

    Attributes:
        found: what the tasks returned, once they have.
        error: what ended them.
    """

    found: list[bytes] | None = None
    error: BaseException | None = None


class FrameTrainer(Trainer):
    """A ``Trainer`` on the tasks of a Spark session.

    Args:
        model: a compiled ``keras.Model``.
        algorithm: as in ``Trainer``.
        workers: int, or "auto" for all free task slots.
        session: SparkSession.
        max_restarts: int. How often a run whose task failed begins again at its last epoch. Defaults to 0.
        profile: pyspark ResourceProfile of the tasks, or None.
        partitioned: bool. The frames have as many partitions as there are workers, as they are to be held.
        network: str or None. As in ``Trainer``.
        more: of ``Trainer``: meet, timeout, first_timeout, strict.
    """

    def __init__(
        self,
        model: Any,
        algorithm: Any,
        workers: int | str,
        session: Any,
        *,
        max_restarts: int = 0,
        profile: Any = None,
        partitioned: bool = False,
        network: str | None = None,
        **more: Any,
    ) -> None:
        count = choose_workers(session, workers) if profile is None or workers == "auto" else int(workers)
        self.session, self.max_restarts, self.profile, self.partitioned = session, max_restarts, profile, partitioned
        super().__init__(model, algorithm, count, network=network, **more)

    def _where(self, *_: Any) -> Place:
        return Place()

    def _train(self, plan: Plan) -> RunRecord:
        frame = plan.source
        given = values(plan.model.variables)
        line = _Spoken(plan)
        job, left = plan.job, self.max_restarts
        try:
            with line.opened(self._how.network, here=False) as home:
                while True:
                    try:
                        found = self._attempt(self._rank(plan, job, home, line), frame, line)
                        break
                    except WorkerFailed as error:
                        epoch = plan.conductor.epoch
                        if not left or epoch is None:
                            raise
                        left -= 1
                        print(
                            f"choros: {str(error).splitlines()[0]}; beginning again with epoch {epoch + 1}, from what "
                            f"was learnt before it ({left} restart{'s' * (left != 1)} left)",
                            file=sys.stderr,
                            flush=True,
                        )
                        job = replace(job, initial_epoch=epoch, initial_batch=0)
        except WorkerFailed as error:
            error.weights = line.last()
            for variable, value in zip(plan.model.variables, given, strict=True):
                variable.assign(value)
            raise
        except KeyboardInterrupt:
            put(plan.model, line.latest)
            raise
        return self._result(plan, found)

    def _rank(self, plan: Plan, job: Job, home: dict[str, Any], line: Line) -> Rank:
        if line.latest:
            put(plan.model, line.latest)
        return Rank(
            job.json(),
            *plan.written,
            keras_here(),
            [one.tobytes() for one in shown(plan.model, True)],
            home,
            pack_code(plan.conductor.user),
            packing.flat(plan.source.first),
            plan.conductor.steps,
            bool(plan.conductor.user),
        )

    def _attempt(self, work: Rank, frame: Frame, line: Line) -> list[bytes]:
        """Run the stage in a thread, and the callbacks here meanwhile."""
        stage, tag = Attempt(), f"choros-{secrets.token_hex(4)}"

        def run() -> None:
            try:
                _mark(self.session, tag)
                stage.found = barrier.run(
                    frame.frame,
                    work,
                    self.workers,
                    columns=frame.columns,
                    partitioned=self.partitioned,
                    profile=self.profile,
                    timeout=self.first_timeout,
                )
            except BaseException as error:
                stage.error = error

        thread = threading.Thread(target=run, name="choros-spark", daemon=True)
        thread.start()
        try:
            while thread.is_alive():
                heard = line.next(0.05)
                if heard is not None and heard[1]["event"] in ("begin", "batch", "epoch_end"):
                    heard[3].put(line.obey(heard[1], heard[2]))
        except BaseException:
            _cancel(self.session, tag)
            raise
        if stage.error is not None:
            raise stage.error
        assert stage.found is not None  # noqa: S101 - one of the two is there
        return stage.found

    def _result(self, plan: Plan, found: list[bytes]) -> RunRecord:
        """Bring home what the tasks have trained."""
        told, arrays = results(found[0])
        conductor, tallies, losses = plan.conductor, told["tallies"], told["losses"]
        if plan.job.ensemble:
            members = [results(payload) for payload in found]
            best = min(range(len(members)), key=lambda rank: members[rank][0]["score"])
            tallies = [{**one["tallies"][0], "rank": rank} for rank, (one, _) in enumerate(members)]
            histories = [one["history"]["history"] for one, _ in members]
            means = {name: np.mean([each[name] for each in histories], axis=0).tolist() for name in histories[0]}
            told["history"] = {"epoch": told["history"]["epoch"], "history": means}
            self.models = [fresh_clone(plan.model, plan.written[1]) for _ in members]
            for model, (_, weights) in zip(self.models, members, strict=True):
                put(model, weights)
            arrays = members[best][1]
        put(plan.model, arrays)
        if told["history"] is not None:
            conductor.history.epoch = told["history"]["epoch"]
            conductor.history.history = told["history"]["history"]
        else:
            conductor.end()
        tallied = [Tally(**one) for one in tallies]
        return RunRecord.of(plan.algorithm, plan.job.meet, tallied, 0.0, losses, told["met"])


class _Spoken(Line):
    """The driver's end of the line to rank 0."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan.model, plan.job, plan.conductor)

    def tell(self, what: str) -> Told:
        """All has travelled with the stage."""
        raise BadInput(f"A task asked the driver for {what}.")


def train(  # noqa: D417 - those of Trainer are named together
    frame: Any,
    *,
    model: Any,
    columns: Columns,
    algorithm: Any = "allreduce",
    workers: int | str = "auto",
    meet: str | None = None,
    max_restarts: int = 0,
    profile: Any = None,
    partitioned: bool = False,
    network: str | None = None,
    timeout: float = 300.0,
    first_timeout: float = 1800.0,
    strict: bool = True,
    **fit: Any,
) -> tuple[Any, Any, list[Any]]:
    """Train a model on the rows of a DataFrame, where they are.

    Args:
        frame: DataFrame, as ``choros.spark.columns.normalise`` made it; its marked rows validate.
        model: a compiled ``keras.Model``, which is trained.
        columns: what the frame's columns mean.
        algorithm, meet, timeout, first_timeout, strict, network: as in ``choros.Trainer``.
        workers: int, or "auto" for all free task slots.
        max_restarts, profile, partitioned: as in ``FrameTrainer``.
        **fit: of ``choros.Trainer.fit``: batch_size, epochs, callbacks, verbose, seed, shuffle, steps_per_epoch,
            validation_steps, validation_batch_size, validation_freq, initial_epoch.

    Returns:
        The trained model, its ``keras.callbacks.History`` (with ``run``), and the members of an Ensemble, else [].

    Raises:
        BadInput, BadData: something that cannot work; no task was started.
        WorkerFailed: a task failed, and there was no restart left.
    """
    import keras

    trainer = FrameTrainer(
        model,
        algorithm,
        workers,
        frame.sparkSession,
        max_restarts=max_restarts,
        profile=profile,
        partitioned=partitioned,
        network=network,
        meet=meet,
        timeout=timeout,
        first_timeout=first_timeout,
        strict=strict,
    )
    rows = Frame(frame, columns, keras.config.floatx())
    history = trainer.fit(rows, validation_data=rows if columns.marked else None, **fit)
    return model, history, trainer.models


def _copied(batch: Batch) -> tuple[Any, list[Any]]:
    tree, arrays = packing.flat(batch)
    return tree, [np.array(array) for array in arrays]


def _mark(session: Any, tag: str) -> None:
    if is_connect(session):
        session.addTag(tag)
    else:
        session.sparkContext.setJobGroup(tag, "choros: training a Keras model", True)


def _cancel(session: Any, tag: str) -> None:
    if is_connect(session):
        session.interruptTag(tag)
    else:
        session.sparkContext.cancelJobGroup(tag)
