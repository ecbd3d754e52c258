"""The trial of AllReduce on a few rows: losses that are not means over rows are refused, whatever they come from."""

from __future__ import annotations

import warnings

import keras
import numpy as np
import pytest

from choros.backends.loss_exactness import check_exact
from choros.errors import InexactLossError
from choros.types import Batch

ops, layers = keras.ops, keras.layers
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning")

RNG = np.random.default_rng(3)
X = RNG.normal(size=(16, 6)).astype("float32")
Y = RNG.normal(size=(16, 2)).astype("float32")
LATE = np.where(np.arange(16)[:, None] < 12, 1.0, np.arange(2) < 1).astype("float32")  # padding in the last rows only


def batch(x=X, y=Y, weight=None):
    return Batch(x, y, weight, rows=len(y), total=len(y))


def functional(*between, out=2):
    inputs = keras.Input((6,))
    hidden = layers.Dense(7, "relu")(inputs)
    for layer in between:
        hidden = layer(hidden)
    return inputs, layers.Dense(out)(hidden)


def model_of(kind=keras.Model, *between, loss="mse", **how):
    keras.utils.set_random_seed(1)
    model = kind(*functional(*between))
    model.compile("sgd", loss, **how)
    model.build((None, 6))
    model._symbolic_build(data_batch=(X, Y))
    return model


class Sums(keras.Model):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return ops.sum(ops.square(y - ops.cast(y_pred, y.dtype)))


class DeclaredSum(Sums):
    loss_divisor = None


class Contrastive(keras.Model):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        a, b = ops.normalize(y_pred), ops.normalize(ops.cast(y, y_pred.dtype))
        logits = ops.matmul(a, ops.transpose(b)) / 0.1
        labels = ops.arange(ops.shape(logits)[0])
        return ops.mean(keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True))


class MaskedMean(keras.Model):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        mask = ops.cast(ops.not_equal(y, 0), y_pred.dtype)
        return ops.sum(mask * ops.square(y - y_pred)) / ops.sum(mask)


class DeclaredMean(MaskedMean):
    def loss_divisor(self, x, y, y_pred, sample_weight):
        return ops.sum(ops.cast(ops.not_equal(y, 0), "float32"))


class WronglyDeclared(MaskedMean):
    def loss_divisor(self, x, y, y_pred, sample_weight):
        return 5.0


class MeanOfRows(keras.Model):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        fixed = 0.1 * ops.sum(ops.square(self.trainable_variables[0]))
        return ops.mean(ops.square(y - ops.cast(y_pred, y.dtype))) + fixed


class AddsSum(layers.Layer):
    def call(self, inputs):
        self.add_loss(0.1 * ops.sum(ops.square(inputs)))
        return inputs


class AddsMean(layers.Layer):
    def call(self, inputs):
        self.add_loss(0.1 * ops.mean(ops.square(inputs)))
        return inputs


class AddsMaskedMean(layers.Layer):
    """Divides by the valid entries: here those above zero."""

    def call(self, inputs):
        valid = ops.cast(inputs > 0.3, inputs.dtype)
        self.add_loss(0.5 * ops.sum(valid * ops.square(inputs)) / ops.maximum(ops.sum(valid), 1.0))
        return inputs


class AddsSquare(layers.Layer):
    """A statistic of the batch: the square of a mean, as in a sparsity penalty."""

    def call(self, inputs):
        self.add_loss(30 * ops.square(ops.mean(inputs)))
        return inputs


class Sampling(layers.Layer):
    """As in the VAE of keras.io."""

    def __init__(self, **how):
        super().__init__(**how)
        self.seed = keras.random.SeedGenerator(5)

    def call(self, inputs):
        shape = ops.shape(inputs)
        self.add_loss(ops.mean(ops.sum(ops.square(inputs), axis=1)))
        return inputs + keras.random.normal(shape, seed=self.seed)


