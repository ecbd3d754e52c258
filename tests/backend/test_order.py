"""AllReduce updates weights after ``train_step``: a step that goes on with updated weights is refused by name."""

import keras
import numpy as np
import pytest

import choros
from choros.errors import NotExact


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
        for mine, taught in zip(self.teacher.variables, self.student.variables, strict=True):
            mine.assign(0.999 * mine + 0.001 * taught)


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


@pytest.mark.parametrize(("kind", "name"), [(Teacher, "kernel"), (Clipped, "kernel")])
def test_a_step_that_goes_on_with_updated_weights_is_refused_by_name(kind, name):
    x, y = rows()
    model = made(kind, x)
    before = [keras.ops.convert_to_numpy(variable).copy() for variable in model.variables]
    with pytest.raises(NotExact, match=f"{kind.__name__}.train_step .* after the optimizer's update.*{name}.*LocalSGD"):
        choros.Trainer(model, workers=2).fit(x, y, batch_size=8, verbose=0)
    for variable, value in zip(model.variables, before, strict=True):
        np.testing.assert_array_equal(keras.ops.convert_to_numpy(variable), value)


def test_other_algorithms_train_such_a_step(pools):
    x, y = rows()
    choros.Trainer(made(Teacher, x), "localsgd", workers=2, pool=pools(2)).fit(x, y, batch_size=8, verbose=0)


def test_a_step_that_changes_other_variables_is_exact(pools):
    x, y = rows()
    plain, model = made(Counting, x), made(Counting, x)
    plain.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    choros.Trainer(model, workers=2, pool=pools(2)).fit(x, y, batch_size=8, shuffle=False, verbose=0)
    for mine, other in zip(model.variables, plain.variables, strict=True):
        np.testing.assert_allclose(
            keras.ops.convert_to_numpy(mine), keras.ops.convert_to_numpy(other), rtol=1e-5, atol=1e-6
        )
