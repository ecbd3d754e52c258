"""Vectors, snapshots, seeds, learning rate, momentum and metrics of every replica."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import keras
import numpy as np
import pytest

from choros.backends import make_replica
from choros.types import Batch

pytestmark = [
    # Keras' Variable.__array__ has no copy keyword; numpy 2 says so when a variable is read.
    pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning"),
]

layers = keras.layers


def test_vectors_are_copied_both_ways(lab):
    (replica,) = lab.ranks_of(lab.adam_l2, 1, lab.X, lab.LABEL, lab.WEIGHT)
    vector = np.arange(replica.size, dtype=replica.dtype)
    replica.set(vector)
    saved = vector.copy()
    vector[:] = -1
    out = np.empty(replica.size, replica.dtype)
    replica.get(out)
    np.testing.assert_array_equal(out, saved)
    replica.step(next(lab.shares(lab.X, lab.LABEL, lab.WEIGHT, 1))[0])
    np.testing.assert_array_equal(out, saved)
    slot = np.empty(replica.size + 2, replica.dtype)
    replica.gradients(next(lab.shares(lab.X, lab.LABEL, lab.WEIGHT, 1))[0], slot)
    replica.apply(slot)
    replica.get(out)
    slot[:] = np.nan
    repeated = np.empty_like(out)
    replica.get(repeated)
    np.testing.assert_array_equal(repeated, out)


def test_a_batch_made_ready_in_another_thread_is_the_same_batch(lab):
    (first,), (other,) = (lab.ranks_of(lab.adam_l2, 1, lab.X, lab.LABEL, lab.WEIGHT) for _ in range(2))
    other.restore(first.snapshot())
    for (batch,) in list(lab.shares(lab.X, lab.LABEL, lab.WEIGHT, 1))[:3]:
        with ThreadPoolExecutor(1) as thread:
            ready = thread.submit(other.ready, batch).result(60)
        assert not any(isinstance(leaf, np.ndarray) for leaf in keras.tree.flatten(ready.packed))
        first.step(batch)
        other.step(ready)
        slots = np.empty((2, first.size + 2), first.dtype)
        first.gradients(batch, slots[0])
        other.gradients(ready, slots[1])
        np.testing.assert_array_equal(*slots)
        first.evaluate(batch)
        other.evaluate(ready)
    np.testing.assert_array_equal(first.metric_state(), other.metric_state())
    for value, expected in zip(first.snapshot(), other.snapshot(), strict=True):
        np.testing.assert_array_equal(value, expected)


def test_snapshot_and_restore_are_in_keras_order(lab):
    first, second = (make_replica(lab.fresh(lab.adam_l2)) for _ in range(2))
    batches = [split[0] for split in lab.shares(lab.X, lab.LABEL, lab.WEIGHT, 1)]
    for replica in (first, second):
        replica.build(batches[0])
    first.step(batches[0])
    state = first.snapshot()
    first.step(batches[1])
    second.restore(state)
    second.step(batches[1])
    single, other = first.snapshot(), second.snapshot()
    assert len(single) == len(first.model.variables) + len(first.model.optimizer.variables)
    assert all((a == b).all() for a, b in zip(single, other, strict=True))
    assert not all((a == b).all() for a, b in zip(single, state, strict=True))
    first.finish()
    for array, variable in zip(single, first.model.variables, strict=False):
        np.testing.assert_array_equal(array, keras.ops.convert_to_numpy(variable))


def normed():
    frozen = layers.Dense(4, trainable=False)
    model = keras.Sequential([keras.Input((6,)), frozen, layers.BatchNormalization(), layers.Dropout(0.5)])
    model.add(layers.GaussianNoise(0.1))
    model.add(layers.Dense(2))
    model.compile("adam", "mse")
    return model


def test_moving_statistics_are_apart_from_weights_and_seeds(lab):
    (replica,) = lab.ranks_of(normed, 1, lab.X, lab.SOFT, None)
    assert replica.statistics_size == 8
    assert replica.size == 8 + 10
    replica.set_statistics(np.arange(8, dtype=replica.dtype))
    out = np.empty(8, replica.dtype)
    replica.get_statistics(out)
    np.testing.assert_array_equal(out, np.arange(8))
    replica.step(next(lab.shares(lab.X, lab.SOFT, None, 1))[0])
    replica.get_statistics(out)
    assert (out != np.arange(8)).all()


def test_seeds_differ_by_rank_and_are_reproducible(lab):
    def states(rank, seed):
        (replica,) = lab.ranks_of(normed, 1, lab.X, lab.SOFT, None)
        values = [a.tolist() for a in replica._values(replica.seeds)]
        replica.fold_seeds(rank, seed)
        return values, [a.tolist() for a in replica._values(replica.seeds)]

    values, saved = states(0, None)
    assert len(values) == 2
    assert saved == values
    folded = [states(rank, None)[1] for rank in (1, 2)]
    seeded = [states(rank, 11)[1] for rank in (0, 1)]
    everything = [tuple(s) for state in (values, *folded, *seeded) for s in state]
    assert len(set(everything)) == len(everything)
    assert states(2, None)[1] == folded[1]
    assert states(1, 11)[1] == seeded[1]


def test_layers_without_a_seed_differ_by_rank_and_are_reproducible(lab):
    """PyTorch's Dropout draws from its own generator then, which is alike in all new processes."""

    def unseeded():
        keras.utils.set_random_seed(0)
        inner = [keras.layers.Dropout(0.5), keras.layers.Dense(lab.SOFT.shape[-1], "softmax")]
        model = keras.Sequential([keras.Input(lab.X.shape[1:]), *inner])
        model.compile(keras.optimizers.SGD(1.0), "categorical_crossentropy")
        return model

    def trained(rank, seed):
        (replica,) = lab.ranks_of(unseeded, 1, lab.X, lab.SOFT, None)
        replica.fold_seeds(rank, seed)
        replica.seed_generators(rank, seed)
        replica.step(next(lab.shares(lab.X, lab.SOFT, None, 1))[0])
        return replica.snapshot()[0]

    first = trained(0, 5)
    for rank, seed in ((1, 5), (0, 6)):
        assert (trained(rank, seed) != first).any()
    np.testing.assert_array_equal(trained(0, 5), first)


