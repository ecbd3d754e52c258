"""The steps of AllReduce, and batch hooks that run while the next gradients are calculated.

After a step rank 0 sends the logs to the callbacks and does not wait. All ranks calculate the gradients of the next
batch. Then rank 0 reads the control message, and adds a note on it to the sum of the gradients:

- no change: the step continues;
- a new learning rate: it is set before the optimizer runs;
- a stop, new weights or other changes: all ranks drop the gradients, undo the effects of their calculation, and take
  the control message from rank 0.

So no batch trains with values that callbacks have replaced. Callbacks that change nothing cost no extra exchange.
"""

from __future__ import annotations

import logging
import time
from typing import Any

import numpy as np

from choros.backends.metric_additivity import rate_stays_in_optimizer
from choros.backends.optimizer_shard import make_shard, obstacle, pays
from choros.backends.optimizer_shard.shard import OptimizerShard
from choros.backends.rowwise_parts import of_keras
from choros.cluster.hardware.freed_memory import return_freed_memory
from choros.comm.dtypes import add_in_order
from choros.comm.shared_values import gather_values
from choros.comm.shm.group import SharedGroup, share
from choros.comm.shm.segment import Segment
from choros.errors import InvalidInputError
from choros.training.spec import TrainerControl
from choros.training.worker.context import WorkerContext
from choros.training.worker.gradient_tail import GradientTail
from choros.types import Array, Batch

logger = logging.getLogger(__name__)


