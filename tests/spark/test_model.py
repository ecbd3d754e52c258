"""KerasModel: what it adds to frames and to streams is what Keras predicts, also from a saved pipeline."""

import time

import keras
import numpy as np
import pytest
from keras.src.backend.common import global_state
from pyspark.ml import Pipeline, PipelineModel
from pyspark.ml.feature import StandardScaler, VectorAssembler
from pyspark.ml.functions import vector_to_array
from pyspark.sql import functions as F

from choros.errors import InvalidDataError, InvalidInputError, NotSerializableError
from choros.spark import KerasModel
from choros.spark.model import _ARROW_UDF
from choros.spark.predict import values
from choros.spark.prediction_columns import describe, outputs_of

ROWS = 1500  # more than a batch of prediction, and no multiple of it


@pytest.fixture(scope="module")
def frame(spark):
    made = spark.range(ROWS).select(
        "id",
        *(F.sin(F.col("id") * (i + 1)).alias(f"x{i}") for i in range(4)),
        (F.col("id") % 3).cast("double").alias("label"),
        F.lit("kept").alias("text"),
    )
    return VectorAssembler(inputCols=["x0", "x1", "x2", "x3"], outputCol="features").transform(made)


@pytest.fixture(scope="module")
def x():
    return np.sin(np.arange(ROWS)[:, None] * np.arange(1, 5)).astype("float32")


def dense(units, activation=None, loss="mse", seed=1):
    keras.utils.set_random_seed(seed)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(units, activation)])
    if loss:
        model.compile("sgd", loss)
    return model


class Held(keras.layers.Layer):
    """Of which Keras cannot say what it was made with."""

    def __init__(self, held):
        super().__init__()
        self.held = held

    def call(self, x):
        return x


def collected(frame, *names):
    rows = frame.orderBy("id").select(*names).collect()
    return [np.array([row[i] for row in rows], dtype=np.float64) for i in range(len(names))]


def test_a_classifier(frame, x):
    model = dense(3, "softmax", "sparse_categorical_crossentropy")
    expected = model.predict(x, verbose=0)
    result = KerasModel(model).transform(frame)
    assert result.columns == [*frame.columns, "prediction", "probability"]
    assert [result.schema[n].dataType.typeName() for n in ("prediction", "text")] == ["double", "string"]
    assert type(result.schema["features"].dataType).__name__ == "VectorUDT"
    assert type(result.schema["probability"].dataType).__name__ == "VectorUDT"
    prediction, probability = collected(result, "prediction", vector_to_array("probability").alias("p"))
    np.testing.assert_allclose(probability, expected, atol=1e-6)
    assert prediction.tolist() == expected.argmax(axis=1).tolist()


