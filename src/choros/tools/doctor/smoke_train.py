"""A small training whose result must equal that of numpy: ``python -m choros.tools.doctor.smoke_train``.

It runs in a helper process of each rank. The helper processes of one machine form a job that communicates by shared
memory, as under ``choros run``.
"""

from __future__ import annotations

import json
import sys

import numpy as np

from choros.cluster.hardware import peak_memory
from choros.types import Array

_RATE, _EPOCHS, _ROWS = 0.1, 3, 24


def data() -> tuple[Array, Array]:
    """Return the rows for training: x of shape (24, 3) and y of shape (24, 1), float32, equal on every rank.

    Example:
        >>> data()[0].shape
        (24, 3)
    """
    rng = np.random.default_rng(7)
    x = rng.normal(size=(_ROWS, 3)).astype("float32")
    return x, (x @ np.array([[1.0], [-2.0], [0.5]]) + 0.25).astype("float32")


def by_numpy() -> Array:
    """Return the weights and the bias after the training, computed by numpy.

    Example:
        >>> by_numpy().shape
        (4,)
    """
    x, y = (array.astype("float64") for array in data())
    weights, bias = np.zeros((3, 1)), np.zeros(1)
    for _ in range(_EPOCHS):
        error = 2 * (x @ weights + bias - y) / len(x)
        weights, bias = weights - _RATE * (x.T @ error), bias - _RATE * error.sum(axis=0)
    return np.concatenate([weights.ravel(), bias])


def by_keras() -> Array:
    """Return the same, computed by Keras on all ranks of the job, each with its share of the rows."""
    import keras

    import choros.hvd as hvd

    hvd.init()
    x, y = data()
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, kernel_initializer="zeros")])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(_RATE)), "mse")
    shard = hvd.shard(x, y, per_rank_batch_size=_ROWS)
    model.fit(shard, epochs=_EPOCHS, verbose=0)  # pyright: ignore[reportArgumentType] - annotated by its default
    weights: Array = np.concatenate([np.asarray(array, "float64").ravel() for array in model.get_weights()])
    return weights


def main() -> int:
    """Train, and print the difference of the weights, the peak memory, and the number of GPUs of the backend.

    Returns:
        0.
    """
    difference = float(np.abs(by_keras() - by_numpy()).max())
    from choros.backends.devices import list_devices

    print(json.dumps({"difference": difference, "peak": peak_memory(), "gpus": len(list_devices("gpu"))}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
