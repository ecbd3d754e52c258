"""Training by the ranks of a job: ``choros run -n 2 examples/ranks.py``.

Every rank runs this script. The Trainer starts no workers: its process is one rank. All ranks end with equal weights.
"""

import keras
import numpy as np

import choros
from choros.tools.demo.datasets.digits import load_digits

data = load_digits()
keras.utils.set_random_seed(0)
model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(100, "relu"), keras.layers.Dense(10, "softmax")])
model.compile(keras.optimizers.Adam(1e-3), "sparse_categorical_crossentropy", metrics=["accuracy"])
choros.Trainer(model, "allreduce").fit(data.x_train, data.y_train, epochs=3, batch_size=64, seed=0, verbose=2)

place = choros.Place.here()
total = sum(float(np.sum(w)) for w in model.get_weights())
print(f"rank {place.rank} of {place.size}: the weights sum to {total:.6f}")
