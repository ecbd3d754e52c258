"""The two training loops of a rank: synchronous, and asynchronous or without exchanges."""

from __future__ import annotations

import json
import math
import time
from typing import Any

import numpy as np

from choros.backends.loss_recheck import Recheck
from choros.backends.replica import Replica
from choros.backends.replica_state import Groups
from choros.comm.group import Group
from choros.comm.single_rank_group import SingleRankGroup
from choros.consistency import replica_divergence
from choros.consistency.nonfinite import NonFiniteDetector
from choros.errors import CommTimeoutError, PeerLostError, RankMismatchError
from choros.param_server.snapshot import encode_position
from choros.training.async_control.center_snapshots import SLOTS, has_room
from choros.training.async_control.recovery import leave, take_up
from choros.training.checkpoint.sync_checkpointer import SyncCheckpointer
from choros.training.spec import TrainerControl
from choros.training.worker.allreduce_steps import Reducing
from choros.training.worker.context import WorkerContext, mean_own_logs
from choros.training.worker.exchange import AsyncExchange, Schedule, SyncExchange
from choros.training.worker.setup import adding, dividing
from choros.types import Array, Batch

_LOOK = 0.02  # seconds between two polls of a worker that waits at an epoch's end


def train(run: WorkerContext) -> None:
    """Train one rank to the end. If a peer fails, write the last center for the caller, and raise."""
    loop = SyncLoop(run) if run.job.together else AsyncLoop(run)
    try:
        loop.train()
    except (PeerLostError, CommTimeoutError):
        run.write_trainable(loop.last())
        raise
    run.stop_clock()
    loop.finish()


def late_check(run: WorkerContext, length: int | None) -> Recheck | None:
    """Return the check of the loss during training, if several model replicas divide a step's batch; else None."""
    parts = dividing(run.job, run.algorithm, run.rank)
    return Recheck(run.replica, run.rank, run.job.workers, length, parts=parts) if parts > 1 else None


def check_epoch(recheck: Recheck | None, run: WorkerContext, epoch: int, last: bool) -> None:
    """Check the loss at the end of the first epoch, and of the last one of a stream."""
    if recheck is None:
        return
    if last and not run.source.indexed:
        recheck.finish()
    elif epoch == run.job.initial_epoch:
        recheck.end()


