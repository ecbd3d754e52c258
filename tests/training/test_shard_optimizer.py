"""A divided optimizer: each worker updates a part of the weights, which all read in one memory."""

import itertools
import os
import pathlib
import signal
import subprocess
import sys
import textwrap

import keras
import numpy as np
import pytest

import choros
from choros.backends import make_replica
from choros.backends.optimizer_shard import make_shard
from choros.backends.optimizer_shard.layout import SharedLayout
from choros.backends.optimizer_shard.obstacles import obstacle
from choros.comm.dtypes import add_in_order
from choros.comm.shm.segment import Segment
from choros.errors import InvalidInputError, WorkerFailedError
from choros.types import Batch

BACKEND = os.environ["KERAS_BACKEND"]
HOW = {"batch_size": 13, "epochs": 3, "shuffle": False, "seed": 1, "verbose": 0}
SETS = r"has set, or can set, a trainable weight within a step .*shard_optimizer=False"
QUICK = ("Nesterov", "Adam", "AdamW", "Lamb", "clipnorm", "global", "average", "schedule", "loss scale")
OPTIMIZERS = {
    "SGD": {"learning_rate": 0.05},
    "Nesterov": {"name": "SGD", "learning_rate": 0.05, "momentum": 0.9, "nesterov": True},
    "Adam": {"learning_rate": 0.01, "amsgrad": True},
    "AdamW": {"learning_rate": 0.01, "weight_decay": 0.1},
    "Nadam": {"learning_rate": 0.01},
    "Adamax": {"learning_rate": 0.01},
    "Adagrad": {"learning_rate": 0.05},
    "Adadelta": {"learning_rate": 1.0},
    "RMSprop": {"learning_rate": 0.01, "centered": True, "momentum": 0.5},
    "Ftrl": {"learning_rate": 0.05},
    "Lion": {"learning_rate": 0.001},
    "Lamb": {"learning_rate": 0.01},
    "Adafactor": {"learning_rate": 0.01},
    "Muon": {"learning_rate": 0.01},
    "clipnorm": {"name": "Adam", "learning_rate": 0.01, "clipnorm": 0.05},
    "global": {"name": "SGD", "learning_rate": 0.5, "momentum": 0.9, "global_clipnorm": 0.05},
    "global, by variable": {"name": "Lamb", "learning_rate": 0.01, "global_clipnorm": 0.05},
    "global, no effect": {"name": "Adam", "learning_rate": 0.01, "global_clipnorm": 100.0},
    "clipvalue": {"name": "Adam", "learning_rate": 0.01, "clipvalue": 0.01},
    "accumulation": {"name": "Adam", "learning_rate": 0.01, "gradient_accumulation_steps": 2},
    "average": {"name": "Adam", "learning_rate": 0.01, "use_ema": True, "ema_momentum": 0.5},
    "overwritten": {"name": "Adam", "learning_rate": 0.01, "use_ema": True, "ema_overwrite_frequency": 3},
    "schedule": {"name": "Adam", "learning_rate": "decay"},
    "global, scaled": {"name": "Adam", "learning_rate": 0.01, "global_clipnorm": 0.05, "loss_scale_factor": 64.0},
    "global, accumulation": {
        "name": "SGD",
        "learning_rate": 0.5,
        "momentum": 0.9,
        "global_clipnorm": 0.05,
        "gradient_accumulation_steps": 3,
    },
    # Gradients overflow in the first steps; later the scale grows again.
    "loss scale": {
        "name": "SGD",
        "learning_rate": 0.05,
        "momentum": 0.9,
        "initial_scale": 2.0**127,
        "dynamic_growth_steps": 3,
    },
    "loss scale, grows": {"name": "Adam", "learning_rate": 0.01, "initial_scale": 1000.0, "dynamic_growth_steps": 3},
    "loss scale, global": {"name": "SGD", "learning_rate": 0.5, "global_clipnorm": 0.05, "initial_scale": 1000.0},
    "loss scale, by variable": {"name": "Lamb", "learning_rate": 0.01, "initial_scale": 1000.0},
    "loss scale, global, accumulation": {
        "name": "Lamb",
        "learning_rate": 0.01,
        "global_clipnorm": 0.05,
        "gradient_accumulation_steps": 2,
        "initial_scale": 1000.0,
    },
    "loss scale, accumulation": {
        "name": "Adam",
        "learning_rate": 0.01,
        "gradient_accumulation_steps": 2,
        "initial_scale": 2.0**127,
    },
}


