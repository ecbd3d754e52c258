"""Text and ragged inputs of TensorFlow: from encoded rows to what Keras takes."""

from __future__ import annotations

import importlib
from typing import Any

import keras
import numpy as np

from choros.data.encoded_rows import is_encoded, is_ragged


def as_keras_input(leaf: object) -> Any:
    """Return text and ragged rows as a tensor of TensorFlow; any other leaf of a batch as it is.

    Args:
        leaf: An array or tensor of a batch, or None.
    """
    if not isinstance(leaf, np.ndarray) or not is_encoded(leaf):
        return leaf
    return importlib.import_module("choros.backends.tensorflow").to_tensor(leaf)


def symbol(leaf: object, rows: int) -> Any:
    """Return a ``KerasTensor`` for ``rows`` rows of an input."""
    tensor = as_keras_input(leaf)
    dtype = keras.backend.standardize_dtype(tensor.dtype)
    ragged = isinstance(leaf, np.ndarray) and is_ragged(leaf)
    return keras.KerasTensor((rows, *tensor.shape[1:]), dtype, ragged=ragged)
