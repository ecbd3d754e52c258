"""Workers keep the compiled steps of the last fit, and another fit ends with the same bits as with new workers."""

import keras
import numpy as np
import pytest

import choros

if keras.backend.backend() == "torch":
    pytest.skip("PyTorch compiles no step: nothing is kept", allow_module_level=True)
layers = keras.layers
X = np.random.default_rng(0).normal(size=(48, 4)).astype("float32")
Y = X.sum(axis=1, keepdims=True) ** 2
FIT = {"batch_size": 16, "epochs": 2, "seed": 5, "verbose": 0}


@keras.saving.register_keras_serializable("kept")
class Traced(layers.Layer):
    """Factor that adds a line to a file whenever Python runs it: for each trace, or for each step if eager."""

    def __init__(self, calls, factor=1.0, **keywords):
        super().__init__(**keywords)
        self.calls, self.factor = str(calls), factor

    def call(self, inputs):
        with open(self.calls, "a") as file:
            file.write("call\n")
        return inputs * self.factor


@pytest.fixture
def make(tmp_path):
    """Return a function that makes the same model each time."""

    def make(*more, optimizer=None, **settings):
        keras.utils.set_random_seed(3)
        hidden = [layers.Dense(8, "relu"), Traced(tmp_path / "calls"), *more]
        model = keras.Sequential([keras.Input((4,)), *hidden, layers.Dense(1)])
        model.compile(optimizer or keras.optimizers.Adam(0.01), **{"loss": "mse", "metrics": ["mae"], **settings})
        return model

    return make


@pytest.fixture
def both(pools):
    """Return a function that runs fits of a model on kept replicas, then each on a new one, and compares the bits."""

    def forget():
        other = keras.Sequential([keras.Input((1,)), layers.Dense(1)])
        other.compile("sgd", "mse")
        choros.Trainer(other, "localsgd", pool=pools(2)).fit(np.ones((2, 1)), np.ones(2), verbose=0)

    def run(make_it, fits, algorithm="allreduce"):
        results = []
        for item in (True, False):
            model, histories = make_it(), []
            for fit in fits:
                histories.append(fit(model, choros.Trainer(model, algorithm, pool=pools(2))).history)
                if not item:
                    forget()
            variables = [*model.variables, *model.optimizer.variables]
            results.append(([np.array(keras.ops.convert_to_numpy(variable)) for variable in variables], histories))
        for value, other in zip(results[0][0], results[1][0], strict=True):
            np.testing.assert_array_equal(value, other)
        assert results[0][1] == results[1][1]

    return run


def plain(model, trainer):
    return trainer.fit(X, Y, **FIT)


@pytest.mark.parametrize("algorithm", ["localsgd", "aeasgd"])
def test_a_second_fit_is_not_traced_again(algorithm, pools, make, tmp_path):
    pool, model = pools(2), make()
    counts = []
    for _ in range(3):
        choros.Trainer(model, algorithm, pool=pool).fit(X, Y, **FIT)
        counts.append(len((tmp_path / "calls").read_text().splitlines()))
    assert counts[0] == counts[1] == counts[2]


def test_no_fit_of_many_is_traced_again(pools, make, tmp_path):
    pool, model = pools(2), make()
    counts = set()
    for _ in range(18):  # of them at least one is the 16th of a worker
        choros.Trainer(model, "localsgd", pool=pool).fit(X, Y, **{**FIT, "epochs": 1})
        counts.add(len((tmp_path / "calls").read_text().splitlines()))
    assert len(counts) == 1


def test_what_the_caller_evaluates_and_predicts_between_two_fits_changes_nothing(pools, make, tmp_path):
    pool, model, calls = pools(2), make(), tmp_path / "calls"
    choros.Trainer(model, "localsgd", pool=pool).fit(X, Y, **FIT)
    model.evaluate(X, Y, verbose=0)
    model.predict(X, verbose=0)
    before = calls.read_text()
    choros.Trainer(model, "localsgd", pool=pool).fit(X, Y, **FIT)
    assert calls.read_text() == before


@pytest.mark.parametrize("algorithm", ["allreduce", "localsgd", choros.DiLoCo(window=2), choros.EASGD(window=2)])
def test_bits_are_those_of_new_workers(algorithm, both, make):
    validated = lambda model, trainer: trainer.fit(X, Y, validation_data=(X, Y), **FIT)
    both(lambda: make(layers.Dropout(0.3), layers.BatchNormalization()), [plain, validated, plain], algorithm)


