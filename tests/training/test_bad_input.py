"""Bad input is refused before a worker starts, with a sentence that says what to do instead."""

import pathlib
import subprocess
import sys
import textwrap
from itertools import repeat

import keras
import numpy as np
import pytest
import torch

import choros
import choros.data.stream_source
from choros.errors import (
    InvalidDataError,
    InvalidInputError,
    NotSerializableError,
    UnknownAlgorithmError,
    UnstableAlgorithmError,
)


@pytest.fixture
def refused(make_model, data, monkeypatch):
    """Fit with something bad; give the message, and see that no process was started."""

    def start(self, unfit=()):
        raise AssertionError("a worker was started")

    def check(error, text, model=None, algorithm="allreduce", how=None, **fit):
        monkeypatch.setattr(choros.WorkerPool, "start", start)
        x, y = data()
        fit = {"x": x, "y": y, "verbose": 0, **fit}
        with pytest.raises(error, match=text) as caught:
            choros.Trainer(model or make_model(), algorithm, **(how or {"workers": 2})).fit(**fit)
        message = str(caught.value)
        assert isinstance(caught.value, ValueError)
        assert "\n" not in message
        assert message[-1] in ".')\""

    return check


def test_callbacks(refused):
    refused(InvalidInputError, "callbacks: 3 is of type int: give a keras.callbacks.Callback, a list", callbacks=3)
    refused(InvalidInputError, "callbacks: 'stop' is of type str", callbacks=[keras.callbacks.Callback(), "stop"])
    text = r"callbacks: EarlyStopping is a class: give an object, EarlyStopping\(\)"
    refused(InvalidInputError, text, callbacks=[keras.callbacks.EarlyStopping])


def test_models(refused):
    layers = [keras.Input((8,)), keras.layers.Dense(3)]
    refused(InvalidInputError, "not compiled: call model.compile", keras.Sequential(layers))
    without = keras.Sequential(layers)
    without.compile(None, "mse")
    refused(InvalidInputError, "without an optimizer, which workers need: give compile an optimizer", without)
    refused(InvalidInputError, "is of type int: give a compiled", 7)

    numbers = iter(number for number in range(3))
    model = keras.Sequential([keras.Input((8,)), keras.layers.Lambda(lambda v: v if numbers else -v)])
    model.compile("sgd", "sparse_categorical_crossentropy")
    refused(
        NotSerializableError,
        "cannot be sent to a worker: model.layers.0..function .its variable 'numbers'.*, a generator, cannot",
        model,
    )


def test_an_ensemble_with_fewer_rows_than_members(refused, data):
    x, y = data(3)
    how = {"algorithm": "ensemble", "how": {"workers": 5}, "x": x, "y": y, "batch_size": 5}
    refused(InvalidDataError, "3 rows cannot be divided among 5 members: give more rows or fewer workers", **how)


@pytest.mark.parametrize(
    ("name", "nearest"), [("aesgd", "AEASGD"), ("alreduse", "AllReduce"), ("downpoor", "DOWNPOUR")]
)
def test_unknown_algorithms(name, nearest, refused):
    refused(UnknownAlgorithmError, f"(?i){nearest}", algorithm=name)


@pytest.mark.parametrize("name", ["zzz", "fedavg", "hogwild", ""])
def test_a_name_that_is_like_none(refused, name):
    message = f"No algorithm is called {name!r}: there are Single, AllReduce"
    refused(UnknownAlgorithmError, message, algorithm=name)


@pytest.mark.parametrize("wide", [7, 9])
def test_rows_that_do_not_fit_the_model(refused, wide):
    x = np.zeros((96, wide), "float32")
    refused(
        InvalidInputError,
        rf"cannot take these data \(x is of shape \({wide},\) a row\): ",
        x=x,
        y=np.zeros(96, "int32"),
    )