def optimizer(kind):
    how = dict(OPTIMIZERS[kind])
    if how["learning_rate"] == "decay":
        how["learning_rate"] = keras.optimizers.schedules.ExponentialDecay(0.01, 5, 0.5)
    scaling = {name: how.pop(name) for name in ("initial_scale", "dynamic_growth_steps") if name in how}
    made = getattr(keras.optimizers, how.pop("name", kind))(**how)
    return keras.optimizers.LossScaleOptimizer(made, **scaling) if scaling else made


@pytest.fixture
def net():
    """A model whose weights, 100 and more of them, do not divide evenly; with moving statistics."""

    def make(compiled, layers=(), **how):
        keras.utils.set_random_seed(0)
        hidden = [keras.layers.Dense(21, "tanh", **how), keras.layers.BatchNormalization(), *layers]
        model = keras.Sequential([keras.Input((8,)), *hidden, keras.layers.Dense(3, "softmax")])
        model.compile(compiled, "sparse_categorical_crossentropy", metrics=["accuracy"])
        return model

    return make


def numbers(model):
    return [*model.get_weights(), *(keras.ops.convert_to_numpy(v) for v in model.optimizer.variables)]


def trained(model, rows, workers, pool, divided=True, to_the_end=True, **how):
    trainer = choros.Trainer(model, workers=workers, pool=pool, shard_optimizer=divided)
    history = trainer.fit(*rows, **HOW | how)
    assert history.run.group.endswith("optimizer divided") is (divided and to_the_end), history.run.group
    return history


def check(actual, other, tolerance=2e-5):
    for left, right in zip(numbers(actual), numbers(other), strict=True):
        np.testing.assert_allclose(left, right, atol=tolerance, rtol=1e-4)


@pytest.mark.parametrize(
    "kind", [kind if kind in QUICK else pytest.param(kind, marks=pytest.mark.long) for kind in OPTIMIZERS]
)
@pytest.mark.parametrize("workers", [pytest.param(2, marks=pytest.mark.long), 3])
def test_weights_and_slots_are_those_of_a_whole_update(kind, workers, net, data, pools):
    uninterrupted, divided = net(optimizer(kind)), net(optimizer(kind))
    plain = trained(uninterrupted, data(60), workers, pools(workers), False)
    history = trained(divided, data(60), workers, pools(workers))
    np.testing.assert_allclose(history.history["loss"], plain.history["loss"], rtol=1e-5)
    check(divided, uninterrupted)
    assert sum(worker.steps for worker in history.run.workers) == workers * 15


@pytest.mark.parametrize("accumulation", [None, 2])
def test_the_norm_of_gradients_that_are_scaled_to_the_end_of_floats(accumulation, net, data, pools):
    """Their squares overflow."""
    models = []
    for divided in (False, True):
        inner = keras.optimizers.SGD(0.5, global_clipnorm=0.05, gradient_accumulation_steps=accumulation)
        models.append(net(keras.optimizers.LossScaleOptimizer(inner, initial_scale=2.0**110)))
        trained(models[-1], data(60), 2, pools(2), divided)
    assert np.isfinite(models[1].get_weights()[0]).all()
    check(*models)


class Numpy(keras.callbacks.Callback):
    """Sets a number of numpy, and later ends accumulation within a cycle."""

    def on_epoch_end(self, epoch, logs=None):
        self.model.optimizer.momentum = np.float32(0.1)
        if epoch:
            self.model.optimizer.gradient_accumulation_steps = None


