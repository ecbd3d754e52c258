"""A worker trains the model as it is: also what its .keras file does not say; else it is refused before the start."""

import random
import types

import keras
import numpy as np
import pytest

import choros
from choros.errors import NotSerializable
from choros.training.travel import fresh_clone, pack_model, unpack_model

FACTOR = 3.0


class Scale(keras.layers.Layer):
    """Multiplies; its configuration says by how much, but not by what it was told later."""

    def __init__(self, by=2.0, **kwargs):
        super().__init__(**kwargs)
        self.by, self.later, self._hidden, self.table = by, None, 1.0, {}
        self.times = lambda x: x * self.by
        self.compute_mask = types.MethodType(lambda self, *_, **__: None, self)

    def call(self, x):
        return self.times(x) * (self.later or 1.0) * self._hidden * self.table.get("factor", 1.0)

    def get_config(self):
        return {**super().get_config(), "by": self.by}


class Weighted(keras.losses.Loss):
    """A loss without a get_config."""

    def __init__(self, factor=1.0, name=None, reduction=None, dtype=None):
        super().__init__()
        self.factor = factor

    def call(self, y, p):
        return self.factor * keras.losses.sparse_categorical_crossentropy(y, p)


def sequential(*layers):
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [keras.Input((8,)), keras.layers.Dense(6, "relu"), *layers, keras.layers.Dense(3, "softmax")]
    )


def set_later():
    model = sequential(Scale())
    model.compile("sgd", "sparse_categorical_crossentropy")
    scale = model.layers[1]
    scale.later, scale._hidden = 1.5, 0.5
    scale.table["factor"] = 2.0
    return model


def loss_without_config():
    model = sequential()
    model.compile("sgd", Weighted(FACTOR))
    return model


def excluded_from_decay():
    model = sequential()
    optimizer = keras.optimizers.AdamW(0.01, weight_decay=0.5)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    model.compile(optimizer, "sparse_categorical_crossentropy")
    return model


def bare_functions():
    model = sequential(keras.layers.Lambda(lambda x: keras.ops.tanh(x) * FACTOR))
    model.compile(
        "sgd",
        lambda y, p: FACTOR * keras.ops.mean(keras.losses.sparse_categorical_crossentropy(y, p)),
        metrics=[lambda y, p: p[:, 0] * FACTOR],
    )
    return model


def functions_of_one_name():
    def times(factor):
        def loss(y, p):
            return factor * keras.losses.sparse_categorical_crossentropy(y, p)

        return loss

    entry = keras.Input((8,))
    keras.utils.set_random_seed(0)
    model = keras.Model(entry, {name: keras.layers.Dense(3, "softmax", name=name)(entry) for name in "ab"})
    model.compile("sgd", {"a": times(1.0), "b": times(5.0)})
    return model


def relu(x):
    """Not Keras' own of that name, which is used too."""
    return keras.ops.tanh(x) * FACTOR


def mse(y, p):
    return keras.ops.abs(keras.ops.reshape(keras.ops.cast(y, "float32"), (-1,)) - p[:, 0])


def functions_called_as_keras_own():
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(6, relu), keras.layers.Dense(6, "relu"), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((8,)), *layers])
    model.compile("sgd", mse, metrics=["mse", mse])
    return model


class Halving(keras.optimizers.schedules.LearningRateSchedule):
    def __init__(self, start):
        self.start = start

    def __call__(self, step):
        return self.start / (1.0 + keras.ops.cast(step, "float32"))

    def get_config(self):
        return {"start": self.start}


class Sides(keras.regularizers.Regularizer):
    def __call__(self, x):
        return 0.1 * keras.ops.sum(keras.ops.abs(x))

    def get_config(self):
        return {}


class Clip(keras.constraints.Constraint):
    def __call__(self, w):
        return keras.ops.clip(w, -0.3, 0.3)


class Flat(keras.initializers.Initializer):
    def __call__(self, shape, dtype=None):
        return keras.ops.full(shape, 0.1, dtype)


class Own(keras.optimizers.SGD):
    pass


def small_classes_of_a_script():
    keras.utils.set_random_seed(0)
    dense = keras.layers.Dense(6, kernel_regularizer=Sides(), kernel_constraint=Clip(), bias_initializer=Flat())
    model = keras.Sequential([keras.Input((8,)), dense, keras.layers.Dense(3, "softmax")])
    model.compile(keras.optimizers.LossScaleOptimizer(Own(Halving(0.1))), "sparse_categorical_crossentropy")
    return model


MODELS = [
    functions_called_as_keras_own,
    small_classes_of_a_script,
    set_later,
    loss_without_config,
    excluded_from_decay,
    bare_functions,
    functions_of_one_name,
]


@pytest.mark.parametrize("make", MODELS)
def test_what_the_file_does_not_say_is_trained(make, data, pools, same, same_history):
    x, y = data()
    y = {"a": y, "b": y} if make is functions_of_one_name else y
    model, plain = make(), make()
    how = {"batch_size": 12, "epochs": 2, "shuffle": False, "verbose": 0}
    ours = choros.Trainer(model, workers=2, pool=pools(2)).fit(x, y, **how)
    same_history(ours, plain.fit(x, y, **how))
    same(model, plain)


