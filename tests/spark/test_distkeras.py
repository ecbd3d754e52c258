"""dist-keras' names: transformers as they should have been, its notebook's way from columns to F1, its trainers."""

import warnings

import keras
import numpy as np
import pytest
from pyspark.ml.evaluation import MulticlassClassificationEvaluator
from pyspark.ml.feature import StandardScaler, StringIndexer, VectorAssembler
from pyspark.ml.linalg import Vectors
from pyspark.sql import functions as F

import choros.spark.distkeras as distkeras
from choros.algorithms import from_config, to_config
from choros.algorithms.base import ExchangeInfo
from choros.algorithms.legacy import MeanEASGD
from choros.errors import InvalidInputError
from choros.param_server.in_memory import InMemoryParameterServer
from choros.spark.distkeras import *  # noqa: F403 - as a notebook does
from choros.spark.distkeras import utils
from choros.training.worker.exchange import AsyncExchange


@pytest.fixture(scope="module")
def small(spark):
    rows = [
        (0, 1.0, Vectors.dense([0.0, 5.0]), Vectors.dense([0.2, 0.3, 0.5])),
        (1, 3.0, Vectors.sparse(2, {0: 10.0}), Vectors.dense([0.6, 0.7, 0.0])),
        (2, 5.0, Vectors.dense([2.5, 0.0]), Vectors.dense([0.1, 0.9, 0.0])),
    ]
    return spark.createDataFrame(rows, ["label", "number", "features", "prediction"])


def values(frame, name):
    return [
        getattr(row[0], "toArray", lambda row=row: row[0])() for row in frame.orderBy("label").select(name).collect()
    ]


def test_transformers(small):
    d = distkeras
    made = d.MinMaxTransformer(0.0, 10.0, -1.0, 1.0, "features", "ranged").transform(small).toDF()
    made = d.MinMaxTransformer(1.0, 5.0, 0.0, 1.0, "number", "unit", is_vector=False).transform(made).toDF()
    made = d.StandardTransformer(["number"]).transform(made).toDF()
    made = d.BinaryLabelTransformer("label", "first", 0).transform(made).toDF()
    made = d.DenseTransformer("features", "dense").transform(made).toDF()
    made = d.ReshapeTransformer("features", "column", (2, 1)).transform(made).toDF()
    made = d.OneHotTransformer(3, "label", "hot").transform(made).toDF()
    made = d.LabelVectorTransformer(output_dim=3).transform(made).toDF()
    made = d.LabelIndexTransformer(output_dim=3).transform(made).toDF().cache()
    np.testing.assert_allclose(values(made, "ranged"), [[-1, 0], [1, -1], [-0.5, -1]])
    assert values(made, "unit") == [0.0, 0.5, 1.0]
    np.testing.assert_allclose(values(made, "number_normalized"), np.array([-1, 0, 1]) * np.sqrt(1.5))
    np.testing.assert_array_equal(values(made, "first"), [[1, 0], [0, 1], [0, 1]])
    assert type(made.select("dense").orderBy("label").collect()[1][0]).__name__ == "DenseVector"
    assert values(made, "column") == [[[0.0], [5.0]], [[10.0], [0.0]], [[2.5], [0.0]]]
    np.testing.assert_array_equal(values(made, "hot"), np.eye(3))
    np.testing.assert_array_equal(values(made, "label_vectorized"), np.eye(3))
    for name in ("prediction_index", "predicted_index"):  # of the largest; the first above .55, twice
        assert values(made, name) == [2.0, 0.0, 1.0]
    assert d.AccuracyEvaluator(prediction_col="predicted_index").evaluate(made) == pytest.approx(0.0)
    assert d.AccuracyEvaluator("label", "label").evaluate(made) == 1.0
    assert made.toDF(*(f"c{i}" for i in range(len(made.columns)))).columns[0] == "c0"
    assert sorted(values(d.shuffle(d.precache(small, 2), seed=1).toDF(), "label")) == [0, 1, 2]
    for wrong in (d.OneHotTransformer(2, "label", "hot"), d.ReshapeTransformer("features", "f", (3, 1))):
        with pytest.raises(Exception, match="none of 0 to 1|cannot have the shape"):
            wrong.transform(small).collect()
    with pytest.raises(InvalidInputError, match="range"):
        d.MinMaxTransformer(1, 1, 0, 1, "features", "f")


