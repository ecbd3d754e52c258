"""Examples that need a library: not collected where it is not installed, given what they speak of where it is."""

import importlib.util
from typing import Any

import pytest

collect_ignore_glob = [] if importlib.util.find_spec("pyspark") else ["src/choros/spark/*"]


@pytest.fixture(autouse=True)
def _what_examples_on_spark_speak_of(request: Any, doctest_namespace: dict[str, Any]) -> None:
    """``spark`` with two slots, a ``frame`` of 32 rows, a ``model`` of its features, and ``Pipeline``."""
    if not isinstance(request.node, pytest.DoctestItem) or request.node.path.parent.name != "spark":
        return
    import keras
    from pyspark.ml import Pipeline

    from choros.spark import session

    spark = session("local[2]", spark_ui_enabled="false")
    rows = [([number / 32, 1.0], number % 2) for number in range(32)]
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2, "softmax")])
    model.compile("adam", "sparse_categorical_crossentropy")
    frame = spark.createDataFrame(rows, "features array<float>, label int").repartition(2)
    doctest_namespace.update(spark=spark, frame=frame, model=model, Pipeline=Pipeline)
