"""Laws of every replica, on the backend that KERAS_BACKEND names (default jax): k ranks equal one process."""

from __future__ import annotations

import os

os.environ.setdefault("KERAS_BACKEND", "jax")

import keras
import numpy as np
import pytest

from choros.backend import check_exact, make_replica
from choros.errors import BadInput, NotExact
from choros.types import Batch

pytestmark = [
    # Keras' Variable.__array__ has no copy keyword; numpy 2 says so when a variable is read.
    pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning"),
]

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
        for ours, theirs, first in zip(values(replica.model), values(model), values(replicas[0].model), strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-5)
            np.testing.assert_array_equal(ours, first)


@pytest.mark.parametrize("case", CASES)
def test_shares_add_up_to_one_process(case):
    make, x, y, weight = CASES[case]
    model, expected = reference(make, x, y, weight)
    (replica,) = ranks_of(make, 1, x, y, weight, workers=3)
    agree([replica], train([replica] * 3, x, y, weight), model, expected)


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_ranks_equal_one_process(ranks):
    make, x, y, weight = CASES["adam, L2, sample weights"]
    model, expected = reference(make, x, y, weight)
    replicas = ranks_of(make, ranks, x, y, weight)
    agree(replicas, train(replicas, x, y, weight), model, expected)


@pytest.mark.parametrize("case", ["adam, L2, sample weights", "SGD, momentum, clipnorm"])
def test_one_rank_is_fit(case):
    make, x, y, weight = CASES[case]
    model, expected = reference(make, x, y, weight, epochs=1, dense=False)
    (replica,) = ranks_of(make, 1, x, y, weight)
    for (batch,) in shares(x, y, weight, 1):
        replica.step(batch)
    logs = replica.metrics()
    replica.finish()
    assert all(logs[name] == pytest.approx(expected[name][0], rel=1e-6) for name in logs)
    for ours, theirs in zip(values(replica.model), values(model), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-7)


def test_mixed_precision_keeps_loss_scaling():
    def make():
        policy = keras.config.dtype_policy()
        keras.config.set_dtype_policy("mixed_float16")
        try:
            model = dense(out=2, activation=None)
            # A scale at which neither 8 rows nor a rank's 3 overflow, so that nobody leaves out a step.
            optimizer = keras.optimizers.LossScaleOptimizer(adam(), initial_scale=64.0)
            return compiled(model, optimizer, "mse", metrics=["mae"])
        finally:
            keras.config.set_dtype_policy(policy)

    model, expected = reference(make, X, SOFT, None)
    replicas = ranks_of(make, 1, X, SOFT, None, workers=3)
    assert isinstance(replicas[0].model.optimizer, keras.optimizers.LossScaleOptimizer)
    assert replicas[0].learning_rate == pytest.approx(0.01)
    history = train(replicas * 3, X, SOFT, None)
    assert history[-1]["loss"] == pytest.approx(expected["loss"][-1], rel=5e-3)
    for ours, theirs in zip(values(replicas[0].model), values(model), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-2)
        assert ours.dtype == np.float32

    huge = Batch(X[:4] * 1e30, SOFT[:4], None, 4, 4)  # not finite in float16: no step, half the scale
    before, slot = replicas[0].snapshot(), np.empty(replicas[0].size + 2, np.float32)
    replicas[0].gradients(huge, slot)
    replicas[0].apply(slot)
    after = replicas[0].snapshot()
    count = len(replicas[0].model.variables)
    assert all((a == b).all() for a, b in zip(before[:count], after[:count], strict=True))
    assert any((a == b / 2).all() and b.size == 1 for a, b in zip(after[count:], before[count:], strict=True))


