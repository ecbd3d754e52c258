"""Models, data and simulated ranks for the laws of every replica, on the backend that KERAS_BACKEND names."""

from __future__ import annotations

import os
import types

os.environ.setdefault("KERAS_BACKEND", "jax")

import keras
import numpy as np
import pytest

from choros.backends import make_replica
from choros.types import Batch

layers = keras.layers
RNG = np.random.default_rng(7)
ROWS, BATCH = 32, 6  # a last batch of 2 rows: the third rank has none


def rows(*shape):
    return RNG.normal(size=(ROWS, *shape)).astype("float32")


X, LABEL, SOFT = rows(6), RNG.integers(0, 3, ROWS), rows(2)
BINARY = RNG.integers(0, 2, (ROWS, 1)).astype("float32")
WEIGHT = RNG.uniform(0.2, 3, ROWS).astype("float32")
TOKENS = RNG.integers(1, 9, (ROWS, 5)) * (np.arange(5) < RNG.integers(1, 6, (ROWS, 1)))
TAGS = RNG.integers(0, 3, (ROWS, 5))


def dense(*, l2=None, out=3, activation="softmax"):
    return keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(7, activation="relu", kernel_regularizer=l2),
            layers.Dense(out, activation=activation),
        ]
    )


def compiled(model, *args, **kwargs):
    model.compile(*args, **kwargs)
    return model


def adam():
    return keras.optimizers.Adam(0.01)


def adam_l2():
    model = dense(l2=keras.regularizers.L2(0.01))
    return compiled(
        model, adam(), "sparse_categorical_crossentropy", metrics=["accuracy"], weighted_metrics=["accuracy"]
    )


def clipped():
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True, clipnorm=0.05)
    return compiled(dense(out=2, activation=None), optimizer, "mse", metrics=["mae"])


def thresholds():
    model = dense(out=1, activation="sigmoid")
    return compiled(model, adam(), "binary_crossentropy", metrics=["accuracy", keras.metrics.AUC(name="auc")])


def many():
    a, b = keras.Input((6,), name="a"), keras.Input((2,), name="b")
    hidden = layers.Dense(5, activation="tanh")(layers.Concatenate()([a, b]))
    outputs = {"kind": layers.Dense(3, name="kind")(hidden), "size": layers.Dense(2, name="size")(hidden)}
    loss = {"kind": keras.losses.SparseCategoricalCrossentropy(from_logits=True), "size": "mae"}
    metrics = {"kind": ["accuracy"], "size": ["mse"]}
    return compiled(
        keras.Model({"a": a, "b": b}, outputs), adam(), loss, loss_weights={"kind": 1, "size": 0.3}, metrics=metrics
    )


def tagger(loss=None, recurrent=False):
    model = keras.Sequential([keras.Input((5,), dtype="int32"), layers.Embedding(9, 4, mask_zero=True)])
    if recurrent:
        model.add(layers.LSTM(4, return_sequences=True))
    model.add(layers.Dense(3, activation="softmax", kernel_regularizer="l2"))
    return compiled(model, adam(), loss or "sparse_categorical_crossentropy", metrics=["accuracy"])


def recurrent_tagger():
    return tagger(recurrent=True)


def pooled():
    model = keras.Sequential([keras.Input((5,), dtype="int32"), layers.Embedding(9, 4, mask_zero=True)])
    model.add(layers.GlobalAveragePooling1D())
    model.add(layers.Dense(3, activation="softmax"))
    return compiled(model, adam(), "sparse_categorical_crossentropy", metrics=["accuracy"])


def weighted_mean():
    loss = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
    return compiled(dense(l2="l2", out=2, activation=None), adam(), loss, weighted_metrics=["mse"])


def weighted_tagger():
    return tagger(keras.losses.SparseCategoricalCrossentropy(reduction="mean_with_sample_weight"))


def added():
    loss = keras.losses.MeanSquaredError(reduction="sum")
    return compiled(dense(out=2, activation=None), keras.optimizers.SGD(0.01), loss, metrics=["mae"])


def ignoring():
    return compiled(dense(), adam(), keras.losses.SparseCategoricalCrossentropy(ignore_class=0), metrics=["accuracy"])


def activity():
    model = dense(out=2, activation=None)
    model.layers[0].activity_regularizer = keras.regularizers.L2(0.1)
    return compiled(model, adam(), "mse", metrics=["mae"])


