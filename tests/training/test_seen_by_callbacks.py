"""The weights that callbacks see: they are those of the logs, and a callback that changes nothing changes nothing."""

import pathlib
import subprocess
import sys
import textwrap
import threading
import time
import types

import keras
import numpy as np
import pytest

import choros
from choros.param_server.shared_memory import SharedMemoryParameterServer
from choros.training.async_control.center_snapshots import is_slot_free
from choros.training.async_control.control_block import ControlBlock
from choros.training.callback_runner import CallbackRunner
from choros.training.executors.local import LocalRun
from choros.training.worker.messages import EpochEnded

K = keras.callbacks


class Draws(K.Callback):
    """Monte Carlo dropout: the model is called as in training, which moves its seeds."""

    def __init__(self, x):
        super().__init__()
        self.x = x

    def on_epoch_end(self, epoch, logs=None):
        self.model(self.x, training=True)


@pytest.mark.parametrize("algorithm", ["downpour", "aeasgd"])
def test_random_numbers_are_no_new_weights(algorithm, make_model, data, pools, monkeypatch):
    calls, replace = [], SharedMemoryParameterServer.replace
    monkeypatch.setattr(SharedMemoryParameterServer, "replace", lambda *args: (calls.append(1), replace(*args)))
    x, y = data()
    how = {"batch_size": 8, "epochs": 3, "verbose": 0}
    trainer = choros.Trainer(make_model(dropout=0.5), algorithm, workers=2, pool=pools(2))
    trainer.fit(x, y, callbacks=[Draws(x)], **how)
    assert calls == []
    setter = K.LambdaCallback(on_epoch_end=lambda epoch, logs: trainer.model.layers[0].bias.assign(np.ones(6)))
    trainer.fit(x, y, callbacks=[setter], **how)
    assert calls


class Judge(K.Callback):
    """Takes its time, and evaluates what it sees at each epoch's end."""

    def __init__(self, x, y, pause=0.0):
        super().__init__()
        self.x, self.y, self.pause, self.found, self.logged, self.weights = x, y, pause, [], [], []

    def on_epoch_end(self, epoch, logs=None):
        time.sleep(self.pause)
        self.weights.append(self.model.get_weights())
        self.logged.append(logs.get("val_loss"))
        self.found.append(evaluate(self.model, self.x, self.y))
        time.sleep(self.pause)


def evaluate(model, x, y):
    """The loss without ``evaluate``, which resets the metrics."""
    return float(np.mean(keras.ops.convert_to_numpy(model.loss(y, model(x, training=False)))))


def make_normed(optimizer):
    keras.utils.set_random_seed(0)
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((8,)),
            layers.Dense(6, "relu"),
            layers.BatchNormalization(momentum=0.7),
            layers.Dense(3, "softmax"),
        ]
    )
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy())
    return model


@pytest.mark.parametrize("algorithm", ["downpour", "aeasgd"])
def test_async_callbacks_see_what_was_validated(algorithm, data, pools, tmp_path):
    x, y = data(120)
    model = make_normed(keras.optimizers.SGD(0.5))
    judge = Judge(x, y, 0.03)
    best = K.ModelCheckpoint(tmp_path / "best.keras", save_best_only=True)
    stop = K.EarlyStopping("val_loss", patience=100, restore_best_weights=True)
    history = choros.Trainer(model, algorithm, workers=2, pool=pools(2)).fit(
        x, y, batch_size=8, epochs=12, validation_data=(x, y), callbacks=[judge, best, stop], verbose=0
    )
    assert len(judge.logged) == 12
    np.testing.assert_allclose(judge.found, judge.logged, rtol=1e-5)
    assert len({round(loss, 6) for loss in judge.logged}) > 6  # the center moved
    best_loss = min(history.history["val_loss"])
    saved = keras.models.load_model(tmp_path / "best.keras")
    assert evaluate(saved, x, y) == pytest.approx(best_loss, rel=1e-5)
    assert evaluate(model, x, y) == pytest.approx(best_loss, rel=1e-5)  # restored by EarlyStopping


def test_async_without_validation_callbacks_see_the_epoch_s_end(data, pools):
    x, y = data(120)
    judge = Judge(x, y, 0.1)
    model = make_normed(keras.optimizers.SGD(0.5))
    choros.Trainer(model, "downpour", workers=2, pool=pools(2)).fit(
        x, y, batch_size=8, epochs=8, callbacks=[judge], verbose=0
    )
    assert judge.logged == [None] * 8
    for before, after in zip(judge.weights, judge.weights[1:], strict=False):
        assert np.abs(before[0] - after[0]).max() > 0


