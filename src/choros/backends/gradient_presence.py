"""A mark in flat gradient vectors for variables that have no gradient. Keras' optimizers do not update these.

The mark is a negative zero as the variable's first value. The sum ``-0.0 + -0.0`` is ``-0.0``. The sum of ``-0.0`` and
another number is that number. Thus a sum over ranks has the mark exactly where every rank set it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from choros.types import Array


def leave_out(vector: Array, where: slice) -> None:
    """Mark the variable at ``where`` as one without a gradient, and set its values to 0.

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
    """Remove an accidental mark from a variable that has a gradient: ``-0.0 + 0.0`` is ``0.0``."""
    vector[where.start : min(where.start + 1, where.stop)] += 0.0


def left_out(vector: Array, slices: Sequence[slice]) -> frozenset[int]:
    """Return the indices of the marked variables."""
    value = vector.item
    zeros = (i for i, where in enumerate(slices) if where.start < where.stop and value(where.start) == 0)
    return frozenset(i for i in zeros if math.copysign(1.0, value(slices[i].start)) < 0)
