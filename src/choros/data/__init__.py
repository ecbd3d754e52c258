"""Sources of batches, and the exact division of a global batch among ranks.

A source yields the batches of each rank in an epoch. Each global batch is divided into contiguous shares, whose sizes
differ by at most one row; the first ranks have the larger shares. This is equal for synchronous and asynchronous ranks.
Every row is trained once in an epoch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from choros.data.array_source import ArraySource
from choros.data.class_weights import with_class_weight
from choros.data.conversion import brings_targets, is_py_dataset, is_stream
from choros.data.files import FileSource, files
from choros.data.partitioned_source import PartitionedSource
from choros.data.prefetch import FeedTimes, Prefetch, PrefetchSource, feed, prefetch, without_augment
from choros.data.pydataset_source import PyDatasetSource
from choros.data.stream_source import StreamSource, read_all
from choros.data.validation import check_alone_in_call, unpack
from choros.types import ArrayTree, Batch

__all__ = [
    "ArraySource",
    "FeedTimes",
    "FileSource",
    "PartitionedSource",
    "PrefetchSource",
    "PyDatasetSource",
    "Source",
    "StreamSource",
    "feed",
    "files",
    "make_source",
    "make_validation",
    "prefetch",
    "without_augment",
]


class Source(Protocol):
    """The interface of data for the training loops."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__}>"

    @property
    def indexed(self) -> bool:
        """True if rows or batches can be read by index. False for a stream, which is read in order."""
        ...

    @property
    def ahead(self) -> int:
        """Number of batches that are prepared before their steps (``prefetch``); 0 for none."""
        ...

    @property
    def rows(self) -> int | None:
        """Number of rows in a pass; None if it is not known in advance."""
        ...

    def steps(self, batch_size: int) -> int | None:
        """Return the number of global batches in a pass; None if it is unknown or the data has no end."""
        ...

    def sample(self, batch_size: int) -> Batch:
        """Return a real batch to build a model from. It is equal on every rank."""
        ...

    def part(self, rank: int, size: int, seed: int) -> Source:
        """Return one of ``size`` disjoint shards, for a member of an ensemble."""
        ...

    def epoch(
        self,
        *,
        rank: int,
        size: int,
        synchronous: bool,
        batch_size: int,
        seed: int,
        epoch: int,
        shuffle: bool | str,
        steps: int | None = None,
    ) -> Iterator[Batch]:
        """Return an iterator over one rank's batches of one epoch."""
        ...


def make_source(
    x: ArrayTree,
    y: ArrayTree = None,
    sample_weight: ArrayTree = None,
    class_weight: Any = None,
    floatx: str = "float32",
) -> Source:
    """Create a source from the data arguments of ``model.fit``, or from files.

    Args:
        x: Nested arrays or tensors of any library. Or, without y and sample_weight: a PyDataset, ``files``, or a stream
            of batches (a generator, tf.data.Dataset, DataLoader, Grain loader).
        y: Nested arrays, or None.
        sample_weight: One array for all of y, or one for each of its arrays.
        class_weight: A dict from class index to weight, for a single y. It is multiplied with ``sample_weight``.
        floatx: Dtype to which floats are converted (``keras.config.floatx()``).

    Returns:
        The source.

    Raises:
        InvalidDataError: The data is text, or arrays do not fit together.

    Example:
        >>> import numpy as np
        >>> make_source(np.zeros((10, 3)), np.zeros(10)).steps(4)
        3
    """
    if brings_targets(x):
        check_alone_in_call(x, y, sample_weight)
        if isinstance(x, Prefetch):
            inner = make_source(*x.data, class_weight, floatx)
            if isinstance(inner, StreamSource):
                inner.depth = inner.ahead = x.depth
                inner.augment = x.augment
                return inner
            return PrefetchSource(inner, x.depth, x.augment)
        if is_py_dataset(x):
            return PyDatasetSource(x, class_weight, floatx)
        if is_stream(x):
            return StreamSource(x, class_weight, floatx)
        source: FileSource = x if class_weight is None else x.with_class_weight(class_weight)
        source.check()
        return source
    if class_weight is not None:
        sample_weight = with_class_weight(y, sample_weight, class_weight, floatx)
    return ArraySource(x, y, sample_weight, floatx)


def py_dataset_of(source: Source | None) -> PyDatasetSource | None:
    """Return the source of a PyDataset, also behind ``prefetch``; None for all other sources."""
    inner = getattr(source, "inner", source)
    return inner if isinstance(inner, PyDatasetSource) else None


def make_validation(data: ArrayTree, steps: int | None = None, floatx: str = "float32") -> Source:
    """Create a source from the ``validation_data`` of ``fit``. A stream is read into memory at once.

    Args:
        data: A tuple of arrays, or data that includes y.
        steps: Number of batches to read from a stream. Defaults to all.
        floatx: As for ``make_source``.
    """
    source = make_source(*unpack(without_augment(data)), floatx=floatx)
    if dataset := py_dataset_of(source):
        dataset.evaluates = True
    return ArraySource(*read_all(source, steps), floatx) if isinstance(source, StreamSource) else source
