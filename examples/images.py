"""What the examples share: where their images come from, and a network for them; no example itself."""

from pathlib import Path

import keras
import numpy as np

import choros.hvd as hvd


def load(path=None):
    """Return (images, labels) to train on and to test on: digits, float32 of 28 x 28 x 1 in 0..1.

    Args:
        path: an .npz file of MNIST with x_train, y_train, x_test, y_test (as keras.datasets.mnist has it) or x, y.
            Without it, scikit-learn's 1,797 digits, drawn larger: no download.
    """
    if path is None:
        from sklearn.datasets import load_digits

        found = load_digits()
        images = np.repeat(np.repeat(found.images, 3, axis=1), 3, axis=2) / 16  # 8 x 8 pixels become 24 x 24
        x, y = np.pad(images, ((0, 0), (2, 2), (2, 2))), found.target
    else:
        with np.load(path) as file:
            if "x_train" in file:
                return _ready(file["x_train"] / 255, file["y_train"]), _ready(file["x_test"] / 255, file["y_test"])
            x, y = file["x"] / 255, file["y"]
    order = np.random.default_rng(0).permutation(len(x))  # the same on every rank
    test = len(x) // 5
    return _ready(x[order[test:]], y[order[test:]]), _ready(x[order[:test]], y[order[:test]])


def _ready(x, y):
    return x.astype("float32")[..., None], y.astype("int32")


def coloured(path=None):
    """Return (images, labels) to train on and to test on: small colour pictures, float32 of 32 x 32 x 3 in 0..1.

    Args:
        path: an .npz file of CIFAR-10 (x_train, y_train, x_test, y_test). Without it they are made up, and it is said:
            each class a colour and stripes of a width, with noise.
    """
    if path is not None:
        with np.load(path) as file:
            x, y, x_test, y_test = (file[name] for name in ("x_train", "y_train", "x_test", "y_test"))
        return (x.astype("float32") / 255, y.ravel()), (x_test.astype("float32") / 255, y_test.ravel())
    print("made-up pictures: the figures tell that training works, not how well")
    return _striped(1024, 1), _striped(256, 2)


def _striped(count, seed):
    rng = np.random.default_rng(seed)
    y = rng.integers(0, 10, count)
    colours = np.random.default_rng(0).random((10, 1, 1, 3))
    stripes = np.stack([(np.arange(32) // (number % 5 + 1)) % 2 for number in range(10)])[:, None, :, None]
    x = (colours * (0.5 + 0.5 * stripes))[y] * np.ones((1, 32, 1, 1)) + rng.normal(0, 0.3, (count, 32, 32, 3))
    return x.astype("float32"), y


def network():
    """Keras' old example for such pictures: a convolutional network of 1.25 million weights."""
    layers = keras.layers
    parts = [keras.Input((32, 32, 3))]
    for filters in (32, 64):
        parts += [
            layers.Conv2D(filters, 3, padding="same", activation="relu"),
            layers.Conv2D(filters, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Dropout(0.25),
        ]
    parts += [layers.Flatten(), layers.Dense(512, "relu"), layers.Dropout(0.5), layers.Dense(10, "softmax")]
    return keras.Sequential(parts)


class Synthetic(keras.utils.PyDataset):
    """One batch of coloured noise with random labels, again and again: what a step costs without reading anything."""

    def __init__(self, batch_size, side, classes, steps, seed=0):
        super().__init__()
        rng = np.random.default_rng(seed)
        self.batch = rng.random((batch_size, side, side, 3), "float32"), rng.integers(0, classes, batch_size)
        self.steps = steps

    def __len__(self):
        return self.steps

    def __getitem__(self, index):
        return self.batch


class Folders(keras.utils.PyDataset):
    """This rank's images of a directory that holds one directory for each class; needs Pillow.

    Every epoch has an order of its own, the same on all ranks, and each rank takes every ``size``-th image. The last
    images that do not make a batch on each rank are left out of that epoch.
    """

    def __init__(self, directory, batch_size, side):
        super().__init__(workers=2)
        self.classes = sorted(one.name for one in Path(directory).iterdir() if one.is_dir())
        self.files = [(path, k) for k, name in enumerate(self.classes) for path in sorted((directory / name).iterdir())]
        self.batch_size, self.side, self.epoch = batch_size, side, 0
        self.on_epoch_end()

    def __len__(self):
        return len(self.files) // (self.batch_size * hvd.size())

    def __getitem__(self, index):
        rows = self.mine[index * self.batch_size : (index + 1) * self.batch_size]
        size = self.side, self.side
        x = [keras.utils.img_to_array(keras.utils.load_img(self.files[row][0], target_size=size)) for row in rows]
        return np.stack(x) / 255, np.array([self.files[row][1] for row in rows])

    def on_epoch_end(self):
        order = np.random.default_rng(self.epoch).permutation(len(self.files))
        self.mine, self.epoch = order[hvd.rank() :: hvd.size()], self.epoch + 1
