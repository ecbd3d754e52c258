"""Values and hooks of callbacks and metrics that a fresh user found to differ from plain ``fit`` without a word."""

import warnings

import keras
import numpy as np
import pytest

import choros

K = keras.callbacks
HOW = {"batch_size": 16, "shuffle": False, "verbose": 0}


def make(kind=keras.Model, metrics=(), optimizer=None):
    keras.utils.set_random_seed(1)
    inputs = keras.Input((6,))
    model = kind(inputs, keras.layers.Dense(1)(keras.layers.Dense(8, "tanh")(inputs)))
    model.compile(optimizer or keras.optimizers.SGD(0.1), "mse", metrics=list(metrics))
    return model


def table(rows=64, seed=0):
    x = np.random.default_rng(seed).standard_normal((rows, 6)).astype("float32")
    return x, x[:, :1] * x[:, 1:2]


class SetsRate(K.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 1:
            self.model.optimizer.learning_rate = 0.001


class ReadsWeights(K.Callback):
    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_end(self, batch, logs=None):
        weights = np.concatenate([weight.reshape(-1) for weight in self.model.get_weights()])
        self.seen.append((weights, float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate))))


@pytest.mark.parametrize("rate_first", [True, False])
def test_a_rate_stays_set_when_weights_are_read_after_it(rate_first, pools):
    runs = []
    for fit in (lambda model: model.fit, lambda model: choros.Trainer(model, workers=2, pool=pools(2)).fit):
        model, reads = make(), ReadsWeights()
        callbacks = [SetsRate(), reads] if rate_first else [reads, SetsRate()]
        fit(model)(*table(), callbacks=callbacks, **HOW)
        runs.append((reads.seen, model.get_weights()))
    for (weights, rate), (expected, expected_rate) in zip(runs[1][0], runs[0][0], strict=True):
        np.testing.assert_allclose(weights, expected, rtol=1e-4, atol=1e-6)
        assert rate == pytest.approx(expected_rate)
    for weights, expected in zip(runs[1][1], runs[0][1], strict=True):
        np.testing.assert_allclose(weights, expected, rtol=1e-4, atol=1e-6)


class SwapsForValidation(K.Callback):
    def on_test_begin(self, logs=None):
        self.kept = self.model.get_weights()
        self.model.set_weights([0 * weight for weight in self.kept])

    def on_test_end(self, logs=None):
        self.model.set_weights(self.kept)


def test_weights_set_in_on_test_begin_are_warned_of(pools):
    x, y = table()
    trainer = choros.Trainer(make(), workers=2, pool=pools(2))
    with pytest.warns(UserWarning, match="weights in on_test_begin, which has no effect"):
        trainer.fit(x, y, callbacks=[SwapsForValidation()], validation_data=(x, y), **HOW)


class Derives(keras.Model):
    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        logs = super().compute_metrics(x, y, y_pred, sample_weight)
        return {**logs, "twice": 2 * logs["mae"]}


class Derived(keras.Model):
    def get_metrics_result(self):
        logs = super().get_metrics_result()
        return {**logs, "twice": 2 * logs["mae"]}


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("kind", [Derives, Derived])
def test_a_derived_log_of_validation_is_that_of_plain_keras(kind, workers, pools):
    x, y = table()
    how = {**HOW, "validation_data": (x[:40], y[:40])}
    expected = make(kind, ["mae"]).fit(x, y, **how).history
    trainer = choros.Trainer(make(kind, ["mae"]), workers=workers, pool=pools(3))
    if kind is Derives:
        with pytest.warns(UserWarning, match="logs 'twice', which no metric holds.*Override get_metrics_result"):
            history = trainer.fit(x, y, **how).history
    else:
        history = trainer.fit(x, y, **how).history
    assert history["val_twice"] == pytest.approx(expected["val_twice"], rel=1e-5)
    assert history["val_twice"][-1] == pytest.approx(2 * history["val_mae"][-1], rel=1e-5)


class Largest(keras.metrics.Metric):
    """The largest over-estimate: additive over halves of which one has none."""

    def __init__(self, name="largest", **kwargs):
        super().__init__(name=name, **kwargs)
        self.value = self.add_weight(shape=(), initializer="zeros", name="value")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.value.assign(keras.ops.maximum(self.value, keras.ops.max(y_pred - y_true)))

    def result(self):
        return self.value + 0.0


def test_a_maximum_is_no_sum_though_the_halves_of_the_sample_add_up(pools):
    x, _ = table(16)
    model = make(metrics=[Largest()])
    y = model.predict(x, verbose=0) + np.where(np.arange(16)[:, None] < 8, 1.0, -1.0)  # never too low in one half
    y = y.astype("float32")
    with pytest.warns(UserWarning, match="'largest' .* does not add up"):
        choros.Trainer(model, workers=2, pool=pools(2)).fit(x, y, **HOW)


class Order(K.Callback):
    def __init__(self):
        super().__init__()
        self.calls = []

    def on_epoch_begin(self, epoch, logs=None):
        self.calls.append(f"epoch {epoch}")

    def on_epoch_end(self, epoch, logs=None):
        self.calls.append(f"end {epoch}")
        self.model.stop_training = epoch == 2

    def on_train_batch_begin(self, batch, logs=None):
        self.calls.append(f"begin batch {batch}")

    def on_train_batch_end(self, batch, logs=None):
        self.calls.append(f"end batch {batch}")


