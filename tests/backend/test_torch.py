"""Behavior of the replica on PyTorch alone: torch.compile, train mode, shared and separate memory."""

from __future__ import annotations

import os

import pytest

if os.environ.get("KERAS_BACKEND") != "torch":
    pytest.skip("needs KERAS_BACKEND=torch", allow_module_level=True)

import keras
import numpy as np
import torch
import torch._inductor

from choros.backends import make_replica
from choros.errors import InexactLossError
from choros.types import Batch

pytestmark = [
    # Keras reads a tensor with np.array; torch's __array__ has no copy keyword, and numpy 2 says so.
    pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning"),
]

layers = keras.layers
RNG = np.random.default_rng(5)
X, Y = RNG.normal(size=(24, 6)).astype("float32"), RNG.normal(size=(24, 2)).astype("float32")


def batch(*where, total=None):
    part = slice(*where)
    rows = len(X[part])
    return Batch(X[part], Y[part], None, rows, total or rows)


def network():
    return [layers.Dense(7, activation="relu"), layers.Dense(2)]


def build(model=None, loss="mse", optimizer=None, first=None, workers=2, **kwargs):
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((6,)), *network()]) if model is None else model()
    model.compile(optimizer or keras.optimizers.Adam(0.01), loss, metrics=["mae"], **kwargs)
    replica = make_replica(model, workers)
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


class Own(keras.Sequential):
    """A train_step of the user's, with its own scale of the loss and its own way to the optimizer."""

    def train_step(self, data):
        x, y = data
        self.zero_grad()
        loss = 3 * self.compute_loss(x, y, self(x, training=True))
        loss.backward()
        pairs = [(v.value.grad, v) for v in reversed(self.trainable_variables)]
        with torch.no_grad():
            self.update(pairs)
        return {"own": loss.detach()}

    def update(self, pairs):
        self.optimizer.apply_gradients(pairs)


class Twice(Own):
    def update(self, pairs):
        self.optimizer.apply_gradients(pairs)
        self.optimizer.apply_gradients(pairs)


class Never(Own):
    def update(self, pairs):
        for gradient, variable in pairs:
            variable.value.sub_(gradient, alpha=0.01)


class Foreign(Own):
    def update(self, pairs):
        self.optimizer.apply([pairs[0][0]], [keras.Variable(1.0)])


class Two(Own):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.second = keras.optimizers.SGD()


def own(kind):
    return lambda: kind([keras.Input((6,)), *network()])


def test_a_custom_train_step_is_reduced():
    plain, replica = build(own(Own)), build(own(Own))
    for _ in range(3):
        plain.step(batch(24))
        reduced(replica, batch(0, 8, total=24), batch(8, 13, total=24), batch(13, 24, total=24))
    np.testing.assert_allclose(vector(replica), vector(plain), atol=1e-6)
    assert set(replica.metrics()) == {"own"}


@pytest.mark.parametrize(
    ("kind", "message"),
    [(Twice, "more than once"), (Never, "does not update"), (Foreign, "not a trainable variable"), (Two, "'second'")],
)
def test_a_train_step_that_cannot_be_reduced_is_refused(kind, message):
    replica = build(own(kind))
    before = vector(replica)
    with pytest.raises(InexactLossError, match=message):
        replica.gradients(batch(8), np.empty(replica.size + 2, np.float32))
    assert "apply" not in vars(replica.model.optimizer)
    if kind is not Never:
        np.testing.assert_array_equal(vector(replica), before)


def test_read_only_batches_and_sums_are_taken():
    inputs = [array[:8] for array in (X, Y)]
    frozen = [array.copy() for array in inputs]
    for array in frozen:
        array.flags.writeable = False
    results = []
    for x, y in (inputs, frozen, [array[::-1].copy()[::-1] for array in inputs]):
        replica = build()
        slot = np.empty(replica.size + 2, np.float32)
        replica.gradients(Batch(x, y, None, 8, 8), slot)
        slot.flags.writeable = x.flags.writeable
        replica.apply(slot)
        replica.step(Batch(x, y, None, 8, 8))
        results.append(vector(replica))
    np.testing.assert_array_equal(results[0], results[1])
    np.testing.assert_array_equal(results[0], results[2])


def test_nothing_of_the_caller_is_kept():
    first, second = build(), build()
    for replica in (first, second):
        source, slot = vector(replica) * 2, np.empty(replica.size + 2, np.float32)
        replica.set(source)
        for where in ((0, 8), (8, 16)):
            replica.gradients(batch(*where), slot)
            replica.apply(slot)
            if replica is second:
                slot[:] = source[:] = np.nan
    np.testing.assert_array_equal(vector(first), vector(second))


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


def test_mixed_bfloat16_keeps_float32_weights():
    policy = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        plain, replica = build(), build()
    finally:
        keras.config.set_dtype_policy(policy)
    plain.step(batch(24))
    summed = reduced(replica, batch(0, 12, total=24), batch(12, 24, total=24))
    assert summed.dtype == np.float32
    assert summed[-1] == 24
    np.testing.assert_allclose(vector(replica), vector(plain), atol=5e-3)
    assert (vector(replica) != vector(build())).any()


def test_bfloat16_variables_are_read_and_set():
    keras.config.set_dtype_policy("bfloat16")
    try:
        replica = build(optimizer=keras.optimizers.SGD(0.1))  # Adam's beta_2 is 1 in bfloat16: it would stand still
    finally:
        keras.config.set_dtype_policy("float32")
    before = vector(replica)
    reduced(replica, batch(8))
    assert (vector(replica) != before).any()
    replica.set(before)
    np.testing.assert_array_equal(vector(replica), before)


def test_layers_see_the_mode_of_fit():
    seen = []

    class Watch(layers.Layer):
        def call(self, x):
            seen.append(self.training)
            return x

    class Watched(keras.Model):
        def __init__(self):
            super().__init__()
            self.watch, self.head = Watch(), layers.Dense(2)

        def call(self, x):
            return self.head(self.watch(x))

    replica = build(Watched)
    seen.clear()
    replica.step(batch(8))
    replica.evaluate(batch(8))
    reduced(replica, batch(8))
    replica.finish()
    assert seen == [True, False, True]
    assert not replica.model.training


def test_the_default_process_group_stays_away():
    reduced(build(), batch(8))
    assert not torch.distributed.is_initialized()


@pytest.fixture
def programs(monkeypatch):
    """The records given to PyTorch's compiler, which compiles nothing here: a C++ compiler would take long."""
    compiled = []
    monkeypatch.setattr(
        torch._inductor, "standalone_compile", lambda module, inputs, **options: compiled.append(module) or module
    )
    return compiled


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_compiled_halves_equal_the_plain_step(programs):
    plain, replica = (build(optimizer=keras.optimizers.SGD(0.1), jit_compile=jit) for jit in (False, True))
    for where in ((0, 8), (8, 16), (16, 24)):
        plain.step(batch(*where))
        reduced(replica, batch(*where))
        assert len(programs) == 2  # the gradients and the update; nothing is compiled anew at each step
    np.testing.assert_allclose(vector(replica), vector(plain), atol=1e-6)
    assert replica.metrics()["mae"] == pytest.approx(plain.metrics()["mae"], rel=1e-5)
    plain.step(batch(8))
    replica.step(batch(8))
    np.testing.assert_allclose(vector(replica), vector(plain), atol=1e-6)
