"""Ensemble: members on disjoint shards, their mean predicts, the best is given to the model."""

import time

import keras
import numpy as np
import pytest

import choros
from choros.errors import WorkerFailedError

K = keras.callbacks


def test_members_their_mean_and_the_best(make_model, data, pools):
    x, y = data(90)
    trained = make_model()
    trainer = choros.Trainer(trained, "ensemble", workers=2, pool=pools(2))
    history = trainer.fit(x, y, batch_size=10, epochs=2, validation_data=(x, y), seed=3, verbose=0)
    assert len(trainer.models) == 2
    outputs = [member.predict(x, verbose=0) for member in trainer.models]
    assert np.abs(outputs[0] - outputs[1]).max() > 1e-3  # they started from different weights
    np.testing.assert_allclose(trainer.predict(x, verbose=0), np.mean(outputs, axis=0), atol=1e-7)
    scores = [member.evaluate(x, y, verbose=0)[0] for member in trainer.models]
    best = trainer.models[int(np.argmin(scores))]
    for value, expected in zip(trained.get_weights(), best.get_weights(), strict=True):
        np.testing.assert_array_equal(value, expected)
    assert history.history["val_loss"][-1] == pytest.approx(min(scores), abs=1e-4)  # of the one that is given
    assert history.run.mode is None
    assert history.run.exchanges == 0
    assert history.run.rows == 180  # every row by one member, twice


class Logging(keras.Model):
    """A model whose test_step logs more figures than its metrics have values."""

    figures = 8

    def test_step(self, *args):
        result = super().test_step(*args)
        logs, *state = result if isinstance(result, tuple) else (result,)
        logs = {**logs, **{f"part {i}": (i + 1.0) * logs["loss"] for i in range(self.figures)}}
        return (logs, *state) if state else logs


def test_a_members_test_step_may_log_more_figures_than_its_metrics_have_values(pools):
    x = np.random.default_rng(0).normal(size=(24, 4)).astype("float32")
    keras.utils.set_random_seed(0)
    inputs = keras.Input((4,))
    model = Logging(inputs, keras.layers.Dense(1)(inputs))
    model.compile(keras.optimizers.SGD(0.1), "mse")
    how = {"batch_size": 8, "epochs": 2, "verbose": 0}
    trainer = choros.Trainer(model, "ensemble", workers=2, pool=pools(2))
    logs = trainer.fit(x, x[:, :1], validation_data=(x, x[:, :1]), **how).history
    assert len(logs["val_part 7"]) == 2
    np.testing.assert_allclose(logs["val_part 7"], 8 * np.array(logs["val_part 0"]), rtol=1e-5)
    losses = [member.evaluate(x, x[:, :1], verbose=0, return_dict=True)["loss"] for member in trainer.models]
    np.testing.assert_allclose(logs["val_loss"][-1], min(losses), rtol=1e-5)
    model.figures = 500
    with pytest.raises(WorkerFailedError, match="InvalidDataError: rank .: test_step logs 501 figures"):
        trainer.fit(x, x[:, :1], validation_data=(x, x[:, :1]), **how)


