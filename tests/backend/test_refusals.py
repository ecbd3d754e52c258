"""AllReduce refuses, by name, models that it could not train exactly, and accepts all others."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import choros
from choros.backends import make_replica
from choros.backends.loss_exactness import check_exact
from choros.errors import InexactLossError, InvalidInputError
from choros.types import Batch

pytestmark = [
    # Keras' Variable.__array__ has no copy keyword; numpy 2 says so when a variable is read.
    pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning"),
]

layers = keras.layers


def test_what_is_not_exact_is_refused_by_name(lab):
    mse = keras.losses.MeanSquaredError
    bad = {
        "reduction=None": lab.compiled(lab.dense(), "sgd", mse(reduction=None)),
        "Circle|circle": lab.compiled(lab.dense(), "sgd", keras.losses.Circle()),
        "regularisers": lab.compiled(lab.dense(l2="l2"), "sgd", mse(reduction="sum")),
        "several losses": lab.compiled(lab.many(), "sgd", {"kind": mse(reduction="sum"), "size": "mse"}),
    }
    for message, model in bad.items():
        with pytest.raises(InexactLossError, match=message):
            check_exact(model)
    check_exact(lab.compiled(lab.dense(l2="l2"), "sgd", mse(reduction="sum")), workers=1)
    for make, *_ in lab.CASES.values():
        check_exact(make())


def test_refusals_are_for_reduced_steps_only(lab):
    def make():
        return lab.compiled(lab.dense(l2="l2", out=2), "sgd", keras.losses.MeanSquaredError(reduction="sum"))

    replica = lab.ranks_of(make, 2, lab.X, lab.SOFT, None)[0]
    batch = Batch(lab.X[:4], lab.SOFT[:4], None, 4, 8)
    replica.step(batch)
    replica.evaluate(batch)
    with pytest.raises(InexactLossError, match="regularisers"):
        replica.gradients(batch, np.empty(replica.size + 2, replica.dtype))


def scalar_mean(y_true, y_pred):
    return keras.ops.mean(keras.ops.square(y_true - y_pred))


def scalar_root(y_true, y_pred):
    return keras.ops.sqrt(keras.ops.mean(keras.ops.square(y_true - y_pred)))


def across_rows(y_true, y_pred):
    return keras.ops.mean(keras.ops.square(y_pred - keras.ops.mean(y_pred, axis=0)) + y_true * y_pred, axis=-1)


@pytest.mark.parametrize(
    ("loss", "weighted", "exact"),
    [
        (scalar_mean, False, True),
        (scalar_mean, True, False),  # Keras multiplies it by the mean of the weights
        (scalar_root, False, False),
        (across_rows, False, False),
        (keras.losses.Dice(), False, False),
        (keras.losses.Dice(axis=1), False, True),
        (keras.losses.Tversky(), False, False),
        (lambda y, p: keras.ops.mean(keras.ops.abs(y - p), axis=-1), True, True),
        ("mse", True, True),
    ],
)
def test_losses_that_are_not_keras_own_are_tried(lab, loss, weighted, exact):
    weight = lab.WEIGHT if weighted else None

    def make():
        return lab.compiled(lab.dense(out=2, activation="sigmoid"), "sgd", loss)

    replica = lab.ranks_of(make, 1, lab.X, lab.BINARY.repeat(2, 1), weight, workers=2)[0]
    batch = Batch(lab.X[:4], lab.BINARY[:4].repeat(2, 1), lab.cut(weight, slice(4)), 4, 8)
    slot = np.empty(replica.size + 2, replica.dtype)
    if exact:
        check_exact(replica.model, 2, batch)
        replica.gradients(batch, slot)
        assert slot[-1] == 4
    else:
        with pytest.raises(InexactLossError, match="not the mean of its rows"):
            check_exact(replica.model, 2, batch)
        with pytest.raises(InexactLossError, match="not the mean of its rows"):
            replica.gradients(batch, slot)


def two_masked_outputs(lab):
    tokens = keras.Input((5,), dtype="int32")
    hidden = layers.Embedding(9, 4, mask_zero=True)(tokens)
    return lab.compiled(keras.Model(tokens, [layers.Dense(3)(hidden), layers.Dense(3)(hidden)]), "sgd", ["mse", "mae"])


def masked_and_regularised(lab):
    model = lab.tagger()
    model.layers[-1].activity_regularizer = keras.regularizers.L2(0.1)
    return lab.compiled(model, "sgd", "sparse_categorical_crossentropy")


@pytest.mark.parametrize(
    ("make", "message"),
    [(two_masked_outputs, "several losses"), (masked_and_regularised, "activity regulariser")],
)
def test_divisors_that_do_not_agree_are_refused(lab, make, message):
    y = [np.ones((lab.ROWS, 5, 3), "float32")] * 2 if make is two_masked_outputs else lab.TAGS
    replica = lab.ranks_of(lambda: make(lab), 2, lab.TOKENS, y, None)[0]
    batch = Batch(lab.TOKENS[:4], lab.cut(y, slice(4)), None, 4, 8)
    with pytest.raises(InexactLossError, match=message):
        replica.gradients(batch, np.empty(replica.size + 2, replica.dtype))


def test_an_uncompiled_model_is_refused(lab):
    with pytest.raises(InvalidInputError, match=r"model\.compile"):
        make_replica(lab.dense())


class ClippedGradients(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, x, training=False):
        return self.dense(x)

    def clip(self, gradients):
        norm = keras.ops.sqrt(sum(keras.ops.sum(keras.ops.square(gradient)) for gradient in gradients))
        return [gradient * keras.ops.minimum(1.0, 0.01 / norm) for gradient in gradients]

    def train_step(self, *step):
        return getattr(self, f"step_on_{keras.backend.backend()}")(*step)

    def step_on_torch(self, data):
        import torch

        x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
        self.zero_grad()
        loss = self.compute_loss(x, y, self(x, training=True), weight)
        loss.backward()
        gradients = self.clip([variable.value.grad for variable in self.trainable_weights])
        with torch.no_grad():
            self.optimizer.apply(gradients, self.trainable_weights)
        return {"loss": loss}

    def step_on_tensorflow(self, data):
        import tensorflow as tf

        x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True), weight)
        gradients = tape.gradient(loss, self.trainable_weights)
        self.optimizer.apply_gradients(zip(self.clip(gradients), self.trainable_weights, strict=True))
        return {"loss": loss}

    def step_on_jax(self, state, data):
        import jax

        trained, others, slots, metrics = state
        x, y, weight = keras.utils.unpack_x_y_sample_weight(data)

        def loss_of(trained):
            predicted, changed = self.stateless_call(trained, others, x, training=True)
            return self.compute_loss(x, y, predicted, weight), changed

        (loss, changed), gradients = jax.value_and_grad(loss_of, has_aux=True)(trained)
        trained, slots = self.optimizer.stateless_apply(slots, self.clip(gradients), trained)
        return {"loss": loss}, (trained, changed, slots, metrics)


def test_a_step_that_clips_gradients_is_refused_in_words_of_gradients():
    model = ClippedGradients()
    model.compile("sgd", "mse")
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(64, 3)).astype("float32"), rng.normal(size=(64, 1)).astype("float32")
    with pytest.raises(InexactLossError, match=r"clipping.*clipnorm"):
        choros.Trainer(model, "allreduce", workers=2).fit(x, y, batch_size=16, verbose=0)
