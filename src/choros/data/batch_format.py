"""Conversion of the batches of a data set to nested numpy arrays of x, y and weights."""

from __future__ import annotations

from collections.abc import Mapping

from choros.data.class_weights import with_class_weight
from choros.data.conversion import as_arrays, is_row, is_special, to_floatx
from choros.data.encoded_rows import decoded
from choros.data.tree import is_nested, map_leaves
from choros.data.validation import check_arrays
from choros.errors import InvalidDataError
from choros.types import ArrayTree, Batch


def standard(
    batch: ArrayTree, name: str, remedy: str, class_weight: Mapping[int, float] | None, floatx: str
) -> tuple[ArrayTree, ArrayTree, ArrayTree, int]:
    """Return ``(x, y, sample_weight, rows)`` of one batch.

    Args:
        batch: ``(x,)``, ``(x, y)``, ``(x, y, sample_weight)``, an array or a dict; tensors of any library.
        name: name of the batch in error messages.
        remedy: advice in the error message for a batch of another type.
        class_weight: a dict from class index to weight, or None.
        floatx: dtype to which floats are converted.

    Raises:
        InvalidDataError: the batch is malformed.

    Example:
        >>> import numpy as np
        >>> standard((np.zeros((2, 3)), np.zeros(2)), "a batch", "give (x, y)", None, "float32")[3]
        2
    """
    if isinstance(batch, list):
        batch = tuple(batch)
    if isinstance(batch, dict) or hasattr(batch, "__array__") or is_special(batch):
        batch = (batch,)
    if not isinstance(batch, tuple) or not 1 <= len(batch) <= 3:
        raise InvalidDataError(f"{name} is of type {type(batch).__name__}: {remedy}.")
    if is_row(batch):
        raise InvalidDataError(
            f"{name} has a single number or text where an array of all its rows is expected: batch rows first, as by "
            ".batch(32) of tf.data, Grain and Hugging Face datasets, or by a PyTorch DataLoader."
        )
    x, y, weight = (*batch, None, None)[:3]
    x, y = map_leaves(decoded, as_arrays(x, f"x of {name}")), as_arrays(y, f"y of {name}")
    weight = as_arrays(weight, f"sample_weight of {name}")
    if class_weight is not None:
        weight = with_class_weight(y, weight, class_weight, floatx)
    try:
        rows = check_arrays(x, y, weight)
    except InvalidDataError as error:
        raise InvalidDataError(f"In {name}: {error}") from None
    if is_nested(y) and weight is not None and not is_nested(weight):
        leaf = weight
        weight = map_leaves(lambda _: leaf, y)
    x, y, weight = to_floatx((x, y, weight), floatx)
    return x, y, weight, rows


def cut(x: ArrayTree, y: ArrayTree, weight: ArrayTree, total: int, bounds: slice) -> Batch:
    """Return one rank's rows, the slice ``bounds``, of a global batch of ``total`` rows."""
    rows = bounds.stop - bounds.start
    if rows == 0:
        return Batch(None, None, None, rows=0, total=total)
    x, y, weight = (map_leaves(lambda a: a[bounds], part) for part in (x, y, weight))
    return Batch(x, y, weight, rows=rows, total=total)