RARE = {
    "diloco": lambda: choros.DiLoCo(),
    "localsgd": lambda: choros.LocalSGD(window=13),
    "easgd": lambda: choros.EASGD(window=13),
    "eamsgd": lambda: choros.EAMSGD(window=13),
    "downpour": lambda: choros.DOWNPOUR(window=13),
}


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("name", RARE)
def test_rare_exchanges_are_tried_at_an_epoch_s_end(name, workers, make_model, data, pools):
    """Validation and callbacks see the center with the workers' progress since; training is the same without them."""
    x, y = data(64)
    how = {"batch_size": 8, "epochs": 6, "seed": 3, "verbose": 0}
    trained, plain = (make_model(keras.optimizers.SGD(0.1)) for _ in range(2))
    meet = {"mode": "sync"}
    choros.Trainer(plain, RARE[name](), workers=workers, pool=pools(workers), **meet).fit(x, y, **how)
    trained.compile(trained.optimizer, keras.losses.SparseCategoricalCrossentropy())
    judge, stop = Judge(x, y), K.EarlyStopping("val_loss", patience=2)
    history = choros.Trainer(trained, RARE[name](), workers=workers, pool=pools(workers), **meet).fit(
        x, y, validation_data=(x, y), callbacks=[judge, stop], **how
    )
    assert len(history.epoch) == 6
    losses = history.history["val_loss"]
    assert all(after < before for before, after in zip(losses, losses[2:], strict=False)), losses  # elastic: may lag
    np.testing.assert_allclose(judge.found, losses, rtol=1e-5)
    for value, other in zip(trained.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_array_equal(value, other)
    np.testing.assert_allclose(judge.weights[-1][0], trained.get_weights()[0], atol=1e-6)


class Follows(K.Callback):
    """Reads weights after each batch, in one of the ways in which a callback may reach them."""

    def __init__(self, read):
        super().__init__()
        self.read, self.found = read, []

    def on_train_batch_end(self, batch, logs=None):
        self.found.append(np.array(keras.ops.convert_to_numpy(self.read())))


def ways(model):
    """Ways to the same kernel: by the callback's model, and by references from before the fit."""
    layer, variable = model.layers[0], model.layers[0].kernel
    raw = variable.value  # with JAX an array, which is a value and stays what it was
    report = {
        "model": lambda: model.get_weights()[0],
        "layer": lambda: layer.kernel,
        "variable": lambda: variable,
        "operator": lambda: variable * 1.0,
        "call": lambda: layer(np.eye(8, dtype="float32")) if layer.bias is None else variable,
    }
    if keras.backend.backend() == "jax":
        return report
    return report | {"tensor": lambda: raw.detach() if hasattr(raw, "detach") else raw}


@pytest.mark.parametrize("algorithm", ["allreduce", "localsgd"])
def test_weights_are_fetched_by_every_way_to_them(algorithm, make_model, data, pools, monkeypatch):
    x, y = data(48)
    requested, have_written = [], LocalRun.have_written
    monkeypatch.setattr(LocalRun, "have_written", lambda self, rank: (requested.append(rank), have_written(self, rank)))
    how = {"batch_size": 8, "epochs": 2, "shuffle": False, "verbose": 0}
    plain = make_model(keras.optimizers.SGD(0.1))
    expected = Follows(lambda: expected.model.get_weights()[0])  # with JAX Keras' loop syncs the model only by this way
    plain.fit(x, y, callbacks=[expected], **how)
    for name in ways(plain):
        trained = make_model(keras.optimizers.SGD(0.1))
        callback = Follows(ways(trained)[name])
        rule = choros.LocalSGD(window=1) if algorithm == "localsgd" else algorithm
        choros.Trainer(trained, rule, workers=2, pool=pools(2)).fit(x, y, callbacks=[callback], **how)
        assert len(requested) == 12, name
        np.testing.assert_allclose(callback.found, expected.found, atol=1e-5, err_msg=name)
        requested.clear()


class Quiet(K.Callback):
    """A callback like a logger or progress bar: it needs no weights."""

    def on_train_batch_begin(self, batch, logs=None):
        self.rate = float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate))

    def on_train_batch_end(self, batch, logs=None):
        assert set(logs) == {"accuracy", "loss"}
        assert isinstance(self.model, keras.Model)
        assert self.model.name
        self.model.optimizer.learning_rate = 0.01 + batch / 100
        self.model.stop_training = batch == 4


