"""The order of the rows: one permutation for each (seed, epoch), equal on every rank and platform."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def permutation(
    rows: int, seed: int, epoch: int, shuffle: bool = True, within: int | None = None
) -> npt.NDArray[np.int64]:
    """Return the order of the rows in one epoch.

    Each row gets a random 64-bit key whose low bits are replaced by the row index. Then the keys are sorted. The keys
    are the raw stream of PCG64 seeded by ``SeedSequence((seed, epoch))``, which numpy keeps stable (NEP 19).
    ``Generator.permutation`` is not stable: ranks with different versions of numpy would train some rows twice.

    Args:
        rows: Number of rows.
        seed: Not negative.
        epoch: Not negative.
        shuffle: False returns ``0, 1, 2 ...``. Defaults to True.
        within: Index of a part of the epoch that has a separate order. Defaults to the whole epoch.

    Returns:
        Row indices: int64, shape (rows,), each index once.

    Example:
        >>> permutation(8, seed=1, epoch=0).tolist()
        [2, 4, 7, 5, 0, 6, 3, 1]
        >>> permutation(4, seed=1, epoch=0, shuffle=False).tolist()
        [0, 1, 2, 3]
    """
    if not shuffle or rows < 2:
        return np.arange(rows, dtype=np.int64)
    low = np.uint64((rows - 1).bit_length())
    unit = np.uint64(1)
    part = () if within is None else (within + 1,)  # a SeedSequence ignores zeros at the end
    keys = np.random.PCG64(np.random.SeedSequence((seed, epoch, *part))).random_raw(rows)
    keys = ((keys >> low) << low) | np.arange(rows, dtype=np.uint64)
    keys.sort()
    numbers: npt.NDArray[np.int64] = (keys & ((unit << low) - unit)).astype(np.int64)
    return numbers


def batch_order(rows: int, batch_size: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """Return an order of rows in which whole batches are permuted and the rows of a batch keep their order.

    A smaller last batch stays the last, as with ``shuffle="batch"`` of ``keras.Model.fit``.

    Args:
        rows: Number of rows.
        batch_size: Rows of a batch.
        seed: Not negative.
        epoch: Not negative.

    Returns:
        Row indices: int64, shape (rows,), each index once.

    Example:
        >>> batch_order(7, 2, seed=1, epoch=0).tolist()
        [4, 5, 0, 1, 2, 3, 6]
    """
    full_batches = rows // batch_size
    firsts = permutation(full_batches, seed, epoch) * batch_size
    order = (firsts[:, None] + np.arange(batch_size)).reshape(-1)
    return np.concatenate([order, np.arange(full_batches * batch_size, rows)])
