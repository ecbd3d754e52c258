"""Training on a frame's rows: exact where it must be, with many, few and no rows, and again after a failure."""

import os
import pathlib
import signal

import numpy as np
import pytest
from pyspark.sql import functions as F

import choros
from choros.errors import WorkerFailedError
from choros.spark.feature_columns import normalise
from choros.spark.frame_trainer import train


def higgs(spark, rows=400, parts=2, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, 6)).astype("float32")
    y = (x[:, 0] + x[:, 1] * x[:, 2] > 0).astype("int32")
    rows = [(number, row.tolist(), int(label)) for number, (row, label) in enumerate(zip(x, y, strict=True))]
    frame = spark.createDataFrame(rows, "n int, x array<float>, y int")
    return frame.repartition(parts), x, y


def make(dropout=0.0, seed=0, optimizer=None):
    import keras

    keras.utils.set_random_seed(seed)
    layers = [keras.Input((6,)), keras.layers.Dense(12, "relu"), keras.layers.Dropout(dropout)]
    model = keras.Sequential([*layers, keras.layers.Dense(2, "softmax")])
    model.compile(optimizer or keras.optimizers.Adam(1e-2), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def fit(frame, model, **how):
    rows, columns = normalise(frame, "x", "y", validation=how.pop("validation", None), inputs=[("x", (6,))])
    how = {"workers": 2, "epochs": 2, "batch_size": 32, "seed": 3, "verbose": 0, **how}
    return train(rows, model=model, columns=columns, **how)


def test_it_trains_and_callbacks_run_here(spark, capfd):
    import keras

    seen = []

    class Half(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            seen.append((epoch, sorted(logs), self.model.get_weights()))
            self.model.optimizer.learning_rate = 5e-3

    frame, x, y = higgs(spark)
    model = make(dropout=0.2)
    _, history, _ = fit(frame, model, epochs=4, callbacks=[Half()], validation=0.2)
    assert history.history["loss"][-1] < history.history["loss"][0]
    assert [result[:2] for result in seen] == [(e, ["accuracy", "loss", "val_accuracy", "val_loss"]) for e in range(4)]
    assert len(history.run.workers) == 2
    assert history.run.rows < 4 * 400
    assert float(np.asarray(model.optimizer.learning_rate)) == pytest.approx(5e-3)
    assert model.evaluate(x, y, verbose=0)[1] > 0.6


@pytest.mark.parametrize("shares", [(300, 100), (400, 0), (399, 1)], ids=str)
def test_together_it_is_the_training_of_one_process(spark, shares):
    """A global batch of all rows has no order: many, few or no rows of a worker make no difference."""
    frame, x, y = higgs(spark, parts=1)
    keys = spark.range(20).repartition(2, "id").select("id", F.spark_partition_id().alias("at")).collect()
    key = {row["at"]: row["id"] for row in keys}  # which Spark puts into this partition
    first = F.col("n") < shares[0]
    frame = frame.withColumn("k", F.when(first, key[0]).otherwise(key[1]).cast("long")).repartition(2, "k").drop("k")
    import keras

    # Adam makes steps of one size of gradients that are all rounding, in which the order of the rows shows
    ours, plain = (make(optimizer=keras.optimizers.SGD(0.1, momentum=0.9)) for _ in range(2))
    _, history, _ = fit(frame, ours, epochs=3, batch_size=400, partitioned=True)
    assert sorted(worker.rows for worker in history.run.workers) == sorted(3 * share for share in shares)
    other = plain.fit(x, y, epochs=3, batch_size=400, verbose=0)
    for name, figures in other.history.items():
        np.testing.assert_allclose(history.history[name], figures, rtol=2e-6, err_msg=name)
    for value, two in zip(ours.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(value, two, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", sorted(set(choros.algorithms()) - {"Ensemble", "AllReduce"}))
def test_every_algorithm_learns(spark, name):
    import keras

    frame, x, y = higgs(spark)
    rate = 8e-2 if name == "AGN" else 1e-2  # AGN divides what it learns by its window of 8
    model = make(optimizer=keras.optimizers.Adam(rate))
    workers = 1 if name == "Single" else 2
    _, history, _ = fit(frame, model, algorithm=name, workers=workers, epochs=6, validation=0.25, strict=False)
    assert len(history.history["loss"]) == len(history.history["val_loss"]) == 6
    assert history.history["loss"][-1] < history.history["loss"][0]
    assert len(history.run.workers) == workers
    assert model.evaluate(x, y, verbose=0)[1] > 0.6


def test_members_of_an_ensemble_have_rows_and_weights_of_their_own(spark):
    frame, x, y = higgs(spark)
    model = make()
    _, history, members = fit(frame, model, algorithm="ensemble", epochs=5)
    assert len(members) == 2
    first, two = (member.get_weights()[0] for member in members)
    assert not np.allclose(first, two)
    assert any(np.array_equal(model.get_weights()[0], each) for each in (first, two))
    assert len(history.history["loss"]) == 5
    assert all(member.evaluate(x, y, verbose=0)[1] > 0.5 for member in members)


def parent(pid):
    return int(pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def is_ours(pid):
    """Return whether a process descends from this one. Other processes of the machine are left alone."""
    while pid > 1:
        if (pid := parent(pid)) == os.getpid():
            return True
    return False


def python_workers():
    """The processes of tasks: children of Spark's daemons."""
    results = []
    for place in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            text = (place / "cmdline").read_bytes()
            above = pathlib.Path(f"/proc/{parent(place.name)}/cmdline").read_bytes()
            if b"pyspark.daemon" in text and b"pyspark.daemon" in above and is_ours(int(place.name)):
                results.append(int(place.name))
        except OSError:
            continue
    return results


def test_a_killed_worker_costs_at_most_an_epoch(spark, capfd):
    """Begun again at the last epoch, the run ends with the weights of one that was never stopped."""
    import keras

    class Kill(keras.callbacks.Callback):
        killed = 0

        def on_epoch_end(self, epoch, logs=None):
            if epoch == 2 and not self.killed:
                for pid in python_workers():
                    os.kill(pid, signal.SIGKILL)
                    self.killed += 1

    frame = higgs(spark)[0].cache()  # rows in one order: Spark's shuffles have none
    frame.count()
    ours, plain, kill = make(), make(), Kill()
    _, history, _ = fit(frame, ours, epochs=5, callbacks=[kill], max_restarts=1, partitioned=True)
    assert kill.killed
    (line,) = [result for result in capfd.readouterr().err.splitlines() if "restarts left" in result]
    assert line.endswith("; all ranks restart in epoch 4, after 0 of its batches (0 restarts left)")
    assert "memory" not in line  # what to do is told once, where the run ends with it
    (restart,) = history.run.restarts
    assert (restart.epoch, restart.batch) == (3, 0)
    assert "process was ended" in restart.reason
    assert history.epoch == [0, 1, 2, 3, 4]
    _, other, _ = fit(frame, plain, epochs=5, partitioned=True)
    np.testing.assert_allclose(history.history["loss"], other.history["loss"], rtol=1e-6)
    for result, two in zip(ours.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(result, two, rtol=0, atol=1e-6)


def test_a_job_that_somebody_cancels_does_not_begin_again(spark, capfd):
    import keras

    class Cancel(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            spark.sparkContext.cancelAllJobs()

    frame, *_ = higgs(spark)
    with pytest.raises(WorkerFailedError, match="cancelled in Spark"):
        fit(frame, make(), epochs=50, callbacks=[Cancel()], max_restarts=3)
    assert "restarts left" not in capfd.readouterr().err


def test_a_worker_that_raises_is_told_with_its_traceback(spark):
    import keras

    def wrong(y_true, y_pred):
        if "pyspark" in pathlib.Path("/proc/self/cmdline").read_text():
            raise RuntimeError("not on a worker")
        return keras.losses.sparse_categorical_crossentropy(y_true, y_pred)

    frame, *_ = higgs(spark)
    model = make()
    model.compile("sgd", wrong)
    with pytest.raises(WorkerFailedError, match=r"worker \d of 2 .*not on a worker[\s\S]*in wrong") as failed:
        fit(frame, model)
    assert "py4j" not in str(failed.value)
    assert "at org.apache.spark" not in str(failed.value)
