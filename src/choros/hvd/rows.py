"""One rank's rows of a data set, for a loop that Keras runs on every rank."""

from __future__ import annotations

from typing import Any

import keras

from choros.data.arrays import ArraySource
from choros.data.division import share
from choros.data.order import permutation
from choros.data.tree import map_leaves
from choros.errors import BadInput


class Shard(keras.utils.PyDataset):  # type: ignore[misc]
    """This rank's share of every global batch; all ranks have the same number of batches, and each row is in one.

    The order of the rows is the permutation of (seed, epoch), the same on every rank. Of a global batch that does not
    divide the first ranks have one row more; where it has fewer rows than there are ranks, the last have a batch of no
    rows, with which they only meet the others.

    Args:
        x: nested arrays, whole, the same on every rank.
        y: the same, or None.
        sample_weight: the same, or None.
        batch_size: int. Rows of a global batch.
        rank: int. Whose rows.
        size: int. How many ranks.
        shuffle: bool. Defaults to True.
        seed: int. Defaults to 0.
        training: bool. False, for validation: one contiguous share of all rows, in own batches of
            ``batch_size // size``, none of them empty.

    Raises:
        BadInput: fewer rows than one for each rank, or a batch of less than one.

    Example:
        >>> import numpy as np
        >>> [Shard(np.arange(5), batch_size=4, rank=r, size=2, shuffle=False)[1][0].tolist() for r in range(2)]
        [[4], []]
    """

    def __init__(
        self,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        *,
        batch_size: int,
        rank: int,
        size: int,
        shuffle: bool = True,
        seed: int = 0,
        training: bool = True,
    ) -> None:
        super().__init__()
        if batch_size < size:
            raise BadInput(f"A batch of {batch_size} rows for {size} ranks: give every rank one row or more.")
        self._source = ArraySource(x, y, sample_weight, keras.config.floatx())
        if self._source.rows < size:
            raise BadInput(f"{self._source.rows} rows for {size} ranks: give every rank one row or more.")
        self._batch, self._rank, self._size = batch_size, rank, size
        self._shuffle, self._seed, self._training, self._epoch = shuffle and training, seed, training, 0
        self._reorder()

    def _reorder(self) -> None:
        self._order = permutation(self._source.rows, self._seed, self._epoch, self._shuffle)
        if not self._training:
            self._order = self._order[share(len(self._order), self._rank, self._size)]

    @property
    def num_batches(self) -> int:
        """Batches in an epoch."""
        return -(-len(self._order) // (self._batch if self._training else self._batch // self._size))

    def __len__(self) -> int:
        return self.num_batches

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        if not self._training:
            own = self._batch // self._size
            rows = self._order[index * own : (index + 1) * own]
        else:
            whole = self._order[index * self._batch : (index + 1) * self._batch]
            rows = whole[share(len(whole), self._rank, self._size)]
        source = self._source
        parts = (source.x, source.y, source.sample_weight)
        used = 3 if source.sample_weight is not None else 2 if source.y is not None else 1
        return tuple(map_leaves(lambda leaf: leaf[rows], part) for part in parts[:used])

    def on_epoch_end(self) -> None:
        """Take the next epoch's order."""
        self._epoch += 1
        self._reorder()
