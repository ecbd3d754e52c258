"""Checks of data before any worker starts. Each error message is one sentence with a remedy."""

from __future__ import annotations

import math
import numbers
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np

from choros.data.conversion import as_arrays, brings_targets, is_py_dataset
from choros.data.tree import is_nested, leaves, map_leaves, same_shape
from choros.errors import InvalidDataError, counted, named_type
from choros.types import ArrayTree

if TYPE_CHECKING:
    from choros.data import Source


def check(
    x: ArrayTree,
    y: ArrayTree = None,
    sample_weight: ArrayTree = None,
    *,
    batch_size: object = 32,
    steps: object = None,
    validation_split: float = 0.0,
) -> None:
    """Refuse data that cannot be trained; ``x`` is nested arrays, a ``keras.utils.PyDataset`` or ``choros.files``.

    Raises:
        InvalidDataError: The data or an argument is invalid. The message contains a remedy.

    Example:
        >>> import numpy as np
        >>> check(np.zeros((5, 2)), np.zeros(4), batch_size=2)
        Traceback (most recent call last):
            ...
        choros.errors.InvalidDataError: x has 5 rows and y has 4: give arrays with the same number of rows.
    """
    check_batch(batch_size)
    if steps is not None and not is_whole(steps, 1):
        raise InvalidDataError(f"steps_per_epoch={steps!r}: give a whole number of global batches, 1 or more, or None.")
    _check_fraction(validation_split)
    if brings_targets(x):
        check_alone_in_call(x, y, sample_weight)
        if validation_split:
            raise InvalidDataError(_no_split(x))
    else:
        check_arrays(as_arrays(x, "x"), as_arrays(y, "y"), as_arrays(sample_weight, "sample_weight"))


def check_batch(batch_size: object) -> None:
    """Refuse an invalid size of a global batch.

    Raises:
        InvalidDataError: The size is not a whole number, or below 1.
    """
    if not is_whole(batch_size, 1):
        raise InvalidDataError(f"batch_size={batch_size!r}: give a whole number of rows, 1 or more.")


def check_floatx(floatx: object) -> str:
    """Return the dtype of floats; refuse other values than ``keras.config.floatx`` may have.

    Raises:
        InvalidDataError: The value is not a dtype of floats.
    """
    if isinstance(floatx, str) and floatx in ("float16", "bfloat16", "float32", "float64"):
        return floatx
    raise InvalidDataError(f"floatx={floatx!r}: give 'float16', 'bfloat16', 'float32' or 'float64'.")


def check_shuffle(shuffle: object, source: Source) -> bool | str:
    """Return ``shuffle`` of ``fit`` as a bool, or "batch" for arrays. For batches, "batch" counts as True.

    Raises:
        InvalidDataError: The value is invalid, or "batch" for files or rows of Spark.
    """
    if not isinstance(shuffle, str):
        if not isinstance(shuffle, bool | numbers.Integral | np.bool_ | None):
            raise InvalidDataError(f"shuffle={shuffle!r}: give True, False or 'batch'.")
        return bool(shuffle)
    if shuffle != "batch":
        raise InvalidDataError(f"shuffle={shuffle!r}: give True, False or 'batch'.")
    inner = getattr(source, "inner", source)
    if hasattr(inner, "x"):  # arrays
        return shuffle
    if hasattr(inner, "dataset") or hasattr(inner, "stream"):  # batches are never divided for shuffling
        return True
    raise InvalidDataError("shuffle='batch' is for arrays: choros.files and rows of Spark have True or False.")


def check_members(source: Source, members: int) -> None:
    """Refuse data that cannot be divided among the members of an ensemble.

    Raises:
        InvalidDataError: There are fewer rows, batches of a PyDataset or blocks of files than members; or the data is
            a stream.
    """
    count, description = (source.steps(1), "batches") if source.rows is None else (source.rows, "rows")
    if count is not None and count < members:
        raise InvalidDataError(
            f"{count} {description} cannot be divided among {members} members: give more {description} or fewer "
            "workers."
        )
    if not hasattr(source, "x"):  # not for arrays, whose parts are copies
        source.part(0, members, seed=0)


def check_arrays(x: ArrayTree, y: ArrayTree, sample_weight: ArrayTree) -> int:
    """Refuse numpy arrays that do not fit together; return their number of rows.

    Raises:
        InvalidDataError: The arrays have different numbers of rows or none, or weights do not fit ``y``.
    """
    parts = [*leaves(x, "x"), *leaves(y, "y"), *leaves(sample_weight, "sample_weight")]
    if not list(leaves(x)):
        raise InvalidDataError("x holds no array: give at least one.")
    first, rows = parts[0][0], len(parts[0][1])
    for name, array in parts:
        if len(array) != rows:
            raise InvalidDataError(
                f"{first} has {counted(rows, 'row')} and {name} has {len(array)}: give arrays with the same number of "
                "rows."
            )
    if rows == 0:
        raise InvalidDataError(f"{first} has no rows: give at least one.")
    if sample_weight is not None:
        _check_weights(y, sample_weight)
    return rows


