"""Errors that only the replica on JAX can make: aliased memory, leaked tracers, retracing, a stateless train_step."""

from __future__ import annotations

import os

os.environ.setdefault("KERAS_BACKEND", "jax")

import keras
import numpy as np
import pytest

from choros.backends import make_replica
from choros.errors import InexactLossError
from choros.types import Batch

pytestmark = [
    pytest.mark.skipif(keras.backend.backend() != "jax", reason="KERAS_BACKEND names another backend"),
    # Keras' Variable.__array__ has no copy keyword; numpy 2 says so when a variable is read.
    pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning"),
]

layers = keras.layers
RNG = np.random.default_rng(5)
X, Y = RNG.normal(size=(12, 4)).astype("float32"), RNG.normal(size=(12, 2)).astype("float32")


def part(begin, end, total=12):
    return Batch(X[begin:end], Y[begin:end], None, end - begin, total)


class Stepped(keras.Model):
    """A train_step of one's own, as Keras' guide for JAX writes it."""

    updates = 1

    def __init__(self):
        super().__init__()
        self.head = layers.Dense(2)

    def call(self, x):
        return self.head(x)

    def train_step(self, state, data):
        import jax

        trained, others, slots, metrics = state
        x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
        differentiate = jax.value_and_grad(self.compute_loss_and_updates, has_aux=True)
        (loss, (_, _, others, metrics)), grads = differentiate(
            trained, others, metrics, x, y, weight, training=True, optimizer_variables=slots
        )
        grads = [0.5 * g for g in grads]
        for _ in range(self.updates):
            trained, slots = self.optimizer.stateless_apply(slots, grads, trained)
        return {"own": 2 * loss}, (trained, others, slots, metrics)


def stepped(updates=1):
    keras.utils.set_random_seed(1)
    model = Stepped()
    model.updates = updates
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


def replica_of(model, workers=1, batch=None):
    replica = make_replica(model, workers)
    replica.build(batch or part(0, 4))
    return replica


def slot_of(replica):
    return np.empty(replica.size + 2, replica.dtype)


def test_own_train_step_keeps_its_meaning_and_its_logs():
    model = stepped()
    model.fit(X, Y, batch_size=12, shuffle=False, verbose=0)
    replica = replica_of(stepped(), workers=2)
    first, other = slot_of(replica), slot_of(replica)
    replica.gradients(part(0, 8), first)
    replica.gradients(part(8, 12), other)
    assert (first[-1], other[-1]) == (8, 4)
    replica.apply(first + other)
    assert set(replica.metrics()) == {"own"}
    replica.finish()
    for ours, expected in zip(replica.model.trainable_variables, model.trainable_variables, strict=True):
        np.testing.assert_allclose(ours.value, expected.value, atol=1e-6)


@pytest.mark.parametrize("updates", [0, 2])
def test_another_number_of_updates_a_step_is_refused(updates):
    replica = replica_of(stepped(updates), workers=2)
    with pytest.raises(InexactLossError, match=rf"used model\.optimizer {updates} times"):
        replica.gradients(part(0, 4), slot_of(replica))
    assert "stateless_apply" not in vars(replica.model.optimizer)


def tagger():
    model = keras.Sequential([keras.Input((5,), dtype="int32"), layers.Embedding(9, 3, mask_zero=True)])
    model.add(layers.Dropout(0.2))
    model.add(layers.Dense(3, activation="softmax"))
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def test_no_tracer_leaks():
    import jax

    tokens = RNG.integers(0, 9, (6, 5)).astype("int32")
    batch = Batch(tokens, tokens % 3, None, 6, 6)
    with jax.checking_leaks():
        replica = replica_of(tagger(), batch=batch)
        slot = slot_of(replica)
        for _ in range(2):
            replica.gradients(batch, slot)
            replica.apply(slot)
            replica.evaluate(batch)
            replica.step(batch)
        assert slot[-1] == (tokens > 0).sum()
        assert np.isfinite(list(replica.metrics().values())).all()


def test_equal_shapes_are_compiled_once():
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((4,)), layers.Dense(3), layers.BatchNormalization(), layers.Dense(2)])
    model.compile("adam", "mse", metrics=["mae"])
    replica = replica_of(model)
    slot = slot_of(replica)
    for _ in range(3):
        for begin in (0, 4, 8):
            replica.gradients(part(begin, begin + 4), slot)
            replica.apply(slot)
            replica.step(part(begin, begin + 4))
            replica.evaluate(part(begin, begin + 4))
        replica.metrics()
        replica.reset_metrics()
        replica.set(np.zeros(replica.size, np.float32))
    for function in (replica._differentiate, replica._update, replica._train, replica._test):
        assert function._cache_size() == 1


