"""Law 1: by AllReduce, k workers are one process on the same global batches."""

import inspect
import json
import os
import sys

import keras
import numpy as np
import pytest

import choros

WORKERS = (2, 3, 5) if os.environ["KERAS_BACKEND"] == "jax" else (2, 3)
LOOSE = ("auc",)


def train_both(pools, plain_fit, make, x, y, workers, *, rows_of=None, epochs=3, batch_size=16, **kwargs):
    """Return both models and both histories."""
    reference, model = make(), make()
    expected = plain_fit(reference, x, y, epochs=epochs, batch_size=batch_size, seed=5, **kwargs)
    trainer = choros.Trainer(model, "allreduce", workers=workers, pool=pools(workers))
    found = trainer.fit(x, y, epochs=epochs, batch_size=batch_size, seed=5, verbose=0, **kwargs).history
    return reference, model, expected, found


def check(reference, model, expected, found, same_weights):
    same_weights(reference, model, 1e-5)
    assert list(found) == list(expected)
    for name in expected:
        tolerance = 1e-4 if any(word in name for word in LOOSE) else 2e-6
        np.testing.assert_allclose(found[name], expected[name], rtol=tolerance, atol=tolerance, err_msg=name)


@pytest.mark.parametrize("workers", WORKERS)
def test_adam_l2_metrics_validation_and_a_last_batch_smaller_than_the_workers(
    pools, plain_fit, make_mlp, data, same_weights, workers
):
    x, y = data(rows=99)  # batches of 16: the last has 3 rows
    valid = data(rows=33, seed=1)
    make = lambda: make_mlp(l2=1e-2)
    check(*train_both(pools, plain_fit, make, x, y, workers, validation_data=valid), same_weights)


@pytest.mark.parametrize("workers", WORKERS)
def test_sample_weights_auc_and_weighted_metrics(pools, plain_fit, make_mlp, data, same_weights, workers):
    x, y = data(rows=103, classes=2)
    y = y.reshape(-1, 1)
    weights = np.random.default_rng(2).uniform(0.1, 3, 103).astype("float32")
    make = lambda: make_mlp(classes=1, metrics=["accuracy", keras.metrics.AUC(name="auc")], weighted_metrics=["mse"])
    check(*train_both(pools, plain_fit, make, x, y, workers, sample_weight=weights), same_weights)


@pytest.mark.parametrize("workers", WORKERS)
def test_class_weights_and_sgd_with_clipnorm(pools, plain_fit, make_mlp, data, same_weights, workers):
    x, y = data(rows=70)
    make = lambda: make_mlp(optimizer=keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True, clipnorm=0.3))
    weights = {0: 1.0, 1: 0.5, 2: 2.0}
    check(*train_both(pools, plain_fit, make, x, y, workers, class_weight=weights), same_weights)


@pytest.mark.parametrize("workers", (2, 3))
def test_several_inputs_and_outputs(pools, plain_fit, data, same_weights, workers):
    x, y = data(rows=75)

    def make():
        keras.utils.set_random_seed(3)
        left, right = keras.Input((4,), name="left"), keras.Input((4,), name="right")
        hidden = keras.layers.Dense(12, "tanh")(keras.layers.Concatenate()([left, right]))
        outputs = {
            "kind": keras.layers.Dense(3, "softmax", name="kind")(hidden),
            "size": keras.layers.Dense(1, name="size")(hidden),
        }
        model = keras.Model({"left": left, "right": right}, outputs)
        model.compile(
            keras.optimizers.Adam(1e-2),
            {"kind": "sparse_categorical_crossentropy", "size": "mse"},
            loss_weights={"kind": 1.0, "size": 0.3},
            metrics={"kind": ["accuracy"], "size": ["mae"]},
        )
        return model

    inputs = {"left": x[:, :4], "right": x[:, 4:]}
    targets = {"kind": y, "size": x.sum(1, keepdims=True)}
    check(*train_both(pools, plain_fit, make, inputs, targets, workers), same_weights)


@pytest.mark.parametrize("workers", (2, 3))
def test_masks(pools, plain_fit, same_weights, workers, backend):
    rng = np.random.default_rng(4)
    x = rng.integers(1, 20, (61, 7))
    for row, length in enumerate(rng.integers(1, 8, 61)):
        x[row, length:] = 0
    y = rng.integers(0, 4, (61, 7))

    def make():
        keras.utils.set_random_seed(3)
        model = keras.Sequential(
            [
                keras.Input((7,), dtype="int32"),
                keras.layers.Embedding(20, 8, mask_zero=True),
                keras.layers.Dense(8, "tanh"),
                keras.layers.Dense(4, "softmax"),
            ]
        )
        # TensorFlow's Adam treats rows of an Embedding that repeat in a batch in its own, sparse way
        optimizer = keras.optimizers.SGD(0.5) if backend == "tensorflow" else keras.optimizers.Adam(1e-2)
        model.compile(optimizer, "sparse_categorical_crossentropy")
        return model

    check(
        *train_both(pools, plain_fit, make, x, y, workers, validation_data=(x[:20], y[:20]), validation_batch_size=8),
        same_weights,
    )


