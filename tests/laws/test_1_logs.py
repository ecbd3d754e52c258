"""Law 1 of what is logged: metrics of one's own, and train steps that log what they like."""

import keras
import numpy as np
import pytest

import choros


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
    with pytest.warns(UserWarning, match="'own' .* does not add up") as warnings_:
        history = trainer.fit(x, y, batch_size=16, verbose=0).history
    assert [result.filename for result in warnings_ if "'own'" in str(result.message)] == [
        __file__
    ]  # the line that called fit
    assert 1 / 3 < history["own"][0] <= 1.0  # a sum of two largest probabilities would be above 1 or near it
    assert history["own"][0] < 0.99


@pytest.mark.parametrize("kind", ["PearsonCorrelation", "ConcordanceCorrelation", "CosineSimilarity"])
def test_a_figure_of_keras_along_the_rows_is_warned_about(pools, data, kind):
    x, _ = data(rows=64)
    metrics = [getattr(keras.metrics, kind)(axis=axis, name=name) for axis, name in ((0, "rows"), (-1, "columns"))]
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(3)])
    model.compile("sgd", "mse", metrics=metrics)
    with pytest.warns(UserWarning, match="'rows' .* does not add up") as raised:
        choros.Trainer(model, workers=2, pool=pools(2)).fit(x, x[:, :3], batch_size=16, verbose=0)
    assert not any("'columns'" in str(warning.message) for warning in raised)


def test_a_figure_of_keras_along_the_only_axis_of_y_is_warned_about(pools, data):
    x, _ = data(rows=64)
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1), keras.layers.Reshape(())])
    model.compile("sgd", "mse", metrics=[keras.metrics.PearsonCorrelation(name="flat")])
    with pytest.warns(UserWarning, match="'flat' .* does not add up"):
        choros.Trainer(model, workers=2, pool=pools(2)).fit(x, x[:, 0], batch_size=16, verbose=0)


def test_a_function_of_the_whole_batch_is_a_mean_by_rows_with_a_warning(pools, make_mlp, plain_fit, data):
    def widest(y, p):
        return keras.ops.max(p) - keras.ops.min(p)

    def first(y, p):
        return p[:, 0]

    x, y = data(rows=61)
    models = [make_mlp(metrics=[widest, first]) for _ in range(2)]
    with pytest.warns(UserWarning, match="'widest' .* does not add up") as warnings_:
        result = choros.Trainer(models[0], workers=2, pool=pools(2)).fit(x, y, batch_size=16, seed=5, verbose=0).history
    assert not any("'first'" in str(item.message) for item in warnings_)
    expected = plain_fit(models[1], x, y, epochs=1, batch_size=16, seed=5)
    assert result["first"] == pytest.approx(expected["first"], rel=1e-6)
    assert result["widest"] == pytest.approx(expected["widest"], rel=0.2)  # of parts: narrower


@pytest.mark.parametrize("names", [("loss", "mine"), ("loss",)], ids=str)
def test_a_train_step_that_logs_its_own_loss_is_heard(train_both, data, same_weights, backend, names):
    """If the step logs only Keras' running loss under its own name, that value is logged: 0 rather than NaN."""
    x, y = data(rows=70)
    make = lambda: own_logs(backend, names)
    reference, model, expected, result = train_both(make, x, y, 2)
    same_weights(reference, model, 1e-5)
    assert list(result) == list(expected)
    for name in names:
        np.testing.assert_allclose(result[name], expected[name], rtol=1e-5)


def test_a_train_step_with_metrics_of_its_own_logs_what_one_process_does(train_both, data, same_weights, backend):
    """As Keras' guides write it: the mean over batches, not rows, and one figure more than the metrics."""
    x, y = data(rows=52)
    reference, model, expected, result = train_both(lambda: own_metrics(backend), x, y, 3)
    same_weights(reference, model, 1e-5)
    assert result.keys() == expected.keys()
    assert {"loss", "hits", "more"} == result.keys()
    for name in expected.keys() - {"more"}:  # of the last batch: every rank has its part
        np.testing.assert_allclose(result[name], expected[name], rtol=1e-6)


def test_its_logs_are_of_all_workers_that_step_by_themselves(pools, data, backend):
    """With a rate of nothing nobody learns, so the workers' figures together are those of one process."""
    x, y = data(rows=64)
    models = [own_metrics(backend, keras.optimizers.SGD(1e-12)) for _ in range(2)]
    how = {"batch_size": 16, "shuffle": False, "verbose": 0}
    result = choros.Trainer(models[0], "localsgd", workers=2, pool=pools(2)).fit(x, y, **how).history
    expected = models[1].fit(x, y, **how).history
    for name in ("loss", "hits"):
        np.testing.assert_allclose(result[name], expected[name], rtol=1e-5)


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
                    prediction, saved = self.stateless_call(trained, others, x, training=True)
                    return loss_of(y, prediction), (prediction, saved)

                (value, (prediction, saved)), gradients = jax.value_and_grad(loss, has_aux=True)(trained)
                trained, slots = self.optimizer.stateless_apply(slots, gradients, trained)
                logs, metrics = self.tell(metrics, value, y, prediction)
                return logs, (trained, saved, slots, metrics)
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
            logs, saved = {}, []
            for metric, what in zip(self.own, [(value,), rows], strict=True):
                if backend == "jax":
                    saved += metric.stateless_update_state(state[len(saved) : len(saved) + 2], *what)
                    logs[metric.name] = metric.stateless_result(saved[-2:])
                else:
                    metric.update_state(*what)
                    logs[metric.name] = metric.result()
            several = {"hits": logs["hits"], "more": value * 3}  # as the metric that compile makes of several
            return {"loss": logs["loss"], "several": several}, saved

    return small(Own, optimizer)


def own_logs(backend, names):
    """A model whose train_step logs what Keras' metrics do not know."""

    class Own(stepping(backend)):
        def tell(self, metrics, value, *rows):
            logs = {"loss": value, "mine": value * 2}
            return {name: logs[name] for name in names}, metrics

    return small(Own, None, "sparse_categorical_crossentropy")
