"""The training loop of a rank that exchanges asynchronously, or never."""

from __future__ import annotations

import math
import time
from dataclasses import fields

import numpy as np

from choros.backends.replica_state import Groups
from choros.comm.single_rank_group import SingleRankGroup
from choros.errors import CommTimeoutError, InvalidDataError
from choros.param_server.center_state import encode_position
from choros.training.async_control.center_snapshots import SLOTS, is_slot_free
from choros.training.async_control.recovery import resume_worker, save_position
from choros.training.spec import EpochCounts, epoch_rates
from choros.training.worker.context import WorkerContext
from choros.training.worker.exchange import AsyncExchange, Schedule
from choros.training.worker.local_steps import LocalSteps
from choros.training.worker.loop.checks import check_epoch, finite, late_check
from choros.training.worker.loop.rank_means import average_of
from choros.types import Array, Batch

_NO_VALUES = np.zeros(0)
_COUNT_VALUES = len(fields(EpochCounts))  # the last values of a rank's metrics in the control block
_POLL_SECONDS = 0.02  # between two polls of a worker that waits at an epoch's end


class AsyncLoop:
    """The asynchronous loop: each worker exchanges with the center after each of its windows, or never (Ensemble)."""

    def __init__(self, run: WorkerContext) -> None:
        self.run, self.replica = run, run.replica
        self.local, self.statistics = run.vectors()
        self.schedule = Schedule(run.algorithm.window)
        self.exchange = None if run.center is None else AsyncExchange(run.center, self.local.copy())
        self.solo = SingleRankGroup()
        self.position = run.begin  # the epoch, and the number of its batches that are done
        self.values = len(run.replica.metric_state())  # before any evaluation, which adds a count to the state
        self.finite = finite(run)
        self.recheck = late_check(run, None)
        self.steps = LocalSteps(run, run.job.per_batch and run.rank == 0, run.algorithm.momentum)

    def train(self) -> None:
        """Train all epochs. Workers do not wait for each other within an epoch."""
        run = self.run
        run.apply_control(run.reporter.begin())
        self.apply_rate()
        if self.exchange is not None:
            # After ``begin``, whose callbacks may have replaced the center.
            run.center.read(self.local, self.statistics, adopt=True)
            self.exchange.seen[...] = self.local
            self.adopt_weights()
        restarted = run.resumes and resume_worker(run)
        if not restarted:
            self.replica.reset_metrics()
        if run.job.checkpoint_schedule is not None and self.exchange is not None:
            save_position(run, run.begin)
        run.start_clock()
        if run.resumes:
            self.report_missed()
        if run.algorithm.momentum:
            self.replica.look_ahead(run.algorithm.momentum)
        # If callbacks had ended the training, nothing is left to train, whatever the position of this worker.
        has_ended = run.job.initial_epoch >= run.job.epochs
        for epoch in range(run.job.epochs if has_ended else run.begin[0], run.job.epochs):
            if not restarted:
                self.replica.reset_metrics()
            restarted = False
            for number, batch in enumerate(run.batches(epoch), run.first(epoch)):
                self.step(epoch, number, batch)
            self.steps.run_waiting()
            with run.span("compute", "steps on the device"):
                state = self.replica.metric_state()  # waits for these steps
            check_epoch(self.recheck, run, epoch, epoch == run.job.epochs - 1 or run.control_block.stopped)
            if run.control_block.stopped and epoch >= run.control_block.first_unreported_epoch:
                break
            # With ``whole_epochs`` the center is saved without the workers' positions, so it must have all batches of
            # the epoch.
            if self.schedule.pending and (run.algorithm.window == 0 or run.job.whole_epochs):
                self.exchange_weights()
            # Before ``end_epoch``: the state must have arrived when the callbacks of this epoch run.
            if run.job.watched or run.job.checkpoint_schedule is not None:
                self.send_optimizer(epoch)
            # Before ``end_epoch``: the worker that completes the epoch makes the trial from what all workers have
            # published.
            self.publish_pending(epoch)
            self.end_epoch(epoch, state)
            if run.job.whole_epochs and epoch + 1 < run.job.epochs:
                self.wait_for_all(epoch)
            if run.control_block.stopped:
                break
        if self.schedule.pending:
            # A worker that validated the last epoch has more metric values than the control block has room for.
            self.replica.reset_metrics()
            self.exchange_weights()

    def step(self, epoch: int, number: int, batch: Batch) -> None:
        """Train one batch, exchange at the end of a window, and report."""
        run = self.run
        if self.recheck is not None:
            self.recheck(batch, epoch)
        self.steps.add(batch)
        self.position = (epoch, number + 1)
        if batch.rows and self.schedule.due():  # without rows there was no optimizer step
            self.exchange_weights()
        if run.job.per_batch and run.rank == 0:
            begun = time.perf_counter()
            show = self.show if run.job.ensemble else None
            with run.span("wait", "callbacks of a batch"):
                run.reporter.batch(epoch, number, self.replica.peek(self.replica.metric_state()), show)
            run.stats.calling += time.perf_counter() - begun
        elif not self.steps.waiting:
            run.progress(epoch, number)
        run.reporter.poll()
        run.leaving = run.control_block.stopped

    def show(self) -> list[float]:
        """Write the weights of an Ensemble's first member for callbacks, and return its metrics' values, flat."""
        self.run.write_weights()
        return self.run.shown_metric_values()

    def publish_pending(self, epoch: int) -> None:
        """Save the not yet exchanged update at an epoch's end, for the worker that validates and reports the epoch."""
        run = self.run
        if self.exchange is None or not self.schedule.pending or not (run.job.watched or run.job.validates(epoch)):
            return
        self.replica.get(self.local)
        self.replica.get_statistics(self.statistics)
        steps = self.schedule.trial_steps(epoch + 1 == run.job.epochs)
        run.center.publish_pending(self.local, self.exchange.seen, steps, self.statistics)

    def wait_for_all(self, epoch: int) -> None:
        """Wait until all workers have ended an epoch and its callbacks have run.

        Raises:
            CommTimeoutError: this took longer than ``first_timeout`` seconds.
        """
        run, deadline = self.run, time.monotonic() + self.run.job.first_timeout
        with run.span("wait", "all workers at the end of an epoch"):
            while not (run.control_block.stopped or run.control_block.allowed_epoch > epoch):
                run.reporter.poll()
                if time.monotonic() > deadline:
                    raise CommTimeoutError(
                        f"rank {run.rank} has waited {run.job.first_timeout:g} s for all workers to end epoch "
                        f"{epoch + 1}, or for its callbacks: give the Trainer a larger first_timeout."
                    )
                time.sleep(_POLL_SECONDS)

    def exchange_weights(self) -> None:
        """Take a new learning rate, and exchange with the center."""
        self.steps.run_waiting()
        run, pending = self.run, self.schedule.reset()
        self.apply_rate()
        if self.exchange is None:
            return
        with run.span("compute", "steps on the device"):
            # Waits for the steps on the device, which is time of training and not of the exchange.
            self.replica.get(self.local)
        self.finite.weights(self.local, self.position[0], self.position[1] - 1)
        self.replica.get_statistics(self.statistics)
        # Stored with the exchange: a new process resumes from it.
        run.center.position_word = encode_position(*self.position)
        run.stats.exchanges += 1
        if run.job.checkpoint_schedule is not None:
            save_position(run, self.position)
        begun = time.perf_counter()
        with run.span("exchange", "weights", self.local.nbytes):
            run.stats.staleness += self.exchange.run(self.local, pending, self.statistics)
        self.finite.exchanged(self.local)
        self.adopt_weights()
        run.stats.exchanging += time.perf_counter() - begun

    def apply_rate(self) -> None:
        """Take the learning rate if a callback has set one since the last call."""
        rate = self.run.control_block.rate()
        if rate is not None:
            self.replica.learning_rate = rate

    def adopt_weights(self) -> None:
        """Continue from the weights and moving statistics of the last exchange."""
        self.replica.set(self.local)
        self.replica.set_statistics(self.statistics)

    def end_epoch(self, epoch: int, state: Array) -> None:
        """Add the metrics to the control block. The last worker sums them, validates the center and reports.

        Args:
            epoch: the epoch.
            state: the state of the metrics after its last step.
        """
        run, replica = self.run, self.replica
        index = epoch - run.job.initial_epoch
        if run.resumes and (index < 0 or run.control_block.ended(index, run.rank)):
            # index < 0: the epoch was reported before the checkpoint. Else the last worker may have died before it
            # reported the epoch.
            if index >= 0 and run.control_block.complete(index):
                self.report(epoch, {})
            return
        member_logs: dict[str, float] = {}
        if self.exchange is None:  # each member of an ensemble has a separate score
            run.score = replica.metrics().get("loss", math.inf)
            self.finite.loss(run.score, epoch)
            if run.job.validates(epoch):
                member_logs = run.validate(self.solo, epoch)
                run.score = member_logs.get("val_loss", math.inf)
            if run.best is not None:
                self.wait_for_slot(epoch)
                run.best.put(epoch, run.rank, run.score, replica.snapshot)
        if len(member_logs) > run.job.epoch_values:
            raise InvalidDataError(
                f"rank {run.rank}: test_step logs {len(member_logs)} figures, and members of an Ensemble may log "
                f"{run.job.epoch_values}: log fewer."
            )
        train = np.zeros(run.job.epoch_values)
        train[: len(state)], train[-_COUNT_VALUES:] = state, run.epoch_counts()
        if run.control_block.add(index, run.rank, train, np.array(list(member_logs.values()))):
            self.report(epoch, member_logs)

    def report_missed(self) -> None:
        """Report epochs that this rank ended last before the checkpoint, and whose callbacks have not run.

        Callbacks may be late. The position from which this rank resumes may then be in a later epoch.
        """
        run, replica = self.run, self.replica
        state, control_block = replica.metric_state(), run.control_block
        # The position is beyond the last epoch if this fit has fewer epochs than the checkpoint.
        end = min(run.begin[0], run.job.epochs)
        for epoch in range(max(run.job.initial_epoch, control_block.allowed_epoch), end):
            index = epoch - run.job.initial_epoch
            # For an epoch that this rank has ended, ``add`` only returns whether it was the last one.
            if control_block.ended(index, run.rank) and control_block.add(index, run.rank, _NO_VALUES, _NO_VALUES):
                self.report(epoch, {})
        replica.reset_metrics()
        replica.set_metric_state(state)

    def report(self, epoch: int, member_logs: dict[str, float]) -> None:
        """Report an epoch that all workers have ended."""
        run, replica = self.run, self.replica
        index = epoch - run.job.initial_epoch
        best_rank = None if run.best is None else run.best.rank(epoch)
        sums = run.control_block.sums(index)
        train, valid = sums if best_rank is None else run.control_block.rank_metrics(index, best_rank)
        replica.set_metric_state(train[: self.values])
        logs: dict[str, float] = replica.metrics()
        metric_values = run.shown_metric_values()
        if best_rank is not None:
            logs |= dict(zip(member_logs, valid.tolist(), strict=False))
        elif run.snapshots is not None or run.job.validates(epoch):
            snapshot_vectors = self.snapshot(epoch)
            if run.job.validates(epoch):
                logs |= self.validate_at(epoch, *snapshot_vectors)
                metric_values = run.shown_metric_values()
        if run.job.run_metrics:
            logs |= epoch_rates(sums[0][-_COUNT_VALUES:], run.job.workers, run.job.asynchronous)
        run.reporter.epoch_end(epoch, logs, run.clock(), metric_values)

    def snapshot(self, epoch: int) -> tuple[Array, Array]:
        """Return the center of an epoch's end, including updates not yet exchanged, and save it for callbacks.

        If the epoch is reported again because its first reporter died, return the saved center.
        """
        run, center, statistics = self.run, np.empty_like(self.local), np.empty_like(self.statistics)
        if run.snapshots is None:
            run.center.trial(center, statistics)
            return center, statistics
        self.wait_for_slot(epoch)
        if not run.snapshots.read(epoch, center, statistics):
            run.center.trial(center, statistics)
            run.snapshots.put(epoch, center, statistics)
        return center, statistics

    def wait_for_slot(self, epoch: int) -> None:
        """Wait until the slot of an epoch may be written.

        Raises:
            CommTimeoutError: this took longer than ``first_timeout`` seconds.
        """
        run, deadline = self.run, time.monotonic() + self.run.job.first_timeout
        with run.span("wait", "callbacks of an earlier epoch"):
            while not is_slot_free(run.control_block, run.job.initial_epoch, epoch):
                run.reporter.poll()
                if time.monotonic() > deadline:
                    raise CommTimeoutError(
                        f"rank {run.rank} has waited {run.job.first_timeout:g} s at the end of epoch {epoch + 1} for "
                        f"the callbacks of epoch {epoch + 1 - SLOTS}: give the Trainer a larger first_timeout, or make "
                        "them faster."
                    )
                time.sleep(_POLL_SECONDS)

    def validate_at(self, epoch: int, center: Array, statistics: Array) -> dict[str, float]:
        """Validate a snapshot of the center while the other workers continue."""
        replica, worker_statistics = self.replica, np.empty_like(self.statistics)
        replica.get_statistics(worker_statistics)
        with self.run.using_weights(center):
            replica.set_statistics(statistics)
            logs = self.run.validate(self.solo, epoch)
            replica.set_statistics(worker_statistics)
        return logs

    def last(self) -> Array:
        """Return the last center."""
        if self.exchange is None:
            self.replica.get(self.local)
        else:
            self.run.center.read(self.local, self.statistics)
        return self.local

    def write_last(self) -> None:
        """Write the last center for the caller after a failure of another rank."""
        self.run.write_trainable(self.last())

    def finish(self) -> None:
        """End training, and send the optimizer's state. The caller reads the center itself."""
        self.replica.finish()
        self.send_optimizer()

    def send_optimizer(self, epoch: int | None = None) -> None:
        """Send the optimizer's state to the caller, at an epoch's end or (None) at the end of training.

        In a job only rank 0 does so, at epochs' ends, because its callbacks read the state.
        """
        run, replica = self.run, self.replica
        in_job = run.weights is None
        checkpointed = run.job.checkpoint_schedule is not None and not in_job
        if self.exchange is None or (in_job and (run.rank or epoch is None)):
            return
        if run.rank and not replica.averages and not checkpointed:
            return
        groups: Groups = {
            "optimizer": [] if run.rank and not checkpointed else replica.optimizer_state(),
            "average": [],
        }
        if replica.averages:
            groups["average"] = [average_of(replica)]
        run.reporter.optimizer(({"rows": run.stats.rows, "epoch": epoch}, groups))
