"""The smallest script: all ranks together fit a straight line to noisy points.

    choros run -n 2 examples/hvd_linear_regression.py

Each rank generates other points, and all ranks end with the same line: they print equal weights, though no rank has the
points of the others. It also runs without a launcher: ``python examples/hvd_linear_regression.py``.
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
