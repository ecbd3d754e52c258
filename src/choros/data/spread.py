"""Rows from a whole data set, to test a model's loss on before training."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np

from choros.data.arrays import ArraySource
from choros.data.tree import leaves
from choros.types import Array, Batch

ROWS = 32
CANDIDATES = 1024  # rows that are looked at, of which the least alike are taken
BYTES = 1 << 23  # that these may have


def spread(source: Any, sample: Batch) -> Batch:
    """Return rows drawn from all of a source, the same on every rank; those with the most zeros come first.

    Zeros are what sequences are padded with. The rows with the fewest and the most of them are among those returned,
    in different halves, so that a loss that divides by valid entries divides the halves by different numbers.

    Args:
        source: of batches. A stream has its first batch only, as reading on would lose rows.
        sample: its first rows.

    Example:
        >>> x = np.where(np.arange(100)[:, None] < 95, 1.0, [0.0, 1.0])
        >>> source = ArraySource(x, x[:, 0])
        >>> rows = spread(source, source.sample(4))
        >>> rows.rows, rows.y[:5].tolist()
        (32, [0.0, 0.0, 0.0, 0.0, 0.0])
    """
    if isinstance(source, ArraySource):
        return _of_arrays(source)
    if not source.indexed or not hasattr(source, "epoch"):  # rows of a DataFrame are read by the workers
        return sample
    how = {"rank": 0, "size": 1, "together": True, "batch_size": ROWS, "seed": 1, "epoch": 0, "shuffle": True}
    with contextlib.closing(source.epoch(**how, steps=1)) as batches:
        batch: Batch = next(iter(batches), sample)
    return batch


def _of_arrays(source: ArraySource) -> Batch:
    every = [array for _, array in leaves((source.x, source.y, source.sample_weight))]
    size = sum(array.nbytes for array in every) // max(source.rows, 1) + 1
    count = min(source.rows, CANDIDATES, max(ROWS, BYTES // size))
    order = np.random.default_rng(1).permutation(count)
    places = np.sort((np.arange(count) * source.rows + source.rows // 2) // count)
    filled: Array = np.zeros(count)
    for array in every:
        taken = array[places].reshape(count, -1)
        filled += np.count_nonzero(taken, axis=1) / max(taken.shape[1], 1)
    order = order[np.argsort(filled[order], kind="stable")]
    if count > ROWS:
        quarter = ROWS // 4
        middle = np.random.default_rng(2).choice(count - 2 * quarter, ROWS // 2, replace=False)
        order = np.concatenate([order[:quarter], order[quarter + np.sort(middle)], order[-quarter:]])
    return Batch(*source.taken(places[order]), rows=len(order), total=len(order))
