"""Behavior of the replica on TensorFlow alone: traces, XLA, borrowed memory, sparse gradients of embeddings."""

from __future__ import annotations

import os

import pytest

if os.environ.get("KERAS_BACKEND") != "tensorflow":
    pytest.skip("needs KERAS_BACKEND=tensorflow", allow_module_level=True)

import keras
import numpy as np
import tensorflow as tf

from choros.backends import make_replica
from choros.backends import tensorflow as room
from choros.errors import InexactLossError
from choros.types import Batch

layers = keras.layers
RNG = np.random.default_rng(5)
X, Y = RNG.normal(size=(24, 6)).astype("float32"), RNG.normal(size=(24, 2)).astype("float32")


def batch(*where, total=None):
    part = slice(*where)
    rows = len(X[part])
    return Batch(X[part], Y[part], None, rows, total or rows)


def network(units=7):
    return [layers.Dense(units, activation="relu"), layers.Dense(2)]


def build(model=None, optimizer=None, first=None, units=7, **kwargs):
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((6,)), *network(units)]) if model is None else model()
    model.compile(optimizer or keras.optimizers.Adam(0.01), "mse", metrics=["mae"], **kwargs)
    replica = make_replica(model, 2)
    replica.build(first or batch(8))
    return replica


def vector(replica):
    out = np.empty(replica.size, replica.dtype)
    replica.get(out)
    return out


def reduced(replica, *batches):
    """One reduced step over these batches, on a single replica."""
    slots = [np.empty(replica.size + 2, replica.dtype) for _ in batches]
    for each, slot in zip(batches, slots, strict=True):
        replica.gradients(each, slot)
    summed = np.sum(slots, 0)
    replica.apply(summed)
    return summed


def under_xla(traced):
    return traced.function_def.attr["_XlaMustCompile"].b


class Own(keras.Sequential):
    """A train_step of the user's, with its own scale of the loss and its own way to the optimizer."""

    traces = 0

    def train_step(self, data):
        type(self).traces += 1
        x, y = data
        with tf.GradientTape() as tape:
            loss = 3 * self.compute_loss(x, y, self(x, training=True))
        variables = self.trainable_variables[::-1]
        self.update(list(zip(tape.gradient(loss, variables), variables, strict=True)))
        return {"own": loss}

    def update(self, pairs):
        self.optimizer.apply_gradients(pairs)


class Twice(Own):
    def update(self, pairs):
        self.optimizer.apply_gradients(pairs)
        self.optimizer.apply_gradients(pairs)


class Never(Own):
    def update(self, pairs):
        for gradient, variable in pairs:
            variable.assign_sub(0.01 * gradient)


class Inner(Own):
    def update(self, pairs):
        tf.function(lambda: self.optimizer.apply_gradients(pairs))()


class Two(Own):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.second = keras.optimizers.SGD()


def own(kind):
    return lambda: kind([keras.Input((6,)), *network()])


@pytest.mark.parametrize("how", [{}, {"jit_compile": True}, {"run_eagerly": True}])
def test_a_custom_train_step_is_reduced(how):
    plain, replica = build(own(Own), **how), build(own(Own), **how)
    for _ in range(3):
        plain.step(batch(24))
        reduced(replica, batch(0, 8, total=24), batch(8, 13, total=24), batch(13, 24, total=24))
    np.testing.assert_allclose(vector(replica), vector(plain), atol=1e-6)
    assert set(replica.metrics()) == {"own"}


@pytest.mark.parametrize(
    ("kind", "message"),
    [(Twice, "more than once"), (Never, "does not update"), (Inner, "its own tf.function"), (Two, "'second'")],
)
def test_a_train_step_that_cannot_be_reduced_is_refused(kind, message):
    replica = build(own(kind))
    before = vector(replica)
    with pytest.raises(InexactLossError, match=message):
        replica.gradients(batch(8), np.empty(replica.size + 2, np.float32))
    assert "apply" not in vars(replica.model.optimizer)
    np.testing.assert_array_equal(vector(replica), before)


def test_one_trace_serves_every_number_of_rows():
    replica = build(own(Own))
    Own.traces = 0
    for rows in (8, 5, 24, 1):
        reduced(replica, batch(rows))
    assert Own.traces == 1


@pytest.mark.parametrize("jit_compile", [False, True])
def test_halves_equal_the_plain_step(jit_compile):
    plain, replica = build(jit_compile=False), build(jit_compile=jit_compile)
    for where in ((0, 8), (8, 16), (16, 24), (0, 5)):
        plain.step(batch(*where))
        reduced(replica, batch(*where))
        replica.evaluate(batch(*where))
    np.testing.assert_allclose(vector(replica), vector(plain), atol=1e-6)


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda: keras.optimizers.Adam(0.01),
        lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True, clipnorm=0.1),
        lambda: keras.optimizers.AdamW(0.01, use_ema=True, ema_overwrite_frequency=2),
        lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.RMSprop(0.01), initial_scale=16.0),
    ],
)
def test_the_large_update_under_xla_is_the_same(optimizer, monkeypatch):
    plain = build(optimizer=optimizer())
    monkeypatch.setattr(room, "LARGE", 0)
    replica = build(optimizer=optimizer())
    for where in ((0, 8), (8, 16), (16, 24)):
        plain.step(batch(*where))
        reduced(replica, batch(*where))
    assert under_xla(replica._update)
    np.testing.assert_allclose(vector(replica), vector(plain), atol=1e-6)