def test_settings_of_numpy_and_an_accumulation_that_ends(net, data, pools):
    models = []
    for divided in (False, True):
        models.append(net(keras.optimizers.SGD(0.5, 0.9, global_clipnorm=0.05, gradient_accumulation_steps=4)))
        for epochs in (2, 4):
            how = {"epochs": epochs, "initial_epoch": epochs - 2, "callbacks": [Numpy()]}
            trained(models[-1], data(60), 2, pools(2), divided, **how)
    check(*models)


def test_constraints_and_exceptions_from_weight_decay(net, data, pools):
    models = []
    for divided in (False, True):
        compiled = keras.optimizers.AdamW(0.05, weight_decay=0.3)
        compiled.exclude_from_weight_decay(var_names=["bias", "gamma"])
        models.append(net(compiled, kernel_constraint=keras.constraints.MaxNorm(0.5)))
        trained(models[-1], data(60), 2, pools(2), divided)
    check(*models)
    assert np.linalg.norm(models[1].get_weights()[0], axis=0).max() < 0.5001


@pytest.mark.parametrize("floatx", ["float32"] if BACKEND == "jax" else ["float32", "float64"])
def test_a_second_fit_continues(floatx, net, data, pools):
    keras.config.set_floatx(floatx)
    try:
        models = [net(keras.optimizers.Adam(0.01)) for _ in range(2)]
        for model, divided in zip(models, (False, True), strict=True):
            trained(model, data(60), 2, pools(2), divided)
            trained(model, data(60), 2, pools(2), divided, epochs=5, initial_epoch=3)
        assert int(models[1].optimizer.iterations) == 25
        check(*models, tolerance=1e-7 if floatx == "float64" else 2e-5)
    finally:
        keras.config.set_floatx("float32")


class Setting(keras.callbacks.Callback):
    """Sets the learning rate and a setting after a batch, and weights and slots at an epoch's end."""

    def on_train_batch_end(self, batch, logs=None):
        if batch == 2:
            self.model.optimizer.learning_rate = 0.002

    def on_epoch_end(self, epoch, logs=None):
        if epoch == 1:
            self.model.layers[0].kernel.assign(self.model.layers[0].kernel * 0.5)
            slot = self.model.optimizer.variables[3]
            slot.assign(slot * 0)


def test_callbacks_set_rates_weights_and_slots(net, data, pools):
    models = [net(keras.optimizers.Adam(0.01)) for _ in range(2)]
    for model, divided in zip(models, (False, True), strict=True):
        trained(model, data(60), 2, pools(2), divided, callbacks=[Setting()], validation_data=data(20, seed=1))
    check(*models)


def test_validation_at_the_average_of_the_weights(net, data, pools):
    losses, models = [], []
    for divided in (False, True):
        models.append(net(optimizer("average")))
        callbacks = [keras.callbacks.SwapEMAWeights(swap_on_epoch=False)]
        history = trained(models[-1], data(60), 3, pools(3), divided, callbacks=callbacks, validation_data=data(41, 1))
        losses.append(history.history["val_loss"])
    np.testing.assert_allclose(*losses, rtol=1e-5)
    check(*models)


class Unregistered(keras.optimizers.schedules.LearningRateSchedule):
    """A schedule that cannot be serialized."""

    def __call__(self, step):
        return 0.01 / (1.0 + keras.ops.cast(step, "float32"))


@pytest.mark.parametrize("rate", [Unregistered(), lambda: 0.01], ids=["schedule", "function"])
def test_learning_rates_that_cannot_be_serialized(rate, net, data, pools):
    models = [net(keras.optimizers.Adam(rate)) for _ in range(2)]
    trained(models[0], data(60), 2, pools(2), False)
    trained(models[1], data(60), 2, pools(2))
    check(*models)


def test_a_rank_whose_variables_have_no_weight_decay(net, data, pools):
    models = []
    for divided in (False, True):
        compiled = keras.optimizers.AdamW(0.05, weight_decay=0.3)
        models.append(net(compiled))
        compiled.exclude_from_weight_decay(var_names=["kernel"])
        trained(models[-1], data(60), 3, pools(3), divided)
    check(*models)


