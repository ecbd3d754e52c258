"""A fit on PyTorch whose steps become a record trains as plain Keras does, also after changes between two epochs."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import choros

if keras.backend.backend() != "torch":
    pytest.skip("needs KERAS_BACKEND=torch", allow_module_level=True)

RNG = np.random.default_rng(0)
X = RNG.normal(size=(4010, 6)).astype("float32")
Y = (X[:, 0] > X[:, 1]).astype("int32")


class SetsMomentum(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        self.model.optimizer.momentum = [0.9, 0.5][epoch]


def make_model():
    keras.utils.set_random_seed(1)
    hidden = [keras.layers.Dense(8, "tanh"), keras.layers.LayerNormalization(), keras.layers.Dense(8, "relu")]
    model = keras.Sequential([keras.Input((6,)), *hidden, keras.layers.Dense(2, "softmax")])
    model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


@pytest.mark.parametrize("algorithm", ["allreduce", "localsgd"])
def test_a_long_fit_is_as_in_keras(algorithm):
    """The 452 steps of an epoch take more than the second after which a step is recorded."""
    settings = {"batch_size": 8, "epochs": 2, "shuffle": False, "verbose": 0, "validation_split": 0.1}
    plain, trained = make_model(), make_model()
    expected = plain.fit(X, Y, callbacks=[SetsMomentum()], **settings).history
    workers = 1 if algorithm == "localsgd" else 2
    history = choros.Trainer(trained, algorithm, workers=workers, echo=False).fit(
        X, Y, callbacks=[SetsMomentum()], **settings
    )
    for name, values in expected.items():
        np.testing.assert_allclose(values, history.history[name], rtol=1e-3)
    for left, right in zip(plain.get_weights(), trained.get_weights(), strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-3, atol=1e-4)
