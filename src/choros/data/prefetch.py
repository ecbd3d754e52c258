"""Batches made ready in a thread while the step before them runs."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from choros.data.conversion import as_arrays, brings_targets
from choros.data.tree import leaves
from choros.errors import InvalidDataError
from choros.types import ArrayTree, Batch

if TYPE_CHECKING:
    from choros.data import Source

Augment = Callable[[ArrayTree], ArrayTree]


class Prefetch:
    """The result of ``choros.prefetch``: data for ``Trainer.fit``, and how to read it.

    Attributes:
        data: ``(x, y, sample_weight)``, as for ``fit``.
        depth: int.
        augment: a function of x, or None.
    """

    brings_targets = True

    def __init__(self, data: tuple[ArrayTree, ArrayTree, ArrayTree], depth: int, augment: Augment | None) -> None:
        self.data, self.depth, self.augment = data, depth, augment


def prefetch(source: Any, depth: int = 2, augment: Augment | None = None) -> Prefetch:
    """Read the next batches in a thread of each worker while it computes: decoding, slicing and augmentation.

    Worth it where a batch takes long to read and a core is free for it: a worker that has two cores and computes on one
    (``Trainer(workers=1, threads=1)`` on a machine of two) reads on the other.

    Args:
        source: what ``fit`` takes as x, or a tuple ``(x, y)`` or ``(x, y, sample_weight)``.
        depth: int. Batches that are ready at most. Defaults to 2.
        augment: from the x of a batch to another x, in the thread: Keras' own random layers, or numpy. It travels by
            cloudpickle and runs in training only; each worker has a copy, the state of its random numbers included.

    Returns:
        What ``fit`` takes as x.

    Raises:
        InvalidDataError: ``depth`` is below 1.

    Example:
        >>> import numpy as np
        >>> prefetch((np.zeros((4, 2)), np.zeros(4)), depth=3).depth
        3
    """
    if not isinstance(depth, int) or isinstance(depth, bool) or depth < 1:
        raise InvalidDataError(f"depth={depth!r}: give a whole number of batches, 1 or more.")
    if augment is not None and not callable(augment):
        raise InvalidDataError(f"augment is of type {type(augment).__name__}: give a function or a Keras layer.")
    if brings_targets(source) or not isinstance(source, tuple):
        source = (source,)
    if not 1 <= len(source) <= 3:
        raise InvalidDataError(f"{len(source)} parts were given: give x, (x, y) or (x, y, sample_weight).")
    x, y, weight = (*source, None, None)[:3]
    return Prefetch((x, y, weight), depth, augment)


class PrefetchSource:
    """Another source, read ahead.

    Args:
        inner: the source.
        depth: batches that are ready at most.
        augment: a function of x, or None.
    """

    def __init__(self, inner: Source, depth: int, augment: Augment | None = None) -> None:
        self.inner, self.depth, self.augment = inner, depth, augment
        self.ahead, self.indexed = depth, bool(inner.indexed)

    @property
    def rows(self) -> int | None:
        """Rows in a pass."""
        rows: int | None = self.inner.rows
        return rows

    def steps(self, batch_size: int) -> int | None:
        """Global batches in a pass."""
        steps: int | None = self.inner.steps(batch_size)
        return steps

    def sample(self, batch_size: int) -> Batch:
        """A real batch, as it is trained."""
        return self._augmented(self.inner.sample(batch_size))

    def part(self, rank: int, size: int, seed: int, **how: Any) -> PrefetchSource:
        """One of ``size`` disjoint shards."""
        return PrefetchSource(self.inner.part(rank, size, seed, **how), self.depth, self.augment)

    def epoch(self, **how: Any) -> Iterator[Batch]:
        """One rank's batches of one epoch; the arguments are those of ``ArraySource.epoch``."""
        return map(self._augmented, self.inner.epoch(**how))

    def _augmented(self, batch: Batch) -> Batch:
        if self.augment is None or not batch.rows:
            return batch
        return replace(batch, x=augmented(self.augment, batch.x, batch.rows))


def augmented(augment: Augment, x: ArrayTree, rows: int) -> ArrayTree:
    """Return the result of a user's function on a batch's x.

    Raises:
        InvalidDataError: it gave nothing, or another number of rows.
    """
    arrays = as_arrays(augment(x), "augmented x")
    lengths = {len(leaf) for _, leaf in leaves(arrays)}
    if lengths != {rows}:
        description = f"arrays of {sorted(lengths)} rows" if lengths else "nothing"
        raise InvalidDataError(f"augment gave {description} for a batch of {rows}: it must return one row for each.")
    return arrays


def without_augment(data: ArrayTree) -> ArrayTree:
    """Return the data without augmentation, as evaluation reads them."""
    return Prefetch(data.data, data.depth, None) if isinstance(data, Prefetch) else data


def feed(source: Source, ready: Callable[[Batch], Batch], first: int = 0, **how: Any) -> Iterator[Batch]:
    """One rank's batches of one epoch, made ready in a thread where ``prefetch`` was asked for.

    Args:
        source: Source.
        ready: what is done with each batch ahead of its step (``Replica.ready``).
        first: global batches of the epoch to leave out.
        how: as for ``ArraySource.epoch``.
    """
    batches = islice(source.epoch(**how), first, None)
    return ahead(map(ready, batches), source.ahead) if source.ahead else batches


def ahead(batches: Iterator[Any], depth: int) -> Iterator[Any]:
    """Yield what ``batches`` yields, read in a thread, ``depth`` ahead; its errors are raised here."""
    ready: queue.Queue[tuple[bool, Any]] = queue.Queue(depth)
    stopped = threading.Event()

    def put(last: bool, value: Any) -> None:
        while not stopped.is_set():
            try:
                ready.put((last, value), timeout=0.1)
            except queue.Full:
                continue
            return

    def read() -> None:
        try:
            for batch in batches:
                put(False, batch)
                if stopped.is_set():
                    return
            put(True, None)
        except BaseException as error:
            put(True, error)

    thread = threading.Thread(target=read, name="choros-ahead", daemon=True)
    thread.start()
    try:
        while True:
            last, value = ready.get()
            if not last:
                yield value
            elif value is None:
                return
            else:
                raise value
    finally:
        stopped.set()
        thread.join(5.0)  # one that does not come back from its read is left to itself
