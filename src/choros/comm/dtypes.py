"""Values that can be summed over ranks, the mean of a sum, and a dtype as two words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from choros.errors import InvalidInputError
from choros.types import Array


def numeric(dtype: Any) -> np.dtype[Any]:
    """Return the numpy dtype, refusing what has no sum: bool, text, objects.

    Example:
        >>> numeric("float32").itemsize
        4
    """
    kind: np.dtype[Any] = np.dtype(dtype).newbyteorder("=")
    if kind.kind in "iufc" or kind.name == "bfloat16":
        return kind
    raise InvalidInputError(
        f"Values of {kind} cannot be summed over ranks: cast them to a number first, such as int64."
    )


def dtype_code(dtype: np.dtype[Any]) -> tuple[int, int]:
    """Return a dtype's name as two 64-bit words, which ``dtype_name`` reads.

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
    """Return the parts of a vector, each but the last of the same length.

    Example:
        >>> blocks(5, 2)
        [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    return [slice(at, min(at + step, count)) for at in range(0, count, step)]


def read_only(buffer: Array) -> Array:
    """Return a view through which nothing is written."""
    view = buffer.view()
    view.flags.writeable = False
    return view


def add_in_order(inputs: list[Array], out: Array) -> None:
    """Sum arrays in the order of the ranks, so that the bits do not depend on who sums; overflow is silent.

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
        for more in inputs[2:]:
            np.add(out, more, out=out)


def mean_of(x: Array, size: int, total: Callable[[Array], Array]) -> Array:
    """Divide a sum over ranks, in a type wide enough: float64 for whole numbers, float32 for float16."""
    kind = numeric(x.dtype)
    if kind.kind in "iu":
        return np.asarray(total(x.astype(np.float64)) / size)
    if kind == np.float16:
        return np.asarray(total(x.astype(np.float32)) / np.float32(size)).astype(kind)
    return np.asarray(total(x) / kind.type(size)).astype(kind, copy=False)
