"""Fingerprints of models: equal for the same code in any process, different if a setting differs."""

import os
import subprocess
import sys

import keras
import numpy as np
import pytest

from choros.consistency.model_fingerprint import first_difference, layers_of
from choros.consistency.rank_agreement import facts_of_model

layers = keras.layers


def stacked(act="relu", times=2, **how):
    scaled = layers.Lambda((lambda x: x * 2) if times == 2 else lambda x: x * 3, output_shape=(6,))
    parts = [layers.Dense(6, act), layers.GaussianNoise(0.3), scaled, layers.Dense(3)]
    model = keras.Sequential([keras.Input((8,)), *parts])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(**{"optimizer": keras.optimizers.Adam(1e-2), "loss": loss, "metrics": ["accuracy"], **how})
    return model


def two_branches(factor=2.0, crossed=False):
    inputs = keras.Input((8,))
    first, other = layers.Dense(4, "relu")(inputs), layers.Dense(4)(inputs)
    inner = keras.Sequential([layers.Dense(4), layers.BatchNormalization()])
    result = layers.Subtract()([first, first] if crossed else [first, other])
    model = keras.Model(inputs, layers.Softmax()(inner(result * factor)))
    model.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1, momentum=0.9)), "mse")
    return model


class Own(keras.Model):
    """Without a get_config: what it is given is nothing that Keras can write down."""

    def __init__(self, act="relu", held=None):
        super().__init__()
        self.held = held or object()
        self.parts = [layers.Dense(4, act), layers.Dense(2)]

    def call(self, x):
        return self.parts[1](self.parts[0](x))


def own(act="relu"):
    model = Own(act, object())
    model.compile("sgd", "mse")
    model(np.ones((1, 8)))
    return model


@pytest.mark.parametrize("make", [stacked, two_branches, own])
def test_the_same_code_makes_the_same(make):
    keras.utils.set_random_seed(1)
    first = facts_of_model(make())
    keras.utils.set_random_seed(2)
    assert facts_of_model(make()) == first
    assert first["variables"]


@pytest.mark.parametrize("make", [stacked, two_branches])
def test_a_file_makes_the_same(make, tmp_path):
    """One rank may have gone on from a file where the others wait for its broadcast."""
    model = make()
    model.fit(np.ones((4, 8)), np.ones(4) if make is stacked else np.ones((4, 4)), verbose=0)
    model.save(tmp_path / "model.keras")
    reloaded = keras.models.load_model(tmp_path / "model.keras", safe_mode=False)
    assert facts_of_model(reloaded) == facts_of_model(model)


@pytest.mark.parametrize(
    ("first", "other", "message"),
    [
        (lambda: stacked("tanh"), stacked, "layer 1 (Dense): activation 'tanh' and 'relu'"),
        (lambda: stacked(times=3), stacked, "layer 3 (Lambda): function 'lambda "),
        (lambda: two_branches(3.0), two_branches, "(Multiply): applied to [[[['KerasTensor', 3.0]"),
        (lambda: two_branches(crossed=True), two_branches, "layer 2: Subtract and Dense"),
        (lambda: own("tanh"), own, "layer 1 (Dense): activation 'tanh' and 'relu'"),
        (own, stacked, "model: Own and Sequential"),
    ],
)
def test_what_differs_is_named(first, other, message):
    actual, expected = first(), other()
    assert facts_of_model(actual)["model"] != facts_of_model(expected)["model"]
    assert message in first_difference(layers_of(actual), layers_of(expected))


def test_loss_metrics_and_optimizer_are_told_apart_by_their_settings():
    usual = facts_of_model(stacked())
    for name, part in {
        "loss": keras.losses.SparseCategoricalCrossentropy(),
        "metrics": ["mae"],
        "optimizer": keras.optimizers.Adam(1e-2, beta_1=0.8),
    }.items():
        other = facts_of_model(stacked(**{name: part}))
        assert [each for each in usual if usual[each] != other[each]] == [name]
    assert facts_of_model(stacked(optimizer=keras.optimizers.Adam(1e-3))) == usual


def test_keras_is_not_made_to_load_tensorflow():
    """Keras loads TensorFlow, if installed, only to test for its types. This costs three seconds of every job."""
    script = """
import sys, keras
from choros.consistency.rank_agreement import facts_of_model
parts = [keras.layers.Dense(3, kernel_regularizer="l2"), keras.layers.Dropout(0.1), keras.layers.BatchNormalization()]
model = keras.Sequential([keras.Input((2,)), *parts])
model.compile("adam", keras.losses.MeanSquaredError(), metrics=[keras.metrics.MeanAbsoluteError()])
before = "tensorflow" in sys.modules
facts_of_model(model)
print(before, "tensorflow" in sys.modules)
"""
    environment = {**os.environ, "WHOLE_KERAS": "1"}
    output = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True, timeout=120
    )
    before, after = output.stdout.split()
    assert before == after


class Untold(layers.Layer):
    """Its get_config raises, as one does that was left as it was."""

    def __init__(self, factor, act=None):
        super().__init__()
        self.factor, self.act, self.rank = factor, act or object(), id(self)

    def call(self, inputs):
        return inputs * self.factor

    def get_config(self):
        raise NotImplementedError


def test_layers_that_cannot_tell_their_settings_differ_by_what_they_were_given():
    two, three, other = (layers_of(keras.Sequential([keras.Input((4,)), Untold(f)])) for f in (2.0, 3.0, 2.0))
    assert first_difference(two, other) == ""
    assert first_difference(two, three) == "layer 1 (Untold): factor 2.0 and 3.0"