class Clipping(keras.callbacks.Callback):
    """Sets a kind of clipping that needs norms, at the beginning or later."""

    def __init__(self, name, epoch):
        super().__init__()
        self.name, self.epoch = name, epoch

    def on_train_begin(self, logs=None):
        if self.epoch < 0:
            setattr(self.model.optimizer, self.name, 0.01)

    def on_epoch_end(self, epoch, logs=None):
        if epoch == self.epoch:
            setattr(self.model.optimizer, self.name, 0.01)


@pytest.mark.parametrize("epoch", [-1, 0])
@pytest.mark.parametrize("name", ["clipnorm", "global_clipnorm"])
def test_clipping_that_callbacks_set(name, epoch, net, data, pools):
    models = [net(keras.optimizers.Adam(0.01)) for _ in range(2)]
    callbacks = [Clipping(name, epoch)]
    choros.Trainer(models[0], workers=2, pool=pools(2), shard_optimizer=False).fit(
        *data(60), **HOW, callbacks=callbacks
    )
    choros.Trainer(models[1], workers=2, pool=pools(2)).fit(*data(60), **HOW, callbacks=callbacks)
    models.append(net(keras.optimizers.Adam(0.01)))
    choros.Trainer(models[2], workers=2, pool=pools(2), shard_optimizer=True).fit(*data(60), **HOW, callbacks=callbacks)
    check(models[2], models[0])
    check(models[1], models[0])


@keras.saving.register_keras_serializable("choros-tests")
class Unused(keras.layers.Layer):
    """A layer with a weight that gets no gradient, between others that do."""

    def build(self, shape):
        self.extra = self.add_weight(shape=(130,), initializer="ones")

    def call(self, x):
        return x


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
def test_weights_without_a_gradient_are_left_alone_as_in_keras(net, data, pools, capfd):
    models = [net(keras.optimizers.AdamW(0.01, weight_decay=0.5), [Unused()]) for _ in range(3)]
    trained(models[0], data(60), 2, pools(2), False)
    trained(models[1], data(60), 2, pools(2), to_the_end=BACKEND == "jax")  # others then need the whole update
    warned = "makes the whole update of model" in "".join(capfd.readouterr())
    assert warned is (BACKEND != "jax")
    check(*models[:2])
    models[2].fit(*data(60), **{name: HOW[name] for name in ("epochs", "shuffle", "verbose")}, batch_size=13)
    extra = next(layer for layer in models[2].layers if isinstance(layer, Unused)).extra
    np.testing.assert_allclose(models[1].layers[2].extra.numpy(), extra.numpy(), rtol=1e-5)


def bits(arrays):
    return [np.asarray(array).tobytes() for array in arrays]


class Kill(keras.callbacks.Callback):
    """Keeps the weights after each batch, and kills worker 1 after the fourth batch of the second epoch.

    Rank 0 waits for this callback, and rank 1 in the sum of the next gradients: rank 0 then updates its part alone.
    """

    def __init__(self, trainer):
        super().__init__()
        self.trainer, self.seen, self.epoch, self.done = trainer, [], 0, False

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append(bits(keras.ops.convert_to_numpy(v) for v in self.model.trainable_variables))
        if self.epoch == 1 and batch == 3 and not self.done:
            self.done = True
            os.kill(self.trainer._local.pool.start().pids[1], signal.SIGKILL)

    def on_epoch_end(self, epoch, logs=None):
        self.epoch = epoch + 1


