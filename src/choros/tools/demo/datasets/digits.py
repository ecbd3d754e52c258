"""The handwritten digits of scikit-learn, a small real data set that needs no download."""

from __future__ import annotations

from typing import Any

import numpy as np

from choros.errors import InvalidDataError
from choros.tools.demo.datasets.common import Dataset, divide


def load_digits(seed: int = 0) -> Dataset:
    """Return 1,797 digits of 8 x 8 pixels, standardized with the training part; 70 % are for training.

    Source: E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI repository, 1998.

    Args:
        seed: Seed of the split. Defaults to 0.

    Returns:
        The data, with 64 features and 10 classes.

    Raises:
        InvalidDataError: scikit-learn is not installed. The message names the extra that installs it.

    Example:
        >>> digits = load_digits()
        >>> digits.x_train.shape, digits.x_test.shape, digits.classes
        ((1258, 64), (539, 64), 10)
    """
    bunch = read_digits()
    x = np.asarray(bunch.data, np.float32) / np.float32(16.0)
    features = tuple(str(name) for name in bunch.feature_names)
    return divide("digits", x, np.asarray(bunch.target), 10, features, seed)


def read_digits() -> Any:
    """Return scikit-learn's digits as its ``Bunch``, with ``data``, ``images``, ``target`` and ``feature_names``.

    Raises:
        InvalidDataError: scikit-learn is not installed. The message names the extra that installs it.
    """
    try:
        from sklearn import datasets
    except ImportError as error:
        raise InvalidDataError(
            "The digits come with scikit-learn, which is missing: pip install 'choros[demo]'."
        ) from error
    return datasets.load_digits()
