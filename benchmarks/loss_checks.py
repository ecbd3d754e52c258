"""The cost of the checks that a loss is a mean over rows: before training, and in each epoch.

    python benchmarks/loss_checks.py --backend jax --seconds 20

One process trains a model with four convolutions and its own ``compute_loss`` as rank 0 of two would, without the
exchange, in rounds with and without the check of each epoch. The ratio is that of the medians of their steps per
second. ``spent`` is the share of the time that the checks took by their own clock. Prints JSON.
"""

import json
import statistics
import time
from typing import Any

from common import arguments

ROWS, BAR = 32, 0.01


def model_of(normalised: bool) -> Any:
    """Return the model."""
    import keras

    class Own(keras.Model):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):  # type: ignore[no-untyped-def]
            return keras.ops.mean(keras.ops.square(y - y_pred))

    keras.utils.set_random_seed(0)
    inputs = hidden = keras.Input((32, 32, 3))
    for filters in (16, 32, 64, 64):
        hidden = keras.layers.Conv2D(filters, 3, strides=2, padding="same", activation="relu")(hidden)
        hidden = keras.layers.BatchNormalization()(hidden) if normalised else hidden
    model = Own(inputs, keras.layers.Dense(10)(keras.layers.Flatten()(hidden)))
    model.compile("sgd")
    return model


def measure(normalised: bool, seconds: float, length: int) -> dict[str, Any]:
    """Return the figures of one model, in epochs of so many steps."""
    import numpy as np

    from choros.backends import make_replica
    from choros.backends.loss_exactness import check_exact
    from choros.backends.loss_recheck import Recheck
    from choros.types import Batch, aligned

    random = np.random.default_rng(0)
    x = random.normal(size=(ROWS, 32, 32, 3)).astype("float32")
    batch = Batch(x, random.normal(size=(ROWS, 10)).astype("float32"), None, ROWS, ROWS)
    model = model_of(normalised)
    model._symbolic_build(data_batch=(x[:2], batch.y[:2]))
    begun, processor = time.perf_counter(), time.process_time()
    check_exact(model, 2, batch)
    start = {"wall": time.perf_counter() - begun, "processor": time.process_time() - processor}
    replica = make_replica(model, 2)
    replica.build(batch)
    slot = aligned(replica.size + 2, replica.dtype)
    check = Recheck(replica, 0, 2, length)
    rates: dict[bool, list[float]] = {True: [], False: []}
    total, epoch = 0.0, 0
    while total < seconds:
        for checked in (epoch % 4 == 0, epoch % 4 != 0):
            begun = time.perf_counter()
            for _ in range(length):
                if checked:
                    check(batch, epoch)
                replica.gradients(batch, slot)
                replica.apply(slot)
            passed = time.perf_counter() - begun
            if epoch:  # the first round compiles
                rates[checked].append(length / passed)
                total += passed
        epoch += 2
    ratio = statistics.median(rates[True]) / statistics.median(rates[False])
    return {
        "normalised": normalised,
        "steps_of_an_epoch": length,
        "epochs": epoch // 2,
        "start_seconds": start,
        "checks": check.counts,
        "seconds_of_a_check": check.costs,
        "spent": check.spent / (check.seconds + check.spent),
        "ratio": ratio,
    }


def main() -> None:
    """Measure both models and print."""
    options = arguments(__doc__, seconds={"type": float, "default": 20.0}, length={"type": int, "default": 500})
    seconds, length = (1.0, 20) if options.quick else (options.seconds, options.length)
    figures = [measure(normalised, seconds, length) for normalised in (False, True)]
    print(json.dumps({"backend": options.backend, "bar": BAR, "models": figures}, indent=1))


if __name__ == "__main__":
    main()