@pytest.mark.parametrize("built", [False, True])
def test_rows_without_a_target(built, make_model, refused):
    """The loss needs one, also if the model was trained before."""
    model = make_model()
    if built:
        model.train_on_batch(np.zeros((4, 8), "float32"), np.zeros(4, "int32"))
    message = r"y is missing, which the compiled loss of the model '\w+' needs: give fit\(x, y\)"
    refused(InvalidInputError, message, model, y=None)
    refused(InvalidInputError, message, model, x=iter([np.zeros((4, 8), "float32")]), y=None)


def test_validation_rows_without_a_target(refused):
    message = (
        r"validation_data has no y, which the compiled loss of the model '\w+' needs: give validation_data=\(x, y\)"
    )
    refused(InvalidInputError, message, validation_data=(np.zeros((4, 8), "float32"),))


class Autoencoder(keras.Model):
    """A model whose loss needs no y."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(8)

    def call(self, x):
        return self.dense(x)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return keras.ops.mean(keras.ops.square(x - y_pred))


@pytest.mark.parametrize("loss", [None, "mse"])
def test_rows_without_a_target_of_a_loss_that_needs_none(loss, pools):
    model = Autoencoder()
    model.compile("sgd", loss)
    x = np.ones((16, 8), "float32")
    trainer = choros.Trainer(model, workers=2, pool=pools(2))
    history = trainer.fit(x, validation_data=(x[:5],), batch_size=8, verbose=0)
    assert set(history.history) == {"loss", "val_loss"}


def test_hyper_parameters(refused):
    """Constructors import nothing of Choros' errors: theirs are plain ValueErrors, with the same kind of sentence."""
    for value in (float("nan"), -1.0, float("inf")):
        with pytest.raises(ValueError, match=r"alpha=.*finite number"):
            choros.AEASGD(alpha=value)
    with pytest.raises(ValueError, match="window=-1.*whole number"):
        choros.LocalSGD(window=-1)
    refused(InvalidInputError, "an algorithm is an object such as", algorithm=7)
    refused(UnstableAlgorithmError, r"alpha|EASGD", algorithm=choros.EASGD(alpha=5.0))


@pytest.mark.parametrize("workers", [0, -1, 1.5, True, "2"])
def test_numbers_of_workers(workers, refused):
    refused(InvalidInputError, f"workers={workers!r}: give a whole number", how={"workers": workers})