def test_shards_are_disjoint(pools):
    """Each row moves a weight of its own, so the members' weights tell which rows they saw."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((20,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])
    model.compile(keras.optimizers.SGD(1.0), "mse")
    trainer = choros.Trainer(model, "ensemble", workers=2, pool=pools(2))
    trainer.fit(np.eye(20, dtype="float32"), np.ones(20, "float32"), batch_size=4, epochs=1, seed=1, verbose=0)
    seen = [set(np.flatnonzero(member.get_weights()[0].ravel())) for member in trainer.models]
    assert len(seen[0]) == len(seen[1]) == 10
    assert not seen[0] & seen[1]


def test_members_keep_what_is_not_trained(data, pools):
    """Each member draws the trainable weights; frozen ones and an adapted Normalization are those of the model."""
    x, y = data(60)
    x = 50 + 9 * x
    keras.utils.set_random_seed(0)
    normalization, frozen = keras.layers.Normalization(), keras.layers.Dense(5, "relu", name="frozen")
    normalization.adapt(x)
    model = keras.Sequential(
        [keras.Input((8,)), normalization, frozen, keras.layers.Dropout(0.1), keras.layers.Dense(3, "softmax")]
    )
    frozen.set_weights([np.linspace(-1, 1, 40, dtype="float32").reshape(8, 5), np.ones(5, "float32")])
    frozen.trainable = False
    model.compile("sgd", "sparse_categorical_crossentropy")
    inputs = [np.array(value) for value in frozen.get_weights()]
    trainer = choros.Trainer(model, "ensemble", workers=2, pool=pools(2))
    trainer.fit(x, y, batch_size=10, epochs=1, seed=3, verbose=0)
    first, second = trainer.models
    assert np.abs(first.layers[-1].get_weights()[0] - second.layers[-1].get_weights()[0]).max() > 0.05
    for member in (model, first, second):
        for value, expected in zip(member.get_layer("frozen").get_weights(), inputs, strict=True):
            np.testing.assert_array_equal(value, expected)
        for value, expected in zip(member.layers[0].get_weights(), normalization.get_weights(), strict=True):
            np.testing.assert_array_equal(value, expected)
        scaled = keras.ops.convert_to_numpy(member.layers[0](x))
        np.testing.assert_allclose(scaled.mean(0), 0, atol=1e-4)
        np.testing.assert_allclose(scaled.std(0), 1, atol=1e-3)


def test_single_has_one_worker(make_model, data, pools, same, same_history):
    x, y = data()
    plain, trained = make_model(), make_model()
    how = {"batch_size": 8, "epochs": 2, "shuffle": False, "verbose": 0}
    trainer = choros.Trainer(trained, "single", pool=pools(2))
    assert trainer.workers == 1
    same_history(trainer.fit(x, y, **how), plain.fit(x, y, **how))
    same(trained, plain)
    assert trainer.models == []


def loss_of(model, x, y):
    """Return the loss without ``evaluate``, which resets the metrics."""
    result = model.loss(y, model(x, training=False))
    return float(np.mean(keras.ops.convert_to_numpy(result)))


class Judge(K.Callback):
    """Evaluates what it sees, at each epoch's end or after some batches."""

    def __init__(self, x, y, pause=0.0):
        super().__init__()
        self.x, self.y, self.pause, self.seen, self.logged, self.counts = x, y, pause, [], [], []

    def on_epoch_end(self, epoch, logs=None):
        time.sleep(self.pause)
        self.seen.append(loss_of(self.model, self.x, self.y))
        self.logged.append(logs["val_loss"])
        self.counts.append(int(self.model.optimizer.iterations))


def compiled(make_model, rate=0.05):
    model = make_model()
    model.compile(keras.optimizers.SGD(rate), keras.losses.SparseCategoricalCrossentropy())
    return model


def test_callbacks_see_the_best_member(make_model, data, pools, tmp_path):
    """They save and restore the model that was logged, and training without them is the same."""
    x, y = data(96)
    trained, plain = (compiled(make_model) for _ in range(2))
    before = loss_of(trained, x, y)
    how = {"batch_size": 8, "epochs": 4, "seed": 3, "validation_data": (x, y), "verbose": 0}
    judge = Judge(x, y, 0.03)
    saved = K.ModelCheckpoint(tmp_path / "best.keras", save_best_only=True)
    restored = K.EarlyStopping("val_loss", patience=100, restore_best_weights=True)
    trainer = choros.Trainer(trained, "ensemble", workers=2, pool=pools(2))
    history = trainer.fit(x, y, callbacks=[judge, saved, restored], **how).history
    np.testing.assert_allclose(judge.seen, judge.logged, rtol=1e-5)
    assert judge.counts == [12, 24, 36, 48]
    assert loss_of(trained, x, y) == pytest.approx(min(history["val_loss"]), rel=1e-5)
    assert loss_of(trained, x, y) < 0.9 * before
    assert loss_of(keras.models.load_model(tmp_path / "best.keras"), x, y) == pytest.approx(
        min(history["val_loss"]), rel=1e-5
    )
    other = choros.Trainer(plain, "ensemble", workers=2, pool=pools(2))
    assert other.fit(x, y, **how).history == history
    for actual, b in zip(trainer.models, other.models, strict=True):
        for value, expected in zip(actual.get_weights(), b.get_weights(), strict=True):
            np.testing.assert_array_equal(value, expected)


