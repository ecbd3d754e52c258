"""The local steps between two exchanges, of which several run as one compiled program."""

from __future__ import annotations

import time

from choros.backends.step_windows import MOST, alike
from choros.training.worker.context import WorkerContext
from choros.types import Batch

SLOW = 0.25  # seconds of a step from which on each step runs alone, so that a heartbeat comes after each


class LocalSteps:
    """A rank's local steps. Steps between which nothing happens wait until they can run as one program.

    Weights, metrics and optimizer of the replica are those of the last step only after ``run_waiting``.

    Args:
        run: WorkerContext.
        one_by_one: bool. Whether something happens between two steps, such as a callback's batch hook.
        momentum: float. Nesterov momentum between the steps; 0 if the algorithm has none.

    Attributes:
        waiting: the batches whose steps are not made yet.
    """

    def __init__(self, run: WorkerContext, one_by_one: bool, momentum: float) -> None:
        self.run, self.replica = run, run.replica
        self.momentum = momentum
        one_by_one = one_by_one or run.profiler is not None
        self.max_window = 1 if one_by_one else min(MOST, int(run.algorithm.window) or MOST)
        self.window = 0  # steps of a program; 0 before the first batch
        self.max_waiting = 1  # number of batches that may wait
        self.structure: tuple[object, ...] | None = None  # of the batches that may wait
        self.waiting: list[Batch] = []
        self.runs = 0

    def add(self, batch: Batch) -> None:
        """Make the step of a batch, now or in a later call. A batch without rows is skipped."""
        if not batch.rows:
            return
        if not self.window:
            self.window = 1 if self.max_window == 1 else self.replica.window(batch, self.max_window)
            self.structure = alike(batch) if self.window > 1 else None
        if self.window == 1 or alike(batch) != self.structure:
            self.run_waiting()
            with self.run.span("compute", "step"):
                self.replica.steps([batch], 1, self.momentum)
            return
        self.waiting.append(batch)
        if len(self.waiting) >= self.max_waiting:
            self.run_waiting()

    def run_waiting(self) -> None:
        """Make the steps that wait."""
        if not self.waiting:
            return
        batches, self.waiting = self.waiting, []
        begun = time.perf_counter()
        with self.run.span("compute", "step" if len(batches) == 1 else f"{len(batches)} steps"):
            self.replica.steps(batches, self.window, self.momentum)
        self.runs += 1
        if self.runs == 2:  # the first run has compiled the program
            self.replica.metric_state()  # waits for the step
            self.max_waiting = self.window if time.perf_counter() - begun < SLOW else 1
