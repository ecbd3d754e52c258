"""A ``keras.utils.PyDataset`` as a source of batches. Batch i of the dataset is global batch i."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from itertools import groupby
from operator import itemgetter
from typing import Any

import numpy as np

from choros.argument_checks import check_whole
from choros.data.batch_format import cut, standard
from choros.data.class_weights import check_class_weight
from choros.data.conversion import is_py_dataset
from choros.data.permutation import permutation
from choros.data.sharding import share, visits
from choros.data.validation import check_floatx
from choros.errors import InvalidDataError
from choros.object_text import call_text
from choros.types import ArrayTree, Batch

_Read = tuple[
    tuple[ArrayTree, ArrayTree, ArrayTree, int], list[int]
]  # (x, y, sample_weight, rows) and the indices of its shares


class PyDatasetSource:
    """The batches of a ``keras.utils.PyDataset``, each divided among the ranks.

    Synchronous ranks read every batch completely, and each rank trains its share. An asynchronous rank reads every
    ``size``-th batch and trains all its shares in sequence. In both modes a rank makes one step for each global batch.
    If the number of batches is not divisible by ``size``, all ranks read the last batches of an epoch.

    With ``shuffle``, the order of the batches is a permutation, as in Keras. Every rank calls ``on_epoch_begin`` and
    ``on_epoch_end`` as often as Keras: ``on_epoch_end`` also before the first epoch of a fit and before each
    evaluation. (On JAX and PyTorch Keras reads a batch to build a model; its call of ``on_epoch_begin`` before that is
    not made here.) ``follow`` calls them for passes that a rank missed. During these calls Python's and
    numpy's global generators are seeded by (seed, epoch), so a dataset that shuffles there has the same order on every
    rank. The ``workers`` of the dataset are threads that read ahead, also with ``use_multiprocessing``.

    Args:
        dataset: The PyDataset. Each batch is ``(x,)``, ``(x, y)``, ``(x, y, sample_weight)``, an array or a dict.
        class_weight: A dict from class index to weight, or None.
        floatx: Dtype to which floats are converted.
        cuts: Number of batches into which each batch of the dataset is divided. Defaults to 1.

    Attributes:
        rows: None, as the number of rows is known only after all batches were read.
        evaluates: Whether each pass is an evaluation. Defaults to False.

    Raises:
        InvalidDataError: The object is not a PyDataset or has no batches, or the class weights are malformed.
    """

    rows: int | None = None
    indexed = True
    ahead = 0

    def __init__(
        self, dataset: Any, class_weight: Mapping[int, float] | None = None, floatx: str = "float32", cuts: int = 1
    ) -> None:
        if not is_py_dataset(dataset):
            raise InvalidDataError(f"x is of type {type(dataset).__name__}: give a keras.utils.PyDataset.")
        if class_weight is not None:
            check_class_weight(class_weight, None)
        self.dataset = dataset
        self.class_weight = class_weight
        self.floatx, self.cuts = check_floatx(floatx), check_whole("cuts", cuts, 1)
        self.evaluates = False
        self._passes, self._reset = 0, False
        if self._count() == 0:
            raise InvalidDataError(f"{self._name} has no batches: its length must be 1 or more.")

    def __repr__(self) -> str:
        return call_text(self, self.dataset, class_weight=self.class_weight)

    @property
    def _name(self) -> str:
        return type(self.dataset).__name__

    def _count(self) -> int | None:
        count = self.dataset.num_batches
        return None if count is None else int(count)

    def part(self, rank: int, size: int, seed: int, whole: bool = False) -> PyDatasetSource:
        """Return one of ``size`` disjoint shards: every ``size``-th batch.

        Args:
            rank: Index of the shard.
            size: Number of shards.
            seed: Not used; shards of arrays depend on it.
            whole: True to keep the size of the batches. With False, each batch is divided into ``size`` batches, as
                with arrays for a member of an ensemble. Defaults to False.
        """
        cuts = 1 if whole else size
        return PyDatasetSource(_part(self.dataset, rank, size), self.class_weight, self.floatx, cuts)

    def steps(self, batch_size: int = 0) -> int | None:
        """Return the number of batches of the dataset; None if it has no end. ``batch_size`` is not used."""
        return self._count()

    def sample(self, batch_size: int = 0) -> Batch:
        """Return batch 0, to build a model from."""
        x, y, weight, rows = self._read(0)
        return Batch(x, y, weight, rows=rows, total=rows)

    def some(self, count: int) -> Iterator[Batch]:
        """Yield up to ``count`` batches after batch 0, spread evenly; the first ones if the dataset has no end."""
        last = self._count()
        places = range(1, count + 1) if last is None else np.unique(np.linspace(0, last - 1, count + 1).round())[1:]
        for index in places:
            x, y, weight, rows = self._read(int(index))
            yield Batch(x, y, weight, rows=rows, total=rows)

    def epoch(
        self,
        *,
        rank: int,
        size: int,
        synchronous: bool,
        batch_size: int = 0,
        seed: int,
        epoch: int,
        shuffle: bool | str,
        steps: int | None = None,
    ) -> Iterator[Batch]:
        """Return one rank's batches of one epoch, one for each global batch.

        The arguments are those of ``ArraySource.epoch``. The dataset determines the batch size, so ``batch_size`` is
        not used. ``steps`` counts batches of the dataset.

        Raises:
            InvalidDataError: The dataset has no end and ``steps`` is None. Or a batch is malformed; the message
                contains its index.
        """
        if steps is None and self._count() is None:
            raise InvalidDataError(f"{self._name} has no end (num_batches is None): give steps_per_epoch.")
        return self._epoch(rank, size, synchronous, seed, epoch, bool(shuffle), steps)

    def _epoch(
        self, rank: int, size: int, synchronous: bool, seed: int, epoch: int, shuffle: bool, steps: int | None
    ) -> Iterator[Batch]:
        self._begin(seed, epoch)
        try:
            reads = self._reads(rank, size, synchronous, self._indices(seed, epoch, shuffle, steps), steps)
            with closing(self._ahead(reads)) as batches:
                for (x, y, weight, total), numbers in batches:
                    for number in numbers:
                        yield cut(x, y, weight, total, share(total, number, size * self.cuts))
        finally:
            self._end(seed, epoch)

    def follow(self, seed: int, epochs: Sequence[int]) -> None:
        """Call the dataset's hooks for passes that other processes made, so that this copy has the same state.

        Args:
            seed: The seed of the passes.
            epochs: The epoch of each pass since the fit began. The first ones are passes of this copy.
        """
        for epoch in epochs[self._passes :]:
            self._begin(seed, epoch)
            self._end(seed, epoch)

    def _begin(self, seed: int, epoch: int) -> None:
        if self.evaluates or not self._reset:  # Keras resets its iterator, which calls on_epoch_end
            self._reset = True
            with _same_randomness(seed, epoch, 2):
                self.dataset.on_epoch_end()
        with _same_randomness(seed, epoch, 0):
            self.dataset.on_epoch_begin()

    def _end(self, seed: int, epoch: int) -> None:
        with _same_randomness(seed, epoch, 1):
            self.dataset.on_epoch_end()
        self._passes += 1

    def _indices(self, seed: int, epoch: int, shuffle: bool, steps: int | None) -> Iterator[tuple[int, int]]:
        """Yield for each batch of an epoch the index of the dataset's batch, and the index of the part of it."""
        count = self._count()
        turn, order = -1, np.empty(0, np.int64)
        for this_turn, i in visits(None if count is None else count * self.cuts, epoch=epoch, steps=steps):
            index, number = divmod(i, self.cuts)
            if count is not None and shuffle:
                if this_turn != turn:
                    turn, order = this_turn, permutation(count, seed, this_turn)
                index = int(order[index])
            yield index, number

    def _reads(
        self, rank: int, size: int, synchronous: bool, indices: Iterator[tuple[int, int]], steps: int | None
    ) -> Iterator[tuple[int, list[int]]]:
        """Yield the indices of the batches that this rank reads, each with the indices of the shares that it trains."""
        if self.cuts > 1:  # a member of an ensemble, which trains all parts of its batches
            for index, cuts in groupby(indices, key=itemgetter(0)):
                yield index, [number for _, number in cuts]
            return
        length = self._count() if steps is None else steps
        divided = 0 if synchronous or length is None else length - length % size
        for position, (index, _) in enumerate(indices):
            if position >= divided:
                yield index, [rank]
            elif position % size == rank:
                yield index, list(range(size))

    def _ahead(self, reads: Iterator[tuple[int, list[int]]]) -> Generator[_Read, None, None]:
        """Read the batches in order; with ``dataset.workers`` above 1, in as many threads ahead of their use."""
        threads = int(self.dataset.workers)
        if threads < 2:
            for index, numbers in reads:
                yield self._read(index), numbers
            return
        depth = max(threads, int(self.dataset.max_queue_size))
        waiting: deque[tuple[Future[tuple[ArrayTree, ArrayTree, ArrayTree, int]], list[int]]] = deque()
        pool = ThreadPoolExecutor(threads, thread_name_prefix="choros-data")
        try:
            for index, numbers in reads:
                waiting.append((pool.submit(self._read, index), numbers))
                if len(waiting) >= depth:
                    future, ready = waiting.popleft()
                    yield future.result(), ready
            while waiting:
                future, ready = waiting.popleft()
                yield future.result(), ready
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def _read(self, index: int) -> tuple[ArrayTree, ArrayTree, ArrayTree, int]:
        name = f"batch {index} of {self._name}"
        remedy = "__getitem__ must return (x,), (x, y) or (x, y, sample_weight)"
        return standard(self.dataset[index], name, remedy, self.class_weight, self.floatx)


def _part(dataset: Any, rank: int, size: int) -> Any:
    import keras

    class DatasetShard(keras.utils.PyDataset):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(workers=dataset.workers, max_queue_size=dataset.max_queue_size)

        @property
        def num_batches(self) -> int | None:  # pyright: ignore[reportIncompatibleMethodOverride] - Keras' only raises
            count = dataset.num_batches
            return None if count is None else len(range(rank, count, size))

        def __getitem__(self, index: int) -> Any:
            return dataset[rank + index * size]

        def on_epoch_begin(self) -> None:
            dataset.on_epoch_begin()

        def on_epoch_end(self) -> None:
            dataset.on_epoch_end()

    return DatasetShard()


@contextmanager
def _same_randomness(seed: int, epoch: int, moment: int) -> Iterator[None]:
    """Temporarily seed Python's and numpy's global generators with the same value on every rank."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    draw = int(np.random.SeedSequence((seed, epoch, moment)).generate_state(1)[0])
    random.seed(draw)
    np.random.seed(draw)
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
