"""The state of a worker's loop: one rank's view of a run, and the work that both loops share."""

from __future__ import annotations

import json
import math
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from choros.algorithms import Algorithm
from choros.backends import Replica
from choros.backends.optimizers import learning_rates, model_variables, optimizer_variables
from choros.comm.group import Group
from choros.data import Source, feed
from choros.training.async_control.best_member import Best
from choros.training.async_control.center_snapshots import Slots
from choros.training.async_control.control_block import ControlBlock
from choros.training.checkpoint.snapshot import Part
from choros.training.executors.shared_weights import SharedWeights
from choros.training.spec import CallbackChannel, FitConfig, TrainerControl, WorkerStats
from choros.types import Array, Batch, aligned

_SHOWN = 65_536  # values of metrics are shown to callbacks, no more

Held = tuple[list[Array], list[Array] | None]


@dataclass
class WorkerContext:
    """One rank of a run.

    Attributes:
        rank: int. This rank.
        job: FitConfig. What to do.
        algorithm: the bound algorithm.
        replica: the model on its backend.
        source, validation: sources of batches; ``validation`` may be None.
        group: the ranks together (size 1 where they never meet).
        board: heartbeats, orders, sums of metrics.
        weights: where weights go back to the caller, or None.
        centre: transport.Centre for meetings alone, or None.
        arrived: float. ``time.perf_counter()`` when the job came.
        state: what this rank left when the run was cut short, or None.
        again: whether it has met the centre before, in another process.
        snapshots: where the center of an epoch's end is kept for callbacks, or None.
        best: where the best member of an Ensemble at an epoch's end is kept, or None.
        reporter: the line to the callbacks, set before training.
    """

    rank: int
    job: FitConfig
    algorithm: Algorithm
    replica: Replica
    source: Source
    validation: Source | None
    group: Group
    board: ControlBlock
    weights: SharedWeights | None
    centre: Any
    arrived: float
    state: Part | None = None
    again: bool = False
    snapshots: Slots | None = None
    best: Best | None = None
    reporter: CallbackChannel = field(init=False)

    def __post_init__(self) -> None:
        self.tally = WorkerStats(self.rank, host=platform.node())
        self.begin = (self.job.initial_epoch, self.job.initial_batch)
        self.score = math.inf  # an Ensemble's member: its last loss, of validation where there is one
        self._reported = time.perf_counter()
        self._ready = self.before = 0.0  # seconds that were trained before this run was started again
        self._compiling = 0.0
        self.last_rows = 0
        self.open: int | None = None  # rows of the batch that is being trained, which the tally has yet to count
        self.latest: list[Array] = []  # what the callbacks may read, where they run in this process
        self.leaving = False  # set while going through ``batches``: this batch is the last
        self.dropped = False  # set with it: this batch was not trained, as callbacks of the one before ended it
        self._shapes: set[int] = set()

    # -- batches
    def first(self, epoch: int) -> int:
        """Return the batch with which an epoch begins."""
        return self.begin[1] if epoch == self.begin[0] else 0

    @property
    def step_timeout(self) -> float:
        """Seconds that one wait of a rank in a step may last.

        With callbacks of each batch all may wait for rank 0, which waits for these, however long they take. A death is
        noticed at once all the same; a hang by the process that called ``fit``, which knows when callbacks run.
        """
        return max(self.job.timeout, self.job.first_timeout) if self.job.per_batch else self.job.timeout

    def batches(self, epoch: int) -> Iterator[Batch]:
        """Yield this rank's batches of an epoch, counting steps, rows and the time since the first step."""
        job, tally, together = self.job, self.tally, self.job.together
        rank, size, batch_size = self.rank, job.workers, job.batch_size
        if job.ensemble:  # a member has a shard of its own
            rank, size, together, batch_size = 0, 1, True, -(-batch_size // size)
        self.leaving = self.dropped = False
        asked = time.perf_counter()
        batches = feed(
            self.source,
            self.replica.ready,
            self.first(epoch),
            rank=rank,
            size=size,
            together=together,
            batch_size=batch_size,
            seed=job.seed,
            epoch=epoch,
            shuffle=job.shuffle,
            steps=job.steps,
        )
        for batch in batches:
            fresh = batch.rows not in self._shapes
            begun, exchanged = time.perf_counter(), tally.exchanging
            tally.waiting += begun - asked
            self.open = batch.rows
            yield batch
            self.open = None
            if self.dropped:
                return
            tally.steps += self._made(batch.rows)
            self.last_rows = batch.rows
            tally.rows += batch.rows
            if fresh:  # the first step of each shape compiles: that is start-up, not training
                self._shapes.add(batch.rows)
                tally.first_rows += batch.rows
                tally.exchanging = exchanged
                self._compiling += time.perf_counter() - begun
            self.board.beat(self.rank)
            if self.leaving:
                return
            asked = time.perf_counter()

    def progress(self, epoch: int, step: int) -> None:
        """Report rank 0's step where the caller draws a bar, now and then."""
        if self.rank == 0 and self.job.progress and time.perf_counter() - self._reported > self.job.progress:
            self.reporter.batch(epoch, step, self.replica.metrics())
            self._reported = time.perf_counter()

    def start_clock(self) -> None:
        """All are ready: what comes now, but for compiling, counts as training."""
        self._ready = time.perf_counter()

    def stop_clock(self) -> None:
        """End the time that counts as training."""
        self.tally.startup = self._ready - self.arrived + self._compiling
        self.tally.seconds = self.clock()

    def counted(self) -> WorkerStats:
        """Return the tally as of now, the batch that was just trained included."""
        more = 0 if self.open is None else self._made(self.open)
        rows = self.tally.rows + (self.open or 0)
        return replace(self.tally, steps=self.tally.steps + more, rows=rows, seconds=self.clock())

    def _made(self, rows: int) -> int:
        """Return the steps that a batch of so many rows is: an asynchronous worker makes none without rows."""
        return int(rows > 0 or self.job.together)

    def clock(self) -> float:
        """Seconds of training until now, compiling left out."""
        return self.before + time.perf_counter() - self._ready - self._compiling

    # -- validation and weights
    def validate(self, group: Group) -> dict[str, float]:
        """Evaluate the validation set, divided among the group; the exact metrics, named ``val_*``."""
        assert self.validation is not None  # noqa: S101 - the loops ask FitConfig.validates first
        self.replica.reset_metrics()
        rows = 0
        for batch in feed(
            self.validation,
            self.replica.ready,
            rank=group.rank,
            size=group.size,
            together=True,
            batch_size=self.job.validation_batch_size or self.job.batch_size,
            seed=0,
            epoch=0,
            shuffle=False,
            steps=self.job.validation_steps,
        ):
            begun = time.perf_counter()
            self.replica.evaluate(batch)
            rows += batch.rows
            if -batch.rows not in self._shapes:
                self._shapes.add(-batch.rows)
                self._compiling += time.perf_counter() - begun
            self.board.beat(self.rank)
        state = self.replica.metric_state()
        numbers = json.dumps([rows, self.replica.own_logs()])
        all_numbers = [json.loads(text) for text in group.gather(numbers.encode())]
        self.replica.set_metric_state(group.sum(state))
        logs = self.replica.metrics() | mean_own_logs(all_numbers)
        return {f"val_{name}": value for name, value in logs.items()}

    def held_by_metrics(self) -> list[float]:
        """Return what the metrics' variables hold, flat, where callbacks may read it; else nothing."""
        wanted = self.job.watched and self.job.metric_values <= _SHOWN
        return self.replica.metric_values(self.replica.metric_state()) if wanted else []

    @contextmanager
    def at(self, centre: Array | None) -> Iterator[None]:
        """Hold the centre's weights for a while instead of this worker's own."""
        if centre is None:
            yield
            return
        own = np.empty(self.replica.size, self.replica.dtype)
        self.replica.get(own)
        ahead = self.replica.ahead() if self.algorithm.momentum else None
        self.replica.set(centre)
        try:
            yield
        finally:
            self.replica.set(own)
            if ahead is not None:  # ``set`` keeps the velocity but for rounding
                self.replica.set_ahead(ahead)

    def write_weights(self) -> None:
        """Put every variable where the caller can read it."""
        if self.weights is None:
            self.latest = self.replica.snapshot()
        else:
            self.weights.write(self.replica.view())

    def vectors(self) -> tuple[Array, Array]:
        """Return this rank's trainable vector and its moving statistics."""
        return vectors(self.replica)

    def hold(self) -> Held:
        """Return a copy of all that this rank's model holds, with the velocity of a momentum around the step."""
        return self.replica.snapshot(), self.replica.ahead() if self.algorithm.momentum else None

    def put_back(self, held: Held) -> None:
        """Go on from what ``hold`` gave."""
        arrays, ahead = held
        self.replica.restore(arrays)
        if ahead is not None:
            self.replica.set_ahead(ahead)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Change this rank's weights for a while only."""
        held = self.hold()
        try:
            yield
        finally:
            self.put_back(held)

    def write_trainable(self, vector: Array) -> None:
        """Put them there with these trainable ones: the last centre, when a run fails."""
        self.replica.set(vector)
        self.write_weights()

    def take(self, arrays: list[Array], orders: TrainerControl) -> None:
        """Set what callbacks have set, from what ``snapshot`` gave.

        These are the model's variables and the rates of its held optimizers, where orders say so, and the variables of
        optimizers that they name. All others, and the states of random layers, stay this worker's own.
        """
        model, mine, optimizers = self.replica.model, self.replica.view(), optimizer_variables(self.replica.model)
        taken = {id(optimizers[place]) for place in orders.slots}
        rates = {id(variable) for variable in learning_rates(model)}
        own = {id(variable) for variable in [*self.replica.seeds, *optimizers]} - rates
        for index, variable in enumerate(model_variables(model)):
            if id(variable) in taken or (orders.weights and id(variable) not in own):
                mine[index] = arrays[index]
        ahead = self.replica.ahead() if self.algorithm.momentum and not orders.weights else None
        self.replica.restore(mine)
        if ahead is not None:
            self.replica.set_ahead(ahead)

    def obey(self, orders: TrainerControl) -> None:
        """Take a new learning rate, new values of variables and of settings."""
        if orders.learning_rate is not None:
            self.replica.learning_rate = orders.learning_rate
        if orders.variables and self.weights is not None:
            self.take(self.weights.views(), orders)
        if orders.settings:
            self.replica.take_settings(orders.settings)
        if orders.reset:
            self.replica.reset_metrics()


def vectors(replica: Replica) -> tuple[Array, Array]:
    """Return a replica's trainable vector and its moving statistics."""
    trainable, others = aligned(replica.size, replica.dtype), np.empty(replica.others, replica.dtype)
    replica.get(trainable)
    replica.get_others(others)
    return trainable, others


def mean_own_logs(of_ranks: list[list[Any]]) -> dict[str, float]:
    """Return the figures that a user's own step logs and no metric holds: the mean over ranks, weighted by rows.

    Args:
        of_ranks: for each rank its rows, and what ``Replica.own_logs`` returned; more values are ignored.
    """
    logging = [(rows, logs) for rows, logs, *_ in of_ranks if logs is not None and rows]
    total = sum(rows for rows, _ in logging)
    names = [name for name in (logging[0][1] if logging else {}) if any(logs[name][1] for _, logs in logging)]
    return {name: sum(rows * logs[name][0] for rows, logs in logging) / total for name in names}
