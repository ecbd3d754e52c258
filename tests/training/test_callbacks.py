"""Callbacks run once, in the caller, on the given model; what they decide reaches the workers."""

import csv
import os
import time

import keras
import numpy as np
import pytest

import choros

K = keras.callbacks


class Reset(K.Callback):
    """Sets weights at the end of epoch 0."""

    def on_epoch_end(self, epoch, logs=None):
        if epoch == 0:
            self.model.set_weights([np.full_like(w, 0.05) for w in self.model.get_weights()])


class WarmUp(K.Callback):
    """A learning rate for each batch, as warm-ups set them."""

    def on_train_batch_begin(self, batch, logs=None):
        self.model.optimizer.learning_rate = 0.002 * (batch + 1)


class StopAt(K.Callback):
    """Stops in the middle of an epoch."""

    def __init__(self, step):
        super().__init__()
        self.step, self.seen = step, 0

    def on_train_batch_end(self, batch, logs=None):
        self.seen += 1
        if self.seen == self.step:
            self.model.stop_training = True


class Scale(K.Callback):
    """Changes the weights after one batch."""

    def on_train_batch_end(self, batch, logs=None):
        if batch == 2:
            self.model.set_weights([0.5 * w for w in self.model.get_weights()])


def plateau():
    return K.ReduceLROnPlateau(monitor="loss", factor=0.1, patience=0, min_delta=10.0, cooldown=0)


CASES = {
    "early": lambda: [K.EarlyStopping("loss", min_delta=10.0, patience=1)],
    "best": lambda: [K.EarlyStopping("val_accuracy", mode="min", patience=1, restore_best_weights=True)],
    "plateau": lambda: [plateau()],
    "rates": lambda: [K.LearningRateScheduler(lambda epoch, rate: 0.02 / (epoch + 1))],
    "warm-up": lambda: [WarmUp()],
    "weights": lambda: [Reset()],
    "stop": lambda: [StopAt(10)],
}


@pytest.mark.parametrize("case", CASES)
def test_as_in_keras(case, make_model, data, pools, same, same_history):
    x, y = data()
    how = {"batch_size": 8, "epochs": 4, "shuffle": False, "verbose": 0, "validation_data": (x[:20], y[:20])}
    plain, trained = make_model(), make_model()
    expected = plain.fit(x, y, callbacks=CASES[case](), **how)
    history = choros.Trainer(trained, workers=2, pool=pools(2)).fit(x, y, callbacks=CASES[case](), **how)
    same_history(history, expected)
    same(trained, plain)
    assert float(trained.optimizer.learning_rate) == pytest.approx(float(plain.optimizer.learning_rate))
    assert int(trained.optimizer.iterations) == int(plain.optimizer.iterations)


def test_every_hook_is_called_as_keras_calls_it(make_model, data, pools):
    def record(into):
        hooks = ("train_begin", "epoch_begin", "train_batch_begin", "train_batch_end", "epoch_end", "train_end")

        def hook(name):
            return lambda number=None, logs=None: into.append((name, number if isinstance(number, int) else None))

        return K.LambdaCallback(**{f"on_{name}": hook(name) for name in hooks})

    x, y = data()
    calls, expected = [], []
    how = {"batch_size": 20, "epochs": 2, "verbose": 0, "validation_data": (x, y)}
    make_model().fit(x, y, callbacks=[record(expected)], **how)
    trained = make_model()
    callback = record(calls)
    choros.Trainer(trained, workers=2, pool=pools(2)).fit(x, y, callbacks=callback, **how)  # one, without a list
    assert calls == expected
    assert callback.model is trained
    assert callback.params == {"verbose": 0, "epochs": 2, "steps": 3}


def test_the_only_batch_of_an_epoch_begins_in_each_epoch(make_model, data, pools):
    """A rate that a callback sets before each batch is that of plain fit also where an epoch has one batch."""

    class Halve(K.Callback):
        def on_train_begin(self, logs=None):
            self.begun = []

        def on_train_batch_begin(self, batch, logs=None):
            self.begun.append(batch)
            self.model.optimizer.learning_rate = 0.1 * 0.5 ** len(self.begun)

    x, y = data()
    weights = []
    for distributed in (False, True):
        model, halve = make_model(), Halve()
        fit = choros.Trainer(model, "allreduce", pool=pools(2)).fit if distributed else model.fit
        fit(x, y, epochs=3, batch_size=len(x), shuffle=False, verbose=0, callbacks=[halve])
        assert halve.begun == [0, 0, 0]
        weights.append(model.get_weights())
    for plain, trained in zip(*weights, strict=True):
        np.testing.assert_allclose(trained, plain, atol=1e-5)


