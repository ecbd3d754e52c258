"""A vector in blocks that stay in the cache: naive numpy over the whole one costs twice the bytes."""

from __future__ import annotations

from choros.algorithms import Algorithm
from choros.transport import values

BLOCK = 1 << 16


def blocks(algorithm: Algorithm, size: int) -> list[slice]:
    """Return the parts of a vector to which an algorithm may be applied one after the other.

    Args:
        algorithm: Algorithm. Where it is not elementwise there is one part, the whole.
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
    return values.blocks(size, BLOCK)