def test_nothing_is_fetched_for_callbacks_that_do_not_look(make_model, data, pools, monkeypatch):
    x, y = data(48)
    monkeypatch.setattr(LocalRun, "have_written", lambda self, rank: pytest.fail("weights were fetched"))
    callbacks = [Quiet(), K.TerminateOnNaN(), K.LambdaCallback(on_train_batch_end=lambda batch, logs: None)]
    trained = make_model()
    history = choros.Trainer(trained, workers=2, pool=pools(2)).fit(x, y, batch_size=8, callbacks=callbacks, verbose=0)
    assert history.run.workers[0].steps == 5
    assert float(trained.optimizer.learning_rate) == pytest.approx(0.05)
    assert type(trained) is keras.Sequential


class Logger(K.Callback):
    """A callback like a logger of epochs: it needs no weights."""

    def on_train_begin(self, logs=None):
        self.losses, self.rates = [], []

    def on_epoch_begin(self, epoch, logs=None):
        self.model.optimizer.learning_rate = 0.01 * (epoch + 1)

    def on_epoch_end(self, epoch, logs=None):
        self.losses.append(logs["loss"])
        self.rates.append(float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate)))
        self.model.stop_training = epoch == 2


@pytest.mark.parametrize("algorithm", ["allreduce", "localsgd", "aeasgd"])
def test_nothing_is_loaded_at_an_epochs_end_for_callbacks_that_do_not_look(
    algorithm, make_model, data, pools, monkeypatch
):
    """A logger of epochs costs no copy of the weights."""
    x, y = data(48)
    loaded, fetch = [], LocalRun.fetch
    monkeypatch.setattr(LocalRun, "fetch", lambda self, *epoch: (loaded.append(epoch), fetch(self, *epoch)))
    logger, trained = Logger(), make_model(keras.optimizers.Adam(0.1))
    stopping = K.EarlyStopping(monitor="loss", patience=9, restore_best_weights=False)
    callbacks = [logger, stopping, K.LearningRateScheduler(lambda epoch, rate: rate), K.TerminateOnNaN()]
    trainer = choros.Trainer(trained, algorithm, workers=2, pool=pools(2))
    history = trainer.fit(x, y, batch_size=8, epochs=9, callbacks=callbacks, validation_data=(x, y), verbose=0)
    assert loaded == [()]  # the final weights
    assert logger.losses == history.history["loss"]
    assert logger.rates == pytest.approx([0.01, 0.02, 0.03])
    assert type(trained) is keras.Sequential


@pytest.mark.parametrize("hook", ["on_epoch_end", "on_train_batch_end"])
def test_another_model_of_the_same_layers_shows_the_weights(hook, make_model, data, pools):
    """Its compiled prediction reads them past the objects of the given model, on TensorFlow."""
    x, y = data(48)
    rows, seen = x[:4], {}
    plainly = keras.backend.backend() != "jax" or hook == "on_epoch_end"  # on JAX Keras shows no weights of a batch
    for name in ("choros", "plain") if plainly else ("choros",):
        trained = make_model(keras.optimizers.SGD(0.1))
        inside = keras.Model(trained.inputs, trained.layers[0].output)
        inside.predict(rows, verbose=0)
        seen[name] = result = []

        def look(number, logs=None, inside=inside, result=result):
            result.append(inside.predict(rows, verbose=0))

        fit = choros.Trainer(trained, workers=2, pool=pools(2)).fit if name == "choros" else trained.fit
        callbacks = [K.LambdaCallback(**{hook: look})]
        fit(x, y, batch_size=8, epochs=3, shuffle=False, callbacks=callbacks, verbose=0)
    if plainly:
        np.testing.assert_allclose(seen["choros"], seen["plain"], atol=1e-5)
    assert not np.allclose(seen["choros"][0], seen["choros"][-1], atol=1e-5)


JOB = """
    import time
    import keras, numpy as np
    import choros
    from choros.cluster import Place

    rank = Place.here().rank
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(64, 8)).astype("float32"), rng.integers(0, 3, 64)
    x[:, 0] += y

    def make(optimizer):
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(6, "relu"), keras.layers.Dense(3, "softmax")])
        model.compile(optimizer, "sparse_categorical_crossentropy")
        return model

    def fit(algorithm, callbacks, optimizer="sgd", **how):
        model = make(optimizer)
        trainer = choros.Trainer(model, algorithm)
        how = {"batch_size": 8, "epochs": 3, "seed": 1, "verbose": 0, "callbacks": callbacks} | how
        return model, trainer.fit(x, y, **how)
"""


