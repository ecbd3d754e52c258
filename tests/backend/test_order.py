"""AllReduce updates weights after ``train_step``: a step that reads updated weights is made again."""

import keras
import numpy as np
import pytest

import choros
from choros.backends.loss_exactness import check_exact
from choros.errors import InexactLossError, WorkerFailedError
from choros.types import Batch


def after_step(model, data, follow):
    """Make the step of Keras and then what follows it, in the form that the backend's ``train_step`` has."""
    if keras.backend.backend() != "jax":
        logs = keras.Model.train_step(model, *data)
        follow()
        return logs
    logs, (trained, others, slots, metrics) = keras.Model.train_step(model, *data)
    variables = [*model.trainable_variables, *model.non_trainable_variables]
    pairs = list(zip(variables, [*trained, *others], strict=True))
    with keras.StatelessScope(state_mapping=pairs) as scope:
        follow()
    trained = [scope.get_current_value(variable) for variable in model.trainable_variables]
    others = [scope.get_current_value(variable) for variable in model.non_trainable_variables]
    return logs, (trained, others, slots, metrics)


class Teacher(keras.Model):
    def __init__(self):
        super().__init__()
        self.student = keras.layers.Dense(1)
        self.teacher = keras.layers.Dense(1, trainable=False)

    def call(self, x, training=False):
        return self.student(x) + 0.1 * self.teacher(x)

    def train_step(self, *data):
        return after_step(self, data, self.follow)

    def follow(self):
        for value, taught in zip(self.teacher.variables, self.student.variables, strict=True):
            value.assign(0.9 * value + 0.1 * taught)


class Clipped(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, x, training=False):
        return self.dense(x)

    def train_step(self, *data):
        return after_step(self, data, self.clip)

    def clip(self):
        self.dense.kernel.assign(keras.ops.clip(self.dense.kernel, -0.01, 0.01))


class Counting(Clipped):
    """Neither a count of steps nor a statistic of the inputs depends on the update."""

    def __init__(self):
        super().__init__()
        self.steps = self.add_weight(shape=(), initializer="zeros", trainable=False, name="steps")

    def train_step(self, *data):
        return after_step(self, data, lambda: self.steps.assign(self.steps + 1))


def made(kind, x):
    keras.utils.set_random_seed(1)
    model = kind()
    model(x[:1])
    model.compile("adam", "mse")
    return model


def rows():
    random = np.random.default_rng(0)
    return random.normal(size=(16, 3)).astype("float32"), random.normal(size=(16, 1)).astype("float32")


class Averaged(Clipped):
    """The teacher may be trained, so it is among the trainable variables, but no gradient reaches it."""

    def __init__(self):
        super().__init__()
        self.teacher = keras.layers.Dense(1)

    def call(self, x, training=False):
        return self.dense(x) + 0 * keras.ops.stop_gradient(self.teacher(x))

    def clip(self):
        for value, taught in zip(self.teacher.variables, self.dense.variables, strict=True):
            value.assign(0.999 * value + 0.001 * taught)


class Shrunk(Clipped):
    """A step that is made twice must not shrink the weights twice."""

    def clip(self):
        self.dense.kernel.assign(0.9 * self.dense.kernel)


class Logging(Clipped):
    def train_step(self, *data):
        if keras.backend.backend() != "jax":
            logs = keras.Model.train_step(self, *data)
            return {**logs, "norm": keras.ops.sum(keras.ops.square(self.dense.kernel))}
        logs, state = keras.Model.train_step(self, *data)
        place = next(i for i, v in enumerate(self.trainable_variables) if v is self.dense.kernel)
        return {**logs, "norm": keras.ops.sum(keras.ops.square(state[0][place]))}, state


