"""A small model, its data and plain Keras on the same rows: what the tests of the Trainer are compared with."""

import os

import numpy as np
import pytest


@pytest.fixture
def data():
    def make(rows=60, seed=0):
        rng = np.random.default_rng(seed)
        x, y = rng.normal(size=(rows, 8)).astype("float32"), rng.integers(0, 3, rows)
        x[:, 0] += y
        return x, y

    return make


@pytest.fixture
def make_model():
    """A classifier whose weights depend on nothing but the seed."""

    def make(optimizer=None, metrics=("accuracy",), dropout=0.0, seed=0, **how):
        import keras

        keras.utils.set_random_seed(seed)
        layers = [keras.Input((8,)), keras.layers.Dense(6, "relu")]
        if dropout:
            layers.append(keras.layers.Dropout(dropout))
        model = keras.Sequential([*layers, keras.layers.Dense(3, "softmax")])
        model.compile(
            optimizer or keras.optimizers.Adam(1e-2), "sparse_categorical_crossentropy", metrics=list(metrics), **how
        )
        return model

    return make


@pytest.fixture
def same():
    """Check that two models (or lists of arrays) hold the same numbers."""

    def check(a, b, tolerance=1e-5):
        first, other = (v if isinstance(v, list) else v.get_weights() for v in (a, b))
        for left, right in zip(first, other, strict=True):
            np.testing.assert_allclose(left, right, atol=tolerance, rtol=0)

    return check


@pytest.fixture
def same_history():
    """Check that two histories have the same keys and figures."""

    def check(ours, plain, tolerance=1e-5):
        assert list(ours.history) == list(plain.history)
        assert ours.epoch == plain.epoch
        for name, figures in plain.history.items():
            np.testing.assert_allclose(ours.history[name], figures, atol=tolerance, rtol=1e-5, err_msg=name)

    return check


@pytest.fixture
def fails(tmp_path):
    """Return a class of layers that raise in a worker once the file ``fails.flag`` is there."""
    import keras

    path = tmp_path / "fail"

    class Fails(keras.layers.Layer):
        flag = path

        def call(self, x):
            if os.environ.get("CHOROS_WORKER") and self.flag.exists():
                raise RuntimeError("as the test wants it")
            return x

    return Fails
