"""The common parts of the demo's data sets: the type, the fixed split, and standardised features."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from choros.data.permutation import permutation
from choros.errors import InvalidDataError
from choros.types import Array


@dataclass(frozen=True)
class Dataset:
    """A classification task, divided once and for all into a part to train on and a part left untouched.

    Attributes:
        name: str. What to call it.
        x_train, x_test: float32, (rows, features), standardised on the training part.
        y_train, y_test: int32, (rows,), class numbers.
        classes: int. How many classes there are.
        features: tuple of str. The names of the columns.
    """

    name: str
    x_train: Array
    y_train: Array
    x_test: Array
    y_test: Array
    classes: int
    features: tuple[str, ...]


def one_hot(y: Array, classes: int) -> npt.NDArray[np.float32]:
    """Class numbers as rows with a single 1.

    Example:
        >>> one_hot(np.array([0, 2]), 3).tolist()
        [[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]]
    """
    rows = np.zeros((len(y), classes), np.float32)
    rows[np.arange(len(y)), y] = 1.0
    return rows


def stratified(y: Array, fraction: float, seed: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Two lists of rows, in rising order: ``round(fraction * n)`` of each class's n rows, and the others.

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
    """Give each column of ``train`` mean 0 and deviation 1, in place, and ``test`` the same change.

    ``x <- (x - mean) / deviation``, both over the training values that are not NaN; then NaN, a missing value,
    becomes 0, which is the mean. A column of one value becomes 0.

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
    """70 % of each class to train on, 30 % untouched; float32 features, int32 classes.

    Args:
        name: What to call the data.
        x: (rows, features); NaN is a missing value.
        y: (rows,), class numbers.
        classes: How many there are.
        features: The columns' names.
        seed: Of the split.

    Raises:
        InvalidDataError: There are too few rows to leave some of them untouched.
    """
    train, test = stratified(y, 0.7, seed)
    if not len(test) or not len(train):
        raise InvalidDataError(
            f"{name} has {len(y)} rows, too few to train on 70 % and to leave 30 % untouched: give more."
        )
    x_train, x_test = x[train].astype(np.float32, copy=False), x[test].astype(np.float32, copy=False)
    standardise(x_train, x_test)
    return Dataset(
        name, x_train, y[train].astype(np.int32), x_test, y[test].astype(np.int32), classes=classes, features=features
    )