class Balance(layers.Layer):
    """The load-balancing loss of a mixture of experts: a product of two means over the batch."""

    def __init__(self, **how):
        super().__init__(**how)
        self.gate = layers.Dense(4, "softmax")

    def call(self, inputs):
        gates = self.gate(inputs)
        chosen = ops.one_hot(ops.argmax(gates, axis=-1), 4)
        self.add_loss(4 * ops.sum(ops.mean(chosen, axis=0) * ops.mean(gates, axis=0)))
        return inputs * ops.max(gates, axis=-1, keepdims=True)


class Mixing(layers.Layer):
    def call(self, inputs):
        return inputs - ops.mean(inputs, axis=0, keepdims=True)


class Foreign(layers.Layer):
    """Keras knows nothing of these numbers."""

    def call(self, inputs):
        backend = keras.backend.backend()
        if backend == "torch":
            import torch

            noise = torch.randn(inputs.shape)
        elif backend == "tensorflow":
            import tensorflow as tf

            noise = tf.random.normal(ops.shape(inputs))
        else:
            import jax

            noise = jax.random.normal(jax.random.key(0), inputs.shape)
        return inputs + noise


class Masked(keras.losses.Loss):
    def call(self, y_true, y_pred):
        mask = ops.cast(ops.not_equal(y_true, 0), y_pred.dtype)
        return ops.sum(mask * ops.square(y_true - y_pred)) / ops.sum(mask)


class MaskedDeclared(Masked):
    def divisor(self, y_true, y_pred, sample_weight):
        return ops.sum(ops.cast(ops.not_equal(y_true, 0), "float32"))


@pytest.mark.parametrize(
    ("named", "make"),
    [
        ("Sums.compute_loss", lambda: model_of(Sums)),
        ("Contrastive.compute_loss", lambda: model_of(Contrastive)),
        ("MaskedMean.compute_loss", lambda: model_of(MaskedMean)),
        ("WronglyDeclared.compute_loss", lambda: model_of(WronglyDeclared)),
        ("AddsSum 'adding' gives to add_loss", lambda: model_of(keras.Model, AddsSum(name="adding"))),
        ("The loss of model", lambda: model_of(keras.Model, Mixing())),
        ("cosine_similarity", lambda: model_of(loss=keras.losses.CosineSimilarity(axis=0))),
        ("masked", lambda: model_of(loss=Masked(name="masked"))),
        ("AddsSum 'adding'", lambda: model_of(keras.Model, AddsSum(name="adding"), layers.Dropout(0.5))),
        ("AddsMaskedMean 'masked' gives", lambda: model_of(keras.Model, AddsMaskedMean(name="masked"))),
    ],
)
def test_a_loss_that_is_no_mean_over_rows_is_refused_by_name(named, make):
    with pytest.raises(InexactLossError, match=named):
        check_exact(make(), 2, batch(y=Y * LATE))


@pytest.mark.parametrize("seed", [1, 1001, 1041])
def test_a_masked_mean_is_found_among_layers_that_may_stay(seed):
    """With the last two seeds the halves that differ most have equally many valid entries."""
    keras.utils.set_random_seed(seed)
    among = Balance(), AddsMaskedMean(name="masked"), layers.BatchNormalization(), Sampling()
    with pytest.raises(InexactLossError, match="AddsMaskedMean 'masked' gives"):
        check_exact(model_of(keras.Model, *among), 2, batch(y=Y * LATE))


@pytest.mark.parametrize(
    "make",
    [
        lambda: model_of(),
        lambda: model_of(MeanOfRows),
        lambda: model_of(DeclaredSum),
        lambda: model_of(DeclaredMean),
        lambda: model_of(loss=MaskedDeclared()),
        lambda: model_of(keras.Model, AddsMean()),
        lambda: model_of(keras.Model, Sampling()),
        lambda: model_of(MeanOfRows, layers.BatchNormalization(), layers.Dropout(0.5, seed=2), layers.Dropout(0.5)),
        lambda: model_of(MeanOfRows, layers.GaussianNoise(0.3), Sampling()),
    ],
)
def test_what_is_a_mean_or_says_what_it_divides_by_passes_without_a_word(make):
    model = make()
    before = [ops.convert_to_numpy(v).copy() for v in model.variables]
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        check_exact(model, 2, batch(y=Y * LATE))
    for variable, value in zip(model.variables, before, strict=True):
        np.testing.assert_array_equal(ops.convert_to_numpy(variable), value)