@pytest.mark.parametrize(
    ("fit", "message"),
    [
        ({"epochs": 0}, "epochs=0: give a whole number, 1 or more"),
        ({"epochs": -1}, "epochs=-1: give a whole number, 1 or more"),
        ({"epochs": 2, "initial_epoch": 2}, "nothing to train"),
        ({"initial_batch": -1}, "initial_batch=-1"),
        ({"initial_batch": 10**6}, "an epoch has .* batches"),
        ({"seed": -1}, "seed=-1"),
        ({"seed": "seven"}, "seed='seven'"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"steps_per_epoch": 0}, "steps_per_epoch=0"),
        ({"validation_split": 1.0}, "validation_split"),
        ({"validation_freq": 0}, "validation_freq=0"),
        ({"validation_steps": -1, "validation_split": 0.5}, "validation_steps=-1"),
        ({"verbose": 3}, "verbose=3"),
        ({"y": np.zeros(59)}, "x has 60 rows and y has 59"),
        ({"x": np.array([None] * 60)}, "convert"),
        ({"x": [1.0, 2.0], "y": None}, r"numpy\.array"),
        ({"y": list(np.zeros(60, "int32"))}, r"y is a list of 60 numbers: give numpy\.array\(y\)\."),
        ({"y": list(torch.zeros(60))}, r"y is a list of 60 numbers: give numpy\.array\(y\)\."),
        ({"x": (row for row in range(3)), "y": None}, r"batch 1 of the generator .* is of type int: yield \(x,\)"),
        ({"validation_data": 7}, "validation_data is of type int"),
        ({"validation_data": (np.zeros((4, 8)), np.zeros(3))}, "4 rows and y has 3"),
        ({"class_weight": [1.0]}, "give a dict"),
        ({"sample_weight": np.ones((60, 2))}, "sample_weight"),
        ({"x": np.zeros((0, 8)), "y": np.zeros(0)}, "no rows"),
        ({"x": torch.ones(60, 8).to_sparse()}, "x is a Tensor that numpy cannot read .*to_dense"),
        ({"x": keras.KerasTensor((60, 8))}, "x is a KerasTensor that numpy cannot read"),
        ({"x": np.ma.array(np.ones((60, 8)), mask=True)}, r"the mask would be lost: fill it, as by x\.filled"),
        ({"x": [{"image": np.ones(8), "label": 1}] * 60, "y": None}, "x is a list of rows: give an array of all rows"),
        ({"x": iter([{"image": [0.1], "label": 1}] * 60), "y": None}, r"a single number .* batch rows first"),
        ({"x": iter([(np.ones(8), np.int64(1))] * 60), "y": None}, r"a single number .* batch rows first"),
        ({"shuffle": "rows"}, "shuffle='rows': give True, False or 'batch'"),
        ({"shuffle": 0.5}, "shuffle=0.5: give True"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_fit_is_given(fit, message, refused):
    refused(InvalidInputError, message, **fit)


def test_other_libraries_datasets(refused):
    tf = pytest.importorskip("tensorflow", reason="tensorflow is not installed")
    dataset = tf.data.Dataset.from_tensor_slices((np.zeros((4, 8)), np.zeros(4)))
    refused(InvalidDataError, "batch 1 .* has a single number .* batch rows first", x=dataset, y=None)  # not batched
    torch = pytest.importorskip("torch", reason="torch is not installed")
    dataset = torch.utils.data.TensorDataset(torch.zeros(4, 8))
    refused(InvalidDataError, "PyTorch Dataset without a DataLoader.*PyDataset", x=dataset, y=None)


def test_modes_and_pools(refused):
    refused(InvalidInputError, "so it is synchronous", how={"workers": 2, "mode": "async"})
    refused(InvalidInputError, "'sync' or 'async'", how={"workers": 2, "mode": "sometimes"})
    refused(InvalidInputError, "never exchange", algorithm="ensemble", how={"workers": 2, "mode": "async"})
    refused(InvalidInputError, "the pool has 1", how={"workers": 2, "pool": choros.WorkerPool(1)})


def test_an_interface_that_is_not_there(refused):
    refused(InvalidInputError, "network='nosuch0': .* has no such interface", how={"workers": 2, "network": "nosuch0"})


def test_a_worker_is_no_caller(make_model, monkeypatch):
    monkeypatch.setenv("CHOROS_WORKER", "1")
    with pytest.raises(InvalidInputError, match="itself a worker"):
        choros.Trainer(make_model())


SCRIPT = """
    import pathlib, sys
    with open("ran", "a") as file:
        file.write("once\\n")

    import keras, numpy as np
    import choros

    class Scaled(keras.layers.Layer):
        def __init__(self, units, **how):
            super().__init__(**how)
            self.units = units
            self.dense = keras.layers.Dense(units)

        def build(self, shape):
            self.dense.build(shape)

        def call(self, x):
            return twice(self.dense(x))

        def get_config(self):
            return {**super().get_config(), "units": self.units}

    def twice(x):
        return 2 * x

    def my_loss(y, p):
        return keras.ops.mean(keras.ops.square(y - p), axis=-1)

    class Largest(keras.metrics.Mean):
        def update_state(self, y, p, sample_weight=None):
            super().update_state(keras.ops.abs(y - p))

    def closeness(y, p):
        return keras.ops.exp(-keras.ops.abs(y - p))

    class Batches(keras.utils.PyDataset):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            x = np.random.default_rng(index).normal(size=(6, 3)).astype("float32")
            return x, x.sum(1, keepdims=True)

    def make():
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((3,)), Scaled(1)])
        model.compile("sgd", my_loss, metrics=[Largest(name="largest"), closeness])
        return model

    plain, model = make(), make()
    expected = plain.fit(Batches(), epochs=2, shuffle=False, verbose=0).history
    history = choros.Trainer(model, workers=2).fit(Batches(), epochs=2, shuffle=False, verbose=0).history
    assert list(history) == list(expected), (history, expected)
    for name in expected:
        np.testing.assert_allclose(history[name], expected[name], rtol=1e-4, err_msg=name)
    np.testing.assert_allclose(model.get_weights()[0], plain.get_weights()[0], atol=1e-5)
    print("finished")
"""


def test_a_script_without_a_guard(tmp_path):
    """All classes and functions live in ``__main__``; its body runs once."""
    pathlib.Path(tmp_path, "script.py").write_text(textwrap.dedent(SCRIPT))
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    assert "finished" in done.stdout
    assert pathlib.Path(tmp_path, "ran").read_text() == "once\n"


def test_a_synchronized_batch_normalization(refused, backend):
    if backend != "tensorflow":
        with pytest.raises((ValueError, NotImplementedError), match="synchronized"):
            keras.layers.BatchNormalization(synchronized=True)(np.ones((2, 3), "float32"), training=True)
        return
    layers = [keras.Input((8,)), keras.layers.BatchNormalization(synchronized=True, name="norm"), keras.layers.Dense(3)]
    model = keras.Sequential(layers)
    model.compile("sgd", "sparse_categorical_crossentropy")
    refused(InvalidInputError, "'norm' is a BatchNormalization.synchronized=True., and 2 workers", model)


def test_a_meeting_point_of_ipv6_is_refused_by_name(monkeypatch):
    from choros.comm.bootstrap.init import join

    for name in ("CHOROS_COMM_FD", "CHOROS_COORDINATOR", "CHOROS_MEETING"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CHOROS_SECRET", "ab" * 32)
    for first in ("[::1]:2222", "[fd00::1]:2222"):
        cluster = f'"cluster": {{"worker": ["{first}", "[fd00::2]:2222"]}}'
        monkeypatch.setenv("TF_CONFIG", f'{{{cluster}, "task": {{"type": "worker", "index": 1}}}}')
        with pytest.raises(InvalidInputError, match="sockets use IPv4. Set CHOROS_COORDINATOR"):
            join(1, 2, 5.0)


def test_validation_data_without_an_end_are_refused_before_they_fill_the_memory(refused, monkeypatch):
    rows = np.zeros((10, 8), "float32"), np.zeros(10, "int32")
    monkeypatch.setattr(choros.data.stream_source, "memory_left", lambda: 36_000)
    refused(
        InvalidDataError,
        "The first 51 batches .* give validation_steps= where it has no end",
        validation_data=repeat(rows),
    )
    refused(InvalidDataError, "validation_data, a list_iterator, yields no batch", validation_data=iter([]))


def test_validation_data_that_do_not_end_soon_are_warned_about(pools, make_model, data, monkeypatch):
    x, y = data()
    monkeypatch.setattr(choros.data.stream_source, "_WARN_SECONDS", 0.0)
    with pytest.warns(UserWarning, match="give validation_steps= if it has no end"):
        choros.Trainer(make_model(), workers=2, pool=pools(2)).fit(
            x, y, verbose=0, validation_data=((x, y) for _ in range(2))
        )


def test_validation_data_without_an_end_are_read_for_validation_steps(pools, make_model, data, same_history):
    x, y = data()
    trainer = choros.Trainer(make_model(), workers=2, pool=pools(2))
    result = trainer.fit(x, y, verbose=0, seed=1, validation_data=repeat((x[:7], y[:7])), validation_steps=3)
    trained = choros.Trainer(make_model(), workers=2, pool=pools(2))
    same_history(
        trained.fit(x, y, verbose=0, seed=1, validation_data=(np.tile(x[:7], (3, 1)), np.tile(y[:7], 3))), result
    )


def test_a_batch_size_of_none_is_32(pools, make_model, data, same):
    x, y = data(100)
    models = [make_model(), make_model()]
    for model, batch_size in zip(models, (None, 32), strict=True):
        run = choros.Trainer(model, workers=2, pool=pools(2)).fit(x, y, batch_size, verbose=0, seed=1).run
        assert run.workers[0].steps == 4
    same(*models, 0)


def test_one_weight_for_one_of_two_outputs_is_refused_as_by_keras(refused):
    inputs = keras.Input((8,))
    model = keras.Model(inputs, {name: keras.layers.Dense(1, name=name)(inputs) for name in "ab"})
    model.compile("sgd", {"a": "mse", "b": "mse"})
    x, y = np.zeros((6, 8)), {name: np.zeros(6) for name in "ab"}
    with pytest.raises(ValueError, match="one `sample_weight` array per output"):
        model.fit(x, y, sample_weight={"a": np.ones(6)}, verbose=0)
    text = "sample_weight is nested differently from y"
    refused(InvalidDataError, text, model, x=x, y=y, sample_weight={"a": np.ones(6)})


@pytest.mark.skipif(keras.backend.backend() != "jax", reason="keras.distribution is for JAX")
def test_a_distribution_of_keras_in_force(refused):
    keras.distribution.set_distribution(keras.distribution.DataParallel(devices=keras.distribution.list_devices()[:1]))
    try:
        refused(InvalidInputError, r"keras.distribution.DataParallel is in force.*set_distribution\(None\)")
    finally:
        keras.distribution.set_distribution(None)


def test_validation_data_that_the_model_cannot_take(refused):
    text = r"cannot take the validation data \(x is of shape \(3,\) a row\)"
    refused(InvalidInputError, text, validation_data=(np.zeros((10, 3), "float32"), np.zeros(10, "int32")))
    x = np.zeros((10, 8), "float32")
    text = r"cannot take the validation data \(x is of shape \(8,\) a row\): "
    refused(InvalidInputError, text, validation_data=(x, np.zeros((10, 3), "float32")))


class Batches(keras.utils.PyDataset):
    """Batches of rows of one shape."""

    def __init__(self, *shape):
        super().__init__()
        self.shape = shape

    def __len__(self):
        return 3

    def __getitem__(self, index):
        return np.zeros((4, *self.shape), "float32"), np.zeros(4, "int32")


def test_validation_data_in_batches_that_the_model_cannot_take(refused, tmp_path):
    text = r"cannot take the validation data \(x is of shape \(3,\) a row\)"
    refused(InvalidInputError, text, validation_data=Batches(3))
    refused(InvalidInputError, text, validation_data=(Batches(3)[0] for _ in range(2)))
    path = tmp_path / "rows.csv"
    path.write_text("a,b,c,label\n" + "0.1,0.2,0.3,1\n" * 10)
    refused(InvalidInputError, text, validation_data=choros.files(path, x=["a", "b", "c"], y="label"))


class Opened(Batches):
    """Batches that can be read only after ``on_epoch_begin``."""

    rows = None

    def on_epoch_begin(self):
        self.rows = np.zeros((4, *self.shape), "float32")

    def __getitem__(self, index):
        return self.rows[:], np.zeros(4, "int32")


def test_validation_data_that_can_be_read_only_in_an_epoch(pools, make_model, data):
    trainer = choros.Trainer(make_model(), workers=2, pool=pools(2))
    history = trainer.fit(*data(), verbose=0, validation_data=Opened(8))
    assert "val_loss" in history.history


def test_validation_data_of_another_shape_that_the_model_takes(data):
    model = keras.Sequential([keras.Input((None, 8)), keras.layers.GlobalMaxPooling1D(), keras.layers.Dense(1)])
    model.compile("sgd", "mse", metrics=["mae"])
    (x, y), longer = data(), np.zeros((6, 5, 8))
    trainer = choros.Trainer(model, workers=2)
    history = trainer.fit(x[:, None], y, validation_data=(longer, np.zeros((6, 1))), batch_size=16, verbose=0)
    assert "val_mae" in history.history


@pytest.mark.parametrize("name", ["timeout", "first_timeout"])
@pytest.mark.parametrize("value", [0, -1, "5", None, float("nan"), True], ids=str)
def test_limits_in_seconds(refused, name, value):
    refused(InvalidInputError, f"^{name}=.*: give a number of seconds above 0", how={"workers": 2, name: value})
