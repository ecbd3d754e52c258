"""CIFAR-10 from PNG files that are decoded and augmented during a step, as keras_experiments' example.

    python examples/cifar10_cnn_mgpu_tfqueue.py --mgpu --aug
    KERAS_BACKEND=torch python examples/cifar10_cnn_mgpu_tfqueue.py --synthetic --epochs 3
    python examples/cifar10_cnn_mgpu_tfqueue.py --no-queue

``choros.prefetch`` replaces TensorFlow's queues, for any data and on any backend: a thread decodes the next batches,
augments them (--aug) and copies them to the device. With --no-queue each batch is read when a step needs it. The last
lines show the share of time that steps waited for batches, and the reason. cifar.py describes the sources of the
pictures.
"""

import io

import cifar
import keras
import numpy as np
from PIL import Image

import choros

parser = cifar.parser(__doc__)
cifar.add_mgpu(parser)
parser.add_argument("--no-queue", action="store_true", help="do not read ahead")
options = cifar.parse(parser)
if options.no_queue and options.aug:
    parser.error("--aug changes batches that are read ahead: leave --no-queue out")


class Pictures(keras.utils.PyDataset):
    """PNGs and their classes; a batch is decoded when it is read."""

    def __init__(self, x, y):
        super().__init__()
        self.files, self.y = [png(picture) for picture in x], y

    def __len__(self):
        return -(-len(self.files) // options.batch_size)

    def __getitem__(self, index):
        rows = slice(index * options.batch_size, (index + 1) * options.batch_size)
        pictures = [np.asarray(Image.open(io.BytesIO(file)), "float32") for file in self.files[rows]]
        return np.stack(pictures) / 255, self.y[rows]


def png(picture):
    """Return the bytes of a PNG file."""
    file = io.BytesIO()
    Image.fromarray((255 * picture.clip(0, 1)).astype("uint8")).save(file, "png")
    return file.getvalue()


(x, y), test = cifar.load(options)
keras.utils.set_random_seed(7)
model = cifar.network()
model.compile(keras.optimizers.Adam(1e-3), "sparse_categorical_crossentropy", metrics=["accuracy"])
cifar.load_weights(options, model)
data = Pictures(x, y)
if not options.no_queue:
    data = choros.prefetch(data, depth=4, augment=keras.Sequential(cifar.changes()) if options.aug else None)
trainer = cifar.over_devices(model, options.mgpu)
callbacks = cifar.checkpoints(options)
history = trainer.fit(data, epochs=options.epochs, validation_data=test, callbacks=callbacks, verbose=2)
loss = cifar.report(trainer, test)
cifar.say(f"waiting for data {history.run.waiting:.0%} of the time")
for bottleneck in history.run.bottlenecks():
    cifar.say(f"{bottleneck.share:.0%} of the time for {bottleneck.cause}: {bottleneck.remedy}")
cifar.check(options, loss, 1.2, 2)
