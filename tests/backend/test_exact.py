"""Law 1 on one replica after another: the shares of k ranks add up to what one process does."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from choros.backends import make_replica
from choros.types import Batch

pytestmark = [
    # Keras' Variable.__array__ has no copy keyword; numpy 2 says so when a variable is read.
    pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning"),
]


def test_shares_add_up_to_one_process(lab, law_case):
    make, x, y, weight = lab.CASES[law_case]
    model, expected = lab.reference(make, x, y, weight)
    (replica,) = lab.ranks_of(make, 1, x, y, weight, workers=3)
    lab.agree([replica], lab.train([replica] * 3, x, y, weight), model, expected)


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_ranks_equal_one_process(lab, ranks):
    make, x, y, weight = lab.CASES["adam, L2, sample weights"]
    model, expected = lab.reference(make, x, y, weight)
    replicas = lab.ranks_of(make, ranks, x, y, weight)
    lab.agree(replicas, lab.train(replicas, x, y, weight), model, expected)


@pytest.mark.parametrize("case", ["adam, L2, sample weights", "SGD, momentum, clipnorm"])
def test_one_rank_is_fit(lab, case):
    make, x, y, weight = lab.CASES[case]
    model, expected = lab.reference(make, x, y, weight, epochs=1, dense=False)
    (replica,) = lab.ranks_of(make, 1, x, y, weight)
    for (batch,) in lab.shares(x, y, weight, 1):
        replica.step(batch)
    logs = replica.metrics()
    replica.finish()
    assert all(logs[name] == pytest.approx(expected[name][0], rel=1e-6) for name in logs)
    for ours, other in zip(lab.values(replica.model), lab.values(model), strict=True):
        np.testing.assert_allclose(ours, other, rtol=1e-6, atol=1e-7)


def test_mixed_precision_keeps_loss_scaling(lab):
    def make():
        policy = keras.config.dtype_policy()
        keras.config.set_dtype_policy("mixed_float16")
        try:
            model = lab.dense(out=2, activation=None)
            # A scale at which neither 8 rows nor a rank's 3 overflow, so that nobody leaves out a step.
            optimizer = keras.optimizers.LossScaleOptimizer(lab.adam(), initial_scale=64.0)
            return lab.compiled(model, optimizer, "mse", metrics=["mae"])
        finally:
            keras.config.set_dtype_policy(policy)

    model, expected = lab.reference(make, lab.X, lab.SOFT, None)
    replicas = lab.ranks_of(make, 1, lab.X, lab.SOFT, None, workers=3)
    assert isinstance(replicas[0].model.optimizer, keras.optimizers.LossScaleOptimizer)
    assert replicas[0].learning_rate == pytest.approx(0.01)
    history = lab.train(replicas * 3, lab.X, lab.SOFT, None)
    assert history[-1]["loss"] == pytest.approx(expected["loss"][-1], rel=5e-3)
    for ours, other in zip(lab.values(replicas[0].model), lab.values(model), strict=True):
        np.testing.assert_allclose(ours, other, atol=2e-2)
        assert ours.dtype == np.float32

    huge = Batch(lab.X[:4] * 1e30, lab.SOFT[:4], None, 4, 4)  # not finite in float16: no step, half the scale
    before, slot = replicas[0].snapshot(), np.empty(replicas[0].size + 2, np.float32)
    replicas[0].gradients(huge, slot)
    replicas[0].apply(slot)
    after = replicas[0].snapshot()
    count = len(replicas[0].model.variables)
    assert all((a == b).all() for a, b in zip(before[:count], after[:count], strict=True))
    assert any((a == b / 2).all() and b.size == 1 for a, b in zip(after[count:], before[count:], strict=True))


@pytest.mark.parametrize("how", [{"jit_compile": False}, {"run_eagerly": True}])
def test_not_compiled(lab, how):
    def make():
        return lab.compiled(lab.dense(), lab.adam(), "sparse_categorical_crossentropy", metrics=["accuracy"], **how)

    def plain():
        return lab.compiled(lab.dense(), lab.adam(), "sparse_categorical_crossentropy", metrics=["accuracy"])

    few = slice(12)
    model = lab.fresh(plain)
    expected = model.fit(lab.X[few], lab.LABEL[few], batch_size=lab.BATCH, shuffle=False, verbose=0).history
    replicas = lab.ranks_of(make, 2, lab.X, lab.LABEL, None)
    slots = [np.empty(replica.size + 2, replica.dtype) for replica in replicas]
    for split in lab.shares(lab.X, lab.LABEL, None, 2, count=12):
        for replica, batch, slot in zip(replicas, split, slots, strict=True):
            replica.gradients(batch, slot)
        for replica in replicas:
            replica.apply(slots[0] + slots[1])
    logs = lab.gathered(replicas, [replica.metric_state() for replica in replicas])
    replicas[1].finish()
    assert logs["loss"] == pytest.approx(expected["loss"][0], rel=1e-5)
    for ours, other in zip(lab.values(replicas[1].model), lab.values(model), strict=True):
        np.testing.assert_allclose(ours, other, atol=1e-6)


def test_a_wholly_masked_rank_weighs_nothing(lab):
    tokens, tags = lab.TOKENS[:4].copy(), lab.TAGS[:4]
    tokens[2:] = 0
    replicas = lab.ranks_of(lab.tagger, 2, tokens, tags, None)
    slots = [np.empty(replica.size + 2, replica.dtype) for replica in replicas]
    for replica, part, slot in zip(replicas, (slice(0, 2), slice(2, 4)), slots, strict=True):
        replica.gradients(Batch(tokens[part], tags[part], None, 2, 4), slot)
    assert slots[0][-1] == (tokens[:2] > 0).sum()
    assert 0 < slots[1][-1] < 1e-15
    total = np.sum(slots, 0)
    assert np.isfinite(total).all()
    np.testing.assert_allclose(total, slots[0], rtol=1e-6)


def test_float16_gradients_overflow_at_the_scale_of_one_process(lab):
    policy = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = lab.compiled(lab.dense(out=2, activation=None), keras.optimizers.SGD(1e-3), "mse")
    finally:
        keras.config.set_dtype_policy(policy)
    x = np.repeat(lab.X[:1], 16, 0)
    y = np.array(keras.ops.convert_to_numpy(model(x)), "float32")
    y[:4] += 3  # only the rows of the first of four ranks have a gradient
    replica = make_replica(model, 4)
    replica.build(Batch(x, y, None, 16, 16))

    def gradient(rows):
        slot = np.empty(replica.size + 2, np.float32)
        with np.errstate(all="ignore"):
            replica.gradients(Batch(x[:rows], y[:rows], None, rows, 16), slot)
        return slot

    results = []
    for power in range(8, 20):
        replica._assign([model.optimizer.dynamic_scale], [np.float32(2.0**power)])
        complete, share = gradient(16), gradient(4)
        results.append(bool(np.isfinite(complete).all()))
        if results[-1]:
            largest = np.abs(complete[:-2]).max()
            np.testing.assert_allclose(share[:-2], complete[:-2], rtol=2e-2, atol=1e-2 * largest)
    assert len(set(results)) == 2
