"""Law 10: an interrupted run ends with the same bits, failed workers are restarted, and nothing counts twice."""

import os
import shutil
import signal
import threading
import time

import numpy as np
import pytest

import choros
from choros.training.checkpoint import CheckpointStore

EPOCHS, BATCH = 3, 10
WHOLE = os.environ["KERAS_BACKEND"] == "jax"  # all of it; on the others what depends on how a backend keeps its state
SYNCHRONOUS = {
    "allreduce": lambda: choros.AllReduce(),
    "localsgd": lambda: choros.LocalSGD(window=4),
    "easgd": lambda: choros.EASGD(window=3),
    "diloco": lambda: choros.DiLoCo(window=3),
}


@pytest.fixture
def rows():
    rng = np.random.default_rng(0)
    return rng.normal(size=(74, 8)).astype("float32"), rng.integers(0, 3, 74)


@pytest.fixture
def net():
    """A model with all that differs by rank: Dropout's seeds, moving statistics, slots of an optimizer."""

    def make(optimizer="adam", seed=None):
        import keras

        keras.utils.set_random_seed(0)
        layers = [
            keras.layers.Dense(6, "relu"),
            keras.layers.Dropout(0.3, seed=seed),
            keras.layers.BatchNormalization(),
        ]
        model = keras.Sequential([keras.Input((8,)), *layers, keras.layers.Dense(3, "softmax")])
        if optimizer == "momentum":
            optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
        model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
        return model

    return make


def train(model, algorithm, pool, rows, restarts=0, **how):
    trainer = choros.Trainer(model, algorithm, workers=2, pool=pool, restarts=restarts)
    return trainer.fit(*rows, batch_size=BATCH, epochs=EPOCHS, seed=3, verbose=0, **how)


def everything(model):
    return [np.array(v) for v in (*model.get_weights(), *(np.asarray(s.numpy()) for s in model.optimizer.variables))]


def equal(actual, other):
    for left, right in zip(everything(actual), everything(other), strict=True):
        np.testing.assert_array_equal(left, right)


@pytest.mark.parametrize("kind", SYNCHRONOUS if WHOLE else ["allreduce", "easgd"])
def test_what_was_cut_short_goes_on_to_the_same_bits(kind, pools, net, rows, tmp_path):
    import keras

    class Slowly(keras.callbacks.Callback):
        """Leaves time to write: a state that waits gives way to the next one."""

        def on_train_batch_end(self, batch, logs=None):
            time.sleep(0.02)

    optimizer = "momentum" if kind == "localsgd" else "adam"
    complete, store = net(optimizer), CheckpointStore(tmp_path)
    every = choros.Checkpoint(tmp_path, every=3, keep=100)
    message = train(complete, SYNCHRONOUS[kind](), pools(2), rows, checkpoint=every, callbacks=[Slowly()])
    places = {path: (facts["epoch"], facts["batch"]) for path in store.paths() for facts in [read(path)]}
    assert set(places.values()) <= {(e + (b == 0), b) for e in range(EPOCHS) for b in (3, 6, 0)}
    within = [place for place in places.values() if place[1]]
    assert within
    for number, (path, place) in enumerate(places.items()):
        if place not in ([within[-1], (EPOCHS, 0)] if kind == "allreduce" else [within[-1]]):
            continue
        (room := tmp_path / str(number)).mkdir()
        shutil.copy(path, room)
        model = net(optimizer)
        model.set_weights([np.full_like(w, 7) for w in model.get_weights()])  # nothing of it may be left
        repeated = train(model, SYNCHRONOUS[kind](), pools(2), rows, checkpoint=room, resume=True)
        equal(model, complete)
        assert repeated.epoch == list(range(place[0], EPOCHS))
        assert repeated.history == {
            name: figures[place[0] :] for name, figures in message.history.items() if repeated.epoch
        }


def read(path):
    from choros.training.checkpoint.store import read as whole

    return whole(path).facts


