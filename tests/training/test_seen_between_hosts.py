"""Values that callbacks see and set if a launcher starts the ranks, or the center is divided between hosts."""

import itertools
import secrets
import sys

import keras
import numpy as np
import pytest

import choros

pytestmark = pytest.mark.long
K = keras.callbacks
WAYS = ["launcher", "hosts", "divided"]  # with the last two each rank is as on a host of its own
MANY = 30_000  # units of a model whose center is divided
ASYNCHRONOUS = {"downpour": lambda: choros.DOWNPOUR(window=3), "aeasgd": lambda: choros.AEASGD(window=3)}
SITE = """import os

rank, readlink = os.environ.get("CHOROS_RANK"), os.readlink
if rank is not None:  # each rank is as on a host of its own
    os.readlink = lambda path, **how: f"pid:[{rank}]" if path == "/proc/self/ns/pid" else readlink(path, **how)
"""


@pytest.fixture(params=WAYS)
def way(request, tmp_path, monkeypatch):
    """The means of exchange; except for "launcher" those of the launcher believe that they are on several."""
    monkeypatch.chdir(tmp_path)
    if request.param != "launcher":
        (tmp_path / "sitecustomize.py").write_text(SITE)
        monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])  # which the ranks have too
        monkeypatch.setenv("CHOROS_COMM", "tcp")
        monkeypatch.setenv("CHOROS_SECRET", secrets.token_hex(32))
        monkeypatch.setenv("CHOROS_COORDINATOR", "127.0.0.1")
    return request.param


def make(optimizer=None, units=6):
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((8,)),
            keras.layers.Dense(units, "relu"),
            keras.layers.BatchNormalization(momentum=0.7),
            keras.layers.Dense(3, "softmax"),
        ]
    )
    model.compile(optimizer or keras.optimizers.SGD(0.5), keras.losses.SparseCategoricalCrossentropy())
    return model


MET = {
    "launcher": "a center in shared memory",
    "hosts": "a center on the first host",
    "divided": "a center divided among 2 hosts",
}


def fit(model, algorithm, x, y, **how):
    launcher = choros.Ssh("localhost:2")
    trainer = choros.Trainer(model, algorithm, workers=2, launcher=launcher, timeout=60, first_timeout=120)
    return trainer.fit(x, y, **{"epochs": 3, "batch_size": 8, "seed": 3, "verbose": 0, **how})


def units(way):
    return MANY if way == "divided" else 6


def evaluate(model, x, y):
    """Return the loss without ``evaluate``, which resets the metrics."""
    loss = keras.losses.get(model.loss)
    return float(np.mean(keras.ops.convert_to_numpy(loss(y, model(x, training=False)))))


class Judge(K.Callback):
    """Evaluates what it sees at each epoch's end, beside what was logged."""

    def __init__(self, x, y):
        super().__init__()
        self.x, self.y, self.seen, self.logged = x, y, [], []

    def on_epoch_end(self, epoch, logs=None):
        self.logged.append(logs["val_loss"])
        self.seen.append(evaluate(self.model, self.x, self.y))


@pytest.mark.parametrize("name", ASYNCHRONOUS)
def test_callbacks_see_what_was_validated(way, name, data, tmp_path):
    x, y = data(64)
    model, judge = make(keras.optimizers.SGD(0.5 if way != "divided" else 1e-4), units(way)), Judge(x, y)
    best = K.ModelCheckpoint(tmp_path / "best.keras", save_best_only=True)
    history = fit(model, ASYNCHRONOUS[name](), x, y, epochs=6, validation_data=(x, y), callbacks=[judge, best])
    assert history.run.group == MET[way]
    assert len(judge.logged) == 6
    np.testing.assert_allclose(judge.seen, judge.logged, rtol=1e-5)
    assert len({round(loss, 6) for loss in judge.logged}) > 3  # the center moved
    saved = keras.models.load_model(tmp_path / "best.keras")
    assert evaluate(saved, x, y) == pytest.approx(min(history.history["val_loss"]), rel=1e-5)


def test_rare_exchanges_are_tried(way, data):
    x, y = data(64)
    # all rows in each step, and no moving statistics of few rows: else the loss rises by chance in some epochs
    model, judge = dense(units(way), 0.1 if way != "divided" else 1e-4), Judge(x, y)
    stop = K.EarlyStopping("val_loss", patience=1)
    rule = choros.DOWNPOUR(window=1000)
    how = {"epochs": 5, "batch_size": 64, "validation_data": (x, y)}
    history = fit(model, rule, x, y, **how, callbacks=[judge, stop])
    assert history.run.group == MET[way]
    assert history.run.exchanges == 2  # at the end
    losses = history.history["val_loss"]
    assert len(losses) == 5, losses
    assert losses[-1] < losses[0]
    np.testing.assert_allclose(judge.seen, losses, rtol=1e-5)


