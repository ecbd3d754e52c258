"""A Trainer in a job (``choros run``, ``mpiexec``): the ranks join, nothing is started, all end with one model."""

import pathlib
import subprocess
import sys
import textwrap

import numpy as np
import pytest

import choros

SCRIPT = """
    import os
    import keras, numpy as np
    import choros
    from choros.cluster import Place

    LOSS = "sparse_categorical_crossentropy"
    rank = Place.here().rank
    keras.utils.set_random_seed(0 if rank == 0 else 9)  # rank 0's weights count
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(60, 8)).astype("float32"), rng.integers(0, 3, 60)
    x[:, 0] += y

    def make(activation="relu", **other):
        model = keras.Sequential(
            [keras.Input((8,)), keras.layers.Dense(6, activation), keras.layers.Dense(3, "softmax")]
        )
        how = {"optimizer": keras.optimizers.Adam(1e-2), "loss": LOSS, "metrics": ["accuracy"]}
        model.compile(**how | other)
        return model

    for bad in (
        lambda: choros.Trainer(make(), workers=3),
        lambda: choros.Trainer(make(), "single"),
        lambda: choros.Trainer(make(), "ensemble"),
        lambda: choros.Trainer(make(), pool=choros.WorkerPool(2)),
    ):
        try:
            bad()
        except choros.InvalidInputError as error:
            assert "rank 0 of 2" in str(error) or "rank 1 of 2" in str(error) or "outside a job" in str(error), error
        else:
            raise AssertionError("not refused")

    def unlike(compile={}, data=(x, y), **how):
        model = make(**compile if rank else {})
        choros.Trainer(model).fit(*data if rank else (x, y), batch_size=7, verbose=0, **how if rank else {})

    for words, how in {
        "optimizer (['SGD', ": {"compile": {"optimizer": "sgd"}},
        "optimizer (['Adam', ": {"compile": {"optimizer": keras.optimizers.Adam(beta_1=0.8)}},
        "loss ('SparseCategoricalCrossentropy(r": {"compile": {"loss": keras.losses.SparseCategoricalCrossentropy()}},
        "metrics ([] and ['accuracy'])": {"compile": {"metrics": []}},
        "settings: model (layer 1 (Dense): activation 'tanh' and 'relu')": {"compile": {"activation": "tanh"}},
        "validation_data (60 and None)": {"validation_data": (x, y)},
        "rows, steps (50 and 60)": {"data": (x[:50], y[:50])},
        "seed (3 and None)": {"seed": 3},
    }.items():
        try:
            unlike(**how)
        except choros.InvalidInputError as error:
            assert f"Rank 1 on {os.uname().nodename} and rank 0 on " in str(error), error
            assert "have different settings: " in str(error) and words in str(error), (words, error)
        else:
            raise AssertionError(words)

    with choros.rank_zero_first():  # the file is made by one, and is there for the other
        first = not os.path.exists("made")
        open("made", "a").close()
    assert first == (rank == 0)

    calls = []
    kept = {}
    keras.utils.set_random_seed(0 if rank == 0 else 9)
    for name in ("allreduce", "localsgd", "aeasgd", "stopped"):
        model = make()
        callbacks = [keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: calls.append(epoch))]
        if name == "stopped":
            callbacks = [keras.callbacks.EarlyStopping("loss", min_delta=9.0, patience=1, restore_best_weights=True)]
        trainer = choros.Trainer(model, "allreduce" if name == "stopped" else name, workers=2)
        history = trainer.fit(
            x, y, batch_size=7, epochs=3, seed=4, verbose=0, callbacks=callbacks, validation_data=(x, y)
        )
        assert len(history.history["val_loss"]) == len(history.history["loss"]) == (2 if name == "stopped" else 3)
        assert len(history.run.workers) == 2
        kept |= {f"{name}{i}": w for i, w in enumerate(model.get_weights())}
        kept[name + "loss"] = np.array(history.history["loss"])
    assert calls == ([0, 1, 2] * 3 if rank == 0 else []), calls
    np.savez(f"rank{rank}.npz", **kept)
"""


