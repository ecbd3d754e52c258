"""Small colour images out of a generator, lying ready in each worker when its step begins; keras_experiments' example.

    KERAS_BACKEND=torch python examples/cifar10_cnn_tfqueue_var.py --workers 2 --epochs 3
    python examples/cifar10_cnn_tfqueue_var.py --data cifar10.npz --algorithm adag --epochs 50

Its original staged each batch in a variable of the model, so that the copy to the GPU ran beside the step. Here the
generator is read once, in this process; its batches come to the workers through shared memory, ``--depth`` of them
ahead, and each worker lays its rows of the next ones on its device. Without --data the pictures are made up.
"""

import argparse

import images
import keras
import numpy as np

import choros

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--data", help="an .npz file of CIFAR-10; without it pictures are made up")
parser.add_argument("--algorithm", default="allreduce", help="one of " + ", ".join(map(str.lower, choros.algorithms())))
parser.add_argument("--workers", type=int, default=2)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--batch_size", type=int, default=64, help="of all workers together")
parser.add_argument("--depth", type=int, default=4, help="batches that are ready at most")
options = parser.parse_args()

(x, y), test = images.coloured(options.data)


def batches(seed=0):
    """Batches without an end: rows drawn anew, every second picture turned to its other side."""
    rng = np.random.default_rng(seed)
    while True:
        rows = rng.integers(0, len(x), options.batch_size)
        pictures = x[rows]
        pictures[::2] = pictures[::2, :, ::-1]
        yield pictures, y[rows]


keras.utils.set_random_seed(7)
model = images.network()
model.compile(keras.optimizers.Adam(1e-3), "sparse_categorical_crossentropy", metrics=["accuracy"])
trainer = choros.Trainer(model, options.algorithm, options.workers)
history = trainer.fit(
    choros.prefetch(batches(), options.depth),
    epochs=options.epochs,
    steps_per_epoch=-(-len(x) // options.batch_size),
    validation_data=test,
    verbose=2,
)
loss, accuracy = trainer.evaluate(*test, verbose=0)
print(f"accuracy {accuracy:.4f}, loss {loss:.4f} on {len(test[0])} images")
print(f"waiting for data {history.run.waiting:.0%} of the time")
if not options.data and options.epochs >= 3 and min(history.history["val_loss"]) >= 1.2:
    raise SystemExit("the loss of made-up pictures should have fallen below 1.2 in three epochs")
