"""Handwritten digits from TFRecord files, on the devices of one process, as keras_experiments' example.

    CUDA_VISIBLE_DEVICES=0 python examples/mnist_tfrecord_mgpu.py
    KERAS_BACKEND=torch python examples/mnist_tfrecord_mgpu.py --mgpu 2
    python examples/mnist_tfrecord_mgpu.py --data mnist.npz --mgpu 2 --epochs 12

It uses all devices, or --mgpu N of them; in a job it trains on the devices of all ranks. First the script writes two
TFRecord files of images (as bytes) and labels, without TensorFlow. Then ``choros.files`` reads them in blocks, which
are shuffled in each epoch and decoded once. --data is an .npz file of MNIST (see images.py); without it the data are
scikit-learn's digits, enlarged.
"""

import argparse
import pathlib
import struct
import tempfile

import arguments
import google_crc32c
import images
import keras
import numpy as np

import choros
from choros.parallel import logical_devices, make_parallel

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--data", type=arguments.file, help="an .npz file of MNIST")
text = "devices; without a number, or with -1, all; a CPU is cut into as many"
parser.add_argument("--mgpu", type=arguments.devices, nargs="?", const=-1, default=-1, help=text)
parser.add_argument("--epochs", type=arguments.count, default=4)
parser.add_argument("--batch_size", type=arguments.count, default=64, help="of all devices together")
options = parser.parse_args()
if options.mgpu > 1:
    logical_devices(options.mgpu)


def number(value):
    """A whole number as protocol buffers have it."""
    return bytes([value]) if value < 128 else bytes([value & 127 | 128]) + number(value >> 7)


def field(which, data):
    """A field that has bytes in it."""
    return bytes([which << 3 | 2]) + number(len(data)) + data


def example(image, label):
    """A tf.train.Example of an image's bytes and its label."""
    features = {b"image": field(1, field(1, image.tobytes())), b"label": field(3, field(1, number(int(label))))}
    return field(1, b"".join(field(1, field(1, name) + field(2, value)) for name, value in features.items()))


def checksum(data):
    """TFRecord's own form of CRC-32C."""
    crc = google_crc32c.value(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def write(path, x, y):
    """Write a TFRecord file."""
    with open(path, "wb") as file:
        for image, label in zip(x, y, strict=True):
            data = example(image, label)
            length = struct.pack("<Q", len(data))
            file.write(length + checksum(length) + data + checksum(data))


def decode(columns):
    """Pictures of what a block of records holds; this runs where the records are read."""
    pictures = [np.frombuffer(image, np.uint8).reshape(28, 28, 1) for image in columns["image"]]
    return {"picture": np.stack(pictures).astype("float32") / 255, "label": columns["label"]}


(x, y), test = images.load(options.data)
place = choros.Place.here()
temporary = tempfile.TemporaryDirectory()  # each rank of a job writes files of its own, and reads its share of them
room = pathlib.Path(temporary.name)
pixels, half = (255 * x).astype("uint8"), len(x) // 2
write(room / "digits-00000-of-00002.tfrecord", pixels[:half], y[:half])
write(room / "digits-00001-of-00002.tfrecord", pixels[half:], y[half:])
records = choros.files(str(room / "digits-*.tfrecord"), x="picture", y="label", decode=decode)

layers = keras.layers
keras.utils.set_random_seed(3)
serial = keras.Sequential(
    [
        keras.Input((28, 28, 1)),
        layers.Conv2D(16, 3, activation="relu"),
        layers.MaxPooling2D(),
        layers.Conv2D(32, 3, activation="relu"),
        layers.MaxPooling2D(),
        layers.Flatten(),
        layers.Dense(128, activation="relu"),
        layers.Dropout(0.3),
        layers.Dense(10, activation="softmax"),
    ]
)
serial.compile(keras.optimizers.Adam(2e-3), "sparse_categorical_crossentropy", metrics=["accuracy"])
if place.size > 1:
    model = choros.Trainer(serial, devices_per_worker=max(options.mgpu, 1))
else:
    model = make_parallel(serial, options.mgpu)
    model = choros.Trainer(serial, "single") if model is serial else model
model.fit(records, batch_size=options.batch_size, epochs=options.epochs, validation_data=test, verbose=2)
_, accuracy = model.evaluate(*test, verbose=0)
print(f"accuracy {accuracy:.4f} on {len(test[0])} images")
if accuracy < 0.95 and options.epochs >= 4:
    raise SystemExit("an accuracy of 0.95 was expected")