@pytest.mark.parametrize("kind", ["Adam", pytest.param("loss scale, grows", marks=pytest.mark.long)])
def test_a_worker_that_dies_costs_nothing(kind, net, data):
    uninterrupted, cut = net(optimizer(kind)), net(optimizer(kind))
    choros.Trainer(uninterrupted, workers=2, shard_optimizer=True).fit(*data(60), **HOW)
    trainer = choros.Trainer(cut, workers=2, shard_optimizer=True, restarts=1)
    kill = Kill(trainer)
    history = trainer.fit(*data(60), **HOW, callbacks=[kill])
    assert kill.done
    assert len(history.run.restarts) == 1
    for left, right in zip(numbers(cut), numbers(uninterrupted), strict=True):
        np.testing.assert_array_equal(left, right)

    failing = choros.Trainer(net(optimizer(kind)), workers=2, shard_optimizer=True)
    with pytest.raises(WorkerFailedError) as caught:
        failing.fit(*data(60), **HOW, callbacks=[kill := Kill(failing)])
    assert bits(caught.value.weights) in kill.seen


@pytest.mark.skipif(BACKEND == "jax", reason="JAX does not use what a layer sets in a step")
def test_a_layer_that_sets_its_weights_keeps_the_whole_update(net, data, pools, capfd):
    models = []
    for _ in range(2):
        keras.utils.set_random_seed(1)
        models.append(net(keras.optimizers.Adam(0.01), [keras.layers.SpectralNormalization(keras.layers.Dense(8))]))
    trained(models[0], data(60), 2, pools(2), False)
    trainer = choros.Trainer(models[1], workers=2, pool=pools(2), shard_optimizer=True)
    assert "divided" not in trainer.fit(*data(60), **HOW).run.group
    assert "shard_optimizer=True: each worker makes the whole update" in "".join(capfd.readouterr())
    check(*models)