def test_the_optimizer_comes_back_and_goes_on(way, data):
    x, y = data(64)
    model = make(keras.optimizers.Adam(1e-3), units(way))
    counts = []
    for _ in range(2):
        history = fit(model, choros.AEASGD(window=3), x, y)
        counts.append(int(model.optimizer.iterations))
    assert history.run.group == MET[way]
    assert counts == [24, 48]
    slots = [np.abs(keras.ops.convert_to_numpy(v)).max() for v in model.optimizer.variables[2:]]
    assert all(value > 0 for value in slots)


@pytest.mark.parametrize("way", WAYS[:2], indirect=True)  # no center is divided here
def test_moving_averages_hold_what_all_ranks_learnt(way, data):
    """Rank 1's rows are other ones in a second run; with rank 0's the same, the averages are not."""
    x, y = data(64)
    results = []
    for scale in (1.0, 5.0):
        rows = x.copy()
        rows.reshape(8, 2, 4, 8)[:, 1] *= scale  # rank 1's half of each batch
        optimizer = keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.9)
        model = make(optimizer)
        rule = choros.AEASGD(window=1000)  # no exchange before the end
        fit(model, rule, rows, y, shuffle=False, epochs=2)
        averages = optimizer._model_variables_moving_average
        results.append([keras.ops.convert_to_numpy(average) for average in averages])
        for variable, average in zip(model.trainable_variables, results[-1], strict=True):
            np.testing.assert_allclose(keras.ops.convert_to_numpy(variable), average, atol=1e-6)
    assert max(np.abs(a - b).max() for a, b in zip(*results, strict=True)) > 1e-3


class Reads(K.Callback):
    """Reads weights after some batches, twice where asked."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_end(self, batch, logs=None):
        if batch % 3 == 0:
            self.seen.append(self.model.get_weights()[0])
            np.testing.assert_array_equal(self.seen[-1], self.model.layers[0].get_weights()[0])


def dense(units=6, rate=0.1):
    """A model without moving statistics, which synchronous steps train as plain Keras does."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(units, "relu"), keras.layers.Dense(3, "softmax")])
    model.compile(keras.optimizers.SGD(rate), "sparse_categorical_crossentropy")
    return model


@pytest.mark.parametrize("way", WAYS[:2], indirect=True)  # no center is divided here
def test_a_callback_of_each_batch_sees_current_weights(way, data):
    x, y = data(64)
    plain, trained, expected, reads = dense(), dense(), Reads(), Reads()
    plain.fit(x, y, batch_size=8, epochs=3, shuffle=False, callbacks=[expected], verbose=0)
    fit(trained, "allreduce", x, y, shuffle=False, callbacks=[reads])
    assert len(reads.seen) == 9
    np.testing.assert_allclose(reads.seen, expected.seen, atol=1e-5)
    local_reads = Reads()
    fit(dense(), choros.DOWNPOUR(window=1), x, y, epochs=4, callbacks=[local_reads])
    assert len(local_reads.seen) == 12
    # Workers do not wait for this callback within an epoch, so on a busy machine reads of an epoch may be equal.
    epochs = [{weights.tobytes() for weights in local_reads.seen[start : start + 3]} for start in range(0, 12, 3)]
    assert all(before.isdisjoint(after) for before, after in itertools.pairwise(epochs))


@pytest.mark.parametrize("rule", [choros.LocalSGD(window=3), choros.EAMSGD(window=3, momentum=0.9)], ids=str)
@pytest.mark.parametrize("way", WAYS[:2], indirect=True)  # no center is divided here
def test_what_reads_nothing_changes_nothing(way, rule, data, pools):
    """At each epoch's end the center comes to the caller, also without callbacks; ranks go on with what was theirs."""
    x, y = data(64)
    how = {"batch_size": 8, "epochs": 3, "seed": 3, "verbose": 0}
    plain = dense()
    choros.Trainer(plain, rule, workers=2, pool=pools(2), mode="sync").fit(x, y, **how)
    hooks = {"on_epoch_end": lambda epoch, logs: None}, {"on_train_batch_end": lambda batch, logs: None}
    for callbacks in ([], *([K.LambdaCallback(**hook)] for hook in hooks)):
        trained = dense()
        launcher = choros.Ssh("localhost:2")
        trainer = choros.Trainer(trained, rule, workers=2, launcher=launcher, mode="sync", timeout=60)
        trainer.fit(x, y, callbacks=callbacks, **how)
        for value, other in zip(trained.get_weights(), plain.get_weights(), strict=True):
            np.testing.assert_allclose(value, other, rtol=0, atol=1e-7)
