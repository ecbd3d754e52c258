"""Preparation of batches in a thread while earlier steps run."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from choros.data.conversion import as_arrays, brings_targets
from choros.data.tree import leaves
from choros.data.validation import is_whole
from choros.errors import InvalidDataError
from choros.object_text import call_text, value_text
from choros.types import ArrayTree, Batch

if TYPE_CHECKING:
    from choros.data import Source

Augment = Callable[[ArrayTree], ArrayTree]


class Prefetch:
    """The result of ``choros.prefetch``: data for ``Trainer.fit`` and the options for reading it.

    Attributes:
        data: ``(x, y, sample_weight)``, as for ``fit``.
        depth: int. Largest number of prepared batches.
        augment: a function of x, or None.
    """

    brings_targets = True

    def __init__(self, data: tuple[ArrayTree, ArrayTree, ArrayTree], depth: int, augment: Augment | None) -> None:
        self.data, self.depth, self.augment = data, depth, augment

    def __repr__(self) -> str:
        kinds = ", ".join("None" if part is None else type(part).__name__ for part in self.data)
        return f"<choros.prefetch of ({kinds}), depth={self.depth}, augment={value_text(self.augment)}>"


def prefetch(source: object, depth: int = 2, augment: Augment | None = None) -> Prefetch:
    """Read the next batches in a thread of each worker while it computes: decoding, slicing and augmentation.

    This helps if batches take long to read and a core is free. Example: with ``Trainer(workers=1, threads=1)`` on a
    machine with two cores, the worker computes on one core and reads on the other.

    Args:
        source: the argument x of ``fit``, or a tuple ``(x, y)`` or ``(x, y, sample_weight)``.
        depth: int. Largest number of prepared batches. Defaults to 2.
        augment: a function from the x of a batch to another x, such as a random layer of Keras, or numpy code. It runs
            in the thread, in training only. It is sent by cloudpickle; each worker has a copy, with a copy of its
            random state. Defaults to none.

    Returns:
        An object to pass to ``fit`` as x.

    Raises:
        InvalidDataError: ``depth`` is not a whole number or below 1, or ``augment`` is not callable.

    Example:
        >>> import numpy as np
        >>> prefetch((np.zeros((4, 2)), np.zeros(4)), depth=3).depth
        3
    """
    if not is_whole(depth, 1):
        raise InvalidDataError(f"depth={depth!r}: give a whole number of batches, 1 or more.")
    if augment is not None and not callable(augment):
        raise InvalidDataError(f"augment is of type {type(augment).__name__}: give a function or a Keras layer.")
    if brings_targets(source) or not isinstance(source, tuple):
        source = (source,)
    if not 1 <= len(source) <= 3:
        raise InvalidDataError(f"{len(source)} parts were given: give x, (x, y) or (x, y, sample_weight).")
    x, y, weight = (*source, None, None)[:3]
    return Prefetch((x, y, weight), int(depth), augment)


class PrefetchSource:
    """A wrapper for a source whose batches are prepared in a thread.

    Args:
        inner: the source.
        depth: largest number of prepared batches.
        augment: a function of x, or None.
    """

    def __init__(self, inner: Source, depth: int, augment: Augment | None = None) -> None:
        self.inner, self.depth, self.augment = inner, depth, augment
        self.ahead, self.indexed = depth, bool(inner.indexed)

    def __repr__(self) -> str:
        return call_text(self, self.inner, depth=self.depth, augment=self.augment)

    @property
    def rows(self) -> int | None:
        """Number of rows in a pass."""
        rows: int | None = self.inner.rows
        return rows

    def steps(self, batch_size: int) -> int | None:
        """Return the number of global batches in a pass."""
        steps: int | None = self.inner.steps(batch_size)
        return steps

    def sample(self, batch_size: int) -> Batch:
        """Return a real batch, with augmentation, as in training."""
        return self._augmented(self.inner.sample(batch_size))

    def part(self, rank: int, size: int, seed: int, **options: Any) -> PrefetchSource:
        """Return one of ``size`` disjoint shards."""
        return PrefetchSource(self.inner.part(rank, size, seed, **options), self.depth, self.augment)

    def epoch(self, **options: Any) -> Iterator[Batch]:
        """Return one rank's batches of one epoch; the arguments are those of ``ArraySource.epoch``."""
        return map(self._augmented, self.inner.epoch(**options))

    def _augmented(self, batch: Batch) -> Batch:
        if self.augment is None or not batch.rows:
            return batch
        return replace(batch, x=augmented(self.augment, batch.x, batch.rows))


def augmented(augment: Augment, x: ArrayTree, rows: int) -> ArrayTree:
    """Return the result of a user's function for the x of a batch.

    Raises:
        InvalidDataError: the function returned nothing, or another number of rows.
    """
    arrays = as_arrays(augment(x), "augmented x")
    lengths = {len(leaf) for _, leaf in leaves(arrays)}
    if lengths != {rows}:
        description = f"arrays of {sorted(lengths)} rows" if lengths else "nothing"
        raise InvalidDataError(f"augment gave {description} for a batch of {rows}: it must return one row for each.")
    return arrays


def without_augment(data: ArrayTree) -> ArrayTree:
    """Return the data without augmentation, for evaluation."""
    return Prefetch(data.data, data.depth, None) if isinstance(data, Prefetch) else data


@dataclass
class FeedTimes:
    """Seconds that the batches of one rank took, in the thread of ``prefetch`` if there is one.

    Attributes:
        reading: float. Reading and decoding batches.
        copying: float. Converting them and copying them to the device; 0 without ``prefetch``.
    """

    reading: float = 0.0
    copying: float = 0.0


def feed(
    source: Source, ready: Callable[[Batch], Batch], first: int = 0, times: FeedTimes | None = None, **options: Any
) -> Iterator[Batch]:
    """Return one rank's batches of one epoch. With ``prefetch``, a thread prepares them.

    Args:
        source: Source.
        ready: prepares a batch for its step (``Replica.ready``); called only with ``prefetch``.
        first: number of global batches at the start of the epoch to skip. Defaults to 0.
        times: FeedTimes, to which the seconds are added.
        **options: as for ``ArraySource.epoch``.
    """
    times = FeedTimes() if times is None else times
    batches = islice(_timed(source.epoch(**options), times), first, None)

    def prepared(batch: Batch) -> Batch:
        begun = time.perf_counter()
        result = ready(batch)
        times.copying += time.perf_counter() - begun
        return result

    return ahead(map(prepared, batches), source.ahead) if source.ahead else batches


def _timed(batches: Iterator[Batch], times: FeedTimes) -> Iterator[Batch]:
    """Yield the batches; add the seconds that each took to ``times.reading``."""
    begun = time.perf_counter()
    for batch in batches:
        times.reading += time.perf_counter() - begun
        yield batch
        begun = time.perf_counter()


def ahead(batches: Iterator[Any], depth: int) -> Iterator[Any]:
    """Read ``batches`` in a thread, up to ``depth`` items ahead, and yield them. Errors of reading are raised here."""
    ready: queue.Queue[tuple[bool, Any]] = queue.Queue(depth)
    stopped = threading.Event()

    def put(last: bool, value: object) -> None:
        while not stopped.is_set():
            try:
                # A short wait, because the reader of the queue may stop at any time. Then the thread must end.
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
        # The consumer raises it: in this thread it would be printed, and the consumer would wait forever.
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
        thread.join(5.0)  # a daemon thread that blocks in a read longer than this is abandoned