@keras.saving.register_keras_serializable("choros_tests")
class Hoarder(keras.optimizers.SGD):
    """Keeps the last gradient as it is, and uses an operation that XLA cannot compile."""

    def build(self, variables):
        super().build(variables)
        self.last = self.add_optimizer_variables(variables, "last")

    def update_step(self, gradient, variable, learning_rate):
        last = self.last[self._get_variable_index(variable)]
        same = tf.numpy_function(lambda value: value, [gradient + last], tf.float32)
        super().update_step(tf.reshape(same, variable.shape), variable, learning_rate)
        self.assign(last, gradient)


def test_nothing_of_the_caller_is_kept_and_xla_is_left_where_it_cannot(monkeypatch):
    monkeypatch.setattr(room, "LARGE", 0)
    first, second = build(optimizer=Hoarder(0.1)), build(optimizer=Hoarder(0.1))
    for replica in (first, second):
        source = np.zeros(replica.size + 64, np.float32)
        start = -source.ctypes.data % 64 // 4
        source = source[start : start + replica.size]
        source[:] = vector(replica) * 2
        replica.set(source)
        space = np.zeros(replica.size + 66, np.float32)
        for where, offset in (((0, 8), 0), ((8, 16), 1), ((16, 24), 0)):
            start = -space.ctypes.data % 64 // 4 + offset
            slot = space[start : start + replica.size + 2]
            assert slot.ctypes.data % 64 == 4 * offset
            replica.gradients(batch(*where), slot)
            replica.apply(slot)
            if replica is second:
                slot[:] = source[:] = np.nan
    assert np.isfinite(vector(second)).all()
    np.testing.assert_array_equal(vector(first), vector(second))
    assert not under_xla(second._update)


def test_read_only_batches_and_sums_are_taken():
    results = []
    for writeable in (True, False):
        x, y, replica = X[:8].copy(), Y[:8].copy(), build()
        slot = np.empty(replica.size + 2, np.float32)
        x.flags.writeable = y.flags.writeable = writeable
        replica.gradients(Batch(x, y, None, 8, 8), slot)
        slot.flags.writeable = writeable
        replica.apply(slot)
        replica.step(Batch(x, y, None, 8, 8))
        results.append(vector(replica))
    np.testing.assert_array_equal(*results)


def test_an_embedding_is_reduced_densely():
    def model():
        return keras.Sequential([keras.Input((3,), dtype="int32"), layers.Embedding(5, 2), layers.Flatten()])

    tokens = np.array([[1, 1, 2], [3, 1, 1]], np.int32)
    y = np.ones((2, 6), np.float32)
    replica = build(model, optimizer=keras.optimizers.SGD(0.1), first=Batch(tokens, y, None, 2, 2))
    table = vector(replica).reshape(5, 2)
    summed = reduced(replica, *(Batch(tokens[i : i + 1], y[i : i + 1], None, 1, 2) for i in range(2)))
    expected = np.zeros_like(table)
    for row in tokens:
        for token in row:
            expected[token] += 2 * (table[token] - 1) / 6
    np.testing.assert_allclose(summed[:10].reshape(5, 2), expected, rtol=1e-5)
    np.testing.assert_allclose(vector(replica).reshape(5, 2), table - 0.1 * expected / 2, rtol=1e-5)


def test_an_unused_variable_has_a_gradient_of_zero():
    class Unused(keras.Model):
        def __init__(self):
            super().__init__()
            self.used, self.spare = layers.Dense(2), layers.Dense(2)

        def call(self, x):
            self.spare(x)
            return self.used(x)

    replica = build(Unused)
    summed = reduced(replica, batch(8))
    assert replica.size == 28
    assert (summed[14:28] == 0).all()
    assert (summed[:14] != 0).all()


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "bfloat16"])
def test_low_precision(policy):
    keras.config.set_dtype_policy(policy)
    try:
        plain, replica = (build(optimizer=keras.optimizers.SGD(0.1)) for _ in range(2))
    finally:
        keras.config.set_dtype_policy("float32")
    before = vector(replica)
    plain.step(batch(24))
    summed = reduced(replica, batch(0, 12, total=24), batch(12, 24, total=24))
    assert summed.dtype == np.float32
    assert summed[-1] == 24
    np.testing.assert_allclose(vector(replica), vector(plain), atol=2e-2)
    assert (vector(replica) != before).any()
    replica.set(before)
    np.testing.assert_array_equal(vector(replica), before)


def a_step(replica):
    replica.step(batch(8))
    replica.finish()
    return replica.reusable


def test_a_replica_is_reusable_if_its_traces_have_no_state_besides_the_models():
    assert a_step(build())
    assert not a_step(build(run_eagerly=True))


@pytest.mark.parametrize(
    "noise",
    [
        lambda x: x + tf.random.normal(tf.shape(x)),
        lambda x: tf.ensure_shape(tf.numpy_function(lambda value: value, [x], tf.float32), (None, 6)),
        lambda x: tf.map_fn(lambda row: row + tf.random.uniform(()), x),
    ],
)
def test_a_replica_with_operations_of_another_state_is_not_reusable(noise):
    replica = build(lambda: keras.Sequential([keras.Input((6,)), layers.Lambda(noise), *network()]), jit_compile=False)
    assert not a_step(replica)


def test_a_replica_with_a_variable_that_the_model_does_not_track_is_not_reusable():
    count = tf.Variable(0.0)

    def counting(x):
        count.assign_add(1.0)
        return x + 0.0 * count

    replica = build(lambda: keras.Sequential([keras.Input((6,)), layers.Lambda(counting), *network()]))
    assert not a_step(replica)
