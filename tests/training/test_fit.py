"""``Trainer.fit`` takes what ``model.fit`` takes, and AllReduce gives what ``model.fit`` gives."""

import keras
import numpy as np
import pytest

import choros

pytestmark = pytest.mark.filterwarnings("ignore:.*experimental feature:FutureWarning")


def rates():
    return keras.optimizers.schedules.ExponentialDecay(0.05, decay_steps=3, decay_rate=0.7)


CASES = {
    "weights": {"sample_weight": np.linspace(0.5, 2.0, 60, dtype="float32"), "initial_epoch": 1},
    "class_weight": {"class_weight": {0: 0.3, 1: 1.0, 2: 2.5}, "validation_split": 0.25, "validation_batch_size": 4},
    "freq": {"validation_split": 0.25, "validation_freq": 2, "validation_steps": 2},
    "epochs": {"validation_split": 0.25, "validation_freq": [1, 3]},
}


@pytest.mark.parametrize("case", CASES)
def test_the_same_as_model_fit(case, make_model, data, pools, same, same_history):
    x, y = data()
    how = {"batch_size": 7, "epochs": 3, "shuffle": False, "verbose": 0, **CASES[case]}
    plain, trained = make_model(), make_model()
    expected = plain.fit(x, y, **how)
    history = choros.Trainer(trained, workers=2, pool=pools(2)).fit(x, y, **how)
    same_history(history, expected)
    same(trained, plain)


def test_steps_per_epoch_counts_global_batches_and_goes_on(make_model, data, pools, same):
    x, y = data()
    plain, trained = make_model(), make_model()
    plain.fit(x, y, batch_size=7, shuffle=False, verbose=0)
    how = {"batch_size": 7, "epochs": 3, "steps_per_epoch": 3, "shuffle": False, "verbose": 0}
    history = choros.Trainer(trained, workers=2, pool=pools(2)).fit(x, y, **how)
    assert [worker.steps for worker in history.run.workers] == [9, 9]
    same(trained, plain)  # 3 epochs of 3 batches are one pass over the 9


@pytest.mark.parametrize("optimizer", ["adam", "momentum", "schedule", "clip"])
def test_the_optimizer_comes_back(optimizer, make_model, data, pools, same, same_history):
    def make():
        return {
            "adam": lambda: keras.optimizers.Adam(1e-2),
            "momentum": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
            "schedule": lambda: keras.optimizers.SGD(rates()),
            "clip": lambda: keras.optimizers.SGD(0.1, clipnorm=0.1),
        }[optimizer]()

    x, y = data()
    how = {"batch_size": 8, "epochs": 2, "shuffle": False, "verbose": 0}
    plain, trained = make_model(make()), make_model(make())
    trainer = choros.Trainer(trained, workers=2, pool=pools(2))
    for _ in range(2):  # repeated fit continues
        expected, history = plain.fit(x, y, **how), trainer.fit(x, y, **how)
        same_history(history, expected)
    same(trained, plain)
    same(*([np.array(v) for v in model.optimizer.variables] for model in (trained, plain)))
    assert int(trained.optimizer.iterations) == 32
    expected, history = plain.fit(x, y, **how), trained.fit(x, y, **how)  # and plain Keras goes on from it
    same_history(history, expected)


def test_nested_inputs_and_outputs(data, pools, same, same_history):
    def make():
        keras.utils.set_random_seed(0)
        first, two = keras.Input((8,), name="one"), keras.Input((2,), name="two")
        hidden = keras.layers.Concatenate()([first, two])
        outputs = {
            "label": keras.layers.Dense(3, "softmax", name="label")(hidden),
            "value": keras.layers.Dense(1, name="value")(hidden),
        }
        model = keras.Model({"one": first, "two": two}, outputs)
        losses = {"label": "sparse_categorical_crossentropy", "value": "mse"}
        model.compile("adam", losses, metrics={"label": ["accuracy"], "value": ["mae"]})
        return model

    x, y = data()
    inputs = {"one": x, "two": x[:, :2]}
    targets = {"label": y, "value": x.sum(1)}
    weights = {"label": np.ones(60, "float32"), "value": np.linspace(0, 1, 60, dtype="float32")}
    how = {"batch_size": 16, "epochs": 2, "shuffle": False, "verbose": 0, "validation_data": (inputs, targets)}
    plain, trained = make(), make()
    expected = plain.fit(inputs, targets, sample_weight=weights, **how)
    history = choros.Trainer(trained, workers=2, pool=pools(2)).fit(inputs, targets, sample_weight=weights, **how)
    same_history(history, expected)
    same(trained, plain)


