"""Small colour images by a convolutional network over the devices of one process, as keras_experiments' example.

    KERAS_BACKEND=torch python examples/cifar10_cnn_mgpu.py --mgpu 2 --epochs 3
    python examples/cifar10_cnn_mgpu.py --data cifar10.npz --mgpu --epochs 50 --aug --checkpt cifar10.keras

--mgpu alone takes all devices, --mgpu N as many (a CPU is cut into N where there is nothing else), without it there is
one. With --data an .npz file as keras.datasets.cifar10 gives it (x_train, y_train, x_test, y_test). Without it the
pictures are made up: each class a colour and a stripe, with noise. They tell that training works, not how well.
"""

import argparse

import images
import keras

import choros
from choros.parallel import list_devices, logical_devices, make_parallel, print_mgpu_modelsummary, print_placement

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--data", help="an .npz file of CIFAR-10; without it pictures are made up")
parser.add_argument("--mgpu", type=int, nargs="?", const=-1, default=1, help="devices; -1, or no number, is all")
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--batch_size", type=int, default=64, help="of all devices together")
parser.add_argument("--checkpt", help="a file for the weights of each epoch; they are taken up where it is there")
parser.add_argument("--aug", action="store_true", help="shift and flip the pictures, while the step before runs")
parser.add_argument(
    "--logdevp", action="store_true", help="print the device of each variable and of each part of a batch"
)
options = parser.parse_args()
if options.mgpu > 1:
    logical_devices(options.mgpu)  # of a CPU, where there is no more; before the first model


(x, y), (x_test, y_test) = images.coloured(options.data)
keras.utils.set_random_seed(7)
serial = images.network()
model = make_parallel(serial, options.mgpu)
model.compile(keras.optimizers.Adam(1e-3), "sparse_categorical_crossentropy", metrics=["accuracy"])
print_mgpu_modelsummary(model)
if options.logdevp:
    print("devices:", ", ".join(list_devices()))
    print_placement(model, x[: options.batch_size], y[: options.batch_size])
callbacks = [choros.callbacks.SamplesPerSec(options.batch_size), choros.callbacks.BatchTiming()]
if options.checkpt:
    keep = keras.callbacks.ModelCheckpoint(options.checkpt, save_best_only=True, monitor="val_accuracy", mode="max")
    callbacks.append(keep)

augment = None
if options.aug:
    shift = keras.layers.RandomTranslation(0.1, 0.1)
    augment = keras.Sequential([keras.layers.RandomFlip("horizontal"), shift])
data = choros.prefetch((x, y), augment=augment) if model is not serial else x
targets = None if model is not serial else y
history = model.fit(
    data,
    targets,
    options.batch_size,
    epochs=options.epochs,
    validation_data=(x_test, y_test),
    callbacks=callbacks,
    verbose=2,
)
loss, accuracy = model.evaluate(x_test, y_test, verbose=0)
print(f"accuracy {accuracy:.4f}, loss {loss:.4f} on {len(x_test)} images")
if not options.data and options.epochs >= 2 and loss >= 1.0:
    raise SystemExit("the loss of made-up pictures should have fallen below 1.0 in two epochs")
