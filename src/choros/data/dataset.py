"""A ``keras.utils.PyDataset`` as a source of batches: its batch i is global batch i."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Generator, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from typing import Any

import numpy as np

from choros.data.convert import is_py_dataset
from choros.data.division import share, visits
from choros.data.order import permutation
from choros.data.standard import cut, standard
from choros.data.weights import check_class_weight
from choros.errors import BadData
from choros.types import Batch


class PyDatasetSource:
    """The batches of a ``keras.utils.PyDataset``, divided (together) or dealt out whole (alone).

    With ``shuffle`` the order of the batches is a permutation, as in Keras. ``on_epoch_begin`` and ``on_epoch_end``
    are called on every rank, under Python's and numpy's global generators seeded by (seed, epoch), so that a dataset
    that shuffles itself there does so alike everywhere. Its ``workers`` are threads that read ahead (also where
    ``use_multiprocessing`` is set).

    Args:
        dataset: The PyDataset. Each batch is ``(x,)``, ``(x, y)``, ``(x, y, sample_weight)``, an array or a dict.
        class_weight: From class number to weight, or None.
        floatx: What floating point numbers become.

    Attributes:
        rows: None: how many rows there are is known only when all batches were read.

    Raises:
        BadData: It is no PyDataset, it has no batches, or the class weights are malformed.
    """

    rows: int | None = None
    indexed = True
    ahead = 0

    def __init__(self, dataset: Any, class_weight: Mapping[int, float] | None = None, floatx: str = "float32") -> None:
        if not is_py_dataset(dataset):
            raise BadData(f"x is a {type(dataset).__name__}: give a keras.utils.PyDataset.")
        if class_weight is not None:
            check_class_weight(class_weight, None)
        self.dataset = dataset
        self.class_weight = class_weight
        self.floatx = floatx
        if self._count() == 0:
            raise BadData(f"{self._name} has no batches: its length must be 1 or more.")

    @property
    def _name(self) -> str:
        return type(self.dataset).__name__

    def _count(self) -> int | None:
        count = self.dataset.num_batches
        return None if count is None else int(count)

    def part(self, rank: int, size: int, seed: int) -> PyDatasetSource:
        """Every ``size``-th batch: one of ``size`` disjoint shards."""
        return PyDatasetSource(_part(self.dataset, rank, size), self.class_weight, self.floatx)

    def steps(self, batch_size: int = 0) -> int | None:
        """Batches in a pass, whatever the ``batch_size``; None where the dataset has no end."""
        return self._count()

    def sample(self, batch_size: int = 0) -> Batch:
        """Batch 0: a real batch to build a model from."""
        x, y, weight, rows = self._read(0)
        return Batch(x, y, weight, rows=rows, total=rows)

    def epoch(
        self,
        *,
        rank: int,
        size: int,
        together: bool,
        batch_size: int = 0,
        seed: int,
        epoch: int,
        shuffle: bool,
        steps: int | None = None,
    ) -> Iterator[Batch]:
        """One rank's batches of one epoch: its ``share`` of each (together), or every ``size``-th whole (alone).

        The arguments are those of ``ArraySource.epoch``; ``batch_size`` is the dataset's own business, and ``steps``
        counts its batches, together and alone.

        Raises:
            BadData: The dataset has no end and ``steps`` is None, or a batch is malformed (the error names it).
        """
        if steps is None and self._count() is None:
            raise BadData(f"{self._name} has no end (num_batches is None): give steps_per_epoch.")
        return self._epoch(rank, size, together, seed, epoch, shuffle, steps)

    def _epoch(
        self, rank: int, size: int, together: bool, seed: int, epoch: int, shuffle: bool, steps: int | None
    ) -> Iterator[Batch]:
        with _same_randomness(seed, epoch, 0):
            self.dataset.on_epoch_begin()
        try:
            first, stride = (0, 1) if together else (rank, size)
            with closing(self._ahead(self._indices(seed, epoch, shuffle, first, stride, steps))) as batches:
                for x, y, weight, total in batches:
                    yield cut(x, y, weight, total, share(total, rank, size) if together else slice(0, total))
        finally:
            with _same_randomness(seed, epoch, 1):
                self.dataset.on_epoch_end()

    def _indices(
        self, seed: int, epoch: int, shuffle: bool, first: int, stride: int, steps: int | None
    ) -> Iterator[int]:
        count = self._count()
        turn, order = -1, np.empty(0, np.int64)
        for now, i in visits(count, epoch=epoch, first=first, stride=stride, steps=steps):
            if count is None or not shuffle:
                yield i
                continue
            if now != turn:
                turn, order = now, permutation(count, seed, now)
            yield int(order[i])

    def _ahead(self, indices: Iterator[int]) -> Generator[tuple[Any, Any, Any, int], None, None]:
        """Read the batches in order, ``dataset.workers`` threads ahead where it asks for more than one."""
        threads = int(self.dataset.workers)
        if threads < 2:
            yield from map(self._read, indices)
            return
        depth = max(threads, int(self.dataset.max_queue_size))
        waiting: deque[Future[tuple[Any, Any, Any, int]]] = deque()
        pool = ThreadPoolExecutor(threads, thread_name_prefix="choros-data")
        try:
            for index in indices:
                waiting.append(pool.submit(self._read, index))
                if len(waiting) >= depth:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def _read(self, index: int) -> tuple[Any, Any, Any, int]:
        name = f"batch {index} of {self._name}"
        how = "__getitem__ must return (x,), (x, y) or (x, y, sample_weight)"
        return standard(self.dataset[index], name, how, self.class_weight, self.floatx)


def _part(dataset: Any, rank: int, size: int) -> Any:
    import keras

    class Part(keras.utils.PyDataset):  # type: ignore[misc]
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

    return Part()


@contextmanager
def _same_randomness(seed: int, epoch: int, moment: int) -> Iterator[None]:
    """Python's and numpy's global generators seeded alike on every rank, and as they were afterwards."""
    ours, numpys = random.getstate(), np.random.get_state()
    word = int(np.random.SeedSequence((seed, epoch, moment)).generate_state(1)[0])
    random.seed(word)
    np.random.seed(word)
    try:
        yield
    finally:
        random.setstate(ours)
        np.random.set_state(numpys)
