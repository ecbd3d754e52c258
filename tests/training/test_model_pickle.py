"""Models travel by value: in a fresh process each trains to the same bits as where it was made.

This file is also the script of that process: ``python test_model_pickle.py NAME PATH``, with the model in PATH.
"""

import functools
import importlib.util
import os
import pathlib
import pickle
import random
import subprocess
import sys
import textwrap
import threading
import traceback
import types
import weakref

import keras
import numpy as np
import pytest

import choros
from choros import pickling
from choros.backends.driver_model import build_model
from choros.backends.host_values import to_host
from choros.backends.optimizers import model_variables
from choros.consistency.versions import check_versions, versions
from choros.data.array_source import ArraySource
from choros.errors import InvalidInputError, NotSerializableError, WorkerFailedError
from choros.training.model_io.redraw import redraw
from choros.training.model_io.serialization import copy_model, pack_model, pack_with_weights
from choros.types import dtype_of

BACKEND = os.environ.get("KERAS_BACKEND", "jax")
K = keras.ops
FACTOR = 3.0


def data(rows=24, width=8, classes=3):
    rng = np.random.default_rng(0)
    return rng.normal(size=(rows, width)).astype("float32"), rng.integers(0, classes, rows)


class Bare(keras.Model):
    """The first example of keras.Model's documentation."""

    def __init__(self):
        super().__init__()
        self.dense1 = keras.layers.Dense(6, activation="relu")
        self.dense2 = keras.layers.Dense(3, activation="softmax")
        self.dropout = keras.layers.Dropout(0.3, seed=3)
        self.counted, self.names = {"calls": [1, 2]}, ["a", ("b", 1)]

    def call(self, inputs, training=False):
        return self.dense2(self.dropout(self.dense1(inputs), training=training))


def tower(out=3, activation="softmax", width=8):
    return keras.Sequential([keras.Input((width,)), keras.layers.Dense(6, "relu"), keras.layers.Dense(out, activation)])


class Distiller(keras.Model):
    """A student and a teacher as arguments, an overridden compile(), and a train_step."""

    def __init__(self, student, teacher):
        super().__init__()
        self.student, self.teacher = student, teacher
        self.teacher.trainable = False

    def compile(self, optimizer, metrics, student_loss_fn, alpha=0.3):
        super().compile(optimizer=optimizer, metrics=metrics)
        self.student_loss_fn, self.alpha = student_loss_fn, alpha

    def call(self, x):
        return self.student(x)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        soft = self.teacher(x, training=False)
        distance = K.mean(K.sum(K.square(soft - y_pred), -1))
        return self.alpha * K.mean(self.student_loss_fn(y, y_pred)) + (1 - self.alpha) * distance


class Mean(keras.Model):
    """A VAE: an encoder and a decoder, a tracker of its own, random numbers of a seed generator."""

    def __init__(self, encoder, decoder, **kwargs):
        super().__init__(**kwargs)
        self.encoder, self.decoder = encoder, decoder
        self.tracker = keras.metrics.Mean(name="kl")
        self.noise = keras.random.SeedGenerator(5)

    def call(self, x):
        z = self.encoder(x)
        return self.decoder(z + 0.1 * keras.random.normal(K.shape(z), seed=self.noise))

    @property
    def metrics(self):
        return [self.tracker]

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        loss = K.mean(K.square(self(x) - x))
        self.tracker.update_state(loss)
        return loss


class Scale(keras.layers.Layer):
    """State in Python, functions and methods of instances."""

    def __init__(self, by=2.0):
        super().__init__()
        self.by, self._hidden, self.table = by, 0.5, {"factor": 2.0}
        self.times = lambda x: x * self.by
        self.compute_mask = types.MethodType(lambda self, *_, **__: None, self)
        self.lock, self.owner, self.gone = threading.Lock(), weakref.ref(self), weakref.ref(threading.Event())

    def call(self, x):
        assert self.owner() is self
        assert self.gone() is None
        with self.lock:
            return self.times(x) * self._hidden * self.table["factor"]


