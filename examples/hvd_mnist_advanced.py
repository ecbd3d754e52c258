"""Handwritten digits with augmented images, warm-up and decay of the learning rate, and decisions by all ranks.

    choros run -n 2 examples/hvd_mnist_advanced.py
    choros run -n 4 examples/hvd_mnist_advanced.py --data mnist.npz --epochs 24 --warmup-epochs 5 --batch-size 128

A custom data set around ``hvd.shard`` shifts the images, and a Keras layer adds noise; each rank draws other random
numbers. During warm-up the learning rate rises from that of one rank to that of all ranks. After two thirds of the
epochs it falls to a tenth. EarlyStopping gets the same metrics on all ranks, so all stop in the same epoch.
"""

import argparse

import arguments
import images
import keras
import numpy as np

import choros.hvd as hvd


class Shifted(keras.utils.PyDataset):
    """Another data set's batches, with each image moved by up to two pixels."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.rng = inner, np.random.default_rng(hvd.rank())

    def __len__(self):
        return len(self.inner)

    def __getitem__(self, index):
        x, y = self.inner[index]
        for image, shift in zip(x, self.rng.integers(-2, 3, (len(x), 2)), strict=True):
            image[:] = np.roll(image, shift, axis=(0, 1))
        return x, y

    def on_epoch_end(self):
        self.inner.on_epoch_end()


parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--data", type=arguments.file, help="an .npz file of MNIST: see examples/images.py")
parser.add_argument("--epochs", type=arguments.count, default=6)
parser.add_argument("--warmup-epochs", type=arguments.whole, default=2)
parser.add_argument("--batch-size", type=arguments.count, default=32, help="of each rank")
parser.add_argument("--rate", type=arguments.positive, default=0.02, help="learning rate of one rank alone")
parser.add_argument("--filters", type=arguments.count, default=16)
options = parser.parse_args()

hvd.init()
keras.utils.set_random_seed(hvd.rank())  # ranks begin with weights of their own; the broadcast makes them equal

(x, y), (x_test, y_test) = images.load(options.data)
layers = keras.layers
model = keras.Sequential(
    [
        keras.Input(x.shape[1:]),
        layers.GaussianNoise(0.1),
        layers.Conv2D(options.filters, 3, activation="relu"),
        layers.Conv2D(2 * options.filters, 3, strides=2, activation="relu"),
        layers.MaxPooling2D(),
        layers.Flatten(),
        layers.Dense(8 * options.filters, "relu"),
        layers.Dropout(0.25),
        layers.Dense(10, "softmax"),
    ]
)
rate = options.rate * hvd.size()
optimizer = keras.optimizers.SGD(rate, momentum=0.9)
model.compile(hvd.DistributedOptimizer(optimizer), "sparse_categorical_crossentropy", metrics=["accuracy"])

callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),  # before what decides from the metrics
    hvd.callbacks.LearningRateWarmupCallback(rate, warmup_epochs=options.warmup_epochs, verbose=1),
    hvd.callbacks.LearningRateScheduleCallback(rate, lambda epoch: 0.1, start_epoch=2 * options.epochs // 3),
    keras.callbacks.EarlyStopping("val_loss", patience=4, restore_best_weights=True),
]
history = model.fit(
    Shifted(hvd.shard(x, y, per_rank_batch_size=options.batch_size)),
    shuffle=False,  # hvd.shard does, alike on all ranks
    epochs=options.epochs,
    verbose=2 if hvd.rank() == 0 else 0,
    callbacks=callbacks,
    validation_data=hvd.shard(x_test, y_test, per_rank_batch_size=options.batch_size, training=False),
).history

rates = ", ".join(f"{one:.4f}" for one in history["lr"])
print(f"rank {hvd.rank()} of {hvd.size()}: rates {rates}; accuracy {max(history['val_accuracy']):.3f}")
