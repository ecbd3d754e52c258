"""Values of Keras variables on the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from choros.types import Array


def to_host(variables: Sequence[Any]) -> list[Array]:
    """Return copies of Keras variables or tensors as numpy arrays on the host."""
    import keras

    arrays = [np.asarray(keras.ops.convert_to_numpy(variable)) for variable in variables]
    return [array if array.flags.owndata and array.flags.writeable else np.array(array) for array in arrays]
