"""Small colour images by several workers and any algorithm, a parameter server's too, as keras_experiments had it.

    KERAS_BACKEND=torch python examples/cifar10_cnn_distrib.py --algorithm adag --workers 2 --epochs 3
    python examples/cifar10_cnn_distrib.py --data cifar10.npz --algorithm allreduce --epochs 50 --aug

No chief hands out the data: each worker has its own rows. By `downpour`, `adag`, `dynsgd`, `aeasgd` or `eamsgd` workers
meet a center each in its own time, which is what a parameter server was. Without --data the pictures are made up (see
images.py).
"""

import argparse

import images
import keras

import choros

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--data", help="an .npz file of CIFAR-10; without it pictures are made up")
parser.add_argument("--algorithm", default="aeasgd", help="one of " + ", ".join(map(str.lower, choros.algorithms())))
parser.add_argument("--workers", type=int, default=2)
parser.add_argument("--devices_per_worker", type=int, default=1)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--batch_size", type=int, default=64, help="of all workers together")
parser.add_argument("--checkpt", help="a file for the best model so far")
parser.add_argument("--aug", action="store_true", help="shift and flip the pictures, while the step before runs")
options = parser.parse_args()

(x, y), test = images.coloured(options.data)
keras.utils.set_random_seed(7)
model = images.network()
model.compile(keras.optimizers.Adam(1e-3), "sparse_categorical_crossentropy", metrics=["accuracy"])
callbacks = []
if options.checkpt:
    callbacks.append(keras.callbacks.ModelCheckpoint(options.checkpt, save_best_only=True, monitor="val_loss"))
if options.aug:
    shift = keras.layers.RandomTranslation(0.1, 0.1)
    x, y = choros.prefetch((x, y), augment=keras.Sequential([keras.layers.RandomFlip("horizontal"), shift])), None

trainer = choros.Trainer(model, options.algorithm, options.workers, devices_per_worker=options.devices_per_worker)
history = trainer.fit(
    x, y, options.batch_size, options.epochs, verbose=2, callbacks=callbacks, validation_data=test, seed=1
)
loss, accuracy = trainer.evaluate(*test, verbose=0)
print(f"accuracy {accuracy:.4f}, loss {loss:.4f} on {len(test[0])} images")
if not options.data and options.epochs >= 3 and min(history.history["val_loss"]) >= 1.0:  # it goes up and down
    raise SystemExit("the loss of made-up pictures should have fallen below 1.0 in three epochs")
