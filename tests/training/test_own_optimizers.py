"""A divided update of a user's optimizer, after a trial."""

import os

import keras
import numpy as np
import pytest

import choros
from choros.backends.optimizer_shard.independence import independent_unit, treats_alike
from choros.backends.optimizer_shard.obstacles import obstacle
from choros.errors import InvalidInputError

BACKEND = os.environ["KERAS_BACKEND"]
HOW = {"batch_size": 13, "epochs": 3, "shuffle": False, "seed": 1, "verbose": 0}
ops = keras.ops


@keras.saving.register_keras_serializable("choros-tests")
class Signs(keras.optimizers.Optimizer):
    """Momentum with a bounded step for each value, and a setting of its own."""

    def __init__(self, learning_rate=0.01, decay=0.9, limit=3.0, **how):
        super().__init__(learning_rate=learning_rate, **how)
        self.decay, self.limit = decay, limit

    def build(self, variables):
        if not self.built:
            super().build(variables)
            self._means = self.add_optimizer_variables(variables, "mean")

    def update_step(self, gradient, variable, learning_rate):
        mean = self._means[self._get_variable_index(variable)]
        self.assign(mean, mean * self.decay + gradient)
        rate = ops.cast(learning_rate, variable.dtype)
        self.assign_sub(variable, rate * ops.clip(mean, -self.limit, self.limit))

    def get_config(self):
        return {**super().get_config(), "decay": self.decay, "limit": self.limit}


@keras.saving.register_keras_serializable("choros-tests")
class Ratio(Signs):
    """A step whose length is that of the variable (LARS, You et al. 2017)."""

    def update_step(self, gradient, variable, learning_rate):
        ratio = ops.norm(variable) / (ops.norm(gradient) + 1e-9)
        rate = ops.cast(learning_rate, variable.dtype)
        self.assign_sub(variable, rate * ratio * gradient)


class Large(Signs):
    """A rule for matrices of 128 rows or more alone."""

    def update_step(self, gradient, variable, learning_rate):
        if len(variable.shape) == 2 and variable.shape[0] >= 128:
            gradient = gradient / ops.norm(gradient)
        super().update_step(gradient, variable, learning_rate)


@keras.saving.register_keras_serializable("choros-tests")
class Named(Signs):
    """A rule for some names alone."""

    def update_step(self, gradient, variable, learning_rate):
        super().update_step(gradient * (2.0 if "bias" in variable.name else 1.0), variable, learning_rate)


class Coupled(Signs):
    """A number that all variables change and use."""

    def build(self, variables):
        if not self.built:
            super().build(variables)
            self._norm = self.add_variable((), name="norm")

    def update_step(self, gradient, variable, learning_rate):
        self.assign(self._norm, self._norm * 0.9 + ops.norm(gradient))
        super().update_step(gradient / (self._norm + 1e-9), variable, learning_rate)


class LateCoupled(Coupled):
    """The same from step 300 on."""

    def update_step(self, gradient, variable, learning_rate):
        norm = self._norm + 1e-9
        self.assign(self._norm, ops.where(self.iterations > 300, norm * 0.9 + ops.norm(gradient), 1.0))
        Signs.update_step(self, gradient / norm, variable, learning_rate)


class Noisy(Signs):
    def update_step(self, gradient, variable, learning_rate):
        noise = keras.random.normal(gradient.shape, dtype=variable.dtype)
        super().update_step(gradient + noise, variable, learning_rate)


@keras.saving.register_keras_serializable("choros-tests")
class Factors(Signs):
    """Settings that its configuration does not contain; callbacks may change them."""

    def __init__(self, *arguments, **how):
        super().__init__(*arguments, **how)
        self.factors, self.kind, self.flags = {"kernel": 0.1}, "linear", [1.0, np.ones(2)]

    def update_step(self, gradient, variable, learning_rate):
        factor = self.factors.get("kernel" if "kernel" in variable.name else "other", 1.0)
        square = 0.1 if self.kind == "square" else 1.0
        super().update_step(gradient * factor * square * self.flags[0], variable, learning_rate)


