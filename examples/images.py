"""What the examples share: where their images come from; not an example. cifar.py has CIFAR-10's."""

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