class Objective:
    """A callable object, with a method that is a loss too."""

    def __init__(self, factor):
        self.factor, self.__name__ = factor, "objective"

    def __call__(self, y, p):
        return self.factor * keras.losses.sparse_categorical_crossentropy(y, p)

    def method(self, y, p):
        return self(y, p)


def scaled(y, p, factor):
    return factor * keras.losses.sparse_categorical_crossentropy(y, p)


def sequential(*layers, activation="relu"):
    return keras.Sequential(
        [keras.Input((8,)), keras.layers.Dense(6, activation), *layers, keras.layers.Dense(3, "softmax")]
    )


def compiled(model, loss="sparse_categorical_crossentropy", optimizer=None, **more):
    model.compile(optimizer or keras.optimizers.Adam(0.01), loss, **more)
    return model


def bare():
    return compiled(Bare())


def distilled():
    model = Distiller(tower(), tower())
    teach = keras.losses.SparseCategoricalCrossentropy(reduction="none")
    model.compile("adam", [], teach, alpha=0.4)
    return model


def autoencoder():
    model = Mean(tower(4, None), tower(8, None, 4))
    model.compile("adam")
    return model


def python_state():
    return compiled(sequential(Scale(), keras.layers.Lambda(lambda x: K.tanh(x) * FACTOR)))


def callables():
    loss = functools.partial(scaled, factor=2.0)
    loss.__name__ = "partial"
    activation = functools.partial(keras.activations.relu, negative_slope=0.1)
    metric = Objective(0.5)
    return compiled(sequential(activation=activation), loss, metrics=[metric, metric.method])


def bound_method():
    return compiled(sequential(), Objective(2.0).method)


def replaced_method():
    model = sequential()
    call = model.layers[0].call
    model.layers[0].call = lambda x, training=False: 2.0 * call(x, training=training)
    return compiled(model)


def own_layer_in_the_loss():
    model = sequential()
    kernel = model.layers[0].kernel
    return compiled(model, lambda y, p: K.mean(scaled(y, p, 1.0)) + 0.1 * K.sum(K.square(kernel)))


def teacher_in_the_loss():
    teacher, model = sequential(), sequential()
    teacher.trainable = False
    return compiled(model, lambda y, p: scaled(y, p, 1.0) + K.sum(K.abs(teacher.layers[0].kernel)))


def mixed_precision():
    dense = keras.layers.Dense(6, "relu", dtype="mixed_float16")
    model = keras.Sequential([keras.Input((8,)), dense, keras.layers.Dense(3, "softmax", dtype="float32")])
    return compiled(model, optimizer=keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.01)))


def bfloat16():
    return compiled(keras.Sequential([keras.Input((8,)), keras.layers.Dense(3, "softmax", dtype="bfloat16")]))


def lora():
    model = sequential()
    model.layers[0].enable_lora(2)
    return compiled(model)


def quantized():
    model = sequential()
    model.quantize("int8")
    for layer in model.layers[:1]:
        layer.enable_lora(2)
    return compiled(model)


def moving_average_and_decay():
    optimizer = keras.optimizers.AdamW(
        keras.optimizers.schedules.CosineDecay(0.01, 10), weight_decay=0.5, use_ema=True, ema_momentum=0.9
    )
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    return compiled(sequential(), optimizer=optimizer)


def decay_left_out_by_variable():
    model = sequential()
    optimizer = keras.optimizers.AdamW(0.01, weight_decay=0.5)
    optimizer.exclude_from_weight_decay(var_list=[model.layers[0].kernel])
    return compiled(model, optimizer=optimizer)


def shared_and_nested():
    inner = sequential()
    entry = keras.Input((8,))
    shared = keras.layers.Dense(8, "tanh", kernel_regularizer="l2", kernel_constraint="max_norm")
    out = keras.layers.Average()([inner(shared(entry)), inner(shared(shared(entry)))])
    return compiled(keras.Model(entry, keras.layers.BatchNormalization()(out)), "mse")