class Counting(Signs):
    """A count of steps in Python."""

    def __init__(self, *arguments, **how):
        super().__init__(*arguments, **how)
        self.counts = {}

    def update_step(self, gradient, variable, learning_rate):
        path = getattr(variable, "path", variable.name)
        self.counts[path] = self.counts.get(path, 0) + 1
        super().update_step(gradient / self.counts[path], variable, learning_rate)


class Wrapping(Signs):
    """Another optimizer in an attribute."""

    def __init__(self, *arguments, **how):
        super().__init__(*arguments, **how)
        self.inner = keras.optimizers.Adam()


class Prodigious(Signs):
    """A step size that grows with the progress of all weights (Prodigy, Mishchenko and Defazio 2023)."""

    def build(self, variables):
        if not self.built:
            super().build(variables)
            self._first = self.add_optimizer_variables(variables, "first")
            self._size = self.add_variable((), name="size")
            self._progress = self.add_variable((), name="progress")
            self._size.assign(1e-6)
            for first, variable in zip(self._first, variables, strict=True):
                first.assign(variable)

    def update_step(self, gradient, variable, learning_rate):
        first = self._first[self._get_variable_index(variable)]
        self.assign_add(self._progress, ops.sum(gradient * (first - variable)) * self._size)
        self.assign(self._size, ops.maximum(self._size, self._progress / (ops.sum(ops.abs(gradient)) + 1e-9)))
        self.assign_sub(variable, self._size * gradient)


class Late(Signs):
    """All gradients at once."""

    def _backend_update_step(self, gradients, variables, learning_rate):
        super()._backend_update_step(gradients, variables, learning_rate)


class Frozen(Signs):
    """An update of matrices alone."""

    def update_step(self, gradient, variable, learning_rate):
        if len(variable.shape) > 1:
            super().update_step(gradient, variable, learning_rate)


class Failing(Signs):
    def update_step(self, gradient, variable, learning_rate):
        raise NotImplementedError("no update")


class Exploding(Signs):
    def update_step(self, gradient, variable, learning_rate):
        super().update_step(gradient * np.inf, variable, learning_rate)


class Switched(Signs):
    """Another rule with a negative limit."""

    def update_step(self, gradient, variable, learning_rate):
        super().update_step(gradient * (np.inf if self.limit < 0 else 1.0), variable, learning_rate)


class Adam(keras.optimizers.Adam):
    """A name of Keras' with another rule."""

    def update_step(self, gradient, variable, learning_rate):
        super().update_step(gradient / (ops.norm(gradient) + 1e-9), variable, learning_rate)


class Clipped(Signs):
    def _clip_gradients(self, gradients):
        return gradients


def net(optimizer, rows=8):
    keras.utils.set_random_seed(0)
    hidden = [keras.layers.Dense(21, "tanh"), keras.layers.BatchNormalization()]
    model = keras.Sequential([keras.Input((rows,)), *hidden, keras.layers.Dense(3, "softmax")])
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
    model.optimizer.build(model.trainable_variables)
    return model


def unit(optimizer, rows=8, tries=True):
    model = net(optimizer, rows)
    return independent_unit(model.optimizer, model.trainable_variables, tries)


def warm_up(rate):
    return keras.optimizers.schedules.CosineDecay(0.0, 100, warmup_target=rate, warmup_steps=50)


@pytest.mark.parametrize(
    ("optimizer", "rows", "expected"),
    [
        (Signs, 8, "value"),
        (lambda: Signs(weight_decay=0.1, use_ema=True), 8, "value"),
        (lambda: Signs(warm_up(0.1)), 8, "value"),
        (Ratio, 8, "variable"),
        (lambda: Ratio(warm_up(0.1)), 8, "variable"),
        (Large, 127, "value"),
        (Large, 1000, "variable"),
        (Named, 8, "variable"),
        (Adam, 8, "variable"),
        (lambda: Signs(clipnorm=0.1), 8, "variable"),
        (lambda: Signs(global_clipnorm=0.1), 8, "value"),
        (lambda: Signs(gradient_accumulation_steps=8), 8, "value"),
        (Factors, 8, "variable"),
    ],
)
def test_the_smallest_independent_part(optimizer, rows, expected):
    assert unit(optimizer(), rows) == (expected, "")
    assert "not known whether" in unit(optimizer(), rows, tries=False)[1]


