"""Models and data that the laws are held on, and plain Keras on the same global batches."""

import numpy as np
import pytest


def _data(rows=100, features=8, classes=3, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, features)).astype("float32")
    y = rng.integers(0, classes, rows)
    x[:, 0] += y
    return x, y


@pytest.fixture
def data():
    return _data


@pytest.fixture
def make_mlp():
    """A small classifier; weights depend only on the seed."""

    def make(optimizer=None, metrics=("accuracy",), weighted_metrics=None, l2=0.0, loss=None, classes=3, seed=0, **how):
        import keras

        keras.utils.set_random_seed(seed)
        regularizer = keras.regularizers.L2(l2) if l2 else None
        model = keras.Sequential(
            [
                keras.Input((8,)),
                keras.layers.Dense(16, "relu", kernel_regularizer=regularizer),
                keras.layers.Dense(classes, "softmax" if classes > 1 else "sigmoid"),
            ]
        )
        model.compile(
            optimizer or keras.optimizers.Adam(1e-2),
            loss or ("sparse_categorical_crossentropy" if classes > 1 else "binary_crossentropy"),
            metrics=list(metrics),
            weighted_metrics=weighted_metrics,
            **how,
        )
        return model

    return make


@pytest.fixture
def plain_fit():
    """``model.fit`` in this process on the global batches that a Trainer would make; returns the history's figures."""

    def fit(model, x, y, *, epochs, batch_size, seed, sample_weight=None, class_weight=None, shuffle=True, **kwargs):
        import keras

        from choros.data import make_source

        source = make_source(x, y, sample_weight, class_weight)

        class Batches(keras.utils.PyDataset):
            def __init__(self, epoch):
                super().__init__()
                how = dict(seed=seed, epoch=epoch, shuffle=shuffle)
                made = source.epoch(rank=0, size=1, together=True, batch_size=batch_size, **how)
                self.batches = [tuple(part for part in (b.x, b.y, b.sample_weight) if part is not None) for b in made]

            def __len__(self):
                return len(self.batches)

            def __getitem__(self, index):
                return self.batches[index]

        history = {}
        for epoch in range(epochs):
            how = dict(initial_epoch=epoch, epochs=epoch + 1, shuffle=False, verbose=0)
            for name, figures in model.fit(Batches(epoch), **how, **kwargs).history.items():
                history.setdefault(name, []).extend(figures)
        return history

    return fit


@pytest.fixture
def same_weights():
    def check(a, b, tolerance):
        worst = max(
            float(np.max(np.abs(np.asarray(v) - np.asarray(w)), initial=0))
            for v, w in zip(a.trainable_variables, b.trainable_variables, strict=True)
        )
        assert worst <= tolerance, f"weights differ by {worst}"
        return worst

    return check