def wide():
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((4,)), layers.Dense(40_000, use_bias=False), layers.Dense(2)])
    model.compile(keras.optimizers.SGD(1.0), "mse")
    return model


def aligned(count):
    raw = np.empty(count * 4 + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + count * 4].view(np.float32)


@pytest.mark.parametrize("offset", [0, 1])
def test_memory_of_the_caller_may_be_overwritten_at_once(offset):
    replica = replica_of(wide())
    out = np.empty(replica.size, np.float32)
    memory = aligned(replica.size + 2 + offset)[offset:]
    for value in (1.0, 2.0):
        memory[:] = value
        replica.set(memory[:-2])
        memory[:] = np.nan
        replica.get(out)
        assert (out == value).all()
        memory[:] = 0.5  # a gradient of 0.5 / 0.5, at a rate of 1
        replica.apply(memory)
        memory[:] = np.nan
        replica.get(out)
        assert (out == value - 1).all()


def test_vectors_read_do_not_change_with_the_model():
    replica = replica_of(wide())
    before = replica.snapshot()
    saved = [array.copy() for array in before]
    replica.step(part(0, 4))
    assert all((a == b).all() for a, b in zip(before, saved, strict=True))


def test_setting_weights_leaves_those_of_the_model_until_finish():
    """A caller's callbacks may read the model before the first step."""
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3)])
    model.compile("sgd", "mse")
    before = model.get_weights()
    replica = make_replica(model)
    replica.build(Batch(np.zeros((4, 2), "float32"), np.zeros((4, 3), "float32"), None, 4, 4))
    replica.set(np.arange(9, dtype="float32"))
    for old, new in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)
    replica.finish()
    np.testing.assert_array_equal(np.concatenate([w.reshape(-1) for w in model.get_weights()]), np.arange(9))


def test_training_goes_on_after_finish():
    replica = replica_of(wide())
    replica.step(part(0, 4))
    replica.finish()
    first = replica.snapshot()
    replica.step(part(4, 8))
    assert any((a != b).any() for a, b in zip(first, replica.snapshot(), strict=True))


def test_half_precision_variables_travel_as_float32():
    policy = keras.config.dtype_policy()
    keras.config.set_dtype_policy("bfloat16")
    try:
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((4,)), layers.Dense(2)])
        model.compile(keras.optimizers.SGD(0.1), "mse")
    finally:
        keras.config.set_dtype_policy(policy)
    replica = replica_of(model)
    vector, out, slot = np.arange(10, dtype=np.float32), np.empty(10, np.float32), slot_of(replica)
    replica.set(vector)
    replica.get(out)
    np.testing.assert_array_equal(out, vector)
    replica.gradients(part(0, 3), slot)
    assert slot.dtype == np.float32
    assert (slot[:-2].view(np.uint32) & 0xFFFF).any()  # 3 * g was not rounded to bfloat16
    replica.apply(slot)
    replica.get(out)
    assert (out != vector).any()


def test_the_only_variable_of_a_dropout_is_its_seeds():
    model = tagger()
    assert [v.name for v in model.non_trainable_variables] == ["seed_generator_state"]
    assert model.layers[1].seed_generator.state is model.non_trainable_variables[0]


@pytest.mark.parametrize("momentum", [False, True])
def test_many_small_variables_are_updated_and_set_as_few_are(monkeypatch, momentum):
    from choros.backends import jax as module

    def trained():
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((4,)), *(layers.Dense(4, "tanh") for _ in range(40)), layers.Dense(2)])
        model.compile(keras.optimizers.Adam(0.01), "mse")
        replica = make_replica(model, 2)
        replica.build(part(0, 12))
        if momentum:
            replica.look_ahead(0.9)
        vector, summed = np.empty(replica.size, replica.dtype), np.empty(replica.size + 2, replica.dtype)
        for _ in range(2):
            replica.gradients(part(0, 12), summed)
            replica.apply(summed)
            if momentum:
                replica.look_ahead(0.9)
        replica.get(vector)
        replica.set(0.5 * vector)
        views = len(replica._small)
        replica.finish()
        return views, model.get_weights()

    count, weights = trained()
    assert count == 82
    monkeypatch.setattr(module, "_MANY", 1000)
    few, expected = trained()
    assert few == 0
    for value, other in zip(weights, expected, strict=True):
        np.testing.assert_array_equal(value, other)
