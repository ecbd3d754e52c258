"""KerasEstimator among Spark's own stages: pipelines, cross-validation, files; the given model stays as it is."""

import contextlib
from dataclasses import replace
from typing import ClassVar

import keras
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from pyspark.ml import Pipeline
from pyspark.ml.evaluation import MulticlassClassificationEvaluator
from pyspark.ml.feature import StandardScaler, StringIndexer, VectorAssembler
from pyspark.ml.tuning import CrossValidator, ParamGridBuilder
from pyspark.sql import functions as F

import choros
from choros.errors import InvalidDataError, InvalidInputError, UnknownAlgorithmError
from choros.spark import KerasEstimator, KerasModel
from choros.spark.feature_columns import Columns, ColumnSpec
from choros.spark.prediction_columns import classed
from choros.spark.pyarrow import refuse_large_batches, to_array

NAMES = ["a", "b", "c"]


@pytest.fixture(scope="module")
def frame(spark):
    noise = [F.randn(seed).alias(name) for seed, name in enumerate(NAMES)]
    made = spark.range(600).select("id", *noise)
    return made.withColumn("kind", F.when(F.col("a") + F.col("b") > 0, "s").otherwise("b")).cache()


def classifier(rate=0.05, units=2):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(units, "softmax")])
    model.compile(keras.optimizers.Adam(rate), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def stages(estimator):
    return [
        VectorAssembler(inputCols=NAMES, outputCol="put"),
        StandardScaler(inputCol="put", outputCol="features", withMean=True),
        StringIndexer(inputCol="kind", outputCol="label"),
        estimator,
    ]


def test_each_param_has_the_methods_of_spark_s_stages():
    estimator = KerasEstimator(window=8)
    assert estimator.setEpochs(5).setBatchSize(64).setFeaturesCol("put") is estimator
    assert (estimator.getEpochs(), estimator.getBatchSize(), estimator.getFeaturesCol()) == (5, 64, "put")
    assert (estimator.getWindow(), estimator.getSeed()) == (8, None)
    assert estimator.setWindow(None).getWindow() == 8  # as with setParams
    assert estimator.copy().setEpochs(6).getEpochs() == 6
    assert estimator.getEpochs() == 5
    with pytest.raises(InvalidInputError, match="epochs=0: give 1 or more"):
        estimator.setEpochs(0)
    for stage in (KerasEstimator, KerasModel):
        for parameter in stage(None).params:
            name = parameter.name[0].upper() + parameter.name[1:]
            assert parameter.doc in getattr(stage, f"set{name}").__doc__
            assert parameter.doc in getattr(stage, f"get{name}").__doc__
    assert not hasattr(KerasModel, "setEpochs")


def test_a_grid_of_algorithms_holds_what_is_saved():
    estimator = KerasEstimator(algorithm=choros.AEASGD)
    assert estimator.value("algorithm")["name"] == "AEASGD"
    grid = ParamGridBuilder().addGrid(estimator.algorithm, ["allreduce", choros.AEASGD(window=4)]).build()
    assert [result[estimator.algorithm] for result in grid] == [
        "allreduce",
        {"name": "AEASGD", "window": 4, "alpha": None},
    ]


def test_a_pipeline_with_validation_and_an_evaluator(frame, tmp_path):
    model = classifier()
    before = model.get_weights()
    estimator = KerasEstimator(
        model, algorithm=choros.AEASGD(window=4), epochs=8, batchSize=32, validationSplit=0.2, seed=3, workers="auto"
    )
    estimator.save(str(tmp_path / "estimator"))
    reloaded = KerasEstimator.load(str(tmp_path / "estimator"))
    assert reloaded.getOrDefault("algorithm") == {"name": "AEASGD", "window": 4, "alpha": None}
    fitted = Pipeline(stages=stages(reloaded)).fit(frame)
    for value, other in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(value, other)
    predicted = fitted.transform(frame)
    assert MulticlassClassificationEvaluator(metricName="f1").evaluate(predicted) > 0.93
    history = fitted.stages[-1].history
    assert sorted(history.history) == ["accuracy", "loss", "val_accuracy", "val_loss"]
    assert len(history.history["loss"]) == 8
    assert len(history.run.workers) == 2
    assert fitted.stages[-1].uid == reloaded.uid


def test_cross_validation_chooses_the_rate_that_learns(frame):
    made = Pipeline(stages=stages(KerasEstimator(classifier(), workers=1, algorithm="single", epochs=3, seed=1))[:3])
    prepared = made.fit(frame).transform(frame).drop("put")
    estimator = KerasEstimator(classifier(), workers=1, algorithm="single", epochs=3, seed=1)
    grid = ParamGridBuilder().addGrid(estimator.learningRate, [1e-6, 0.05]).build()
    evaluator = MulticlassClassificationEvaluator(metricName="accuracy")
    tuned = CrossValidator(estimator=estimator, estimatorParamMaps=grid, evaluator=evaluator, numFolds=2, seed=2)
    result = tuned.fit(prepared)
    assert result.avgMetrics[1] > 0.85
    assert result.avgMetrics[1] > result.avgMetrics[0]
    assert evaluator.evaluate(result.bestModel.transform(prepared)) > 0.85


def test_members_predict_together_and_classes_weigh(frame):
    indexed = StringIndexer(inputCol="kind", outputCol="label").fit(frame).transform(frame)
    how = dict(featuresCol=NAMES, epochs=2, seed=1, workers=2)
    together = KerasEstimator(classifier(), algorithm="ensemble", **how).fit(indexed)
    assert len(together.models) == 2
    x = np.array(frame.select(*NAMES).orderBy("id").limit(50).collect(), dtype="float32")
    mean = np.mean([model.predict(x, verbose=0) for model in together.models], axis=0)
    np.testing.assert_allclose(together.keras_model.predict(x, verbose=0), mean, atol=1e-6)
    assert together.transform(indexed.limit(5)).columns[-2:] == ["prediction", "probability"]
    model = KerasEstimator(classifier(), classWeight={0: 0.0, 1: 1.0}, **{**how, "epochs": 6}).fit(indexed)
    assert {row.prediction for row in model.transform(indexed).select("prediction").distinct().collect()} == {1.0}


def test_what_cannot_work_is_told_before_any_task(frame):
    indexed = frame.withColumn("label", (F.col("a") > 0).cast("int")).withColumn("three", F.lit(2.0))
    indexed = indexed.select("*", F.col("id").alias("ID"), F.array(F.lit(1.0), F.lit(0.0)).alias("hot"))
    wrong = {
        "window2": (dict(), InvalidInputError, "no parameter"),
        "algorithm": (dict(algorithm="aesgd"), UnknownAlgorithmError, "AEASGD"),
        "momentum": (dict(momentum=0.5), InvalidInputError, "AllReduce has no 'momentum'"),
        "workers": (dict(workers=9), InvalidInputError, "2 task slots"),
        "labels": (dict(labelCol="hot"), InvalidInputError, "vectors of 2.*'categorical_crossentropy'"),
        "twice": (dict(labelCol="id"), InvalidInputError, r"label: the frame has 2 columns .*'id' \(id, ID\)"),
        "classes": (
            dict(labelCol="three"),
            InvalidInputError,
            r"label 2 in the column 'three'.*model has 2.*from 0 to 1",
        ),
    }
    for name, (how, error, message) in wrong.items():
        with pytest.raises(error, match=message):
            KerasEstimator(classifier(), featuresCol=NAMES, **how, **({name: 1} if not how else {})).fit(indexed)
    with pytest.raises(InvalidInputError, match="no model"):
        KerasEstimator(featuresCol=NAMES).fit(indexed)
    one_hot = classifier()
    one_hot.compile("sgd", "categorical_crossentropy")
    with pytest.raises(InvalidInputError, match="class numbers.*'sparse_categorical_crossentropy'.*OneHotEncoder"):
        KerasEstimator(one_hot, featuresCol=NAMES).fit(indexed)


WRONG = dict(
    learningRate=-0.1, timeout=0, maxRestarts=-1, epochs=0, batchSize=0, window=-1, alpha=-1.0, rho=float("nan"),
    momentum=-1.0, validationSplit=-0.1, predictBatchSize=0,
)  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_numbers_that_cannot_be_are_refused_when_they_are_set(name):
    with pytest.raises(InvalidInputError, match=f"{name}={WRONG[name]}"):
        KerasEstimator(**{name: WRONG[name]})
    estimator = KerasEstimator()
    with pytest.raises(InvalidInputError, match=f"{name}={WRONG[name]}"):
        estimator.copy({estimator.getParam(name): WRONG[name]}).value(name)


@pytest.mark.parametrize("stage", [KerasEstimator(classifier()), KerasModel(classifier())], ids=["fit", "transform"])
def test_a_frame_of_pandas_is_refused_with_what_makes_one_of_sparks(stage):
    rows = pd.DataFrame({"features": [[1.0, 2.0, 3.0]], "label": [0]})
    with pytest.raises(InvalidInputError, match=r"pandas.DataFrame.*session.createDataFrame\(frame\)"):
        getattr(stage, "fit" if isinstance(stage, KerasEstimator) else "transform")(rows)


def test_classes_are_those_of_each_output():
    inputs = keras.Input((2,))
    kind, size = keras.layers.Dense(5, name="kind")(inputs), keras.layers.Dense(3, name="size")(inputs)
    model = keras.Model(inputs, [kind, size])
    leaves = {name: ColumnSpec(name, (name,), "number") for name in ("choros_x0", "choros_y1", "choros_y2")}
    sparse = keras.losses.SparseCategoricalCrossentropy(ignore_class=-1)
    for loss in ([sparse, "mse"], {"size": "mse", "kind": sparse}):
        model.compile("sgd", loss)
        for y in (["choros_y1", "choros_y2"], {"size": "choros_y2", "kind": "choros_y1"}):
            if isinstance(loss, list) and isinstance(y, dict):
                continue
            result = classed(Columns(leaves, "choros_x0", y), model).leaves
            assert [(item.classes, item.ignored) for item in result.values()] == [(None, None), (5, -1), (None, None)]
    label = classed(Columns(leaves, "choros_x0", "choros_y1"), classifier()).leaves["choros_y1"]
    for values, wrong in (([0, 1], ""), ([0, 2], "2"), ([-1, 0], "-1"), ([0.0, 0.5], "0.5")):
        if not wrong:
            assert to_array(pa.array(values), label).tolist() == values
            continue
        with pytest.raises(
            InvalidDataError, match=f"label {wrong} in the column 'choros_y1' is not a class: the model has 2"
        ):
            to_array(pa.array(values), label)
    ignoring = replace(label, ignored=-1)
    assert to_array(pa.array([-1, 0]), ignoring).tolist() == [-1, 0]


@pytest.mark.parametrize(
    ("settings", "refused"),
    [({}, True), ({"maxRecordsPerBatch": "1110"}, False), ({"maxBytesPerBatch": "2147483647b"}, False)],
)
def test_rows_that_would_make_arrow_batches_of_more_than_two_gigabytes_are_refused(settings, refused):
    """Spark 3.5 counts rows only; Spark 4 has a limit of bytes too. 240,000 bytes are 10,000 rows of 2.4 GB."""
    prefix = "spark.sql.execution.arrow."

    class Session:
        """A session whose settings are these."""

        conf: ClassVar = {prefix + name: value for name, value in settings.items()}

    rows = pa.RecordBatch.from_pydict({"n": [1, 2], "x": [[1.0] * 30_000] * 2})
    remedy = r"'x' has about 240,\d{3} bytes.*conf.set\(\"spark.sql.execution.arrow.maxRecordsPerBatch\", 111\d\)"
    with pytest.raises(InvalidInputError, match=remedy) if refused else contextlib.nullcontext():
        refuse_large_batches(Session, [rows])
