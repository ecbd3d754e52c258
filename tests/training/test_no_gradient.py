"""A variable without a gradient ends as in plain Keras, and a step without any is Keras' error."""

import keras
import numpy as np
import pytest

import choros
from choros.errors import WorkerFailedError

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(24, 4)).astype("float32"), RNG.normal(size=(24, 2)).astype("float32")


def two_heads(**how):
    keras.utils.set_random_seed(0)
    inputs = keras.Input((4,))
    hidden = keras.layers.Dense(5)(inputs)
    model = keras.Model(inputs, {"a": keras.layers.Dense(2)(hidden), "b": keras.layers.Dense(2)(hidden)})
    model.compile(keras.optimizers.AdamW(0.01, weight_decay=0.1, **how), {"a": "mse"})
    return model


@pytest.mark.filterwarnings("ignore:Gradients do not exist:UserWarning")
@pytest.mark.parametrize("how", [{}, {"gradient_accumulation_steps": 2}], ids=str)
def test_an_unused_head_ends_as_in_plain_keras(how):
    plain, model = two_heads(**how), two_heads(**how)
    plain.fit(X, {"a": Y}, batch_size=7, epochs=2, shuffle=False, verbose=0)
    choros.Trainer(model, workers=2).fit(X, {"a": Y}, batch_size=7, epochs=2, shuffle=False, verbose=0)
    for ours, expected in zip(model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(ours, expected, atol=1e-6)


class Constant(keras.losses.Loss):
    def call(self, y_true, y_pred):
        return keras.ops.mean(keras.ops.stop_gradient(keras.ops.square(y_true - y_pred)), axis=-1)


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="JAX gives zeros, and PyTorch its own error")
def test_a_step_without_any_gradient_is_an_error_as_in_keras():
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    model.compile("sgd", Constant())
    with pytest.raises((WorkerFailedError, ValueError), match="No gradients provided for any variable"):
        choros.Trainer(model, workers=2).fit(X, Y, batch_size=8, verbose=0)