class EveryThird(Clipped):
    """A target that takes the weights at each third step, and equals them before: the first step changes nothing."""

    def __init__(self):
        super().__init__()
        self.target = self.add_weight(shape=(3, 1), initializer="zeros", trainable=False, name="target")
        self.count = self.add_weight(shape=(), dtype="int32", initializer="zeros", trainable=False, name="count")

    def build(self, shape):
        self.dense.build(shape)
        self.target.assign(keras.ops.convert_to_numpy(self.dense.kernel))

    def clip(self):
        self.count.assign(self.count + 1)
        third = keras.ops.equal(self.count % 3, 0)
        self.target.assign(keras.ops.where(third, 1.0 * self.dense.kernel, 1.0 * self.target))


class Lookahead(EveryThird):
    """Each third step the weights go half of the way back."""

    def clip(self):
        self.count.assign(self.count + 1)
        third = keras.ops.equal(self.count % 3, 0)
        middle = 0.5 * self.target + 0.5 * self.dense.kernel
        self.dense.kernel.assign(keras.ops.where(third, middle, 1.0 * self.dense.kernel))
        self.target.assign(keras.ops.where(third, middle, 1.0 * self.target))


class PythonThird(EveryThird):
    """The condition is Python's, so that the first step shows nothing."""

    def clip(self):
        self.count.assign(self.count + 1)
        if int(keras.ops.convert_to_numpy(self.count)) % 3 == 0:
            self.target.assign(keras.ops.convert_to_numpy(self.dense.kernel))


def equal(model, plain, history, other):
    for value, expected in zip(
        [*model.variables, *model.optimizer.variables], [*plain.variables, *plain.optimizer.variables], strict=True
    ):
        value, expected = (keras.ops.convert_to_numpy(each) for each in (value, expected))
        np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-6)
    assert history.history.keys() == other.history.keys()
    for name, figures in history.history.items():
        np.testing.assert_allclose(figures, other.history[name], rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.every(2)
@pytest.mark.filterwarnings("ignore:Gradients do not exist for variables")
@pytest.mark.parametrize("kind", [Teacher, Averaged, Clipped, Shrunk, Logging, EveryThird, Lookahead])
@pytest.mark.parametrize("workers", [2, 3])
def test_a_step_that_goes_on_with_updated_weights_is_exact(kind, workers, pools):
    x, y = rows()
    plain, model = made(kind, x), made(kind, x)
    options = {"batch_size": 7, "shuffle": False, "verbose": 0, "epochs": 2}  # the last batch has 2 rows
    other = plain.fit(x, y, **options)
    history = choros.Trainer(model, workers=workers, pool=pools(workers)).fit(x, y, **options)
    equal(model, plain, history, other)


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda: keras.optimizers.AdamW(0.01, use_ema=True, ema_momentum=0.9),
        lambda: keras.optimizers.SGD(0.01, momentum=0.9, gradient_accumulation_steps=2),
        lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01), initial_scale=8.0),
        lambda: keras.optimizers.Adam(keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5), clipnorm=0.1),
    ],
    ids=["ema", "accumulation", "loss-scale", "schedule"],
)
def test_such_steps_are_exact_with_each_optimizer(optimizer, pools):
    x, y = rows()
    plain, model = made(Teacher, x), made(Teacher, x)
    for each in (plain, model):
        each.compile(optimizer(), "mse")
    options = {"batch_size": 6, "shuffle": False, "verbose": 0, "epochs": 3}
    other = plain.fit(x, y, **options)
    equal(model, plain, choros.Trainer(model, workers=2, pool=pools(2)).fit(x, y, **options), other)