@pytest.mark.parametrize(
    ("optimizer", "reason"),
    [
        (Coupled, "in a trial Coupled updated .* differently with the other variables than alone"),
        (Noisy, "in a trial Noisy updated"),
        (LateCoupled, "in a trial LateCoupled updated"),
        (lambda: Coupled(gradient_accumulation_steps=8), "in a trial Coupled updated"),
        (Counting, "Counting changes attributes in a step other than a keras.Variable"),
        (Wrapping, "Wrapping has the attribute 'inner', which is neither a setting"),
        (Prodigious, "in a trial Prodigious updated"),
        (Late, "Late has its own _backend_update_step"),
        (Frozen, "in a trial Frozen did not change .*bias"),
        (Failing, r"Failing raised NotImplementedError with a part of the weights: no update"),
        (Exploding, "in a trial Exploding gave weights that are not finite"),
        (Clipped, "Clipped has its own _clip_gradients"),
    ],
)
def test_optimizers_that_cannot_be_divided(optimizer, reason, data):
    model = net(optimizer())
    with pytest.raises(InvalidInputError, match=f"shard_optimizer=True: the update of model .*{reason}"):
        choros.Trainer(model, workers=2, shard_optimizer=True).fit(*data(60), **HOW)


def test_exceptions_from_weight_decay_and_settings_that_change():
    model = net(Signs(weight_decay=0.1))
    model.optimizer.exclude_from_weight_decay(var_names=["bias", "beta"])
    assert not obstacle(model, tries=True)
    assert not treats_alike(model.optimizer, model.trainable_variables, tries=True)
    model = net(Switched())
    assert treats_alike(model.optimizer, model.trainable_variables, tries=True)
    model.optimizer.limit = -1.0
    assert "are not finite" in obstacle(model, tries=True)


def numbers(model):
    return [*model.get_weights(), *(ops.convert_to_numpy(variable) for variable in model.optimizer.variables)]


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda: Signs(0.05, limit=0.5, weight_decay=0.01),
        lambda: Named(0.05),
        lambda: Factors(0.05, global_clipnorm=0.05, gradient_accumulation_steps=2),
        lambda: keras.optimizers.LossScaleOptimizer(Ratio(warm_up(0.1)), initial_scale=64.0),
    ],
)
def test_a_divided_update_is_the_whole_one(optimizer, data, pools):
    models = []
    for divided in (False, True, None):
        models.append(net(optimizer()))
        trainer = choros.Trainer(models[-1], workers=3, pool=pools(3), shard_optimizer=divided)
        history = trainer.fit(*data(60), **HOW)
        assert history.run.group.endswith("optimizer divided") is bool(divided)
    for left, right in zip(numbers(models[1]), numbers(models[0]), strict=True):
        np.testing.assert_allclose(left, right, atol=2e-5, rtol=1e-4)


class Change(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        if epoch == 0:
            self.model.optimizer.factors = {"kernel": 0.5, "other": 0.2}
            self.model.optimizer.kind = "square"
            self.model.optimizer.flags = [2.0, np.zeros(2)]


def test_settings_that_callbacks_change(data, pools):
    models = []
    for divided in (False, True):
        models.append(net(Factors(0.05)))
        trainer = choros.Trainer(models[-1], workers=2, pool=pools(2), shard_optimizer=divided)
        trainer.fit(*data(60), **HOW, callbacks=[Change()])
    for left, right in zip(numbers(models[1]), numbers(models[0]), strict=True):
        np.testing.assert_allclose(left, right, atol=2e-5, rtol=1e-4)


def test_more_ranks_than_variables(data, pools):
    """An optimizer may have a number that a rank without weights would not change."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(3, "softmax")])
    model.compile(Ratio(0.1), "sparse_categorical_crossentropy")
    with pytest.raises(choros.WorkerFailedError, match="optimizer of yours, a weight for each rank"):
        choros.Trainer(model, workers=3, pool=pools(3), shard_optimizer=True).fit(*data(60), **HOW)
