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

import time
from typing import Any

from choros.backends.metric_additivity import rate_stays_in_optimizer
from choros.backends.rowwise_parts import of_keras
from choros.training.spec import TrainerControl
from choros.training.worker.gradient_tail import GradientTail
from choros.types import Array, Batch


class AllReduceSteps:
    """The AllReduce steps of one rank.

    Args:
        loop: ``SyncLoop`` of an algorithm that sums gradients.

    Attributes:
        open: bool. Whether the control message after the last step is still to be taken.
    """

    def __init__(self, loop: Any) -> None:
        self.loop, self.run, self.replica = loop, loop.run, loop.run.replica
        run, self.count, self.open = self.run, self.replica.size + 2, False
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
        self.summed: Array | None = None
        self.state: Array | None = None  # on rank 0, the sum of the metric states after the last step
        self.values = 0  # length of this rank's metric state

    def __call__(self, batch: Batch) -> None:
        """Make one step: write the gradients to the group's buffer, sum them over ranks, run the optimizer."""
        if self.loop.recheck is not None:
            self.loop.recheck(batch, self.loop.position[0])
        summed, lost = self._sum(batch)
        if self.open and not self._accepts_gradients(summed):
            if self.run.dropped:
                return
            summed, lost = self._sum(batch)
        self.open = False
        self.loop.finite.note(lost, *self.loop.position)
        self.run.tally.exchanges += 1
        with self.run.span("compute", "optimizer"):
            self.replica.apply(summed[: self.count])
        if self.run.job.repeats and batch.total < max(self.run.job.workers, sum(self.run.job.devices)):
            self._take_over(batch)
        self.summed = summed

    def _take_over(self, batch: Batch) -> None:
        """Copy the outcome of the repeated step from rank 0, which always has rows, to ranks without. Collective."""
        outcome = self.replica.outcome()
        values = [self.run.group.broadcast(value) for value in outcome]
        if not batch.rows:
            self.replica.set_outcome(values)

    def _sum(self, batch: Batch) -> tuple[Array, str | None]:
        """Return the sum of all ranks' gradients, and the result of ``NonFiniteDetector.look``. Collective."""
        run, replica, tail, count = self.run, self.replica, self.tail, self.count
        size = count + (0 if tail is None else tail.size)
        slot = run.group.slot(size, replica.dtype)
        self.mark = replica.mark() if self.open else None
        with run.span("compute", "gradients"):
            replica.gradients(batch, slot[:count])
        lost = self.loop.finite.look(slot[: count - 2], slot.item(count - 2))
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
            summed = run.group.sum_slots(size, replica.dtype)
        run.tally.exchanging += time.perf_counter() - begun
        return summed, lost

    def _show(self) -> list[float]:
        """Write the weights for callbacks as they were after the last step; return the metrics' variables, flat."""
        now = self.replica.swap(self.mark)
        metric_values: list[float] = self.loop.show(self.state)
        self.replica.swap(now)
        return metric_values

    def _accepts_gradients(self, summed: Array) -> bool:
        """Take the control message from the sum. Return False if the gradients must be dropped."""
        assert self.tail is not None  # noqa: S101 - nothing is open without a tail
        control = self.tail.control(summed[self.count :])
        if control is None:
            self.replica.swap(self.mark)
            self.run.dropped = self._follow().stop
            return False
        if control.learning_rate is not None:
            self.replica.learning_rate = control.learning_rate
        self.control = None
        return True

    def _follow(self) -> TrainerControl:
        """Take rank 0's control message, and apply it. Collective: every rank must call it."""
        control: TrainerControl = self.run.reporter.spread_control(self.control or TrainerControl())
        self.control, self.open = None, False
        self.loop.apply_control(control)
        return control

    def report(self, epoch: int, step: int) -> None:
        """Report a step to batch hooks. Their control message is taken later."""
        run, tail = self.run, self.tail
        if tail is None or self.summed is None:
            run.progress(epoch, step)
            return
        state = None if tail.values else run.group.sum(self.replica.metric_state())
        if run.rank == 0:
            if state is None:
                # A worker's state may be shorter: Keras keeps metrics of an earlier compile() in the caller's model.
                state = tail.metrics(self.summed[self.count :])[: self.values]
            self.state = state
            run.reporter.done(epoch, step, self.replica.peek(state), lambda: self.loop.show(self.state))
        self.summed, self.open = None, True

    def settle(self) -> TrainerControl:
        """Wait for the control message after the last step, and apply it. Collective: every rank must call it."""
        if not self.open:
            return TrainerControl()
        if self.run.rank == 0:
            self.control = self.run.reporter.decided(lambda: self.loop.show(self.state))
        return self._follow()
