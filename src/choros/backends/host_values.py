"""Values of Keras variables on the host."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from choros.types import Array


def host_value(value: Any) -> Array:
    """Return a Keras variable or tensor as a numpy array on the host. The array may share the tensor's memory."""
    import keras

    return np.asarray(keras.ops.convert_to_numpy(value))


def to_host(values: Iterable[Any]) -> list[Array]:
    """Return copies of Keras variables or tensors as numpy arrays on the host."""
    arrays = map(host_value, values)
    return [array if array.flags.owndata and array.flags.writeable else np.array(array) for array in arrays]