def recurrent():
    layers = [keras.layers.Reshape((4, 2)), keras.layers.Bidirectional(keras.layers.LSTM(3)), keras.layers.Dense(3)]
    return compiled(keras.Sequential([keras.Input((8,)), *layers]), "mse")


def attention():
    entry = keras.Input((8,))
    x = keras.layers.Reshape((4, 2))(entry)
    x = keras.layers.MultiHeadAttention(2, 3, dropout=0.1, seed=1)(x, x)
    return compiled(keras.Model(entry, keras.layers.Dense(3)(keras.layers.Flatten()(x))), "mse")


def deep():
    entry = x = keras.Input((8,))
    for _ in range(150):
        x = keras.layers.Add()([x, keras.layers.Rescaling(0.01)(x)])
    return compiled(keras.Model(entry, keras.layers.Dense(3)(x)), "mse")


def looked_up():
    buckets = keras.layers.Discretization(bin_boundaries=[-0.5, 0.0, 0.5])
    table = keras.layers.IntegerLookup(vocabulary=[0, 1, 2, 3])
    entry = keras.Input((8,))
    embedded = keras.layers.Embedding(6, 2)(table(buckets(entry)))
    return compiled(keras.Model(entry, keras.layers.Dense(3)(keras.layers.Flatten()(embedded))), "mse")


def with_history():
    model = compiled(sequential())
    model.fit(*data(), epochs=2, verbose=0)
    model.evaluate(*data(), verbose=0)
    model.predict(data()[0], verbose=0)
    model.callback = model.history
    return model


def trained_by_a_trainer():
    model = compiled(sequential())
    model.trainer = choros.Trainer(model, workers=2)
    return model


def compiled_function():
    if BACKEND == "jax":
        import jax

        function = jax.jit(lambda x: x * 2.0)
    elif BACKEND == "tensorflow":
        import tensorflow as tf

        function = tf.function(lambda x: x * 2.0)
    else:
        function = functools.lru_cache(lambda x: x * 2.0)
    layer = Scale()
    layer.times = function
    return compiled(sequential(layer))


def torch_module():
    import torch

    wrapped = keras.layers.TorchModuleWrapper(torch.nn.Sequential(torch.nn.Linear(8, 6), torch.nn.BatchNorm1d(6)))
    return compiled(keras.Sequential([keras.Input((8,)), wrapped, keras.layers.Dense(3, "softmax")]))


MODELS = [
    bare,
    distilled,
    autoencoder,
    python_state,
    callables,
    bound_method,
    replaced_method,
    own_layer_in_the_loss,
    teacher_in_the_loss,
    mixed_precision,
    bfloat16,
    lora,
    quantized,
    moving_average_and_decay,
    decay_left_out_by_variable,
    shared_and_nested,
    recurrent,
    attention,
    deep,
    with_history,
    trained_by_a_trainer,
    compiled_function,
]
if BACKEND == "tensorflow":  # the others look up outside of the model
    MODELS.append(looked_up)
if BACKEND == "torch":
    MODELS.append(torch_module)


def trained(model):
    """Train, with PyTorch's global generator set; returns the losses and all values."""
    x, y = data()
    target = keras.utils.to_categorical(y, 3) if model.loss == "mse" else y
    target = x if isinstance(model, Mean) else target
    keras.utils.set_random_seed(1)
    losses = model.fit(x, target, epochs=3, batch_size=8, shuffle=False, verbose=0).history
    losses = losses.get("loss") or losses["kl"]
    return losses, [np.asarray(value).astype("float64") for value in to_host(model_variables(model))]


def built(make):
    keras.utils.set_random_seed(0)
    model = make()
    x, y = data()
    target = keras.utils.to_categorical(y, 3) if model.loss == "mse" else y
    build_model(model, ArraySource(x, x if isinstance(model, Mean) else target).sample(8))
    return model


def raw(arrays):
    return [(array.tobytes(), array.dtype.name, array.shape) for array in arrays]


