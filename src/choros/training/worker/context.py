"""The context of a rank's training loop: its state, and the methods that both loops share."""

from __future__ import annotations

import math
import os
import platform
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from choros.algorithms import Algorithm
from choros.backends import Replica
from choros.backends.optimizers import learning_rates, model_variables, optimizer_variables
from choros.backends.profiler import StepProfiler
from choros.comm import trace_format
from choros.comm.group import Group
from choros.comm.shared_values import gather_values
from choros.comm.tracing import EventLog, Span
from choros.data import FeedTimes, Source, feed
from choros.training.async_control.best_member import BestMemberSlots
from choros.training.async_control.center_snapshots import CenterSnapshotStore
from choros.training.async_control.control_block import ControlBlock
from choros.training.checkpoint.snapshot import Part
from choros.training.executors.shared_weights import SharedWeights
from choros.training.spec import CallbackChannel, EpochCounts, FitConfig, TrainerControl, WorkerStats
from choros.types import Array, Batch, aligned

_MAX_METRIC_VALUES = 65_536  # callbacks get no values of metrics with more

_NO_SPAN: AbstractContextManager[object] = nullcontext()

SavedState = tuple[list[Array], list[Array] | None]


@dataclass
class WorkerContext:
    """The context of one rank of a run.

    Attributes:
        rank: int. This rank.
        job: FitConfig.
        algorithm: the bound algorithm.
        replica: the model on its backend.
        source, validation: sources of batches; ``validation`` may be None.
        group: Group. All ranks if synchronous, else a group of one rank.
        control_block: ControlBlock or RemoteControlBlock.
        weights: SharedWeights, through which the caller reads weights, or None.
        center: the parameter server, or None.
        arrived: float. ``time.perf_counter()`` at the arrival of the job.
        state: the state from which this synchronous rank resumes, or None.
        resumes: bool. Whether this rank continues after a restart or from a checkpoint.
        snapshots: the center at epochs' ends for callbacks, or None.
        best: the best member of an Ensemble at epochs' ends, or None.
        reporter: CallbackChannel, set before training.
    """

    rank: int
    job: FitConfig
    algorithm: Algorithm
    replica: Replica
    source: Source
    validation: Source | None
    group: Group
    control_block: ControlBlock
    weights: SharedWeights | None
    center: Any
    arrived: float
    state: Part | None = None
    resumes: bool = False
    snapshots: CenterSnapshotStore | None = None
    best: BestMemberSlots | None = None
    reporter: CallbackChannel = field(init=False)

    def __post_init__(self) -> None:
        self.stats = WorkerStats(self.rank, host=platform.node())
        self.begin = (self.job.initial_epoch, self.job.initial_batch)
        self.score = math.inf  # of an Ensemble's member: its last validation loss, or training loss
        self._reported = -math.inf  # the first step is reported: the clock of the caller's bar begins with it
        self._ready = 0.0  # ``time.perf_counter()`` at ``start_clock``
        self.earlier_seconds = 0.0  # seconds of training before a restart of this run
        self._compiling = 0.0
        self.last_rows = 0
        self.open_rows: int | None = None  # rows of the batch that is being trained, not counted in ``stats`` yet
        self.latest: list[Array] = []  # the weights that callbacks may read, if they run in this process
        self.leaving = False  # set by the loop over ``batches``: this batch is the last
        self.dropped = False  # set by that loop: callbacks stopped training, so this batch was not trained
        self._shapes: set[int] = set()
        self._epoch_begin = WorkerStats(self.rank)  # the counts at the beginning of the current epoch
        self.events = None if self.job.timeline is None else EventLog()
        if self.events is not None:
            self.group.trace = self.events.append
            if self.center is not None:
                self.center.trace = self.events.append
        self.profiler: StepProfiler | None = None
        if self.job.profile is not None:
            window = self.job.profile
            folder = os.path.join(window["directory"], f"rank-{self.rank}")
            self.profiler = StepProfiler(folder, window["first_step"], window["steps"], f"rank {self.rank}")

    # -- the timeline
    def span(self, kind: str, name: str, nbytes: int = -1) -> AbstractContextManager[object]:
        """Return a context that adds an event to this rank's lane of the timeline, if one is recorded.

        Args:
            kind: "compute", "exchange" or "wait".
            name: str.
            nbytes: int. Bytes of the data, or -1.
        """
        return _NO_SPAN if self.events is None else Span(self.events.append, kind, name, nbytes)

    def lane(self) -> list[bytes]:
        """Return this rank's lane of the timeline as the only element, or an empty list if none is recorded."""
        if self.events is None or self.job.timeline is None:
            return []
        machine, offset, now = self.job.timeline
        zero = trace_format.zero_from((machine, offset, now), trace_format.clock())
        return [self.events.lane(self.rank, zero, "training")]

    # -- batches
    def first(self, epoch: int) -> int:
        """Return the number of the first batch of an epoch in this run."""
        return self.begin[1] if epoch == self.begin[0] else 0

    @property
    def step_timeout(self) -> float:
        """Timeout in seconds of one wait in a step.

        With batch hooks all ranks may wait for rank 0, which waits for slow callbacks. So the timeout is longer. The
        death of a rank is noticed at once nevertheless. The process that called ``fit`` detects hangs, because it knows
        when callbacks run.
        """
        return max(self.job.timeout, self.job.first_timeout) if self.job.per_batch else self.job.timeout

    def batches(self, epoch: int) -> Iterator[Batch]:
        """Yield this rank's batches of an epoch; count steps, rows and times, and send heartbeats."""
        job, stats, synchronous = self.job, self.stats, self.job.synchronous
        rank, size, batch_size = self.rank, job.workers, job.batch_size
        if job.ensemble:  # each member has a separate shard
            rank, size, synchronous, batch_size = 0, 1, True, -(-batch_size // size)
        self.leaving = self.dropped = False
        self._epoch_begin = self.counted()
        job.follow_datasets(epoch, source=self.source)
        wait_begun = time.perf_counter()
        times, reading_before, copied = FeedTimes(), stats.reading, stats.copying
        stats.ahead = self.source.ahead
        batches = feed(
            self.source,
            self.replica.ready,
            self.first(epoch),
            times,
            rank=rank,
            size=size,
            synchronous=synchronous,
            batch_size=batch_size,
            seed=job.seed,
            epoch=epoch,
            shuffle=job.shuffle,
            steps=job.steps,
        )
        for batch in batches:
            is_new_shape = batch.rows not in self._shapes
            begun, exchanging_before, packing_before = time.perf_counter(), stats.exchanging, self.replica.packing
            stats.waiting += begun - wait_begun
            stats.reading = reading_before + times.reading
            if self.events is not None:
                now = time.monotonic_ns()
                self.events.append(("data", "next batch", now - int(1e9 * (begun - wait_begun)), now, -1))
            self.open_rows = batch.rows
            if self.profiler is not None:
                self.profiler.before_step()
            # ``counted`` adds ``open_rows`` while the loop trains the batch, because the loop may exchange or save
            # before this generator continues.
            yield batch
            if self.profiler is not None:
                self.profiler.after_step(lambda: self.replica.get(np.empty(self.replica.size, self.replica.dtype)))
            self.open_rows = None
            if self.dropped:
                return
            stats.steps += self._step_count(batch.rows)
            self.last_rows = batch.rows
            stats.rows += batch.rows
            if is_new_shape:  # the first step of each shape compiles, which counts as start-up
                self._shapes.add(batch.rows)
                stats.first_rows += batch.rows
                # In such a step an exchange also waits for ranks that still compile.
                stats.exchanging = exchanging_before
                self._compiling += time.perf_counter() - begun
            else:
                copied += self.replica.packing - packing_before
            stats.copying = copied + times.copying
            self.control_block.count_step(self.rank)
            if self.leaving:
                return
            wait_begun = time.perf_counter()

    def progress(self, epoch: int, step: int) -> None:
        """Report rank 0's step to the caller: the first step, then one step every ``job.progress`` seconds."""
        if self.rank == 0 and self.job.progress and time.perf_counter() - self._reported > self.job.progress:
            self.reporter.batch(epoch, step, self.replica.metrics())
            self._reported = time.perf_counter()

    def start_clock(self) -> None:
        """Begin the time that counts as training, when all ranks are ready. Compiling does not count."""
        self._ready = time.perf_counter()

    def stop_clock(self) -> None:
        """End the time that counts as training."""
        self.stats.startup = self._ready - self.arrived + self._compiling
        self.stats.seconds = self.clock()
        shard = self.replica.shard
        self.stats.divided = 0 if shard is None else shard.values

    def counted(self) -> WorkerStats:
        """Return the counts so far, including the batch that was just trained."""
        open_steps = 0 if self.open_rows is None else self._step_count(self.open_rows)
        rows = self.stats.rows + (self.open_rows or 0)
        return replace(self.stats, steps=self.stats.steps + open_steps, rows=rows, seconds=self.clock())

    def epoch_counts(self) -> list[float]:
        """Return the numbers of this rank's ``EpochCounts``, from the beginning of the epoch until now.

        If the rank resumed within the epoch, they begin there.
        """
        return EpochCounts.between(self._epoch_begin, self.counted()).numbers()

    def _step_count(self, rows: int) -> int:
        """Return the number of steps for a batch of ``rows`` rows: an asynchronous worker makes none without rows."""
        return int(rows > 0 or self.job.synchronous)

    def clock(self) -> float:
        """Return the seconds of training so far, without compiling."""
        return self.earlier_seconds + time.perf_counter() - self._ready - self._compiling

    # -- validation and weights
    def validate(self, group: Group, epoch: int) -> dict[str, float]:
        """Evaluate the validation set, divided among the group, and return the exact ``val_*`` metrics. Collective.

        Args:
            group: the ranks that evaluate.
            epoch: index of the epoch that was trained.
        """
        assert self.validation is not None  # noqa: S101 - the loops check FitConfig.validates first
        self.job.follow_datasets(epoch, validation=self.validation)
        self.replica.reset_metrics()
        rows = 0
        for batch in feed(
            self.validation,
            self.replica.ready,
            rank=group.rank,
            size=group.size,
            synchronous=True,
            batch_size=self.job.validation_batch_size or self.job.batch_size,
            seed=0,
            epoch=0,
            shuffle=False,
            steps=self.job.validation_steps,
        ):
            begun = time.perf_counter()
            with self.span("compute", "validation step"):
                self.replica.evaluate(batch)
            rows += batch.rows
            if -batch.rows not in self._shapes:
                self._shapes.add(-batch.rows)
                self._compiling += time.perf_counter() - begun
            self.control_block.count_step(self.rank)
        state = self.replica.metric_state()
        all_logs = gather_values(group, [rows, self.replica.own_logs()])
        self.replica.set_metric_state(group.sum(state))
        logs = self.replica.metrics() | mean_own_logs(all_logs)
        return {f"val_{name}": value for name, value in logs.items()}

    def shown_metric_values(self) -> list[float]:
        """Return the values of the metrics' variables, flat, if callbacks may read them; else an empty list."""
        readable = self.job.watched and self.job.metric_values <= _MAX_METRIC_VALUES
        return self.replica.metric_values(self.replica.metric_state()) if readable else []

    @contextmanager
    def using_weights(self, center: Array | None) -> Iterator[None]:
        """Use the center's weights within this context instead of this worker's weights. None changes nothing."""
        if center is None:
            yield
            return
        values = np.empty(self.replica.size, self.replica.dtype)
        self.replica.get(values)
        ahead = self.replica.ahead() if self.algorithm.momentum else None
        shard = self.replica.shard  # if the ranks share the weights, all of them call this, with the same values
        if shard is not None:
            self.group.barrier()  # until all have read the weights
        with nullcontext() if shard is None else shard.writing():
            self.replica.set(center)
            try:
                yield
                if shard is not None:
                    self.group.barrier()  # until no rank uses the center
            finally:
                self.replica.set(values)
                if ahead is not None:  # ``set`` keeps the velocity only up to rounding
                    self.replica.set_ahead(ahead)
        if shard is not None:
            self.group.barrier()  # until all have restored the weights: a callback may set them next

    def write_weights(self) -> None:
        """Write all variables to the memory that callbacks read."""
        if self.weights is None:
            self.latest = self.replica.snapshot()
        else:
            self.weights.write(self.replica.view())

    def vectors(self) -> tuple[Array, Array]:
        """Return this rank's trainable vector and its moving statistics."""
        return vectors(self.replica)

    def copy_state(self) -> SavedState:
        """Return copies of the variables of model and optimizer, and of the algorithm's look-ahead point or None."""
        return self.replica.snapshot(), self.replica.ahead() if self.algorithm.momentum else None

    def restore_state(self, saved: SavedState) -> None:
        """Restore the result of ``copy_state``."""
        arrays, ahead = saved
        self.replica.restore(arrays)
        if ahead is not None:
            self.replica.set_ahead(ahead)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Restore this rank's weights at the end of this context."""
        saved = self.copy_state()
        try:
            yield
        finally:
            self.restore_state(saved)

    def write_trainable(self, vector: Array) -> None:
        """Set the trainable variables to ``vector``, and write all variables; for the last center, when a run fails."""
        self.replica.set(vector)
        self.write_weights()

    def take(self, arrays: list[Array], control: TrainerControl) -> None:
        """Set the variables that callbacks have set.

        With ``control.weights`` these are the model's variables and the learning rates of its further optimizers. With
        ``control.slots`` they are the named variables of optimizers. All other variables, and the states of random
        layers, keep this worker's values.

        Args:
            arrays: values of all variables, in the order of ``snapshot``.
            control: the control message.
        """
        model, current, optimizers = self.replica.model, self.replica.view(), optimizer_variables(self.replica.model)
        taken = {id(optimizers[index]) for index in control.slots}
        rates = {id(variable) for variable in learning_rates(model)}
        skipped = {id(variable) for variable in [*self.replica.seeds, *optimizers]} - rates
        for index, variable in enumerate(model_variables(model)):
            if id(variable) in taken or (control.weights and id(variable) not in skipped):
                current[index] = arrays[index]
        ahead = self.replica.ahead() if self.algorithm.momentum and not control.weights else None
        self.replica.restore(current)
        if ahead is not None:
            self.replica.set_ahead(ahead)

    def apply_control(self, control: TrainerControl) -> None:
        """Apply a control message: learning rate, variables, settings and reset of metrics."""
        if control.learning_rate is not None:
            self.replica.learning_rate = control.learning_rate
        if control.variables and self.weights is not None:
            self.take(self.weights.views(), control)
        if control.settings:
            self.replica.take_settings(control.settings)
        if control.reset:
            self.replica.reset_metrics()


def blank_vectors(replica: Replica) -> tuple[Array, Array]:
    """Return memory for a trainable vector and moving statistics; the system provides it when it is written."""
    return aligned(replica.size, replica.dtype), np.empty(replica.statistics_size, replica.dtype)


def vectors(replica: Replica) -> tuple[Array, Array]:
    """Return a replica's trainable vector and its moving statistics."""
    trainable, statistics = blank_vectors(replica)
    replica.get(trainable)
    replica.get_statistics(statistics)
    return trainable, statistics


def mean_own_logs(rank_logs: Sequence[Sequence[Any]]) -> dict[str, float]:
    """Return the mean, weighted by rows, of figures that the user's ``train_step`` logs without a metric.

    Args:
        rank_logs: for each rank its rows and the result of ``Replica.own_logs``. Further values are ignored.
    """
    logged = [(rows, logs) for rows, logs, *_ in rank_logs if logs is not None and rows]
    total = sum(rows for rows, _ in logged)
    names = [name for name in (logged[0][1] if logged else {}) if any(logs[name][1] for _, logs in logged)]
    return {name: sum(rows * logs[name][0] for rows, logs in logged) / total for name in names}
