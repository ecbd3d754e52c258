"""The sources of a task's batches: rows of a frame in its partition, or data from the stage's closure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from choros.comm.group import Group
from choros.data import ArraySource, PartitionedSource, serialization
from choros.errors import InvalidInputError
from choros.spark.barrier import Task
from choros.spark.row_store import Data
from choros.training.payload import unpack_sources
from choros.training.spec import FitConfig
from choros.types import Array, Batch


@dataclass(frozen=True)
class PartitionRows:
    """Rows of a frame; each task holds those of its partition.

    Attributes:
        first: (tree, arrays). Some rows, a result of ``choros.data.serialization.flat``.
    """

    first: tuple[Any, list[Array]]

    def sources(self, task: Task, job: FitConfig, group: Group, member: bool) -> tuple[Any, Any]:
        """Return the sources of training and of validation; None for the latter if there is no validation.

        Args:
            task: this task.
            job: the fit.
            group: the group of all tasks.
            member: whether this task is a member of an ensemble.
        """
        first, floatx = _batch(self.first), job.keras["floatx"]
        source = _source_of(task.data, task.rows, first, floatx, member)
        if task.validation is None or not any(task.validation_rows):
            return source, None
        validation: Any = _source_of(task.validation, task.validation_rows, first, floatx, member)
        # of asynchronous ranks, the last one to end an epoch validates, so each rank needs the rows of all
        return source, _all_of(validation, group) if job.asynchronous else validation


@dataclass(frozen=True)
class BroadcastData:
    """Arrays, names of files and code from the stage's closure, complete in each task.

    Attributes:
        arrays: list of arrays, from ``choros.data.serialization.pack``.
        code: list of bytes, from ``choros.data.serialization.pack``.
        seed: int. The seed by which rows are divided among the members of an ensemble.
    """

    arrays: list[Array]
    code: list[bytes]
    seed: int

    def sources(self, task: Task, job: FitConfig, group: Group, member: bool) -> tuple[Any, Any]:
        """Return the sources of training and of validation; None for the latter if there is no validation."""
        source, validation = unpack_sources(job, self.arrays, self.code)
        if member:
            source = source.part(task.rank, task.size, self.seed)
        return source, validation


def _batch(flat: tuple[Any, list[Array]]) -> Batch:
    tree, arrays = flat
    rows = len(arrays[0])
    return Batch(*serialization.nested(tree, arrays), rows=rows, total=rows)


def _source_of(data: Data, counts: list[int], first: Batch, floatx: str, member: bool) -> PartitionedSource:
    local_source = ArraySource(data.x, data.y, data.weight, floatx) if data.rows else None
    if member:
        counts = [data.rows]
        if local_source is None:
            raise InvalidInputError("A member of an ensemble has no rows: give more rows, or fewer workers.")
    return PartitionedSource(local_source, counts, first)


def _all_of(local: PartitionedSource, group: Group) -> ArraySource:
    """Return a source with the rows of all ranks, on each rank."""
    if group.size == 1:
        assert local.inner is not None  # noqa: S101 - the only rank holds all rows
        return local.inner
    local_source = local.inner
    batch = (
        local.first
        if local_source is None
        else Batch(
            local_source.x, local_source.y, local_source.sample_weight, rows=local_source.rows, total=local_source.rows
        )
    )
    tree, arrays = serialization.flat(batch)
    whole = []
    for array in arrays:
        parts = []
        for root, rows in enumerate(local.counts):
            if rows:
                values = array if group.rank == root else np.empty((rows, *array.shape[1:]), array.dtype)
                parts.append(group.broadcast(np.ascontiguousarray(values), root))
        whole.append(np.concatenate(parts))
    return ArraySource(*serialization.nested(tree, whole))
