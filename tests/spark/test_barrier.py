"""Barrier stages on a real cluster of two executors: rows spilled and mapped, tasks that meet, failures in words."""

import json
import os
import time

import numpy as np
import pytest
from pyspark.ml.linalg import SparseVector, Vectors

from choros.errors import InvalidDataError, InvalidInputError, WorkerFailedError
from choros.spark.barrier import run
from choros.spark.feature_columns import normalise
from choros.spark.task_slots import choose_workers, slots


@pytest.fixture(scope="module")
def frame(spark):
    rows = [(float(i), Vectors.dense([i, 2 * i, 3]), i % 3, [float(i), 1.0]) for i in range(101)]
    rows[7] = (7.0, SparseVector(3, {0: 7.0, 1: 14.0, 2: 3.0}), 1, [7.0, 1.0])
    return spark.createDataFrame(rows, ["weight", "features", "label", "more"])


def look(task):
    """Return the data of a task as JSON."""
    x, more = task.data.x
    facts = {
        "rank": task.rank,
        "size": task.size,
        "x": x.tolist(),
        "more": [list(more.shape), str(more.dtype)],
        "y": task.data.y.tolist(),
        "weight": str(task.data.weight.dtype),
        "mapped": type(x.base).__name__ == "mmap" and not x.flags.writeable,
        "mode": oct(os.stat(x.filename).st_mode & 0o777),
        "links": os.stat(x.filename).st_nlink,
        "dtype": [str(x.dtype), str(task.data.y.dtype)],
        "rows": task.rows,
        "threads": os.environ["OMP_NUM_THREADS"],
        "met": [text.decode() for text in task.swap(f"I am {task.rank}".encode())],
        "again": len(task.swap(b"")),
        "secret": len(task.secret),
        "pid": os.getpid(),
        "cores": task.cores,
    }
    return json.dumps(facts).encode()


def test_tasks_have_all_rows_and_meet(spark, frame):
    made, columns = normalise(
        frame, ["features", "more"], "label", "weight", inputs=[("a", (3,)), ("b", (None,))], nulls="error"
    )
    results = [json.loads(text) for text in run(made, look, 2, columns=columns)]
    assert [result["rank"] for result in results] == [0, 1]
    assert results[0]["pid"] != results[1]["pid"]
    rows = sorted(row for result in results for row in result["x"])
    assert rows == [[i, 2 * i, 3] for i in range(101)]  # the sparse one too
    for result in results:
        assert result["y"] == [int(row[0]) % 3 for row in result["x"]]
        assert result["dtype"] == ["float32", "int64"]
        assert result["mapped"]
        assert (result["mode"], result["links"]) == ("0o600", 0)
        assert result["more"] == [[len(result["x"]), 2], "float32"]
        assert result["met"] == ["I am 0", "I am 1"]
        assert result["again"] == 2
        assert result["rows"] == [len(each["x"]) for each in results]
        assert min(result["rows"]) > 45  # dealt out evenly
        assert (result["threads"], result["cores"], result["secret"]) == ("1", 1, 32)


def test_validation_rows_are_apart_and_large_results_come_back(frame):
    made, columns = normalise(frame, "features", "label", validation=0.3, seed=5)

    def work(task):
        assert task.validation_rows[task.rank] == len(task.validation.x)
        facts = [len(task.data.x), len(task.validation.x)]
        return json.dumps(facts).encode() + b"\n" + bytes(70 << 20) if task.rank else json.dumps(facts).encode()

    first, other = run(made, work, "auto", columns=columns)
    head, _, rest = other.partition(b"\n")
    assert len(rest) == 70 << 20
    counts = np.array([json.loads(first), json.loads(head)]).sum(axis=0)
    assert counts.sum() == 101
    assert 10 < counts[1] < 50


def test_a_task_that_raises_is_told_with_its_traceback(frame):
    made, columns = normalise(frame, "features", "label")

    def work(task):
        if task.rank == 1:
            raise RuntimeError("the second worker's own trouble")
        task.swap(b"")  # waits for the other
        return b""

    begun = time.monotonic()
    with pytest.raises(WorkerFailedError, match="worker 1 of 2.*the second worker's own trouble") as caught:
        run(made, work, 2, columns=columns)
    assert time.monotonic() - begun < 60
    assert caught.value.rank == 1
    assert "in work" in caught.value.traceback
    assert "org.apache.spark" not in str(caught.value)
    assert caught.value.__suppress_context__


def test_a_python_that_is_killed_is_told(spark, frame):
    import signal

    made, columns = normalise(frame, "features", "label")

    def work(task):
        if task.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)
        return b""

    with pytest.raises(WorkerFailedError, match=r"worker 1 of 2.*its Python process was ended") as caught:
        run(made, work, 2, columns=columns)
    assert caught.value.rank == 1
    assert len(str(caught.value).splitlines()) == 3  # what happened, and what to do


def test_bad_rows_are_told_from_both_sides(spark):
    ragged = spark.createDataFrame([([1.0] * (2 + (i == 9)), 1) for i in range(10)], ["features", "label"])
    nulls = spark.createDataFrame(
        [(None if i == 3 else [1.0], 1) for i in range(10)], "features array<float>, label int"
    )
    for frame, message in ((ragged, "features.*from 2 to 3|shapes"), (nulls, "nulls in the column 'features'")):
        made, columns = normalise(frame, "features", "label")
        with pytest.raises(InvalidDataError, match=message):
            run(made, lambda task: b"", 2, columns=columns)
    made, columns = normalise(nulls, "features", "label", nulls="drop")
    result = run(made, lambda task: str(len(task.data.x)).encode(), 2, columns=columns)
    assert sum(map(int, result)) == 9
    inside = spark.createDataFrame(
        [([[1.0], [None if i == 3 else 2.0]], i) for i in range(10)], "features array<array<float>>, label int"
    )
    made, columns = normalise(inside, "features", "label", nulls="drop")
    assert sorted(row.choros_y1 for row in made.collect()) == [0, 1, 2, 4, 5, 6, 7, 8, 9]
    made, columns = normalise(nulls.where("label > 1"), "features", "label")
    with pytest.raises(InvalidDataError, match="no rows"):
        run(made, lambda task: b"", 2, columns=columns)


def test_a_task_without_rows_knows_their_shape(spark):
    frame = spark.createDataFrame([([[1.0, 2.0], [3.0, 4.0]], 1.5)], "features array<array<float>>, label double")
    made, columns = normalise(frame, "features", "label", inputs=[("image", (2, 2, 1))])
    result = run(
        made, lambda task: json.dumps([task.data.x.shape, str(task.data.y.dtype)]).encode(), 2, columns=columns
    )
    assert sorted(map(json.loads, result)) == [[[0, 2, 2, 1], "float32"], [[1, 2, 2, 1], "float32"]]


def test_slots_are_counted_before_any_job(spark, frame):
    end = time.monotonic() + 10
    while slots(spark) != (2, 2) and time.monotonic() < end:
        time.sleep(0.05)  # the tasks of the last test may not be reported as ended yet
    assert slots(spark) == (2, 2)
    assert choose_workers(spark, "auto") == 2
    made, columns = normalise(frame, "features", "label")
    begun = time.monotonic()
    for workers, message in ((3, "workers=3.*2 task slots.*workers=2"), (0, "whole number"), ("all", "whole number")):
        with pytest.raises(InvalidInputError, match=message):
            run(made, look, workers, columns=columns)
    assert time.monotonic() - begun < 75  # no ten minutes
