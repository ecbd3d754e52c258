"""
Time in exchanges against the window
====================================

With a longer window workers exchange less often. ``history.run.exchanging`` is the share of the training time that
workers spend in exchanges; the waits for other workers are part of it.
"""

import choros  # before Keras
import keras
import matplotlib.pyplot as plt
from sklearn.datasets import load_digits

x, y = load_digits(return_X_y=True)
x, y = (x / 16).astype("float32"), y.astype("int32")
windows, shares, losses = [1, 4, 16, 64], [], []
for window in windows:
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(256, "relu"), keras.layers.Dense(10, "softmax")])
    model.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy")
    trainer = choros.Trainer(model, choros.LocalSGD(window=window), workers=2)
    history = trainer.fit(x, y, batch_size=32, epochs=4, seed=0, verbose=0)
    shares.append(history.run.exchanging)
    losses.append(history.history["loss"][-1])

# %%
# The loss after the same number of epochs shows what a longer window costs.

figure, (time, loss) = plt.subplots(1, 2, figsize=(6.4, 3), layout="constrained")
places = range(len(windows))
time.bar(places, [100 * share for share in shares])
time.set(xticks=places, xticklabels=windows, xlabel="window", ylabel="% of the time in exchanges")
loss.bar(places, losses, color="C1")
loss.set(xticks=places, xticklabels=windows, xlabel="window", ylabel="loss of the last epoch")
plt.show()