@pytest.mark.parametrize("seed", range(4))
def test_a_mask_of_which_both_halves_have_as_much_is_found(seed):
    x = np.random.default_rng(seed).normal(size=X.shape).astype("float32")
    x[8:] = -x[:8]  # the first and the last half have equally many valid entries where a mask is of the sign
    x[:, 0] = np.tile([1, 1, 1, -1], 4) * np.abs(x[:, 0])

    class Masks(layers.Layer):
        def call(self, inputs):
            valid = ops.cast(inputs[:, :1] > 0, inputs.dtype)
            self.add_loss(ops.sum(valid * ops.square(inputs)) / ops.sum(valid))
            return inputs

    keras.utils.set_random_seed(1)
    inputs = keras.Input((6,))
    model = keras.Model(
        inputs,
        layers.Dense(2)(
            layers.Dense(7)(
                Masks(name="masks")(layers.EinsumDense("ab,b->ab", (6,), kernel_initializer="ones")(inputs))
            )
        ),
    )
    model.compile("sgd", "mse")
    model._symbolic_build(data_batch=(x, Y))
    with pytest.raises(InexactLossError, match="'masks' gives"):
        check_exact(model, 2, batch(x=x))


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_mixed_precision_passes_and_hides_nothing(policy):
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    try:
        model = model_of(MeanOfRows, layers.Dropout(0.5))
        wrong = model_of(Sums)
    finally:
        keras.config.set_dtype_policy(before)
    check_exact(model, 2, batch())
    with pytest.raises(InexactLossError, match="Sums"):
        check_exact(wrong, 2, batch())


@pytest.mark.parametrize("kind", [Balance, AddsSquare])
def test_a_balancing_loss_passes_with_a_warning(kind):
    output = []
    for seed in range(5):  # where both halves have the same statistics by chance, there is nothing to say
        x = np.random.default_rng(seed).normal(size=X.shape).astype("float32")
        keras.utils.set_random_seed(seed)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            check_exact(model_of(keras.Model, kind()), 2, batch(x=x))
        output += [str(each.message) for each in caught if each.category is UserWarning]
    assert output
    assert all(f"{kind.__name__} " in each and "depends on a batch as a whole" in each for each in output)


def test_random_numbers_that_hide_the_answer_are_warned_about():
    model = model_of(MeanOfRows, Foreign())
    with pytest.warns(UserWarning, match="draws random numbers"):
        check_exact(model, 2, batch())


class HalfPrecisionWeight(layers.Layer):
    def build(self, shape):
        self.factors = self.add_weight(shape=(7,), dtype="bfloat16")

    def call(self, inputs):
        return inputs * ops.cast(self.factors, inputs.dtype)


def test_the_rounding_of_a_weight_of_16_bits_among_others_passes():
    check_exact(model_of(keras.Model, HalfPrecisionWeight()), 2, batch())


class Annealed(layers.Layer):
    """Its factor falls with each call."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def call(self, inputs):
        self.calls += 1
        return inputs / (1 + 0.5 * self.calls)


class AnnealedLoss:
    __name__ = "annealed"

    def __init__(self):
        self.calls = 0

    def __call__(self, y, p):
        self.calls += 1
        return ops.mean(ops.square(y - p), -1) / (1 + 0.5 * self.calls)


def test_a_number_that_each_call_changes_is_as_before_and_refuses_nothing():
    layer, loss = Annealed(), AnnealedLoss()
    model = model_of(keras.Model, layer)
    model.compile("sgd", loss)
    model._symbolic_build(data_batch=(X, Y))
    before = layer.calls, loss.calls
    check_exact(model, 2, batch())
    assert (layer.calls, loss.calls) == before
