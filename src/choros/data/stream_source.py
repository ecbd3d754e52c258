"""Iterables of batches (generators, tf.data, DataLoader, Grain) as a source of batches."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np

from choros.data.batch_format import cut, standard
from choros.data.class_weights import check_class_weight
from choros.data.memmap import memory_left
from choros.data.prefetch import augmented
from choros.data.sharding import share
from choros.data.tree import leaves, map_leaves
from choros.data.validation import check_floatx
from choros.errors import InvalidDataError, counted, named_type, warn
from choros.object_text import call_text
from choros.types import ArrayTree, Batch

_WARN_SECONDS = 10.0  # of reading validation data, after which a warning is given
NO_PARTS = "An Ensemble's members have a part of the rows each, which a stream does not give: give arrays."
_REMEDY = "yield (x,), (x, y) or (x, y, sample_weight)"


class StreamSource:
    """The batches of an iterable, in its order. Each is one global batch.

    A stream has no index, so every batch is sliced: each rank has its ``share`` of it. The stream determines the order
    and any shuffling.

    Args:
        stream: a generator or iterator, which can be iterated once. Or an iterable that is iterated once in each epoch:
            a ``tf.data.Dataset``, a PyTorch ``DataLoader``, a Grain loader.
        class_weight: a dict from class index to weight, or None.
        floatx: dtype to which floats are converted.

    Attributes:
        rows: None, as the number of rows is known only after all batches were read.
        depth: int. Number of batches that are read ahead for workers. Defaults to 4.
        ahead: int. Number of batches that a worker prepares before their steps. Defaults to 0.
        augment: a function from the x of a batch to another x, or None.

    Raises:
        InvalidDataError: ``stream`` is not an iterable, or another argument is malformed.

    Example:
        >>> import numpy as np
        >>> source = StreamSource((np.arange(3), np.arange(3)) for _ in range(2))
        >>> batches = source.epoch(rank=1, size=2, synchronous=True, batch_size=0, seed=0, epoch=0, shuffle=False)
        >>> [(batch.x.tolist(), batch.total) for batch in batches]
        [([2], 3), ([2], 3)]
    """

    rows: int | None = None
    indexed = False
    ahead = 0

    def __init__(self, stream: Any, class_weight: Mapping[int, float] | None = None, floatx: str = "float32") -> None:
        if class_weight is not None:
            check_class_weight(class_weight, None)
        iterable = any(hasattr(stream, name) for name in ("__iter__", "__getitem__"))
        if not iterable or isinstance(stream, str | bytes | Mapping):
            raise InvalidDataError(f"The stream is of type {type(stream).__name__}: give an iterable of batches.")
        self.stream, self.class_weight, self.floatx = stream, class_weight, check_floatx(floatx)
        self.depth = 4
        self.augment: Any = None
        self.name = f"the {type(stream).__name__} given as x"
        self.once = hasattr(stream, "__next__")
        self._running: Iterator[Any] | None = None
        self._first: list[Any] = []  # the first batch, if ``sample`` has read it before training
        self._number = 0
        self._sample: Batch | None = None

    def __repr__(self) -> str:
        return call_text(self, self.stream, class_weight=self.class_weight)

    def steps(self, batch_size: int = 0) -> int | None:
        """Return the number of batches in a pass; None if the stream does not provide it."""
        if hasattr(self.stream, "cardinality"):
            count = int(self.stream.cardinality())
            return count if count >= 0 else None
        try:
            return len(self.stream)
        except TypeError:
            return None

    def check(self, epochs: int, steps: int | None) -> None:
        """Refuse a stream that does not suffice for the epochs, or has no end, if ``steps`` is None.

        Raises:
            InvalidDataError: ``steps`` is None, and the stream is an iterator for several epochs or has no end.
        """
        if steps is None:
            self.check_end("steps_per_epoch")
        if self.once and steps is None and epochs > 1:
            raise InvalidDataError(
                f"A {type(self.stream).__name__} can be gone through once, and {epochs} epochs were asked for: give "
                "steps_per_epoch, or what can be iterated again."
            )

    def check_end(self, remedy: str) -> None:
        """Refuse a stream whose cardinality is infinite.

        Raises:
            InvalidDataError: the stream has no end. The message names ``remedy``, the argument that limits it.
        """
        if hasattr(self.stream, "cardinality") and int(self.stream.cardinality()) == -1:
            raise InvalidDataError(f"A {type(self.stream).__name__} without an end was given: give {remedy}.")

    def sample(self, batch_size: int = 0) -> Batch:
        """Return the first batch, which is kept for training.

        Raises:
            InvalidDataError: the stream yields no batch.
        """
        if self._sample is None:
            self._running = iter(self.stream)
            self._first = list(islice(self._running, 1))
            if not self._first:
                raise InvalidDataError(
                    f"A {type(self.stream).__name__} that yields no batch was given: give at least one."
                )
            x, y, weight, rows = self._standard(self._first[0])
            self._sample = Batch(x, y, weight, rows=rows, total=rows)
        return self._sample

    def part(self, rank: int, size: int, seed: int) -> StreamSource:
        """Refuse to return a shard.

        Raises:
            InvalidDataError: always, as a stream cannot be divided in advance.
        """
        raise InvalidDataError(NO_PARTS)

    def batches(self, steps: int | None) -> Iterator[tuple[ArrayTree, ArrayTree, ArrayTree, int]]:
        """Yield the global batches of one epoch as (x, y, sample_weight, rows): a pass, or the next ``steps``.

        Raises:
            InvalidDataError: a batch is malformed, or the stream ended within an epoch and cannot be iterated again.
        """
        taken, fresh = 0, False
        while steps is None or taken < steps:
            # With ``steps``, an epoch starts at the batch after the last epoch. At its end the stream is opened again.
            if self._running is None:
                self._running = iter(self.stream)
                fresh = True
            batches, self._first = self._first or list(islice(self._running, 1)), []
            if batches:
                taken, self._number, fresh = taken + 1, self._number + 1, False
                yield self._standard(batches[0])
                continue
            self._running = None
            if steps is None:
                return
            if self.once or fresh:
                raise InvalidDataError(
                    f"A {type(self.stream).__name__} ended after {counted(self._number, 'batch')}, in the middle of an "
                    "epoch of "
                    f"{counted(steps, 'step')}: give one that lasts for all epochs, or what can be iterated again."
                )

    def _standard(self, batch: ArrayTree) -> tuple[ArrayTree, ArrayTree, ArrayTree, int]:
        x, y, weight, rows = standard(
            batch, f"batch {max(1, self._number)} of {self.name}", _REMEDY, self.class_weight, self.floatx
        )
        return x if self.augment is None else augmented(self.augment, x, rows), y, weight, rows

    def rewind(self) -> None:
        """Start the next pass from the beginning after an incomplete one, if the stream can be iterated again."""
        if not self.once:
            self._running, self._first = None, []

    def epoch(self, *, rank: int, size: int, steps: int | None = None, **_: Any) -> Iterator[Batch]:
        """Return one rank's batches of one epoch, if each rank has the stream; see ``divided``."""
        return divided(self.batches(steps), rank, size)


