"""Steps on PyTorch that run as a record of their operations have the same bits as Keras' steps."""

from __future__ import annotations

import functools
import signal
import sys

import keras
import numpy as np
import pytest

from choros.backends import make_replica
from choros.types import Batch

if keras.backend.backend() != "torch":
    pytest.skip("needs KERAS_BACKEND=torch", allow_module_level=True)

import torch
import torch._inductor

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


def rated():
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((6,)), layers.Dense(7, "relu"), layers.Dense(1, "sigmoid")])
    model.compile("adam", "binary_crossentropy", metrics=[keras.metrics.AUC(name="auc")])
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
    "auc": rated,
    "images": images,
    "shared": shared,
}


def batches(name):
    if name == "shared":
        pairs = [({"one": x, "two": -x}, [x[:, :3], x[:, :1]]) for x in X]
        return [Batch(x, y, None, 8, 8) for x, y in pairs]
    if name == "auc":
        return [Batch(x, (y[:, None] > 0).astype("float32"), None, 8, 8) for x, y in zip(X, Y, strict=True)]
    weights = WEIGHT if name == "adam" else [None] * len(X)
    return [Batch(x, y, weight, 8, 8) for x, y, weight in zip(X, Y, weights, strict=True)]


def train(monkeypatch, model, data, how="step", seconds=-1.0, between=lambda step, model: None):
    """Return the variables and the metrics after a step for each batch, and the replica."""
    monkeypatch.setattr(recorded_step, "_SECONDS", seconds)
    if recorded_step._MAX_SECONDS:  # a slow machine must not end a recording
        monkeypatch.setattr(recorded_step, "_MAX_SECONDS", 300.0)
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
    "an array": lambda: make(hidden=lambda: [layers.Rescaling(np.full(7, 0.5, "float32"))]),
    "numbers from a seed": lambda: make(hidden=lambda: [layers.Dropout(0.3, seed=2)]),
    "noise": lambda: make(hidden=lambda: [layers.GaussianNoise(0.1)]),
    "scaling": lambda: make(keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01))),
    "accumulation": lambda: make(keras.optimizers.Adam(0.01, gradient_accumulation_steps=2)),
    "a loop over time": lambda: make(hidden=lambda: [layers.Reshape((7, 1)), layers.LSTM(2, unroll=True)]),
}


@pytest.mark.parametrize("name", NOT_RECORDED)
def test_a_step_that_a_record_would_change_is_not_recorded(monkeypatch, name):
    if "time" in name:
        monkeypatch.setattr(recorded_step, "_MAX_SECONDS", 0.0)
    plain = train(monkeypatch, NOT_RECORDED[name](), batches(name), seconds=1e9)
    recorded = train(monkeypatch, NOT_RECORDED[name](), batches(name))
    same(plain, recorded)
    assert not recorded[2]._recorded_step._records or not any(recorded[2]._recorded_step._records.values())


FACTOR = {"now": 1.0}
SGD = functools.partial(keras.optimizers.SGD, 0.1, momentum=0.9)


def scaled(x):
    return x * FACTOR["now"]


@functools.wraps(keras.activations.relu)
def scaled_relu(x):
    return keras.activations.relu(x) * FACTOR["now"]


def at(number, change):
    """Return a function that makes a change before the step with this number."""
    return lambda step, model: change(model) if step == number else None


def set_factor(step, model):
    FACTOR["now"] = 1.0 if step < 6 else 3.0


def set_activation(step, model):
    set_factor(step, model)
    if step == 3:
        model.layers[0].activation = scaled


def set_epsilon(step, model):
    keras.config.set_epsilon(1e-7 if step < 5 else 0.2)


def with_dropout():
    return make(SGD(), lambda: [layers.Dropout(0.3)])


def with_elu():
    keras.utils.set_random_seed(1)
    inputs = keras.Input((6,))
    model = keras.Model(inputs, keras.layers.Dense(3, "softmax")(keras.ops.elu(inputs)))
    model.compile(SGD(), "sparse_categorical_crossentropy")
    return model


def with_huber():
    return make(SGD(), loss=keras.losses.MeanSquaredError())


