"""A loss whose padding begins late is refused: at the start by rows of the whole set, in a stream while it trains."""

import keras
import numpy as np
import pytest

import choros
from choros.backends import make_replica
from choros.backends.loss_recheck import Recheck
from choros.errors import InexactLossError, WorkerFailedError
from choros.types import Batch

RNG = np.random.default_rng(0)


class MaskedMean(keras.Model):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        mask = keras.ops.cast(keras.ops.not_equal(y, 0), "float32")
        return keras.ops.sum(mask * keras.ops.square(y - y_pred)) / keras.ops.sum(mask)


class Declared(MaskedMean):
    def loss_divisor(self, x, y, y_pred, sample_weight):
        return keras.ops.sum(keras.ops.cast(keras.ops.not_equal(y, 0), "float32"))


class Mean(keras.Model):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return keras.ops.mean(keras.ops.square(y - y_pred)) + sum(self.losses)


class Balance(keras.layers.Layer):
    """The load-balancing loss of a mixture of experts: a product of two means over the batch."""

    def __init__(self, **how):
        super().__init__(**how)
        self.gate = keras.layers.Dense(4, "softmax")

    def call(self, inputs):
        gates = self.gate(inputs)
        chosen = keras.ops.one_hot(keras.ops.argmax(gates, axis=-1), 4)
        self.add_loss(4 * keras.ops.sum(keras.ops.mean(chosen, axis=0) * keras.ops.mean(gates, axis=0)))
        return inputs * keras.ops.max(gates, axis=-1, keepdims=True)


class Sampling(keras.layers.Layer):
    """As in the VAE of keras.io."""

    def __init__(self, **how):
        super().__init__(**how)
        self.seed = keras.random.SeedGenerator(5)

    def call(self, inputs):
        self.add_loss(keras.ops.mean(keras.ops.sum(keras.ops.square(inputs), axis=1)))
        return inputs + keras.random.normal(keras.ops.shape(inputs), seed=self.seed)


def make(kind=MaskedMean, dropout=0.0, normalised=False, between=()):
    keras.utils.set_random_seed(0)
    inputs = keras.Input((4,))
    hidden = keras.layers.Dropout(dropout, seed=3)(keras.layers.Dense(6, "relu")(inputs))
    for layer in [*between, *([keras.layers.BatchNormalization()] if normalised else [])]:
        hidden = layer(hidden)
    model = kind(inputs, keras.layers.Dense(3)(hidden))
    model.compile("sgd")
    return model


def rows(count, padded_from):
    x, y = RNG.normal(size=(count, 4)).astype("float32"), RNG.normal(size=(count, 3)).astype("float32")
    y[padded_from:, 1:] *= RNG.random((count - padded_from, 1)) < 0.5
    return x, y


def test_padding_in_the_last_rows_is_found_at_the_start():
    x, y = rows(4000, 3950)
    with pytest.raises(InexactLossError, match=r"MaskedMean\.compute_loss"):
        choros.Trainer(make(), workers=2).fit(x, y, batch_size=40, verbose=0)


