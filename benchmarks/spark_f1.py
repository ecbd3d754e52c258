"""On Spark (local[2]): every algorithm on ATLAS' Higgs events, and the F1 of what it predicts on untouched ones.

All train dist-keras' network from the same weights, on 70 % of the events, through KerasEstimator; Spark's own
evaluator says the (weighted) F1 of KerasModel's predictions on the others. Prints JSON; the last line says whether all
are within 2 points of Single's. Needs pyspark and a Java (pip install 'choros[spark]').

    python benchmarks/spark_f1.py ../shared/data/atlas_higgs.csv.gz
"""

import argparse
import json
import os
import sys
import time

os.environ.setdefault("KERAS_BACKEND", "jax")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.modules["tensorflow"] = None

RATES = {"AGN": 8e-3}  # it divides what was learnt in a window by the window, which is 8


def frame_of(spark, x, y):
    import pyarrow as pa

    lists = pa.FixedSizeListArray.from_arrays(pa.array(x.reshape(-1)), x.shape[1]).cast(pa.list_(pa.float32()))
    made = spark.createDataFrame(pa.table({"features": lists, "label": pa.array(y.astype("float64"))})).repartition(2)
    return made.cache()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--algorithms", nargs="+")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    from pyspark.ml.evaluation import MulticlassClassificationEvaluator

    import choros
    from choros.spark import KerasEstimator, session
    from choros.tools.demo.datasets.higgs import load_higgs
    from choros.tools.demo.network import build

    data = load_higgs(args.file)
    spark = session("local[2]", spark_ui_enabled="false", spark_ui_showConsoleProgress="false")
    spark.sparkContext.setLogLevel("ERROR")
    train, test = frame_of(spark, data.x_train, data.y_train), frame_of(spark, data.x_test, data.y_test)
    evaluator, result = MulticlassClassificationEvaluator(metricName="f1"), {}
    others = sorted(set(args.algorithms or choros.algorithms()) - {"Single"})
    for name in ["Single", *others]:
        begun = time.perf_counter()
        estimator = KerasEstimator(
            build(len(data.features), data.classes, args.seed),
            algorithm=name,
            workers=1 if name == "Single" else 2,
            epochs=args.epochs,
            batchSize=128,
            learningRate=RATES.get(name),
            seed=args.seed,
        )
        result[name] = evaluator.evaluate(estimator.fit(train).transform(test))
        seconds = time.perf_counter() - begun
        print(json.dumps({"algorithm": name, "f1": round(result[name], 4), "seconds": round(seconds, 1)}), flush=True)
    worst = min(result, key=result.get)
    within = result[worst] >= result["Single"] - 0.02
    rows = {"train": len(data.y_train), "test": len(data.y_test)}
    print(json.dumps({"rows": rows, "single": round(result["Single"], 4), "worst": worst, "within_2_points": within}))
    spark.stop()
    sys.exit(not within)


if __name__ == "__main__":
    main()
