"""A Trainer whose workers run on the nodes of a Ray cluster: what it trains, how it fails, and what it leaves."""

import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import choros
from choros.errors import InvalidInputError, WorkerFailedError

SPREAD = {"strategy": "STRICT_SPREAD", "timeout": 60}  # one worker on each node


def data(rows=60, seed=0):
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=(rows, 8)).astype("float32"), rng.integers(0, 3, rows)
    x[:, 0] += y
    return x, y


def make_model(dropout=0.0):
    import keras

    keras.utils.set_random_seed(0)
    layers = [keras.Input((8,)), keras.layers.Dense(6, "relu"), keras.layers.Dropout(dropout)]
    model = keras.Sequential([*layers, keras.layers.Dense(3, "softmax")])
    model.compile(keras.optimizers.Adam(1e-2), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def fit(model, algorithm, launcher, x, y=None, restarts=0, **how):
    trainer = choros.Trainer(
        model, algorithm, workers=2, launcher=launcher, restarts=restarts, timeout=60, first_timeout=120
    )
    return trainer.fit(x, y, **{"epochs": 2, "batch_size": 16, "seed": 3, "verbose": 0, **how})


def test_it_is_the_same_training_to_the_bit(pools):
    """The same as with workers of this machine, and the callbacks run in this process and set the learning rate."""
    import keras

    class Half(keras.callbacks.Callback):
        def __init__(self):
            super().__init__()
            self.seen = []

        def on_epoch_end(self, epoch, logs=None):
            self.seen.append((os.getpid(), [np.array(w) for w in self.model.get_weights()]))
            self.model.optimizer.learning_rate = 5e-3

    x, y = data(rows=101)
    how = {"validation_split": 0.2, "epochs": 3}
    ours, plain, there, here = make_model(0.3), make_model(0.3), Half(), Half()
    history = fit(ours, "allreduce", choros.Ray(**SPREAD), x, y, callbacks=[there], **how)
    more = {"batch_size": 16, "seed": 3, "verbose": 0}
    other = choros.Trainer(plain, workers=2, pool=pools(2)).fit(x, y, callbacks=[here], **more, **how)
    assert history.history == other.history
    assert len(there.seen) == 3
    for (process, weights), (_, expected) in zip(there.seen, here.seen, strict=True):
        assert process == os.getpid()
        assert all(np.array_equal(a, b) for a, b in zip(weights, expected, strict=True))
    for a, b in zip(
        ours.variables + ours.optimizer.variables, plain.variables + plain.optimizer.variables, strict=True
    ):
        assert np.array_equal(np.array(a), np.array(b))


def test_an_asynchronous_algorithm_trains_with_callbacks():
    import keras

    epochs = []

    class Epoch(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            epochs.append((epoch, logs["loss"]))

    x, y = data(rows=256)
    model = make_model()
    before = model.get_weights()
    history = fit(model, choros.AEASGD(window=2), choros.Ray(**SPREAD), x, y, epochs=6, callbacks=[Epoch()])
    assert [epoch for epoch, _ in epochs] == list(range(6))
    assert history.history["loss"][-1] < history.history["loss"][0]
    assert any(not np.array_equal(a, b) for a, b in zip(before, model.get_weights(), strict=True))


def breaking(where, times):
    """Return rows whose reading kills rank 1, so many times; the rank says so before."""
    import keras

    class Rows(keras.utils.PyDataset):
        def __len__(self):
            return 6

        def __getitem__(self, index):
            flags = list(pathlib.Path(where).glob("killed-*"))
            if index == 4 and os.environ.get("CHOROS_RANK") == "1" and len(flags) < times:
                print("the last words", flush=True)
                pathlib.Path(where, f"killed-{len(flags)}").touch()
                os.kill(os.getpid(), 9)
            rng = np.random.default_rng(index)
            return rng.normal(size=(8, 8)).astype("float32"), rng.integers(0, 3, 8)

    return Rows()


def test_a_worker_that_is_killed_is_named_and_nothing_is_lost(tmp_path):
    model = make_model()
    before = model.get_weights()
    with pytest.raises(WorkerFailedError, match=r"worker 1 of 2 .*ended by SIGKILL") as failed:
        fit(model, "allreduce", choros.Ray(**SPREAD), breaking(tmp_path, 1), shuffle=False)
    assert (failed.value.rank, failed.value.signal) == (1, "SIGKILL")
    assert "[1] the last words" in failed.value.output
    assert all(np.array_equal(a, b) for a, b in zip(model.get_weights(), before, strict=True))


def test_a_restart_resumes_from_the_checkpoint(tmp_path):
    model, room = make_model(), tmp_path / "state"
    how = {"shuffle": False, "epochs": 3, "checkpoint": str(room)}
    history = fit(model, "allreduce", choros.Ray(**SPREAD), breaking(tmp_path, 1), restarts=1, **how)
    assert len(history.epoch) == 3
    assert len(history.run.restarts) == 1
    assert list(tmp_path.glob("killed-*")) == [tmp_path / "killed-0"]


def test_a_restart_does_without_a_node_that_was_lost(cluster):
    """Three workers on three nodes, of which one ends; the others have room for three."""
    import keras

    node = cluster.add_node(num_cpus=2)

    class Lose(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if epoch == 1 and node in cluster.worker_nodes:
                cluster.remove_node(node, allow_graceful=False)
                time.sleep(15)  # rank 0 waits, and the loss is seen before the last epoch

    x, y = data(rows=96)
    launcher = choros.Ray(strategy="SPREAD", timeout=60)
    trainer = choros.Trainer(make_model(), workers=3, launcher=launcher, restarts=1, timeout=60, first_timeout=120)
    history = trainer.fit(x, y, epochs=4, batch_size=24, verbose=0, callbacks=[Lose()])
    assert len(history.epoch) == 4
    assert len(history.run.restarts) == 1


def test_an_interrupt_ends_all_workers_and_keeps_the_last_weights():
    import keras

    class Interrupt(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if epoch == 1:
                threading.Timer(0.2, signal.raise_signal, [signal.SIGINT]).start()

    x, y = data(rows=2000)
    model = make_model()
    before = model.get_weights()
    with pytest.raises(KeyboardInterrupt):
        fit(model, "allreduce", choros.Ray(**SPREAD), x, y, epochs=10_000, batch_size=8, callbacks=[Interrupt()])
    assert any(not np.array_equal(a, b) for a, b in zip(model.get_weights(), before, strict=True))


def test_more_workers_than_the_nodes_have_room_for_are_refused_before_a_start():
    with pytest.raises(InvalidInputError, match=r"workers=5, but Ray\(.*\) has room for 4"):
        choros.Trainer(make_model(), workers=5, launcher=choros.Ray())
    with pytest.raises(InvalidInputError, match="has room for 2"):
        choros.Trainer(make_model(), workers=3, launcher=choros.Ray(cores=2))
    with pytest.raises(InvalidInputError, match="has room for 0"):
        choros.Trainer(make_model(), workers=1, launcher=choros.Ray(gpus=3))
    assert choros.Trainer(make_model(), launcher="ray").workers == 4


CONNECTS = """
import os, choros
for address, given in (("ray://head:10001", ""), ("", "127.0.0.1:1")):
    os.environ["RAY_ADDRESS"] = address
    try:
        choros.Ray(address=given).size()
    except choros.InvalidInputError as error:
        print(error)
"""


def test_a_cluster_that_cannot_be_reached_is_named():
    """In another process, as this one is connected."""
    done = subprocess.run([sys.executable, "-c", CONNECTS], stdout=subprocess.PIPE, text=True, timeout=100, check=True)
    client, unreachable = done.stdout.splitlines()
    assert client.startswith("Ray Client (ray://) is not supported")
    assert unreachable.startswith("Ray at '127.0.0.1:1' cannot be reached (ConnectionRefusedError")


def test_resources_that_others_have_are_waited_for_and_named():
    import ray

    class Busy:
        def ready(self):
            return True

    choros.Ray().size()  # connects
    other = ray.remote(Busy).options(num_cpus=2).remote()
    ray.get(other.ready.remote())
    x, y = data(rows=16)
    with pytest.raises(WorkerFailedError, match=r"2 CPU, 0 GPU for each of 2 workers in 2 s .*has 2 CPU, 2 GPU free"):
        fit(make_model(), "allreduce", choros.Ray(2, timeout=2), x, y)
    ray.kill(other)


def test_workers_see_the_gpus_that_ray_gives_them(capfd):
    import keras

    class Rows(keras.utils.PyDataset):
        def __len__(self):
            return 2

        def __getitem__(self, index):
            print("GPUs", repr(os.environ.get("CUDA_VISIBLE_DEVICES")), flush=True)
            return np.ones((8, 8), "float32"), np.zeros(8, "int32")

    for launcher, expected in (
        (choros.Ray(gpus=1, strategy="STRICT_PACK"), {"'0,1'", "'1,0'"}),
        (choros.Ray(**SPREAD), {"''"}),
    ):
        fit(make_model(), "allreduce", launcher, Rows(), epochs=1, shuffle=False)
        lines = [line for line in capfd.readouterr().out.splitlines() if "] GPUs " in line]
        assert len(lines) >= 2
        assert {line.partition("GPUs ")[2] for line in lines} <= expected


def test_a_trainer_in_a_task_of_ray(tmp_path):
    import ray

    place = str(tmp_path)

    def train():
        import os

        os.chdir(place)
        import keras
        import numpy as np

        import choros

        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(3)])
        model.compile("sgd", "mse")
        x, y = np.ones((64, 8), "float32"), np.ones((64, 3), "float32")
        trainer = choros.Trainer(model, workers=2, launcher=choros.Ray(strategy="STRICT_SPREAD"), first_timeout=120)
        return trainer.fit(x, y, epochs=3, batch_size=16, verbose=0).history["loss"]

    choros.Ray().size()  # connects
    losses = ray.get(ray.remote(num_cpus=0)(train).remote(), timeout=200)
    assert losses[-1] < losses[0]


SCRIPT = """
import keras, numpy as np, choros

class Ready(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        if epoch == 0:
            print("ready", flush=True)

model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(3)])
model.compile("sgd", "mse")
x, y = np.ones((2000, 8), "float32"), np.ones((2000, 3), "float32")
trainer = choros.Trainer(model, workers=2, launcher=choros.Ray(strategy="STRICT_SPREAD"), first_timeout=120)
trainer.fit(x, y, epochs=10_000, batch_size=8, verbose=0, callbacks=[Ready()])
"""


def test_a_caller_that_is_killed_leaves_no_worker(tmp_path, running_processes):
    choros.Ray().size()  # connects, for the check of what is free
    with subprocess.Popen([sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, text=True, cwd=tmp_path) as caller:
        for line in caller.stdout:
            if line.strip() == "ready":
                break
        assert len(running_processes()) >= 4
        caller.kill()
    limit = time.monotonic() + 60
    while running_processes():
        assert time.monotonic() < limit, running_processes()
        time.sleep(0.2)
    for path in tmp_path.glob(".choros-*/*"):  # as after a kill with any launcher
        path.unlink()
    for path in tmp_path.glob(".choros-*"):
        path.rmdir()
    for path in pathlib.Path("/tmp").glob("choros-ray-*"):
        (path / "shell").unlink(missing_ok=True)
        path.rmdir()
