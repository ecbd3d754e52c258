"""``Trainer(launcher=choros.Spark(...))``: arrays, files and code go to the tasks, callbacks and lines stay here."""

import contextlib
import functools
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest

import choros
from choros.algorithms import Algorithm
from choros.errors import InvalidInputError, WorkerFailedError


def make(rate=0.1):
    import keras

    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(2, "softmax")])
    model.compile(keras.optimizers.SGD(rate), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


@pytest.fixture(scope="module")
def rows():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(203, 6)).astype("float32")
    return x, (x[:, 0] + x[:, 1] > 0).astype("int32")


def fit(spark, model, algorithm, x, y=None, launcher=None, **how):
    trainer = choros.Trainer(model, algorithm, workers=2, launcher=launcher or choros.Spark(spark), timeout=60)
    return trainer, trainer.fit(x, y, **{"epochs": 3, "batch_size": 16, "seed": 3, "verbose": 0, **how})


def test_it_is_the_training_of_workers_of_this_machine_to_the_bit(spark, rows, capfd):
    import keras

    seen = []

    class Half(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            seen.append(self.model.get_weights()[0])
            self.model.optimizer.learning_rate = 0.05

    ours, plain = make(), make()
    how = {"callbacks": [Half()], "validation_split": 0.2}
    _, history = fit(spark, ours, "allreduce", *rows, **how, verbose=1)
    shown, actual, seen = capfd.readouterr().out, seen, []
    assert "Epoch 3/3" in shown
    assert "val_accuracy" in shown
    other = choros.Trainer(plain, workers=2).fit(*rows, epochs=3, batch_size=16, seed=3, verbose=0, **how)
    for name, figures in other.history.items():
        assert history.history[name] == figures
    for value, two in zip([*ours.get_weights(), *actual], [*plain.get_weights(), *seen], strict=True):
        np.testing.assert_array_equal(value, two)
    assert [worker.rows for worker in history.run.workers] == [worker.rows for worker in other.run.workers]


def test_a_timeline_has_a_lane_for_each_task(spark, rows, tmp_path):
    path = tmp_path / "run.json"
    for algorithm in ("allreduce", "aeasgd"):
        trainer = choros.Trainer(make(), algorithm, workers=2, launcher=choros.Spark(spark), timeline=path)
        history = trainer.fit(*rows, epochs=2, batch_size=16, verbose=0)
        events = json.loads(path.read_text())["traceEvents"]
        for rank, worker in enumerate(history.run.workers):
            kinds = [event["cat"] for event in events if event["pid"] == rank + 1 and event["ph"] == "X"]
            assert (kinds.count("data"), kinds.count("exchange")) == (worker.steps, worker.exchanges)
    with pytest.raises(InvalidInputError, match="do not reach the members of an Ensemble"):
        choros.Trainer(make(), "ensemble", workers=2, launcher=choros.Spark(spark), timeline=path)


def test_a_sparse_matrix_is_trained_as_a_dense_one(spark):
    from scipy import sparse

    dense = sparse.random(40, 6, 0.3, random_state=0, dtype=np.float32).toarray()
    labels = (dense[:, 0] > 0).astype("int32")
    ours, plain = make(), make()
    fit(spark, ours, "allreduce", sparse.csr_matrix(dense), labels, shuffle=False)
    plain.fit(dense, labels, epochs=3, batch_size=16, shuffle=False, verbose=0)
    for a, b in zip(ours.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_models_without_a_configuration_are_trained_as_they_are(spark, rows):
    import keras

    class Pair(keras.Model):
        def __init__(self, body, head):
            super().__init__()
            self.body, self.head = body, head

        def compile(self, rate, factor):
            super().compile(keras.optimizers.SGD(rate), functools.partial(scaled, factor=factor))

        def call(self, x):
            return self.head(self.body(x))

    def scaled(y, p, factor):
        return factor * keras.losses.sparse_categorical_crossentropy(y, p)

    x, y = rows
    trained = []
    for launcher in (choros.Spark(spark), None):
        keras.utils.set_random_seed(0)
        body = keras.Sequential([keras.Input((6,)), keras.layers.Dense(5, "relu")])
        model = Pair(body, keras.Sequential([keras.Input((5,)), keras.layers.Dense(2, "softmax")]))
        model.compile(0.1, factor=2.0)
        if launcher is None:
            model.fit(x, y, batch_size=12, epochs=2, shuffle=False, verbose=0)
        else:
            trainer = choros.Trainer(model, workers=2, launcher=launcher)
            trainer.fit(x, y, batch_size=12, epochs=2, shuffle=False, verbose=0)
        trained.append(model.get_weights())
    for value, two in zip(*trained, strict=True):
        np.testing.assert_allclose(value, two, atol=1e-5)


def test_an_algorithm_of_this_script_reaches_the_tasks(spark, rows):
    @dataclass(frozen=True)
    class Mean(Algorithm):
        weighted: ClassVar[bool] = True

    ours, expected = make(), make()
    fit(spark, ours, Mean(window=2), *rows)
    fit(spark, expected, choros.LocalSGD(window=2), *rows)
    for left, right in zip(ours.get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_array_equal(left, right)


def test_files_and_code_travel_and_what_tasks_print_is_shown(spark, rows, tmp_path, capfd):
    """Each task reads the files; what they say is here. A failed run begins again here too."""
    import keras

    @keras.saving.register_keras_serializable("test_launcher")
    class Loud(keras.layers.Layer):
        def call(self, x):
            print("called in a task" if "pyspark" in pathlib.Path("/proc/self/cmdline").read_text() else "called here")
            return x

    def decode(columns):
        if "pyspark" in pathlib.Path("/proc/self/cmdline").read_text() and not (tmp_path / "failed").exists():
            (tmp_path / "failed").touch()
            raise RuntimeError("a bad disk")
        return {"twice": 2 * np.column_stack([columns[name] for name in "abcdef"]), "y": columns["y"]}

    x, y = rows
    np.savetxt(tmp_path / "rows.csv", np.column_stack([x, y]), "%.6f", ",", header="a,b,c,d,e,f,y", comments="")
    files = choros.files(str(tmp_path / "rows.csv"), x="twice", y="y", decode=decode)
    model = keras.Sequential([keras.Input((6,)), Loud(), keras.layers.Dense(2, "softmax")])
    model.compile("sgd", "sparse_categorical_crossentropy")
    there = choros.Spark(spark, restarts=1)
    _, history = fit(spark, model, choros.AEASGD(window=2), files, launcher=there, epochs=4)
    captured = capfd.readouterr()
    assert {"[0] called in a task", "[1] called in a task"} <= set(captured.out.splitlines())
    assert "a bad disk" in captured.err
    assert "0 restarts left" in captured.err
    assert history.history["loss"][-1] < history.history["loss"][0]


def test_members_and_what_cannot_be(spark, rows):
    trainer, history = fit(spark, make(), "ensemble", *rows)
    assert len(trainer.models) == 2
    assert sorted(worker.rows for worker in history.run.workers) == [3 * 101, 3 * 102]
    with pytest.raises(InvalidInputError, match="has room for 2"):
        choros.Trainer(make(), workers=3, launcher=choros.Spark(spark))
    with pytest.raises(InvalidInputError, match="choros.Spark"):
        choros.Trainer(make(), workers=2, launcher="yarn")
    with pytest.raises(InvalidInputError, match=r"Spark\(restarts=\)"):
        choros.Trainer(make(), workers=2, launcher=choros.Spark(spark), restarts=1)
    with pytest.raises(InvalidInputError, match=r"Spark\(restarts=\)"):
        fit(spark, make(), "allreduce", *rows, checkpoint="state")
    with pytest.raises(InvalidInputError, match="spark://head:7077"):
        choros.Spark("head:7077")
    with pytest.raises(InvalidInputError, match="A session on spark://.* not on spark://head:7077: stop it"):
        choros.Trainer(make(), workers=2, launcher=choros.Spark("spark://head:7077"))
    model = make()
    before = model.get_weights()

    class Rows(__import__("keras").utils.PyDataset):
        def __len__(self):
            return 8

        def __getitem__(self, index):
            if index == 5 and "pyspark" in pathlib.Path("/proc/self/cmdline").read_text():
                raise ValueError("wrong row")
            return rows[0][:16], rows[1][:16]

    with pytest.raises(WorkerFailedError, match=r"worker \d of 2 .*wrong row"):
        fit(spark, model, "allreduce", Rows())
    for value, two in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(value, two)


class Ones:
    """Makes a PyDataset of batches of ones; those of one worker are slow, and slower while a file ``slow`` exists."""

    def __new__(cls, slow):
        import keras

        class Ones(keras.utils.PyDataset):
            def __len__(self):
                return 14

            def __getitem__(self, index):
                time.sleep((1.0 if slow.exists() else 0.05) * (index % 2))
                return np.ones((4, 1), "float32"), np.ones((4, 1), "float32")

        return Ones()


def executors(spark):
    """The JVMs of this session's executors."""
    values = spark.sparkContext.applicationId.encode()
    results = []
    for place in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            text = (place / "cmdline").read_bytes()
            if b"CoarseGrainedExecutorBackend" in text and values in text and b"java" in text.partition(b"\0")[0]:
                results.append(int(place.name))
    return results


def test_each_batch_is_in_the_center_once_though_an_executor_was_killed(spark, capfd, tmp_path):
    """Each step of a worker adds 1 to the one weight. The kill is in the middle of an epoch."""
    import keras

    class Kill(keras.callbacks.Callback):
        killed = 0

        def on_epoch_end(self, epoch, logs=None):
            if epoch == 2 and not self.killed:
                self.killed = executors(spark)[0]
                slow.touch()  # else the epochs may end before Spark notices the kill
                threading.Timer(0.15, self.kill).start()

        def kill(self):
            os.kill(self.killed, signal.SIGKILL)
            time.sleep(3)
            slow.unlink()

    slow = tmp_path / "slow"
    model, kill = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)]), Kill()
    model.compile(keras.optimizers.SGD(1.0), lambda y_true, y_pred: -y_pred)
    begin = float(model.get_weights()[0][0, 0])
    there = choros.Spark(spark, restarts=1)
    _, history = fit(
        spark, model, choros.DOWNPOUR(window=3), Ones(slow), launcher=there, callbacks=[kill], epochs=5, shuffle=False
    )
    stderr = capfd.readouterr().err
    assert kill.killed
    restart = re.search(r"all ranks restart in epoch ([45]), after 0 of its batches", stderr)
    assert restart, stderr  # a busy machine may take longer than an epoch to kill it
    assert "its executor was lost" in stderr
    assert history.epoch == [0, 1, 2, 3, 4]
    assert sum(worker.rows for worker in history.run.workers) == (6 - int(restart[1])) * 14 * 4  # of the epochs since
    assert float(model.get_weights()[0][0, 0]) - begin == pytest.approx(2 * 5 * 14, abs=1e-4)


