"""Decisions of batch callbacks apply from the next batch on, though its gradients are calculated meanwhile."""

import keras
import numpy as np
import pytest

import choros

K = keras.callbacks
STEPS = 6  # in an epoch
HOW = {"batch_size": 8, "epochs": 2, "shuffle": False, "verbose": 0}


def reads_the_rate():
    """A model whose loss reads the learning rate, in a class that travels by value."""

    class Reads(keras.Sequential):
        def compute_loss(self, *args, **how):
            return super().compute_loss(*args, **how) * (1 + self.optimizer.learning_rate)

    return Reads


def make(random=False, metrics=("accuracy",), kind=None):
    keras.utils.set_random_seed(0)
    layers = keras.layers
    extra = [layers.Dropout(0.3, seed=5), layers.BatchNormalization(momentum=0.7)] if random else []
    model = (kind or keras.Sequential)(
        [keras.Input((8,)), layers.Dense(6, "relu"), *extra, layers.Dense(3, "softmax")],
    )
    model.compile(keras.optimizers.Adam(0.02), "sparse_categorical_crossentropy", metrics=list(metrics))
    return model


class Decides(K.Callback):
    """Does something at some batches, and keeps what it is told and sees."""

    def __init__(self, act, at, hook="end", looks=()):
        super().__init__()
        self.act, self.at, self.hook, self.looks = act, at, hook, looks
        self.rows, self.seen, self.epoch = [], [], 0

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def decide(self, batch):
        if (self.epoch, batch) in self.at:
            self.act(self.model)

    def on_train_batch_begin(self, batch, logs=None):
        if self.hook == "begin":
            self.decide(batch)

    def on_train_batch_end(self, batch, logs=None):
        self.rows.append([self.epoch, batch, *(float(logs[name]) for name in sorted(logs))])
        if batch in self.looks:
            self.model.get_weights()  # by which Keras' loop on JAX brings them
            self.seen.append([numbers(v) for v in (*self.model.variables, *self.model.optimizer.variables)])
        if self.hook == "end":
            self.decide(batch)


def numbers(variable):
    return np.array(keras.ops.convert_to_numpy(variable))


def stop(model):
    model.stop_training = True


def shrink(model):
    model.set_weights([0.5 * w if w.dtype.kind == "f" else w for w in model.get_weights()])


def slow(model):
    model.optimizer.learning_rate = 0.3 * float(keras.ops.convert_to_numpy(model.optimizer.learning_rate))


def both(model):
    shrink(model)
    slow(model)


def everything(model):
    return [numbers(v) for v in (*model.variables, *model.optimizer.variables)]


ACTS = {"stop": stop, "weights": shrink, "rate": slow, "both": both, "nothing": lambda model: None}
PLACES = {"middle": [(0, 2), (0, 3), (1, 1)], "first": [(0, 0)], "last": [(0, STEPS - 1), (1, 0)]}