@pytest.mark.parametrize("how", [{"jit_compile": False}, {"run_eagerly": True}])
def test_not_compiled(how):
    def make():
        return compiled(dense(), adam(), "sparse_categorical_crossentropy", metrics=["accuracy"], **how)

    def plain():
        return compiled(dense(), adam(), "sparse_categorical_crossentropy", metrics=["accuracy"])

    few = slice(12)
    model = fresh(plain)
    expected = model.fit(X[few], LABEL[few], batch_size=BATCH, shuffle=False, verbose=0).history
    replicas = ranks_of(make, 2, X, LABEL, None)
    slots = [np.empty(replica.size + 2, replica.dtype) for replica in replicas]
    for split in shares(X, LABEL, None, 2, count=12):
        for replica, batch, slot in zip(replicas, split, slots, strict=True):
            replica.gradients(batch, slot)
        for replica in replicas:
            replica.apply(slots[0] + slots[1])
    logs = gathered(replicas, [replica.metric_state() for replica in replicas])
    replicas[1].finish()
    assert logs["loss"] == pytest.approx(expected["loss"][0], rel=1e-5)
    for ours, theirs in zip(values(replicas[1].model), values(model), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)


def test_a_wholly_masked_rank_weighs_nothing():
    tokens, tags = TOKENS[:4].copy(), TAGS[:4]
    tokens[2:] = 0
    replicas = ranks_of(tagger, 2, tokens, tags, None)
    slots = [np.empty(replica.size + 2, replica.dtype) for replica in replicas]
    for replica, part, slot in zip(replicas, (slice(0, 2), slice(2, 4)), slots, strict=True):
        replica.gradients(Batch(tokens[part], tags[part], None, 2, 4), slot)
    assert slots[0][-1] == (tokens[:2] > 0).sum()
    assert 0 < slots[1][-1] < 1e-15
    together = np.sum(slots, 0)
    assert np.isfinite(together).all()
    np.testing.assert_allclose(together, slots[0], rtol=1e-6)


def test_vectors_are_copied_both_ways():
    (replica,) = ranks_of(adam_l2, 1, X, LABEL, WEIGHT)
    vector = np.arange(replica.size, dtype=replica.dtype)
    replica.set(vector)
    kept = vector.copy()
    vector[:] = -1
    out = np.empty(replica.size, replica.dtype)
    replica.get(out)
    np.testing.assert_array_equal(out, kept)
    replica.step(next(shares(X, LABEL, WEIGHT, 1))[0])
    np.testing.assert_array_equal(out, kept)
    slot = np.empty(replica.size + 2, replica.dtype)
    replica.gradients(next(shares(X, LABEL, WEIGHT, 1))[0], slot)
    replica.apply(slot)
    replica.get(out)
    slot[:] = np.nan
    again = np.empty_like(out)
    replica.get(again)
    np.testing.assert_array_equal(again, out)


def test_snapshot_and_restore_are_in_keras_order():
    first, second = (make_replica(fresh(adam_l2)) for _ in range(2))
    batches = [split[0] for split in shares(X, LABEL, WEIGHT, 1)]
    for replica in (first, second):
        replica.build(batches[0])
    first.step(batches[0])
    state = first.snapshot()
    first.step(batches[1])
    second.restore(state)
    second.step(batches[1])
    one, other = first.snapshot(), second.snapshot()
    assert len(one) == len(first.model.variables) + len(first.model.optimizer.variables)
    assert all((a == b).all() for a, b in zip(one, other, strict=True))
    assert not all((a == b).all() for a, b in zip(one, state, strict=True))
    first.finish()
    for array, variable in zip(one, first.model.variables, strict=False):
        np.testing.assert_array_equal(array, keras.ops.convert_to_numpy(variable))


def normed():
    frozen = layers.Dense(4, trainable=False)
    model = keras.Sequential([keras.Input((6,)), frozen, layers.BatchNormalization(), layers.Dropout(0.5)])
    model.add(layers.GaussianNoise(0.1))
    model.add(layers.Dense(2))
    return compiled(model, adam(), "mse")


def test_moving_statistics_are_apart_from_weights_and_seeds():
    (replica,) = ranks_of(normed, 1, X, SOFT, None)
    assert replica.others == 8
    assert replica.size == 8 + 10
    replica.set_others(np.arange(8, dtype=replica.dtype))
    out = np.empty(8, replica.dtype)
    replica.get_others(out)
    np.testing.assert_array_equal(out, np.arange(8))
    replica.step(next(shares(X, SOFT, None, 1))[0])
    replica.get_others(out)
    assert (out != np.arange(8)).all()