CHANGES = {
    "optimizer": lambda model: setattr(model.optimizer, "beta_1", 0.5),
    "rate": lambda model: setattr(model.optimizer, "learning_rate", 0.1),
    "layer": lambda model: setattr(model.layers[1], "factor", 3.0),
    "weights": lambda model: model.layers[0].kernel.assign(np.ones((4, 8))),
    "compiled": lambda model: model.compile(keras.optimizers.SGD(0.1), "mae"),
    "frozen": lambda model: (setattr(model.layers[0], "trainable", False), model.compile("sgd", "mse")),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_the_caller_changes_between_two_fits_is_used(change, both, make):
    def changed(model, trainer):
        CHANGES[change](model)
        return trainer.fit(X, Y, **FIT)

    if change in ("compiled", "frozen"):  # the Trainer is made before
        fits = [lambda model, trainer: (trainer.fit(X, Y, **FIT), CHANGES[change](model))[0], plain]
    else:
        fits = [plain, changed, plain]
    both(make, fits)


def test_other_rows_are_trained(both, make):
    half = lambda model, trainer: trainer.fit(X[:20], Y[:20], sample_weight=np.arange(20.0), **FIT)
    both(make, [plain, half, plain])


class SetsMomentum(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 1:
            self.model.optimizer.momentum = 0.5


def test_a_setting_of_a_callback_does_not_stay(both, make):
    def set_and_back(model, trainer):
        history = trainer.fit(X, Y, callbacks=[SetsMomentum()], **FIT)
        model.optimizer.momentum = 0.1
        return history

    both(lambda: make(optimizer=keras.optimizers.SGD(0.01, momentum=0.1)), [set_and_back, plain])


@keras.saving.register_keras_serializable("kept")
class Largest(keras.metrics.Metric):
    """The largest label so far, which no reset forgets."""

    def __init__(self, name="largest", **keywords):
        super().__init__(name=name, **keywords)
        self.most = self.add_variable((), "zeros", name="most")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.most.assign(keras.ops.maximum(self.most, keras.ops.max(keras.ops.cast(y_true, "float32"))))

    def result(self):
        return self.most + 0.0

    def reset_state(self):
        pass


@pytest.mark.filterwarnings("ignore:.*argest")
def test_a_metric_that_is_not_reset_begins_with_the_callers_values(both, make):
    def zeros(model, trainer):
        for variable in model.metrics_variables:
            variable.assign(np.zeros(variable.shape))
        return trainer.fit(X, 0 * Y, **FIT)

    both(lambda: make(metrics=[Largest()]), [plain, zeros])


@keras.saving.register_keras_serializable("kept")
class Within(keras.metrics.MeanMetricWrapper):
    """The share of predictions that are within a limit of their labels. No reset changes the limit, a variable."""

    def __init__(self, name="within", **keywords):
        super().__init__(self.share, name=name, **keywords)
        self.limit = self.add_variable((), keras.initializers.Constant(0.5), name="limit")

    def share(self, y_true, y_pred):
        return keras.ops.cast(keras.ops.abs(y_true - y_pred) < self.limit, "float32")

    def reset_state(self):
        self.total.assign(0.0)
        self.count.assign(0.0)


@pytest.mark.filterwarnings("ignore:.*within")
def test_a_value_that_the_caller_gives_a_metric_is_used(both, make):
    def other_limit(model, trainer):
        model.metrics[-1].metrics[-1].limit.assign(5.0)
        return trainer.fit(X, Y, **FIT)

    both(lambda: make(metrics=[Within()]), [plain, other_limit, plain])


def test_a_fit_that_fails_leaves_nothing(both, make):
    class Fails(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            raise RuntimeError("stop")

    def failing(model, trainer):
        with pytest.raises(RuntimeError, match="stop"):
            trainer.fit(X, Y, callbacks=[Fails()], **FIT)
        model.set_weights([np.ones(weight.shape) for weight in model.get_weights()])
        return trainer.fit(X, Y, **FIT)

    both(make, [plain, failing, plain])


def test_a_class_that_is_defined_again_is_used(pools):
    pool, losses = pools(2), []
    for factor in (1.0, 0.0):

        class Scaled(layers.Layer):
            def call(self, inputs, factor=factor):
                return inputs * factor

        model = keras.Sequential([keras.Input((4,)), Scaled(), layers.Dense(1, kernel_initializer="ones")])
        model.compile(keras.optimizers.SGD(0.0), "mse")
        losses.append(choros.Trainer(model, pool=pool).fit(X, Y, verbose=0).history["loss"][0])
    assert losses[0] != losses[1]
    assert losses[1] == pytest.approx(float((Y**2).mean()), rel=1e-5)


def test_a_second_fit_with_momentum_starts_from_its_own_point(pools, make):
    model = make(optimizer=keras.optimizers.SGD(0.01))
    start, weights = model.get_weights(), []
    for _ in range(3):
        model.set_weights(start)
        choros.Trainer(model, choros.EAMSGD(window=2), pool=pools(1)).fit(X, Y, **FIT)
        weights.append(model.get_weights())
    for later in weights[1:]:
        for value, first in zip(later, weights[0], strict=True):
            np.testing.assert_array_equal(value, first)
