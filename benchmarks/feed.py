"""Feeding a worker: 1 M rows x 30 float32 from Parquet against pyarrow, and from memory maps against numpy.

In every round, in turn: ``pyarrow.parquet.read_table`` of the whole file; one epoch of shuffled batches from
``choros.files`` that decodes (the first of a run) and one from what is decoded; one epoch from ``np.memmap`` arrays by
their source, and the same rows by numpy's own indexing. All of it on one core, which is what a worker has. Medians;
prints JSON.

    python benchmarks/feed.py
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "jax")
import numpy as np
import pyarrow as pa
import pyarrow.parquet

import choros
from choros.data import make_source
from choros.data.permutation import permutation

TARGETS = {"parquet": 1.5, "memmap": 1.2}
HOW: dict[str, Any] = {"rank": 0, "size": 1, "synchronous": True, "seed": 0, "epoch": 0, "shuffle": True}
COLUMNS = [f"c{i}" for i in range(30)]


def write(folder: str, rows: int, group: int) -> None:
    x = np.random.default_rng(0).normal(size=(rows, len(COLUMNS))).astype("float32")
    y = (x.sum(1) > 0).astype("int64")
    table = pa.table({name: x[:, i] for i, name in enumerate(COLUMNS)} | {"label": y})
    pa.parquet.write_table(table, f"{folder}/rows.parquet", row_group_size=group)
    np.save(f"{folder}/x.npy", x)
    np.save(f"{folder}/y.npy", y)


def seconds(function: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    function()
    return time.perf_counter() - begun


def through(batches: Iterator[Any]) -> None:
    for _ in batches:
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--group", type=int, default=50_000, help="rows of a row group")
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--cores", type=int, default=1)
    options = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.cores])
    pa.set_cpu_count(options.cores)
    taken: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        write(folder, options.rows, options.group)
        path = f"{folder}/rows.parquet"
        x, y = (np.load(f"{folder}/{name}.npy", mmap_mode="r") for name in "xy")
        mapped = make_source(x, y)

        def index() -> None:
            order = permutation(options.rows, 0, 0)
            for top in range(0, options.rows, options.batch):
                rows = order[top : top + options.batch]
                x[rows], y[rows]

        for _ in range(options.rounds):
            data = choros.files(path, x=COLUMNS, y="label")
            ways: dict[str, Callable[[], Any]] = {
                "pyarrow": lambda: pa.parquet.read_table(path),
                "parquet": lambda data=data: through(data.epoch(batch_size=options.batch, **HOW)),
                "decoded": lambda data=data: through(data.epoch(batch_size=options.batch, **HOW)),
                "numpy": index,
                "memmap": lambda: through(mapped.epoch(batch_size=options.batch, **HOW)),
            }
            for name, way in ways.items():
                taken.setdefault(name, []).append(seconds(way))
    middle = {name: statistics.median(times) for name, times in taken.items()}
    ratios = {"parquet": middle["parquet"] / middle["pyarrow"], "memmap": middle["memmap"] / middle["numpy"]}
    result = {
        "benchmark": "feed",
        "rows": options.rows,
        "cores": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 2),
        "seconds": {name: round(value, 4) for name, value in middle.items()},
        "ratios": {name: round(ratio, 3) for name, ratio in ratios.items()},
        "target": TARGETS,
        "reached": {name: ratio <= TARGETS[name] for name, ratio in ratios.items()},
    }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
