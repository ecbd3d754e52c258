"""CIFAR-10 from a generator whose batches are copied to each worker before its step, as keras_experiments' example.

    python examples/cifar10_cnn_mgpu_tfqueue_var.py --mgpu --aug
    KERAS_BACKEND=torch python examples/cifar10_cnn_mgpu_tfqueue_var.py --synthetic --workers 2 --epochs 3

The original copied each batch to a variable of the model on the GPU during the step before. Here a thread reads
``--depth`` batches ahead from the generator and copies them to the devices. With --workers the workers get the batches
through shared memory. With --aug every second picture is mirrored. cifar.py describes the sources of the pictures.
"""

import arguments
import cifar
import keras
import numpy as np

import choros

parser = cifar.parser(__doc__)
cifar.add_mgpu(parser)
cifar.add_workers(parser, "allreduce")
parser.add_argument("--depth", type=arguments.count, default=4, help="batches that are ready at most")
options = cifar.parse(parser)

(x, y), test = cifar.load(options)


def batches(seed=0):
    """Yield batches without an end: rows drawn anew, every second picture turned with --aug."""
    rng = np.random.default_rng(seed)
    while True:
        rows = rng.integers(0, len(x), options.batch_size)
        pictures = x[rows]
        if options.aug:
            pictures[::2] = pictures[::2, :, ::-1]
        yield pictures, y[rows]


keras.utils.set_random_seed(7)
model = cifar.network()
model.compile(keras.optimizers.Adam(1e-3), "sparse_categorical_crossentropy", metrics=["accuracy"])
cifar.load_weights(options, model)
if options.workers:
    trainer = cifar.trainer(model, options, max(options.mgpu, 1))
else:
    trainer = cifar.over_devices(model, options.mgpu, options.algorithm)
history = trainer.fit(
    choros.prefetch(batches(), options.depth),
    epochs=options.epochs,
    steps_per_epoch=-(-len(x) // options.batch_size),
    validation_data=test,
    callbacks=cifar.checkpoints(options),
    verbose=2,
)
cifar.report(trainer, test)
cifar.say(f"waiting for data {history.run.waiting:.0%} of the time")
cifar.check(options, min(history.history["val_loss"]), 1.2, 3)
