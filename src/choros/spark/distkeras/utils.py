"""The helper functions of dist-keras."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from pyspark.sql import functions as F

from choros.spark.distkeras.frames import legacy
from choros.types import Array

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def shuffle(dataset: DataFrame, seed: int | None = None) -> DataFrame:
    """Return the frame with its rows in a random order.

    Args:
        dataset: DataFrame.
        seed: int, or None for a random seed.
    """
    return legacy(dataset.orderBy(F.rand() if seed is None else F.rand(seed)))


def precache(df: Any, num_workers: int) -> DataFrame:
    """Return the frame with one partition for each worker, cached on the cluster.

    Args:
        df: DataFrame.
        num_workers: int. Number of partitions.
    """
    made = df.repartition(num_workers).cache()
    made.count()
    return legacy(made)


def history_executor(history: Sequence[dict[str, Any]], id: int) -> list[dict[str, Any]]:
    """Return the records of one worker, sorted by iteration.

    Example:
        >>> history_executor([{"worker_id": 0, "iteration": 1, "history": [0.5]}], 0)
        [{'worker_id': 0, 'iteration': 1, 'history': [0.5]}]
    """
    return sorted((record for record in history if record["worker_id"] == id), key=lambda one: int(one["iteration"]))


def history_executors_average(history: Sequence[dict[str, Any]]) -> Array:
    """Return the means over the workers of the values of each iteration, as an array of shape (iterations, values).

    Example:
        >>> history_executors_average([{"worker_id": w, "iteration": 1, "history": [float(w)]} for w in (1, 2)])
        array([[1.5]])
    """
    by_worker: dict[int, list[Any]] = {}
    for record in history:
        by_worker.setdefault(int(record["iteration"]), []).append(record["history"])
    return np.array([np.mean(by_worker[iteration], axis=0) for iteration in sorted(by_worker)])