@pytest.mark.parametrize("reduction", ("mean_with_sample_weight", "sum"))
def test_other_reductions(pools, plain_fit, make_mlp, data, same_weights, reduction):
    x, y = data(rows=70)
    weights = np.random.default_rng(2).uniform(0.1, 3, 70).astype("float32")
    loss = keras.losses.SparseCategoricalCrossentropy
    make = lambda: make_mlp(optimizer=keras.optimizers.SGD(0.01), loss=loss(reduction=reduction))
    check(*train_both(pools, plain_fit, make, x, y, 2, sample_weight=weights), same_weights)


def test_what_cannot_be_exact_is_refused_by_name(make_mlp, data, pools):
    x, y = data(rows=70)
    model = make_mlp(loss=keras.losses.SparseCategoricalCrossentropy(reduction="none"))
    with pytest.raises(choros.errors.NotExact, match="reduction"):
        choros.Trainer(model, workers=2, pool=pools(2)).fit(x, y, verbose=0)


def test_a_custom_train_step(pools, plain_fit, data, same_weights, backend):
    x, y = data(rows=70)
    check(*train_both(pools, plain_fit, lambda: custom(backend), x, y, 2), same_weights)


def custom(backend):
    """A model whose train_step is its user's own: it trains on inputs scaled by two."""

    class Scaled(keras.Sequential):
        if backend == "jax":

            def train_step(self, state, data):
                x, y = data
                return super().train_step(state, (x * 2.0, y))
        else:

            def train_step(self, data):
                x, y = data
                return super().train_step((x * 2.0, y))

    keras.utils.set_random_seed(0)
    model = Scaled([keras.Input((8,)), keras.layers.Dense(16, "relu"), keras.layers.Dense(3, "softmax")])
    model.compile(keras.optimizers.Adam(1e-2), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


@pytest.mark.parametrize("policy", ("mixed_bfloat16", "mixed_float16"))
def test_mixed_precision_ends_bit_equal_and_near_one_process(pools, plain_fit, make_mlp, data, same_weights, policy):
    x, y = data(rows=70)
    keras.config.set_dtype_policy(policy)
    try:
        make = lambda: make_mlp(optimizer=keras.optimizers.SGD(0.05))
        reference, model, _, _ = train_both(pools, plain_fit, make, x, y, 2)
    finally:
        keras.config.set_dtype_policy("float32")
    same_weights(reference, model, 2e-2)  # the two halves of a batch are rounded apart


def metric_class(additive):
    """A user's own metric: rows counted (adds up) or the largest output seen (does not)."""

    class Own(keras.metrics.Metric):
        def __init__(self, name="own", **kwargs):
            super().__init__(name=name, **kwargs)
            self.value = self.add_weight(shape=(), initializer="zeros", name="value")

        def update_state(self, y_true, y_pred, sample_weight=None):
            if additive:
                self.value.assign_add(keras.ops.cast(keras.ops.shape(y_pred)[0], "float32"))
            else:
                self.value.assign(keras.ops.maximum(self.value, keras.ops.max(y_pred)))

        def result(self):
            return keras.ops.convert_to_tensor(self.value)

    return Own


def test_a_metric_of_ones_own_that_adds_up_is_summed(pools, make_mlp, data):
    x, y = data(rows=61)
    model = make_mlp(metrics=[metric_class(additive=True)()])
    history = choros.Trainer(model, workers=2, pool=pools(2)).fit(x, y, batch_size=16, verbose=0).history
    assert history["own"] == [61.0]


def test_a_metric_that_does_not_add_up_is_a_mean_by_rows_with_a_warning(pools, make_mlp, data):
    x, y = data(rows=61)
    model = make_mlp(metrics=[metric_class(additive=False)()])
    trainer = choros.Trainer(model, workers=2, pool=pools(2))
    with pytest.warns(UserWarning, match="'own' .* does not add up") as told:
        history = trainer.fit(x, y, batch_size=16, verbose=0).history
    assert [one.filename for one in told if "'own'" in str(one.message)] == [__file__]  # the line that called fit
    assert 1 / 3 < history["own"][0] <= 1.0  # a sum of two largest probabilities would be above 1 or near it
    assert history["own"][0] < 0.99


def test_a_function_of_the_whole_batch_is_a_mean_by_rows_with_a_warning(pools, make_mlp, plain_fit, data):
    def widest(y, p):
        return keras.ops.max(p) - keras.ops.min(p)

    def first(y, p):
        return p[:, 0]

    x, y = data(rows=61)
    models = [make_mlp(metrics=[widest, first]) for _ in range(2)]
    with pytest.warns(UserWarning, match="'widest' .* does not add up") as told:
        found = choros.Trainer(models[0], workers=2, pool=pools(2)).fit(x, y, batch_size=16, seed=5, verbose=0).history
    assert not any("'first'" in str(one.message) for one in told)
    expected = plain_fit(models[1], x, y, epochs=1, batch_size=16, seed=5)
    assert found["first"] == pytest.approx(expected["first"], rel=1e-6)
    assert found["widest"] == pytest.approx(expected["widest"], rel=0.2)  # of parts: narrower


@pytest.mark.parametrize("names", [("loss", "mine"), ("loss",)], ids=str)
def test_a_train_step_that_logs_its_own_loss_is_heard(pools, plain_fit, data, same_weights, backend, names):
    """Where it logs nothing but what Keras' running loss is called, that is what is logged: 0, and not no number."""
    x, y = data(rows=70)
    make = lambda: own_logs(backend, names)
    reference, model, expected, found = train_both(pools, plain_fit, make, x, y, 2)
    same_weights(reference, model, 1e-5)
    assert list(found) == list(expected)
    for name in names:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-5)


