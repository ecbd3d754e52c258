"""Types that several packages share: arrays, their memory and batches. Standard library and numpy only."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    import jax
    import keras
    import tensorflow as tf
    import torch

Array = np.ndarray[Any, Any]
Tensor: TypeAlias = "Array | jax.Array | torch.Tensor | tf.Tensor | tf.IndexedSlices"  # of the backend, or numpy's
# An array of numpy or another library, or lists, tuples and dicts of array trees, or None. Python cannot express that.
ArrayTree = Any
Callbacks: TypeAlias = "Sequence[keras.callbacks.Callback] | keras.callbacks.CallbackList | None"  # of Keras' ``fit``
_MB = 1 << 20
_DTYPE = re.compile(r"[<>=|]?[a-zA-Z]+\w*(\[\w+\])?", re.ASCII)


@dataclass(frozen=True)
class Batch:
    """One rank's rows of one global batch.

    Attributes:
        x, y, sample_weight: nested numpy arrays, or None; ``x`` is None if the rank has no row.
        rows: int. The number of this rank's rows; may be 0.
        total: int. The number of rows of the global batch, over all ranks.
        packed: the input of a replica's step, if it was made beforehand (``Replica.ready``), or None.

    Example:
        >>> import numpy as np
        >>> Batch(np.zeros((3, 2)), np.zeros(3), None, rows=3, total=8).rows
        3
    """

    x: ArrayTree
    y: ArrayTree
    sample_weight: ArrayTree
    rows: int
    total: int
    packed: Any = None


def aligned(count: int, dtype: np.typing.DTypeLike) -> Array:
    """Return a vector of zeros at an address that is a multiple of 64, so that XLA can read it without a copy.

    Example:
        >>> aligned(3, "float32").ctypes.data % 64
        0
    """
    dtype = np.dtype(dtype)
    raw = np.zeros(count * dtype.itemsize + 64, np.uint8)
    return raw[-raw.ctypes.data % 64 :][: count * dtype.itemsize].view(dtype)


def aligned_copy(array: Array) -> Array:
    """Return a copy at an address that is a multiple of 64.

    Example:
        >>> aligned_copy(np.ones((2, 3))).shape
        (2, 3)
    """
    copy = aligned(array.size, array.dtype)
    copy[:] = array.reshape(-1)
    return copy.reshape(array.shape)


def same_bits(a: Array, b: Array) -> bool:
    """Return whether two arrays have the same shape, dtype and bits; stop at the first MB that differs.

    Example:
        >>> same_bits(np.array([np.nan]), np.array([np.nan])), same_bits(np.zeros(2), np.zeros(3))
        (True, False)
    """
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.ctypes.data == b.ctypes.data and a.strides == b.strides:
        return True
    first, other = (np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in (a, b))
    return all(
        np.array_equal(first[start : start + _MB], other[start : start + _MB]) for start in range(0, first.size, _MB)
    )


def dtype_of(name: object) -> np.dtype[Any]:
    """Return the numpy dtype of a name from an untrusted source, also one of ``ml_dtypes``.

    Args:
        name: str. A name as ``dtype.name`` gives it. Other strings are refused, because numpy would parse them.

    Raises:
        TypeError: the name is not that of a dtype.

    Example:
        >>> dtype_of("float16").itemsize, dtype_of("bfloat16").itemsize
        (2, 2)
    """
    if not isinstance(name, str) or not _DTYPE.fullmatch(name):
        raise TypeError(f"{name!r} is not a type")
    try:
        kind = np.dtype(name)
    except TypeError:
        import ml_dtypes

        if not hasattr(ml_dtypes, name):
            raise
        kind = np.dtype(getattr(ml_dtypes, name))
    return kind
