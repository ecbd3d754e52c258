"""A loss whose padding begins late is refused: at the start by rows of the whole set, in a stream while it trains."""

import keras
import numpy as np
import pytest

import choros
from choros.backend import recheck
from choros.errors import NotExact, WorkerFailed

RNG = np.random.default_rng(0)


class MaskedMean(keras.Model):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        mask = keras.ops.cast(keras.ops.not_equal(y, 0), "float32")
        return keras.ops.sum(mask * keras.ops.square(y - y_pred)) / keras.ops.sum(mask)


class Declared(MaskedMean):
    def loss_divisor(self, x, y, y_pred, sample_weight):
        return keras.ops.sum(keras.ops.cast(keras.ops.not_equal(y, 0), "float32"))


def make(kind=MaskedMean, dropout=0.0):
    keras.utils.set_random_seed(0)
    inputs = keras.Input((4,))
    hidden = keras.layers.Dropout(dropout, seed=3)(keras.layers.Dense(6, "relu")(inputs))
    model = kind(inputs, keras.layers.Dense(3)(hidden))
    model.compile("sgd")
    return model


def rows(count, padded_from):
    x, y = RNG.normal(size=(count, 4)).astype("float32"), RNG.normal(size=(count, 3)).astype("float32")
    y[padded_from:, 1:] *= RNG.random((count - padded_from, 1)) < 0.5
    return x, y


def test_padding_in_the_last_rows_is_found_at_the_start():
    x, y = rows(4000, 3950)
    with pytest.raises(NotExact, match=r"MaskedMean\.compute_loss"):
        choros.Trainer(make(), workers=2).fit(x, y, batch_size=40, verbose=0)


def test_a_declared_divisor_equals_one_process():
    x, y = rows(96, 40)
    plain, model = make(Declared), make(Declared)
    plain.fit(x, y, batch_size=14, shuffle=False, verbose=0)
    history = choros.Trainer(model, workers=2).fit(x, y, batch_size=14, shuffle=False, verbose=0)
    for ours, theirs in zip(model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)
    assert np.isfinite(history.history["loss"]).all()


@pytest.mark.parametrize(("kind", "dropout"), [(MaskedMean, 0.0), (MaskedMean, 0.5), (Declared, 0.5)])
def test_the_second_look_sees_through_dropout(kind, dropout):
    from choros.backend import make_replica
    from choros.types import Batch

    model = make(kind, dropout)
    model._symbolic_build(data_batch=rows(8, 8))
    replica = make_replica(model, 2)
    even = rows(16, 16)
    replica.build(Batch(*even, None, 16, 16))
    look = recheck.Recheck(replica, 0, 2).look
    assert look(Batch(*even, None, 16, 16)) is None
    x, y = even
    padded = np.where(np.arange(16)[:, None] < 8, y, y * [1, 0, 0]).astype("float32")
    found = look(Batch(x, padded, None, 16, 16))
    assert (found is None) == (kind is Declared)


def test_a_stream_whose_padding_begins_late_ends_with_the_weights():
    x, y = rows(16 * 1200, 16 * 800)

    def batches():
        for start in range(0, len(x), 16):
            yield x[start : start + 16], y[start : start + 16]

    with pytest.raises(WorkerFailed, match=r"NotExact.*MaskedMean\.compute_loss") as error:
        choros.Trainer(make(), workers=2).fit(batches(), steps_per_epoch=1200, verbose=0)
    assert [w.shape for w in error.value.weights] == [(4, 6), (6,), (6, 3), (3,)]
