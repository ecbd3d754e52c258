"""CIFAR-10 on the devices of one process, as keras_experiments' example.

    python examples/cifar10_cnn_mgpu.py --mgpu --epochs=10 --checkpt
    KERAS_BACKEND=torch python examples/cifar10_cnn_mgpu.py --synthetic --mgpu 2 --epochs 3
    choros run -n 3 examples/cifar10_cnn_mgpu.py --epochs 10 --aug

--mgpu uses all devices, and --mgpu N uses N of them (a machine without GPUs divides its CPU into N). Without --mgpu one
device is used. In a job the script trains on the devices of all ranks. cifar.py describes the sources of the pictures.
"""

import cifar
import keras

import choros
from choros.parallel import list_devices, print_mgpu_modelsummary, print_placement

parser = cifar.parser(__doc__)
cifar.add_mgpu(parser)
options = cifar.parse(parser)

(x, y), test = cifar.load(options)
keras.utils.set_random_seed(7)
serial = cifar.network()
serial.compile(keras.optimizers.Adam(1e-3), "sparse_categorical_crossentropy", metrics=["accuracy"])
cifar.load_weights(options, serial)
model = cifar.over_devices(serial, options.mgpu)
if cifar.PLACE.rank == 0:
    print_mgpu_modelsummary(serial if isinstance(model, choros.Trainer) else model)
if options.logdevp:
    print("devices:", ", ".join(list_devices()))
    if not isinstance(model, choros.Trainer):
        print_placement(model, x[: options.batch_size], y[: options.batch_size])
callbacks = [choros.callbacks.SamplesPerSec(options.batch_size), choros.callbacks.BatchTiming()]
callbacks += cifar.checkpoints(options)
augment = keras.Sequential(cifar.changes()) if options.aug else None
data = choros.prefetch((x, y), augment=augment)
model.fit(data, None, options.batch_size, options.epochs, validation_data=test, callbacks=callbacks, verbose=2)
cifar.check(options, cifar.report(model, test), 1.0, 2)