def test_a_train_step_with_metrics_of_its_own_logs_what_one_process_does(pools, plain_fit, data, same_weights, backend):
    """As Keras' guides write it: the mean over batches, not rows, and one figure more than the metrics."""
    x, y = data(rows=52)
    reference, model, expected, found = train_both(pools, plain_fit, lambda: own_metrics(backend), x, y, 3)
    same_weights(reference, model, 1e-5)
    assert found.keys() == expected.keys()
    assert {"loss", "hits", "more"} == found.keys()
    for name in expected.keys() - {"more"}:  # of the last batch: every rank has its part
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-6)


def test_its_logs_are_of_all_workers_that_step_by_themselves(pools, data, backend):
    """With a rate of nothing nobody learns, so the workers' figures together are those of one process."""
    x, y = data(rows=64)
    models = [own_metrics(backend, keras.optimizers.SGD(1e-12)) for _ in range(2)]
    how = {"batch_size": 16, "shuffle": False, "verbose": 0}
    found = choros.Trainer(models[0], "localsgd", workers=2, pool=pools(2)).fit(x, y, **how).history
    expected = models[1].fit(x, y, **how).history
    for name in ("loss", "hits"):
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-5)


def stepping(backend):
    """A class of models with a train_step of their own, as Keras' guides write it; ``tell`` makes its logs."""

    def loss_of(y, prediction):
        return keras.ops.mean(keras.losses.sparse_categorical_crossentropy(y, prediction))

    class Stepping(keras.Sequential):
        if backend == "jax":

            def train_step(self, state, data):
                import jax

                trained, others, slots, metrics = state
                x, y = data

                def loss(trained):
                    prediction, kept = self.stateless_call(trained, others, x, training=True)
                    return loss_of(y, prediction), (prediction, kept)

                (value, (prediction, kept)), gradients = jax.value_and_grad(loss, has_aux=True)(trained)
                trained, slots = self.optimizer.stateless_apply(slots, gradients, trained)
                logs, metrics = self.tell(metrics, value, y, prediction)
                return logs, (trained, kept, slots, metrics)
        elif backend == "torch":

            def train_step(self, data):
                import torch

                x, y = data
                self.zero_grad()
                prediction = self(x, training=True)
                value = loss_of(y, prediction)
                value.backward()
                with torch.no_grad():
                    self.optimizer.apply([v.value.grad for v in self.trainable_weights], self.trainable_weights)
                return self.tell(None, value.detach(), y, prediction)[0]
        else:

            def train_step(self, data):
                import tensorflow as tf

                x, y = data
                with tf.GradientTape() as tape:
                    prediction = self(x, training=True)
                    value = loss_of(y, prediction)
                gradients = tape.gradient(value, [v.value for v in self.trainable_weights])
                self.optimizer.apply(gradients, self.trainable_weights)
                return self.tell(None, value, y, prediction)[0]

    return Stepping


def small(kind, optimizer=None, *compiled):
    keras.utils.set_random_seed(0)
    model = kind([keras.Input((8,)), keras.layers.Dense(16, "relu"), keras.layers.Dense(3, "softmax")])
    model.compile(optimizer or keras.optimizers.Adam(1e-2), *compiled)
    return model


