"""The smallest script: a straight line through noisy points, by all ranks together.

    choros run -n 2 examples/hvd_linear_regression.py

Every rank makes points of its own, and all end with the same line: the weights that the ranks print are equal, though
none of them has seen the others' points. Also runs alone: ``python examples/hvd_linear_regression.py``.
"""

import argparse

import arguments
import keras
import numpy as np

import choros.hvd as hvd

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--points", type=arguments.count, default=1024, help="points of each rank")
parser.add_argument("--epochs", type=arguments.count, default=10)
parser.add_argument("--batch-size", type=arguments.count, default=32, help="of each rank")
options = parser.parse_args()

hvd.init()

rng = np.random.default_rng(hvd.rank())
x = rng.uniform(-1, 1, (options.points, 1)).astype("float32")
y = 3 * x + 2 + rng.normal(0, 0.1, x.shape).astype("float32")

model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.02 * hvd.size())), "mse")
model.fit(
    x,
    y,
    batch_size=options.batch_size,
    epochs=options.epochs,
    verbose=2 if hvd.rank() == 0 else 0,
    callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()],
)

(slope,), (offset,) = (np.ravel(w) for w in model.get_weights())
print(f"rank {hvd.rank()} of {hvd.size()}: y = {slope:.6f} x + {offset:.6f}")
