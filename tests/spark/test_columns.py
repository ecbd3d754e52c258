"""Columns of every kind become arrays, and what cannot is refused from the schema alone."""

import json

import numpy as np
import pytest
from pyspark.ml.linalg import Vectors

from choros.errors import InvalidDataError
from choros.spark.barrier import run
from choros.spark.feature_columns import normalise


@pytest.fixture(scope="module")
def frame(spark):
    rows = [
        (float(i), i, Vectors.dense([i, 1.0]), [i, i], "text", bytes([i, 2, 3]), bool(i % 2), {"a": 1}, 1.0)
        for i in range(12)
    ]
    names = ["real", "whole", "vector", "list", "text", "bytes", "flag", "map", "a.b"]
    made = spark.createDataFrame(rows, names)
    return made.selectExpr(
        "*",
        "named_struct('origin', '', 'height', 2, 'width', 1, 'nChannels', 3, 'mode', 16, "
        "'data', cast(concat(bytes, bytes) as binary)) as image",
    )


def test_every_kind_of_column(frame):
    features = {
        "put": ["real", "whole", "vector", "a.b"],
        "ids": "list",
        "raw": "bytes",
        "image": "image",
        "Flag": "FLAG",
    }
    made, columns = normalise(frame, features, {"one": "whole", "two": "real"}, {"one": "real", "two": "real"})

    def work(task):
        facts = {name: [list(a.shape), str(a.dtype), a[:1].tolist()] for name, a in task.data.x.items()}
        facts |= {f"y_{name}": [list(a.shape), str(a.dtype), a[:1].tolist()] for name, a in task.data.y.items()}
        facts |= {f"w_{name}": [list(a.shape), str(a.dtype), []] for name, a in task.data.weight.items()}
        return json.dumps(facts).encode()

    (result,) = map(json.loads, run(made, work, 1, columns=columns))
    first = result["y_one"][2][0]
    assert result["put"] == [[12, 5], "float32", [[first, first, first, 1.0, 1.0]]]
    assert result["ids"] == [[12, 2], "int64", [[first, first]]]
    assert result["raw"] == [[12, 3], "uint8", [[first, 2, 3]]]
    assert result["image"] == [[12, 2, 1, 3], "uint8", [[[[3, 2, first]], [[3, 2, first]]]]]
    assert result["Flag"] == [[12], "float32", [float(first % 2)]]
    assert result["y_one"][:2] == [[12], "int64"]
    assert result["y_two"][:2] == [[12], "float32"]
    assert result["w_one"][:2] == [[12], "float32"]


WRONG = {
    "a missing column": (dict(features="vectors"), r"no column 'vectors': did you mean 'vector'"),
    "text": (dict(features=["real", "text"]), "'text' holds text.*StringIndexer"),
    "a map": (dict(features="map"), "'map' is of type map<"),
    "no name": (dict(features=[]), "give a column's name"),
    "a missing label": (dict(features="vector", label="lable"), "label: the frame has no column 'lable'"),
    "vectors as weights": (dict(features="vector", label="real", weight="vector"), "one number a row"),
    "no share": (dict(features="vector", label="real", validation=1.5), "validation=1.5"),
    "no mark": (dict(features="vector", label="real", validation="real"), "not boolean"),
    "too few inputs": (dict(features="vector", inputs=[("a", (2,)), ("b", (2,))]), "2 of them.*'a', 'b'"),
    "other names": (dict(features={"c": "vector"}, inputs=[("a", (2,))]), r"\['c'\], but the model has \['a'\]"),
    "a policy": (dict(features="vector", nulls="ignore"), "'error' or 'drop'"),
}


@pytest.mark.parametrize("how", WRONG)
def test_what_cannot_work_is_refused_before_any_job(frame, how):
    arguments, command = WRONG[how]
    with pytest.raises(InvalidDataError, match=command):
        normalise(frame, **{"label": None, **arguments})


def test_a_marked_row_validates_and_float64_stays(frame):
    made, columns = normalise(frame, "vector", "real", validation="flag", floatx="float64")

    def work(task):
        return json.dumps([str(task.data.x.dtype), task.data.y.tolist(), task.validation.y.tolist()]).encode()

    dtype, train, validate = json.loads(run(made, work, 1, columns=columns)[0])
    assert dtype == "float64"
    assert sorted(train) == list(np.arange(0.0, 12, 2))
    assert sorted(validate) == list(np.arange(1.0, 12, 2))