def test_clones_compute_with_the_same_functions():
    model = bare_functions()
    _, beside = pack_model(model)
    clone = fresh_clone(model, beside)
    clone.set_weights(model.get_weights())
    x, y = np.ones((2, 8)), np.zeros(2, int)
    assert clone.evaluate(x, y, verbose=0) == pytest.approx(model.evaluate(x, y, verbose=0))
    assert model.loss.__name__ == clone.loss.__name__ == "<lambda>"


def test_what_is_set_on_a_model_is_set_on_its_clones():
    model = set_later()
    data, beside = pack_model(model)
    for again in (unpack_model(data, beside), fresh_clone(model, beside)):
        scale = again.layers[1]
        assert (scale.by, scale.later, scale._hidden, dict(scale.table)) == (2.0, 1.5, 0.5, {"factor": 2.0})


def test_packing_leaves_no_trace():
    model = set_later()
    model.optimizer.build(model.trainable_variables)
    keras.backend.clear_session()
    random.seed(1)
    np.random.seed(1)
    pack_model(model)
    assert random.random() == random.Random(1).random()
    assert np.random.random() == np.random.RandomState(1).random_sample()
    assert keras.layers.Dropout(0.5).seed_generator.name == "seed_generator"
    assert keras.Sequential().name == "sequential"


def refused(model, words, monkeypatch):
    def start(self):
        raise AssertionError("a worker was started")

    monkeypatch.setattr(choros.WorkerPool, "start", start)
    with pytest.raises(NotSerializable, match=words) as caught:
        choros.Trainer(model, workers=2).fit(np.ones((8, 8), "float32"), np.zeros(8, int), verbose=0)
    assert "\n" not in str(caught.value)


def test_models_that_cannot_be_read_back(monkeypatch):
    class Bare(keras.layers.Layer):
        def __init__(self, n):
            super().__init__()
            self.n = n

        def call(self, x):
            return x * self.n

        def get_config(self):
            return {**super().get_config(), "n": self.n}

    model = sequential(Bare(2))
    model.compile("sgd", "sparse_categorical_crossentropy")
    refused(model, r"not be read back.*Bare.__init__\(\) got an unexpected keyword.*\*\*kwargs", monkeypatch)

    class Grown(keras.layers.Layer):
        def __init__(self, more=False, **kwargs):
            super().__init__(**kwargs)
            self.dense = [keras.layers.Dense(6) for _ in range(2 if more else 1)]

        def call(self, x):
            for dense in self.dense:
                x = dense(x)
            return x

        def get_config(self):
            return super().get_config()

    model = sequential(Grown(more=True))
    model.compile("sgd", "sparse_categorical_crossentropy")
    refused(model, "not be read back|has 8 weights, and read back from its own file 6", monkeypatch)


def test_what_a_file_cannot_bring(monkeypatch):
    model = sequential()
    model.compile("sgd", "sparse_categorical_crossentropy")
    model.layers[0].kernel.trainable = False
    refused(
        model, "dense.*/kernel .* has trainable False, and read back .* True: set it through its layer", monkeypatch
    )
    model = sequential()
    model.compile("sgd", "sparse_categorical_crossentropy")
    model.layers[0].kernel_regularizer = keras.regularizers.L2(0.1)
    refused(model, "has regularizer NoneType, and read back from the model's own file L2", monkeypatch)
    model = sequential()
    model.compile("sgd", "sparse_categorical_crossentropy")
    model.train_step = lambda *data: {}
    refused(model, "model.train_step was replaced on the object itself", monkeypatch)
    model = sequential(Scale())
    model.compile("sgd", "sparse_categorical_crossentropy")
    model.seen = [keras.metrics.Mean()]
    refused(model, "model.seen was set on the object after it was made", monkeypatch)


def test_a_loss_on_the_models_own_weights(monkeypatch):
    model, teacher = sequential(), sequential()
    kernel = model.layers[0].kernel
    model.compile("sgd", lambda y, p: keras.ops.mean(p) + keras.ops.sum(kernel))
    refused(model, "uses the model's own .*kernel, by a name from outside", monkeypatch)
    model.compile("sgd", lambda y, p: keras.ops.mean(p) + keras.ops.sum(model.layers[0].kernel))
    refused(model, "uses the model's own sequential", monkeypatch)
    model.compile("sgd", lambda y, p: keras.ops.mean(p) + keras.ops.sum(teacher.layers[0].kernel))
    pack_model(model)  # another model's are what they are


def test_arguments_that_keras_leaves_out_of_a_configuration():
    """Huber's get_config() has no delta, and a worker would train the default."""
    import keras

    for loss in (keras.losses.Huber(delta=5.0), [keras.losses.Huber(delta=5.0)]):
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, name="out")])
        model.compile("sgd", loss, metrics=[keras.metrics.CosineSimilarity(axis=0)])
        x, y = np.ones((6, 4), "float32"), np.full((6, 1), 100.0, "float32")
        again = unpack_model(*pack_model(model))
        expected, found = (each.evaluate(x, y, verbose=0, return_dict=True) for each in (model, again))
        assert found == expected
        default = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, name="out")])
        default.set_weights(model.get_weights())
        default.compile("sgd", keras.losses.Huber())
        assert default.evaluate(x, y, verbose=0) < 0.5 * found["loss"]