def zero_and_rate(model):
    model.layers[0].kernel.assign(0 * model.layers[0].kernel)
    model.optimizer.learning_rate = 0.3


def kernel(model):
    return model.layers[0].kernel


CHANGES = {
    "rate": (with_dropout, at(4, lambda model: setattr(model.layers[1], "rate", 0.1))),
    "momentum": (make, at(5, lambda model: setattr(model.optimizer, "beta_1", 0.5))),
    "weights": (make, at(5, zero_and_rate)),
    "hook": (
        make,
        at(5, lambda model: model.layers[0].register_forward_hook(lambda layer, inputs, output: 2 * output)),
    ),
    "hook of a tensor": (make, at(5, lambda model: kernel(model).value.register_hook(lambda gradient: -gradient))),
    "frozen variable": (lambda: make(SGD()), at(5, lambda model: setattr(kernel(model), "trainable", False))),
    "regularizer": (make, at(5, lambda model: setattr(kernel(model), "regularizer", keras.regularizers.L2(0.5)))),
    "constraint": (make, at(5, lambda model: setattr(kernel(model), "constraint", keras.constraints.NonNeg()))),
    "activation": (make, set_activation),
    "epsilon": (with_huber, set_epsilon),
    "operation": (with_elu, at(5, lambda model: setattr(model.operations[1], "alpha", 3.0))),
    "loss": (with_huber, at(5, lambda model: setattr(model._compile_loss._flat_losses[0].loss, "reduction", "sum"))),
    "wrapped": (lambda: make(hidden=lambda: [layers.Activation(scaled_relu)]), set_factor),
}


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
@pytest.mark.parametrize("how", ["step", "gradients"])
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_between_two_steps_counts_in_the_next(monkeypatch, name, how):
    model, change = CHANGES[name]
    data = batches("")
    if model is with_huber:
        data = [Batch(batch.x, np.eye(3, dtype="float32")[batch.y], None, 8, 8) for batch in data]
    plain = train(monkeypatch, model(), data, how, seconds=1e9, between=change)
    recorded = train(monkeypatch, model(), data, how, between=change)
    keras.config.set_epsilon(1e-7)
    FACTOR["now"] = 1.0
    same(plain, recorded)
    unchanged = train(monkeypatch, model(), data, how)
    # The learning rate of Keras' epsilon is no part of this loss, and a hook of a tensor sees no captured gradient.
    if name != "epsilon" and (name, how) != ("frozen variable", "gradients"):
        assert not all(np.array_equal(a, b) for a, b in zip(recorded[0], unchanged[0], strict=True))


def test_a_model_that_changes_all_the_time_is_recorded_no_more(monkeypatch):
    monkeypatch.setattr(recorded_step, "_MAX_CHANGES", 3)

    def change(step, model):
        model.layers[1].rate = 0.01 * step

    model = make(hidden=lambda: [layers.Dropout(0.3)])
    recorded = train(monkeypatch, model, batches(""), between=change)
    assert not recorded[2]._recorded_step._active
    model = make(hidden=lambda: [layers.Dropout(0.3)])
    same(recorded, train(monkeypatch, model, batches(""), seconds=1e9, between=change))


def test_each_form_of_a_batch_has_a_record(monkeypatch):
    data = batches("")
    data[3::3] = [Batch(x, y, None, rows, rows) for rows in (5, 3, 5) for x, y in [(X[1][:rows], Y[1][:rows])]]
    recorded = train(monkeypatch, make(), data)
    assert len(recorded[2]._recorded_step._records) == 3
    same(recorded, train(monkeypatch, make(), data, seconds=1e9))
    monkeypatch.setattr(recorded_step, "_MAX_FORMS", 2)
    few = train(monkeypatch, make(), data)
    assert len(few[2]._recorded_step._records) == 2
    same(recorded, few)


def strided(kind):
    """Return the batches, some with other strides."""
    wide = np.repeat(X, 2, axis=2)
    arrays = [
        x if step < 4 else np.asfortranarray(x) if kind == "columns first" else w[:, ::2]
        for step, (x, w) in enumerate(zip(X, wide, strict=True))
    ]
    return [Batch(x, y, None, 8, 8) for x, y in zip(arrays, Y, strict=True)]