@pytest.fixture(scope="module")
def higgs(spark):
    """Columns as the notebook has them, and its preparation."""
    names = ["DER_mass_MMC", "DER_pt_h", "PRI_tau_pt"]
    made = spark.range(800).select("id", *(F.randn(i).alias(name) for i, name in enumerate(names)))
    made = made.withColumn("Label", F.when(F.col(names[0]) + F.col(names[1]) > 0, "s").otherwise("b"))
    made = VectorAssembler(inputCols=names, outputCol="features").transform(made)
    scaler = StandardScaler(inputCol="features", outputCol="features_normalized", withStd=True, withMean=True)
    made = scaler.fit(made).transform(made)
    made = StringIndexer(inputCol="Label", outputCol="label_index").fit(made).transform(made)
    made = distkeras.LabelVectorTransformer(output_dim=2, input_col="label_index", output_col="label").transform(made)
    return made.toDF().cache()  # Spark minds no case: it lies where "Label" was


def network():
    keras.utils.set_random_seed(1)
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(16, "relu"), keras.layers.Dense(2, "softmax")])


def f1(frame, model):
    made = distkeras.ModelPredictor(keras_model=model, features_col="features_normalized").predict(frame).toDF()
    made = distkeras.LabelIndexTransformer(output_dim=2).transform(made).toDF()
    how = dict(metricName="f1", predictionCol="predicted_index", labelCol="label_index")
    return MulticlassClassificationEvaluator(**how).evaluate(made)


COMMON = dict(loss="categorical_crossentropy", worker_optimizer="adagrad", features_col="features_normalized")
TRAINERS = {
    "SingleTrainer": dict(num_epoch=4, batch_size=8),
    "EASGD": dict(batch_size=8, num_epoch=8, num_workers=28, rho=5.0, learning_rate=0.04),
    "AsynchronousEASGD": dict(batch_size=8, num_workers=28, rho=5.0, learning_rate=0.05, communication_window=30,
                              num_epoch=4),
    "AsynchronousEAMSGD": dict(batch_size=8, num_workers=28, rho=5, learning_rate=0.05, communication_window=10,
                               momentum=0.85, num_epoch=4),
    "DOWNPOUR": dict(batch_size=8, num_workers=28, learning_rate=0.05, num_epoch=4),
    "ADAG": dict(batch_size=8, num_workers=28, num_epoch=12, communication_window=3),
    "DynSGD": dict(batch_size=8, num_workers=28, num_epoch=4),
    "AveragingTrainer": dict(batch_size=8, num_epoch=4),
}  # fmt: skip


@pytest.mark.parametrize("name", TRAINERS)
def test_the_notebooks_trainers(higgs, name):
    model = network()
    before = model.get_weights()
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        trainer = getattr(distkeras, name)(keras_model=model, **COMMON, **TRAINERS[name])
        trained = trainer.train(higgs, shuffle=True)
    output = [str(result.message) for result in heard if issubclass(result.category, RuntimeWarning)]
    assert any("num_workers=28, but this cluster has 2 task slots" in result for result in output) == (
        TRAINERS[name].get("num_workers") == 28
    )
    for result, other in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(result, other)
    assert (actual := f1(higgs, trained)) > 0.85, actual
    assert 0 < trainer.get_training_time() < 120
    figures = trainer.get_averaged_history()
    assert figures.shape == (TRAINERS[name]["num_epoch"], 2)
    assert figures[-1, 0] < figures[0, 0]
    assert trainer.history.run.rows == 800 * TRAINERS[name]["num_epoch"]


def test_settings_are_set_and_read_and_each_epoch_leaves_a_record(higgs):
    trainer = distkeras.DOWNPOUR(network(), "sgd", "categorical_crossentropy", features_col="features_normalized")
    assert not trainer.has_history()
    for name, value in (("num_workers", 2), ("num_epoch", 2), ("minibatch_size", 16)):
        getattr(trainer, f"set_{name}")(value)
        assert getattr(trainer, f"get_{name}")() == value
    assert (trainer.get_features_column(), trainer.get_label_column()) == ("features_normalized", "label")
    trainer.set_model(network())
    trainer.train(higgs)
    records = trainer.get_history()
    assert trainer.has_history()
    assert [record["iteration"] for record in records] == [1, 2]
    assert trainer.get_executor_history(0) == records
    assert trainer.num_updates == trainer.history.run.exchanges > 0
    trainer.add_history({"worker_id": 0, "iteration": 3, "history": [0.0, 1.0], "timestamp": 0.0})
    assert len(trainer.get_history()) == 3


def test_an_ensemble_gives_its_members(higgs):
    trainer = distkeras.EnsembleTrainer(network(), "adam", "categorical_crossentropy", num_ensembles=2, **{
        "features_col": "features_normalized"})  # fmt: skip
    members = trainer.train(higgs)
    assert len(members) == 2
    assert not np.array_equal(members[0].get_weights()[0], members[1].get_weights()[0])