def test_a_declared_divisor_equals_one_process():
    x, y = rows(96, 40)
    plain, model = make(Declared), make(Declared)
    plain.fit(x, y, batch_size=14, shuffle=False, verbose=0)
    history = choros.Trainer(model, workers=2).fit(x, y, batch_size=14, shuffle=False, verbose=0)
    for ours, expected in zip(model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(ours, expected, atol=1e-6)
    assert np.isfinite(history.history["loss"]).all()


def batch(x, y=None):
    return Batch(x, y, None, len(x), len(x))


def built(model, first):
    model._symbolic_build(data_batch=(first.x,) if first.y is None else (first.x, first.y))
    replica = make_replica(model, 2)
    replica.build(first)
    return replica


def kept(replica):
    """All that a check could change: variables, metrics, seeds and the framework's generators."""
    held = [*replica.model.variables, *replica.metric_variables]
    return [np.array(value) for value in (*replica._values(held), *replica.generators())]


@pytest.mark.parametrize(("kind", "dropout"), [(MaskedMean, 0.0), (MaskedMean, 0.5), (Declared, 0.5)])
@pytest.mark.parametrize("normalised", [False, True])
def test_a_late_check_sees_through_dropout_and_batch_normalisation(kind, dropout, normalised):
    even = rows(16, 16)
    replica = built(make(kind, dropout, normalised), batch(*even))
    replica.gradients(batch(*even), np.zeros(replica.size + 2, replica.dtype))
    before = kept(replica)
    check = Recheck(replica, 0, 2)
    look = check.tests["labels" if normalised else "rows"]
    assert look(batch(*even)) is None
    x, y = even
    padded = batch(x, np.where(np.arange(16)[:, None] < 8, y, y * [1, 0, 0]).astype("float32"))
    assert (look(padded) is None) == (kind is Declared)
    if kind is Declared:
        check.decide(padded)
    else:
        with pytest.raises(InexactLossError, match=r"MaskedMean\.compute_loss"):
            check.decide(padded)
    for value, old in zip(kept(replica), before, strict=True):
        np.testing.assert_array_equal(value, old)


@pytest.mark.filterwarnings("error::UserWarning")
def test_what_couples_rows_and_passes_before_training_passes_later():
    x, y = rows(16, 16)
    for layers in (
        [Balance()],
        [Balance(), keras.layers.BatchNormalization()],
        [Sampling(), keras.layers.Dropout(0.5)],
    ):
        replica = built(make(Mean, between=layers), batch(x, y))
        check = Recheck(replica, 0, 2, 460, Clock(1.0))
        for epoch in range(0, 6, 2):
            for _ in range(460):
                check(batch(x, y), epoch)
        assert sum(check.counts.values()) >= 3
        assert check.counts.get("labels" if Balance in map(type, layers) else "rows")
    replica = built(make(Mean, between=[Balance()]), batch(x, y))
    assert Recheck(replica, 0, 2).look_at_rows(batch(x, y)) is not None  # only a suspicion


class Clock:
    """A clock that moves by so much whenever it is read."""

    def __init__(self, tick=0.0):
        self.now, self.tick = 0.0, tick

    def __call__(self):
        self.now += self.tick
        return self.now


@pytest.mark.parametrize("length", [None, 50, 500, 5000])
def test_checks_take_one_percent_and_come_in_each_epoch_that_is_long_enough(length):
    x, y = rows(8, 8)
    steps, cost, step = length or 700, 0.004, 0.001
    done: list[list[tuple[int, int]]] = []
    for rank in (0, 1):
        clock = Clock()
        check = Recheck(built(make(), batch(x, y)), rank, 2, length, clock)
        done.append([])

        def test(_, clock=clock, check=check, done=done):
            clock.now += cost
            done[-1].append((check.epoch, check.step))

        check.tests = {"rows": test}
        for epoch in range(40):
            for _ in range(steps):
                check(batch(x, y), epoch)
                clock.now += step
    every = [place for one_rank in done for place in one_rank]
    assert len(every) * cost <= 0.0101 * 40 * steps * step
    if steps >= 500:
        assert {epoch for epoch, _ in every} >= set(range(2, 40))  # the guess of the first two is higher than the cost
        assert len({number for _, number in every}) > 20  # at another step each time
    else:
        assert len(every) >= 2  # time is saved up over epochs


@pytest.mark.parametrize(("normalised", "devices"), [(False, 1), (True, 1), (True, 2)])
def test_a_stream_whose_padding_begins_late_ends_with_the_weights(normalised, devices):
    x, y = rows(16 * 1000, 16 * 200)

    def batches():
        for start in range(0, len(x), 16):
            yield x[start : start + 16], y[start : start + 16]

    trainer = choros.Trainer(make(normalised=normalised), workers=2, devices_per_worker=devices)
    with pytest.raises(WorkerFailedError, match=r"InexactLossError.*MaskedMean\.compute_loss") as error:
        trainer.fit(batches(), steps_per_epoch=1000, verbose=0)
    assert [w.shape for w in error.value.weights][:2] == [(4, 6), (6,)]


class Halves(keras.utils.PyDataset):
    """From the middle of the data on, padding in the rows that one of two workers has."""

    def __init__(self):
        super().__init__()
        self.x, self.y = RNG.normal(size=(640, 4)).astype("float32"), RNG.normal(size=(640, 3)).astype("float32")
        place = np.arange(640)
        self.y[(place >= 320) & (place % 16 < 8), 1:] = 0

    def __len__(self):
        return 40

    def __getitem__(self, index):
        part = slice(16 * index, 16 * index + 16)
        return self.x[part], self.y[part]


def test_padding_in_later_batches_of_a_dataset_is_found_at_the_start():
    with pytest.raises(InexactLossError, match=r"MaskedMean\.compute_loss"):
        choros.Trainer(make(), workers=2).fit(Halves(), shuffle=False, verbose=0)


@pytest.mark.parametrize("steps", [40, None])
def test_a_short_stream_is_checked_before_it_ends(steps):
    data = Halves()

    def batches():
        yield from map(data.__getitem__, range(40))

    with pytest.raises(WorkerFailedError, match=r"InexactLossError.*MaskedMean\.compute_loss") as error:
        choros.Trainer(make(), workers=2).fit(batches(), steps_per_epoch=steps, verbose=0)
    assert [w.shape for w in error.value.weights][:2] == [(4, 6), (6,)]


@pytest.mark.parametrize(("algorithm", "workers"), [("allreduce", 1), ("localsgd", 2), ("aeasgd", 2)])
def test_devices_that_divide_the_rows_of_a_worker_are_checked(algorithm, workers):
    data = Halves()

    def batches():
        for index in range(40):
            x, y = data[index]
            yield x, np.where(np.arange(16)[:, None] % 8 < 4, y, y * [1, 0, 0] if index >= 20 else y)

    trainer = choros.Trainer(make(), algorithm, workers=workers, devices_per_worker=2)
    if keras.backend.backend() == "jax":  # one program spans the devices: it divides by what is in the whole batch
        trainer.fit(batches(), steps_per_epoch=40, verbose=0)
        return
    with pytest.raises(WorkerFailedError, match=r"InexactLossError.*MaskedMean\.compute_loss"):
        trainer.fit(batches(), steps_per_epoch=40, verbose=0)


def test_the_last_epoch_of_a_stream_is_checked_too():
    x, y = rows(16, 16)
    padded = np.where(np.arange(16)[:, None] < 8, y, y * [1, 0, 0]).astype("float32")
    replica = built(make(normalised=True), batch(x, y))
    check = Recheck(replica, 0, 2)
    check(batch(x, y), 0)
    check.end()
    check(batch(x, padded), 1)
    with pytest.raises(InexactLossError, match=r"MaskedMean\.compute_loss"):
        check.finish()


@pytest.mark.parametrize("count", [1, 2, 3])
def test_few_rows_are_checked_with_those_of_the_first_batch(count):
    x, y = rows(3, 3)
    replica = built(make(), batch(x[:count], y[:count]))
    check = Recheck(replica, 0, 2)
    check(batch(x[:count], y[:count]), 0)
    check(batch(x[:count], (y * [1, 0, 0]).astype("float32")[:count]), 0)
    with pytest.raises(InexactLossError, match=r"MaskedMean\.compute_loss"):
        check.end()
