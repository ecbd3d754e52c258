"""A ``keras.utils.PyDataset`` as a source of batches: its batch i is global batch i."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Generator, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from itertools import groupby
from operator import itemgetter
from typing import Any

import numpy as np

from choros.data.batch_format import cut, standard
from choros.data.class_weights import check_class_weight
from choros.data.conversion import is_py_dataset
from choros.data.permutation import permutation
from choros.data.sharding import share, visits
from choros.errors import InvalidDataError
from choros.types import ArrayTree, Batch

_Read = tuple[
    tuple[ArrayTree, ArrayTree, ArrayTree, int], list[int]
]  # (x, y, sample_weight, rows) and the numbers of its shares


class PyDatasetSource:
    """The batches of a ``keras.utils.PyDataset``, each divided among the ranks.

    Ranks that step at once read every batch whole, and each trains its share. Asynchronous ranks read one batch in
    ``size`` each, and train its shares one after the other; so all make one step for each global batch in both cases.
    The batches at the end of an epoch that cannot be dealt out evenly are read by all.

    With ``shuffle`` the order of the batches is a permutation, as in Keras. ``on_epoch_begin`` and ``on_epoch_end``
    are called on every rank, under Python's and numpy's global generators seeded by (seed, epoch), so that a dataset
    that shuffles itself there does so alike everywhere. Its ``workers`` are threads that read ahead (also where
    ``use_multiprocessing`` is set).

    Args:
        dataset: The PyDataset. Each batch is ``(x,)``, ``(x, y)``, ``(x, y, sample_weight)``, an array or a dict.
        class_weight: From class number to weight, or None.
        floatx: What floating point numbers become.
        cuts: How many batches each batch of the dataset makes.

    Attributes:
        rows: None: how many rows there are is known only when all batches were read.

    Raises:
        InvalidDataError: It is no PyDataset, it has no batches, or the class weights are malformed.
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
        self.floatx, self.cuts = floatx, cuts
        if self._count() == 0:
            raise InvalidDataError(f"{self._name} has no batches: its length must be 1 or more.")

    @property
    def _name(self) -> str:
        return type(self.dataset).__name__

    def _count(self) -> int | None:
        count = self.dataset.num_batches
        return None if count is None else int(count)

    def part(self, rank: int, size: int, seed: int, whole: bool = False) -> PyDatasetSource:
        """Every ``size``-th batch: one of ``size`` disjoint shards.

        Args:
            rank: Which shard.
            size: How many there are.
            seed: Not used: a shard of arrays is drawn from it.
            whole: Whether the batches stay as large as they are. Else each makes ``size`` batches, as a member of an
                ensemble has them of arrays.
        """
        cuts = 1 if whole else size
        return PyDatasetSource(_part(self.dataset, rank, size), self.class_weight, self.floatx, cuts)

    def steps(self, batch_size: int = 0) -> int | None:
        """Batches in a pass, whatever the ``batch_size``; None where the dataset has no end."""
        return self._count()

    def sample(self, batch_size: int = 0) -> Batch:
        """Batch 0: a real batch to build a model from."""
        x, y, weight, rows = self._read(0)
        return Batch(x, y, weight, rows=rows, total=rows)

    def some(self, count: int) -> Iterator[Batch]:
        """Up to ``count`` batches besides batch 0, spread over all; the first ones where the dataset has no end."""
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
        together: bool,
        batch_size: int = 0,
        seed: int,
        epoch: int,
        shuffle: bool | str,
        steps: int | None = None,
    ) -> Iterator[Batch]:
        """One rank's batches of one epoch: as many as there are global batches.

        The arguments are those of ``ArraySource.epoch``; ``batch_size`` is the dataset's own business, and ``steps``
        counts its batches.

        Raises:
            InvalidDataError: The dataset has no end and ``steps`` is None, or a batch is malformed (the error names
                it).
        """
        if steps is None and self._count() is None:
            raise InvalidDataError(f"{self._name} has no end (num_batches is None): give steps_per_epoch.")
        return self._epoch(rank, size, together, seed, epoch, bool(shuffle), steps)

    def _epoch(
        self, rank: int, size: int, together: bool, seed: int, epoch: int, shuffle: bool, steps: int | None
    ) -> Iterator[Batch]:
        with _same_randomness(seed, epoch, 0):
            self.dataset.on_epoch_begin()
        try:
            reads = self._reads(rank, size, together, self._indices(seed, epoch, shuffle, steps), steps)
            with closing(self._ahead(reads)) as batches:
                for (x, y, weight, total), numbers in batches:
                    for number in numbers:
                        yield cut(x, y, weight, total, share(total, number, size * self.cuts))
        finally:
            with _same_randomness(seed, epoch, 1):
                self.dataset.on_epoch_end()

    def _indices(self, seed: int, epoch: int, shuffle: bool, steps: int | None) -> Iterator[tuple[int, int]]:
        """Yield, for each batch of an epoch, the dataset's batch that it is cut from, and the number of the cut."""
        count = self._count()
        turn, order = -1, np.empty(0, np.int64)
        for now, i in visits(None if count is None else count * self.cuts, epoch=epoch, steps=steps):
            index, number = divmod(i, self.cuts)
            if count is not None and shuffle:
                if now != turn:
                    turn, order = now, permutation(count, seed, now)
                index = int(order[index])
            yield index, number

    def _reads(
        self, rank: int, size: int, together: bool, indices: Iterator[tuple[int, int]], steps: int | None
    ) -> Iterator[tuple[int, list[int]]]:
        """Yield the batches that this rank reads, each with the numbers of the shares that it trains."""
        if self.cuts > 1:  # a member of an ensemble, by itself
            for index, cuts in groupby(indices, key=itemgetter(0)):
                yield index, [number for _, number in cuts]
            return
        length = self._count() if steps is None else steps
        dealt = 0 if together or length is None else length - length % size
        for position, (index, _) in enumerate(indices):
            if position >= dealt:
                yield index, [rank]
            elif position % size == rank:
                yield index, list(range(size))

    def _ahead(self, reads: Iterator[tuple[int, list[int]]]) -> Generator[_Read, None, None]:
        """Read the batches in order, ``dataset.workers`` threads ahead where it asks for more than one."""
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
        how = "__getitem__ must return (x,), (x, y) or (x, y, sample_weight)"
        return standard(self.dataset[index], name, how, self.class_weight, self.floatx)


def _part(dataset: Any, rank: int, size: int) -> Any:
    import keras

    class DatasetShard(keras.utils.PyDataset):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(workers=dataset.workers, max_queue_size=dataset.max_queue_size)

        @property
        def num_batches(self) -> int | None:
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
    """Python's and numpy's global generators seeded alike on every rank, and as they were afterwards."""
    ours, numpys = random.getstate(), np.random.get_state()
    draw = int(np.random.SeedSequence((seed, epoch, moment)).generate_state(1)[0])
    random.seed(draw)
    np.random.seed(draw)
    try:
        yield
    finally:
        random.setstate(ours)
        np.random.set_state(numpys)
