"""Models that a Trainer cannot train as Keras does are refused by name, with the remedy, before a worker starts."""

import keras
import numpy as np
import pytest

import choros
from choros.errors import InexactLossError, InvalidInputError

X, Y = np.ones((16, 4), "float32"), np.ones((16, 2), "float32")


def compiled(model, optimizer="sgd"):
    model.compile(optimizer, "mse")
    return model


class Scaled(keras.Model):
    def fit(self, x, *args, **kwargs):
        return super().fit(x / 255, *args, **kwargs)


class OwnLoop(keras.Model):
    def make_train_function(self, force=False):
        return super().make_train_function(force)


class Task(keras.Model):
    """As keras_hub.models.Task: fit, evaluate and predict preprocess where there is a preprocessor."""

    preprocessor = "some"

    def preprocess_samples(self, x, y=None, sample_weight=None):
        return x / 255, y, sample_weight

    def fit(self, x=None, y=None, **kwargs):
        return super().fit(self.preprocess_samples(x)[0] if self.preprocessor else x, y, **kwargs)


def functional(kind=keras.Model, batch_size=None):
    inputs = keras.Input((4,), batch_size=batch_size)
    return kind(inputs, keras.layers.Dense(2)(inputs))


@pytest.mark.parametrize(
    ("kind", "message"),
    [(Scaled, "its own Scaled.fit"), (OwnLoop, "OwnLoop.make_train_function"), (Task, "model.preprocessor = None")],
)
def test_a_model_with_its_own_fit_is_refused_with_the_remedy(kind, message):
    with pytest.raises(InvalidInputError, match=message):
        choros.Trainer(compiled(functional(kind)), workers=2)


def test_a_task_without_preprocessor_and_a_plain_subclass_are_not_refused():
    task = functional(Task)
    task.preprocessor = None
    choros.Trainer(compiled(task), workers=2)
    choros.Trainer(compiled(functional(type("Own", (keras.Model,), {}))), workers=2)


def test_an_optimizer_of_several_is_refused_by_name():
    if not hasattr(keras.optimizers, "MultiOptimizer"):
        pytest.skip("this Keras has no MultiOptimizer")
    model = functional()
    several = keras.optimizers.MultiOptimizer([(keras.optimizers.SGD(0.1), model.layers)])
    with pytest.raises(InvalidInputError, match="MultiOptimizer"):
        choros.Trainer(compiled(model, several), workers=2)


def test_batches_of_a_fixed_size_are_refused_where_workers_divide_them():
    with pytest.raises(InvalidInputError, match="batches of 8 rows only"):
        choros.Trainer(compiled(functional(batch_size=8)), workers=2).fit(X, Y, batch_size=8)
    inputs = keras.Input((2, 2), batch_size=8)
    outputs = keras.layers.Dense(2)(keras.layers.LSTM(3, stateful=True, name="memory")(inputs))
    with pytest.raises(InvalidInputError, match="'memory' is stateful"):
        choros.Trainer(compiled(keras.Model(inputs, outputs)), workers=2).fit(X.reshape(16, 2, 2), Y, batch_size=8)


def test_one_worker_takes_batches_of_a_fixed_size():
    model = functional(batch_size=8)
    history = choros.Trainer(compiled(model), workers=1).fit(X, Y, batch_size=8, verbose=0)
    assert np.isfinite(history.history["loss"]).all()


@pytest.mark.filterwarnings("ignore:Layer InputLayer does not have:UserWarning")
@pytest.mark.parametrize("algorithm", ["allreduce", "localsgd", "averaging", "aeasgd", "downpour", "diloco"])
def test_float8_scales_are_refused_by_all_that_exchange(algorithm):
    model = functional()
    model.quantize("float8")
    with pytest.raises(InexactLossError, match="float8"):
        choros.Trainer(compiled(model), algorithm, workers=2).fit(X, Y, batch_size=8)


def test_unequal_devices_have_random_numbers_of_their_own(monkeypatch):
    from choros.training.spec import FitConfig
    from choros.training.worker import setup

    job = FitConfig.__new__(FitConfig)
    object.__setattr__(job, "devices", [2, 1, 3])
    monkeypatch.setattr(setup, "several_models", lambda devices: True)
    assert [setup.first_replica(job, rank) for rank in range(4)] == [0, 2, 3, 6]
    object.__setattr__(job, "devices", [])
    assert [setup.first_replica(job, rank) for rank in range(3)] == [0, 1, 2]
