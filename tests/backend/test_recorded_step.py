"""Steps on PyTorch that run as a record of their operations have the same bits as Keras' steps."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from choros.backends import make_replica
from choros.types import Batch

if keras.backend.backend() != "torch":
    pytest.skip("needs KERAS_BACKEND=torch", allow_module_level=True)

import torch

from choros.backends.recorded_step import torch as recorded_step
from choros.backends.recorded_step.torch import RecordedStep

layers = keras.layers
RNG = np.random.default_rng(3)
X, Y = RNG.normal(size=(10, 8, 6)).astype("float32"), RNG.integers(0, 3, (10, 8))
WEIGHT = RNG.uniform(0.5, 2, (10, 8)).astype("float32")


class Doubled(layers.Layer):
    def call(self, inputs):
        return 2 * inputs


def make(optimizer="adam", hidden=list, loss="sparse_categorical_crossentropy", **settings):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((6,)), layers.Dense(7, "relu"), *hidden(), layers.Dense(3, "softmax")])
    model.compile(optimizer, loss, metrics=["accuracy"], **settings)
    return model


def images():
    keras.utils.set_random_seed(1)
    parts = [layers.Reshape((3, 2, 1)), layers.Conv2D(4, 2), layers.BatchNormalization(), layers.Flatten()]
    model = keras.Sequential([keras.Input((6,)), *parts, layers.LayerNormalization(), layers.Dense(3, "softmax")])
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "sparse_categorical_crossentropy")
    return model


def shared():
    keras.utils.set_random_seed(1)
    one, two = keras.Input((6,), name="one"), keras.Input((6,), name="two")
    dense = layers.Dense(5, "tanh", kernel_regularizer="l2")
    joined = layers.concatenate([dense(one), dense(two)])
    outputs = [layers.Dense(3, name="wide")(joined), layers.Dense(1, name="thin")(joined)]
    model = keras.Model({"one": one, "two": two}, outputs)
    model.compile("rmsprop", ["mse", "mae"], loss_weights=[1.0, 0.5], metrics=[["mae"], []])
    return model


def schedule():
    return keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5), momentum=0.9, clipnorm=0.5)


MODELS = {
    "adam": make,
    "schedule": lambda: make(schedule()),
    "lamb": lambda: make(keras.optimizers.Lamb(0.01, global_clipnorm=0.1, weight_decay=0.01)),
    "muon": lambda: make(keras.optimizers.Muon(0.01)),
    "average": lambda: make(keras.optimizers.SGD(0.1, use_ema=True)),
    "dropout": lambda: make(hidden=lambda: [layers.Dropout(0.3)]),
    "frozen": lambda: make(hidden=lambda: [layers.Dense(5, trainable=False)]),
    "float16": lambda: make(hidden=lambda: [layers.Dense(5, dtype="mixed_bfloat16")]),
    "focal": lambda: make(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=False, ignore_class=1)),
    "images": images,
    "shared": shared,
}


def batches(name):
    if name == "shared":
        pairs = [({"one": x, "two": -x}, [x[:, :3], x[:, :1]]) for x in X]
        return [Batch(x, y, None, 8, 8) for x, y in pairs]
    weights = WEIGHT if name == "adam" else [None] * len(X)
    return [Batch(x, y, weight, 8, 8) for x, y, weight in zip(X, Y, weights, strict=True)]


def train(monkeypatch, model, data, how="step", seconds=-1.0, between=lambda step, model: None):
    """Return the variables and the metrics after a step for each batch, and the replica."""
    monkeypatch.setattr(recorded_step, "_SECONDS", seconds)
    replica = make_replica(model)
    replica.build(data[0])
    replica.seed_generators(0, 5)
    out = np.zeros(replica.size + 2, replica.dtype)
    for step, batch in enumerate(data):
        between(step, model)
        if how == "step":
            replica.step(batch)
        else:
            replica.gradients(batch, out)
            replica.apply(out)
    logs = replica.metrics()
    replica.reset_metrics()
    replica.evaluate(data[0])
    return [np.array(value) for value in replica.snapshot()], [logs, replica.metrics()], replica


def records(replica):
    steps = [part for part in vars(replica).values() if isinstance(part, RecordedStep)]
    return [record for step in steps for record in step._records.values() if record is not None]


def same(one, other):
    assert one[1] == other[1]
    for left, right in zip(one[0], other[0], strict=True):
        np.testing.assert_array_equal(left, right)


@pytest.mark.parametrize("how", ["step", "gradients"])
@pytest.mark.parametrize("name", MODELS)
def test_a_record_trains_as_the_step_does_to_the_bit(monkeypatch, name, how):
    data = batches(name)
    plain = train(monkeypatch, MODELS[name](), data, how, seconds=1e9)
    recorded = train(monkeypatch, MODELS[name](), data, how)
    same(plain, recorded)
    assert not records(plain[2])
    assert len(records(recorded[2])) == {"step": 2, "gradients": 3}[how]  # with the test step; an update of its own


def user_loss(y_true, y_pred):
    return keras.losses.sparse_categorical_crossentropy(y_true, y_pred)


def hooked():
    model = make()
    model.layers[0].register_forward_hook(lambda *arguments: None)
    return model


def replaced():
    model = make()
    step = model.train_step
    model.train_step = lambda data: step(data)
    return model


NOT_RECORDED = {
    "a layer of the user": lambda: make(hidden=lambda: [Doubled()]),
    "a function of the user": lambda: make(hidden=lambda: [layers.Activation(lambda x: x + 1)]),
    "a loss of the user": lambda: make(loss=user_loss),
    "a hook": hooked,
    "a step that was replaced": replaced,
    "numbers from a seed": lambda: make(hidden=lambda: [layers.Dropout(0.3, seed=2)]),
    "noise": lambda: make(hidden=lambda: [layers.GaussianNoise(0.1)]),
    "scaling": lambda: make(keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01))),
    "accumulation": lambda: make(keras.optimizers.Adam(0.01, gradient_accumulation_steps=2)),
    "a loop over time": lambda: make(hidden=lambda: [layers.Reshape((7, 1)), layers.LSTM(2, unroll=True)]),
}


@pytest.mark.parametrize("name", NOT_RECORDED)
def test_a_step_that_a_record_would_change_is_not_recorded(monkeypatch, name):
    if "time" in name:
        monkeypatch.setattr(recorded_step, "_OPERATIONS", 100)
    plain = train(monkeypatch, NOT_RECORDED[name](), batches(name), seconds=1e9)
    recorded = train(monkeypatch, NOT_RECORDED[name](), batches(name))
    same(plain, recorded)
    assert not recorded[2]._recorded_step._records or not any(recorded[2]._recorded_step._records.values())


def set_rate(step, model):
    if step in (4, 7):
        model.layers[1].rate = 0.1 * step


def set_momentum(step, model):
    if step == 5:
        model.optimizer.momentum = 0.5


def freeze(step, model):
    if step == 5:
        model.layers[0].kernel.assign(0 * model.layers[0].kernel)
        model.optimizer.learning_rate = 0.3


def add_hook(step, model):
    if step == 5:
        model.layers[0].register_forward_hook(lambda layer, inputs, output: 2 * output)


@pytest.mark.parametrize("how", ["step", "gradients"])
@pytest.mark.parametrize("change", [set_rate, set_momentum, freeze, add_hook])
def test_a_change_between_two_steps_counts_in_the_next(monkeypatch, change, how):
    model = lambda: make(keras.optimizers.SGD(0.1, momentum=0.9), lambda: [layers.Dropout(0.3)])
    plain = train(monkeypatch, model(), batches(""), how, seconds=1e9, between=change)
    recorded = train(monkeypatch, model(), batches(""), how, between=change)
    same(plain, recorded)
    unchanged = train(monkeypatch, model(), batches(""), how)
    assert not all(np.array_equal(a, b) for a, b in zip(recorded[0], unchanged[0], strict=True))


def test_a_model_that_changes_all_the_time_is_recorded_no_more(monkeypatch):
    monkeypatch.setattr(recorded_step, "_CHANGES", 3)

    def change(step, model):
        model.layers[1].rate = 0.01 * step

    model = make(hidden=lambda: [layers.Dropout(0.3)])
    recorded = train(monkeypatch, model, batches(""), between=change)
    assert not recorded[2]._recorded_step.active
    model = make(hidden=lambda: [layers.Dropout(0.3)])
    same(recorded, train(monkeypatch, model, batches(""), seconds=1e9, between=change))


def test_each_form_of_a_batch_has_a_record(monkeypatch):
    data = batches("")
    data[3::3] = [Batch(x, y, None, rows, rows) for rows in (5, 3, 5) for x, y in [(X[1][:rows], Y[1][:rows])]]
    recorded = train(monkeypatch, make(), data)
    assert len(recorded[2]._recorded_step._records) == 3
    same(recorded, train(monkeypatch, make(), data, seconds=1e9))
    monkeypatch.setattr(recorded_step, "_FORMS", 2)
    few = train(monkeypatch, make(), data)
    assert len(few[2]._recorded_step._records) == 2
    same(recorded, few)


def test_a_step_is_recorded_only_when_it_has_taken_a_while(monkeypatch):
    replica = train(monkeypatch, make(), batches(""), seconds=60.0)[2]
    assert not records(replica)
    assert 0 < sum(replica._recorded_step._spent.values()) < 60


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
def test_a_compiled_record_trains_as_the_step_does(monkeypatch):
    data = [*batches(""), Batch(X[0][:5], Y[0][:5], None, 5, 5)]
    plain = train(monkeypatch, make("sgd"), data, seconds=1e9)
    compiled = train(monkeypatch, make("sgd", jit_compile=True), data)
    assert len(compiled[2]._recorded_step._records) == 1  # the short batch comes too seldom
    for left, right in zip(plain[0], compiled[0], strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-5, atol=1e-6)


def test_a_record_draws_other_random_numbers_at_each_step(monkeypatch):
    model = make(hidden=lambda: [layers.Dropout(0.5)])
    monkeypatch.setattr(recorded_step, "_SECONDS", -1.0)
    replica = make_replica(model)
    replica.build(batches("")[0])
    out = np.zeros((3, replica.size + 2), replica.dtype)
    replica.gradients(batches("")[0], out[0])
    state = replica.generators()
    replica.gradients(batches("")[0], out[1])
    replica.set_generators(state)
    replica.gradients(batches("")[0], out[2])
    assert records(replica)
    assert not np.array_equal(out[0], out[1])
    np.testing.assert_array_equal(out[1], out[2])


def test_recording_leaves_generators_and_gradients(monkeypatch):
    model = make(hidden=lambda: [layers.Dropout(0.5)])
    monkeypatch.setattr(recorded_step, "_SECONDS", 1e9)
    replica = make_replica(model)
    replica.build(batches("")[0])
    replica.step(batches("")[0])
    state, weights = torch.get_rng_state(), replica.snapshot()
    made = recorded_step._record(
        replica._run_step, replica._recorded_step._variables, replica.pack(batches("")[0]), (), False
    )
    assert made is not None
    assert torch.equal(state, torch.get_rng_state())
    for left, right in zip(weights, replica.snapshot(), strict=True):
        np.testing.assert_array_equal(left, right)