@keras.saving.register_keras_serializable("choros-tests")
class Later(keras.layers.Layer):
    """Sets its weight in the fourth step and later ones."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones")
        self.count = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, x, training=False):
        if training:
            self.count.assign_add(1.0)
            late = keras.ops.cast(self.count > 3, "float32")
            if BACKEND == "torch" and float(late):
                self.scale.assign(self.scale * 0.9)
        return x * self.scale


@pytest.mark.skipif(BACKEND != "torch", reason="only PyTorch cannot see in the first step what a later step sets")
def test_a_layer_that_sets_its_weights_later_ends_training(net, data, pools):
    trainer = choros.Trainer(net("adam", [Later()]), workers=2, pool=pools(2), shard_optimizer=True)
    with pytest.raises(WorkerFailedError, match=SETS):
        trainer.fit(*data(60), **HOW)


def test_what_cannot_be_divided_is_refused_before_a_worker_starts(net, data):
    class Custom(keras.optimizers.Adam):
        def apply(self, *arguments):
            return super().apply(*arguments)

    class Stepping(keras.Model):
        def train_step(self, *arguments):
            return super().train_step(*arguments)

    inputs = keras.Input((8,))
    stepping = Stepping(inputs, keras.layers.Dense(3, "softmax")(inputs))
    stepping.compile("adam", "sparse_categorical_crossentropy")
    both = net(keras.optimizers.Adam(global_clipnorm=1.0))
    both.optimizer.clipnorm = 1.0
    refused = {
        "another kind of clipping": both,
        "Custom has its own apply": net(Custom()),
        "its own train_step|own train_step": stepping,
    }
    for message, model in refused.items():
        with pytest.raises(InvalidInputError, match=f"shard_optimizer=True.*({message})"):
            choros.Trainer(model, workers=2, shard_optimizer=True).fit(*data(60), **HOW)
    for algorithm, workers in (("localsgd", 2), ("allreduce", 1)):
        with pytest.raises(InvalidInputError, match="shard_optimizer=True divides one update"):
            choros.Trainer(net("adam"), algorithm, workers=workers, shard_optimizer=True)
    with pytest.raises(InvalidInputError, match="shard_optimizer='yes'"):
        choros.Trainer(net("adam"), workers=2, shard_optimizer="yes")


@pytest.mark.skipif(BACKEND == "torch", reason="on PyTorch one call updates all of a rank's values")
@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize(
    "kind",
    ["Adam", "Nadam", "accumulation", "overwritten", "clipnorm", "global", "global, accumulation", "loss scale, grows"],
)
def test_several_calls_make_the_update_of_one(kind, compiled, net, data, monkeypatch):
    """One rank of one, whose pieces are so short that each step has several calls of the optimizer."""
    x, y = data(13)
    batch, replicas = Batch(x, y, None, rows=13, total=13), []
    for _ in range(2):
        model = net(optimizer(kind))
        model.compile(model.optimizer, model.loss, jit_compile=compiled)
        replicas.append(make_replica(model, 1))
        replicas[-1].build(batch)
    whole, divided = replicas
    if BACKEND == "jax" and not compiled:
        assert make_shard(divided, 0, 1) is None
        return
    monkeypatch.setattr(type(make_shard(divided, 0, 1)), "block", 64)
    shard = make_shard(divided, 0, 1)
    assert len(shard.groups) == (1 if kind == "clipnorm" else 8)
    segment = Segment.create(shard.nbytes, "choros-test")
    shard.fill(segment.array)
    shard.attach(segment.array)
    for step in range(7):
        if step == 4:  # what a callback sets is in the shared memory
            for replica in replicas:
                replica.learning_rate = 0.001
                replica.set(np.linspace(-1, 1, replica.size, dtype="float32"))
        vectors = [np.zeros(replica.size + 2, "float32") for replica in replicas]
        for replica, vector in zip(replicas, vectors, strict=True):
            replica.gradients(batch, vector)
        size = max(1.0, np.abs(vectors[0][np.isfinite(vectors[0])]).max())  # that of the scale
        np.testing.assert_allclose(*vectors, atol=2e-5 * size)
        assert not shard.sets_weights()
        whole.apply(vectors[0])
        shard.apply(vectors[1][-2:], [vectors[1]], add_in_order, lambda: None)
        assert not shard.has_moved()
    for replica in replicas:
        replica.finish()
        replica.close()
    segment.close()
    assert int(divided.model.optimizer.iterations) == int(whole.model.optimizer.iterations)
    check(divided.model, whole.model)


@pytest.mark.parametrize(("kind", "divides"), [("Nadam", False), ("Adam", True)])
def test_ranks_without_a_piece(kind, divides, net, data):
    """Nadam has a product of all steps beside the step counter, which a rank without weights would not update."""
    model, (x, y) = net(optimizer(kind)), data(13)
    replica = make_replica(model, 1)
    replica.build(Batch(x, y, None, rows=13, total=13))
    assert make_shard(replica, 0, 3) is not None
    assert (make_shard(replica, 0, 50) is not None) is divides
    replica.close()


@pytest.mark.skipif(BACKEND != "tensorflow", reason="it examines the graphs of TensorFlow")
@pytest.mark.parametrize("way", ["other variable", "weight", "condition", "Python", "gather"])
def test_programs_that_can_set_a_weight(way):
    import tensorflow as tf

    from choros.backends.optimizer_shard.tensorflow import can_assign

    weight, other = tf.Variable(tf.ones((3, 2))), tf.Variable(tf.ones((3, 2)))

    def step(x):
        if way == "condition":
            tf.cond(x > 0, lambda: other.assign(other * 2), other.read_value)
        elif way == "Python":
            tf.py_function(lambda: weight.assign(weight * 2), [], [])
        elif way == "gather":
            return x * tf.reduce_sum(tf.gather(weight, [0]))
        else:
            (weight if way == "weight" else other).assign_add(weight)
        return x * tf.reduce_sum(weight)

    graph = tf.function(step).get_concrete_function(tf.constant(1.0)).graph
    assert can_assign(graph, {id(weight.handle)}) is (way != "other variable")


@keras.saving.register_keras_serializable("choros-tests")
class Behind(keras.layers.Layer):
    """Sets its weight in validation, which the program of a training step does not show."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones")

    def call(self, x, training=False):
        if not training and BACKEND == "tensorflow":
            self.scale.value.assign(self.scale * 0.9)
        return x * self.scale


