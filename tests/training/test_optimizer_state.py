"""The optimizer's slots, step counts and moving averages: over workers, fits, restarts and resumes."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import keras
import numpy as np
import pytest

import choros
from choros.data import make_source
from choros.errors import InvalidInputError

ALL = os.environ["KERAS_BACKEND"] == "jax"
SYNC = ["allreduce", "averaging", "localsgd", "easgd", "diloco"]
ASYNC = ["aeasgd", "downpour"] if ALL else ["downpour"]
WINDOWED = ["averaging", "localsgd", "aeasgd", "downpour"] if ALL else ["localsgd", "downpour"]
HOW = {"batch_size": 8, "seed": 1, "verbose": 0}
RATE, LATER = 1 / 64, 1 / 128


def adam(**how):
    return keras.optimizers.Adam(1e-2, **how)


def ema(**how):
    return adam(use_ema=True, ema_momentum=0.8, **how)


def counter(boundary):
    """A model whose weight is the negative sum of the learning rates of all steps, exactly."""
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])
    rate = keras.optimizers.schedules.PiecewiseConstantDecay([boundary], [RATE, LATER])
    model.compile(keras.optimizers.SGD(rate), lambda truth, values: keras.ops.mean(values - 0 * truth, axis=-1))
    return model


def sum_of_rates(steps, boundary):
    early = min(steps, boundary + 1)
    return early * RATE + (steps - early) * LATER


def weight_of(model):
    return float(np.asarray(model.get_weights()[0]).item())


@pytest.mark.parametrize("name", [*SYNC, *ASYNC] if ALL else ["localsgd", *ASYNC])
def test_slots_and_count_come_back_and_a_second_fit_continues(name, make_model, data, pools, tmp_path):
    model = make_model(keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(1e-2, 100)))
    trainer = choros.Trainer(model, name, workers=2, pool=pools(2))
    trainer.fit(*data(64), epochs=2, **HOW)
    assert int(model.optimizer.iterations) == 16
    trainer.fit(*data(64), epochs=4, initial_epoch=2, **HOW)
    model.save(tmp_path / "model.keras")
    saved = keras.models.load_model(tmp_path / "model.keras")
    assert int(saved.optimizer.iterations) == int(model.optimizer.iterations) == 32
    assert all(np.abs(keras.ops.convert_to_numpy(v)).sum() > 0 for v in saved.optimizer.variables)


def test_kept_workers_continue_the_schedule(data):
    model, ones = counter(5), np.ones((32, 1), "float32")
    with choros.Trainer(model, choros.DOWNPOUR(window=2), workers=2) as trainer:
        for epoch in range(3):
            trainer.fit(ones, ones, epochs=epoch + 1, initial_epoch=epoch, **HOW)
    assert weight_of(model) == -2 * sum_of_rates(12, 5)


def test_a_resumed_asynchronous_run_continues_the_schedule(pools, tmp_path):
    ones = np.ones((64, 1), "float32")

    def fit(epochs):
        model = counter(5)
        trainer = choros.Trainer(model, choros.DOWNPOUR(window=3), workers=2, pool=pools(2))
        trainer.fit(ones, ones, epochs=epochs, checkpoint=tmp_path, resume=True, **HOW)
        return model

    assert weight_of(fit(1)) == -2 * sum_of_rates(8, 5)
    for epochs in (2, 3):  # a second resume continues too
        resumed = fit(epochs)
        assert weight_of(resumed) == -2 * sum_of_rates(8 * epochs, 5)
        assert int(resumed.optimizer.iterations) == 8 * epochs


def test_a_worker_that_is_started_again_continues_the_schedule(pools):
    class Slow(keras.utils.PyDataset):
        def __len__(self):
            return 200

        def __getitem__(self, index):
            time.sleep(0.003)
            return np.ones((4, 1), "float32"), np.ones((4, 1), "float32")

    class Kill(keras.callbacks.Callback):
        looks_only = True

        def on_train_begin(self, logs=None):
            self.timer = threading.Timer(0.3, lambda: os.kill(pool._pool.pids[1], signal.SIGKILL))
            self.timer.start()

        def on_train_end(self, logs=None):
            self.timer.join()

    pool, model = pools(2), counter(150)
    pool.start()
    trainer = choros.Trainer(model, choros.DOWNPOUR(window=3), workers=2, pool=pool, restarts=1)
    history = trainer.fit(Slow(), epochs=2, seed=3, verbose=0, callbacks=[Kill()])
    assert [restart.signal for restart in history.run.restarts] == ["SIGKILL"]
    assert weight_of(model) == -2 * sum_of_rates(400, 150)


def mover():
    """A model whose weight moves by exact numbers, with a velocity that depends on the rows and not on the weight."""
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])
    loss = lambda truth, values: keras.ops.mean(values - 0 * truth, axis=-1)
    model.compile(keras.optimizers.SGD(1 / 64, momentum=0.5), loss)
    return model


def rows_of_rank_1(rows):
    """Rows of 1 for rank 1 and of 0 for rank 0, of which the velocity stays 0."""
    return (np.arange(rows) % 8 >= 4).astype("float32")[:, None]


def test_each_rank_goes_on_with_its_slots_after_a_resume(pools, tmp_path):
    x = rows_of_rank_1(32)

    def fit(epochs, **how):
        model = mover()
        trainer = choros.Trainer(model, choros.DOWNPOUR(window=2), workers=2, pool=pools(2))
        trainer.fit(x, x, epochs=epochs, shuffle=False, **how, **HOW)
        return weight_of(model)

    uninterrupted = fit(3)
    fit(1, checkpoint=tmp_path)
    fit(2, checkpoint=tmp_path, resume=True)
    assert fit(3, checkpoint=tmp_path, resume=True) == uninterrupted != 0


def test_each_rank_goes_on_with_its_slots_after_a_restart(pools):
    """Rank 1 is killed in its second epoch, before its next exchange, so it goes on from the end of the first."""

    pool = pools(2)
    killed = pool.start().pids[1]

    class Slow(keras.utils.PyDataset):
        held, reads = False, 0

        def __len__(self):
            return 8

        def __getitem__(self, index):  # every second batch is rank 1's
            self.reads += 1
            # With ``held``, the process that is killed does not end its second epoch, and so no epoch after it.
            time.sleep(30 if self.held and os.getpid() == killed and self.reads > 8 else 0.1)
            rows = np.full((4, 1), index % 2, "float32")
            return rows, rows

    class Kill(keras.callbacks.Callback):
        looks_only = True

        def on_epoch_end(self, epoch, logs=None):
            if epoch == 0:
                os.kill(pool._pool.pids[1], signal.SIGKILL)

    def fit(*calls, **how):
        model, rows = mover(), Slow()
        rows.held = bool(calls)
        trainer = choros.Trainer(model, choros.DOWNPOUR(window=0), workers=2, pool=pool, **how)
        history = trainer.fit(rows, epochs=3, shuffle=False, callbacks=list(calls), seed=1, verbose=0)
        return weight_of(model), [restart.rank for restart in history.run.restarts]

    uninterrupted, _ = fit()
    assert fit(Kill(), restarts=1) == (uninterrupted, [1])
    assert uninterrupted != 0


def test_the_average_goes_on_after_a_resume(make_model, data, pools, tmp_path):
    """Callbacks that begin again see the mean of all ranks' averages, as the result of the fit before was."""
    seen = []

    class Looks(keras.callbacks.Callback):
        looks_only = True

        def on_train_begin(self, logs=None):
            seen.append([np.array(v) for v in average(self.model)])

    def average(model):
        saved = model.optimizer._model_variables_moving_average
        return [keras.ops.convert_to_numpy(v) for v in saved]

    def fit(epochs, **how):
        model = make_model(ema())
        trainer = choros.Trainer(model, "downpour", workers=2, pool=pools(2))
        trainer.fit(*data(64), epochs=epochs, checkpoint=tmp_path, **how, **HOW)
        return [np.array(v) for v in average(model)]

    first = fit(1)
    fit(2, resume=True, callbacks=[Looks()])
    for value, expected in zip(seen[0], first, strict=True):
        np.testing.assert_allclose(value, expected, atol=1e-6)