@pytest.mark.every(7)
@pytest.mark.parametrize("hook", ["end", "begin"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("act", ACTS)
def test_decisions_are_those_of_keras(act, place, hook, data, pools, same):
    x, y = data(8 * STEPS)
    looks = [1, 2, 3, STEPS - 1]
    trained, plain = make(), make()
    ours, expected = (Decides(ACTS[act], PLACES[place], hook, looks) for _ in range(2))
    plain.fit(x, y, callbacks=[expected], **HOW)
    history = choros.Trainer(trained, "allreduce", workers=2, pool=pools(2)).fit(x, y, callbacks=[ours], **HOW)
    np.testing.assert_allclose(ours.rows, expected.rows, atol=1e-5)
    assert [worker.steps for worker in history.run.workers] == [len(expected.rows)] * 2
    for value, other in zip(ours.seen, expected.seen, strict=True):
        same(value, other)
    same(everything(trained), everything(plain))


@pytest.mark.every(3)
@pytest.mark.parametrize("kind", ["keras", "foreign"])
@pytest.mark.parametrize("act", ACTS)
def test_deciding_late_changes_no_bit(act, kind, data, pools, tmp_path):
    """With a checkpoint at each batch all ranks wait for every decision; without one the next gradients do not."""
    x, y = data(8 * STEPS)
    runs = []
    for waits in (True, False):
        model = make(True, kind=reads_the_rate() if kind == "foreign" else None)
        callback = Decides(ACTS[act], PLACES["middle"], "end", [0, 2, 3, STEPS - 1])
        more = {"checkpoint": choros.Checkpoint(tmp_path / "state", every=1)} if waits else {}
        trainer = choros.Trainer(model, "allreduce", workers=2, pool=pools(2))
        history = trainer.fit(x, y, callbacks=[callback], seed=1, **more, **HOW)
        rows = [worker.rows for worker in history.run.workers]
        runs.append((callback.rows, callback.seen, everything(model), history.history, rows))
    for value, waited in zip(runs[1][1], runs[0][1], strict=True):
        for a, b in zip(value, waited, strict=True):
            np.testing.assert_array_equal(a, b)
    for a, b in zip(runs[1][2], runs[0][2], strict=True):
        np.testing.assert_array_equal(a, b)
    assert runs[1][0] == runs[0][0]
    assert runs[1][3:] == runs[0][3:]


def by_assign(callback):
    callback.model.optimizer.learning_rate.assign(0.004)


def by_a_kept_variable(callback):
    callback.kept.assign(0.004)


def by_what_holds_the_value(callback):
    if keras.backend.backend() == "torch":
        callback.value.data.fill_(0.004)
    elif keras.backend.backend() == "tensorflow":
        callback.value.assign(0.004)
    else:
        callback.kept.assign(0.004)


@pytest.mark.parametrize("way", [by_assign, by_a_kept_variable, by_what_holds_the_value])
def test_every_way_to_set_the_rate_is_noticed(way, data, pools, same):
    x, y = data(8 * STEPS)

    class SetsOnce(K.Callback):
        def on_train_begin(self, logs=None):
            self.kept = self.model.optimizer.learning_rate
            self.value = self.kept.value

        def on_train_batch_end(self, batch, logs=None):
            if batch == 2 and not self.model.stop_training:  # plain Keras on JAX takes what is set after such an access
                way(self)

    trained, plain = make(), make()
    plain.fit(x, y, callbacks=[SetsOnce()], **HOW)
    choros.Trainer(trained, "allreduce", workers=2, pool=pools(2)).fit(x, y, callbacks=[SetsOnce()], **HOW)
    same(everything(trained), everything(plain))


def test_a_logger_reads_the_rate_that_another_callback_has_just_set(data, pools):
    x, y = data(8 * STEPS)

    class Sets(K.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.optimizer.learning_rate = 0.01 / (2 + batch // 2)  # the same one twice

    class Logs(K.Callback):
        def on_train_begin(self, logs=None):
            self.read = []

        def on_train_batch_end(self, batch, logs=None):
            rate = self.model.optimizer.learning_rate
            self.read.append((float(keras.ops.convert_to_numpy(rate)), float(np.asarray(rate)), float(rate)))
            self.read.append(np.array(rate, dtype="float64").dtype.name)

    runs = [Logs(), Logs()]
    make().fit(x, y, callbacks=[Sets(), runs[0]], **HOW)
    choros.Trainer(make(), "allreduce", workers=2, pool=pools(2)).fit(x, y, callbacks=[Sets(), runs[1]], **HOW)
    assert runs[1].read == runs[0].read
    assert len({each[0] for each in runs[1].read[::2]}) > 1


def test_logs_of_a_batch_are_those_of_keras_in_names_order_and_type(data, pools):
    """They come over a pipe that carries numbers only, but for the first ones."""
    x, y = data(8 * STEPS)

    class Keeps(K.Callback):
        def __init__(self):
            super().__init__()
            self.rows, self.begun = [], []

        def on_train_batch_begin(self, batch, logs=None):
            self.begun.append((batch, logs))

        def on_train_batch_end(self, batch, logs=None):
            self.rows.append([(name, type(value), round(value, 4)) for name, value in logs.items()])

    ours, expected = Keeps(), Keeps()
    metrics = ("accuracy", keras.metrics.SparseTopKCategoricalAccuracy(2, name="an_early_name"))
    make(metrics=metrics).fit(x, y, callbacks=[expected], **HOW)
    trainer = choros.Trainer(make(metrics=metrics), "allreduce", workers=2, pool=pools(2))
    trainer.fit(x, y, callbacks=[ours], **HOW)
    assert ours.rows == expected.rows
    assert ours.begun == expected.begun


def test_gradients_that_were_dropped_are_not_called_infinite(data, pools, capfd):
    x, y = data(8 * STEPS)
    x[8 * 3 : 8 * 4] = np.nan
    model = make()
    callback = Decides(stop, [(0, 2)])
    choros.Trainer(model, "allreduce", workers=2, pool=pools(2)).fit(x, y, callbacks=[callback], **HOW)
    assert len(callback.rows) == 3
    assert all(np.isfinite(each).all() for each in everything(model))
    assert "not finite" not in capfd.readouterr().err


def test_metrics_too_large_for_the_gradients_sum_have_one_of_their_own(data, pools):
    x, y = data(8 * STEPS)
    rows = []
    for large in (False, True):
        more = [keras.metrics.AUC(num_thresholds=4000, name="auc")] if large else []
        model = make(metrics=["accuracy"])
        model.compile(model.optimizer, "categorical_crossentropy", metrics=["accuracy", *more])
        callback = Decides(stop, [(1, 2)])
        trainer = choros.Trainer(model, "allreduce", workers=2, pool=pools(2))
        trainer.fit(x, np.eye(3, dtype="float32")[y], callbacks=[callback], **HOW)
        rows.append(callback.rows)
        if large:
            plain = make()
            auc = keras.metrics.AUC(num_thresholds=4000, name="auc")
            plain.compile(plain.optimizer, "categorical_crossentropy", metrics=["accuracy", auc])
            expected = Decides(stop, [(1, 2)])
            plain.fit(x, np.eye(3, dtype="float32")[y], callbacks=[expected], **HOW)
            np.testing.assert_allclose(callback.rows, expected.rows, atol=1e-5)
    assert len(rows[0]) == len(rows[1]) == STEPS + 3