@pytest.mark.parametrize("kind", ["columns first", "gaps"])
def test_batches_with_other_strides_have_records_of_their_own(monkeypatch, kind):
    def model():
        keras.utils.set_random_seed(1)
        parts = [layers.Reshape((3, 2)), layers.Conv1D(4, 2), layers.Flatten(), layers.Dense(3, "softmax")]
        model = keras.Sequential([keras.Input((6,)), *parts])
        model.compile("sgd", "sparse_categorical_crossentropy")
        return model

    plain = train(monkeypatch, model(), strided(kind), seconds=1e9)
    recorded = train(monkeypatch, model(), strided(kind))
    same(plain, recorded)
    assert len(recorded[2]._recorded_step._records) == 2


def test_a_batch_that_has_a_tensor_twice_has_no_record(monkeypatch):
    def fit(seconds):
        monkeypatch.setattr(recorded_step, "_SECONDS", seconds)
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((6,)), layers.Dense(6)])
        model.compile("sgd", "mse")
        model.train_on_batch(X[0], X[0])
        replica = make_replica(model)
        replica.attach()
        tensors = [torch.from_numpy(x) for x in X]
        pairs = [(tensors[0], tensors[0]), (tensors[1], tensors[2]), (tensors[3], tensors[3]), (tensors[4], tensors[5])]
        return [gradient for pair in pairs for gradient in replica.half_step(pair)[0]], replica

    plain, _ = fit(1e9)
    recorded, replica = fit(-1.0)
    for left, right in zip(plain, recorded, strict=True):
        np.testing.assert_array_equal(left, right)
    assert len(records(replica)) == 1


def test_no_record_runs_within_autocast(monkeypatch):
    def within(step, model):
        context.__enter__() if step == 4 else context.__exit__(None, None, None) if step == 8 else None

    context = torch.autocast("cpu", torch.bfloat16)
    plain = train(monkeypatch, make(), batches(""), seconds=1e9, between=within)
    context = torch.autocast("cpu", torch.bfloat16)
    same(plain, train(monkeypatch, make(), batches(""), between=within))


def test_a_recorded_step_leaves_no_tensors_without_data(monkeypatch):
    model = make(hidden=lambda: [layers.Dense(5, activity_regularizer="l2")])
    recorded = train(monkeypatch, model, batches(""))
    assert records(recorded[2])
    assert model.losses == []
    same(
        recorded,
        train(monkeypatch, make(hidden=lambda: [layers.Dense(5, activity_regularizer="l2")]), batches(""), seconds=1e9),
    )


def test_a_record_that_takes_longer_than_the_step_is_dropped(monkeypatch):
    model = make()
    recorded = train(monkeypatch, model, [*batches("")] * 3, seconds=0.001)
    replica = recorded[2]
    assert records(replica)
    replica._recorded_step._steps = dict.fromkeys(replica._recorded_step._steps, (1, 0.0))
    for record in replica._recorded_step._records.values():
        record.trials = 1
    replica.step(batches("")[0])
    assert not any(replica._recorded_step._records.values())
    replica.step(batches("")[0])


def test_a_step_is_recorded_only_when_it_has_taken_a_while(monkeypatch):
    replica = train(monkeypatch, make(), batches(""), seconds=60.0)[2]
    assert not records(replica)
    assert replica._recorded_step._steps
    assert 0 < sum(seconds for _, seconds in replica._recorded_step._steps.values()) < 60


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("name", ["schedule", "shared", "float16"])
def test_a_compiled_record_trains_as_the_step_does(monkeypatch, name):
    data = batches(name)
    if name != "shared":
        data.append(Batch(X[0][:5], Y[0][:5], None, 5, 5))
    make_model = MODELS[name]
    plain = train(monkeypatch, make_model(), data, seconds=1e9)
    model = make_model()
    model.jit_compile = True
    monkeypatch.setattr(torch, "compile", compile_nothing)
    compiled = train(monkeypatch, model, data)
    assert len(compiled[2]._recorded_step._records) == 1  # the short batch comes too seldom
    for left, right in zip(plain[0], compiled[0], strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-5, atol=1e-3 if name == "float16" else 1e-6)