def own_metrics(backend, optimizer=None):
    """A model whose train_step keeps its own running loss."""

    class Own(stepping(backend)):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.own = [keras.metrics.Mean(name="loss"), keras.metrics.SparseCategoricalAccuracy(name="hits")]

        @property
        def metrics(self):
            return self.own

        def tell(self, state, value, *rows):
            logs, kept = {}, []
            for metric, what in zip(self.own, [(value,), rows], strict=True):
                if backend == "jax":
                    kept += metric.stateless_update_state(state[len(kept) : len(kept) + 2], *what)
                    logs[metric.name] = metric.stateless_result(kept[-2:])
                else:
                    metric.update_state(*what)
                    logs[metric.name] = metric.result()
            several = {"hits": logs["hits"], "more": value * 3}  # as the metric that compile makes of several
            return {"loss": logs["loss"], "several": several}, kept

    return small(Own, optimizer)


def own_logs(backend, names):
    """A model whose train_step logs what Keras' metrics do not know."""

    class Own(stepping(backend)):
        def tell(self, metrics, value, *rows):
            logs = {"loss": value, "mine": value * 2}
            return {name: logs[name] for name in names}, metrics

    return small(Own, None, "sparse_categorical_crossentropy")


def wide(keras):
    """A classifier of more than 16 KB, so that its gradients go by the library; weights depend only on the seed."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1000, "relu"), keras.layers.Dense(3, "softmax")])
    model.compile(keras.optimizers.Adam(1e-2), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


CARRIED = """
import os, sys
if os.environ["KERAS_BACKEND"] != "tensorflow":
    sys.modules["tensorflow"] = sys.modules["sklearn"] = None
library, room = os.environ["CHOROS_GROUP"], sys.argv[1]
import choros, choros.native
if library == "jax":
    choros.native.initialize("jax")
import json, keras, numpy as np
from choros.cluster import Place
{wide}
data, said = np.load(os.path.join(room, "data.npz")), []
for algorithm in (choros.AllReduce(), choros.AEASGD(window=2)):
    model = wide(keras)
    history = choros.Trainer(model, algorithm).fit(
        data["x"], data["y"], epochs=2, batch_size=16, seed=5, verbose=0, validation_data=(data["x"], data["y"]))
    said.append([history.run.group, history.run.line(), [float(np.abs(w).sum()) for w in model.get_weights()]])
    if isinstance(algorithm, choros.AllReduce):
        np.savez(os.path.join(room, f"rank{{Place.here().rank}}.npz"), *model.get_weights())
with open(os.path.join(room, f"rank{{Place.here().rank}}.json"), "w") as file:
    json.dump(said, file)
"""


@pytest.mark.parametrize("launcher", ["choros run", "mpiexec"])
def test_sums_by_the_backends_own_library(plain_fit, data, clean_python, backend, request, tmp_path, launcher):
    """PyTorch's on PyTorch and TensorFlow, JAX's on JAX; what meets alone uses the group beneath, and says so."""
    library = "jax" if backend == "jax" else "torch"
    x, y = data(rows=99)
    np.savez(tmp_path / "data.npz", x=x, y=y)
    reference = wide(keras)
    plain_fit(reference, x, y, epochs=2, batch_size=16, seed=5)
    script = CARRIED.format(wide=inspect.getsource(wide))
    if launcher == "mpiexec":
        (tmp_path / "carried.py").write_text(script)
        mpiexec = request.getfixturevalue("mpiexec")
        mpiexec(2, sys.executable, tmp_path / "carried.py", tmp_path, timeout=200, CHOROS_GROUP=library)
    else:
        more = {"CHOROS_GROUP": library, "CHOROS_ROOM": str(tmp_path)}
        script = script.replace("sys.argv[1]", 'os.environ["CHOROS_ROOM"]')
        done = clean_python(script, before=("-m", "choros", "run", "-n", "2"), timeout=200, **more)
        assert done.returncode == 0, done.stdout + done.stderr
    beneath = "MPI" if launcher == "mpiexec" else "shared memory"
    both = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1)]
    for rank, said in enumerate(both):
        groups = [group for group, _, _ in said]
        assert groups == [f"{library} (gloo) over {beneath}", "a centre in shared memory"]
        assert all(f"meeting in {group}" in line for group, line, _ in said)
        with np.load(tmp_path / f"rank{rank}.npz") as found:
            for name, expected in zip(found.files, reference.get_weights(), strict=True):
                np.testing.assert_allclose(found[name], expected, rtol=0, atol=1e-5)
    assert [weights for _, _, weights in both[0]] == [weights for _, _, weights in both[1]]
