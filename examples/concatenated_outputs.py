"""Concatenated outputs instead of averaged gradients: a question of keras_experiments, answered by figures.

    KERAS_BACKEND=torch python examples/concatenated_outputs.py [ROWS FIRST]

keras_experiments' ``make_parallel`` gave each device a part of the batch, concatenated the outputs, and computed one
loss of them. It averaged no gradients, and its README asked if this hurts. It does not: the loss of the concatenated
outputs is the loss of the whole batch, so its gradient is the gradient of one device. An average of the parts'
gradients is equal to it only if each part is weighted by its rows. A layer that computes statistics of its part, such
as BatchNormalization, does change the result: the more rows a part has, the smaller is the change.

Each claim is checked below, with 7 rows on 2 devices: parts of 4 and of 3 rows. Other numbers are ROWS and FIRST, the
rows of the first part. With equal parts the average without weights is right too.
"""

import sys

import keras
import numpy as np

from choros.parallel import logical_devices, make_parallel

ROWS, FIRST = map(int, sys.argv[1:] or (7, 4))
EQUAL = 1e-6  # largest difference of equal gradients
if not 0 < FIRST < ROWS:
    raise SystemExit(f"The first part has {FIRST} of {ROWS} rows: give each part at least one row.")


def network(normalized=False):
    """Return a small network with fixed weights."""
    keras.utils.set_random_seed(7)
    middle = [keras.layers.BatchNormalization()] if normalized else []
    hidden, outputs = keras.layers.Dense(16, activation="tanh"), keras.layers.Dense(3, activation="softmax")
    return keras.Sequential([keras.Input((5,)), hidden, *middle, outputs])


class Concatenated(keras.Model):
    """A model that calls the serial model for each part of the rows and concatenates the outputs."""

    def __init__(self, serial):
        super().__init__()
        self.serial = serial

    def call(self, rows, training=None):
        parts = keras.ops.split(rows, [FIRST], axis=0)
        return keras.ops.concatenate([self.serial(part, training=training) for part in parts], axis=0)


def gradient(model, x, y):
    """Return the gradient of the loss as one vector: what a step of SGD with the rate 1 subtracts."""
    before = [variable.numpy() for variable in model.trainable_variables]
    model.compile(keras.optimizers.SGD(1.0), "categorical_crossentropy")
    model.train_on_batch(x, y)
    after = [variable.numpy() for variable in model.trainable_variables]
    return np.concatenate([(old - new).ravel() for old, new in zip(before, after, strict=True)])


def parallel_gradient(serial, x, y):
    """Return the gradient over two devices by Choros, which adds the gradients of the parts, weighted by rows."""
    return gradient(make_parallel(serial, ["cpu:0", "cpu:1"]), x, y)


def compare(what, found, expected, must_be_equal=True):
    """Print the largest difference of two gradients; end with an error where they must be equal and are not."""
    difference = float(np.abs(found - expected).max())
    print(f"{what}: largest difference {difference:.1e}, {'equal' if difference <= EQUAL else 'not equal'}")
    if must_be_equal and difference > EQUAL:
        raise SystemExit(f"{what}: a difference of at most {EQUAL} is expected.")


logical_devices(2)  # two devices also where there is one CPU
rng = np.random.default_rng(1)
x = rng.normal(size=(ROWS, 5)).astype("float32")
y = np.eye(3, dtype="float32")[rng.integers(0, 3, ROWS)]

whole = gradient(network(), x, y)
parts = [gradient(network(), x[:FIRST], y[:FIRST]), gradient(network(), x[FIRST:], y[FIRST:])]
compare("concatenated outputs", gradient(Concatenated(network()), x, y), whole)
compare("gradients added, weighted by rows", np.average(parts, axis=0, weights=[FIRST, ROWS - FIRST]), whole)
compare("choros.parallel over 2 devices", parallel_gradient(network(), x, y), whole)
compare("gradients averaged without weights", np.mean(parts, axis=0), whole, must_be_equal=2 * FIRST == ROWS)

normalized = gradient(network(normalized=True), x, y)
split = gradient(Concatenated(network(normalized=True)), x, y)
compare("concatenated outputs, BatchNormalization of each part", split, normalized, must_be_equal=False)
