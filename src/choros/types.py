"""What several rooms share: arrays, their memory and batches. Standard library and numpy only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Batch:
    """One rank's rows of one global batch.

    Attributes:
        x, y, sample_weight: nested numpy arrays, or None; ``x`` is None where the rank has no row.
        rows: int. This rank's rows (may be 0).
        total: int. The rows of the whole global batch, over all ranks.
        packed: what a replica's step takes of it, where that was made beforehand (``Replica.ready``), or None.

    Example:
        >>> import numpy as np
        >>> Batch(np.zeros((3, 2)), np.zeros(3), None, rows=3, total=8).rows
        3
    """

    x: Any
    y: Any
    sample_weight: Any
    rows: int
    total: int
    packed: Any = None


def aligned(count: int, dtype: Any) -> Array:
    """Return a vector of zeros at an address that is a multiple of 64, which XLA reads where it lies.

    Example:
        >>> aligned(3, "float32").ctypes.data % 64
        0
    """
    dtype = np.dtype(dtype)
    raw = np.zeros(count * dtype.itemsize + 64, np.uint8)
    return raw[-raw.ctypes.data % 64 :][: count * dtype.itemsize].view(dtype)
