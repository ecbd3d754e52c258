"""The training loop of a synchronous rank."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from choros.comm.shared_values import gather_messages
from choros.consistency import replica_divergence
from choros.errors import PeerLostError, RankMismatchError
from choros.training.checkpoint.sync_checkpointer import SyncCheckpointer
from choros.training.spec import TrainerControl, epoch_rates
from choros.training.worker.allreduce_steps import AllReduceSteps
from choros.training.worker.context import WorkerContext, mean_own_logs
from choros.training.worker.exchange import Schedule, SyncExchange
from choros.training.worker.local_steps import LocalSteps
from choros.training.worker.loop.checks import check_epoch, finite, late_check
from choros.training.worker.loop.rank_means import average_of, mean_average, mean_statistics
from choros.training.worker.setup import adding
from choros.types import Array, Batch, aligned


@dataclass(frozen=True)
class RankReport:
    """Report of a rank when all ranks compare their weights.

    Attributes:
        rows: int. The rows of its last batch.
        logs: dict of name to (value, whether ``train_step`` computed it), as ``Replica.own_logs``; or None.
        fingerprint: list. That of its weights or center; see ``replica_divergence.mark``.
        host: str.
        lost_epoch: int. The epoch at which its numbers were first not finite; -1 if they are finite.
        counts: list of float. The numbers of its ``EpochCounts``.
    """

    rows: int
    logs: dict[str, Any] | None
    fingerprint: list[Any]
    host: str
    lost_epoch: int
    counts: list[float]


class SyncLoop:
    """The synchronous loop: ranks divide every global batch, and synchronize at least at each epoch's end."""

    def __init__(self, run: WorkerContext) -> None:
        self.run, self.replica = run, run.replica
        self.gradients = adding(run.job, run.algorithm) > 1
        length = run.job.steps or run.source.steps(run.job.batch_size)
        self.recheck = late_check(run, length)
        self.local = aligned(self.replica.size, self.replica.dtype)  # takes memory when it is written
        self.schedule = Schedule(run.algorithm.window)
        self.rows = self.rows_before = 0
        self.exchange: SyncExchange | None = None
        self.finite, self.warned = finite(run), False
        self.current_batch = (run.begin[0], -1)  # the epoch, and the number of the batch in it; -1 before the first
        self.trial: Array | None = None  # the center that callbacks saw at the last epoch's end, if it was a trial
        self.written = False  # whether the caller's memory holds the weights as they are
        self.checkpointer = None if run.job.checkpoint_schedule is None else SyncCheckpointer(self)
        self.reducing = AllReduceSteps(self) if self.gradients else None
        if run.algorithm.level == "parameters" and run.job.mode is not None:
            self.replica.get(self.local)
            self.exchange = SyncExchange(run.algorithm, run.group, self.local.copy())
        self.steps = LocalSteps(run, run.job.per_batch, 0.0 if self.exchange is None else run.algorithm.momentum)

    def train(self) -> None:
        """Train all epochs."""
        run = self.run
        self.apply_control(control := run.reporter.begin())
        end_after_batch = control.end_after_batch
        run.start_clock()
        if self.exchange is not None and run.algorithm.momentum:
            self.replica.look_ahead(run.algorithm.momentum)
        if run.state is not None:
            SyncCheckpointer.restore(self, run.state, control.learning_rate)
        for epoch in range(run.job.initial_epoch, run.job.epochs):
            if run.state is None or not run.first(epoch):
                self.replica.reset_metrics()
                self.rows_before = run.stats.rows
            self.written = False
            step = self.reducing or self.window
            for number, batch in enumerate(run.batches(epoch), run.first(epoch)):
                self.current_batch = (epoch, number)
                step(batch)
                if run.dropped:
                    continue
                run.group.timeout = run.step_timeout  # the first step has a longer timeout, because it compiles
                if self.reducing is not None:
                    self.reducing.report(epoch, number)
                else:
                    run.leaving = self.report(epoch, number).stop
                if self.checkpointer is not None:
                    if self.reducing is not None and self.checkpointer.due(number + 1):
                        # The saved state must include the changes by callbacks of this step.
                        run.leaving = self.reducing.settle().stop
                    self.checkpointer.stepped(epoch, number + 1)
                run.leaving = run.leaving or end_after_batch
            if self.reducing is not None:
                self.reducing.settle()
            self.steps.run_waiting()
            check_epoch(self.recheck, run, epoch, epoch == run.job.epochs - 1 or run.leaving)
            if self.exchange is not None and run.algorithm.window == 0:
                self.exchange_weights()
            logs, metric_values = self.end_epoch(epoch, run.stats.rows - self.rows_before)
            with run.span("wait", "callbacks of an epoch"):
                control = run.reporter.epoch_end(epoch, logs if run.rank == 0 else None, run.clock(), metric_values)
            self.apply_control(control)
            end_after_batch = control.end_after_batch
            if self.checkpointer is not None:
                self.checkpointer.ended(epoch, control.stop)
            if control.stop:
                check_epoch(self.recheck, run, epoch, True)
                break
        if self.exchange is not None and self.schedule.pending:
            self.exchange_weights()

    def report(self, epoch: int, step: int) -> TrainerControl:
        """Report a step. With batch hooks, all ranks wait for the control message and apply it."""
        run, replica = self.run, self.replica
        if not run.job.per_batch:
            if not self.steps.waiting:
                run.progress(epoch, step)
            return TrainerControl()
        state = run.group.sum(replica.metric_state())
        logs = replica.peek(state) if run.rank == 0 else None
        with run.span("wait", "callbacks of a batch"):
            control = run.reporter.batch(epoch, step, logs, lambda: self.show(state))
        self.apply_control(control)
        return control

    def show(self, state: Array) -> list[float]:
        """Write the weights for callbacks within an epoch: those of the center, if there is one.

        Args:
            state: the sum of the ranks' metric states.

        Returns:
            The values of the metrics' variables, flat.
        """
        with self.run.using_weights(self.center()):
            self.run.write_weights()
        metric_values: list[float] = self.replica.metric_values(state)
        return metric_values

    def center(self) -> Array | None:
        """Return the center if this rank's weights differ from it; else None.

        They differ within a window. With EASGD they also differ right after an exchange.
        """
        equals_center = not self.schedule.pending and self.exchange and np.array_equal(self.local, self.exchange.center)
        return None if self.exchange is None or equals_center else self.exchange.center

    def shown(self, epoch: int) -> Array | None:
        """Return the center to validate and show to callbacks at an epoch's end, if this rank's weights differ from it.

        Within a window it is the center that an exchange would produce now. The exchange is only a trial: training is
        the same with and without validation.
        """
        is_read = self.run.job.watched or self.run.job.validates(epoch)
        self.trial = None
        if self.exchange is None or not self.schedule.pending or not is_read:
            return self.center()
        self.replica.get(self.local)
        window = self.schedule.trial_steps(epoch + 1 == self.run.job.epochs)
        self.trial = self.exchange.trial(self.local, window, self.rows)
        return self.trial

    def window(self, batch: Batch) -> None:
        """Make one local step, and exchange at the end of a window."""
        if self.recheck is not None:
            self.recheck(batch, self.current_batch[0])
        self.steps.add(batch)
        self.rows += batch.rows
        if self.exchange is not None and self.schedule.due():
            self.exchange_weights()

    def exchange_weights(self) -> None:
        """Exchange with all ranks. Collective: every rank must call it."""
        self.steps.run_waiting()
        if self.exchange is None:
            return
        with self.run.span("compute", "steps on the device"):
            self.replica.get(self.local)  # waits for these steps, which is time of training, not of exchanging
        self.finite.weights(self.local, *self.current_batch)
        begun = time.perf_counter()
        with self.run.span("exchange", "weights", self.local.nbytes):
            self.exchange.run(self.local, self.schedule.reset(), self.rows)
        self.finite.exchanged(self.local)
        self.replica.set(self.local)
        self.rows = 0
        self.run.stats.exchanging += time.perf_counter() - begun
        self.run.stats.exchanges += 1

    def end_epoch(self, epoch: int, rows: int) -> tuple[dict[str, float], list[float]]:
        """Average the moving statistics, sum the metrics, validate, and write the weights of the center.

        Returns:
            The logs, and the values of the metrics' variables, flat.
        """
        run, replica, group = self.run, self.replica, self.run.group
        with run.span("compute", "steps on the device"):
            state = replica.metric_state()  # waits for these steps
        if replica.statistics_size and group.size > 1:
            replica.set_statistics(mean_statistics(run, rows))
        if self.exchange is not None and replica.averages:
            replica.set_average(mean_average(replica, group, rows))
        replica.set_metric_state(group.sum(state))
        logs: dict[str, float] = replica.metrics()
        metric_values = run.shown_metric_values()
        is_nonfinite = False
        if group.size > 1:
            reports = self.same(epoch)
            counts = [report.counts for report in reports]
            logs |= mean_own_logs([(report.rows, report.logs) for report in reports])
            is_nonfinite = any(report.lost_epoch >= 0 for report in reports)
        else:
            counts = [run.epoch_counts()]
        if run.rank == 0 and not is_nonfinite:
            self.finite.loss(logs.get("loss"), epoch)
        shown = self.shown(epoch)
        if run.job.validates(epoch):
            with run.using_weights(average_of(replica) if run.job.validate_average else shown):
                logs |= run.validate(group, epoch)
            metric_values = run.shown_metric_values()
        if run.job.run_metrics:
            logs |= epoch_rates(np.sum(counts, axis=0), group.size, asynchronous=False)
        if run.rank == 0:
            with run.using_weights(shown):
                run.write_weights()
            # With a center, or with averaged weights, ``finish`` still changes the model, so it must be written again.
            self.written = self.exchange is None and not replica.averages
        return logs, metric_values

    def same(self, epoch: int, step: int | None = None) -> list[RankReport]:
        """Check that all ranks have the same weights or center. If they differ by rounding, all take those of one rank.

        Collective: every rank must call it.

        Args:
            epoch: int. The epoch, for the error message.
            step: int. The step within it; None means its end.

        Returns:
            The report of each rank.

        Raises:
            RankMismatchError: this rank's weights differ from those of most ranks.
            PeerLostError: those of another rank differ.
        """
        run, shared = self.run, self.local if self.exchange is None else self.exchange.center
        if self.replica.shard is not None and self.reducing is not None:
            self.reducing.check_shared_weights()
            shared = shared[:0]  # the ranks have one copy of the weights
        elif self.exchange is None:
            self.replica.get(shared)
        local_report = RankReport(
            run.last_rows,
            self.replica.own_logs(),
            replica_divergence.mark(shared),
            run.stats.host,
            run.stats.lost_epoch,
            run.epoch_counts(),
        )
        reports = gather_messages(run.group, local_report)
        drift = replica_divergence.compare([report.fingerprint for report in reports])
        if drift is not None and drift.far:
            error = RankMismatchError if run.rank in drift.far else PeerLostError
            raise error(drift.say([report.host for report in reports], epoch, step))
        if drift is not None:
            if not (self.warned or run.rank):
                replica_divergence.warn(drift, f"all take those of rank {drift.usual}")
            self.warned = True
            # Rounding differs between kinds of processors. Without this the difference would grow.
            shared[...] = run.group.broadcast(shared, drift.usual)
            if self.exchange is None:
                self.replica.set(shared)
        return reports

    def apply_control(self, control: TrainerControl) -> None:
        """Apply a control message. New weights replace the center."""
        if self.reducing is not None and (self.run.weights is not None or self.run.rank):
            self.reducing.check_shared_weights()  # no callback of this process has set the model's variables
        self.run.apply_control(control)
        if self.replica.shard is not None:
            self.replica.shard.watch()  # callbacks of this process may have set the model's variables, which are shared
        self.written = self.written and replace(control, stop=False, end_after_batch=False) == TrainerControl()
        if control.weights and self.exchange is not None:
            self.replica.get(self.local)
            self.exchange.replace(self.local)
            self.trial = None

    def last(self) -> Array:
        """Return the last center."""
        if self.exchange is None:
            self.replica.get(self.local)
            return self.local
        return self.exchange.center

    def write_last(self) -> None:
        """Write the weights, or the last center, for the caller after a failure of another rank.

        If the ranks divide the update and only some have made it, the caller keeps the weights that it has.
        """
        shard = self.replica.shard
        if shard is None:
            self.run.write_trainable(self.last())
        elif (copies := shard.whole_copy()) is not None and self.run.weights is not None:
            self.run.weights.write(copies)

    def finish(self) -> None:
        """Set the model to the center. Rank 0 also writes it for the caller."""
        if self.exchange is not None:
            self.replica.set(self.exchange.center)
        self.replica.finish()
        if self.run.rank == 0 and not self.written:
            self.run.write_weights()
