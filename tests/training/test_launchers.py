"""A Trainer whose workers a launcher starts: what it trains, what its callbacks see, and how it fails."""

import os
import pathlib
import signal
import stat
import subprocess
import threading
import time

import numpy as np
import pytest

import choros
from choros.errors import InvalidInputError, WorkerFailedError
from choros.training.payload import SharedCodeFolder, read_code


@pytest.fixture(autouse=True)
def nothing_left(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    yield
    assert not [name for name in os.listdir() if name.startswith(".choros-")]
    remaining = subprocess.run(["pgrep", "-P", str(os.getpid()), "-fa", "choros run"], capture_output=True, text=True)
    assert not remaining.stdout


def fit(model, algorithm, launcher, x, y=None, **how):
    trainer = choros.Trainer(model, algorithm, workers=2, launcher=launcher, timeout=60, first_timeout=120)
    return trainer.fit(x, y, **{"epochs": 2, "batch_size": 16, "seed": 3, "verbose": 0, **how})


@pytest.mark.parametrize("launcher", ["localhost:2", "mpiexec"])
def test_it_is_the_same_training_to_the_bit(make_model, data, same, same_history, pools, launcher):
    """The same as with workers of this machine: weights, optimizer, history, what callbacks see and what they set."""
    import keras

    seen = []

    class Half(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            seen.append([np.array(w) for w in self.model.get_weights()])
            self.model.optimizer.learning_rate = 5e-3

    x, y = data(rows=101)
    how = {"validation_split": 0.2, "epochs": 3}
    ours, plain = make_model(dropout=0.3), make_model(dropout=0.3)
    there = launcher if launcher == "mpiexec" else choros.Ssh(launcher)
    history = fit(ours, "allreduce", there, x, y, callbacks=[Half()], **how)
    actual, seen = seen, []
    more = {"batch_size": 16, "seed": 3, "verbose": 0}
    other = choros.Trainer(plain, workers=2, pool=pools(2)).fit(x, y, callbacks=[Half()], **more, **how)
    same(ours, plain, 0)
    same_history(history, other, 0)
    for value, two in zip(actual, seen, strict=True):
        same(value, two, 0)
    same([np.array(v) for v in ours.optimizer.variables], [np.array(v) for v in plain.optimizer.variables], 0)
    assert [worker.steps for worker in history.run.workers] == [worker.steps for worker in other.run.workers]


def test_sync_and_async_with_files_and_code_of_the_users_own(make_model, data, tmp_path, capfd):
    """Files are read by the workers, a decode travels; each step's callback sees the weights of a worker."""
    import keras

    x, y = data(rows=64)
    np.savetxt(tmp_path / "rows.csv", np.column_stack([x, y]), "%.6f", ",", header="a,b,c,d,e,f,g,h,y", comments="")

    def decode(columns):
        return {"twice": 2 * np.column_stack([columns[name] for name in "abcdefgh"]), "y": columns["y"]}

    files = choros.files(str(tmp_path / "rows.csv"), x="twice", y="y", decode=decode)
    steps = []

    class Step(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            steps.append(float(np.abs(self.model.get_weights()[0]).sum()))

    first, two = make_model(), make_model()
    fit(first, "allreduce", choros.Ssh("localhost:2"), files, callbacks=[Step()])
    assert len(steps) == len(set(steps)) == 8
    before = two.get_weights()
    history = fit(two, choros.AEASGD(window=2), "mpiexec", files, epochs=4)
    assert history.history["loss"][-1] < history.history["loss"][0]
    assert any(not np.array_equal(a, b) for a, b in zip(before, two.get_weights(), strict=True))
    assert two.predict(2 * x, verbose=0).shape == (64, 3)


def test_a_callback_stops_all_and_what_workers_print_is_shown(make_model, data, capfd):
    import keras

    class Stop(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.stop_training = True

    @keras.saving.register_keras_serializable("test")
    class Loud(keras.layers.Layer):
        def call(self, x):
            print("called by", os.environ.get("CHOROS_RANK"))
            return x

    x, y = data(rows=40)
    model = keras.Sequential([keras.Input((8,)), Loud(), keras.layers.Dense(3, "softmax")])
    model.compile("sgd", "sparse_categorical_crossentropy")
    history = fit(model, "localsgd", choros.Ssh("localhost:2"), x, y, epochs=5, callbacks=[Stop()])
    assert history.epoch == [0]
    assert {"[0] called by 0", "[1] called by 1"} <= set(capfd.readouterr().out.splitlines())


BREAKING = {
    "raise ValueError('wrong row')": (r"worker 1 of 2 .*ValueError: wrong row[\s\S]*test_launchers", ""),
    "os.kill(os.getpid(), 9)": (r"worker 1 of 2 .*ended by SIGKILL", "SIGKILL"),
    "os._exit(7)": (r"worker 1 of 2 .*exit code 7", ""),
}


@pytest.mark.parametrize(("launcher", "how"), [*(("localhost:2", how) for how in BREAKING), ("mpiexec", "os._exit(7)")])
def test_a_worker_that_fails_is_named_and_nothing_is_lost(make_model, data, same, launcher, how):
    import keras

    class Rows(keras.utils.PyDataset):
        def __len__(self):
            return 6

        def __getitem__(self, index):
            if index == 4 and os.environ.get("CHOROS_RANK", os.environ.get("PMI_RANK")) == "1":
                exec(how)
            rng = np.random.default_rng(index)
            return rng.normal(size=(8, 8)).astype("float32"), rng.integers(0, 3, 8)

    model = make_model()
    before = model.get_weights()
    command, number = BREAKING[how]
    there = launcher if launcher == "mpiexec" else choros.Ssh(launcher)
    begun = time.monotonic()
    with pytest.raises(WorkerFailedError, match=command) as failed:
        fit(model, "allreduce", there, Rows(), shuffle=False, epochs=3)
    assert time.monotonic() - begun < 150
    assert (failed.value.rank, failed.value.signal) == (1, number)
    same(model.get_weights(), before, 0)


def test_an_interrupt_ends_all_workers_and_keeps_the_last_weights(make_model, data):
    import keras

    class Interrupt(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if epoch == 1:
                self.seen = self.model.get_weights()
                threading.Timer(0.2, signal.raise_signal, [signal.SIGINT]).start()

    x, y = data(rows=2000)
    model, interrupt = make_model(), Interrupt()
    before = model.get_weights()
    with pytest.raises(KeyboardInterrupt):
        fit(model, "allreduce", choros.Ssh("localhost:2"), x, y, epochs=10_000, batch_size=8, callbacks=[interrupt])
    assert interrupt.seen
    assert any(not np.array_equal(a, b) for a, b in zip(model.get_weights(), before, strict=True))


@pytest.mark.parametrize(
    ("how", "message"),
    {
        "nothing there": ({"launcher": choros.Mpiexec(program="/no/such/mpiexec")}, "no /no/such/mpiexec"),
        "no such name": ({"launcher": "slurm"}, "choros.Srun"),
        "another form": ({"launcher": lambda: choros.Ssh("n1,n2")}, "host:slots"),
        "too many": ({"launcher": choros.Ssh("localhost:2"), "workers": 3}, "has room for 2"),
        "how many": ({"launcher": "mpiexec", "workers": None}, "give workers="),
        "members": ({"launcher": "mpiexec", "algorithm": "ensemble"}, "leave launcher out"),
        "interface": ({"launcher": "mpiexec", "network": "nosuch0"}, "no such interface"),
    }.values(),
)
def test_what_cannot_be_is_said(make_model, data, how, message):
    x, y = data(rows=16)
    make = how["launcher"] if callable(how["launcher"]) else lambda: how["launcher"]
    with pytest.raises((InvalidInputError, WorkerFailedError), match=message):
        choros.Trainer(make_model(), **{"workers": 2, **how, "launcher": make()}).fit(x, y, verbose=0)


def test_a_stream_is_refused(make_model, data):
    x, y = data(rows=16)
    with pytest.raises(InvalidInputError, match=r"choros.files or a PyDataset"):
        fit(make_model(), "allreduce", "mpiexec", ((x, y) for _ in range(8)), steps_per_epoch=2)


def test_code_that_somebody_else_could_have_written_is_not_taken(tmp_path):
    with SharedCodeFolder([b"code"]) as folder:
        place = pathlib.Path(folder.files["folder"])
        assert stat.S_IMODE(place.stat().st_mode) == 0o700
        assert read_code(folder.files) == [b"code"]
        (place / "0").write_bytes(b"other")
        with pytest.raises(InvalidInputError, match="not what the process that called fit wrote"):
            read_code(folder.files)
        (place / "0").chmod(0o620)
        with pytest.raises(InvalidInputError, match="other users may read or write it"):
            read_code(folder.files)
    with pytest.raises(InvalidInputError, match="in a directory that all hosts share"):
        read_code(folder.files)