def moved(name, optimizer, make_model, data, pool, workers=2):
    """Return the change of the result if the labels of rank 1's rows differ."""
    x, y = data(64)
    results = []
    for changed in (False, True):
        model, labels = make_model(optimizer()), y.copy()
        trainer = choros.Trainer(model, name, workers=workers, pool=pool)
        if changed:
            how = {"synchronous": trainer.mode == "sync", "batch_size": 8, "seed": 1, "epoch": 0, "shuffle": True}
            for batch in make_source(np.arange(64.0), y).epoch(rank=1, size=2, **how):
                rows = np.asarray(batch.x).astype(int).ravel()
                labels[rows] = (labels[rows] + 1) % 3
            assert 24 <= (labels != y).sum() <= 40
        trainer.fit(x, labels, epochs=1, **HOW)
        results.append(np.concatenate([weight.ravel() for weight in model.get_weights()]))
    return float(np.linalg.norm(results[1] - results[0]))


@pytest.mark.parametrize("name", WINDOWED)
def test_the_moving_average_includes_what_all_workers_learn(name, make_model, data, pools):
    plain, averaged = (moved(name, each, make_model, data, pools(2)) for each in (adam, ema))
    assert averaged > 0.2 * plain, (averaged, plain)


@pytest.mark.every(5)
@pytest.mark.parametrize("name", ["allreduce", "localsgd", "downpour"])
@pytest.mark.parametrize("often", [None, 3])
def test_the_moving_average_of_one_worker_is_that_of_keras(name, often, make_model, data, pools, same):
    x, y = data(64)
    ours, plain = (make_model(ema(ema_overwrite_frequency=often)) for _ in range(2))
    choros.Trainer(ours, name, workers=1, pool=pools(1)).fit(x, y, epochs=2, shuffle=False, **HOW)
    plain.fit(x, y, epochs=2, batch_size=8, shuffle=False, verbose=0)
    same(ours, plain)