def test_logits_two_classes_and_values(frame, x):
    logits = dense(3, None, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    result = KerasModel(logits, predictionCol="class", probabilityCol="p", rawPredictionCol="raw").transform(frame)
    values = logits.predict(x, verbose=0)
    shares = np.exp(values) / np.exp(values).sum(axis=1, keepdims=True)
    index, p, raw = collected(result, "class", vector_to_array("p").alias("p"), vector_to_array("raw").alias("raw"))
    np.testing.assert_allclose(p, shares, atol=1e-6)
    np.testing.assert_allclose(raw, values, atol=1e-6)
    assert index.tolist() == values.argmax(axis=1).tolist()
    two = dense(1, "sigmoid", "binary_crossentropy")
    second = two.predict(x, verbose=0)[:, 0]
    result = KerasModel(two).transform(frame)
    index, p = collected(result, "prediction", vector_to_array("probability").alias("p"))
    np.testing.assert_allclose(p, np.stack([1 - second, second], axis=1), atol=1e-6)
    assert index.tolist() == (second >= 0.5).tolist()
    value = dense(1, None, None)  # not compiled
    result = KerasModel(value).transform(frame)
    assert result.columns[-1] == "prediction"
    np.testing.assert_allclose(collected(result, "prediction")[0], value.predict(x, verbose=0)[:, 0], atol=1e-6)
    result = KerasModel(dense(2), predictBatchSize=64).transform(frame)
    assert result.columns[-1] == "rawPrediction"
    np.testing.assert_allclose(
        collected(result, vector_to_array("rawPrediction").alias("r"))[0], dense(2).predict(x, verbose=0), atol=1e-6
    )


def test_several_inputs_and_outputs_of_images_and_numbers(frame, x):
    first, other = keras.Input((2, 1), name="one"), keras.Input((2,), name="other")
    both = keras.layers.Concatenate()([keras.layers.Flatten()(first), other])
    outputs = {
        "kind": keras.layers.Dense(3, "softmax", name="kind")(both),
        "size": keras.layers.Dense(1, name="size")(both),
    }
    model = keras.Model({"one": first, "other": other}, outputs)
    model.compile("sgd", {"kind": "categorical_crossentropy", "size": "mse"})
    expected = model.predict({"one": x[:, :2, None], "other": x[:, 2:]}, verbose=0)
    for features in ({"other": ["x2", "x3"], "one": ["x0", "x1"]}, [["x0", "x1"], ["x2", "x3"]]):
        result = KerasModel(model, featuresCol=features).transform(frame)
        assert result.columns[-3:] == ["prediction_kind", "probability_kind", "prediction_size"]
        kind, size = collected(result, vector_to_array("probability_kind").alias("k"), "prediction_size")
        np.testing.assert_allclose(kind, expected["kind"], atol=1e-6)
        np.testing.assert_allclose(size, expected["size"][:, 0], atol=1e-6)


def test_a_pipeline_is_saved_and_loaded_over_what_is_there(frame, x, tmp_path):
    stages = [
        VectorAssembler(inputCols=["x0", "x1", "x2", "x3"], outputCol="put"),
        StandardScaler(inputCol="put", outputCol="scaled", withMean=True),
        KerasModel(dense(3, "softmax", "sparse_categorical_crossentropy"), featuresCol="scaled"),
    ]
    fitted = Pipeline(stages=stages).fit(frame)
    path = str(tmp_path / "pipeline")
    fitted.save(path)
    fitted.write().overwrite().save(path)
    reloaded = PipelineModel.load(path)
    assert reloaded.stages[2].uid == stages[2].uid
    assert reloaded.stages[2].getOrDefault("featuresCol") == "scaled"
    assert isinstance(reloaded.stages[2].keras_model, keras.Model)
    names = "prediction", vector_to_array("probability").alias("p")
    for value, other in zip(
        collected(fitted.transform(frame), *names), collected(reloaded.transform(frame), *names), strict=True
    ):
        np.testing.assert_array_equal(value, other)
    alone = str(tmp_path / "alone")
    reloaded.stages[2].save(alone)
    with pytest.raises(Exception, match="PATH_ALREADY_EXISTS|already exists"):
        reloaded.stages[2].save(alone)
    reloaded.stages[2].write().overwrite().save(alone)
    assert KerasModel.load(alone).keras_model.count_params() == fitted.stages[2].keras_model.count_params()


def test_a_stream_is_predicted(spark, frame, tmp_path):
    model = KerasModel(dense(3, "softmax", "sparse_categorical_crossentropy"), featuresCol=["x0", "x1", "x2", "x3"])
    files = str(tmp_path / "files")
    frame.drop("features").repartition(4).write.parquet(files)
    stream = spark.readStream.schema(frame.drop("features").schema).option("maxFilesPerTrigger", 2).parquet(files)
    result, seen = model.transform(stream), []
    assert result.isStreaming
    query = (
        result.writeStream.foreachBatch(lambda batch, number: seen.append(batch.select("id", "prediction").collect()))
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(120)
    assert len(seen) == 2
    rows = {row.id: row.prediction for batch in seen for row in batch}
    expected = {row.id: row.prediction for row in model.transform(frame).select("id", "prediction").collect()}
    assert rows == expected


def test_a_stream_of_kafkas_shape_is_parsed_and_predicted(spark, frame):
    """key and value are bytes, as Kafka's are, beside topic, partition, offset and timestamp."""
    names = ["x0", "x1", "x2", "x3"]
    model = dense(3, "softmax", "sparse_categorical_crossentropy")
    rows = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 20).option("numPartitions", 2).load()
    numbers = [(F.col("value") * (i + 1) / 50 - 1).alias(name) for i, name in enumerate(names)]
    events = rows.select(
        F.col("value").cast("string").cast("binary").alias("key"),
        F.to_json(F.struct("value", *numbers)).cast("binary").alias("value"),
        F.lit("events").alias("topic"),
        F.lit(0).alias("partition"),
        F.col("value").alias("offset"),
        "timestamp",
        F.lit(0).alias("timestampType"),
    )
    assert [kind for _, kind in events.dtypes[:2]] == ["binary", "binary"]
    schema = "value bigint, x0 double, x1 double, x2 double, x3 double"
    parsed = events.select("offset", F.from_json(F.col("value").cast("string"), schema).alias("row"))
    result, seen = KerasModel(model, featuresCol=names).transform(parsed.select("offset", "row.*")), []
    query = result.writeStream.foreachBatch(lambda batch, number: seen.extend(batch.collect())).start()
    end = time.monotonic() + 180
    while len(seen) < 40 and time.monotonic() < end and query.isActive:
        time.sleep(0.1)
    query.stop()
    assert len(seen) >= 40, query.exception()
    for row in seen:
        assert row["offset"] == row["value"]
        x = np.array([[row["value"] * (i + 1) / 50 - 1 for i in range(4)]], "float32")
        assert row["prediction"] == model.predict_on_batch(x).argmax()


@pytest.mark.parametrize("way", ["columns", "rows"])
def test_columns_of_one_name_are_passed_on(frame, x, way, monkeypatch):
    monkeypatch.setattr("choros.spark.model._ARROW_UDF", way == "columns" and _ARROW_UDF)
    two = frame.select("id", "features", F.lit(1).alias("z"), F.lit("2").alias("z"), F.lit(3).alias("Z")).limit(20)
    model = dense(3, "softmax", "sparse_categorical_crossentropy")
    result = KerasModel(model).transform(two)
    assert result.columns == [*two.columns, "prediction", "probability"]
    rows = result.collect()
    assert {tuple(row)[2:5] for row in rows} == {(1, "2", 3)}
    expected = model.predict(x, verbose=0).argmax(axis=1)
    assert [row.prediction for row in rows] == [expected[row.id] for row in rows]
    with pytest.raises(InvalidDataError, match=r"features: the frame has 3 columns .*'z' \(z, z, Z\)"):
        KerasModel(model, featuresCol="z").transform(two)


def test_case_tells_columns_apart_only_where_the_session_says_so(spark, frame):
    model, other = dense(3, "softmax", "sparse_categorical_crossentropy"), frame.withColumn("Prediction", F.lit(1))
    with pytest.raises(InvalidInputError, match="has a column 'Prediction' already"):
        KerasModel(model).transform(other)
    for result in ("P", "p"):
        with pytest.raises(InvalidInputError, match=f"'{result}' and 'p'"):
            KerasModel(model, predictionCol=result, probabilityCol="p").transform(frame)
    spark.conf.set("spark.sql.caseSensitive", "true")
    try:
        actual = KerasModel(model).transform(other)
        assert actual.columns[-3:] == ["Prediction", "prediction", "probability"]
        assert len(actual.select("prediction", "Prediction").take(2)) == 2
    finally:
        spark.conf.unset("spark.sql.caseSensitive")


def test_what_cannot_work_is_told(spark, frame):
    model = dense(3, "softmax", "sparse_categorical_crossentropy")
    with pytest.raises(InvalidDataError, match="no column 'feature': did you mean 'features'"):
        KerasModel(model, featuresCol="feature").transform(frame)
    with pytest.raises(InvalidInputError, match="has a column 'label' already"):
        KerasModel(model, predictionCol="label").transform(frame)
    with pytest.raises(InvalidInputError, match="no parameter 'featureCol'"):
        KerasModel(model, featureCol="features")
    with pytest.raises(InvalidInputError, match="no model"):
        KerasModel().transform(frame)
    with pytest.raises(InvalidInputError, match="'auto'"):
        KerasModel(model, task="classes").transform(frame)
    lines = (line for line in "ab")  # no pickle takes a generator
    with pytest.raises(NotSerializableError, match=r"layers\[0\]\.held, a generator, cannot be pickled"):
        KerasModel(keras.Sequential([keras.Input((4,)), Held(lines), keras.layers.Dense(1)])).transform(frame)
    assert KerasModel(keras.Sequential([keras.Input((4,)), Held(object())])).transform(frame).count() == ROWS
    nulls = frame.withColumn("x1", F.when(F.col("id") != 7, F.col("x1")))
    names = ["x0", "x1", "x2", "x3"]
    assert KerasModel(model, featuresCol=names, nulls="drop").transform(nulls).count() == ROWS - 1
    with pytest.raises(Exception, match="nulls in the columns"):
        KerasModel(model, featuresCol=names).transform(nulls).collect()


def test_outputs_of_a_dict_go_by_its_keys():
    inputs = keras.Input((2,))
    outputs = {"z": keras.layers.Dense(3, name="first")(inputs), "a": keras.layers.Dense(1, name="second")(inputs)}
    model = keras.Model(inputs, outputs)
    logits = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("sgd", {"z": logits, "a": "mse"})
    assert outputs_of(model) == [("a", (1,)), ("z", (3,))]
    first, two = describe(model, "auto", "p", "q", "r")
    assert (first.kind, first.prediction) == ("value", "p_a")
    assert (two.kind, two.prediction, two.logits) == ("classes", "p_z", True)
    arrays = {"x": np.ones((4, 2), "float32")}
    assert [first.shape for first in values(model, "x", arrays, 4, 4)] == [(4, 1), (4, 3)]


def test_classes_of_ones_own_travel_and_are_told_of_when_loaded(frame, x, tmp_path):
    class Doubled(keras.layers.Layer):
        def call(self, inputs):
            return inputs * 2.0

    model = keras.Sequential([keras.Input((4,)), Doubled(), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    stage = KerasModel(model)
    np.testing.assert_allclose(
        collected(stage.transform(frame), "prediction")[0], model.predict(x, verbose=0)[:, 0], atol=1e-6
    )
    stage.save(str(tmp_path / "own"))
    with pytest.raises(InvalidInputError, match="custom_object_scope"):
        KerasModel.load(str(tmp_path / "own"))
    with keras.saving.custom_object_scope({"Doubled": Doubled}):
        reloaded = KerasModel.load(str(tmp_path / "own"))
    np.testing.assert_array_equal(reloaded.keras_model.predict(x, verbose=0), model.predict(x, verbose=0))


def test_a_lambda_is_saved_as_keras_saves_it_and_read_by_ones_own_wish(spark, tmp_path):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Lambda(lambda inputs: inputs * 2.0)])
    KerasModel(model).save(str(tmp_path / "own"))
    with pytest.raises(InvalidInputError, match="enable_unsafe_deserialization"):
        KerasModel.load(str(tmp_path / "own"))
    keras.config.enable_unsafe_deserialization()
    try:
        reloaded = KerasModel.load(str(tmp_path / "own"))
    finally:
        global_state.set_global_attribute("safe_mode_saving", None)  # Keras has no way back of its own
    rows = np.ones((2, 4), "float32")
    np.testing.assert_array_equal(reloaded.keras_model.predict(rows, verbose=0), 2.0 * rows)
