"""Ensemble: members on disjoint shards, their mean predicts, the best is given to the model."""

import keras
import numpy as np
import pytest

import choros


def test_members_their_mean_and_the_best(make_model, data, pools):
    x, y = data(90)
    given = make_model()
    trainer = choros.Trainer(given, "ensemble", workers=2, pool=pools(2))
    history = trainer.fit(x, y, batch_size=10, epochs=2, validation_data=(x, y), seed=3, verbose=0)
    assert len(trainer.models) == 2
    outputs = [member.predict(x, verbose=0) for member in trainer.models]
    assert np.abs(outputs[0] - outputs[1]).max() > 1e-3  # they started from different weights
    np.testing.assert_allclose(trainer.predict(x, verbose=0), np.mean(outputs, axis=0), atol=1e-7)
    scores = [member.evaluate(x, y, verbose=0)[0] for member in trainer.models]
    best = trainer.models[int(np.argmin(scores))]
    for mine, theirs in zip(given.get_weights(), best.get_weights(), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    assert history.history["val_loss"][-1] == pytest.approx(np.mean(scores), abs=1e-4)
    assert history.run.meet == "never"
    assert history.run.exchanges == 0
    assert history.run.rows == 180  # every row by one member, twice


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
    given = [np.array(value) for value in frozen.get_weights()]
    trainer = choros.Trainer(model, "ensemble", workers=2, pool=pools(2))
    trainer.fit(x, y, batch_size=10, epochs=1, seed=3, verbose=0)
    first, second = trainer.models
    assert np.abs(first.layers[-1].get_weights()[0] - second.layers[-1].get_weights()[0]).max() > 0.05
    for member in (model, first, second):
        for value, expected in zip(member.get_layer("frozen").get_weights(), given, strict=True):
            np.testing.assert_array_equal(value, expected)
        for value, expected in zip(member.layers[0].get_weights(), normalization.get_weights(), strict=True):
            np.testing.assert_array_equal(value, expected)
        scaled = keras.ops.convert_to_numpy(member.layers[0](x))
        np.testing.assert_allclose(scaled.mean(0), 0, atol=1e-4)
        np.testing.assert_allclose(scaled.std(0), 1, atol=1e-3)


def test_single_has_one_worker(make_model, data, pools, same, same_history):
    x, y = data()
    plain, given = make_model(), make_model()
    how = {"batch_size": 8, "epochs": 2, "shuffle": False, "verbose": 0}
    trainer = choros.Trainer(given, "single", workers=2, pool=pools(2))
    assert trainer.workers == 1
    same_history(trainer.fit(x, y, **how), plain.fit(x, y, **how))
    same(given, plain)
    assert trainer.models == []
