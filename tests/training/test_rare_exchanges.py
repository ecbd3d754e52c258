"""Windows longer than an epoch, of workers that wait for nobody: what is shown holds what they have yet to bring."""

import itertools

import keras
import numpy as np
import pytest

import choros

K = keras.callbacks
WINDOW = 1000
RULES = {
    "aeasgd": choros.AEASGD,
    "eamsgd": choros.EAMSGD,
    "downpour": choros.DOWNPOUR,
    "agn": choros.AGN,
    "adag": choros.ADAG,
    "dynsgd": choros.DynSGD,
}


class Judge(K.Callback):
    """Evaluates what it sees at each epoch's end, beside what was logged."""

    def __init__(self, x, y):
        super().__init__()
        self.x, self.y, self.seen, self.logged = x, y, [], []

    def on_epoch_end(self, epoch, logs=None):
        loss = self.model.loss(self.y, self.model(self.x, training=False))
        self.seen.append(float(np.mean(keras.ops.convert_to_numpy(loss))))
        self.logged.append(logs.get("val_loss"))


def make(rate=0.05):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(6, "tanh"), keras.layers.Dense(3, "softmax")])
    model.compile(keras.optimizers.SGD(rate), keras.losses.SparseCategoricalCrossentropy())
    return model


@pytest.mark.parametrize("name", RULES)
def test_an_improving_run_is_not_stopped(name, data, pools):
    x, y = data(64)
    how = {"batch_size": 64, "epochs": 6, "seed": 3, "verbose": 0}  # all rows: no epoch is worse by chance
    rule = RULES[name](window=WINDOW)
    judge, stop = Judge(x, y), K.EarlyStopping("val_loss", patience=1)
    trained, plain = make(), make()
    history = choros.Trainer(trained, rule, workers=2, pool=pools(2), strict=False).fit(
        x, y, validation_data=(x, y), callbacks=[judge, stop], **how
    )
    losses = history.history["val_loss"]
    assert len(losses) == 6, losses
    assert losses[-1] < losses[0]
    np.testing.assert_allclose(judge.seen, losses, rtol=1e-5)
    without = choros.Trainer(plain, rule, workers=2, pool=pools(2), strict=False).fit(x, y, **how)
    assert history.run.exchanges == without.run.exchanges == 2
    if name in ("downpour", "agn"):  # whose sum does not depend on who comes first
        for value, other in zip(trained.get_weights(), plain.get_weights(), strict=True):
            np.testing.assert_allclose(value, other, atol=1e-6)
        np.testing.assert_allclose(judge.seen[-1], loss_of(trained, x, y), rtol=1e-4)


def loss_of(model, x, y):
    return float(np.mean(keras.ops.convert_to_numpy(model.loss(y, model(x, training=False)))))


def test_validation_alone_is_of_the_trial(data, pools):
    x, y = data(64)
    trainer = choros.Trainer(make(), choros.DOWNPOUR(window=WINDOW), workers=2, pool=pools(2))
    history = trainer.fit(x, y, batch_size=8, epochs=4, validation_data=(x, y), verbose=0)
    losses = history.history["val_loss"]
    assert all(after < before for before, after in itertools.pairwise(losses)), losses


@pytest.mark.parametrize("workers", [1, 2])
def test_a_mean_step_of_a_window_that_has_begun(workers, data, pools):
    """AGN divides by the steps of the window: also a synchronous trial is by those of a whole one, but for the last."""
    x, y = data(64)
    judge = Judge(x, y)
    model = make(0.5)
    trainer = choros.Trainer(model, choros.AGN(window=60), workers=workers, pool=pools(workers), mode="sync")
    history = trainer.fit(x, y, batch_size=8, epochs=6, validation_data=(x, y), callbacks=[judge], verbose=0)
    losses = history.history["val_loss"]
    assert all(after < before for before, after in itertools.pairwise(losses)), losses
    np.testing.assert_allclose(losses[-1], loss_of(model, x, y), rtol=1e-5)