def test_batch_logs_are_of_all_workers(make_model, data, pools):
    x, y = data()
    ours, plain = [], []
    for into in (ours, plain):
        model = make_model()
        log = K.LambdaCallback(on_train_batch_end=lambda batch, logs, into=into: into.append(dict(logs)))
        fit = choros.Trainer(model, workers=2, pool=pools(2)).fit if into is ours else model.fit
        fit(x, y, batch_size=8, callbacks=[log], shuffle=False, verbose=0)
    for value, other in zip(ours, plain, strict=True):
        assert value == pytest.approx(other, abs=1e-5)


@pytest.mark.parametrize("algorithm", ["allreduce", "localsgd", "aeasgd"])
def test_files_of_callbacks(algorithm, make_model, data, pools, tmp_path):
    x, y = data()
    trained = make_model()
    seen = []
    limit = K.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append([np.array(w) for w in trained.get_weights()]))
    callbacks = [limit, K.ModelCheckpoint(tmp_path / "{epoch}.keras"), K.CSVLogger(tmp_path / "log.csv")]
    history = choros.Trainer(trained, algorithm, workers=2, pool=pools(2)).fit(
        x, y, batch_size=8, epochs=3, callbacks=callbacks, validation_data=(x, y), verbose=0
    )
    assert len(seen) == 3
    for epoch, weights in enumerate(seen):
        saved = keras.models.load_model(tmp_path / f"{epoch + 1}.keras")
        for value, other in zip(weights, saved.get_weights(), strict=True):
            np.testing.assert_array_equal(value, other)
        assert saved.evaluate(x, y, verbose=0)[0] == pytest.approx(history.history["val_loss"][epoch], abs=1e-4)
        if algorithm == "allreduce":
            assert int(saved.optimizer.iterations) == 8 * (epoch + 1)
    with open(tmp_path / "log.csv") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["loss"]) for row in rows] == pytest.approx(history.history["loss"])


@pytest.mark.parametrize("algorithm", ["allreduce", "aeasgd"])
def test_nan_ends_it(algorithm, make_model, data, pools):
    x, y = data(600)
    x[:] = np.nan
    history = choros.Trainer(make_model(), algorithm, workers=2, pool=pools(2)).fit(
        x, y, batch_size=8, epochs=5, callbacks=[K.TerminateOnNaN()], verbose=0
    )
    assert history.epoch == [0]
    assert np.isnan(history.history["loss"][0])
    # alone, one worker may be epochs ahead of the one that met the NaN; together, none is
    assert history.run.rows < (600 if algorithm == "allreduce" else 5 * 600)


@pytest.mark.parametrize("algorithm", ["downpour", "aeasgd", "eamsgd"])
def test_async_new_weights_reach_the_workers(algorithm, make_model, data, pools):
    """With a rate of nothing nobody learns, so what a callback sets is what all end with."""
    x, y = data(400)
    trained = make_model(keras.optimizers.SGD(1e-12))
    choros.Trainer(trained, algorithm, workers=2, pool=pools(2)).fit(
        x, y, batch_size=8, epochs=6, callbacks=[Reset()], verbose=0
    )
    for weight in trained.get_weights():
        np.testing.assert_allclose(weight, 0.05, atol=1e-6)


@pytest.mark.parametrize("algorithm", ["easgd", "localsgd", "dynsgd"])
def test_weights_set_before_training(algorithm, make_model, data, pools):
    def at_begin(logs=None):
        trained.set_weights([np.full_like(w, 0.05) for w in trained.get_weights()])

    x, y = data()
    trained = make_model(keras.optimizers.SGD(1e-12))
    callback = K.LambdaCallback(on_train_begin=at_begin)
    choros.Trainer(trained, algorithm, workers=2, pool=pools(2)).fit(
        x, y, batch_size=8, callbacks=[callback], verbose=0
    )
    for weight in trained.get_weights():
        np.testing.assert_allclose(weight, 0.05, atol=1e-6)


