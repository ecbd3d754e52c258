"""Digits of 28 x 28 pixels: those of scikit-learn enlarged, or MNIST from a file."""

from __future__ import annotations

import os
import zipfile

import numpy as np

from choros.errors import InvalidDataError
from choros.tools.demo.datasets.common import Dataset, stratified
from choros.tools.demo.datasets.digits import read_digits
from choros.types import Array

SIDE = 28
_NAMES = (("x_train", "y_train"), ("x_test", "y_test"), ("x", "y"))


def load_enlarged_digits(seed: int = 0) -> Dataset:
    """Return scikit-learn's 1,797 digits, enlarged from 8 x 8 to 28 x 28 pixels; 1,280 are for training.

    These are 20 batches of 64 rows: a shorter last batch would have to be compiled too.

    Args:
        seed: Seed of the split. Defaults to 0.

    Raises:
        InvalidDataError: scikit-learn is not installed. The message names the extra that installs it.

    Example:
        >>> digits = load_enlarged_digits()
        >>> digits.x_train.shape, digits.x_test.shape
        ((1280, 28, 28, 1), (517, 28, 28, 1))
    """
    bunch = read_digits()
    images = enlarge(np.asarray(bunch.images, np.float32) / np.float32(16), SIDE)
    y = np.asarray(bunch.target, np.int32)
    train, test = stratified(y, 0.712, seed)
    return _dataset("digits", images[train], y[train], images[test], y[test])


def load_mnist(path: str | os.PathLike[str], seed: int = 0) -> Dataset:
    """Read MNIST from an ``.npz`` file: ``x_train, y_train, x_test, y_test`` as Keras' file has, or ``x, y``.

    Args:
        path: The file. Images are integers of 0 to 255, shape (rows, 28, 28).
        seed: Seed of the split, if the file has only ``x`` and ``y``; then 70 % are for training. Defaults to 0.

    Raises:
        InvalidDataError: The file is missing or damaged, or an array is missing or has another shape.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for pair in _NAMES for name in pair if name in file}
    except FileNotFoundError as error:
        raise InvalidDataError(f"{path} does not exist: give the path of mnist.npz.") from error
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, AttributeError, TypeError) as error:
        raise InvalidDataError(f"{path} cannot be read as an .npz file ({error}): fetch it again.") from error
    if {"x_train", "y_train", "x_test", "y_test"} <= arrays.keys():
        parts = [_checked(path, arrays, *pair) for pair in _NAMES[:2]]
    elif {"x", "y"} <= arrays.keys():
        x, y = _checked(path, arrays, "x", "y")
        parts = [(x[rows], y[rows]) for rows in stratified(y, 0.7, seed)]
    else:
        raise InvalidDataError(f"{path} lacks arrays: give a file with x_train, y_train, x_test, y_test, or with x, y.")
    if not all(len(y) for _, y in parts):
        raise InvalidDataError(f"{path} has too few rows to train and to test: give the whole file.")
    return _dataset("mnist", *parts[0], *parts[1])


def enlarge(images: Array, side: int) -> Array:
    """Enlarge square images by bilinear interpolation.

    Args:
        images: shape (rows, n, n).
        side: the new number of pixels of each side.

    Example:
        >>> enlarge(np.array([[[0.0, 1.0], [0.0, 1.0]]]), 4)[0, 0].tolist()
        [0.0, 0.25, 0.75, 1.0]
    """
    size = images.shape[1]
    places = np.clip((np.arange(side) + 0.5) * size / side - 0.5, 0, size - 1)
    low = np.minimum(places.astype(int), max(size - 2, 0))
    high = np.minimum(low + 1, size - 1)
    share = (places - low).astype(images.dtype)
    rows = images[:, low] * (1 - share)[:, None] + images[:, high] * share[:, None]
    enlarged: Array = rows[:, :, low] * (1 - share) + rows[:, :, high] * share
    return enlarged


def _checked(path: str | os.PathLike[str], arrays: dict[str, Array], x_name: str, y_name: str) -> tuple[Array, Array]:
    """Return images in [0, 1] and labels; raise InvalidDataError if they are not MNIST's."""
    x, y = arrays[x_name], arrays[y_name]
    if x.shape != (len(y), SIDE, SIDE) or x.dtype.kind not in "iu":
        raise InvalidDataError(
            f"{path}: {x_name} has shape {x.shape} and type {x.dtype}, {y_name} shape {y.shape}: give integer images "
            f"of shape (rows, {SIDE}, {SIDE}) and a label for each."
        )
    if y.ndim != 1 or y.dtype.kind not in "iu" or (len(y) and not 0 <= y.min() <= y.max() <= 9):
        raise InvalidDataError(f"{path}: {y_name} must hold integers of 0 to 9.")
    return x.astype(np.float32) / np.float32(255), y.astype(np.int32)


def _dataset(name: str, x_train: Array, y_train: Array, x_test: Array, y_test: Array) -> Dataset:
    pixels = tuple(f"pixel_{row}_{column}" for row in range(SIDE) for column in range(SIDE))
    return Dataset(name, x_train[..., None], y_train, x_test[..., None], y_test, 10, pixels)