class Batches(keras.utils.PyDataset):
    def __init__(self, x, y, **how):
        super().__init__(**how)
        self.x, self.y = x, y

    def __len__(self):
        return 6

    def __getitem__(self, index):
        rows = slice(10 * index, 10 * index + 10)
        return self.x[rows], self.y[rows], np.full(10, 0.5 + index, "float32")


def test_a_pydataset(make_model, data, pools, same, same_history):
    x, y = data()
    how = {"epochs": 2, "shuffle": False, "verbose": 0}
    plain, trained = make_model(), make_model()
    batches = Batches(x, y)
    expected = plain.fit(batches, validation_data=batches, **how)
    history = choros.Trainer(trained, workers=2, pool=pools(2)).fit(batches, validation_data=batches, **how)
    same_history(history, expected)
    same(trained, plain)


@pytest.mark.parametrize("algorithm", ["allreduce", "easgd"])
def test_the_same_seed_is_the_same_run(algorithm, make_model, data, pools, same):
    x, y = data()
    how = {"batch_size": 8, "epochs": 2, "verbose": 0}

    def run(seed, caller=0):
        trained = make_model(dropout=0.5)
        keras.utils.set_random_seed(caller)
        history = choros.Trainer(trained, algorithm, workers=2, pool=pools(2)).fit(x, y, seed=seed, **how)
        return history.history, trained

    first, other = run(5), run(5, caller=1)
    assert first[0] == other[0]
    same(first[1], other[1], 0)
    drawn, repeated = run(None), run(None)  # keras.utils.set_random_seed makes it repeatable
    assert drawn[0] == repeated[0] != first[0]
    same(drawn[1], repeated[1], 0)


def test_dropout_differs_by_rank(pools):
    """With equal rows on both ranks, equal masks would sum to twice one rank's gradient."""
    x = np.ones((2, 64), "float32")

    def run(workers, pool, seed):
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((64,)), keras.layers.Dropout(0.5), keras.layers.Dense(1, use_bias=False)])
        model.compile(keras.optimizers.SGD(1.0), "mse")
        before = np.array(model.get_weights()[0])
        choros.Trainer(model, workers=workers, pool=pool).fit(
            x[:workers], np.full(workers, 1e4, "float32"), batch_size=workers, epochs=1, seed=seed, verbose=0
        )
        return np.round((model.get_weights()[0] - before).ravel() / 4e4, 2)  # kept entries: 1 a rank, half of it each

    both = run(2, pools(2), 3)
    assert set(np.unique(np.round(both, 1))) >= {0.0, 0.5, 1.0} or len(np.unique(both)) >= 3
    np.testing.assert_array_equal(both, run(2, pools(2), 3))


@pytest.mark.parametrize(("verbose", "lines"), [(0, 0), (1, 4), (2, 4), ("auto", 4)])
def test_verbose_is_keras_own_display(verbose, lines, make_model, data, pools, capsys):
    x, y = data()
    choros.Trainer(make_model(), "aeasgd", workers=2, pool=pools(2)).fit(
        x, y, batch_size=10, epochs=2, verbose=verbose, validation_data=(x, y)
    )
    out = capsys.readouterr().out
    assert bool(out) is bool(lines)
    if lines:
        assert "Epoch 1/2" in out
        assert "6/6" in out
        assert "val_accuracy" in out
        assert out.rstrip().splitlines()[-1].startswith("choros: 2 workers, start-up and compilation ")
    if verbose in (1, "auto"):
        assert "━" in out