def test_seeds_differ_by_rank_and_are_reproducible():
    def states(rank, seed):
        (replica,) = ranks_of(normed, 1, X, SOFT, None)
        own = [a.tolist() for a in replica._values(replica.seeds)]
        replica.fold_seeds(rank, seed)
        return own, [a.tolist() for a in replica._values(replica.seeds)]

    own, kept = states(0, None)
    assert len(own) == 2
    assert kept == own
    folded = [states(rank, None)[1] for rank in (1, 2)]
    seeded = [states(rank, 11)[1] for rank in (0, 1)]
    everything = [tuple(s) for state in (own, *folded, *seeded) for s in state]
    assert len(set(everything)) == len(everything)
    assert states(2, None)[1] == folded[1]
    assert states(1, 11)[1] == seeded[1]


def test_learning_rate():
    (replica,) = ranks_of(clipped, 1, X, SOFT, None)
    replica.learning_rate = 0.0
    assert replica.learning_rate == 0
    before = replica.snapshot()[0]
    replica.step(next(shares(X, SOFT, None, 1))[0])
    np.testing.assert_array_equal(replica.snapshot()[0], before)
    (replica,) = ranks_of(scheduled, 1, X, SOFT, None)
    replica.learning_rate = 5.0
    assert replica.learning_rate == pytest.approx(0.1)
    for split in list(shares(X, SOFT, None, 1))[:3]:
        replica.step(split[0])
    assert replica.learning_rate == pytest.approx(0.05)


def test_look_ahead_is_nesterov_around_the_step():
    def make():
        return compiled(dense(out=2, activation=None), keras.optimizers.SGD(0.05), "mse")

    (plain,) = ranks_of(make, 1, X, SOFT, None)
    (replica,) = ranks_of(make, 1, X, SOFT, None)
    mu, x, v = 0.9, np.empty(plain.size, np.float32), np.zeros(plain.size, np.float32)
    plain.get(x)
    replica.look_ahead(mu)
    out = np.empty_like(x)
    for number, (batch,) in enumerate(shares(X, SOFT, None, 1)):
        if number == 3:  # an elastic pull between two steps: the velocity stays
            x = x * np.float32(0.5)
            replica.set(x)
        plain.set(x + mu * v)
        plain.step(batch)
        plain.get(out)
        v = out - x
        x = out.copy()
        replica.step(batch)
        replica.look_ahead(mu)
        replica.get(out)
        np.testing.assert_allclose(out, x, atol=1e-6)
    plain.set(x)
    for each in (plain, replica):
        each.reset_metrics()
        each.evaluate(Batch(X, SOFT, None, ROWS, ROWS))
    assert replica.metrics()["loss"] == pytest.approx(plain.metrics()["loss"], rel=1e-5)
    replica.finish()
    flat = np.concatenate([value.reshape(-1) for value in values(replica.model)])
    np.testing.assert_allclose(flat, x, atol=1e-6)


def test_local_metrics_add_over_workers():
    replicas = ranks_of(adam_l2, 2, X, LABEL, WEIGHT)
    own = []
    for replica, part in zip(replicas, (slice(0, 12), slice(12, ROWS)), strict=True):
        replica.step(Batch(X[part], LABEL[part], WEIGHT[part], part.stop - part.start, ROWS))
        own.append((replica.metrics(), part.stop - part.start))
    logs = gathered(replicas, [replica.metric_state() for replica in replicas])
    for name in ("loss", "accuracy"):
        assert logs[name] == pytest.approx(sum(log[name] * n for log, n in own) / ROWS, rel=1e-6)


def test_what_is_not_exact_is_refused_by_name():
    mse = keras.losses.MeanSquaredError
    bad = {
        "reduction=None": compiled(dense(), "sgd", mse(reduction=None)),
        "Circle|circle": compiled(dense(), "sgd", keras.losses.Circle()),
        "regularisers": compiled(dense(l2="l2"), "sgd", mse(reduction="sum")),
        "several losses": compiled(many(), "sgd", {"kind": mse(reduction="sum"), "size": "mse"}),
    }
    for message, model in bad.items():
        with pytest.raises(NotExact, match=message):
            check_exact(model)
    check_exact(compiled(dense(l2="l2"), "sgd", mse(reduction="sum")), workers=1)
    for make, *_ in CASES.values():
        check_exact(make())