@pytest.mark.parametrize("name", ["DOWNPOUR", "ADAG", "DynSGD", "Experimental"])
def test_settings_without_effect_are_warned_of_once(name, monkeypatch):
    monkeypatch.setattr("choros.errors._warned_arguments", set())
    kind, how = getattr(distkeras, name), dict(keras_model=network(), worker_optimizer="sgd", loss="mse")
    with pytest.warns(
        UserWarning, match=f"learning_rate has no effect on {name}: the workers use the learning rate of"
    ):
        trainer = kind(**how, learning_rate=0.05)
    for setting, value in (("parallelism_factor", 3), ("set_max_prefetch", 5)):
        with pytest.warns(UserWarning, match=f"{setting} has no effect on {name}"):
            getattr(trainer, f"set_{setting.removeprefix('set_')}")(value)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kind(**how)
        trainer.set_parallelism_factor(1)
        kind(**how, learning_rate=0.05).set_learning_rate(0.1)  # the second time
        trainer.set_max_prefetch(5)
        distkeras.AEASGD(**how, learning_rate=0.05).set_learning_rate(0.1)


def test_old_words_mean_what_they_meant(monkeypatch):
    monkeypatch.setattr("choros.errors._warned_arguments", set())
    d, how = distkeras, dict(keras_model=network(), worker_optimizer="sgd", loss="mse")
    assert "AGN(window=12)" in repr(d.ADAG(**how))
    assert "batch_size=64 for each worker" in repr(d.DynSGD(**how, batch_size=64))
    assert d.AEASGD(**how).algorithm == choros_algorithm("AEASGD", window=32, alpha=0.5)
    assert d.EAMSGD(**how, rho=1.0).algorithm == choros_algorithm("EAMSGD", window=32, alpha=0.1, momentum=0.9)
    assert d.Experimental(**how, communication_window=3).algorithm == choros_algorithm("ADAG", window=3)
    with pytest.warns(UserWarning, match="master_port has no effect on DOWNPOUR: Choros chooses its ports"):
        made = d.DOWNPOUR(network(), "sgd", "mse", ["accuracy"], 4, 16, "f", "l", 3, 7, master_port=5001)
    assert made.num_epoch == 3
    assert d.DOWNPOUR(network(), "sgd", "mse", ["accuracy"], 4, 16, "f", "l", 3, 7).algorithm.window == 7
    with pytest.raises(InvalidInputError, match="no argument 'window'"):
        d.DOWNPOUR(**how, window=3)
    with pytest.raises(InvalidInputError, match="metrics='features'"):
        d.SingleTrainer(network(), "sgd", "mse", "features")
    rate = float(np.asarray(d.SingleTrainer(network(), "adagrad", "mse")._compiled().optimizer.learning_rate))
    assert rate == pytest.approx(0.01)
    actual = keras.optimizers.Adam(0.123)
    assert float(np.asarray(d.SingleTrainer(network(), actual, "mse")._compiled().optimizer.learning_rate)) == (
        pytest.approx(0.123)
    )
    for name in distkeras.__all__:
        assert globals()[name] is getattr(distkeras, name)
    assert utils.history_executors_average([]).size == 0


def bound(trainer):
    """The rule of 28 workers, and whether it warned."""
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        return trainer.algorithm.bound(28, 0.05, strict=False), any(
            result.category is RuntimeWarning for result in heard
        )


def test_the_notebooks_settings_of_28_workers_never_raise_and_unstable_ones_warn():
    """Rules of 28 workers, with the notebook's rho, rates and windows; a center takes what 28 bring in turn."""
    for name, value in TRAINERS.items():
        if "num_workers" not in value:
            continue
        make = getattr(distkeras, name)
        rule, warned = bound(make(network(), **COMMON, **value))
        assert not warned, name
        if "rho" in value:
            assert bound(make(network(), **COMMON, **{**value, "rho": 50.0}))[1], name
        if rule.mode == "async":
            center = InMemoryParameterServer(rule, np.zeros(3), workers=28)
            workers = [(AsyncExchange(center.at(rank), np.zeros(3)), np.zeros(3)) for rank in range(28)]
            for turn in range(5):
                for rank, (exchange, local) in enumerate(workers):
                    local += 0.01 * np.sin(rank + turn + np.arange(3))
                    exchange.run(local, rule.window, np.zeros(0))
            assert all(0 < np.abs(local).max() < 10 for _, local in workers), name


def choros_algorithm(name, **how):
    return from_config({"name": name, **how})


def test_the_mean_rule_has_its_signs_right():
    rule = MeanEASGD(window=1, alpha=0.25)
    assert from_config(to_config(rule)) == rule
    workers = [3.0, 5.0]
    center, _ = rule.merge(0.0, sum(workers) / 2, ExchangeInfo(workers=2), ())
    assert center == 1.0  # a quarter of the way to the mean
    assert [rule.adopt(result, 0.0) for result in workers] == [2.25, 3.75]
    with pytest.warns(RuntimeWarning, match="unstable"):
        MeanEASGD(alpha=1.9).bound(28, 0.01, strict=False)