SCRIPT = """
import sys
sys.modules["tensorflow"] = sys.modules["sklearn"] = sys.modules["matplotlib"] = None
import keras, numpy as np, choros
keras.utils.set_random_seed(0)
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, "softmax")])
model.compile("sgd", "sparse_categorical_crossentropy")
x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
history = choros.Trainer(model, "allreduce", launcher="spark").fit(x, (x[:, 0] > 0).astype("int32"), epochs=2)
print("workers", len(history.run.workers), "argument", sys.argv[1])
"""


def test_a_job_is_submitted_and_seen_here(cluster, tmp_path):
    """By ``choros submit``, to a worker of its own: the session of these tests has the others."""
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [
        "submit",
        "--on",
        "spark",
        "--master",
        cluster.url,
        "--nodes",
        "1",
        "-o",
        "--conf spark.ui.enabled=false",
    ]
    command += ["-o", "--conf spark.executor.memory=512m", "-o", "--conf spark.driver.host=127.0.0.1"]
    environ = {**os.environ, **cluster.environment, "KERAS_BACKEND": "jax"}
    command = [sys.executable, "-m", "choros", *command, "train.py", "--fast"]
    with cluster.another_worker(tmp_path):
        done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "Epoch 2/2" in done.stdout
    assert re.search(r"^workers 1 argument --fast$", done.stdout, re.MULTILINE)
    assert (tmp_path / "train.spark.sh").exists()