def store_transposed(step, model):
    """Change the strides of the weights within their tensors, as ``model.to(memory_format=...)`` does."""
    for variable in model.trainable_variables if step == 5 else []:
        variable.value.data = variable.value.data.t().contiguous().t()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_a_record_is_compiled_again_when_weights_are_stored_in_another_way(monkeypatch):
    plain = train(monkeypatch, make("sgd"), batches(""), seconds=1e9)
    compiled = train(monkeypatch, make("sgd", jit_compile=True), batches(""), between=store_transposed)
    assert records(compiled[2])
    for left, right in zip(plain[0], compiled[0], strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-5, atol=1e-6)


def compile_nothing(function, **options):
    """Stand in for ``torch.compile``: neither steps of Keras nor their records need it."""
    assert not options

    def fail(*arguments):
        raise AssertionError("a step of Keras was compiled")

    return fail


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
def test_a_record_is_compiled_by_the_public_interface_if_the_private_one_fails(monkeypatch):
    plain = train(monkeypatch, make("sgd"), batches(""), seconds=1e9)
    compiler, compiled = torch.compile, []
    monkeypatch.delattr(torch._inductor, "standalone_compile")
    monkeypatch.setitem(sys.modules, "torch._inductor.standalone_compile", None)  # an import of it fails
    monkeypatch.setattr(torch, "compile", lambda part, **options: compiled.append(part) or compiler(part, **options))
    model = make("sgd", jit_compile=True)
    recorded = train(monkeypatch, model, batches(""))
    assert len(records(recorded[2])) == 2  # the step, and the evaluation
    assert sum(isinstance(part, torch.fx.GraphModule) for part in compiled) == 2
    for left, right in zip(plain[0], recorded[0], strict=True):
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
        replica._traced_step, replica._recorded_step._variables, replica.pack(batches("")[0]), (), False
    )
    assert made is not None
    assert torch.equal(state, torch.get_rng_state())
    for left, right in zip(weights, replica.snapshot(), strict=True):
        np.testing.assert_array_equal(left, right)


def test_a_signal_during_a_recording_is_handled_after_it(monkeypatch):
    """Ctrl-C in the midst of an operation without data would abort the process."""
    replica = train(monkeypatch, make(), batches(""), seconds=1e9)[2]
    steps, events = replica._recorded_step, []

    def step(data):
        signal.raise_signal(signal.SIGINT)
        events.append("signal")
        return replica._traced_step(data)

    with pytest.raises(KeyboardInterrupt):
        recorded_step._record(step, steps._variables, replica.pack(batches("")[0]), (), False)
    assert events == ["signal"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    monkeypatch.setattr(recorded_step, "_SECONDS", -1.0)
    replica.step(batches("")[0])
    assert records(replica)


@pytest.mark.parametrize("seconds", [0.01, 0.05, 0.1, 0.2])
def test_a_recording_that_takes_too_long_ends_without_a_record(monkeypatch, seconds):
    monkeypatch.setattr(recorded_step, "_MAX_SECONDS", 0.0)
    model = make(hidden=lambda: [layers.Reshape((7, 1)), layers.LSTM(16)])
    replica = train(monkeypatch, model, batches("")[:1], seconds=1e9)[2]
    monkeypatch.setattr(recorded_step, "_MAX_SECONDS", seconds)
    monkeypatch.setattr(recorded_step, "_SECONDS", -1.0)
    for batch in batches(""):
        replica.step(batch)
    assert np.isfinite(replica.metrics()["loss"])


def test_an_error_of_a_signal_handler_reaches_the_caller(monkeypatch):
    def fail(number, frame):
        raise RuntimeError("from the handler")

    replica = train(monkeypatch, make(), batches(""), seconds=1e9)[2]
    before = signal.signal(signal.SIGUSR1, fail)

    def step(data):
        signal.raise_signal(signal.SIGUSR1)
        return replica._traced_step(data)

    try:
        with pytest.raises(RuntimeError, match="from the handler"):
            recorded_step._record(step, replica._recorded_step._variables, replica.pack(batches("")[0]), (), False)
    finally:
        signal.signal(signal.SIGUSR1, before)