def split(
    x: ArrayTree, y: ArrayTree, sample_weight: ArrayTree, fraction: float
) -> tuple[tuple[ArrayTree, ArrayTree, ArrayTree], tuple[ArrayTree, ArrayTree, ArrayTree]]:
    """Split the last rows off for validation, as Keras' ``validation_split`` does.

    The first ``floor(rows * (1 - fraction))`` rows are for training. The split precedes any shuffling.

    Returns:
        ``(x, y, sample_weight)`` for training and for validation: views, not copies.

    Raises:
        InvalidDataError: The fraction is outside [0, 1), or a part would have no rows; or the data are not arrays.

    Example:
        >>> import numpy as np
        >>> train, valid = split(np.arange(10), np.arange(10), None, 0.25)
        >>> train[0], valid[0]
        (array([0, 1, 2, 3, 4, 5, 6]), array([7, 8, 9]))
    """
    _check_fraction(fraction)
    if brings_targets(x):
        raise InvalidDataError(_no_split(x))
    data = (as_arrays(x, "x"), as_arrays(y, "y"), as_arrays(sample_weight, "sample_weight"))
    rows = check_arrays(*data)
    cut = math.floor(rows * (1.0 - fraction))
    if cut in (0, rows):
        raise InvalidDataError(
            f"validation_split={fraction} of {counted(rows, 'row')} leaves {'training' if cut == 0 else 'validation'} "
            "without any: give more rows or another fraction."
        )
    train, valid = map_leaves(lambda a: a[:cut], data), map_leaves(lambda a: a[cut:], data)
    return (train[0], train[1], train[2]), (valid[0], valid[1], valid[2])


def unpack(validation_data: ArrayTree) -> tuple[ArrayTree, ArrayTree, ArrayTree]:
    """Return ``validation_data`` as ``(x, y, sample_weight)``.

    It is a tuple of one to three parts, or data that includes y, such as a ``keras.utils.PyDataset``.

    Raises:
        InvalidDataError: The value is neither.

    Example:
        >>> unpack(("x", "y"))
        ('x', 'y', None)
    """
    if brings_targets(validation_data):
        return validation_data, None, None
    if not isinstance(validation_data, tuple | list) or not 1 <= len(validation_data) <= 3:
        description = type(validation_data).__name__
        if isinstance(validation_data, tuple | list):
            description += f", of length {len(validation_data)}"
        raise InvalidDataError(
            f"validation_data is of type {description}: give (x, y), (x, y, sample_weight) or a keras.utils.PyDataset."
        )
    padded = (*validation_data, None, None)
    return padded[0], padded[1], padded[2]


def is_whole(value: object, least: int) -> TypeGuard[int]:
    """Return whether a value is an integer of any library and at least ``least``. Bools do not count."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool) and int(value) >= least


def _check_fraction(fraction: object) -> None:
    if isinstance(fraction, bool) or not isinstance(fraction, numbers.Real) or not 0.0 <= float(fraction) < 1.0:
        raise InvalidDataError(
            f"validation_split={fraction!r}: give a fraction of the rows, 0 or more and less than 1."
        )


def _no_split(x: ArrayTree) -> str:
    description = "PyDataset" if is_py_dataset(x) else type(x).__name__
    return f"validation_split cannot cut a {description}: give a second one as validation_data."


def check_alone_in_call(x: ArrayTree, y: ArrayTree, sample_weight: ArrayTree) -> None:
    """Refuse targets or weights beside data that includes them.

    Raises:
        InvalidDataError: y or sample_weight was given. The message names it.
    """
    for name, value in (("y", y), ("sample_weight", sample_weight)):
        if value is not None:
            advice = "let its __getitem__ return" if is_py_dataset(x) else "let it have"
            raise InvalidDataError(f"{name} was given beside {named_type(x)}: {advice} {name} instead.")


def _check_weights(y: ArrayTree, sample_weight: ArrayTree) -> None:
    if y is None:
        raise InvalidDataError(
            "sample_weight was given without y, and Keras would not use it: give y, or leave it out."
        )
    if is_nested(sample_weight):
        if not is_nested(y) or not same_shape(y, sample_weight):
            raise InvalidDataError(
                "sample_weight is nested differently from y: give one array for each array of y, or one for all."
            )
        pairs = zip(_flat(y), _flat(sample_weight), strict=True)
    else:
        if is_nested(y) and any(length != 1 for length in sample_weight.shape[1:]):
            raise InvalidDataError(
                f"sample_weight of shape {sample_weight.shape} cannot be used for several outputs: give one number "
                "for each row, or one array for each output."
            )
        pairs = zip(_flat(y), [sample_weight] * len(_flat(y)), strict=True)
    for target, weight in pairs:
        if target is None or weight is None:
            continue
        fits = all(b in (1, a) for a, b in zip(target.shape, weight.shape, strict=False))
        if not fits or any(length != 1 for length in weight.shape[target.ndim :]):
            raise InvalidDataError(
                f"sample_weight of shape {weight.shape} does not go with y of shape {target.shape}: give one number "
                f"for each row, shape {target.shape[:1]}."
            )


def _flat(structure: ArrayTree) -> list[Any]:
    """Return all leaves, including None."""
    if isinstance(structure, dict):
        return [leaf for value in structure.values() for leaf in _flat(value)]
    if isinstance(structure, list | tuple):
        return [leaf for value in structure for leaf in _flat(value)]
    return [structure]
