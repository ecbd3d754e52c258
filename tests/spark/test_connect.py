"""The same over Spark Connect, in a process of its own: its server holds the cluster, and no JVM is at hand."""

import os
import subprocess
import sys

import pytest

SCRIPT = """
import os, sys, tempfile
sys.modules["tensorflow"] = sys.modules["sklearn"] = sys.modules["matplotlib"] = None
import keras, numpy as np
from pyspark.ml import Pipeline, PipelineModel
from pyspark.ml.feature import VectorAssembler
from pyspark.sql import SparkSession, functions as F
from choros.errors import InvalidInputError, WorkerFailedError
from choros.spark import KerasEstimator, KerasModel, distkeras
from choros.spark.barrier import run
from choros.spark.feature_columns import normalise
from choros.spark.task_slots import slots

spark = SparkSession.builder.remote("local[2]").config("spark.ui.enabled", "false")
spark = spark.config("spark.sql.codegen.wholeStage", "false").getOrCreate()
assert ".connect." in type(spark).__module__
assert slots(spark) == (2, 2), slots(spark)
frame = spark.range(400).select("id", *(F.randn(i).alias(n) for i, n in enumerate("ab")))
frame = frame.withColumn("label", (F.col("a") + F.col("b") > 0).cast("int"))
rows, columns = normalise(frame, ["a", "b"], "label")

def work(task):
    return b"|".join(task.swap(str(len(task.data.x)).encode()))

one, other = run(rows, work, "auto", columns=columns)
assert one == other and sum(map(int, one.split(b"|"))) == 400
def fail(task):
    raise RuntimeError("my own trouble")
try:
    run(rows, fail, 2, columns=columns)
except WorkerFailedError as error:
    assert "my own trouble" in str(error) and "in fail" in error.traceback, error
else:
    raise AssertionError
try:
    run(rows, work, 3, columns=columns)
except InvalidInputError as error:
    assert "2 task slots" in str(error)
else:
    raise AssertionError

keras.utils.set_random_seed(0)
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(2, "softmax")])
model.compile(keras.optimizers.Adam(0.05), "sparse_categorical_crossentropy", metrics=["accuracy"])
estimator = KerasEstimator(model, epochs=6, batchSize=32, seed=1, algorithm="localsgd")
fitted = Pipeline(stages=[VectorAssembler(inputCols=["a", "b"], outputCol="features"), estimator]).fit(frame)
predicted = fitted.transform(frame)
assert predicted.columns[-2:] == ["prediction", "probability"], predicted.columns
right = predicted.agg(F.avg((F.col("prediction") == F.col("label")).cast("double"))).collect()[0][0]
assert right > 0.9, right
with tempfile.TemporaryDirectory() as folder:
    stage = fitted.stages[-1]
    stage.save(folder + "/stage")
    stage.write().overwrite().save(folder + "/stage")
    again = KerasModel.load(folder + "/stage").transform(fitted.stages[0].transform(frame))
    assert again.agg(F.avg("prediction")).collect() == predicted.agg(F.avg("prediction")).collect()
trainer = distkeras.DOWNPOUR(model, "sgd", "sparse_categorical_crossentropy", features_col=["a", "b"], batch_size=16)
trained = trainer.train(frame)
made = distkeras.ModelPredictor(trained, features_col=["a", "b"]).predict(frame).toDF()
assert distkeras.LabelIndexTransformer(2).transform(made).toDF().columns[-1] == "predicted_index"

# arrays: with the caller in reach, and with none: then the callbacks travel
import contextlib, dataclasses, io
import choros
from choros.training.executors.callback_server import CallbackServer
x = np.random.default_rng(0).normal(size=(96, 2)).astype("float32")
y = (x.sum(axis=1) > 0).astype("int32")
class Rate(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        self.model.optimizer.learning_rate = 0.01
reached, given = CallbackServer.opened, model.get_weights()
@contextlib.contextmanager
def walled(self, network, on_this_host):
    with reached(self, network, on_this_host) as home:
        yield dataclasses.replace(home, place="127.0.0.1:9")
found = []
for opened in (reached, walled):
    CallbackServer.opened = opened
    model.set_weights(given)
    model.compile(keras.optimizers.Adam(0.05), "sparse_categorical_crossentropy")  # slots continue over fits
    trainer = choros.Trainer(model, "localsgd", workers=2, launcher=choros.Spark(spark))
    with contextlib.redirect_stdout(io.StringIO()) as said:
        history = trainer.fit(x, y, epochs=3, batch_size=16, seed=2, callbacks=[Rate()])
    assert "Epoch 3/3" in said.getvalue(), said.getvalue()
    found.append([history.history["loss"], *(w.tolist() for w in model.get_weights())])
assert found[0] == found[1], found
big = np.zeros((31 << 20, 1), "float32")
try:
    choros.Trainer(model, workers=2, launcher=choros.Spark(spark)).fit(np.concatenate([big, big], 1), big[:, 0])
except InvalidInputError as error:
    assert "choros.files" in str(error), error
else:
    raise AssertionError
print("all of it")
spark.stop()
"""


@pytest.mark.timeout(600)
def test_over_connect(spark_is_there, tmp_path):
    pytest.importorskip("grpc", reason="Spark Connect needs grpcio: pip install 'pyspark[connect]'")
    script = tmp_path / "over_connect.py"
    script.write_text(SCRIPT)
    environment = {**os.environ, "PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_DIRS": str(tmp_path)}
    environment = {name: value for name, value in environment.items() if name not in ("SPARK_HOME", "SPARK_LOCAL_IP")}
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=560, cwd=tmp_path, env=environment
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    assert done.stdout.endswith("all of it\n")