def test_weights_set_after_a_batch(make_model, data, pools, same):
    x, y = data()
    how = {"batch_size": 8, "epochs": 1, "shuffle": False, "verbose": 0}
    plain, trained = make_model(keras.optimizers.SGD(0.1)), make_model(keras.optimizers.SGD(0.1))
    plain.fit(x[:24], y[:24], **how)
    plain.set_weights([0.5 * w for w in plain.get_weights()])
    plain.fit(x[24:], y[24:], **how)
    choros.Trainer(trained, workers=2, pool=pools(2)).fit(x, y, callbacks=[Scale()], **how)
    same(trained, plain)


@pytest.mark.parametrize("rate", [1e-12, 0.0])
def test_async_a_rate_reaches_the_workers(rate, make_model, data, pools):
    """Once the rate is nothing, nothing changes any more."""
    x, y = data(400)
    seen = []

    class Freeze(K.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if epoch == 1:
                self.model.optimizer.learning_rate = rate
            seen.append([np.array(w) for w in self.model.get_weights()])

    trained = make_model(keras.optimizers.SGD(0.1))
    choros.Trainer(trained, choros.DOWNPOUR(window=2), workers=2, pool=pools(2)).fit(
        x, y, batch_size=8, epochs=30, callbacks=[Freeze()], verbose=0
    )
    for value, other in zip(seen[-8], trained.get_weights(), strict=True):
        np.testing.assert_allclose(value, other, atol=1e-6)
    assert any(np.abs(a - b).max() > 1e-3 for a, b in zip(seen[0], trained.get_weights(), strict=True))


@pytest.mark.parametrize("algorithm", ["aeasgd", "downpour"])
def test_async_stopping_in_the_middle(algorithm, make_model, data, pools):
    x, y = data(4000)
    history = choros.Trainer(make_model(), algorithm, workers=2, pool=pools(2)).fit(
        x, y, batch_size=8, epochs=50, callbacks=[StopAt(20)], verbose=0
    )
    assert history.epoch == [0]
    assert len(history.history["loss"]) == 1
    assert history.run.workers[0].steps == 20
    assert history.run.rows < 50 * 4000 / 2


class Raises(K.Callback):
    def __init__(self, hook):
        super().__init__()
        setattr(self, hook, self.fail)

    def fail(self, *args, logs=None):
        raise ArithmeticError("the callback's own")


@pytest.mark.parametrize(
    ("algorithm", "hook"),
    [
        ("aeasgd", "on_train_begin"),
        ("aeasgd", "on_train_batch_end"),
        ("allreduce", "on_epoch_end"),
        ("allreduce", "on_train_end"),
    ],
)
def test_a_callback_that_raises(algorithm, hook, make_model, data):
    x, y = data()
    choros.close()
    fds = len(os.listdir("/proc/self/fd"))
    trainer = choros.Trainer(make_model(), algorithm, workers=2, echo=False)
    with pytest.raises(ArithmeticError, match="the callback's own"):
        trainer.fit(x, y, batch_size=8, callbacks=[Raises(hook)], verbose=0)
    assert not trainer._local.pool.started
    choros.close()
    end = time.monotonic() + 5  # a thread of another pool may be reading a file
    while (now := len(os.listdir("/proc/self/fd"))) > fds and time.monotonic() < end:
        time.sleep(0.05)
    assert now <= fds


@pytest.mark.parametrize(("hook", "epoch"), [("on_epoch_begin", 0), ("on_epoch_begin", 1), ("on_train_begin", 0)])
@pytest.mark.parametrize("each_batch", [False, True])
def test_a_stop_before_an_epoch_trains_one_batch_of_it_as_in_keras(
    hook, epoch, each_batch, make_model, data, pools, same
):
    class Stops(keras.callbacks.Callback):
        pass

    def stop(self, number=0, logs=None):
        self.model.stop_training = number is None or number >= epoch

    if hook == "on_train_begin":
        Stops.on_train_begin = lambda self, logs=None: stop(self)
    else:
        Stops.on_epoch_begin = stop
    if each_batch:
        Stops.on_train_batch_end = lambda self, batch, logs=None: None
    x, y = data(60)
    how = {"batch_size": 16, "epochs": 3, "verbose": 0, "shuffle": False}
    plain, ours = make_model(), make_model()
    expected = plain.fit(x, y, callbacks=[Stops()], **how)
    history = choros.Trainer(ours, workers=2, pool=pools(2)).fit(x, y, callbacks=[Stops()], **how)
    assert len(history.history["loss"]) == len(expected.history["loss"])
    same(ours, plain)
