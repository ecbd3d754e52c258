"""Small colour images that are PNGs, decoded and changed while the step before runs, as keras_experiments' example.

    KERAS_BACKEND=torch python examples/cifar10_cnn_tfqueue.py --epochs 3
    python examples/cifar10_cnn_tfqueue.py --data cifar10.npz --mgpu --epochs 50
    python examples/cifar10_cnn_tfqueue.py --no-queue

TensorFlow's queues are gone; ``choros.prefetch`` reads ahead from any data on any backend: in a thread the next batches
are decoded, flipped and laid on the device. With --no-queue each batch is read when it is asked for: the last line says
how much of the time was spent waiting for it. Without --data the pictures are made up (see images.py).
"""

import argparse
import io

import images
import keras
import numpy as np
from PIL import Image

import choros
from choros.parallel import logical_devices, make_parallel

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--data", help="an .npz file of CIFAR-10; without it pictures are made up")
parser.add_argument("--mgpu", type=int, nargs="?", const=-1, default=1, help="devices; -1, or no number, is all")
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--batch_size", type=int, default=64, help="of all devices together")
parser.add_argument("--no-queue", action="store_true", help="do not read ahead")
options = parser.parse_args()
if options.mgpu > 1:
    logical_devices(options.mgpu)


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
    """The bytes of a PNG file."""
    file = io.BytesIO()
    Image.fromarray((255 * picture.clip(0, 1)).astype("uint8")).save(file, "png")
    return file.getvalue()


(x, y), test = images.coloured(options.data)
keras.utils.set_random_seed(7)
serial = images.network()
model = make_parallel(serial, options.mgpu)
model.compile(keras.optimizers.Adam(1e-3), "sparse_categorical_crossentropy", metrics=["accuracy"])
data = Pictures(x, y)
if not options.no_queue:
    data = choros.prefetch(data, depth=4, augment=keras.layers.RandomFlip("horizontal"))
trainer = model if model is not serial else choros.Trainer(serial, "single")
history = trainer.fit(data, epochs=options.epochs, validation_data=test, verbose=2)
loss, accuracy = trainer.evaluate(*test, verbose=0)
print(f"accuracy {accuracy:.4f}, loss {loss:.4f} on {len(test[0])} images")
print(f"waiting for data {history.run.waiting:.0%} of the time")
if not options.data and options.epochs >= 2 and loss >= 1.2:
    raise SystemExit("the loss of made-up pictures should have fallen below 1.2 in two epochs")