class SyncLoop:
    """The synchronous loop: ranks divide every global batch, and synchronize at least at each epoch's end."""

    def __init__(self, run: WorkerContext) -> None:
        self.run, self.replica = run, run.replica
        self.gradients = adding(run.job, run.algorithm) > 1
        length = run.job.steps or run.source.steps(run.job.batch_size)
        self.recheck = late_check(run, length)
        self.local, _ = run.vectors()
        self.schedule = Schedule(run.algorithm.window)
        self.rows = self.rows_before = 0
        self.meeting: SyncExchange | None = None
        self.finite, self.at, self.warned = finite(run), (run.begin[0], -1), False
        self.trial: Array | None = None  # the center that callbacks saw at the last epoch's end, if it was a trial
        self.keeper = None if run.job.keep is None else SyncCheckpointer(self)
        self.reducing = Reducing(self) if self.gradients else None
        if run.algorithm.level == "parameters" and run.job.mode is not None:
            self.meeting = SyncExchange(run.algorithm, run.group, self.local.copy())

    def train(self) -> None:
        """Train all epochs."""
        run = self.run
        self.obey(orders := run.reporter.begin())
        leave = orders.leave
        run.start_clock()
        if self.meeting is not None and run.algorithm.momentum:
            self.replica.look_ahead(run.algorithm.momentum)
        if run.state is not None:
            SyncCheckpointer.go_on(self, run.state, orders.learning_rate)
        for epoch in range(run.job.initial_epoch, run.job.epochs):
            if run.state is None or not run.first(epoch):
                self.replica.reset_metrics()
                self.rows_before = run.tally.rows
            step = self.reducing or self.window
            for number, batch in enumerate(run.batches(epoch), run.first(epoch)):
                self.at = (epoch, number)
                step(batch)
                if run.dropped:
                    continue
                run.group.timeout = run.step_timeout  # the first step has a longer timeout, because it compiles
                if self.reducing is not None:
                    self.reducing.report(epoch, number)
                else:
                    run.leaving = self.report(epoch, number).stop
                if self.keeper is not None:
                    if self.reducing is not None and self.keeper.due(number + 1):
                        run.leaving = self.reducing.settle().stop
                    self.keeper.stepped(epoch, number + 1)
                run.leaving = run.leaving or leave
            if self.reducing is not None:
                self.reducing.settle()
            check_epoch(self.recheck, run, epoch, epoch == run.job.epochs - 1 or run.leaving)
            if self.meeting is not None and run.algorithm.window == 0:
                self.meet()
            logs, held = self.end_epoch(epoch, run.tally.rows - self.rows_before)
            orders = run.reporter.epoch_end(epoch, logs if run.rank == 0 else None, run.clock(), held)
            self.obey(orders)
            leave = orders.leave
            if self.keeper is not None:
                self.keeper.ended(epoch, orders.stop)
            if orders.stop:
                check_epoch(self.recheck, run, epoch, True)
                break
        if self.meeting is not None and self.schedule.pending:
            self.meet()

    def report(self, epoch: int, step: int) -> TrainerControl:
        """Report a step. With batch hooks, all ranks wait for the control message and apply it."""
        run, replica = self.run, self.replica
        if not run.job.per_batch:
            run.progress(epoch, step)
            return TrainerControl()
        state = run.group.sum(replica.metric_state())
        logs = replica.peek(state) if run.rank == 0 else None
        orders = run.reporter.batch(epoch, step, logs, lambda: self.show(state))
        self.obey(orders)
        return orders

    def show(self, state: Array) -> list[float]:
        """Write the weights for callbacks within an epoch: those of the center, if there is one.

        Args:
            state: the sum of the ranks' metric states.

        Returns:
            The values of the metrics' variables, flat.
        """
        with self.run.at(self.centre()):
            self.run.write_weights()
        held: list[float] = self.replica.metric_values(state)
        return held

    def centre(self) -> Array | None:
        """Return the center if this rank's weights differ from it; else None.

        They differ within a window. With EASGD they also differ right after an exchange.
        """
        at_it = not self.schedule.pending and self.meeting and np.array_equal(self.local, self.meeting.centre)
        return None if self.meeting is None or at_it else self.meeting.centre

    def shown(self, epoch: int) -> Array | None:
        """Return the center to validate and show to callbacks at an epoch's end, if this rank's weights differ from it.

        Within a window it is the center that an exchange would produce now. The exchange is only a trial: training is
        the same with and without validation.
        """
        wanted = self.run.job.watched or self.run.job.validates(epoch)
        self.trial = None
        if self.meeting is None or not self.schedule.pending or not wanted:
            return self.centre()
        self.replica.get(self.local)
        window = trial_window(self.run, epoch, self.schedule.pending)
        self.trial = self.meeting.trial(self.local, window, self.rows)
        return self.trial

    def window(self, batch: Batch) -> None:
        """Make one local step, and exchange at the end of a window."""
        if self.recheck is not None:
            self.recheck(batch, self.at[0])
        self.replica.step(batch)
        self.rows += batch.rows
        if self.meeting is None:
            return
        if self.run.algorithm.momentum and batch.rows:
            self.replica.look_ahead(self.run.algorithm.momentum)
        if self.schedule.due():
            self.meet()

    def meet(self) -> None:
        """Exchange with all ranks. Collective: every rank must call it."""
        if self.meeting is None:
            return
        self.replica.get(self.local)  # waits for steps on the device, which is time of training, not of exchanging
        self.finite.weights(self.local, *self.at)
        begun = time.perf_counter()
        self.meeting.meet(self.local, self.schedule.reset(), self.rows)
        self.finite.met(self.local)
        self.replica.set(self.local)
        self.rows = 0
        self.run.tally.exchanging += time.perf_counter() - begun
        self.run.tally.exchanges += 1

    def end_epoch(self, epoch: int, rows: int) -> tuple[dict[str, float], list[float]]:
        """Average the moving statistics, sum the metrics, validate, and write the weights of the center.

        Returns:
            The logs, and the values of the metrics' variables, flat.
        """
        run, replica, group = self.run, self.replica, self.run.group
        if replica.others and group.size > 1:
            replica.set_others(mean_others(run, rows))
        if self.meeting is not None and replica.averages:
            replica.set_average(mean_average(replica, group, rows))
        replica.set_metric_state(group.sum(replica.metric_state()))
        logs: dict[str, float] = replica.metrics()
        held = run.held_by_metrics()
        lost = False
        if group.size > 1:
            said = self.same(epoch)
            logs |= mean_own_logs(said)
            lost = any(each[4] >= 0 for each in said)
        if run.rank == 0 and not lost:
            self.finite.loss(logs.get("loss"), epoch)
        shown = self.shown(epoch)
        if run.job.validates(epoch):
            with run.at(average_of(replica) if run.job.validate_average else shown):
                logs |= run.validate(group)
            held = run.held_by_metrics()
        if run.rank == 0:
            with run.at(shown):
                run.write_weights()
        return logs, held

    def same(self, epoch: int, step: int | None = None) -> list[list[Any]]:
        """Check that all ranks have the same weights or center. If they differ by rounding, all take those of one rank.

        Collective: every rank must call it.

        Args:
            epoch: int. The epoch, for the error message.
            step: int. The step within it; None means its end.

        Returns:
            For each rank the rows of its last batch, the logs of the user's ``train_step``, and further values.

        Raises:
            RankMismatchError: this rank's weights differ from those of most ranks.
            PeerLostError: those of another rank differ.
        """
        run, shared = self.run, self.local if self.meeting is None else self.meeting.centre
        if self.meeting is None:
            self.replica.get(shared)
        mine = [
            run.last_rows,
            self.replica.own_logs(),
            replica_divergence.mark(shared),
            run.tally.host,
            run.tally.lost_epoch,
        ]
        said = [json.loads(text) for text in run.group.gather(json.dumps(mine).encode())]
        found = replica_divergence.compare([each[2] for each in said])
        if found is not None and found.far:
            error = RankMismatchError if run.rank in found.far else PeerLostError
            raise error(found.say([each[3] for each in said], epoch, step))
        if found is not None:
            if not (self.warned or run.rank):
                replica_divergence.warn(found, f"all take those of rank {found.usual}")
            self.warned = True
            shared[...] = run.group.broadcast(shared, found.usual)
            if self.meeting is None:
                self.replica.set(shared)
        return said

    def obey(self, orders: TrainerControl) -> None:
        """Apply a control message. New weights replace the center."""
        self.run.obey(orders)
        if orders.weights and self.meeting is not None:
            self.replica.get(self.local)
            self.meeting.replace(self.local)
            self.trial = None

    def last(self) -> Array:
        """Return the last center."""
        if self.meeting is None:
            self.replica.get(self.local)
            return self.local
        return self.meeting.centre

    def finish(self) -> None:
        """Set the model to the center. Rank 0 also writes it for the caller."""
        if self.meeting is not None:
            self.replica.set(self.meeting.centre)
        self.replica.finish()
        if self.run.rank == 0:
            self.run.write_weights()