@pytest.mark.skipif(BACKEND != "tensorflow", reason="only on TensorFlow a weight that was set leaves the shared memory")
def test_a_layer_that_sets_its_weights_in_validation_ends_training(net, data, pools):
    trainer = choros.Trainer(net("adam", [Behind()]), workers=2, pool=pools(2), shard_optimizer=True)
    with pytest.raises(WorkerFailedError, match=SETS):
        trainer.fit(*data(60), **HOW, validation_data=data(20, seed=1))


@pytest.mark.parametrize("compiled", [True, False])
def test_an_embedding_and_a_weight_of_one_value(compiled, pools):
    rng = np.random.default_rng(0)
    rows = rng.integers(0, 11, (60, 4)), rng.integers(0, 3, 60)
    models = []
    for divided in (False, True):
        keras.utils.set_random_seed(0)
        ids = keras.Input((4,), dtype="int32")
        vectors = keras.layers.Embedding(11, 8)(ids)
        mixed = keras.layers.Attention(use_scale=True)([vectors, vectors])
        models.append(keras.Model(ids, keras.layers.Dense(3, "softmax")(keras.layers.Flatten()(mixed))))
        models[-1].compile(keras.optimizers.Adam(0.01), "sparse_categorical_crossentropy", jit_compile=compiled)
        if BACKEND == "jax" and not compiled:  # without a compiled step JAX does not divide
            return
        trained(models[-1], rows, 3, pools(3), divided)
    check(*models)


@pytest.mark.parametrize("kind", ["Adam", "Lamb", "SGD"])
def test_pieces_cover_each_value_once(kind, net):
    model = net(optimizer(kind))
    model.optimizer.build(model.trainable_variables)
    assert not obstacle(model)
    ends = np.cumsum([0, *(int(np.prod(v.shape)) for v in model.trainable_variables)])
    slices = [slice(int(a), int(b)) for a, b in itertools.pairwise(ends)]
    for size, block in itertools.product((1, 2, 3, 7, 50), (None, 64, 100)):
        layout = SharedLayout.of(model, model.trainable_variables, size, block)
        counts = np.zeros(ends[-1], int)
        for rank in range(size):
            for piece in layout.pieces(slices, rank, size):
                for where, place in piece.inputs:
                    assert where.stop - where.start == place.stop - place.start
                    counts[where] += 1
        assert (counts == 1).all()


def test_ranks_of_a_job_divide_too(tmp_path):
    script = """
        import keras, numpy as np, choros
        class Halve(keras.callbacks.Callback):
            def on_epoch_end(self, epoch, logs=None):
                self.model.layers[0].kernel.assign(self.model.layers[0].kernel * 0.5)
        rng = np.random.default_rng(0)
        x, y = rng.normal(size=(60, 8)).astype("float32"), rng.integers(0, 3, 60)
        for divided in (True, False):
            keras.utils.set_random_seed(0)
            layers = [keras.Input((8,)), keras.layers.Dense(40, "relu"), keras.layers.Dense(3, "softmax")]
            model = keras.Sequential(layers)
            model.compile(keras.optimizers.Adam(0.01), "sparse_categorical_crossentropy")
            trainer = choros.Trainer(model, shard_optimizer=divided)
            history = trainer.fit(x, y, epochs=3, batch_size=7, verbose=0, callbacks=[Halve()])
            values = np.concatenate([np.ravel(v) for v in model.get_weights()]).astype("float64")
            print("group:", history.run.group, "|", values.sum(), np.abs(values).sum(), len(model.optimizer.variables))
    """
    path = pathlib.Path(tmp_path, "script.py")
    path.write_text(textwrap.dedent(script))
    command = [sys.executable, "-m", "choros", "run", "-n", "2", str(path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    lines = [line.split("group: ")[1].split(" | ") for line in ended.stdout.splitlines() if "group: " in line]
    divided = [values for group, values in lines if group.endswith("optimizer divided")]
    whole = [values for group, values in lines if not group.endswith("optimizer divided")]
    assert len(divided) == len(whole) == 2
    assert divided[0] == divided[1]
    for left, right in zip(divided[0].split(), whole[0].split(), strict=True):
        assert float(left) == pytest.approx(float(right), rel=1e-4)
