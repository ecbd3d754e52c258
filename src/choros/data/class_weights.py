"""Conversion of class weights to sample weights, by Keras' rule."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from choros.data.conversion import as_arrays
from choros.data.tree import is_nested
from choros.data.validation import check_arrays
from choros.errors import InvalidDataError
from choros.types import Array, ArrayTree


def class_weights(y: Array, class_weight: Mapping[int, float], floatx: str = "float32") -> Array:
    """Return one weight for each row: the ``class_weight`` of its class, or 1 if the class has none.

    The class of a row is its rounded number. For one-hot rows, it is the index of the largest value. This is the rule
    of ``keras.src.trainers.data_adapters.data_adapter_utils.class_weight_to_sample_weights``.

    Args:
        y: Shape (n,), (n, 1) or one-hot (n, classes).
        class_weight: A dict from class index to weight.
        floatx: The dtype of the result; float32 for "bfloat16". Defaults to "float32".

    Returns:
        An array of shape (n,).

    Raises:
        InvalidDataError: y has more axes than one-hot classes have.

    Example:
        >>> class_weights(np.array([0, 2, 1, 0]), {0: 3.0, 1: 0.5}).tolist()
        [3.0, 1.0, 0.5, 3.0]
    """
    labels = y
    if y.ndim > 1:
        labels = y[..., 0] if y.shape[-1] == 1 else np.argmax(y, axis=-1)
    if labels.ndim != 1:
        raise InvalidDataError(
            f"class_weight needs one class for each row, and y has the shape {y.shape}: give sample_weight."
        )
    labels_present, positions = np.unique(np.round(labels).astype("int32"), return_inverse=True)
    dtype = np.dtype("float32" if floatx == "bfloat16" else floatx)
    table: Array = np.array([class_weight.get(int(label), 1.0) for label in labels_present], dtype=dtype)
    return table[positions.reshape(labels.shape)]


def check_class_weight(class_weight: object, y: ArrayTree) -> None:
    """Refuse class weights that are not a mapping from class indices to finite numbers, and several outputs.

    Raises:
        InvalidDataError: The message contains a remedy.

    Example:
        >>> check_class_weight([1.0, 2.0], None)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
            ...
        choros.errors.InvalidDataError: class_weight is of type list: give a dict of class numbers and weights, like ...
    """
    if not isinstance(class_weight, Mapping):
        raise InvalidDataError(
            f"class_weight is of type {type(class_weight).__name__}: give a dict of class numbers and weights, like "
            f"{{0: 1.0, 1: 5.0}}."
        )
    if is_nested(y):
        raise InvalidDataError(
            "class_weight works for models with a single output: give one sample_weight array for each."
        )
    for label, weight in class_weight.items():
        if not isinstance(label, int | np.integer):
            raise InvalidDataError(
                f"class_weight has the key {label!r}: name the classes by their numbers, 0, 1, 2 ..."
            )
        if not isinstance(weight, int | float | np.number) or not math.isfinite(weight):
            raise InvalidDataError(f"class_weight[{label}] is {weight!r}: give a finite number.")


def with_class_weight(y: ArrayTree, sample_weight: ArrayTree, class_weight: Any, floatx: str = "float32") -> ArrayTree:
    """Return sample weights that include class weights: the product of both, if both are given.

    Keras 3 refuses both in one call. Keras 2 used their product.

    Raises:
        InvalidDataError: See ``check_class_weight``; or there is no y.

    Example:
        >>> with_class_weight(np.array([0, 1]), np.array([2.0, 2.0]), {1: 5.0}).tolist()
        [2.0, 10.0]
    """
    check_class_weight(class_weight, y)
    if y is None:
        raise InvalidDataError("class_weight was given without y: give y, or leave it out.")
    y, row_weights = as_arrays(y, "y"), as_arrays(sample_weight, "sample_weight")
    weights = class_weights(y, class_weight, floatx)
    if row_weights is None:
        return weights
    check_arrays(y, y, row_weights)
    return weights.reshape(-1, *[1] * (row_weights.ndim - 1)) * row_weights
