"""Callbacks where training goes on from a checkpoint: what they find in the model, and nothing is done twice."""

import keras
import numpy as np
import pytest

import choros


class Halve(keras.callbacks.Callback):
    """Halves the rate that there is, as ``ReduceLROnPlateau`` does, and keeps what it found as epochs began."""

    def __init__(self):
        super().__init__()
        self.found = []

    def on_epoch_begin(self, epoch, logs=None):
        self.found.append(float(self.model.optimizer.learning_rate))

    def on_epoch_end(self, epoch, logs=None):
        self.model.optimizer.learning_rate = self.found[-1] / 2


class See(keras.callbacks.Callback):
    """Keeps the weights that it found when training began, and when an epoch ended last."""

    def on_train_begin(self, logs=None):
        self.first = self.model.get_weights()

    def on_epoch_end(self, epoch, logs=None):
        self.last = self.model.get_weights()


def of_the_rate():
    return keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2 if epoch else rate)


def fit(model, algorithm, pools, data, callbacks, epochs, room):
    x, y = data
    how = {"batch_size": 16, "epochs": epochs, "seed": 5, "verbose": 0}
    trainer = choros.Trainer(model, algorithm, workers=2, pool=pools(2))
    return trainer.fit(x, y, callbacks=callbacks, checkpoint=room, resume=True, **how)


@pytest.mark.every(3)
@pytest.mark.parametrize("name", ["allreduce", "localsgd", "easgd", "diloco"])
@pytest.mark.parametrize("make", [Halve, of_the_rate])
def test_a_rate_that_is_made_of_the_last_one(make, name, make_model, data, pools, same, tmp_path):
    uninterrupted, cut, resumed = make_model(), make_model(), make_model()
    callbacks, before, after = [make() for _ in range(3)], See(), See()
    fit(uninterrupted, name, pools, data(), [callbacks[0]], 4, tmp_path / "whole")
    fit(cut, name, pools, data(), [callbacks[1], before], 2, tmp_path / "cut")
    assert fit(resumed, name, pools, data(), [callbacks[2], after], 4, tmp_path / "cut").epoch == [2, 3]
    same(resumed, uninterrupted)
    assert all(np.array_equal(value, other) for value, other in zip(after.first, before.last, strict=True))
    assert float(resumed.optimizer.learning_rate) == float(uninterrupted.optimizer.learning_rate)
    if make is Halve:
        assert callbacks[2].found == callbacks[0].found[2:]


class Once(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        if epoch == 0:
            self.model.optimizer.learning_rate = 1 / 128


def test_async_a_rate_that_was_set_before(pools, tmp_path):
    def model():
        made = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])
        made.compile(keras.optimizers.SGD(1 / 64), lambda truth, values: keras.ops.mean(values - 0 * truth, axis=-1))
        return made

    data = np.ones((64, 4), "float32"), np.ones((64, 1), "float32")  # a step takes the rate off each weight
    fit(model(), choros.DOWNPOUR(window=2), pools, data, [Once()], 1, tmp_path)
    resumed = model()
    fit(resumed, choros.DOWNPOUR(window=2), pools, data, [Once()], 3, tmp_path)
    steps = 64 // 16 * 2  # of both workers in an epoch
    assert resumed.get_weights()[0].tolist() == [[-steps / 64 - 2 * steps / 128]] * 4
    assert float(resumed.optimizer.learning_rate) == 1 / 128


def test_another_number_of_workers_is_named_and_not_a_setting_that_follows_from_it(data, make_model, tmp_path):
    def fit(workers):
        how = {"batch_size": 12, "epochs": 1, "checkpoint": tmp_path, "resume": True, "verbose": 0}
        choros.Trainer(make_model(), "aeasgd", workers=workers).fit(*data(), **how)

    fit(1)
    with pytest.raises(choros.InvalidInputError, match="a training with workers=1; this one has 2"):  # not alpha
        fit(2)