def read_all(source: StreamSource, steps: int | None) -> tuple[ArrayTree, ArrayTree, ArrayTree]:
    """Return the rows of a stream as arrays, so that every validation uses the same rows.

    Args:
        source: StreamSource.
        steps: number of batches to read. Defaults to all.

    Raises:
        InvalidDataError: the stream yields no batch, or the rows have different shapes. Or the batches take more than
            half of the available memory, as those of a stream without an end do.

    Warns:
        UserWarning: reading takes longer than 10 s, and ``steps`` is None.
    """
    if steps is None:
        source.check_end("validation_steps")
    limit = memory_left() // 2  # half, as concatenation copies the rows
    nbytes, begun, warned = 0, time.monotonic(), False
    parts, name = [], type(source.stream).__name__
    for number, batch in enumerate(source.batches(steps), 1):
        parts.append(batch[:3])
        nbytes += sum(array.nbytes for _, array in leaves(batch[:3]))
        if nbytes > limit:
            raise InvalidDataError(
                f"The first {number} batches of validation_data, a {name}, take {nbytes / 1e9:.2f} GB, more than half "
                "of the memory that is left: give validation_steps= where it has no end, or a keras.utils.PyDataset or "
                "choros.files, which are read batch by batch."
            )
        if steps is None and not warned and time.monotonic() - begun > _WARN_SECONDS:
            warned = True
            warn(
                f"{number} batches of validation_data, a {name}, were read in {_WARN_SECONDS:g} s, and it has not "
                "ended: give validation_steps= if it has no end."
            )
    if not parts:
        raise InvalidDataError(f"validation_data, a {name}, yields no batch: give at least one.")
    try:
        x, y, weight = (map_leaves(lambda *rows: np.concatenate(rows), *column) for column in zip(*parts, strict=True))
    except ValueError as error:
        raise InvalidDataError(
            f"The batches of validation_data, {named_type(source.stream)}, do not make one array ({error}): give "
            "arrays or a keras.utils.PyDataset."
        ) from None
    return x, y, weight


def divided(batches: Iterator[tuple[ArrayTree, ArrayTree, ArrayTree, int]], rank: int, size: int) -> Iterator[Batch]:
    """Yield one rank's share of each global batch."""
    for x, y, weight, total in batches:
        yield cut(x, y, weight, total, share(total, rank, size))