def test_history_holds_keras_keys_and_run_the_rest(make_model, data, pools):
    x, y = data()
    history = choros.Trainer(make_model(), "dynsgd", workers=2, pool=pools(2)).fit(
        x, y, batch_size=10, epochs=3, validation_data=(x, y), verbose=0
    )
    assert isinstance(history, keras.callbacks.History)
    assert list(history.history) == ["accuracy", "loss", "val_accuracy", "val_loss"]
    assert history.epoch == [0, 1, 2]
    run = history.run
    assert run.mode == "async"
    assert run.group == "a center in shared memory"
    assert ", exchange by a center in shared memory" in run.summary()
    assert isinstance(run.algorithm, choros.DynSGD)
    assert [worker.rank for worker in run.workers] == [0, 1]
    assert run.rows == sum(worker.rows for worker in run.workers) == 180
    assert [worker.steps for worker in run.workers] == [18, 18]
    assert run.exchanges == sum(worker.exchanges for worker in run.workers) > 0
    assert 0 <= run.exchanging <= 1
    assert run.startup > 0
    assert run.seconds >= 0
    assert run.staleness >= 0
    assert [epoch for _, epoch, _ in run.losses] == [0, 1, 2]
    assert [loss for _, _, loss in run.losses] == history.history["loss"]
    with pytest.raises(AttributeError):
        run.rows = 0


def test_with_keeps_the_workers_and_fit_alone_does_not(make_model, data):
    x, y = data()
    with choros.Trainer(make_model(), workers=1) as trainer:
        trainer.fit(x, y, verbose=0)
        pids = trainer._local.pool.start().pids
        trainer.fit(x, y, verbose=0)
        assert trainer._local.pool.start().pids == pids
    assert not trainer._local.pool.started
    trainer.fit(x, y, verbose=0)
    assert not trainer._local.pool.started


def test_a_model_without_an_input_shape(data, pools, same):
    def make():
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.layers.Dense(4, "tanh"), keras.layers.Dense(3, "softmax")])
        model.compile("adam", "sparse_categorical_crossentropy")
        return model

    x, y = data()
    trained, plain = make(), make()
    choros.Trainer(trained, workers=2, pool=pools(2)).fit(x, y, batch_size=8, shuffle=False, verbose=0)
    plain.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    same(trained, plain)


def test_evaluate_predict_and_the_file(make_model, data, pools, tmp_path):
    x, y = data()
    trained = make_model()
    trainer = choros.Trainer(trained, "downpour", workers=2, pool=pools(2))
    trainer.fit(x, y, batch_size=8, epochs=2, verbose=0)
    assert trainer.evaluate(x, y, verbose=0) == trained.evaluate(x, y, verbose=0)
    np.testing.assert_array_equal(trainer.predict(x, verbose=0), trained.predict(x, verbose=0))
    trained.save(tmp_path / "m.keras")
    loaded = keras.models.load_model(tmp_path / "m.keras")
    np.testing.assert_allclose(loaded.predict(x, verbose=0), trained.predict(x, verbose=0), atol=1e-6)
    trained.fit(x, y, verbose=0)  # the model goes on in plain Keras


def test_numbers_may_be_numpys(make_model, data, pools):
    x, y = data()
    n = np.int64
    history = choros.Trainer(make_model(), "localsgd", workers=2, pool=pools(2)).fit(
        x, y, batch_size=n(10), epochs=n(2), seed=n(3), validation_data=(x, y), validation_batch_size=n(9), verbose=0
    )
    assert len(history.history["val_loss"]) == 2


def test_training_from_mapped_files_is_training_from_arrays(make_model, data, pools, same, tmp_path):
    x, y = data()
    np.save(tmp_path / "x.npy", x.astype("float64"))
    np.save(tmp_path / "y.npy", y)
    mapped = [np.load(tmp_path / f"{name}.npy", mmap_mode="r") for name in "xy"]
    how = {"batch_size": 16, "epochs": 2, "seed": 1, "validation_split": 0.2, "verbose": 0}
    models = [make_model() for _ in range(2)]
    for model, arrays in zip(models, ((x, y), mapped), strict=True):
        choros.Trainer(model, workers=2, pool=pools(2)).fit(*arrays, **how)
    same(*models, tolerance=0)