class AllReduceSteps:
    """The AllReduce steps of one rank.

    Args:
        loop: ``SyncLoop`` of an algorithm that sums gradients.

    Attributes:
        open: bool. Whether the control message after the last step is still to be taken.
    """

    def __init__(self, loop: Any) -> None:
        self.loop, self.run, self.replica = loop, loop.run, loop.run.replica
        run, self.open = self.run, False
        self.count = self.replica.size + 2  # the gradients, the loss and its divisor; see ``Replica.gradients``
        self.tail: GradientTail | None = None
        if run.job.per_batch:
            self.tail = GradientTail.of(run.job, run.rank)
            self.tail.rate_alone = run.rank == 0 and rate_stays_in_optimizer(self.replica.model)
            self.replica.revocable = True
        if run.job.repeats:
            self.replica.repeats = True
        elif not of_keras(type(self.replica.model).train_step):
            self.replica.watches = True
        self.control: TrainerControl | None = None  # on rank 0, the control message
        self.mark: Any = None  # the replica's state before the gradients, which may be dropped
        self.summed_tail: Array | None = None  # the tail of the last step's sum, until ``report`` has read it
        self.state: Array | None = None  # on rank 0, the sum of the metric states after the last step
        self.values = 0  # length of this rank's metric state
        self.totals = np.empty(2 + (0 if self.tail is None else self.tail.size), self.replica.dtype)
        self.rank_gradients: list[Array] = []  # those of all ranks, while they divide the update
        self._has_begun = False  # whether a step has begun
        self._planned: OptimizerShard | None = None  # not on JAX; until the first step has shown that it may be used
        self._sets_weights = False

    @property
    def shard(self) -> OptimizerShard | None:
        """This rank's share of the optimizer's update, while the ranks divide it."""
        shard: OptimizerShard | None = self.replica.shard
        return shard

    @property
    def first(self) -> int:
        """The index at which the tail begins in the result of ``_sum``."""
        return self.count if self.shard is None else 2

    def __call__(self, batch: Batch) -> None:
        """Make one step: write the gradients to the group's buffer, sum them over ranks, run the optimizer."""
        if not self._has_begun:
            self._plan()
        if self.loop.recheck is not None:
            self.loop.recheck(batch, self.loop.current_batch[0])
        summed, nonfinite = self._sum(batch)
        if self.open and not self._accepts_gradients(summed):
            if self.run.dropped:
                return
            summed, nonfinite = self._sum(batch)
        self.open = False
        self.loop.finite.note(nonfinite, *self.loop.current_batch)
        self.run.stats.exchanges += 1
        with self.run.span("compute", "optimizer"):
            if self.shard is None:
                self.replica.apply(summed[: self.count])
            else:
                self.shard.apply(summed, self.rank_gradients, add_in_order, self.run.group.barrier)
        tail = summed[self.first :]
        if self.shard is not None:
            self._close_slots()
        elif self._planned is not None:
            tail = tail.copy()  # the calls below use the group's memory
            self._end_first_step(self._planned)
        if self.run.job.repeats and batch.total < max(self.run.job.workers, sum(self.run.job.devices)):
            self._copy_outcome(batch)
        self.summed_tail = tail

    def _copy_outcome(self, batch: Batch) -> None:
        """Copy the outcome of the repeated step from rank 0, which always has rows, to ranks without. Collective."""
        outcome = self.replica.outcome()
        values = [self.run.group.broadcast(value) for value in outcome]
        if not batch.rows:
            self.replica.set_outcome(values)

    def _sum(self, batch: Batch) -> tuple[Array, str | None]:
        """Return the sum of all ranks' gradients, and the result of ``NonFiniteDetector.check``. Collective."""
        run, replica, tail, count = self.run, self.replica, self.tail, self.count
        size = count + (0 if tail is None else tail.size)
        slot = run.group.slot(size, replica.dtype)
        self.mark = replica.mark() if self.open else None
        if self._planned is not None:
            self._planned.watch()
        with run.span("compute", "gradients"):
            replica.gradients(batch, slot[:count])
        self._check_weights(batch)
        nonfinite = self.loop.finite.check(slot[: count - 2], slot.item(count - 2))
        if tail is not None:
            state = replica.state_after_gradients()
            self.values = state.size
            # Read as late as possible: callbacks of the last step run while the gradients are calculated.
            if self.open and run.rank == 0:
                with run.span("wait", "callbacks of a batch"):
                    self.control = run.reporter.decided(self._show)
            tail.write(slot[count:], self.control, state)
        begun = time.perf_counter()
        with run.span("exchange", "gradients", slot.nbytes):
            if self.shard is None:
                summed = run.group.sum_slots(size, replica.dtype)
            else:
                self.rank_gradients, summed = run.group.open_slots(size, replica.dtype), self.totals
                add_in_order([values[replica.size :] for values in self.rank_gradients], summed)
                if self.shard.must_detach(self.rank_gradients):
                    run.group.close_slots()
                    self.shard.detach()
                    self._warn_whole("a trainable weight gets no gradient")
                    summed = run.group.sum_slots(size, replica.dtype)
        run.stats.exchanging += time.perf_counter() - begun
        return summed, nonfinite

    def _close_slots(self) -> None:
        """Wait until no rank reads the gradients, or writes weights, any more. Collective."""
        begun = time.perf_counter()
        self.run.group.close_slots()
        self.run.stats.exchanging += time.perf_counter() - begun

    def _plan(self) -> None:
        """Decide whether the ranks divide the update, in the first step: callbacks may set weights before it."""
        self._has_begun, self._planned = True, planned_shard(self.run)
        if self._planned is not None and not self._planned.needs_first_step:
            self._divide(self._planned)

    def _divide(self, shard: OptimizerShard) -> None:
        """Let the weights and slots of all ranks use one memory, with the values of rank 0. Collective."""
        segment = None
        if self.run.rank == 0:
            segment = Segment.create(shard.nbytes, "choros-weights")
            shard.fill(segment.array)
        segment = share(self.run.group, segment)
        shard.attach(segment.array)
        segment.close()  # the memory exists as long as weights use it
        return_freed_memory()  # that of weights and slots, and of the first step's whole update; TensorFlow keeps most
        self._planned = None

    def _check_weights(self, batch: Batch) -> None:
        """Check whether the step has set weights without the optimizer."""
        if self.shard is not None and self.shard.sets_weights():
            raise self._weights_set()
        if self._planned is not None and batch.rows:
            self._sets_weights = self._sets_weights or self._planned.sets_weights()

    def check_shared_weights(self) -> None:
        """Check that this rank's weights are still those that all ranks share."""
        if self.shard is not None and self.shard.has_moved():
            raise self._weights_set()

    def _weights_set(self) -> InvalidInputError:
        """Return the error for a step that has set weights without the optimizer: they are those of all ranks."""
        if self.shard is not None:
            self.shard.invalidate()
        return InvalidInputError(
            f"A layer of model {self.replica.model.name!r} has set, or can set, a trainable weight within a step (rank "
            f"{self.run.rank} on {self.run.stats.host}), and all ranks share the weights: give "
            "Trainer(shard_optimizer=False)."
        )

    def _warn_whole(self, reason: str) -> None:
        """Warn that the update is not divided, if the user requires that it is."""
        if self.run.job.shard_optimizer and self.run.rank == 0:
            logger.warning(
                f"shard_optimizer=True: each worker makes the whole update of model {self.replica.model.name!r}, "
                f"because {reason}."
            )

    def _end_first_step(self, shard: OptimizerShard) -> None:
        """Divide the update, unless the first step has set weights without the optimizer. Collective."""
        if any(gather_values(self.run.group, self._sets_weights)):
            self._planned = None
            self._warn_whole("a layer sets, or can set, a trainable weight within a step")
        else:
            self._divide(shard)

    def _show(self) -> list[float]:
        """Write the weights for callbacks as they were after the last step; return the metrics' variables, flat."""
        after_gradients = self.replica.swap(self.mark)
        metric_values: list[float] = self.loop.show(self.state)
        self.replica.swap(after_gradients)
        return metric_values

    def _accepts_gradients(self, summed: Array) -> bool:
        """Take the control message from the sum. Return False if the gradients must be dropped."""
        assert self.tail is not None  # noqa: S101 - nothing is open without a tail
        control = self.tail.control(summed[self.first :])
        if control is None:
            if self.shard is not None:
                self._close_slots()
            self.replica.swap(self.mark)
            self.run.dropped = self._take_control().stop
            return False
        if control.learning_rate is not None:
            self.replica.learning_rate = control.learning_rate
        self.control = None
        return True

    def _take_control(self) -> TrainerControl:
        """Take rank 0's control message, and apply it. Collective: every rank must call it."""
        control: TrainerControl = self.run.reporter.spread_control(self.control or TrainerControl())
        self.control, self.open = None, False
        self.loop.apply_control(control)
        return control

    def report(self, epoch: int, step: int) -> None:
        """Report a step to batch hooks. Their control message is taken later."""
        run, tail = self.run, self.tail
        if tail is None or self.summed_tail is None:
            run.progress(epoch, step)
            return
        state = None if tail.values else run.group.sum(self.replica.metric_state())
        if run.rank == 0:
            if state is None:
                # A worker's state may be shorter: Keras keeps metrics of an earlier compile() in the caller's model.
                state = tail.metrics(self.summed_tail)[: self.values]
            self.state = state
            run.reporter.done(epoch, step, self.replica.peek(state), lambda: self.loop.show(self.state))
        self.summed_tail, self.open = None, True

    def settle(self) -> TrainerControl:
        """Wait for the control message after the last step, and apply it. Collective: every rank must call it."""
        if not self.open:
            return TrainerControl()
        if self.run.rank == 0:
            self.control = self.run.reporter.decided(lambda: self.loop.show(self.state))
        return self._take_control()


