"""
The path of the weights
=======================

Three algorithms train a linear model with two weights. A callback reads the weights after each batch. They are those of
the last exchange: for a synchronous algorithm the weights of all workers, for an asynchronous one the center.
"""

import choros  # before Keras
import keras
import matplotlib.pyplot as plt
import numpy as np

rng = np.random.default_rng(0)
x = rng.normal(size=(640, 2)).astype("float32") * np.array([1.0, 0.5], "float32")
y = x @ np.array([[2.0], [-3.0]], "float32") + rng.normal(0, 0.5, (640, 1)).astype("float32")


class Path(keras.callbacks.Callback):
    def on_train_begin(self, logs=None):
        self.points = [self.model.get_weights()[0].ravel()]

    def on_train_batch_end(self, batch, logs=None):
        self.points.append(self.model.get_weights()[0].ravel())


paths = {}
for algorithm in (choros.AllReduce(), choros.LocalSGD(window=8), choros.AEASGD(window=8)):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    path = Path()
    choros.Trainer(model, algorithm, workers=2).fit(x, y, batch_size=16, epochs=3, seed=0, verbose=0, callbacks=[path])
    paths[type(algorithm).__name__] = np.array(path.points)

# %%
# The gray lines are points of equal loss. ``LocalSGD`` and ``AEASGD`` move after each window of eight steps.

figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
first, second = np.meshgrid(np.linspace(-0.5, 3, 60), np.linspace(-4, 0.5, 60))
losses = np.mean((x @ np.stack([first.ravel(), second.ravel()]) - y) ** 2, axis=0)
axes.contour(first, second, losses.reshape(first.shape), 12, colors="0.7", linewidths=0.7)
for (name, points), marker in zip(paths.items(), "os^", strict=True):
    axes.plot(*points.T, marker=marker, markersize=3, linewidth=1, label=name)
axes.set(xlabel="first weight", ylabel="second weight")
axes.legend(frameon=False)
plt.show()
