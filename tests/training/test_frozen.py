"""Large frozen variables: workers use the caller's memory for them, and all that changes one of them is seen."""

import keras
import numpy as np
import pytest

import choros
from choros.backends import make_replica
from choros.types import Batch

WIDE = 1 << 18  # values of a variable that lies in memory shared by all workers


class WithTarget(keras.Model):
    """A frozen target follows the trained weights in each step, as in BYOL."""

    def __init__(self):
        super().__init__()
        self.small = keras.layers.Dense(1)
        self.target = self.add_weight(shape=(WIDE,), initializer="zeros", trainable=False, name="target")

    def call(self, x, training=False):
        if training:
            self.target.assign(0.5 * self.target + 0.5 * keras.ops.mean(self.small.kernel) + 1.0)
        return self.small(x) + keras.ops.mean(self.target)


def data(rows=24):
    random = np.random.default_rng(0)
    return random.normal(size=(rows, 3)).astype("float32"), random.normal(size=(rows, 1)).astype("float32")


def with_table(trainable=False):
    keras.utils.set_random_seed(0)
    table = keras.layers.Dense(WIDE // 4, use_bias=False, trainable=trainable, name="table")
    mean = keras.layers.GlobalAveragePooling1D()
    layers = [keras.Input((4,)), table, keras.layers.Reshape((WIDE // 16, 4)), mean, keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile("sgd", "mse")
    return model


def values(model):
    return [np.array(keras.ops.convert_to_numpy(weight)) for weight in model.weights]


@pytest.fixture(scope="module")
def pool():
    with choros.WorkerPool(2) as workers:
        yield workers


def assert_equal_to_plain_fit(pool, make, x, y):
    plain, trained = make(), make()
    trained.set_weights(plain.get_weights())
    plain.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    choros.Trainer(trained, workers=2, pool=pool).fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    for value, others in zip(values(trained), values(plain), strict=True):
        np.testing.assert_allclose(value, others, rtol=1e-5, atol=1e-6)


def test_a_frozen_variable_that_each_step_changes(pool):
    x, y = data()

    def make():
        keras.utils.set_random_seed(1)
        model = WithTarget()
        model(x[:1])
        model.compile("sgd", "mse")
        return model

    assert_equal_to_plain_fit(pool, make, x, y)


def test_a_frozen_layer_stays_as_it_is(pool):
    x, y = np.ones((24, 4), "float32"), data()[1]
    assert_equal_to_plain_fit(pool, with_table, x, y)


def test_a_layer_is_frozen_after_one_fit_and_trained_in_the_next(pool):
    x, y = np.ones((16, 4), "float32"), data(16)[1]
    model = with_table()
    trainer = choros.Trainer(model, workers=2, pool=pool)
    before = values(model)
    trainer.fit(x, y, batch_size=8, verbose=0)
    assert np.array_equal(values(model)[0], before[0])
    model.layers[0].trainable = True
    model.compile("sgd", "mse")
    choros.Trainer(model, workers=2, pool=pool).fit(x, y, batch_size=8, verbose=0)
    assert not np.array_equal(values(model)[0], before[0])


class SetTable(keras.callbacks.Callback):
    """Set the frozen table after the first epoch, and keep what is seen after the second one."""

    def on_epoch_end(self, epoch, logs=None):
        table = self.model.get_layer("table")
        if epoch == 0:
            table.set_weights([np.full_like(table.get_weights()[0], 2.0)])
        else:
            self.seen, self.loss = table.get_weights()[0], logs["loss"]


@pytest.mark.parametrize("algorithm", ["AllReduce", "ADAG"])
def test_workers_take_frozen_weights_that_a_callback_sets(pool, algorithm):
    x, y = np.ones((16, 4), "float32"), data(16)[1]
    model, callback = with_table(), SetTable()
    trainer = choros.Trainer(model, workers=2, pool=pool, algorithm=getattr(choros.algorithms, algorithm)())
    trainer.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0, callbacks=[callback])
    assert (callback.seen == 2.0).all()
    assert (values(model)[0] == 2.0).all()
    if algorithm == "AllReduce":
        plain, same = with_table(), SetTable()
        plain.fit(x, y, batch_size=8, epochs=2, verbose=0, shuffle=False, callbacks=[same])
        assert callback.loss == pytest.approx(same.loss, rel=1e-4)


def test_after_a_failure_frozen_weights_are_those_that_were_given(pool, fails):
    class SetAndFail(SetTable):
        def on_epoch_end(self, epoch, logs=None):
            super().on_epoch_end(epoch, logs)
            fails.flag.touch()

    x, y = np.ones((16, 4), "float32"), data(16)[1]
    table = keras.layers.Dense(WIDE // 4, use_bias=False, trainable=False, name="table")
    model = keras.Sequential([keras.Input((4,)), table, fails(), keras.layers.Dense(1)])
    model.compile("sgd", "mse", run_eagerly=True)
    before = values(model)
    with pytest.raises(choros.WorkerFailedError, match="as the test wants it"):
        choros.Trainer(model, workers=2, pool=pool).fit(
            x, y, batch_size=8, epochs=2, verbose=0, callbacks=[SetAndFail()]
        )
    for value, actual in zip(values(model), before, strict=True):
        np.testing.assert_array_equal(value, actual)


def test_a_replica_predicts_with_frozen_weights_behind_others():
    keras.utils.set_random_seed(0)
    wide = keras.layers.Dense(WIDE // 4, use_bias=False, trainable=False)
    model = keras.Sequential([keras.Input((4,)), keras.layers.BatchNormalization(), wide, keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    x, y = np.ones((6, 4), "float32"), np.ones((6, 1), "float32")
    batch = Batch(x, y, None, rows=6, total=6)
    expected = model.predict(x, verbose=0)
    replica = make_replica(model, 1)
    replica.build(batch)
    (outputs,) = replica.predict(batch)
    np.testing.assert_allclose(outputs, expected, rtol=1e-5, atol=1e-6)
    replica.evaluate(batch)
    assert replica.metrics()["loss"] == pytest.approx(float(np.mean((expected - y) ** 2)), rel=1e-4)
    replica.close()
