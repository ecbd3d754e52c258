"""Selection of rows from a whole data set, for the trial of a model's loss before training."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from choros.data.array_source import ArraySource
from choros.data.encoded_rows import filled, form
from choros.data.tree import leaves, map_leaves
from choros.types import Array, Batch

if TYPE_CHECKING:
    from choros.data import Source

ROWS = 32
CANDIDATES = 1024  # most rows that are read, from which dissimilar ones are selected
BYTES = 1 << 23  # most bytes of these rows
BATCHES = 8  # batches that are read from a PyDataset


def spread(source: Source, sample: Batch) -> Batch:
    """Return up to 32 rows from the whole source, equal on every rank. The rows with the most zeros come first.

    Sequences are padded with zeros. The rows with the most and with the fewest zeros are returned in different halves.
    A loss that divides by valid entries therefore divides the halves by different numbers.

    Args:
        source: the source of batches. Of a PyDataset some batches are read, spread from the first to the last. Of a
            stream only the first batch is used, as further reading would lose rows.
        sample: the first rows of the source.

    Example:
        >>> x = np.where(np.arange(100)[:, None] < 95, 1.0, [0.0, 1.0])
        >>> source = ArraySource(x, x[:, 0])
        >>> rows = spread(source, source.sample(4))
        >>> rows.rows, rows.y[:5].tolist()
        (32, [0.0, 0.0, 0.0, 0.0, 0.0])
    """
    if isinstance(source, ArraySource):
        return _of_arrays(source)
    read_some = getattr(source, "some", None)
    if read_some is None:  # a stream, or a DataFrame whose rows the workers read
        return sample
    return _of_batches(read_some(BATCHES), sample)


def _of_arrays(source: ArraySource) -> Batch:
    arrays = [array for _, array in leaves((source.x, source.y, source.sample_weight))]
    size = sum(array.nbytes for array in arrays) // max(source.rows, 1) + 1
    count = min(source.rows, CANDIDATES, max(ROWS, BYTES // size))
    places = np.sort((np.arange(count) * source.rows + source.rows // 2) // count)
    order = _dissimilar_rows([array[places] for array in arrays], ROWS)
    return Batch(*source.taken(places[order]), rows=len(order), total=len(order))


def _of_batches(batches: Iterator[Batch], sample: Batch) -> Batch:
    """Select dissimilar rows of each batch, then dissimilar rows of all selected ones."""
    selected = [_rows(sample, ROWS)]
    same_form = (batch for batch in batches if _form(batch) == _form(sample))  # excludes sequences of another length
    selected.extend(_rows(batch, ROWS // 2) for batch in same_form)
    parts = [(batch.x, batch.y, batch.sample_weight) for batch in selected]
    x, y, weight = (map_leaves(lambda *arrays: np.concatenate(arrays), *pieces) for pieces in zip(*parts, strict=True))
    rows = sum(batch.rows for batch in selected)
    return _rows(Batch(x, y, weight, rows=rows, total=rows), ROWS)


def _rows(batch: Batch, count: int) -> Batch:
    order = _dissimilar_rows([array for _, array in leaves((batch.x, batch.y, batch.sample_weight))], count)
    x, y, weight = (map_leaves(lambda a: a[order], part) for part in (batch.x, batch.y, batch.sample_weight))
    return Batch(x, y, weight, rows=len(order), total=len(order))


def _form(batch: Batch) -> list[tuple[Any, ...]]:
    return [(name, *form(a)) for name, a in leaves((batch.x, batch.y, batch.sample_weight))]


def _dissimilar_rows(arrays: list[Array], count: int) -> Array:
    """Return indices of ``count`` rows: a quarter with the most zeros, half of others, a quarter with the fewest."""
    rows = len(arrays[0])
    fullness: Array = np.sum([filled(array) for array in arrays], axis=0)
    order = np.random.default_rng(1).permutation(rows)
    order = order[np.argsort(fullness[order], kind="stable")]
    if rows > count:
        quarter = count // 4
        middle = np.random.default_rng(2).choice(rows - 2 * quarter, count // 2, replace=False)
        order = np.concatenate([order[:quarter], order[quarter + np.sort(middle)], order[-quarter:]])
    return order
