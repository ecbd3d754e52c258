"""Several steps as one compiled program: the same result as single steps, and the cases without a window."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from choros.backends import make_replica
from choros.backends.step_windows import BYTES, VALUES
from choros.types import Batch

layers = keras.layers
RNG = np.random.default_rng(3)
X, Y = RNG.normal(size=(12, 8, 6)).astype("float32"), RNG.integers(0, 3, (12, 8))
WEIGHT = RNG.uniform(0.5, 2, (12, 8)).astype("float32")
HAS_WINDOWS = keras.backend.backend() != "torch"

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning")


def make(optimizer="adam", hidden=(), kind=keras.Sequential, **settings):
    keras.utils.set_random_seed(1)
    model = kind([keras.Input((6,)), layers.Dense(7, "relu"), *hidden, layers.Dense(3, "softmax")])
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"], **settings)
    return model


def batches(weighted=False):
    weights = WEIGHT if weighted else [None] * len(X)
    return [Batch(x, y, weight, len(x), len(x)) for x, y, weight in zip(X, Y, weights, strict=True)]


def built(model, weighted=False):
    replica = make_replica(model)
    replica.build(batches(weighted)[0])
    return replica


OPTIMIZERS = {
    "adam": lambda: "adam",
    "accumulation": lambda: keras.optimizers.Adam(0.01, gradient_accumulation_steps=2),
    "average": lambda: keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.9),
    "schedule": lambda: keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5), momentum=0.9),
    "clipping": lambda: keras.optimizers.Lamb(0.01, global_clipnorm=0.1),
    "scaling": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01), dynamic_growth_steps=3),
}


@pytest.mark.every(2)
@pytest.mark.parametrize(("weighted", "momentum"), [(False, 0.0), (True, 0.0), (False, 0.5)])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_window_trains_as_its_steps_do(name, weighted, momentum):
    hidden = lambda: [layers.BatchNormalization(), layers.Dropout(0.3, seed=2)]
    single, several = (built(make(OPTIMIZERS[name](), hidden()), weighted) for _ in range(2))
    several.restore(single.snapshot())
    data = batches(weighted)
    for replica in (single, several):
        if momentum:
            replica.look_ahead(momentum)
    window = several.window(data[0], 5)
    assert window == (5 if HAS_WINDOWS else 1)
    for batch in data:
        single.step(batch)
        if momentum:
            single.look_ahead(momentum)
    for first, last in ((0, 1), (1, 6), (6, 9), (9, 12)):  # also fewer steps than the program can make
        several.steps(data[first:last], window, momentum)
    np.testing.assert_allclose(several.metric_state(), single.metric_state(), rtol=1e-6)
    assert several.iterations == single.iterations
    # TensorFlow simplifies the arithmetic of a loop in another way. JAX compiles both alike.
    rounding = {"rtol": 2e-6, "atol": 1e-7} if keras.backend.backend() == "tensorflow" else {"rtol": 0}
    for value, expected in zip(several.snapshot(), single.snapshot(), strict=True):
        np.testing.assert_allclose(value, expected, **rounding)


def test_weights_of_half_precision_keep_their_type():
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((6,)), layers.Dense(7, "relu", dtype="bfloat16"), layers.Dense(3, "softmax")])
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "sparse_categorical_crossentropy")
    replica = built(model)
    replica.look_ahead(0.5)
    before = [value.dtype for value in replica.snapshot()]
    replica.steps(batches()[:4], replica.window(batches()[0], 4), 0.5)
    assert [value.dtype for value in replica.snapshot()] == before
    assert replica.iterations == 4


class OwnStep(keras.Sequential):
    def train_step(self, *values):
        return super().train_step(*values)


class OwnLogs(keras.Sequential):
    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        logs = super().compute_metrics(x, y, y_pred, sample_weight)
        return {**logs, "largest": keras.ops.max(y_pred)}


CASES = {
    "own step": lambda: make(kind=OwnStep),
    "eager": lambda: make(run_eagerly=True),
    "large model": lambda: make(hidden=[layers.Dense(VALUES // 7)]),
}


@pytest.mark.parametrize("case", CASES)
def test_no_window_for(case):
    assert built(CASES[case]()).window(batches()[0], 5) == 1


def test_logs_besides_the_metrics_are_those_of_the_last_step():
    replicas = [built(make(kind=OwnLogs)) for _ in range(2)]
    replicas[1].restore(replicas[0].snapshot())
    for batch in batches()[:4]:
        replicas[0].step(batch)
    replicas[1].steps(batches()[:4], replicas[1].window(batches()[0], 4))
    assert replicas[1].metrics() == replicas[0].metrics()
    assert "largest" in replicas[1].metrics()


def test_batches_of_a_window_are_limited():
    x = np.zeros((1 << 10, 1 << 10), "float32")  # 4 MiB
    model = keras.Sequential([keras.Input(x.shape[1:]), layers.Dense(1)])
    model.compile("sgd", "mse")
    batch = Batch(x, np.zeros((len(x), 1), "float32"), None, len(x), len(x))
    replica = make_replica(model)
    replica.build(batch)
    assert replica.window(batch, 16) == ((BYTES - 1) // x.nbytes if HAS_WINDOWS else 1)


@pytest.mark.parametrize("jit_compile", [False, True])
def test_xla_makes_each_convolution_alone(jit_compile):
    if keras.backend.backend() == "torch" or (keras.backend.backend() == "jax" and not jit_compile):
        pytest.skip("PyTorch has no windows, and eager JAX neither")
    inner = [layers.Reshape((6, 1)), layers.Conv1D(2, 3), layers.Flatten(), layers.Dense(3, "softmax")]
    model = keras.Sequential([keras.Input((6,)), *inner])
    model.compile("sgd", "sparse_categorical_crossentropy", jit_compile=jit_compile)
    assert built(model).window(batches()[0], 5) == (1 if jit_compile else 5)


def recurrent():
    inner = [layers.Embedding(50, 8, mask_zero=True), layers.Bidirectional(layers.GRU(6)), layers.Dense(3, "softmax")]
    return keras.Sequential([keras.Input((12,), dtype="int32"), *inner])


def attention():
    tokens = keras.Input((12,), dtype="int32")
    hidden = layers.Embedding(50, 8)(tokens)
    hidden = layers.LayerNormalization()(layers.MultiHeadAttention(2, 4)(hidden, hidden) + hidden)
    return keras.Model(tokens, layers.Dense(3, "softmax")(layers.GlobalAveragePooling1D()(hidden)))


@pytest.mark.parametrize("network", [recurrent, attention])
def test_a_window_of_tokens(network):
    tokens, labels = RNG.integers(0, 50, (8, 8, 12)).astype("int32"), RNG.integers(0, 3, (8, 8))
    data = [Batch(x, y, None, 8, 8) for x, y in zip(tokens, labels, strict=True)]
    replicas = []
    for _ in range(2):
        keras.utils.set_random_seed(1)
        model = network()
        model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
        replicas.append(make_replica(model))
        replicas[-1].build(data[0])
    single, several = replicas
    several.restore(single.snapshot())
    window = several.window(data[0], 4)
    for first in (0, 4):
        several.steps(data[first : first + 4], window)
        for batch in data[first : first + 4]:
            single.step(batch)
    for value, expected in zip(several.snapshot(), single.snapshot(), strict=True):
        np.testing.assert_allclose(value, expected, rtol=2e-6, atol=1e-7)