@pytest.fixture
def job(tmp_path):
    """Run text after ``JOB`` on two ranks of a job; what each printed after ``out``, as dicts."""

    def run(text, ranks=2):
        pathlib.Path(tmp_path, "script.py").write_text(textwrap.dedent(JOB) + textwrap.dedent(text))
        command = [sys.executable, "-m", "choros", "run", "-n", str(ranks), "script.py"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


def test_a_callback_leaves_the_velocity_of_a_rank_alone(job):
    text = job(
        """
        look = keras.callbacks.LambdaCallback
        nothing = lambda *args, **kwargs: None
        read = lambda epoch, logs: model_of[0].get_weights()
        sums = []
        for hooks in ({}, {"on_epoch_end": nothing}, {"on_train_batch_end": nothing}):
            how = choros.EAMSGD(window=3, momentum=0.9)
            trainer = choros.Trainer(model := make("sgd"), how, mode="sync")
            trainer.fit(x, y, batch_size=8, epochs=3, seed=1, verbose=0, callbacks=[look(**hooks)] if hooks else [])
            sums.append([w.tobytes().hex() for w in model.get_weights()])
        print("same", [each == sums[0] for each in sums], flush=True)
        """
    )
    assert text.count("same [True, True, True]") == 2, text


def test_in_a_job_a_callback_of_each_batch_sees_and_sets_weights(job):
    text = job(
        """
        class Look(keras.callbacks.Callback):
            def __init__(self, change):
                super().__init__()
                self.change, self.seen = change, []

            def on_train_batch_end(self, batch, logs=None):
                if batch % 3 == 0:
                    self.seen.append(self.model.get_weights()[0])
                if self.change and batch == 5:
                    self.model.set_weights([0.5 * w for w in self.model.get_weights()])

        for change in (False, True):
            look, other = Look(change), Look(change)
            model, _ = fit("allreduce", [look], shuffle=False)
            plain = make("sgd")
            plain.fit(x, y, batch_size=8, epochs=3, shuffle=False, callbacks=[other], verbose=0)
            near = [np.allclose(a, b, atol=1e-5) for a, b in zip(model.get_weights(), plain.get_weights())]
            if rank == 0:
                near += [len(look.seen) == len(other.seen) == 9]
                near += [np.allclose(a, b, atol=1e-5) for a, b in zip(look.seen, other.seen)]
            print("near", all(near), flush=True)
        """
    )
    assert text.count("near True") == 4, text


def test_in_a_job_weights_set_before_the_first_exchange_are_the_center(job):
    text = job(
        """
        class Change(keras.callbacks.Callback):
            def on_train_batch_begin(self, batch, logs=None):
                if batch == 2:
                    self.model.set_weights([0.5 * weight for weight in self.start])
                if batch == 4:
                    self.model.get_weights()  # reads the center, which the worker has not adopted yet

        change = Change()
        change.start = make("sgd").get_weights()
        optimizer = keras.optimizers.SGD(0.0)  # only the callback changes weights
        model, _ = fit("aeasgd", [change], optimizer, batch_size=2, epochs=1)
        print("same", all(map(np.array_equal, model.get_weights(), [0.5 * w for w in change.start])), flush=True)
        """
    )
    assert text.count("same True") == 2, text


def test_in_a_job_callbacks_see_what_was_validated(job):
    text = job(
        """
        class Judge(keras.callbacks.Callback):
            found = []

            def on_epoch_end(self, epoch, logs=None):
                time.sleep(0.1)
                loss = self.model.loss(y, self.model(x, training=False))
                self.found.append((float(keras.ops.convert_to_numpy(loss)), logs["val_loss"]))

        judge = Judge()
        model = make("sgd")
        model.compile(keras.optimizers.SGD(0.5), keras.losses.SparseCategoricalCrossentropy())
        choros.Trainer(model, "downpour").fit(
            x, y, batch_size=8, epochs=10, validation_data=(x, y), callbacks=[judge], verbose=0
        )
        print("judged", rank or all(abs(a - b) < 1e-5 for a, b in judge.found) and len(judge.found), flush=True)
        """
    )
    assert "judged 10" in text, text


def test_in_a_job_slow_callbacks_see_the_optimizer_of_the_epoch(job):
    text = job(
        """
        class Slow(keras.callbacks.Callback):
            seen = []

            def on_epoch_end(self, epoch, logs=None):
                self.seen.append(int(self.model.optimizer.iterations))
                time.sleep(0.3)

        slow = Slow()
        model, _ = fit(choros.AEASGD(window=2), [slow], "adam", epochs=4)
        print("seen", rank or slow.seen, int(model.optimizer.iterations), flush=True)
        """
    )
    assert "seen [8, 16, 24, 32] 32" in text, text


def test_in_a_job_rare_exchanges_are_tried(job):
    text = job(
        """
        class Judge(keras.callbacks.Callback):
            found = []

            def on_epoch_end(self, epoch, logs=None):
                loss = self.model.loss(y, self.model(x, training=False))
                self.found.append((float(keras.ops.convert_to_numpy(loss)), logs["val_loss"]))

        judge, stop = Judge(), keras.callbacks.EarlyStopping("val_loss", patience=1)
        model = make("sgd")
        model.compile(keras.optimizers.SGD(0.05), keras.losses.SparseCategoricalCrossentropy())
        history = choros.Trainer(model, choros.DOWNPOUR(window=1000)).fit(
            x, y, batch_size=8, epochs=5, validation_data=(x, y), callbacks=[judge, stop], verbose=0
        )
        near = all(abs(a - b) < 1e-5 for a, b in judge.found)
        print("tried", rank or [near, len(judge.found), judge.found[-1][1] < judge.found[0][1]], flush=True)
        print("exchanges", history.run.exchanges, flush=True)
        """
    )
    assert "tried [True, 5, True]" in text, text
    assert text.count("exchanges 2") == 2, text


class Reads(K.Callback):
    """Reads weights at some batches, and leaves a thread that reads them between batches."""

    def __init__(self, read, threads):
        super().__init__()
        self.read, self.sums, self.classes, self.running = read, [], set(), True
        self.threads = [threading.Thread(target=self.look, daemon=True) for _ in range(threads)]

    def on_train_begin(self, logs=None):
        for thread in self.threads:
            thread.start()

    def look(self):
        while self.running:
            self.classes.add(self.model.__class__)
            float(np.sum(self.model.layers[0].get_weights()[0]))
            time.sleep(0.003)

    def on_train_batch_end(self, batch, logs=None):
        if batch in self.read:
            self.sums.append(float(sum(np.sum(value) for value in self.model.get_weights())))

    def on_train_end(self, logs=None):
        self.running = False
        for thread in self.threads:
            thread.join()


def test_a_thread_that_reads_weights_between_batches_takes_nothing_from_the_callbacks(make_model, data, pools):
    x, y = data()
    plain, model = make_model(), make_model()
    how = {"batch_size": 8, "epochs": 2, "verbose": 0, "shuffle": False}
    # On JAX plain fit takes the weights away meanwhile.
    plain_reads, worker_reads = Reads({0, 2, 3}, 0), Reads({0, 2, 3}, 1)
    plain.fit(x, y, callbacks=[plain_reads], **how)
    choros.Trainer(model, workers=2, pool=pools(2)).fit(x, y, callbacks=[worker_reads], **how)
    np.testing.assert_allclose(worker_reads.sums, plain_reads.sums, rtol=1e-5, atol=1e-6)
    assert worker_reads.classes == {type(plain)}
    assert type(model) is type(plain)
    assert type(model.layers[0].kernel) is type(plain.layers[0].kernel)


def test_an_epoch_that_is_reported_before_an_earlier_one_frees_no_slot_of_it(make_model):
    """Slots are for two epochs. The callbacks of an epoch must have read its slot before the epoch after next."""
    control_block, seen = ControlBlock.create(2, 6, 1), []
    reads = K.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(epoch))
    job = types.SimpleNamespace(asynchronous=True, per_batch=False)
    callbacks = CallbackRunner(make_model(), [reads], 0, 6, None)
    callbacks.begin(0)
    run = types.SimpleNamespace(
        job=job,
        callbacks=callbacks,
        control_block=control_block,
        hangs=None,
        supervisor=None,
        losses={},
        publish=lambda control: None,
    )

    def report(epoch):
        LocalRun.handle_epoch_end(run, EpochEnded(epoch, {}, []))

    report(0)
    assert is_slot_free(control_block, 0, 2)
    report(2)  # its worker was faster than that of epoch 1
    assert seen == [0]
    assert not is_slot_free(control_block, 0, 3)  # its slot holds epoch 1
    report(1)
    assert seen == [0, 1, 2]
    assert is_slot_free(control_block, 0, 4)
    assert not is_slot_free(control_block, 0, 5)
    control_block.close()
