"""A pool of workers is one fit's at a time, and whole for the next one."""

import copy
import os
import pickle
import signal
import time

import keras
import numpy as np
import pytest

import choros
from choros.cluster.hardware import usable_cores
from choros.errors import InvalidInputError


def test_a_pool_that_trains_is_not_given_to_another(make_model, data, pools):
    x, y = data()
    refused = []

    class Greedy(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            with pytest.raises(InvalidInputError, match="training already, for a fit of another thread or around this"):
                choros.Trainer(make_model(), workers=2, pool=pools(2)).fit(x, y, verbose=0)
            refused.append(epoch)

    history = choros.Trainer(make_model(), workers=2, pool=pools(2)).fit(x, y, verbose=0, callbacks=[Greedy()])
    assert refused == [0]
    assert history.epoch == [0]


def test_a_worker_that_died_between_two_fits_is_started_again(make_model, data):
    x, y = data()
    with choros.WorkerPool(2) as pool:
        choros.Trainer(make_model(), workers=2, pool=pool).fit(x, y, verbose=0)
        before = pool.start().pids
        os.kill(before[1], signal.SIGKILL)
        limit = time.monotonic() + 10
        while pool.start().pids == before:
            assert time.monotonic() < limit
            time.sleep(0.01)
        choros.Trainer(make_model(), workers=2, pool=pool).fit(x, y, verbose=0)


@pytest.mark.filterwarnings("ignore:Skipping variable loading")  # Keras, of an optimizer that is not built
def test_a_trainer_and_its_pool_may_be_copied_and_pickled(make_model, data, pools):
    x, y = data(24)
    model = make_model()
    trainer = choros.Trainer(model, workers=2, pool=pools(2))
    for twin in (copy.deepcopy(trainer), pickle.loads(pickle.dumps(trainer))):
        assert twin._local.pool is not trainer._local.pool
        assert not twin._local.pool.started
        with twin:
            assert len(twin.fit(x, y, batch_size=8, epochs=1, verbose=0).history["loss"]) == 1


def test_counts_may_be_numbers_of_numpy():
    pool = choros.WorkerPool(np.int64(2), threads=np.int32(1), devices_per_worker=(np.int64(1), 1))
    assert (pool.size, pool.per_worker) == (2, [1, 1])
    assert all(type(count) is int for count in (pool.size, *pool.per_worker))
    for wrong in (np.float64(2), np.bool_(True), np.int64(0)):
        with pytest.raises(InvalidInputError, match="whole number"):
            choros.WorkerPool(wrong)


class Started:
    """The processes of a pool, without any."""

    def __init__(self, size, **_):
        self.size = size

    def responds(self, rank):
        return True

    def close(self):
        pass

    kill = close


@pytest.mark.parametrize("extra", [0, 1])
def test_many_workers_for_each_core_are_warned_of_once(extra, monkeypatch, recwarn):
    monkeypatch.setattr("choros.training.executors.worker_pool.Pool", Started)
    size = 4 * len(usable_cores()) + extra
    with choros.WorkerPool(size, devices="cpu") as pool:
        pool.start()
        pool.kill()
        pool.start()
    found = [str(each.message) for each in recwarn if "share" in str(each.message)]
    assert len(found) == extra
    for text in found:
        assert text.startswith(f"{size} workers share {len(usable_cores())} core")
        assert text.endswith(f"Give workers={len(usable_cores())}, or use more hosts.")


def test_an_absurd_number_of_workers_is_refused_before_any_starts(monkeypatch):
    monkeypatch.setattr("choros.training.executors.worker_pool.plan", None)
    with pytest.raises(choros.InvalidInputError, match="99999 ranks were asked for, but .* takes at most"):
        choros.WorkerPool(99_999, devices="cpu").start()


@pytest.mark.timeout(20)
def test_a_number_of_workers_beyond_any_machine_is_refused_at_once():
    for number in (1_000_001, 10**12):
        with pytest.raises(choros.InvalidInputError, match=f"workers={number}: give at most 1,000,000 workers"):
            choros.WorkerPool(number)