@pytest.mark.parametrize("often", [None, 3])
def test_localsgd_at_every_step_averages_as_one_process_does(often, make_model, data, pools, same):
    def sgd():
        return keras.optimizers.SGD(0.05, use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=often)

    x, y = data(64)
    ours, plain = make_model(sgd()), make_model(sgd())
    choros.Trainer(ours, choros.LocalSGD(window=1), workers=2, pool=pools(2)).fit(x, y, epochs=2, shuffle=False, **HOW)
    plain.fit(x, y, epochs=2, batch_size=8, shuffle=False, verbose=0)
    same(ours, plain)


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("name", ["allreduce", "localsgd"])
def test_swapped_weights_are_validated_saved_and_returned(name, swap, make_model, data, pools, same, tmp_path):
    x, y = data(64)

    def run(fit, model, where, **how):
        calls = [keras.callbacks.SwapEMAWeights(swap_on_epoch=swap)]
        calls.append(keras.callbacks.ModelCheckpoint(str(where) + "{epoch}.weights.h5", save_weights_only=True))
        return fit(
            x, y, epochs=3, batch_size=8, shuffle=False, verbose=0, validation_data=(x, y), callbacks=calls, **how
        )

    def sgd():
        return keras.optimizers.SGD(0.05, use_ema=True, ema_momentum=0.8)

    ours, plain = make_model(sgd()), make_model(sgd())
    algorithm = choros.LocalSGD(window=1) if name == "localsgd" else name
    trainer = choros.Trainer(ours, algorithm, workers=2, pool=pools(2))
    caught = run(trainer.fit, ours, tmp_path / "ours", seed=1)
    expected = run(plain.fit, plain, tmp_path / "plain")
    np.testing.assert_allclose(caught.history["val_loss"], expected.history["val_loss"], rtol=1e-4)
    same(ours, plain)
    for epoch in (1, 2, 3):
        ours.load_weights(tmp_path / f"ours{epoch}.weights.h5")
        plain.load_weights(tmp_path / f"plain{epoch}.weights.h5")
        same(ours, plain)