class Deciding(keras.callbacks.Callback):
    """Set a rate, then weights, then stop; note what each batch shows."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_end(self, batch, logs=None):
        weights = self.model.get_weights()
        self.seen.append([logs["loss"], *(float(np.sum(value)) for value in weights)])
        if len(self.seen) == 2:
            self.model.optimizer.learning_rate = 0.01
        if len(self.seen) == 4:
            self.model.set_weights([value + 0.125 for value in weights])
        if len(self.seen) == 8:
            self.model.stop_training = True


def test_callbacks_of_such_steps_see_and_set_what_they_do_in_plain_fit(pools):
    x, y = rows()
    plain, model = made(Teacher, x), made(Teacher, x)
    calls = Deciding(), Deciding()
    options = {"batch_size": 5, "shuffle": False, "verbose": 0, "epochs": 4}
    other = plain.fit(x, y, callbacks=[calls[0]], **options)
    history = choros.Trainer(model, workers=2, pool=pools(2)).fit(x, y, callbacks=[calls[1]], **options)
    np.testing.assert_allclose(calls[1].seen, calls[0].seen, rtol=1e-5, atol=1e-6)
    equal(model, plain, history, other)


def test_such_a_step_goes_on_from_a_checkpoint(pools, tmp_path):
    x, y = rows()
    complete, first, second = (made(Teacher, x) for _ in range(3))
    options = {"batch_size": 5, "seed": 3, "verbose": 0}
    choros.Trainer(complete, workers=2, pool=pools(2)).fit(x, y, epochs=3, **options)
    for model, epochs in ((first, 1), (second, 3)):
        trainer = choros.Trainer(model, workers=2, pool=pools(2))
        trainer.fit(x, y, epochs=epochs, checkpoint=tmp_path, resume=True, **options)
    for value, expected in zip(second.variables, complete.variables, strict=True):
        np.testing.assert_array_equal(keras.ops.convert_to_numpy(value), keras.ops.convert_to_numpy(expected))


def test_other_algorithms_make_whole_steps(pools):
    x, y = rows()
    model = made(Teacher, x)
    before = [keras.ops.convert_to_numpy(v).copy() for v in model.teacher.variables]
    choros.Trainer(model, "localsgd", workers=2, pool=pools(2)).fit(x, y, batch_size=8, verbose=0)
    assert any(
        not np.array_equal(keras.ops.convert_to_numpy(v), b)
        for v, b in zip(model.teacher.variables, before, strict=True)
    )


@pytest.mark.skipif(keras.backend.backend() == "jax", reason="on JAX one program spans a worker's devices")
def test_several_devices_for_each_worker_are_refused_by_name():
    x, y = rows()
    model = made(Teacher, x)
    with pytest.raises(InexactLossError, match="Teacher.train_step .* goes on with weights .* one device"):
        choros.Trainer(model, workers=2, devices_per_worker=2).fit(x, y, batch_size=8, verbose=0)


def test_a_step_that_changes_other_variables_is_made_once(pools, capsys):
    x, y = rows()
    plain, model = made(Counting, x), made(Counting, x)
    other = plain.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    history = choros.Trainer(model, workers=2, pool=pools(2)).fit(x, y, batch_size=8, shuffle=False, verbose=2)
    equal(model, plain, history, other)
    assert "calculated twice" not in capsys.readouterr().out
    choros.Trainer(made(Teacher, x), workers=2, pool=pools(2)).fit(x, y, batch_size=8, verbose=2)
    assert "reads updated weights" in capsys.readouterr().out


def test_a_trial_leaves_weights_that_a_step_sets_as_they_were():
    x, y = rows()
    model = made(Shrunk, x)
    before = model.get_weights()
    check_exact(model, 2, Batch(x, y, None, rows=16, total=16))
    for value, expected in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(value, expected)


@pytest.mark.skipif(keras.backend.backend() != "torch", reason="the other backends trace a step once")
def test_a_step_that_uses_updated_weights_late_is_refused_by_name_or_made_again_where_the_model_says_so(pools):
    x, y = rows()
    plain, model = made(PythonThird, x), made(PythonThird, x)
    options = {"batch_size": 4, "shuffle": False, "verbose": 0}
    other = plain.fit(x, y, **options)
    trainer = choros.Trainer(model, workers=2, pool=pools(2))
    before = model.get_weights()
    with pytest.raises(
        WorkerFailedError, match="PythonThird.train_step .*kernel.* after the update.*repeat_step = True"
    ):
        trainer.fit(x, y, **options)
    for value, expected in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(value, expected)
    model.repeat_step = True
    equal(model, plain, choros.Trainer(model, workers=2, pool=pools(2)).fit(x, y, **options), other)
