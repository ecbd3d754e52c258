"""Means over the ranks of what is not exchanged: moving statistics, and the optimizer's moving averages of weights."""

from __future__ import annotations

import numpy as np

from choros.backends.replica import Replica
from choros.comm.group import Group
from choros.training.worker.context import WorkerContext
from choros.types import Array


def mean_statistics(run: WorkerContext, rows: int) -> Array:
    """Return the mean of the moving statistics over the ranks, weighted by the rows of each rank. Collective."""
    values = np.empty(run.replica.statistics_size, run.replica.dtype)
    run.replica.get_statistics(values)
    weighted = np.empty(len(values) + 1, np.float64)
    weighted[:-1] = values
    weighted[:-1] *= rows
    weighted[-1] = rows
    summed = run.group.sum(weighted)
    mean: Array = (summed[:-1] / summed[-1]).astype(run.replica.dtype) if summed[-1] else values
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
