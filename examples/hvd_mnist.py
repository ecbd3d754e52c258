"""Handwritten digits by the script of Horovod's guides, with another import.

    choros run -n 2 examples/hvd_mnist.py
    choros run -n 4 examples/hvd_mnist.py --data mnist.npz --epochs 12 --batch-size 128

The recipe: (1) init, (2) a learning rate for all ranks together, (3) the wrapped optimizer, (4) rank 0's weights to all
before the first step, (5) metrics of all ranks' data, (6) files and output from rank 0 only, (7) a part of the rows
for each rank. Without --data it trains on scikit-learn's digits, enlarged.
"""

import argparse
import pathlib
import tempfile

import arguments
import images
import keras

import choros.hvd as hvd

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--data", type=arguments.file, help="an .npz file of MNIST: see examples/images.py")
parser.add_argument("--epochs", type=arguments.count, default=4)
parser.add_argument("--batch-size", type=arguments.count, default=32, help="of each rank")
parser.add_argument("--rate", type=arguments.positive, default=1e-3, help="learning rate of one rank alone")
parser.add_argument("--filters", type=arguments.count, default=16)
parser.add_argument("--out", type=pathlib.Path, help="where rank 0 leaves its checkpoints; default: a new directory")
options = parser.parse_args()

hvd.init()  # (1)

(x, y), (x_test, y_test) = images.load(options.data)
layers = keras.layers
model = keras.Sequential(
    [
        keras.Input(x.shape[1:]),
        layers.Conv2D(options.filters, 3, activation="relu"),
        layers.Conv2D(2 * options.filters, 3, strides=2, activation="relu"),
        layers.MaxPooling2D(),
        layers.Flatten(),
        layers.Dropout(0.25),
        layers.Dense(8 * options.filters, "relu"),
        layers.Dropout(0.5),
        layers.Dense(10, "softmax"),
    ]
)
optimizer = keras.optimizers.Adam(options.rate * hvd.size())  # (2)
model.compile(hvd.DistributedOptimizer(optimizer), "sparse_categorical_crossentropy", metrics=["accuracy"])  # (3)

callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),  # (4)
    hvd.callbacks.MetricAverageCallback(),  # (5)
]
if hvd.rank() == 0:  # (6)
    out = options.out or pathlib.Path(tempfile.mkdtemp())
    callbacks.append(keras.callbacks.ModelCheckpoint(out / "checkpoint-{epoch}.keras"))

model.fit(
    hvd.shard(x, y, per_rank_batch_size=options.batch_size),  # (7)
    epochs=options.epochs,
    verbose=2 if hvd.rank() == 0 else 0,
    callbacks=callbacks,
    validation_data=hvd.shard(x_test, y_test, per_rank_batch_size=options.batch_size, training=False),
)

if hvd.rank() == 0:
    loss, accuracy = model.evaluate(x_test, y_test, verbose=0)
    print(f"accuracy {accuracy:.3f} on the {len(x_test)} images for testing; checkpoints in {out}")