@pytest.fixture(scope="module", params=["choros run", "mpiexec"])
def ranks(request, tmp_path_factory, backend):
    room = tmp_path_factory.mktemp("joined")
    pathlib.Path(room, "script.py").write_text(textwrap.dedent(SCRIPT))
    if request.param == "mpiexec":
        if backend != "jax":
            pytest.skip("how the ranks find each other is the same on every backend: once is enough")
        request.getfixturevalue("mpiexec")(2, sys.executable, "script.py", cwd=room, timeout=280)
        return [dict(np.load(room / f"rank{rank}.npz")) for rank in (0, 1)]
    done = subprocess.run(
        [sys.executable, "-m", "choros", "run", "-n", "2", "script.py"],
        cwd=room,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [dict(np.load(room / f"rank{rank}.npz")) for rank in (0, 1)]


def test_all_ranks_end_alike(ranks):
    assert list(ranks[0]) == list(ranks[1])
    for name, values in ranks[0].items():
        np.testing.assert_array_equal(values, ranks[1][name], err_msg=name)


def test_as_with_workers_of_its_own(ranks, make_model, data, pools, same):
    x, y = data()
    trained = make_model()
    history = choros.Trainer(trained, workers=2, pool=pools(2)).fit(
        x, y, batch_size=7, epochs=3, seed=4, verbose=0, validation_data=(x, y)
    )
    same(trained, [ranks[0][f"allreduce{i}"] for i in range(4)], 1e-6)
    np.testing.assert_allclose(history.history["loss"], ranks[0]["allreduceloss"], rtol=1e-6)
    for name in ("localsgd", "aeasgd"):
        assert ranks[0][name + "loss"][-1] < ranks[0][name + "loss"][0]


STOPPING = """
    import keras, numpy as np
    import choros

    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    x = np.random.default_rng(0).normal(size=(8000, 6)).astype("float32")

    class Stop(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if epoch == 2:
                self.model.stop_training = True

    history = choros.Trainer(model, "aeasgd").fit(x, x.sum(1), epochs=200, batch_size=32, callbacks=[Stop()], verbose=0)
    print("stopped", history.epoch, sum(worker.steps for worker in history.run.workers), flush=True)
"""


def test_asynchronous_workers_stop_when_a_callback_says_so(tmp_path):
    """The callbacks run while training goes on, whichever worker ends its epochs first."""
    (tmp_path / "script.py").write_text(textwrap.dedent(STOPPING))
    command = [sys.executable, "-m", "choros", "run", "-n", "2", "script.py"]
    out = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert out.returncode == 0, out.stderr
    lines = [line.split("stopped ")[1] for line in out.stdout.splitlines() if "stopped" in line]
    assert len(lines) == 2
    assert {line.rpartition("]")[0] for line in lines} == {"[0, 1, 2"}
    assert all(int(line.rpartition(" ")[2]) < 60 * 500 for line in lines)  # of 200 epochs of 500 steps


LATE = """
    import sys, time
    import keras, numpy as np
    import choros
    from choros.cluster import Place

    class Data(keras.utils.PyDataset):
        def __len__(self):
            return 8

        def __getitem__(self, index):
            time.sleep(0.3 * Place.here().rank)  # rank 0 has done its steps long before
            return np.ones((4, 2), "float32"), np.ones((4, 1), "float32")

    class Slower(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.optimizer.learning_rate = 1 / 128

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    choros.Trainer(model, "aeasgd").fit(Data(), callbacks=[Slower()], verbose=0)
    print("rate", float(model.optimizer.learning_rate) * 128, flush=True)
"""


def test_a_rate_that_was_set_after_the_last_meeting_is_the_model_s(tmp_path):
    (tmp_path / "script.py").write_text(textwrap.dedent(LATE))
    command = [sys.executable, "-m", "choros", "run", "-n", "2", "script.py"]
    out = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert out.returncode == 0, out.stderr
    assert out.stdout.count("rate 1.0\n") == 2, out.stdout
