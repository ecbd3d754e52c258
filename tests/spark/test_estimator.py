"""KerasEstimator among Spark's own stages: pipelines, cross-validation, files; the given model stays as it is."""

import keras
import numpy as np
import pytest
from pyspark.ml import Pipeline
from pyspark.ml.evaluation import MulticlassClassificationEvaluator
from pyspark.ml.feature import StandardScaler, StringIndexer, VectorAssembler
from pyspark.ml.tuning import CrossValidator, ParamGridBuilder
from pyspark.sql import functions as F

import choros
from choros.errors import BadInput, UnknownAlgorithm
from choros.spark import KerasEstimator

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


def test_a_grid_of_algorithms_holds_what_is_saved():
    estimator = KerasEstimator(algorithm=choros.AEASGD)
    assert estimator.value("algorithm")["name"] == "AEASGD"
    grid = ParamGridBuilder().addGrid(estimator.algorithm, ["allreduce", choros.AEASGD(window=4)]).build()
    assert [one[estimator.algorithm] for one in grid] == ["allreduce", {"name": "AEASGD", "window": 4, "alpha": None}]


def test_a_pipeline_with_validation_and_an_evaluator(frame, tmp_path):
    model = classifier()
    before = model.get_weights()
    estimator = KerasEstimator(
        model, algorithm=choros.AEASGD(window=4), epochs=8, batchSize=32, validationSplit=0.2, seed=3, workers="auto"
    )
    estimator.save(str(tmp_path / "estimator"))
    again = KerasEstimator.load(str(tmp_path / "estimator"))
    assert again.getOrDefault("algorithm") == {"name": "AEASGD", "window": 4, "alpha": None}
    fitted = Pipeline(stages=stages(again)).fit(frame)
    for one, other in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(one, other)
    predicted = fitted.transform(frame)
    assert MulticlassClassificationEvaluator(metricName="f1").evaluate(predicted) > 0.93
    history = fitted.stages[-1].history
    assert sorted(history.history) == ["accuracy", "loss", "val_accuracy", "val_loss"]
    assert len(history.history["loss"]) == 8
    assert len(history.run.workers) == 2
    assert fitted.stages[-1].uid == again.uid


def test_cross_validation_chooses_the_rate_that_learns(frame):
    made = Pipeline(stages=stages(KerasEstimator(classifier(), workers=1, algorithm="single", epochs=3, seed=1))[:3])
    prepared = made.fit(frame).transform(frame).drop("put")
    estimator = KerasEstimator(classifier(), workers=1, algorithm="single", epochs=3, seed=1)
    grid = ParamGridBuilder().addGrid(estimator.learningRate, [1e-6, 0.05]).build()
    evaluator = MulticlassClassificationEvaluator(metricName="accuracy")
    tuned = CrossValidator(estimator=estimator, estimatorParamMaps=grid, evaluator=evaluator, numFolds=2, seed=2)
    found = tuned.fit(prepared)
    assert found.avgMetrics[1] > 0.85
    assert found.avgMetrics[1] > found.avgMetrics[0]
    assert evaluator.evaluate(found.bestModel.transform(prepared)) > 0.85


def test_members_predict_together_and_classes_weigh(frame):
    indexed = StringIndexer(inputCol="kind", outputCol="label").fit(frame).transform(frame)
    how = dict(featuresCol=NAMES, epochs=2, seed=1, workers=2)
    together = KerasEstimator(classifier(), algorithm="ensemble", **how).fit(indexed)
    assert len(together.models) == 2
    x = np.array(frame.select(*NAMES).orderBy("id").limit(50).collect(), dtype="float32")
    mean = np.mean([one.predict(x, verbose=0) for one in together.models], axis=0)
    np.testing.assert_allclose(together.keras_model.predict(x, verbose=0), mean, atol=1e-6)
    assert together.transform(indexed.limit(5)).columns[-2:] == ["prediction", "probability"]
    one = KerasEstimator(classifier(), classWeight={0: 0.0, 1: 1.0}, **{**how, "epochs": 6}).fit(indexed)
    assert {row.prediction for row in one.transform(indexed).select("prediction").distinct().collect()} == {1.0}


def test_what_cannot_work_is_told_before_any_task(frame):
    indexed = frame.withColumn("label", (F.col("a") > 0).cast("int"))
    wrong = {
        "window2": (dict(), BadInput, "no parameter"),
        "algorithm": (dict(algorithm="aesgd"), UnknownAlgorithm, "AEASGD"),
        "momentum": (dict(momentum=0.5), BadInput, "AllReduce has no 'momentum'"),
        "workers": (dict(workers=9), BadInput, "2 task slots"),
        "epochs": (dict(epochs=0), BadInput, "epochs"),
        "restarts": (dict(maxRestarts=-1), BadInput, "max_restarts=-1"),
    }
    for name, (how, error, words) in wrong.items():
        with pytest.raises(error, match=words):
            KerasEstimator(classifier(), featuresCol=NAMES, **how, **({name: 1} if not how else {})).fit(indexed)
    with pytest.raises(BadInput, match="no model"):
        KerasEstimator(featuresCol=NAMES).fit(indexed)
