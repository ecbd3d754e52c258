"""On Spark (local[2]): training against two plain processes, feeding against bare Arrow, transform against predict.

The data are as ATLAS' events are: rows of 30 numbers and two classes; the network is dist-keras'. What is compared
takes turns. Prints JSON. Needs pyspark and a Java (pip install 'choros[spark]').

    python benchmarks/spark.py --what train feed transform
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("KERAS_BACKEND", "jax")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import numpy as np

FEATURES, CLASSES, BATCH = 30, 2, 64  # BATCH: of each worker

PLAIN = """
import json, os, sys, time
sys.modules["tensorflow"] = None
os.sched_setaffinity(0, {int(sys.argv[2])})
import numpy as np, keras
from choros.tools.demo.network import build
x, y = (np.load(sys.argv[1])[name] for name in "xy")
model, rows = build(x.shape[1], 2, 0), len(x) // 2
half = slice(rows * int(sys.argv[2]), rows * (int(sys.argv[2]) + 1))
model.fit(x[half][:640], y[half][:640], batch_size=64, verbose=0)
print("ready", flush=True)
sys.stdin.readline()
begun = time.perf_counter()
model.fit(x[half], y[half], batch_size=64, epochs=2, verbose=0)
print(json.dumps(2 * rows / (time.perf_counter() - begun)))
"""


def median(result):
    return statistics.median(result)


def say(**facts):
    print(json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in facts.items()}), flush=True)


def plain(file):
    """Rows a second of two independent processes, each on a core of its own."""
    command = [sys.executable, "-c", PLAIN, str(file)]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false"}
    how = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": environ}
    both = [subprocess.Popen([*command, str(number)], **how) for number in (0, 1)]
    for result in both:
        result.stdout.readline()  # it is ready
    for result in both:
        result.stdin.write("go\n")
        result.stdin.flush()
    return sum(json.loads(result.communicate(timeout=600)[0]) for result in both)


def frame_of(spark, file, rows, vector=False):
    """The rows as a Parquet file of two row groups, and the frame that reads it."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    result = np.load(file)
    x, y = result["x"][:rows], result["y"][:rows]
    lists = pa.FixedSizeListArray.from_arrays(pa.array(x.reshape(-1)), FEATURES).cast(pa.list_(pa.float32()))
    path = Path(file).with_suffix(f".{rows}.parquet")
    path.mkdir(exist_ok=True)
    half = -(-rows // 2)
    for part in range(2):
        table = pa.table({"x": lists, "y": pa.array(y)}).slice(part * half, half)
        pq.write_table(table, path / f"part-{part}.parquet")
    return spark.read.parquet(str(path))


def train(spark, file, rows, rounds):
    from choros import AEASGD, AllReduce
    from choros.spark.feature_columns import normalise
    from choros.spark.frame_trainer import train as fit
    from choros.tools.demo.network import build

    frame, columns = normalise(frame_of(spark, file, rows), "x", "y", inputs=[("x", (FEATURES,))])
    rules = {"AEASGD": AEASGD(window=30), "AllReduce": AllReduce()}
    results = {name: [] for name in rules}
    over, base = {name: [] for name in rules}, []
    for turn in range(rounds + 1):
        if turn:
            base.append(plain(file))
        for name, rule in rules.items():
            begun = time.perf_counter()
            _, history, _ = fit(
                frame,
                model=build(FEATURES, CLASSES, 0),
                columns=columns,
                algorithm=rule,
                workers=2,
                batch_size=2 * BATCH,
                epochs=2,
                seed=1,
                verbose=0,
            )
            if turn:  # the first run starts Python's workers
                over[name].append(time.perf_counter() - begun - history.run.seconds)
                results[name].append(history.run.samples_per_second)
    for name in rules:
        ratios = [ours / control for ours, control in zip(results[name], base, strict=True)]
        say(what="train", algorithm=name, rows=rows, ratio=median(ratios), ratios=[round(r, 3) for r in ratios])
        say(what="overhead", algorithm=name, warm_s=median(over[name]), each=[round(s, 2) for s in over[name]])


def feed(spark, file, rows, rounds):
    """Until the tasks hold their rows and have met, against a bare mapInArrow that touches each without a copy."""
    from choros.spark import barrier
    from choros.spark.feature_columns import normalise

    values = frame_of(spark, file, rows)
    frame, columns = normalise(values, "x", "y", inputs=[("x", (FEATURES,))])

    def bare(batches):
        import pyarrow as pa

        total = 0.0
        for batch in batches:
            total += float(batch.column("x").flatten().to_numpy(zero_copy_only=True)[::FEATURES].sum())
        yield pa.RecordBatch.from_pydict({"total": [total]})

    def empty(task):
        return b""

    times = {"bare": [], "ours": [], "nothing": []}
    for turn in range(rounds + 1):
        for name, call in {
            "bare": lambda: values.mapInArrow(bare, "total double", barrier=True).collect(),
            "nothing": lambda: values.limit(2).repartition(2).mapInArrow(bare, "total double", barrier=True).collect(),
            "ours": lambda: barrier.run(frame, empty, 2, columns=columns),
        }.items():
            begun = time.perf_counter()
            call()
            if turn:
                times[name].append(time.perf_counter() - begun)
    facts = {f"{name}_s": median(each) for name, each in times.items()}
    say(what="feed", rows=rows, ratio=facts["ours_s"] / facts["bare_s"], **facts)


def transform(spark, file, rows, rounds):
    """Against model.predict on the same cores, and against predicting row by row in a Python function of Spark.

    The rows are read from Parquet, and taken from Spark's cache: model.predict has its own in memory.
    """
    from choros.spark import KerasModel
    from choros.tools.demo.network import build

    model = build(FEATURES, CLASSES, 0)
    x = np.load(file)["x"][:rows]
    inputs, few, some = (frame_of(spark, file, count) for count in (rows, 4, 400))
    cached = inputs.select("*").cache()
    cached.foreach(lambda row: None)
    stage = KerasModel(model, featuresCol="x")  # batches of 1,024
    packed = model.__reduce__()[1][0].getvalue()

    def rowwise(batches):
        import io

        import keras
        import pyarrow as pa

        first = keras.Model._unpickle_model(io.BytesIO(packed))
        for batch in batches:
            results = [
                float(np.argmax(first.predict(np.array([row], "float32"), verbose=0)))
                for row in batch.column("x").to_pylist()
            ]
            yield pa.RecordBatch.from_pydict({"prediction": results})

    def consumed(frame):
        return frame.agg({"prediction": "sum"}).collect()

    times = {"predict": [], "parquet": [], "cached": [], "few": [], "rows": [], "rows_few": []}
    for turn in range(rounds + 1):
        for name, call in {
            "predict": lambda: model.predict(x, batch_size=1024, verbose=0),
            "few": lambda: consumed(stage.transform(few)),
            "parquet": lambda: consumed(stage.transform(inputs)),
            "cached": lambda: consumed(stage.transform(cached)),
            "rows_few": lambda: consumed(few.mapInArrow(rowwise, "prediction double")),
            "rows": lambda: consumed(some.mapInArrow(rowwise, "prediction double")),
        }.items():
            begun = time.perf_counter()
            call()
            if turn:
                times[name].append(time.perf_counter() - begun)
    cached.unpersist()
    fixed, net = median(times["few"]), {}
    for source in ("parquet", "cached"):
        net[source] = rows / (median(times[source]) - fixed)
        each = [done / (ours - fixed) for done, ours in zip(times["predict"], times[source], strict=True)]
        ratio = net[source] * median(times["predict"]) / rows
        facts = {"rows_per_s": net[source], "ratio": ratio, "ratios": [round(first, 3) for first in each]}
        say(what="transform", source=source, rows=rows, fixed_s=fixed, **facts)
    slow = 400 / (median(times["rows"]) - median(times["rows_few"]))
    say(what="transform", row_by_row_per_s=slow, times=net["parquet"] / slow)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--what", nargs="+", default=["train", "feed", "transform"])
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    from choros.spark import session

    with tempfile.TemporaryDirectory() as folder:
        rng, file = np.random.default_rng(0), Path(folder) / "rows.npz"
        x = rng.normal(size=(args.rows, FEATURES)).astype("float32")
        np.savez(file, x=x, y=(x[:, 0] + x[:, 1] * x[:, 2] > 0).astype("int32"))
        spark = session("local[2]", spark_ui_enabled="false", spark_ui_showConsoleProgress="false")
        for kind in args.what:
            {"train": train, "feed": feed, "transform": transform}[kind](spark, file, args.rows, args.rounds)
        spark.stop()


if __name__ == "__main__":
    main()