def test_what_no_asynchronous_average_can_be_is_refused(make_model, data, pools):
    x, y = data(64)
    how = {"workers": 2, "pool": pools(2)}
    with pytest.raises(InvalidInputError, match="ema_overwrite_frequency=3"):
        choros.Trainer(make_model(ema(ema_overwrite_frequency=3)), "downpour", **how).fit(x, y, **HOW)
    swaps = [keras.callbacks.SwapEMAWeights()]
    with pytest.raises(InvalidInputError, match="SwapEMAWeights"):
        choros.Trainer(make_model(ema()), "downpour", **how).fit(x, y, callbacks=swaps, **HOW)
    with pytest.raises(InvalidInputError, match="use_ema=True"):
        choros.Trainer(make_model(), **how).fit(x, y, callbacks=swaps, **HOW)


@pytest.mark.parametrize("name", ["allreduce", "downpour"])
def test_a_backup_is_restored_as_in_keras(name, make_model, data, pools, same, tmp_path):
    def fit(model, epochs, *calls):
        trainer = choros.Trainer(model, name, workers=2, pool=pools(2))
        return trainer.fit(*data(64), epochs=epochs, callbacks=list(calls), **HOW)

    uninterrupted, model = make_model(), make_model()
    fit(uninterrupted, 4)
    fit(model, 2, keras.callbacks.BackupAndRestore(tmp_path / "backup", delete_checkpoint=False))
    other = make_model(seed=7)
    history = fit(other, 4, keras.callbacks.BackupAndRestore(tmp_path / "backup"))
    assert history.epoch == [2, 3]
    assert int(other.optimizer.iterations) == 32
    if name == "allreduce":
        same(other, uninterrupted)
    assert not (tmp_path / "backup").exists()
    repeated = {"callbacks": [keras.callbacks.BackupAndRestore(tmp_path / "backup")], "checkpoint": tmp_path / "kept"}
    trainer = choros.Trainer(make_model(), name, workers=2, pool=pools(2))
    with pytest.raises(InvalidInputError, match="checkpoint="):
        trainer.fit(*data(64), **repeated, **HOW)


RANKS = """
    import keras, numpy as np
    import choros

    def fit(name, changed, use_ema, **how):
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
        model.compile(keras.optimizers.Adam(0.01, use_ema=use_ema, ema_momentum=0.8), "mse")
        x = np.random.default_rng(0).normal(size=(64, 6)).astype("float32")
        y = x[:, :3].copy()
        y[np.arange(64) % 8 >= 4] += changed  # rank 1's half of each batch
        choros.Trainer(model, name).fit(x, y, batch_size=8, shuffle=False, verbose=0, **how)
        return model

    for name in ("localsgd", "downpour"):
        far = []
        for use_ema in (False, True):
            one, other = (np.concatenate([w.ravel() for w in fit(name, c, use_ema).get_weights()]) for c in (0, 1))
            far.append(float(np.abs(one - other).sum()))
        print("moved", far[1] > 0.2 * far[0], flush=True)
    count = int(fit("downpour", 0, False, epochs=1, checkpoint="state").optimizer.iterations)
    more = int(fit("downpour", 0, False, epochs=3, checkpoint="state", resume=True).optimizer.iterations)
    print("counts", count, more, flush=True)
"""


def test_ranks_of_a_job(tmp_path):
    (tmp_path / "script.py").write_text(textwrap.dedent(RANKS))
    command = [sys.executable, "-m", "choros", "run", "-n", "2", "script.py"]
    out = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert out.returncode == 0, out.stderr
    assert out.stdout.count("moved True\n") == 4, out.stdout
    assert out.stdout.count("counts 8 24\n") == 2, out.stdout


def test_ranks_of_a_launcher(make_model, data):
    model, other = make_model(ema()), make_model(ema())
    for each, change in ((model, 0), (other, 1)):
        x, y = data(64)
        y[np.arange(64) % 8 >= 4] += change
        trainer = choros.Trainer(each, "downpour", workers=2, launcher="mpiexec")
        trainer.fit(x, y % 3, epochs=1, shuffle=False, **HOW)
        assert int(each.optimizer.iterations) == 8
    assert max(np.abs(a - b).max() for a, b in zip(model.get_weights(), other.get_weights(), strict=True)) > 1e-3