@pytest.mark.parametrize(("kind", "how"), [("easgd", signal.SIGSEGV) if WHOLE else ("allreduce", signal.SIGKILL)])
def test_workers_that_train_together_survive_one(kind, how, pools, net, rows, capfd):
    import keras

    class Ends(keras.callbacks.Callback):
        """Ends a worker of the pool, once."""

        pending, epoch = True, 0

        def on_epoch_begin(self, epoch, logs=None):
            self.epoch = epoch

        def on_train_batch_end(self, batch, logs=None):
            if self.pending and (self.epoch, batch) == (1, 4):
                self.pending = False
                os.kill(pools(2).start().pids[1], how)

    complete, model = net(seed=5), net(seed=5)  # without one PyTorch draws from its generator, which goes on
    message = train(complete, SYNCHRONOUS[kind](), pools(2), rows)
    repeated = train(model, SYNCHRONOUS[kind](), pools(2), rows, restarts=1, callbacks=[Ends()])
    equal(model, complete)
    assert repeated.history == message.history
    assert repeated.run.rows == message.run.rows == EPOCHS * 74
    (restart,) = repeated.run.restarts
    assert (restart.rank, restart.signal, restart.epoch, restart.batch) == (1, how.name, 1, 0)
    errors = capfd.readouterr().err
    assert f"worker 1 of 2 (counted from 0) on host {os.uname().nodename} was ended by {how.name}" in errors
    assert "all ranks restart in epoch 2, after 0 of its batches (0 restarts left)" in errors


RATE = 1 / 64


def killing(pool, pauses, rng):
    """A callback that, when training begins, has workers killed at random moments."""
    import keras

    class Kills(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            self.over = threading.Event()
            self.thread = threading.Thread(target=self.work)
            self.thread.start()

        def work(self):
            for pause in pauses:
                if self.over.wait(pause):
                    return
                rank = int(rng.integers(2))
                while not pool._pool.responds(rank):  # it was killed before, and is not replaced yet
                    if self.over.wait(0.01):
                        return
                os.kill(pool._pool.pids[rank], signal.SIGKILL)

        def on_train_end(self, logs=None):
            self.over.set()
            self.thread.join()

    return Kills()


@pytest.mark.parametrize("name", ["DOWNPOUR"])
def test_asynchronous_workers_begin_anew_and_nothing_counts_twice(name, pools, ledger):
    import keras

    class Batches(keras.utils.PyDataset):
        def __len__(self):
            return 400

        def __getitem__(self, index):
            time.sleep(0.002)
            return np.ones((5, 1), "float32"), np.arange(5 * index, 5 * index + 5, dtype="float32").reshape(-1, 1)

    pool, rng, model = pools(2), np.random.default_rng(17), ledger(2000, RATE)
    pool.start()
    trainer = choros.Trainer(model, getattr(choros, name)(window=3), workers=2, pool=pool, restarts=4)
    kills = killing(pool, rng.uniform(0.1, 0.4, 2), rng)
    history = trainer.fit(Batches(), epochs=EPOCHS, seed=3, verbose=0, callbacks=[kills])
    run = history.run
    assert history.epoch == list(range(EPOCHS))
    died = len(run.restarts)
    assert died == 2
    assert {restart.signal for restart in run.restarts} == {"SIGKILL"}
    # The center: each of the run's steps in it, once.
    steps = EPOCHS * 400  # of each worker: one for each global batch
    if name == "DOWNPOUR":
        assert float(np.asarray(model.trainable_variables[0]).item()) == -RATE * 2 * steps
    # The record: each row once, but for at most one window of five rows a batch for each worker that died.
    assert EPOCHS * 2000 - died * 15 <= run.rows <= EPOCHS * 2000
    assert sum(history.history["missed"]) <= died * 15
    for worker in run.workers:
        assert steps - 3 * died <= worker.steps <= steps


@pytest.mark.parametrize("name", ["DOWNPOUR"])
def test_asynchronous_workers_go_on_from_a_checkpoint(name, pools, ledger, tmp_path):
    rows = np.ones((600, 1), "float32"), np.arange(600, dtype="float32").reshape(-1, 1)

    def fit(**how):
        model = ledger(600, RATE)
        trainer = choros.Trainer(model, getattr(choros, name)(window=3), workers=2, pool=pools(2))
        history = trainer.fit(*rows, batch_size=10, seed=3, verbose=0, **how)
        return float(np.asarray(model.trainable_variables[0]).item()), history

    first, _ = fit(epochs=2, checkpoint=choros.Checkpoint(tmp_path, keep=1))
    assert first == -RATE * 240
    repeated, history = fit(epochs=4, checkpoint=tmp_path, resume=True)
    assert repeated == -RATE * 480
    assert history.epoch == [2, 3]
    assert history.history["missed"] == [0.0, 0.0]
    assert history.run.rows == 1200
    assert fit(epochs=4, checkpoint=tmp_path, resume=True)[0] == -RATE * 480  # it was over
