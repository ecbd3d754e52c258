"""One rank's rows of a data set, for a loop that Keras runs on every rank."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import keras

from choros.backends.base import parts
from choros.cluster import Place
from choros.comm.bootstrap.discover_rank import find_place
from choros.data import StreamSource, feed, make_source, without_augment
from choros.data.array_source import ArraySource
from choros.data.permutation import permutation
from choros.data.sharding import share
from choros.data.tree import map_leaves
from choros.data.validation import is_whole
from choros.errors import InvalidInputError
from choros.types import Batch

_KEPT = 16  # batches of an epoch that can be asked for again: Keras looks at the first ones before it trains


def shard(  # noqa: D417 - what belongs together is named together
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    batch_size: int = 32,
    shuffle: bool = True,
    seed: int = 0,
    training: bool = True,
    steps: int | None = None,
    place: Place | None = None,
) -> Shard:
    """Return this rank's rows of whole data, as a ``keras.utils.PyDataset`` for ``fit`` or a loop of your own.

    All ranks have the same number of batches, each row is in one, and a global batch that does not divide is divided
    as evenly as can be.

    Args:
        x, y, sample_weight: what ``Trainer.fit`` takes, whole, the same on every rank: arrays, memory maps, a
            ``PyDataset``, ``choros.files``, or what yields batches, of which each is then a global one and every rank
            reads all. ``choros.prefetch`` of these reads ahead.
        batch_size: int. Rows of a global batch. Defaults to 32.
        shuffle: bool. What yields batches has its own order. Defaults to True.
        seed: int. With the epoch it makes the order. Defaults to 0.
        training: bool. False, for validation: each rank has batches of its own, of about ``batch_size / size`` rows and
            none without rows, in the rows' order. The ranks need not have equally many. Defaults to True.
        steps: int. Global batches in an epoch; needed where the data do not tell. Defaults to all. Arrays take none.
        place: which rank of how many. Defaults to ``Place.here()``.

    Raises:
        InvalidInputError: data that do not fit together, fewer rows than ranks, or no number of steps.

    Example:
        >>> import numpy as np
        >>> place = Place(rank=1, size=2)
        >>> [batch[0].tolist() for batch in shard(np.arange(5), batch_size=4, shuffle=False, place=place)]
        [[2, 3], []]
    """
    place = find_place() if place is None else place
    for name, value, least in (("batch_size", batch_size, place.size), ("steps", steps, 1), ("seed", seed, 0)):
        if value is not None and not is_whole(value, least):
            more = f" as there are {place.size} ranks" if name == "batch_size" else ""
            raise InvalidInputError(f"{name}={value!r}: give a whole number, {least} or more{more}.")
    if isinstance(shuffle, str):
        raise InvalidInputError(f"shuffle={shuffle!r}: give True or False.")
    source: Any = make_source(x if training else without_augment(x), y, sample_weight, floatx=keras.config.floatx())
    if not isinstance(source, ArraySource) or source.block:
        return ReadShard(source, place, batch_size, shuffle, seed, training, steps)
    if steps is not None:
        raise InvalidInputError(
            "steps is for data that do not tell how many batches there are: of arrays, give those rows."
        )
    return RowShard(source, place, batch_size, shuffle, seed, training)


class Shard(keras.utils.PyDataset):  # type: ignore[misc]
    """This rank's share of every global batch; all ranks have the same number of batches, and each row is in one.

    Of a global batch that does not divide the first ranks have one row more; where it has fewer rows than there are
    ranks, the last have a batch of no rows, with which they only meet the others.

    Args:
        source: choros.data.Source.
        place: which rank of how many.
        batch_size: int. Rows of a global batch, where the source does not decide it.
        shuffle, seed, training: as for ``shard``.
    """

    def __init__(self, source: Any, place: Place, batch_size: int, shuffle: bool, seed: int, training: bool) -> None:
        super().__init__()
        self._source, self._batch, self._rank, self._size = source, batch_size, place.rank, place.size
        self._shuffle, self._seed, self._training, self._epoch = shuffle and training, seed, training, 0

    def __len__(self) -> int:
        count: int = self.num_batches
        return count


class RowShard(Shard):
    """Of arrays: any batch can be asked for. The rows' order is the permutation of (seed, epoch).

    Raises:
        InvalidInputError: fewer rows than one for each rank.
    """

    def __init__(self, source: ArraySource, place: Place, *how: Any) -> None:
        super().__init__(source, place, *how)
        if source.rows < place.size:
            raise InvalidInputError(f"{source.rows} rows for {place.size} ranks: give every rank one row or more.")
        self._reorder()

    def _reorder(self) -> None:
        self._order = permutation(self._source.rows, self._seed, self._epoch, self._shuffle)
        if not self._training:
            self._order = self._order[share(len(self._order), self._rank, self._size)]

    @property
    def num_batches(self) -> int:
        """Batches in an epoch."""
        return -(-len(self._order) // (self._batch if self._training else self._batch // self._size))

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        if not self._training:
            own = self._batch // self._size
            rows = self._order[index * own : (index + 1) * own]
        else:
            whole = self._order[index * self._batch : (index + 1) * self._batch]
            rows = whole[share(len(whole), self._rank, self._size)]
        source = self._source
        x, y, weight = _each(lambda leaf: leaf[rows], source.x, source.y, source.sample_weight)
        return parts(Batch(x, y, weight, len(rows), len(rows)))

    def on_epoch_end(self) -> None:
        """Take the next epoch's order."""
        if not _only_looked_at():
            self._epoch += 1
            self._reorder()