def planned_shard(run: WorkerContext) -> OptimizerShard | None:
    """Return a rank's share of the optimizer's update if the ranks divide it; else None.

    Raises:
        InvalidInputError: the job requires it, and the ranks cannot.
    """
    requested, replica = run.job.shard_optimizer, run.replica
    divides = pays(replica) if requested is None else requested
    if not divides or run.job.workers == 1 or run.job.repeats:
        return None
    shard = None
    if isinstance(run.group, SharedGroup):
        try:
            shard = make_shard(replica, run.rank, run.job.workers, bool(requested))
        except MemoryError:  # of this rank alone
            raise
        except Exception as error:  # an optimizer of which no copy can be made, on all ranks alike
            if requested:
                raise InvalidInputError(
                    f"Rank {run.rank} on {run.stats.host}: shard_optimizer=True is not possible, as no copy of the "
                    f"optimizer can be made: {type(error).__name__}: {error}"
                ) from error
            logger.debug("the update is not divided", exc_info=True)
    # Callbacks in this process set the variables of the very model that trains, while other ranks read its weights.
    if shard is not None and shard.needs_first_step and run.weights is None and run.job.per_batch:
        shard = None
    if shard is None and requested:
        reason = obstacle(replica.model, tries=True) or (
            "it needs ranks of one host that sum in shared memory, with a model on the CPU; in a job no callbacks with "
            "batch hooks (JAX allows them); for Nadam and for an optimizer of yours, a weight for each rank"
        )
        raise InvalidInputError(
            f"Rank {run.rank} on {run.stats.host}: shard_optimizer=True is not possible: {reason}. Leave out "
            "shard_optimizer: the update is divided where that is possible and saves time."
        )
    return shard