@keras.saving.register_keras_serializable("choros_tests")
class OwnLoss(keras.Model):
    """Bypasses the compiled loss: a mean over rows of its own."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.head = layers.Dense(2)

    def call(self, x):
        return self.head(x)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return keras.ops.mean(keras.ops.square(y - y_pred)) + 0.1 * keras.ops.mean(keras.ops.abs(y_pred))


def own_loss():
    return compiled(OwnLoss(), adam(), metrics=["mae"])


def averaged():
    optimizer = keras.optimizers.Adam(0.01, use_ema=True, ema_momentum=0.8, weight_decay=0.01, global_clipnorm=0.1)
    return compiled(dense(out=2, activation=None), optimizer, "mse", metrics=["mae"])


def accumulated():
    optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)
    return compiled(dense(out=2, activation=None), optimizer, "mse", metrics=["mae"])


def scheduled():
    rate = keras.optimizers.schedules.ExponentialDecay(0.1, 3, 0.5)
    return compiled(dense(out=2, activation=None), keras.optimizers.SGD(rate), "huber", metrics=["mae"])


CASES = {
    "adam, L2, sample weights": (adam_l2, X, LABEL, WEIGHT),
    "SGD, momentum, clipnorm": (clipped, X, SOFT, None),
    "AUC": (thresholds, X, BINARY, None),
    "inputs and outputs": (many, {"a": X, "b": SOFT}, {"kind": LABEL, "size": SOFT}, None),
    "masked steps": (recurrent_tagger, TOKENS, TAGS, None),
    "masked pooling": (pooled, TOKENS, LABEL, WEIGHT),
    "mean_with_sample_weight": (weighted_mean, X, SOFT, WEIGHT),
    "mean_with_sample_weight, unweighted": (weighted_mean, X, SOFT, None),
    "masked mean_with_sample_weight": (weighted_tagger, TOKENS, TAGS, None),
    "sum": (added, X, SOFT, WEIGHT),
    "ignore_class": (ignoring, X, LABEL, None),
    "activity regulariser": (activity, X, SOFT, None),
    "own compute_loss": (own_loss, X, SOFT, None),
    "EMA, weight decay, global clipnorm": (averaged, X, SOFT, None),
    "gradient accumulation": (accumulated, X, SOFT, None),
    "schedule": (scheduled, X, SOFT, None),
}


def cut(nested, where):
    return None if nested is None else keras.tree.map_structure(lambda leaf: leaf[where], nested)


def shares(x, y, weight, ranks, count=ROWS, size=BATCH):
    """For each global batch, each rank's contiguous share; the first ranks have one row more."""
    for start in range(0, count, size):
        total = min(count, start + size) - start
        split = []
        for rank in range(ranks):
            begin = start + sum(total // ranks + (r < total % ranks) for r in range(rank))
            n = total // ranks + (rank < total % ranks)
            part = slice(begin, begin + n)
            split.append(Batch(cut(x, part) if n else None, cut(y, part), cut(weight, part), n, total))
        yield split


def fresh(make):
    keras.utils.set_random_seed(3)
    return make()


def ranks_of(make, ranks, x, y, weight, workers=None):
    replicas = [make_replica(fresh(make), workers or ranks) for _ in range(ranks)]
    for replica in replicas:
        replica.build(Batch(cut(x, slice(8)), cut(y, slice(8)), cut(weight, slice(8)), 8, 8))
    for replica in replicas[1:]:
        replica.restore(replicas[0].snapshot())
    return replicas


def gathered(replicas, states):
    for replica in replicas:
        replica.set_metric_state(sum(states))
    logs = [replica.metrics() for replica in replicas]
    assert all(log == logs[0] for log in logs)
    return logs[0]


def train(ranks, x, y, weight, epochs=2):
    """Every epoch's logs, validation on the same data, as ``fit`` gives them.

    As the weights of all ranks are equal, one replica may stand for several (it compiles once).
    """
    replicas = list(dict.fromkeys(ranks))
    slots = [np.full(replica.size + 2, np.nan, replica.dtype) for replica in ranks]
    history = []
    for _ in range(epochs):
        for replica in replicas:
            replica.reset_metrics()
        for split in shares(x, y, weight, len(ranks)):
            for replica, batch, slot in zip(ranks, split, slots, strict=True):
                replica.gradients(batch, slot)
            summed = np.sum(slots, 0)
            for replica in replicas:
                replica.apply(summed)
        logs = gathered(replicas, [replica.metric_state() for replica in replicas])
        states = []
        for rank, replica in enumerate(ranks):
            replica.reset_metrics()
            for split in shares(x, y, weight, len(ranks)):
                replica.evaluate(split[rank])
            states.append(replica.metric_state())
        history.append(logs | {f"val_{name}": value for name, value in gathered(replicas, states).items()})
    for replica in replicas:
        replica.finish()
    return history


def dense_updates(model):
    """TensorFlow's gradient of an Embedding is sparse, which Keras' optimizers treat apart there; a sum is dense."""
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        apply = model.optimizer.apply

        def densified(gradients, variables=None):
            return apply([g if g is None else tf.convert_to_tensor(g) for g in gradients], variables)

        model.optimizer.apply = densified
    return model


def reference(make, x, y, weight, epochs=2, dense=True):
    model = dense_updates(fresh(make)) if dense else fresh(make)
    validation = (x, y) if weight is None else (x, y, weight)
    history = model.fit(
        x, y, sample_weight=weight, batch_size=BATCH, shuffle=False, epochs=epochs, verbose=0,
        validation_data=validation, validation_batch_size=BATCH,
    )  # fmt: skip
    return model, history.history


def values(model):
    return [keras.ops.convert_to_numpy(v) for v in model.trainable_variables]


def agree(replicas, history, model, expected):
    assert set(history[0]) == set(expected)
    for name in expected:
        allowed = 1e-4 if "auc" in name else 3e-6
        assert [logs[name] for logs in history] == pytest.approx(expected[name], rel=allowed, abs=allowed), name
    for replica in replicas:
        for ours, other, first in zip(values(replica.model), values(model), values(replicas[0].model), strict=True):
            np.testing.assert_allclose(ours, other, atol=1e-5)
            np.testing.assert_array_equal(ours, first)


def pytest_generate_tests(metafunc):
    """A test that takes ``law_case`` runs over every model."""
    if "law_case" in metafunc.fixturenames:
        metafunc.parametrize("law_case", CASES)


@pytest.fixture(scope="session")
def lab():
    """Return this module, whose helpers the tests beside it use."""
    return types.SimpleNamespace(**globals())