class AsyncLoop:
    """The asynchronous loop: each worker exchanges with the center after each of its windows, or never (Ensemble)."""

    def __init__(self, run: WorkerContext) -> None:
        self.run, self.replica = run, run.replica
        self.local, self.others = run.vectors()
        self.schedule = Schedule(run.algorithm.window)
        self.meeting = None if run.centre is None else AsyncExchange(run.centre, self.local.copy())
        self.solo = SingleRankGroup()
        self.at = run.begin  # the epoch, and the number of its batches that are done
        self.values = len(run.replica.metric_state())  # before any evaluation, which adds a count to the state
        self.finite = finite(run)
        self.recheck = late_check(run, None)

    def train(self) -> None:
        """Train all epochs. Workers do not wait for each other within an epoch."""
        run = self.run
        run.obey(run.reporter.begin())
        self.take_rate()
        if self.meeting is not None:
            run.centre.read(self.local, self.others)
            self.meeting.seen[...] = self.local
            self.go_on()
        again = run.again and take_up(run)
        if run.job.keep is not None and self.meeting is not None and not run.again:
            leave(run, run.begin)
        run.start_clock()
        if run.algorithm.momentum:
            self.replica.look_ahead(run.algorithm.momentum)
        for epoch in range(run.begin[0], run.job.epochs):
            if not again:
                self.replica.reset_metrics()
            again = False
            for number, batch in enumerate(run.batches(epoch), run.first(epoch)):
                self.step(epoch, number, batch)
            check_epoch(self.recheck, run, epoch, epoch == run.job.epochs - 1 or run.board.stopped)
            if run.board.stopped and epoch >= run.board.last:
                break
            if self.schedule.pending and (run.algorithm.window == 0 or run.job.whole_epochs):
                self.meet()
            if run.job.watched or run.job.keep is not None:
                self.give_optimizer(epoch)
            self.leave_pending(epoch)
            self.end_epoch(epoch)
            if run.job.whole_epochs and epoch + 1 < run.job.epochs:
                self.wait_for_all(epoch)
            if run.board.stopped:
                break
        if self.schedule.pending:
            # A worker that validated the last epoch has more metric values than the control block has room for.
            self.replica.reset_metrics()
            self.meet()

    def step(self, epoch: int, number: int, batch: Batch) -> None:
        """Train one batch, exchange at the end of a window, and report."""
        run = self.run
        if self.recheck is not None:
            self.recheck(batch, epoch)
        self.replica.step(batch)
        self.at = (epoch, number + 1)
        if batch.rows and run.algorithm.momentum:
            self.replica.look_ahead(run.algorithm.momentum)
        if batch.rows and self.schedule.due():  # without rows there was no optimizer step
            self.meet()
        if run.job.per_batch and run.rank == 0:
            begun = time.perf_counter()
            show = self.show if run.job.ensemble else None
            run.reporter.batch(epoch, number, self.replica.peek(self.replica.metric_state()), show)
            run.tally.calling += time.perf_counter() - begun
        else:
            run.progress(epoch, number)
        run.reporter.look()
        run.leaving = run.board.stopped

    def show(self) -> list[float]:
        """Write the weights of an Ensemble's first member for callbacks, and return its metrics' values, flat."""
        self.run.write_weights()
        return self.run.held_by_metrics()

    def leave_pending(self, epoch: int) -> None:
        """Save the not yet exchanged update at an epoch's end, for the worker that validates and reports the epoch."""
        run, pending = self.run, self.schedule.pending
        if self.meeting is None or not pending or not (run.job.watched or run.job.validates(epoch)):
            return
        self.replica.get(self.local)
        self.replica.get_others(self.others)
        run.centre.leave(self.local, self.meeting.seen, trial_window(run, epoch, pending), self.others)

    def wait_for_all(self, epoch: int) -> None:
        """Wait until all workers have ended an epoch and its callbacks have run.

        Raises:
            CommTimeoutError: this took longer than ``first_timeout`` seconds.
        """
        run, limit = self.run, time.monotonic() + self.run.job.first_timeout
        while not (run.board.stopped or run.board.opened > epoch):
            run.reporter.look()
            if time.monotonic() > limit:
                raise CommTimeoutError(
                    f"not all workers had ended epoch {epoch + 1} after {run.job.first_timeout:g} s."
                )
            time.sleep(_LOOK)

    def meet(self) -> None:
        """Take a new learning rate, and exchange with the center."""
        run, pending = self.run, self.schedule.reset()
        self.take_rate()
        if self.meeting is None:
            return
        self.replica.get(self.local)
        self.finite.weights(self.local, self.at[0], self.at[1] - 1)
        self.replica.get_others(self.others)
        run.centre.position = encode_position(*self.at)  # stored with the exchange: a new process resumes from it
        begun = time.perf_counter()
        run.tally.staleness += self.meeting.meet(self.local, pending, self.others)
        self.finite.met(self.local)
        self.go_on()
        run.tally.exchanging += time.perf_counter() - begun
        run.tally.exchanges += 1
        if run.job.keep is not None:
            leave(run, self.at)

    def take_rate(self) -> None:
        """Take the learning rate if a callback has set one since the last call."""
        rate = self.run.board.rate()
        if rate is not None:
            self.replica.learning_rate = rate

    def go_on(self) -> None:
        """Continue from the weights and moving statistics of the last exchange."""
        self.replica.set(self.local)
        self.replica.set_others(self.others)

    def end_epoch(self, epoch: int) -> None:
        """Add the metrics to the control block. The last worker sums them, validates the center and reports."""
        run, replica = self.run, self.replica
        index = epoch - run.job.initial_epoch
        if run.again and (index < 0 or run.board.ended(index, run.rank)):
            if index >= 0 and run.board.complete(index):  # the last worker may have died before it reported the epoch
                self.report(epoch, {})
            return
        state = replica.metric_state()
        members: dict[str, float] = {}
        if self.meeting is None:  # each member of an ensemble has a separate score
            run.score = replica.metrics().get("loss", math.inf)
            self.finite.loss(run.score, epoch)
            if run.job.validates(epoch):
                members = run.validate(self.solo)
                run.score = members.get("val_loss", math.inf)
            if run.best is not None:
                self.wait_for_room(epoch)
                run.best.put(epoch, run.rank, run.score, replica.snapshot)
        validation = np.zeros(len(state))
        validation[: len(members)] = list(members.values())
        if run.board.add(index, run.rank, state, validation):
            self.report(epoch, members)

    def report(self, epoch: int, members: dict[str, float]) -> None:
        """Report an epoch that all workers have ended."""
        run, replica = self.run, self.replica
        index = epoch - run.job.initial_epoch
        best = None if run.best is None else run.best.rank(epoch)
        train, valid = run.board.sums(index) if best is None else run.board.part(index, best)
        replica.set_metric_state(train[: self.values])
        logs: dict[str, float] = replica.metrics()
        held = run.held_by_metrics()
        if best is not None:
            logs |= dict(zip(members, valid.tolist(), strict=False))
        elif run.snapshots is not None or run.job.validates(epoch):
            shown = self.snapshot(epoch)
            if run.job.validates(epoch):
                logs |= self.validate_at(*shown)
                held = run.held_by_metrics()
        run.reporter.epoch_end(epoch, logs, run.clock(), held)

    def snapshot(self, epoch: int) -> tuple[Array, Array]:
        """Return the center of an epoch's end, including updates not yet exchanged, and save it for callbacks.

        If the epoch is reported again because its first reporter died, return the saved center.
        """
        run, centre, others = self.run, np.empty_like(self.local), np.empty_like(self.others)
        if run.snapshots is None:
            run.centre.trial(centre, others)
            return centre, others
        self.wait_for_room(epoch)
        if not run.snapshots.read(epoch, centre, others):
            run.centre.trial(centre, others)
            run.snapshots.put(epoch, centre, others)
        return centre, others

    def wait_for_room(self, epoch: int) -> None:
        """Wait until the slot of an epoch may be written.

        Raises:
            CommTimeoutError: this took longer than ``first_timeout`` seconds.
        """
        run, limit = self.run, time.monotonic() + self.run.job.first_timeout
        while not has_room(run.board, run.job.initial_epoch, epoch):
            run.reporter.look()
            if time.monotonic() > limit:
                raise CommTimeoutError(
                    f"rank {run.rank} has waited {run.job.first_timeout:g} s at the end of epoch {epoch + 1} for the "
                    f"callbacks of epoch {epoch + 1 - SLOTS}: give the Trainer a larger first_timeout, or make them "
                    "faster."
                )
            time.sleep(_LOOK)

    def validate_at(self, centre: Array, others: Array) -> dict[str, float]:
        """Validate a snapshot of the center while the other workers continue."""
        replica, own = self.replica, np.empty_like(self.others)
        replica.get_others(own)
        with self.run.at(centre):
            replica.set_others(others)
            logs = self.run.validate(self.solo)
            replica.set_others(own)
        return logs

    def last(self) -> Array:
        """Return the last center."""
        if self.meeting is None:
            self.replica.get(self.local)
        else:
            self.run.centre.read(self.local, self.others)
        return self.local

    def finish(self) -> None:
        """End training, and send the optimizer's state. The caller reads the center itself."""
        self.replica.finish()
        self.give_optimizer()

    def give_optimizer(self, epoch: int | None = None) -> None:
        """Send the optimizer's state to the caller, at an epoch's end or (None) at the end of training.

        In a job only rank 0 does so, at epochs' ends, because its callbacks read the state.
        """
        run, replica = self.run, self.replica
        in_job = run.weights is None
        kept = run.job.keep is not None and not in_job
        if self.meeting is None or (in_job and (run.rank or epoch is None)):
            return
        if run.rank and not replica.averages and not kept:
            return
        groups: Groups = {"optimizer": [] if run.rank and not kept else replica.optimizer_state(), "average": []}
        if replica.averages:
            groups["average"] = [average_of(replica)]
        run.reporter.optimizer(({"rows": run.tally.rows, "epoch": epoch}, groups))


