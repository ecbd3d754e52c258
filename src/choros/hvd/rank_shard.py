"""One rank's rows of a data set, for a ``fit`` that runs on every rank."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any

import keras

from choros.backends.batch_parts import parts
from choros.cluster import Place
from choros.comm.bootstrap.discover_rank import find_place
from choros.data import StreamSource, feed, make_source, without_augment
from choros.data.array_source import ArraySource
from choros.data.permutation import permutation
from choros.data.sharding import share
from choros.data.tree import map_leaves
from choros.data.validation import is_whole
from choros.errors import InvalidInputError, counted
from choros.types import Batch

_READABLE_BATCHES = 16  # first batches of an epoch that stay readable: Keras reads some of them before it trains


def shard(
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    global_batch_size: int = 32,
    shuffle: bool = True,
    seed: int = 0,
    training: bool = True,
    steps: int | None = None,
    place: Place | None = None,
    **unknown: object,
) -> Shard:
    """Return this rank's rows of whole data, as a ``keras.utils.PyDataset`` for ``fit`` or a custom loop.

    All ranks have the same number of batches, and each row is in one batch. If a global batch does not divide evenly,
    the ranks' parts differ by at most one row.

    Args:
        x: the data that ``Trainer.fit`` takes, whole, the same on every rank: arrays, memory maps, a ``PyDataset``,
            ``choros.files``, or an object that yields batches. Each of these batches is a global batch, and every rank
            reads all of them. ``choros.prefetch`` of these reads ahead.
        y: arrays or nested arrays of labels, one for each row; None if ``x`` has them. Defaults to None.
        sample_weight: array of the weight of each row. Defaults to None.
        global_batch_size: int. Rows of a global batch, at least one for each rank. ``choros.hvd.shard`` takes the rows
            of one rank instead. Defaults to 32.
        shuffle: bool. Shuffle rows in each epoch; without effect on objects that yield batches. Defaults to True.
        seed: int. Seed of the order, with the epoch. Defaults to 0.
        training: bool. False is for validation: each rank has separate batches of about ``global_batch_size / size``
            rows, in the order of the rows. No batch is empty, and ranks may have different numbers of batches. Defaults
            to True.
        steps: int. Global batches in an epoch; needed if the data have no known length. Defaults to all. Must be None
            for arrays.
        place: Place. The rank and the number of ranks. Defaults to this process's place.
        **unknown: no other keyword is accepted.

    Raises:
        InvalidInputError: the lengths of the data differ, there are fewer rows than ranks, ``steps`` is missing, or
            ``batch_size`` is given, which does not say whose rows it counts.
        TypeError: another unknown keyword is given.

    Example:
        >>> import numpy as np
        >>> place = Place(rank=1, size=2)
        >>> [batch[0].tolist() for batch in shard(np.arange(5), global_batch_size=4, shuffle=False, place=place)]
        [[2, 3], []]
    """
    refuse_keywords("choros.shard", unknown, "global_batch_size= (rows of all ranks together)")
    place = find_place() if place is None else place
    numbers = (("global_batch_size", global_batch_size, place.size), ("steps", steps, 1), ("seed", seed, 0))
    for name, value, least in numbers:
        if (value is not None or name != "steps") and not is_whole(value, least):
            more = f" as there are {place.size} ranks" if name == "global_batch_size" and place.size > 1 else ""
            raise InvalidInputError(f"{name}={value!r}: give a whole number, {least} or more{more}.")
    if isinstance(shuffle, str):
        raise InvalidInputError(f"shuffle={shuffle!r}: give True or False.")
    source: Any = make_source(x if training else without_augment(x), y, sample_weight, floatx=keras.config.floatx())
    if not isinstance(source, ArraySource) or source.block:
        return ReadShard(source, place, global_batch_size, shuffle, seed, training, steps)
    if steps is not None:
        raise InvalidInputError("steps is for data of unknown length: of arrays, give those rows.")
    return RowShard(source, place, global_batch_size, shuffle, seed, training)


def refuse_keywords(function: str, unknown: Mapping[str, object], batch_keyword: str) -> None:
    """Raise an error if a function was called with a keyword that it does not have.

    Args:
        function: the name of the function, for the message.
        unknown: the keywords.
        batch_keyword: the keyword of the function that gives the size of a batch, with its unit.

    Raises:
        InvalidInputError: the keyword is a size of a batch by another name; the message has the right one.
        TypeError: the keyword is another one.

    Example:
        >>> refuse_keywords("choros.shard", {"batch_size": 8}, "global_batch_size=")
        Traceback (most recent call last):
        choros.errors.InvalidInputError: choros.shard() has no batch_size=: give global_batch_size=.
    """
    for name in unknown:
        if name.endswith("batch_size"):
            raise InvalidInputError(f"{function}() has no {name}=: give {batch_keyword}.")
        raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")


class Shard(keras.utils.PyDataset):  # type: ignore[misc]
    """This rank's share of every global batch; all ranks have the same number of batches, and each row is in one.

    If a global batch does not divide evenly, the first ranks have one row more. If it has fewer rows than there are
    ranks, the last ranks get a batch without rows, with which they still take part in the reduction.

    Args:
        source: choros.data.Source.
        place: Place. The rank and the number of ranks.
        batch_size: int. Rows of a global batch, unless the source determines it.
        shuffle, seed, training: as for ``shard``.
    """

    def __init__(self, source: Any, place: Place, batch_size: int, shuffle: bool, seed: int, training: bool) -> None:
        super().__init__()
        self._source, self._batch, self._rank, self._size = source, batch_size, place.rank, place.size
        self._shuffle, self._seed, self._training, self._epoch = shuffle and training, seed, training, 0

    def __len__(self) -> int:
        count: int = self.num_batches
        return count

    def __repr__(self) -> str:
        use = "training" if self._training else "validation"
        part = f"rows of rank {self._rank} of {self._size} for {use}"
        return f"<{part}: {counted(len(self), 'batch')}, global batches of {self._batch}>"


class RowShard(Shard):
    """Shard of arrays, with random access to batches. The order of rows is the permutation of (seed, epoch).

    Raises:
        InvalidInputError: there are fewer rows than ranks.
    """

    def __init__(self, source: ArraySource, place: Place, *settings: Any) -> None:
        super().__init__(source, place, *settings)
        if source.rows < place.size:
            raise InvalidInputError(
                f"{counted(source.rows, 'row')} for {counted(place.size, 'rank')}: give every rank one row or more."
            )
        self._reorder()

    def _reorder(self) -> None:
        self._order = permutation(self._source.rows, self._seed, self._epoch, self._shuffle)
        if not self._training:
            self._order = self._order[share(len(self._order), self._rank, self._size)]

    @property
    def num_batches(self) -> int:
        """The number of this rank's batches in an epoch."""
        return -(-len(self._order) // (self._batch if self._training else self._batch // self._size))

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        if not self._training:
            rank_batch = self._batch // self._size
            rows = self._order[index * rank_batch : (index + 1) * rank_batch]
        else:
            global_rows = self._order[index * self._batch : (index + 1) * self._batch]
            rows = global_rows[share(len(global_rows), self._rank, self._size)]
        source = self._source
        x, y, weight = _map_parts(lambda leaf: leaf[rows], source.x, source.y, source.sample_weight)
        return parts(Batch(x, y, weight, len(rows), len(rows)))

    def on_epoch_end(self) -> None:
        """Shuffle for the next epoch, unless Keras has only read the first batches."""
        if not _is_reset_before_training():
            self._epoch += 1
            self._reorder()


class ReadShard(Shard):
    """Shard of data that are read in order: files, streams, other data sets.

    Args:
        source, place, batch_size, shuffle, seed, training: as for ``Shard``.
        steps: as for ``shard``.

    Raises:
        InvalidInputError: the number of batches is unknown, or this rank would have none.
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
        rows: int | None = source.rows
        self._whole_batches = not training and rows is None
        if not training and rows is None:
            count = len(range(place.rank, count, place.size))
        elif not training and rows is not None and count == source.steps(batch_size):
            last = rows - (count - 1) * batch_size
            count -= last <= place.rank  # this rank has no row of the last batch
        if not count:
            raise InvalidInputError(
                f"Rank {place.rank} of {place.size} would have no batch: give every rank one row or more."
            )
        self._count, self._steps = count, steps if training or not source.indexed else None
        self._lock = threading.Lock()
        self._first_batches: dict[int, tuple[Any, ...]] = {}
        self._next = 0
        self._batches: Iterator[Batch] | None = None

    @property
    def num_batches(self) -> int:
        """The number of this rank's batches in an epoch."""
        return self._count

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        with self._lock:
            if index in self._first_batches:
                return self._first_batches[index]
            if index != self._next:
                raise InvalidInputError(
                    f"Batch {index} was asked for after batch {self._next - 1}: give fit shuffle=False."
                )
            if self._batches is None:
                self._batches = self._epochs_batches()
            try:
                batch = self._with_structure(next(self._batches))
            except StopIteration:
                raise InvalidInputError(f"The data ended after {index} of this rank's {self._count} batches.") from None
            self._next += 1
            if index < _READABLE_BATCHES:
                self._first_batches[index] = batch
            return batch

    def _epochs_batches(self) -> Iterator[Batch]:
        source, rank, size, steps = self._source, self._rank, self._size, self._steps
        divided = self._whole_batches and source.indexed
        if divided:
            source, steps = source.part(rank, size, self._seed, whole=True), self._count
        batches = feed(
            source,
            lambda batch: batch,
            rank=0 if self._whole_batches else rank,
            size=1 if self._whole_batches else size,
            synchronous=True,
            batch_size=self._batch,
            seed=self._seed,
            epoch=self._epoch,
            shuffle=self._shuffle,
            steps=steps,
        )
        if self._whole_batches and not divided:
            return islice(batches, rank, None, size)
        return batches if self._training else (batch for batch in batches if batch.rows)

    def _with_structure(self, batch: Batch) -> tuple[Any, ...]:
        if not batch.rows:  # a batch of the first one's structure and dtypes, without rows
            first = self._source.sample(self._batch)
            x, y, weight = _map_parts(lambda leaf: leaf[:0], first.x, first.y, first.sample_weight)
            batch = Batch(x, y, weight, 0, batch.total)
        return parts(batch)

    def on_epoch_end(self) -> None:
        """Continue with the next epoch; with the same one, if Keras has only read its first batches."""
        with self._lock:
            complete = self._next >= self._count
            if _is_reset_before_training():
                if self._next > len(self._first_batches):
                    self._end_pass()
                return
            if complete and self._batches is not None:
                for _ in self._batches:  # read to the end, so that the source ends its pass
                    pass
            self._end_pass(complete)
            self._epoch += 1

    def _end_pass(self, complete: bool = False) -> None:
        if hasattr(self._batches, "close"):
            # Ends the thread of ``prefetch``, which may wait for its queue.
            self._batches.close()  # type: ignore[union-attr]
        if isinstance(self._source, StreamSource) and not complete and self._steps is None:
            self._source.rewind()
        self._next, self._batches = 0, None
        self._first_batches.clear()


def _is_reset_before_training() -> bool:
    """Return whether Keras ends an epoch without training: ``fit`` reads a batch first, then starts the epoch again."""
    frame = sys._getframe(1)
    for _ in range(8):
        if frame is None or frame.f_code.co_filename.endswith("epoch_iterator.py"):
            return frame is not None and frame.f_code.co_name == "reset"
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _map_parts(function: Callable[[Any], Any], *parts: Any) -> Iterator[Any]:
    return (map_leaves(function, part) for part in parts)
