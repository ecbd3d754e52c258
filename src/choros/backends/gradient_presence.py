"""A mark in flat vectors of gradients for variables that have none, as Keras' optimizers leave those as they are.

The mark is the sign of a zero: ``-0.0 + -0.0`` is ``-0.0``, and with any other number the sum is that number. So a sum
over ranks has the mark where every rank set it, and nowhere else.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from choros.types import Array


def leave_out(vector: Array, where: slice) -> None:
    """Mark the variable that lies there as one without a gradient; its values are set to 0.

    Example:
        >>> import numpy as np
        >>> vector, slices = np.ones(3, np.float32), [slice(0, 1), slice(1, 3)]
        >>> leave_out(vector, slices[1])
        >>> sorted(left_out(vector + vector, slices)), sorted(left_out(vector + np.zeros(3, np.float32), slices))
        ([1], [])
    """
    vector[where] = 0
    vector[where.start : min(where.start + 1, where.stop)] = -0.0


def keep(vector: Array, where: slice) -> None:
    """Take the mark, if there is one, from a variable that has a gradient."""
    vector[where.start : min(where.start + 1, where.stop)] += 0.0


def left_out(vector: Array, slices: Sequence[slice]) -> frozenset[int]:
    """Return the places of the variables that are marked."""
    value = vector.item
    zeros = (i for i, where in enumerate(slices) if where.start < where.stop and value(where.start) == 0)
    return frozenset(i for i in zeros if math.copysign(1.0, value(slices[i].start)) < 0)