def test_without_validation_the_lowest_loss_is_the_best(make_model, data, pools):
    x, y = data(64)
    model, seen = compiled(make_model, 0.5), []
    look = K.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(model.get_weights()[0]))
    trainer = choros.Trainer(model, "ensemble", workers=2, pool=pools(2))
    trainer.fit(x, y, batch_size=8, epochs=3, seed=1, callbacks=[look], verbose=0)
    assert any(np.array_equal(seen[-1], member.get_weights()[0]) for member in trainer.models)
    np.testing.assert_array_equal(seen[-1], model.get_weights()[0])
    assert np.abs(seen[0] - seen[1]).max() > 0


def test_after_a_batch_callbacks_see_the_first_member(make_model, data, pools):
    x, y = data(64)
    model, seen = compiled(make_model), []
    look = K.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(model.get_weights()[0]))
    choros.Trainer(model, "ensemble", workers=2, pool=pools(2)).fit(
        x, y, batch_size=8, epochs=2, seed=1, callbacks=[look], verbose=0
    )
    assert len(seen) == 16
    # Members do not wait for this callback within an epoch, so on a busy machine reads of an epoch may be equal.
    first, second = ({each.tobytes() for each in seen[start : start + 8]} for start in (0, 8))
    assert first.isdisjoint(second)


def test_a_stop_shows_and_gives_the_best(make_model, data, pools):
    x, y = data(64)
    model = compiled(make_model, 0.2)

    class Stop(Judge):
        def on_epoch_end(self, epoch, logs=None):
            super().on_epoch_end(epoch, logs)
            self.model.stop_training = epoch == 1

    judge = Stop(x, y)
    history = choros.Trainer(model, "ensemble", workers=2, pool=pools(2)).fit(
        x, y, batch_size=8, epochs=50, validation_data=(x, y), callbacks=[judge], verbose=0
    )
    assert history.epoch == [0, 1]
    np.testing.assert_allclose(judge.seen, judge.logged, rtol=1e-5)
    assert loss_of(model, x, y) < 1.1 * judge.seen[0]


def test_an_interrupt_leaves_the_best_so_far(make_model, data, pools):
    x, y = data(64)
    model = compiled(make_model, 0.2)

    class Interrupt(Judge):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 2:
                raise KeyboardInterrupt

    judge = Interrupt(x, y)
    with pytest.raises(KeyboardInterrupt):
        choros.Trainer(model, "ensemble", workers=2).fit(
            x, y, batch_size=8, epochs=5, validation_data=(x, y), callbacks=[judge], verbose=0
        )
    assert loss_of(model, x, y) == pytest.approx(judge.seen[-1], rel=1e-5)


def test_what_members_cannot_take_is_refused(make_model, data, pools, tmp_path):
    x, y = data(64)
    trainer = choros.Trainer(make_model(), "ensemble", workers=2, pool=pools(2))
    backup = K.BackupAndRestore(tmp_path / "backup")
    limit = choros.callbacks.BeforeTimeLimit(tmp_path / "limit.keras")
    for callback in (backup, limit):
        with pytest.raises(choros.errors.InvalidInputError, match=f"{type(callback).__name__}.*members of an Ensemble"):
            trainer.fit(x, y, callbacks=[callback], verbose=0)
    setter = K.LambdaCallback(on_epoch_end=lambda epoch, logs: trainer.model.layers[0].bias.assign(np.ones(6)))
    with pytest.raises(choros.errors.InvalidInputError, match="set weights of an Ensemble"):
        trainer.fit(x, y, callbacks=[setter], verbose=0)


@pytest.mark.parametrize("algorithm", ["ensemble", "aeasgd"])
def test_a_model_compiled_again_with_fewer_metrics(algorithm, make_model, data, pools):
    x, y = data(64)
    history = choros.Trainer(compiled(make_model), algorithm, workers=2, pool=pools(2)).fit(
        x, y, batch_size=8, epochs=2, verbose=0
    )
    assert len(history.history["loss"]) == 2
