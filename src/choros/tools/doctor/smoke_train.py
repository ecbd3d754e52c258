"""A small training that must give what numpy gives: ``python -m choros.tools.doctor.smoke_train``.

It is a process beside each rank. Its place is that of a job of this machine's ranks alone, which meet in shared memory,
as under ``choros run``.
"""

from __future__ import annotations

import json
import sys

import numpy as np

from choros.cluster.hardware import peak_memory
from choros.types import Array

_RATE, _EPOCHS, _ROWS = 0.1, 3, 24


def data() -> tuple[Array, Array]:
    """The rows that are trained on: the same on every rank.

    Example:
        >>> data()[0].shape
        (24, 3)
    """
    rng = np.random.default_rng(7)
    x = rng.normal(size=(_ROWS, 3)).astype("float32")
    return x, (x @ np.array([[1.0], [-2.0], [0.5]]) + 0.25).astype("float32")


def by_numpy() -> Array:
    """The weights and the bias after the training, computed here.

    Example:
        >>> by_numpy().shape
        (4,)
    """
    x, y = (each.astype("float64") for each in data())
    weights, bias = np.zeros((3, 1)), np.zeros(1)
    for _ in range(_EPOCHS):
        error = 2 * (x @ weights + bias - y) / len(x)
        weights, bias = weights - _RATE * (x.T @ error), bias - _RATE * error.sum(axis=0)
    return np.concatenate([weights.ravel(), bias])


def by_keras(rows: int = _ROWS) -> Array:
    """The same by Keras and all ranks of the job, each of which has its part of the rows.

    Args:
        rows: of a global batch.
    """
    import keras

    import choros.hvd as hvd

    hvd.init()
    x, y = data()
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, kernel_initializer="zeros")])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(_RATE)), "mse")
    model.fit(hvd.shard(x, y, batch_size=rows), epochs=_EPOCHS, verbose=0)
    found: Array = np.concatenate([np.asarray(one, "float64").ravel() for one in model.get_weights()])
    return found


def main() -> int:
    """Train, and print by how much the weights differ, what memory it took, and how many GPUs the backend sees.

    Returns:
        0.
    """
    difference = float(np.abs(by_keras() - by_numpy()).max())
    from choros.backends.devices import list_devices

    print(json.dumps({"difference": difference, "peak": peak_memory(), "gpus": len(list_devices("gpu"))}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