def test_learning_rate(lab):
    (replica,) = lab.ranks_of(lab.clipped, 1, lab.X, lab.SOFT, None)
    replica.learning_rate = 0.0
    assert replica.learning_rate == 0
    before = replica.snapshot()[0]
    replica.step(next(lab.shares(lab.X, lab.SOFT, None, 1))[0])
    np.testing.assert_array_equal(replica.snapshot()[0], before)
    (replica,) = lab.ranks_of(lab.scheduled, 1, lab.X, lab.SOFT, None)
    replica.learning_rate = 5.0
    assert replica.learning_rate == pytest.approx(0.1)
    for split in list(lab.shares(lab.X, lab.SOFT, None, 1))[:3]:
        replica.step(split[0])
    assert replica.learning_rate == pytest.approx(0.05)


def test_look_ahead_is_nesterov_around_the_step(lab):
    def make():
        return lab.compiled(lab.dense(out=2, activation=None), keras.optimizers.SGD(0.05), "mse")

    (plain,) = lab.ranks_of(make, 1, lab.X, lab.SOFT, None)
    (replica,) = lab.ranks_of(make, 1, lab.X, lab.SOFT, None)
    mu, x, v = 0.9, np.empty(plain.size, np.float32), np.zeros(plain.size, np.float32)
    plain.get(x)
    replica.look_ahead(mu)
    out = np.empty_like(x)
    for number, (batch,) in enumerate(lab.shares(lab.X, lab.SOFT, None, 1)):
        if number == 3:  # an elastic pull between two steps: the velocity stays
            x = x * np.float32(0.5)
            replica.set(x)
        plain.set(x + mu * v)
        plain.step(batch)
        plain.get(out)
        v = out - x
        x = out.copy()
        replica.step(batch)
        replica.look_ahead(mu)
        replica.get(out)
        np.testing.assert_allclose(out, x, atol=1e-6)
    plain.set(x)
    for each in (plain, replica):
        each.reset_metrics()
        each.evaluate(Batch(lab.X, lab.SOFT, None, lab.ROWS, lab.ROWS))
    assert replica.metrics()["loss"] == pytest.approx(plain.metrics()["loss"], rel=1e-5)
    replica.finish()
    flat = np.concatenate([value.reshape(-1) for value in lab.values(replica.model)])
    np.testing.assert_allclose(flat, x, atol=1e-6)


def test_local_metrics_add_over_workers(lab):
    replicas = lab.ranks_of(lab.adam_l2, 2, lab.X, lab.LABEL, lab.WEIGHT)
    values = []
    for replica, part in zip(replicas, (slice(0, 12), slice(12, lab.ROWS)), strict=True):
        replica.step(Batch(lab.X[part], lab.LABEL[part], lab.WEIGHT[part], part.stop - part.start, lab.ROWS))
        values.append((replica.metrics(), part.stop - part.start))
    logs = lab.gathered(replicas, [replica.metric_state() for replica in replicas])
    for name in ("loss", "accuracy"):
        assert logs[name] == pytest.approx(sum(log[name] * n for log, n in values) / lab.ROWS, rel=1e-6)
