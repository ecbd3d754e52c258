"""Examples that need a library: not collected where it is not installed, given what they speak of where it is."""

import doctest
import importlib.util
import re
from typing import Any

import pytest

collect_ignore_glob = ["docs/*.py"]  # settings and figures of the site
if not importlib.util.find_spec("pyspark"):
    collect_ignore_glob.append("src/choros/spark/*")


class FencedParser(doctest.DocTestParser):
    """A parser of Markdown's examples, for which the closing fence of a block of code ends what is expected."""

    def parse(self, string: str, name: str = "<string>") -> list[Any]:
        """Return the examples and the text between them; lines keep their numbers."""
        return super().parse(re.sub(r"^ *```.*$", "", string, flags=re.MULTILINE), name)


doctest.DocTestParser = FencedParser  # type: ignore[misc] # pytest makes one for each file of text


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