def test_refusals_are_for_reduced_steps_only():
    def make():
        return compiled(dense(l2="l2", out=2), "sgd", keras.losses.MeanSquaredError(reduction="sum"))

    replica = ranks_of(make, 2, X, SOFT, None)[0]
    batch = Batch(X[:4], SOFT[:4], None, 4, 8)
    replica.step(batch)
    replica.evaluate(batch)
    with pytest.raises(NotExact, match="regularisers"):
        replica.gradients(batch, np.empty(replica.size + 2, replica.dtype))


def scalar_mean(y_true, y_pred):
    return keras.ops.mean(keras.ops.square(y_true - y_pred))


def scalar_root(y_true, y_pred):
    return keras.ops.sqrt(keras.ops.mean(keras.ops.square(y_true - y_pred)))


def across_rows(y_true, y_pred):
    return keras.ops.mean(keras.ops.square(y_pred - keras.ops.mean(y_pred, axis=0)) + y_true * y_pred, axis=-1)


@pytest.mark.parametrize(
    ("loss", "weight", "exact"),
    [
        (scalar_mean, None, True),
        (scalar_mean, WEIGHT, False),  # Keras multiplies it by the mean of the weights
        (scalar_root, None, False),
        (across_rows, None, False),
        (keras.losses.Dice(), None, False),
        (keras.losses.Dice(axis=1), None, True),
        (keras.losses.Tversky(), None, False),
        (lambda y, p: keras.ops.mean(keras.ops.abs(y - p), axis=-1), WEIGHT, True),
        ("mse", WEIGHT, True),
    ],
)
def test_losses_that_are_not_keras_own_are_tried(loss, weight, exact):
    def make():
        return compiled(dense(out=2, activation="sigmoid"), "sgd", loss)

    replica = ranks_of(make, 1, X, BINARY.repeat(2, 1), weight, workers=2)[0]
    batch = Batch(X[:4], BINARY[:4].repeat(2, 1), cut(weight, slice(4)), 4, 8)
    slot = np.empty(replica.size + 2, replica.dtype)
    if exact:
        check_exact(replica.model, 2, batch)
        replica.gradients(batch, slot)
        assert slot[-1] == 4
    else:
        with pytest.raises(NotExact, match="not the mean of its rows"):
            check_exact(replica.model, 2, batch)
        with pytest.raises(NotExact, match="not the mean of its rows"):
            replica.gradients(batch, slot)


def two_masked_outputs():
    tokens = keras.Input((5,), dtype="int32")
    hidden = layers.Embedding(9, 4, mask_zero=True)(tokens)
    return compiled(keras.Model(tokens, [layers.Dense(3)(hidden), layers.Dense(3)(hidden)]), "sgd", ["mse", "mae"])


def masked_and_regularised():
    model = tagger()
    model.layers[-1].activity_regularizer = keras.regularizers.L2(0.1)
    return compiled(model, "sgd", "sparse_categorical_crossentropy")


@pytest.mark.parametrize(
    ("make", "y", "message"),
    [
        (two_masked_outputs, [np.ones((ROWS, 5, 3), "float32")] * 2, "several losses"),
        (masked_and_regularised, TAGS, "activity regulariser"),
    ],
)
def test_divisors_that_do_not_agree_are_refused(make, y, message):
    replica = ranks_of(make, 2, TOKENS, y, None)[0]
    batch = Batch(TOKENS[:4], cut(y, slice(4)), None, 4, 8)
    with pytest.raises(NotExact, match=message):
        replica.gradients(batch, np.empty(replica.size + 2, replica.dtype))


def test_an_uncompiled_model_is_refused():
    with pytest.raises(BadInput, match=r"model\.compile"):
        make_replica(dense())
