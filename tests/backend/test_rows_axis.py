"""Outputs of shape (rows,), and layers whose axis is that of the rows though it counts from the end."""

import keras
import numpy as np
import pytest

import choros
from choros.backends.loss_exactness import check_exact
from choros.backends.metric_additivity import not_additive
from choros.backends.rowwise_parts import plain
from choros.errors import InexactLossError
from choros.types import Batch

layers, losses = keras.layers, keras.losses
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning")

RNG = np.random.default_rng(4)
X = RNG.normal(size=(16, 6)).astype("float32")
Y = RNG.uniform(0.1, 2, size=16).astype("float32")
BINARY = (Y > 1).astype("float32")
WEIGHT = RNG.uniform(0.1, 2, size=16).astype("float32")


class Tower(keras.Model):
    """Its outputs' shape is known from a call alone."""

    def __init__(self):
        super().__init__()
        self.first, self.second = layers.Dense(3), layers.Dense(3)

    def call(self, inputs):
        return keras.ops.sum(self.first(inputs) * self.second(inputs), axis=-1)


def sequence(*between, loss="mse", metrics=None):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((6,)), *between])
    model.compile("sgd", loss, metrics=metrics)
    return model


def flat(loss, metrics=None):
    return sequence(layers.Dense(1, "sigmoid"), layers.Reshape(()), loss=loss, metrics=metrics)


def tower():
    keras.utils.set_random_seed(1)
    model = Tower()
    model.compile("sgd", "mse")
    return model


def refused(model, y=Y, weight=None, **how):
    with pytest.raises(InexactLossError) as error:
        choros.Trainer(model, workers=2).fit(X, y, sample_weight=weight, batch_size=8, verbose=0, **how)
    return str(error.value)


@pytest.mark.parametrize(
    ("make", "y", "how"),
    [
        (lambda: flat(losses.MeanSquaredError(reduction="sum")), Y, {}),
        (lambda: flat("mse"), Y, {"weight": WEIGHT}),
        (lambda: flat(losses.BinaryCrossentropy()), BINARY, {"class_weight": {0: 1.0, 1: 5.0}}),
        (lambda: flat(losses.BinaryCrossentropy(reduction="mean_with_sample_weight")), BINARY, {"weight": WEIGHT}),
        (lambda: flat(losses.CosineSimilarity()), Y, {}),
        (lambda: flat("kl_divergence"), Y, {}),
        (lambda: flat(losses.CategoricalCrossentropy(from_logits=True)), BINARY, {}),
        (tower, Y, {"weight": WEIGHT}),
    ],
)
def test_a_loss_that_keras_takes_over_the_rows_is_refused_with_the_reason(make, y, how):
    assert "shape (rows,)" in refused(make(), y, **how)


@pytest.mark.parametrize("loss", ["mse", "mae", "huber", "binary_crossentropy"])
def test_a_mean_over_rows_passes_with_outputs_of_one_axis(loss):
    model = flat(loss)
    model._symbolic_build(data_batch=(X, BINARY))
    check_exact(model, 2, Batch(X, BINARY, None, 16, 16))


@pytest.mark.parametrize(
    "make",
    [
        lambda: sequence(layers.Dense(3), layers.Softmax(axis=-2)),
        lambda: sequence(layers.Dense(3), layers.UnitNormalization(axis=-2), layers.Dense(3)),
        lambda: sequence(layers.Dense(3), layers.Dense(3), layers.UnitNormalization(axis=[-2, -1])),
        lambda: sequence(layers.Dense(1), layers.Reshape(()), layers.Softmax(), layers.Reshape((1,)), layers.Dense(3)),
    ],
)
def test_an_axis_of_the_rows_that_counts_from_the_end_is_refused(make):
    assert "is not a mean over the rows" in refused(make(), RNG.normal(size=(16, 3)).astype("float32"))


def test_axes_within_a_row_need_no_trial():
    token = keras.Input((), dtype="int32")
    grid = layers.Softmax(axis=-2)(layers.Reshape((2, 3))(layers.Dense(6)(layers.Embedding(9, 4)(token))))
    for each in (
        layers.LayerNormalization(axis=[1, 2]),
        layers.BatchNormalization(),
        layers.MultiHeadAttention(2, 3),
        layers.Bidirectional(layers.GRU(3)),
    ):
        grid = each(grid, grid) if isinstance(each, layers.MultiHeadAttention) else each(grid)
    model = keras.Model(token, layers.Dot(axes=-1)([grid, grid]))
    model.compile("sgd", "mse")
    assert plain(model)


def test_an_einsum_over_the_rows_is_no_operation_of_rows():
    inputs = keras.Input((6,), batch_size=6)
    mixing = keras.Model(inputs, layers.EinsumDense("ab,ac->cb", output_shape=(6,))(inputs))
    mixing.compile("sgd", "mse")
    assert not plain(mixing)


@pytest.mark.parametrize(("metric", "adds"), [("binary_crossentropy", False), ("mae", False), ("AUC", True)])
def test_a_metric_of_outputs_with_one_axis_counts_batches(metric, adds):
    model = flat("mse", [metric])
    model._symbolic_build(data_batch=(X, BINARY))
    if adds:
        assert not not_additive(model, Batch(X, BINARY, None, 16, 16))
        return
    with pytest.warns(UserWarning, match="does not add up"):
        assert not_additive(model, Batch(X, BINARY, None, 16, 16))
