"""
Loss against seconds
====================

The losses of a run, with the seconds at which its epochs ended, are in ``history.run.losses``. They show which
algorithm gets to a loss first. The number of epochs does not show this.
"""

import choros  # before Keras
import keras
import matplotlib.pyplot as plt
from sklearn.datasets import load_digits

x, y = load_digits(return_X_y=True)
x, y = (x / 16).astype("float32"), y.astype("int32")
runs = {}
for algorithm in (choros.AllReduce(), choros.LocalSGD(window=8), choros.AEASGD(window=8)):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(256, "relu"), keras.layers.Dense(10, "softmax")])
    model.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy")
    history = choros.Trainer(model, algorithm, workers=2).fit(x, y, batch_size=32, epochs=8, seed=0, verbose=0)
    runs[type(algorithm).__name__] = history.run

# %%
# The seconds are those of training, without the start of the workers. The first epoch compiles the steps.

figure, axes = plt.subplots(figsize=(6, 3.2), layout="constrained")
for (name, run), marker in zip(runs.items(), "os^", strict=True):
    axes.plot([loss[0] for loss in run.losses], [loss[2] for loss in run.losses], marker=marker, label=name)
axes.set(xlabel="seconds of training", ylabel="loss", yscale="log")
axes.legend(frameon=False)
plt.show()

# %%
# ``history.run.plot()`` draws the loss of one run, the workers' speed, and the shares of their time.
