"""Law 3: one worker with a window of one is plain Keras, to within an ulp a step."""

import numpy as np
import pytest

import choros
from choros.training.worker.exchange import AsyncExchange, SyncExchange

EPOCHS, BATCH, SEED = 2, 16, 5
_expected = {}


def neutral(kind):
    """The settings with which one worker is plain Keras: a window of one, no elastic force, a plain outer step."""
    more = {"EASGD": {"alpha": 0.0}, "AEASGD": {"alpha": 0.0}, "EAMSGD": {"alpha": 0.0, "momentum": 0.0}}
    more["DiLoCo"] = {"outer_rate": 1.0, "outer_momentum": 0.0}
    return kind(window=1, **more.get(kind.__name__, {}))


def stays(kind):
    """Return whether the center stays constant while the worker trains: the elastic family with force 0."""
    return issubclass(kind, choros.EASGD)


@pytest.fixture
def plain(make_mlp, data, plain_fit):
    """Plain Keras' history and weights, and the number of steps it made: once for the whole module."""
    import keras

    def make():
        return make_mlp(optimizer=keras.optimizers.SGD(0.05, momentum=0.5))

    x, y = data(rows=70)
    if not _expected:
        model = make()
        start = [np.array(w) for w in model.get_weights()]
        history = plain_fit(model, x, y, epochs=EPOCHS, batch_size=BATCH, seed=SEED)
        _expected["run"] = start, model.get_weights(), history
    return make, x, y, *_expected["run"]


def check_weights(result, expected, steps):
    for value, other in zip(result, expected, strict=True):
        scale = np.maximum(np.abs(other), np.abs(other).max())
        np.testing.assert_array_less(np.abs(value - other), steps * np.spacing(scale) + 1e-30)


def test_a_trainer_with_one_worker(pools, kind, plain):
    make, x, y, start, weights, history = plain
    model = make()
    trainer = choros.Trainer(model, neutral(kind), workers=1, pool=pools(2))
    result = trainer.fit(x, y, epochs=EPOCHS, batch_size=BATCH, seed=SEED, verbose=0)
    assert list(result.history) == list(history)
    for name in history:
        np.testing.assert_allclose(result.history[name], history[name], rtol=2e-6, err_msg=name)
    check_weights(model.get_weights(), start if stays(kind) else weights, result.run.workers[0].steps)


def test_a_trainer_with_one_worker_and_adam_keeps_its_slots(pools, make_mlp, data, plain_fit):
    x, y = data(rows=70)
    reference, model = make_mlp(), make_mlp()
    expected = plain_fit(reference, x, y, epochs=EPOCHS, batch_size=BATCH, seed=SEED)
    trainer = choros.Trainer(model, "allreduce", workers=1, pool=pools(2))
    result = trainer.fit(x, y, epochs=EPOCHS, batch_size=BATCH, seed=SEED, verbose=0).history
    np.testing.assert_allclose(result["loss"], expected["loss"], rtol=2e-6)
    check_weights(model.get_weights(), reference.get_weights(), 100)
    for value, other in zip(model.optimizer.variables, reference.optimizer.variables, strict=True):
        np.testing.assert_allclose(np.asarray(value), np.asarray(other), rtol=1e-4, atol=1e-8)


def train(replica, source, meet):
    """The replica's own steps on the batches of the run, with a meeting after each; returns the number of steps."""
    local, steps = np.empty(replica.size, replica.dtype), 0
    for epoch in range(EPOCHS):
        how = dict(rank=0, size=1, synchronous=True, batch_size=BATCH, seed=SEED, epoch=epoch, shuffle=True)
        for batch in source.epoch(**how):
            replica.step(batch)
            replica.get(local)
            meet(local, batch.rows)
            replica.set(local)
            steps += 1
    replica.finish()
    return steps


def replica_of(model, source):
    from choros.backends import make_replica

    replica = make_replica(model)
    replica.build(source.sample(BATCH))
    start, others = np.empty(replica.size, replica.dtype), np.empty(replica.statistics_size, replica.dtype)
    replica.get(start)
    replica.get_statistics(others)
    return replica, start, others


def test_async_with_every_center(async_kind, plain, make_center):
    from choros.data import make_source

    kind = async_kind
    make, x, y, start, weights, _ = plain
    model, source = make(), make_source(x, y)
    replica, first, others = replica_of(model, source)
    algorithm = neutral(kind).bound(1, 0.05)
    center = make_center(algorithm, first, others)
    asynchronous = AsyncExchange(center, first.copy())
    steps = train(replica, source, lambda local, rows: asynchronous.run(local, 1, others))
    assert asynchronous.exchanges == steps
    assert asynchronous.staleness == 0
    check_weights(model.get_weights(), weights, steps)  # the worker itself, also without elastic force
    end = np.empty_like(first)
    assert center.read(end, others) == steps
    expected = np.concatenate([w.reshape(-1) for w in (start if stays(kind) else weights)])
    check_weights([end], [expected], steps)


def test_sync_with_every_group(sync_kind, plain, make_group):
    from choros.data import make_source

    kind = sync_kind
    make, x, y, _, weights, _ = plain
    model, source = make(), make_source(x, y)
    replica, first, _ = replica_of(model, source)
    synchronous = SyncExchange(neutral(kind).bound(1, 0.05), make_group(), first)
    steps = train(replica, source, lambda local, rows: synchronous.run(local, 1, rows))
    check_weights(model.get_weights(), weights, steps)
