"""Helpers for dtypes in reductions: checks, sums in rank order, means, and a dtype as two 64-bit integers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from choros.errors import InvalidInputError
from choros.types import Array


def numeric(dtype: DTypeLike) -> np.dtype[Any]:
    """Return the numpy dtype in native byte order.

    Raises:
        InvalidInputError: values of the dtype have no sum: bool, text, objects.

    Example:
        >>> numeric("float32").itemsize
        4
    """
    checked: np.dtype[Any] = np.dtype(dtype).newbyteorder("=")
    if checked.kind in "iufc" or checked.name == "bfloat16":
        return checked
    raise InvalidInputError(
        f"Values of {checked} cannot be summed over ranks: cast them to a number first, such as int64."
    )


def dtype_code(dtype: np.dtype[Any]) -> tuple[int, int]:
    """Return a dtype's name (16 bytes at most) as two signed 64-bit integers, which ``dtype_name`` reads.

    Example:
        >>> dtype_name(dtype_code(np.dtype("float32")))
        'float32'
    """
    text = dtype.name.encode()[:16].ljust(16, b"\0")
    return int.from_bytes(text[:8], "little", signed=True), int.from_bytes(text[8:], "little", signed=True)


def dtype_name(code: tuple[int, int]) -> str:
    """Return the dtype's name that ``dtype_code`` wrote."""
    return b"".join(half.to_bytes(8, "little", signed=True) for half in code).rstrip(b"\0").decode(errors="replace")


def blocks(count: int, step: int) -> list[slice]:
    """Return slices that divide a vector of ``count`` values; all but the last have ``step`` values.

    Example:
        >>> blocks(5, 2)
        [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    return [slice(begin, min(begin + step, count)) for begin in range(0, count, step)]


def read_only(buffer: Array) -> Array:
    """Return a read-only view."""
    view = buffer.view()
    view.flags.writeable = False
    return view


def add_in_order(inputs: list[Array], out: Array) -> None:
    """Sum arrays in the order of the list, so that every rank gets the same bits. Overflow raises no warning.

    Example:
        >>> add_in_order([np.ones(2), np.ones(2), np.ones(2)], out := np.zeros(2))
        >>> out.tolist()
        [3.0, 3.0]
    """
    if len(inputs) == 1:
        np.copyto(out, inputs[0])
        return
    with np.errstate(all="ignore"):
        np.add(inputs[0], inputs[1], out=out)
        for array in inputs[2:]:
            np.add(out, array, out=out)


def mean_of(x: Array, size: int, sum_over_ranks: Callable[[Array], Array]) -> Array:
    """Return the mean over ``size`` ranks, in a type that is wide enough.

    Args:
        x: this rank's array.
        size: int. Number of ranks.
        sum_over_ranks: returns the sum of an array over all ranks.

    Returns:
        float64 for integers; float16 is summed as float32 and returned as float16; else the dtype of ``x``.
    """
    dtype = numeric(x.dtype)
    if dtype.kind in "iu":
        return np.asarray(sum_over_ranks(x.astype(np.float64)) / size)
    if dtype == np.float16:
        return np.asarray(sum_over_ranks(x.astype(np.float32)) / np.float32(size)).astype(dtype)
    return np.asarray(sum_over_ranks(x) / dtype.type(size)).astype(dtype, copy=False)
