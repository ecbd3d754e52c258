"""Groups of a model's variables: large frozen weights, moving statistics, and the dtype of vectors."""

from __future__ import annotations

import math
from typing import Any

import keras
import numpy as np

from choros.backends.optimizers import held_variables

_LARGE = 1 << 18  # least number of values of a large variable


def vector_dtype(trainable: list[Any]) -> np.dtype[Any]:
    """Return the dtype of flat vectors: float64 if any trainable variable has it, else float32."""
    wide = any(keras.backend.standardize_dtype(v.dtype) == "float64" for v in trainable)
    return np.dtype(np.float64 if wide else np.float32)


def large_frozen(model: keras.Model) -> list[Any]:
    """Return large non-trainable variables (2^18 values or more), such as frozen or quantized weights.

    The variables of other optimizers of the model are not included.
    """
    excluded = {id(v) for v in held_variables(model)}
    return [v for v in model.non_trainable_variables if id(v) not in excluded and math.prod(v.shape) >= _LARGE]


def moving_statistics(model: keras.Model) -> list[Any]:
    """Return the float variables that layers created as non-trainable, such as those of BatchNormalization.

    Weights that a user froze are not included. Variables of a second optimizer are not either, although the model may
    list them: each worker keeps the slots of that optimizer.
    """
    frozen = {id(v) for layer in model._flatten_layers() for v in layer._trainable_variables}
    frozen |= {id(v) for v in held_variables(model)}
    return [
        v
        for v in model.non_trainable_weights
        if id(v) not in frozen and keras.backend.is_float_dtype(keras.backend.standardize_dtype(v.dtype))
    ]
