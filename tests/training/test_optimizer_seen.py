"""The optimizer that callbacks of asynchronous workers see: that of the epoch whose weights they see."""

import time

import keras
import numpy as np
import pytest

import choros
from choros.training.async_control.optimizer_states import EpochOptimizerStates

K = keras.callbacks
ASYNCHRONOUS = {"aeasgd": lambda: choros.AEASGD(window=2), "downpour": lambda: choros.DOWNPOUR(window=2)}


def make(make_model, **how):
    model = make_model()
    rate = keras.optimizers.schedules.CosineDecay(0.02, 32)
    model.compile(keras.optimizers.Adam(rate, **how), "sparse_categorical_crossentropy")
    return model


class Slow(K.Callback):
    """Takes its time, so that workers go on, and looks at the optimizer."""

    def __init__(self, pause=0.2):
        super().__init__()
        self.pause, self.steps, self.rates, self.averages = pause, [], [], []

    def on_epoch_end(self, epoch, logs=None):
        optimizer = self.model.optimizer
        self.steps.append(int(optimizer.iterations))
        self.rates.append(float(keras.ops.convert_to_numpy(optimizer.learning_rate)))
        if optimizer.use_ema:
            averages = optimizer._model_variables_moving_average
            self.averages.append(np.array(keras.ops.convert_to_numpy(averages[0])))
        time.sleep(self.pause)


@pytest.mark.parametrize("name", ASYNCHRONOUS)
def test_slow_callbacks_see_the_optimizer_of_the_epoch(name, make_model, data, pools, tmp_path):
    x, y = data(96)
    model, slow = make(make_model), Slow()
    save = K.ModelCheckpoint(tmp_path / "{epoch}.keras")
    choros.Trainer(model, ASYNCHRONOUS[name](), workers=2, pool=pools(2)).fit(
        x, y, batch_size=12, epochs=4, callbacks=[slow, save], verbose=0
    )
    assert slow.steps == [8, 16, 24, 32]
    np.testing.assert_allclose(slow.rates, [0.02 * 0.5 * (1 + np.cos(np.pi * i / 4)) for i in range(1, 5)], atol=1e-6)
    saved = [keras.models.load_model(tmp_path / f"{epoch}.keras") for epoch in (1, 2, 3, 4)]
    assert [int(result.optimizer.iterations) for result in saved] == [8, 16, 24, 32]
    assert int(model.optimizer.iterations) == 32


def test_a_backup_goes_on_with_the_count_of_its_epoch(make_model, data, pools, tmp_path):
    x, y = data(96)

    class Interrupt(K.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 2:
                raise KeyboardInterrupt

    how = {"batch_size": 12, "epochs": 4, "verbose": 0}
    callbacks = [Slow(), K.BackupAndRestore(tmp_path), Interrupt()]
    with pytest.raises(KeyboardInterrupt):
        choros.Trainer(make(make_model), "aeasgd", workers=2).fit(x, y, callbacks=callbacks, **how)
    model = make(make_model)
    trainer = choros.Trainer(model, "aeasgd", workers=2, pool=pools(2))
    history = trainer.fit(x, y, callbacks=[K.BackupAndRestore(tmp_path)], **how)
    assert history.epoch == [2, 3]
    assert int(model.optimizer.iterations) == 32


def test_slow_callbacks_see_the_averages_of_the_epoch(make_model, data, pools):
    x, y = data(96)
    results = []
    for pause in (0.2, 0.0):
        model, slow = make(make_model, use_ema=True, ema_momentum=0.9), Slow(pause)
        trainer = choros.Trainer(model, choros.AEASGD(window=1000), workers=2, pool=pools(2))
        trainer.fit(x, y, batch_size=12, epochs=4, callbacks=[slow], seed=3, verbose=0)
        results.append(slow.averages)
    for value, other in zip(*results, strict=True):  # no exchange before the end: each worker goes its own way
        np.testing.assert_allclose(value, other, atol=1e-6)
    assert all(np.abs(a - b).max() > 1e-4 for a, b in zip(results[0], results[0][1:], strict=False))


def part(step, rank=0):
    return {"rows": 8 * step}, {"optimizer": [np.array(step), np.full(2, float(step))], "average": [np.full(2, rank)]}


def test_what_a_rank_ahead_left_is_kept_while_there_is_room():
    saved = EpochOptimizerStates()
    for epoch in range(5):
        saved.put(0, epoch, part(epoch + 1), next_epoch=0)
    assert [saved.optimizer(epoch)[1].tolist() for epoch in range(5)] == [[n, n] for n in (1.0, 2.0, 3.0, 4.0, 5.0)]


def test_what_a_rank_far_ahead_left_is_bounded():
    """Two epochs are kept whole; of later ones the counts, with the latest slots."""
    saved = EpochOptimizerStates(max_bytes=0)
    for epoch in range(5):
        saved.put(0, epoch, part(epoch + 1), next_epoch=0)
    assert saved.optimizer(1)[1].tolist() == [2.0, 2.0]
    count, slot = saved.optimizer(3)
    assert (int(count), slot.tolist()) == (4, [5.0, 5.0])
    assert saved.last(0) == 4
    assert saved.last(1) == -1
    saved.put(0, 5, part(6), next_epoch=4)
    assert saved.optimizer(5)[1].tolist() == [6.0, 6.0]
    assert saved.optimizer(1) is None
    assert saved.averages(5)[0][0] == 48


@pytest.mark.filterwarnings("error:A callback has set")
def test_callbacks_that_set_rates_weights_or_averages_are_not_warned_of(make_model, data, pools, tmp_path):
    x, y = data()
    calls = [
        K.LearningRateScheduler(lambda epoch, rate: 0.9 * rate),
        K.ReduceLROnPlateau(monitor="loss", patience=0, min_delta=10.0),
        K.EarlyStopping(monitor="loss", restore_best_weights=True),
        K.LambdaCallback(
            on_train_batch_end=lambda batch, logs: model.layers[0].bias.assign(np.zeros(6, "float32")),
            on_epoch_end=lambda epoch, logs: model.save(tmp_path / "m.keras"),
        ),
    ]
    model = make_model(keras.optimizers.Adam(1e-2, use_ema=True))
    choros.Trainer(model, workers=2, pool=pools(2)).fit(x, y, batch_size=8, epochs=3, verbose=0, callbacks=calls)