@pytest.mark.parametrize("algorithm", ["aeasgd", "downpour", "localsgd"])
def test_batch_hooks_are_called_within_their_epoch_and_not_after_the_stop(algorithm, pools):
    x, y = table(203)
    expected = []
    for epoch in range(3):
        batches = [f"{kind} batch {batch}" for batch in range(13) for kind in ("begin", "end")]
        expected += [f"epoch {epoch}", *batches, f"end {epoch}"]
    for _ in range(3):  # it depends on which rank is ahead
        order = Order()
        trainer = choros.Trainer(make(), algorithm, workers=2, pool=pools(2))
        trainer.fit(x, y, epochs=8, validation_data=(x, y), callbacks=[order], **HOW)
        assert order.calls == expected


class Changing(keras.utils.PyDataset):
    """Three batches whose inputs depend on the calls of hooks so far."""

    def __init__(self):
        super().__init__()
        self.ended = 0

    def __len__(self):
        return 3

    def __getitem__(self, index):
        x, y = table(24)
        some = slice(8 * index, 8 * index + 8)
        return x[some] * (1 + 0.3 * self.ended), y[some]

    def on_epoch_end(self):
        self.ended += 1


@pytest.mark.parametrize("workers", [1, 2])
def test_hooks_of_a_dataset_are_called_as_often_as_in_keras(workers, pools):
    plain, trained, ours, reference = make(), make(), (Changing(), Changing()), (Changing(), Changing())
    pool = pools(2) if workers == 2 else None
    for epochs in (3, 2):  # the second fit goes on with the datasets as the first one left them
        expected = plain.fit(reference[0], validation_data=reference[1], epochs=epochs, shuffle=False, verbose=0)
        trainer = choros.Trainer(trained, "allreduce", workers=workers, pool=pool)
        history = trainer.fit(ours[0], validation_data=ours[1], epochs=epochs, shuffle=False, verbose=0)
        np.testing.assert_allclose(history.history["loss"], expected.history["loss"], atol=1e-5)
        np.testing.assert_allclose(history.history["val_loss"], expected.history["val_loss"], atol=1e-5)
        assert [each.ended for each in ours] == [each.ended for each in reference]


def test_a_resumed_fit_calls_the_hooks_that_it_has_missed(pools, tmp_path):
    plain, reference = make(), (Changing(), Changing())
    expected = plain.fit(reference[0], validation_data=reference[1], epochs=4, shuffle=False, verbose=0)
    for epochs in (2, 4):
        trained, ours = make(), (Changing(), Changing())
        how = {"checkpoint": choros.Checkpoint(tmp_path / "state", every="epoch"), "resume": epochs == 4}
        trainer = choros.Trainer(trained, "allreduce", workers=2, pool=pools(2))
        history = trainer.fit(ours[0], validation_data=ours[1], epochs=epochs, shuffle=False, verbose=0, **how)
    assert history.epoch == [2, 3]
    for name in ("loss", "val_loss"):
        np.testing.assert_allclose(history.history[name], expected.history[name][2:], atol=1e-5)
    assert [each.ended for each in ours] == [each.ended for each in reference]


class Median(keras.metrics.Metric):
    """The median of the predictions, which are kept in a list."""

    def __init__(self, **how):
        super().__init__(**how)
        self.values = []

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.values.extend(np.ravel(keras.ops.convert_to_numpy(y_pred)))

    def result(self):
        return float(np.median(self.values)) if self.values else 0.0

    def reset_state(self):
        self.values = []


@pytest.mark.skipif(keras.backend.backend() != "torch", reason="Keras traces metrics on JAX and TensorFlow")
def test_a_metric_that_keeps_values_in_a_list_is_warned_of(pools):
    model = make()
    model.compile("sgd", "mse", metrics=[Median(name="median")], run_eagerly=True)
    x, y = table(24)
    with pytest.warns(UserWarning, match=r"'median' \(Median\) keeps its values outside of variables"):
        choros.Trainer(model, "allreduce", workers=2, pool=pools(2)).fit(x, y, batch_size=8, verbose=0)


def test_evaluate_and_predict_in_a_hook_set_nothing(pools):
    x, y = table(24)
    model = make()
    look = K.LambdaCallback(
        on_epoch_end=lambda epoch, logs: (model.evaluate(x, y, verbose=0), model.predict(x, verbose=0))
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        trainer = choros.Trainer(model, choros.DOWNPOUR(window=2), workers=2, pool=pools(2))
        trainer.fit(x, y, batch_size=8, epochs=2, callbacks=[look], verbose=0)


@pytest.fixture
def epsilon():
    before = keras.config.epsilon()
    keras.config.set_epsilon(1e-2)
    yield
    keras.config.set_epsilon(before)


def test_keras_epsilon_reaches_the_workers(epsilon, pools):
    x, y = table(24)
    models = [make(), make()]
    for model in models:
        model.compile(keras.optimizers.SGD(0.1), "mean_squared_logarithmic_error")
    models[0].fit(x, np.abs(y), batch_size=8, shuffle=False, verbose=0)
    trainer = choros.Trainer(models[1], "allreduce", workers=2, pool=pools(2))
    trainer.fit(x, np.abs(y), batch_size=8, shuffle=False, verbose=0)
    for a, b in zip(*(model.get_weights() for model in models), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
