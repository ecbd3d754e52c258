"""Division of a vector into blocks that fit a core's cache, which halves the memory traffic of NumPy expressions."""

from __future__ import annotations

from choros.algorithms import Algorithm
from choros.comm import dtypes

BLOCK = 1 << 16


def blocks(algorithm: Algorithm, size: int) -> list[slice]:
    """Return slices of a vector that an algorithm may process one at a time.

    Args:
        algorithm: Algorithm. If it is not elementwise, there is one slice, the whole vector.
        size: int. The vector's length.

    Example:
        >>> from choros.algorithms import ADAG, DiLoCo
        >>> blocks(DiLoCo(), 70_000)
        [slice(0, 65536, None), slice(65536, 70000, None)]
        >>> blocks(ADAG(), 70_000)
        [slice(0, 70000, None)]
    """
    if not algorithm.elementwise:
        return [slice(0, size)]
    return dtypes.blocks(size, BLOCK)
