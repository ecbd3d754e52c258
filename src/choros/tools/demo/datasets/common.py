"""Common parts of the demo's data sets: the type, the fixed split, and standardized features."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from choros.data.permutation import permutation
from choros.errors import InvalidDataError, counted
from choros.types import Array


@dataclass(frozen=True)
class Dataset:
    """A classification task with a fixed split into a training and a test part.

    Attributes:
        name: str. Name of the data.
        x_train, x_test: float32. Tables: shape (rows, features), standardized with the statistics of the training part.
            Images: shape (rows, height, width, 1), in [0, 1].
        y_train, y_test: int32, shape (rows,), class indices.
        classes: int. Number of classes.
        features: tuple of str. Names of the columns.
    """

    name: str
    x_train: Array
    y_train: Array
    x_test: Array
    y_test: Array
    classes: int
    features: tuple[str, ...]


def stratified(y: Array, fraction: float, seed: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return two sorted arrays of row indices: ``round(fraction * n)`` of the n rows of each class, and the others.

    Example:
        >>> train, test = stratified(np.array([0, 1] * 5), 0.8, seed=0)
        >>> len(train), len(test), sorted((*train.tolist(), *test.tolist())) == list(range(10))
        (8, 2, True)
    """
    chosen = np.zeros(len(y), bool)
    for i, label in enumerate(np.unique(y)):
        rows = np.flatnonzero(y == label)
        chosen[rows[permutation(len(rows), seed, i)[: round(fraction * len(rows))]]] = True
    return np.flatnonzero(chosen), np.flatnonzero(~chosen)


def standardise(train: Array, test: Array) -> None:
    """Scale each column of ``train`` in place to mean 0 and deviation 1, and ``test`` with the same numbers.

    ``x <- (x - mean) / deviation``, with mean and deviation of the training values that are not NaN. Then NaN, a
    missing value, becomes 0, which is the mean. A constant column becomes 0.

    Example:
        >>> train, test = np.array([[1.0], [3.0], [np.nan]]), np.array([[5.0]])
        >>> standardise(train, test)
        >>> train.tolist(), test.tolist()
        ([[-1.0], [1.0], [0.0]], [[3.0]])
    """
    for column in range(train.shape[1]):
        values = train[:, column].astype(np.float64)
        values = values[~np.isnan(values)]
        mean = float(values.mean()) if len(values) else 0.0
        deviation = float(values.std()) if len(values) else 1.0
        constant = not len(values) or values.min() == values.max()
        for part in (train, test):
            part[:, column] = 0.0 if constant else np.nan_to_num((part[:, column] - mean) / deviation, nan=0.0)


def divide(name: str, x: Array, y: Array, classes: int, features: tuple[str, ...], seed: int) -> Dataset:
    """Split rows into 70 % of each class for training and 30 % for testing; float32 features, int32 classes.

    Args:
        name: Name of the data.
        x: Shape (rows, features). NaN is a missing value.
        y: Class indices, shape (rows,).
        classes: Number of classes.
        features: Names of the columns.
        seed: Seed of the split.

    Raises:
        InvalidDataError: There are too few rows for both parts.
    """
    train, test = stratified(y, 0.7, seed)
    if not len(test) or not len(train):
        raise InvalidDataError(
            f"{name} has {counted(len(y), 'row')}, too few to train on 70 % and to leave 30 % untouched: give more."
        )
    x_train, x_test = x[train].astype(np.float32, copy=False), x[test].astype(np.float32, copy=False)
    standardise(x_train, x_test)
    return Dataset(
        name, x_train, y[train].astype(np.int32), x_test, y[test].astype(np.int32), classes=classes, features=features
    )
