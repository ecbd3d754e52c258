"""The order of the rows: one permutation for each (seed, epoch), the same on every rank and platform."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def permutation(
    rows: int, seed: int, epoch: int, shuffle: bool = True, within: int | None = None
) -> npt.NDArray[np.int64]:
    """The order in which the rows are gone through in one epoch.

    Each row gets a random key of 64 bits whose low bits are its own number, and the keys are sorted. The keys are
    the raw stream of PCG64 seeded by ``SeedSequence((seed, epoch))``, which numpy promises never to change (NEP 19);
    ``Generator.permutation`` has no such promise, and two ranks with two numpys would train rows twice.

    Args:
        rows: How many rows there are.
        seed: Not negative.
        epoch: Not negative.
        shuffle: False gives ``0, 1, 2 ...``.
        within: The number of a part of the epoch that has an order of its own.

    Returns:
        ``rows`` int64 row numbers, each once.

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
    part = () if within is None else (within + 1,)  # a SeedSequence takes no notice of zeros at the end
    keys = np.random.PCG64(np.random.SeedSequence((seed, epoch, *part))).random_raw(rows)
    keys = ((keys >> low) << low) | np.arange(rows, dtype=np.uint64)
    keys.sort()
    numbers: npt.NDArray[np.int64] = (keys & ((unit << low) - unit)).astype(np.int64)
    return numbers


def batch_order(rows: int, batch_size: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """Return the rows' order where whole batches are permuted, and the rows in each stay as they are.

    A last batch of fewer rows stays the last, as with ``shuffle="batch"`` of ``keras.Model.fit``.

    Args:
        rows: How many rows.
        batch_size: Rows of a batch.
        seed: Not negative.
        epoch: Not negative.

    Returns:
        ``rows`` int64 row numbers, each once.

    Example:
        >>> batch_order(7, 2, seed=1, epoch=0).tolist()
        [4, 5, 0, 1, 2, 3, 6]
    """
    full_batches = rows // batch_size
    firsts = permutation(full_batches, seed, epoch) * batch_size
    order = (firsts[:, None] + np.arange(batch_size)).reshape(-1)
    return np.concatenate([order, np.arange(full_batches * batch_size, rows)])