class ReadShard(Shard):
    """Of what is read in order: files, streams, other data sets.

    Args:
        source, place, batch_size, shuffle, seed, training: as for ``Shard``.
        steps: as for ``shard``.

    Raises:
        InvalidInputError: it is not known how many batches there are, or this rank would have none.
    """

    def __init__(
        self,
        source: Any,
        place: Place,
        batch_size: int,
        shuffle: bool,
        seed: int,
        training: bool,
        steps: int | None,
    ) -> None:
        super().__init__(source, place, batch_size, shuffle, seed, training)
        count = source.steps(batch_size) if steps is None else steps
        if count is None:
            raise InvalidInputError(
                "It is not known how many batches there are: give steps, the global batches of an epoch."
            )
        self._whole_batches = not training and source.rows is None
        if self._whole_batches:
            count = len(range(place.rank, count, place.size))
        elif not training and count == source.steps(batch_size):
            last = source.rows - (count - 1) * batch_size
            count -= last <= place.rank  # this rank has no row of the last batch
        if not count:
            raise InvalidInputError(
                f"Rank {place.rank} of {place.size} would have no batch: give every rank one row or more."
            )
        self._count, self._steps = count, steps if training or not source.indexed else None
        self._lock = threading.Lock()
        self._kept: dict[int, tuple[Any, ...]] = {}
        self._next = 0
        self._batches: Iterator[Batch] | None = None

    @property
    def num_batches(self) -> int:
        """Batches in an epoch."""
        return self._count

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        with self._lock:
            if index in self._kept:
                return self._kept[index]
            if index != self._next:
                raise InvalidInputError(
                    f"Batch {index} was asked for after batch {self._next - 1}: give fit shuffle=False."
                )
            if self._batches is None:
                self._batches = self._epochs_batches()
            try:
                batch = self._whole(next(self._batches))
            except StopIteration:
                raise InvalidInputError(f"The data ended after {index} of this rank's {self._count} batches.") from None
            self._next += 1
            if index < _KEPT:
                self._kept[index] = batch
            return batch

    def _epochs_batches(self) -> Iterator[Batch]:
        source, rank, size, steps = self._source, self._rank, self._size, self._steps
        dealt = self._whole_batches and source.indexed
        if dealt:
            source, steps = source.part(rank, size, self._seed, whole=True), self._count
        batches = feed(
            source,
            lambda batch: batch,
            rank=0 if self._whole_batches else rank,
            size=1 if self._whole_batches else size,
            together=True,
            batch_size=self._batch,
            seed=self._seed,
            epoch=self._epoch,
            shuffle=self._shuffle,
            steps=steps,
        )
        if self._whole_batches and not dealt:
            return islice(batches, rank, None, size)
        return batches if self._training else (batch for batch in batches if batch.rows)

    def _whole(self, batch: Batch) -> tuple[Any, ...]:
        if not batch.rows:  # as the first one, without its rows
            first = self._source.sample(self._batch)
            x, y, weight = _each(lambda leaf: leaf[:0], first.x, first.y, first.sample_weight)
            batch = Batch(x, y, weight, 0, batch.total)
        return parts(batch)

    def on_epoch_end(self) -> None:
        """Go on with the next epoch; with this one, where Keras has only looked at its first batches."""
        with self._lock:
            complete = self._next >= self._count
            if _only_looked_at():
                if self._next > len(self._kept):
                    self._leave()
                return
            if complete and self._batches is not None:
                for _ in self._batches:  # the other ranks' batches, and the end of the pass
                    pass
            self._leave(complete)
            self._epoch += 1

    def _leave(self, complete: bool = False) -> None:
        if hasattr(self._batches, "close"):
            self._batches.close()  # type: ignore[union-attr]
        if isinstance(self._source, StreamSource) and not complete and self._steps is None:
            self._source.rewind()
        self._next, self._batches = 0, None
        self._kept.clear()


def _only_looked_at() -> bool:
    """Return whether Keras ends an epoch that it has not trained: ``fit`` reads a batch, then starts over."""
    frame = sys._getframe(1)
    for _ in range(8):
        if frame is None or frame.f_code.co_filename.endswith("epoch_iterator.py"):
            return frame is not None and frame.f_code.co_name == "reset"
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _each(function: Callable[[Any], Any], *parts: Any) -> Iterator[Any]:
    return (map_leaves(function, part) for part in parts)