def trial_window(run: WorkerContext, epoch: int, pending: int) -> int:
    """Return the number of steps by which a trial exchange within a window divides, for rules that take the mean step.

    It is the length of the whole window. Division by the steps so far would give the first steps of a window as much
    weight as a whole window. After the last epoch it is the number of steps so far, as in the exchange that follows.
    """
    return pending if epoch + 1 == run.job.epochs else max(pending, int(run.algorithm.window))


def finite(run: WorkerContext) -> NonFiniteDetector:
    """Return the detector of this rank's first value that is not finite."""
    return NonFiniteDetector(lambda: run.tally, run.job.workers, run.replica.model.optimizer, lambda: run.vectors()[0])


def mean_others(run: WorkerContext, rows: int) -> Array:
    """Return the mean of the moving statistics over the ranks, weighted by the rows of each rank. Collective."""
    own = np.empty(run.replica.others, run.replica.dtype)
    run.replica.get_others(own)
    others = np.empty(len(own) + 1, np.float64)
    others[:-1] = own
    others[:-1] *= rows
    others[-1] = rows
    summed = run.group.sum(others)
    mean: Array = (summed[:-1] / summed[-1]).astype(run.replica.dtype) if summed[-1] else own
    return mean


def mean_average(replica: Replica, group: Group, rows: int) -> Array:
    """Return the mean of the ranks' moving averages of their weights, weighted by the rows of each rank. Collective.

    If the exchange is a mean over the ranks, this is the moving average of the mean, because both are linear.

    Args:
        replica: this rank's replica. Its optimizer has ``use_ema``.
        group: Group. All ranks.
        rows: int. Rows that this rank has trained.
    """
    average = average_of(replica)
    total = float(group.sum(np.array([rows], np.float64))[0])
    average *= rows / total if total else 1 / group.size
    mean: Array = group.sum(average)
    return mean


def average_of(replica: Replica) -> Array:
    """Return a copy of the optimizer's moving average of the weights, as a flat vector."""
    average = np.empty(replica.size, replica.dtype)
    replica.get_average(average)
    return average