def main():
    """Train the models of a file, in a process that has made none of them."""
    path = pathlib.Path(sys.argv[1])
    import keras.src.backend.common.global_state as state

    results = {}
    for name, (code, arrays, weights) in pickle.loads(path.read_bytes()).items():
        before = dict(state.get_global_attribute("object_name_uids", {}))
        arrays, weights = (
            [np.frombuffer(text, dtype_of(kind)).reshape(shape) for text, kind, shape in each]
            for each in (arrays, weights)
        )
        try:
            model = pickling.loads(code, arrays, weights)
            assert dict(state.get_global_attribute("object_name_uids", {})) == before
            results[name] = trained(model)
        except Exception:
            results[name] = traceback.format_exc()
    path.write_bytes(pickle.dumps(results))


@pytest.fixture(scope="module")
def there(tmp_path_factory):
    """Losses and values of all models, trained here and in a fresh process."""
    here, packed = {}, {}
    for make in MODELS:
        try:
            model = built(make)
            written, weights = pack_with_weights(model)
            packed[make.__name__] = written.code, raw(written.arrays), raw(weights)
            here[make.__name__] = trained(model)
        except Exception:
            here[make.__name__] = traceback.format_exc()
    path = tmp_path_factory.mktemp("models") / "packed"
    path.write_bytes(pickle.dumps(packed))
    folder = str(pathlib.Path(__file__).parent)
    source = str(pathlib.Path(choros.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([folder, source])}
    code = "import test_model_pickle; test_model_pickle.main()"
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    return here, pickle.loads(path.read_bytes())


@pytest.mark.filterwarnings("ignore:Layer InputLayer does not have a `quantize` method")
@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_a_fresh_process_trains_to_the_same_bits(make, there):
    here, others = (each.get(make.__name__) for each in there)
    assert not isinstance(here, str), here
    assert not isinstance(others, str), others
    assert here[0] == others[0]
    for value, expected in zip(here[1], others[1], strict=True):
        np.testing.assert_array_equal(value, expected)


def test_an_object_that_is_in_the_model_and_in_its_loss_is_one_object():
    copy = copy_model(built(own_layer_in_the_loss))
    kernel = dict(zip(copy.loss.__code__.co_freevars, copy.loss.__closure__, strict=True))["kernel"].cell_contents
    assert kernel is copy.layers[0].kernel


def test_predictions_of_the_caller_do_not_change_what_workers_receive():
    """Workers compile a model again if its bytes differ from those of the last fit."""
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    model.compile("sgd", "mse")
    model.optimizer.build(model.trainable_variables)
    before = pack_model(model).code
    model.predict(np.zeros((8, 4), "float32"), verbose=0)
    after = pack_model(model).code
    assert len(after) == len(before)
    assert b"one_step" not in after  # of the compiled function


def test_pickling_and_reading_leave_no_trace():
    model = built(python_state)
    keras.backend.clear_session()
    random.seed(1)
    np.random.seed(1)
    attributes = {name: id(value) for name, value in vars(model).items()}
    copy_model(model)
    assert {name: id(value) for name, value in vars(model).items()} == attributes
    assert random.random() == random.Random(1).random()
    assert np.random.random() == np.random.RandomState(1).random_sample()
    assert keras.layers.Dropout(0.5).seed_generator.name == "seed_generator"
    assert keras.Sequential().name == "sequential"


def test_a_copy_shares_no_weights_and_can_be_saved(tmp_path):
    model = built(shared_and_nested)
    copy, before = copy_model(model), model.get_weights()
    copy.set_weights([weight + 1 for weight in copy.get_weights()])
    for value, first in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(value, first)
    copy.save(tmp_path / "copy.keras")
    reloaded = keras.models.load_model(tmp_path / "copy.keras")
    x, _ = data()
    np.testing.assert_allclose(reloaded.predict(x, verbose=0), copy.predict(x, verbose=0), atol=1e-6)


class Connected(keras.layers.Layer):
    """Says itself how it is pickled."""

    def __init__(self):
        super().__init__()
        self.numbers = (number for number in range(3))

    def __getstate__(self):
        return {name: value for name, value in vars(self).items() if name != "numbers"}

    def __setstate__(self, state):
        self.__dict__.update(state)
        self.__dict__["numbers"] = iter([7])

    def call(self, x):
        return x


def test_an_objects_own_getstate_and_setstate_are_used():
    assert next(copy_model(compiled(sequential(Connected()))).layers[1].numbers) == 7


def test_weights_are_no_part_of_the_pickle():
    model = compiled(keras.Sequential([keras.Input((1000,)), keras.layers.Dense(1000)]), "mse")
    assert len(pack_model(model).code) < 100_000
    written, weights = pack_with_weights(model)
    assert sum(array.nbytes for array in written.arrays) < 100
    empty = written.unpack()
    assert not empty.layers[0].kernel.numpy().any()
    assert weights[0].any()


def test_an_object_that_cannot_be_pickled_is_named_with_its_place():
    model = built(bare)
    model.later = {"log": [1, (number for number in range(3))]}
    with pytest.raises(
        NotSerializableError, match=r"The model 'bare.*model.later\['log'\]\[1\], a generator, cannot be"
    ):
        pack_model(model)
    numbers = (number for number in range(3))
    model = compiled(sequential(), lambda y, p: scaled(y, p, next(numbers)))
    with pytest.raises(NotSerializableError, match="its variable 'numbers'.*a generator"):
        pack_model(model)


def test_data_that_a_model_captures_are_named(monkeypatch):
    from choros.training.model_io import serialization

    monkeypatch.setattr(serialization, "_MAX_BYTES", 1 << 20)
    x_train = np.zeros((1 << 18,), "float64")
    model = compiled(sequential(), lambda y, p: scaled(y, p, 1.0) + float(x_train[0]))
    with pytest.raises(NotSerializableError, match="its variable 'x_train'.*, a ndarray, brings 2 MB"):
        pack_model(model)
    model = compiled(sequential())
    model.rows = {"train": x_train}
    with pytest.raises(NotSerializableError, match=r"model.rows\['train'\], a ndarray"):
        pack_model(model)
    scale = keras.layers.Lambda(lambda inputs: inputs * float(x_train[0]))
    model = compiled(keras.Sequential([keras.Input((4,)), scale, keras.layers.Dense(1)]))
    with pytest.raises(NotSerializableError, match=r"model.layers\[0\].function \(its variable 'x_train'\), a ndarray"):
        pack_model(model)


def test_other_versions_are_refused_before_anything_is_unpickled():
    check_versions(versions())
    assert {"python", "keras", "backend", "numpy", "cloudpickle"} <= versions().keys()
    with pytest.raises(InvalidInputError, match="keras .* here and 2.0 there"):
        check_versions(versions() | {"keras": "2.0"})


def test_modules_that_a_new_process_cannot_import_travel_by_value(tmp_path):
    module = types.ModuleType("made_in_this_process")
    exec("def loss(y, p):\n    return factor * p\nfactor = 2.0", vars(module))
    sys.modules[module.__name__] = module
    try:
        written = pickling.dumps(module.loss)
    finally:
        del sys.modules[module.__name__]
    assert pickling.loads(written)(0, 3.0) == 6.0


def test_members_draw_the_trainable_weights_anew():
    model = built(lambda: compiled(sequential(activation=lambda x: K.tanh(FACTOR * x)), Objective(2.0).method))
    before = model.get_weights()
    optimizer = to_host(model.optimizer.variables)
    model.fit(*data(), verbose=0)
    keras.utils.set_random_seed(7)
    redraw(model)
    assert any(np.abs(value - other).max() > 0.05 for value, other in zip(model.get_weights(), before, strict=True))
    for value, other in zip(to_host(model.optimizer.variables), optimizer, strict=True):
        np.testing.assert_array_equal(value, other)
    assert model.layers[0].activation.__name__ == "<lambda>"
    redraw(built(distilled))  # neither the model nor its parts are asked: their layers are


class Secret(keras.layers.Layer):
    """Weights, and no configuration."""

    def __init__(self, size):
        super().__init__()
        self.weight = self.add_weight((size(),))

    def call(self, x):
        return x * self.weight


class Gan(keras.Model):
    """Models as arguments, and a loss of what they make of each other."""

    def __init__(self, generator, discriminator):
        super().__init__()
        self.generator, self.discriminator = generator, discriminator

    def call(self, x):
        return self.discriminator(self.generator(x))


def adversarial():
    return compiled(Gan(tower(8, None), tower()))


TRAINED = [
    bare,
    distilled,
    adversarial,
    callables,
    bound_method,
    replaced_method,
    python_state,
    own_layer_in_the_loss,
    teacher_in_the_loss,
    decay_left_out_by_variable,
]


@pytest.mark.every(2)
@pytest.mark.parametrize("make", TRAINED, ids=lambda make: make.__name__)
def test_two_workers_train_what_one_process_does(make, pools, same, same_history):
    x, y = data(48)
    made = []
    for _ in range(2):
        keras.utils.set_random_seed(0)
        made.append(make())
        for layer in made[-1]._flatten_layers():
            if isinstance(layer, keras.layers.Dropout):
                layer.rate = 0.0
    model, plain = made
    how = {"batch_size": 12, "epochs": 2, "shuffle": False, "verbose": 0}
    ours = choros.Trainer(model, workers=2, pool=pools(2)).fit(x, y, **how)
    same_history(ours, plain.fit(x, y, **how))
    same(model, plain)
    assert model.optimizer.iterations != 0


def test_a_model_may_hold_the_trainer_that_trains_it(pools):
    model = compiled(sequential())
    model.trainer = choros.Trainer(model, workers=2, pool=pools(2))
    pools(2).start()
    model.trainer.fit(*data(), verbose=0)
    assert copy_model(model).trainer.workers == 2


@pytest.mark.every(3)
@pytest.mark.parametrize("make", [bare, distilled, callables], ids=lambda make: make.__name__)
def test_ranks_of_a_launcher_train_what_one_process_does(make, same):
    x, y = data(48)
    made = []
    for _ in range(2):
        keras.utils.set_random_seed(0)
        made.append(make())
        for layer in made[-1]._flatten_layers():
            if isinstance(layer, keras.layers.Dropout):
                layer.rate = 0.0
    model, plain = made
    how = {"batch_size": 12, "epochs": 2, "shuffle": False, "verbose": 0}
    choros.Trainer(model, launcher=choros.Ssh("localhost:2")).fit(x, y, **how)
    plain.fit(x, y, **how)
    same(model, plain)


def test_an_ensemble_with_a_layer_without_configuration_is_refused_by_name(pools):
    model = compiled(sequential(Secret(lambda: 6)))
    with pytest.raises(NotSerializableError, match="'secret.*' cannot be made again"):
        choros.Trainer(model, "ensemble", workers=2, pool=pools(2)).fit(*data(), verbose=0)


CELLS = '''
    import types, sys
    import keras, numpy as np, choros

    source = """
    class Times(keras.layers.Layer):
        def call(self, x):
            return FACTOR * x
    """
    import textwrap
    x, y = np.ones((8, 2), "float32"), np.zeros((8, 1), "float32")
    with choros.WorkerPool(2) as pool:
        for FACTOR in (1.0, 3.0):
            exec(textwrap.dedent(source), globals())
            model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, kernel_initializer="ones"), Times()])
            model.compile(keras.optimizers.SGD(0.0), "mse")
            print(choros.Trainer(model, workers=2, pool=pool).fit(x, y, verbose=0).history["loss"][0])
        Times.call = lambda self, x: 5.0 * x
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, kernel_initializer="ones"), Times()])
        model.compile(keras.optimizers.SGD(0.0), "mse")
        print(choros.Trainer(model, workers=2, pool=pool).fit(x, y, verbose=0).history["loss"][0])
    print(*choros.run(lambda m: float(np.sum(m.predict(x, verbose=0))), (model,), num_proc=2))
'''


def test_classes_that_are_defined_again_are_the_new_ones_and_a_model_is_an_argument_of_run(tmp_path):
    (tmp_path / "cells.py").write_text(textwrap.dedent(CELLS))
    done = subprocess.run(
        [sys.executable, "cells.py"], cwd=tmp_path, env=dict(os.environ), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.split()
    np.testing.assert_allclose([float(word) for word in lines], [4.0, 36.0, 100.0, 80.0, 80.0])


if __name__ == "__main__":
    main()


def test_kept_workers_import_what_the_caller_can_import_by_now(tmp_path, monkeypatch):
    x, y = np.ones((8, 3), "float32"), np.ones((8, 1), "float32")
    with choros.WorkerPool(1) as pool:
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        choros.Trainer(model, workers=1, pool=pool).fit(x, y, batch_size=8, verbose=0)
        (tmp_path / "added_later.py").write_text("def absolute(y, p):\n    return abs(y - p)\n")
        monkeypatch.syspath_prepend(str(tmp_path))
        import added_later

        model.compile("sgd", added_later.absolute)
        history = choros.Trainer(model, workers=1, pool=pool).fit(x, y, batch_size=8, verbose=0)
    assert np.isfinite(history.history["loss"][0])


LAYER = """
import keras

class Scaled(keras.layers.Layer):
    def __init__(self):
        super().__init__()
        self.inner = keras.layers.Dense(1)

    def call(self, x):
        return {factor} * self.inner(x)
"""


def test_a_module_that_was_loaded_from_a_file_of_another_folder_is_sent_by_value(pools, tmp_path, monkeypatch):
    """Another file with the module's name is on ``sys.path``, which workers would import."""
    for folder, factor in (("importable", 1.0), ("other", 3.0)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "scaled_layer.py").write_text(LAYER.format(factor=factor))
    monkeypatch.syspath_prepend(str(tmp_path / "importable"))
    spec = importlib.util.spec_from_file_location("scaled_layer", tmp_path / "other" / "scaled_layer.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "scaled_layer", module)
    spec.loader.exec_module(module)
    assert_trains_as_plain_fit(module.Scaled, pools(1))


def test_a_module_is_sent_by_value_once_its_folder_has_left_the_path(tmp_path, monkeypatch):
    (tmp_path / "on_the_path_for_a_while.py").write_text(LAYER.format(factor=2.0))
    sys.path.insert(0, str(tmp_path))
    try:
        import on_the_path_for_a_while as module

        with choros.WorkerPool(1) as pool:
            assert_trains_as_plain_fit(module.Scaled, pool)
    finally:
        sys.path.remove(str(tmp_path))
    with choros.WorkerPool(1) as pool:
        assert_trains_as_plain_fit(module.Scaled, pool)
    del sys.modules["on_the_path_for_a_while"]


def assert_trains_as_plain_fit(layer, pool):
    x = np.random.default_rng(0).normal(size=(16, 3)).astype("float32")
    weights = []

    def fit_by_worker(model, *args, **options):
        choros.Trainer(model, workers=1, pool=pool).fit(*args, **options)

    for train in (keras.Model.fit, fit_by_worker):
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((3,)), layer()])
        model.compile("sgd", "mse")
        train(model, x, x[:, :1], batch_size=8, shuffle=False, verbose=0)
        weights.append(model.get_weights())
    for value, expected in zip(*weights, strict=True):
        np.testing.assert_allclose(value, expected, atol=1e-6)


class Proxy:
    """A class of a common mistake: ``__getattr__`` looks for an attribute that does not exist before ``__init__``."""

    def __init__(self, loss):
        self.loss = loss

    def __getattr__(self, name):
        return getattr(self.loss, name)

    def __call__(self, y, p):
        return self.loss(y, p)


def test_an_object_that_a_worker_cannot_read_comes_with_its_class_and_the_remedy(pools):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", Proxy(keras.losses.MeanSquaredError()))
    with pytest.raises(WorkerFailedError, match=r"cannot be read from its pickle: (.|\n)*__getattr__(.|\n)*__reduce__"):
        choros.Trainer(model, workers=1, pool=pools(1)).fit(np.ones((8, 3)), np.ones((8, 1)), verbose=0)
