"""Checks that a rank's loop makes: of the loss during training, and of values that are not finite."""

from __future__ import annotations

from choros.backends.loss_recheck import Recheck
from choros.consistency.nonfinite import NonFiniteDetector
from choros.training.worker.context import WorkerContext
from choros.training.worker.setup import dividing


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


def finite(run: WorkerContext) -> NonFiniteDetector:
    """Return the detector of this rank's first value that is not finite."""
    return NonFiniteDetector(lambda: run.stats, run.job.workers, run.replica.model.optimizer, lambda: run.vectors()[0])
