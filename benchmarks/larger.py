"""Rows in Parquet files that are larger than a worker's memory may be: how much of its own each worker takes.

5 GB of made-up rows (30 float32 and a label) train a small network by two workers, one epoch. Each worker's anonymous
memory (``RssAnon``: its own, not the mapped pages of files, which the kernel takes back) is looked at twenty times a
second; what counts is the most of it above what the worker had after a first fit on a few rows, which is what the
framework itself takes after its first step. Prints JSON.

    python benchmarks/larger.py --backend jax
"""

import json
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from common import arguments

TARGET = 1.0  # GB
COLUMNS = [f"c{i}" for i in range(30)]
FILE, GROUP = 2_100_000, 50_000  # rows of a file, and of a row group


def write(folder: str, gigabytes: float) -> int:
    """Write the files; returns their rows."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet

    files = max(1, round(gigabytes * 1e9 / (FILE * 4 * len(COLUMNS))))
    for number in range(files):
        x = np.random.default_rng(number).normal(size=(FILE, len(COLUMNS))).astype("float32")
        table = pa.table({name: x[:, i] for i, name in enumerate(COLUMNS)} | {"label": (x.sum(1) > 0).astype("int8")})
        pa.parquet.write_table(table, f"{folder}/{number:03}.parquet", row_group_size=GROUP, compression="none")
    return files * FILE


def anonymous(pid: int) -> float:
    """GB of a process's own memory."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) / 1e6
    return 0.0


class Watch(threading.Thread):
    """Keeps the most that each process had."""

    def __init__(self, pids: list[int]) -> None:
        super().__init__(daemon=True)
        self.most, self.over = dict.fromkeys(pids, 0.0), threading.Event()

    def run(self) -> None:
        while not self.over.wait(0.05):
            for pid in self.most:
                self.most[pid] = max(self.most[pid], anonymous(pid))


def main() -> None:
    options = arguments(__doc__, gigabytes={"type": float, "default": 5.0}, out={"help": "where the files are made"})
    import keras
    import numpy as np

    import choros

    layers = keras.layers
    model = keras.Sequential([keras.Input((30,)), layers.Dense(64, "relu"), layers.Dense(1, "sigmoid")])
    model.compile("adam", "binary_crossentropy", metrics=["accuracy"])
    batch: dict[str, Any] = {"batch_size": 8192, "verbose": 2}
    with choros.WorkerPool(2) as pool, tempfile.TemporaryDirectory(dir=options.out) as folder:
        trainer = choros.Trainer(model, "allreduce", workers=2, pool=pool)
        trainer.fit(np.zeros((16384, 30), "float32"), np.zeros(16384), **batch)
        pids = pool.start().pids
        before = {pid: anonymous(pid) for pid in pids}
        rows = write(folder, 0.25 if options.quick else options.gigabytes)
        data = choros.files(f"{folder}/*.parquet", x=COLUMNS, y="label", spill_dir=options.out)
        watch = Watch(pids)
        watch.start()
        begun = time.perf_counter()
        history = trainer.fit(data, **batch)
        seconds = time.perf_counter() - begun
        watch.over.set()
        watch.join(5)
        size = sum(path.stat().st_size for path in Path(folder).iterdir()) / 1e9
    above = {pid: watch.most[pid] - before[pid] for pid in pids}
    report = {
        "gigabytes": round(size, 2),
        "rows": rows,
        "seconds": round(seconds, 1),
        "accuracy": round(history.history["accuracy"][-1], 4),
        "worker_gb_before": [round(value, 3) for value in before.values()],
        "worker_gb_above": [round(value, 3) for value in above.values()],
    }
    print(json.dumps({**report, "target": TARGET, "reached": max(above.values()) <= TARGET, "quick": options.quick}))


if __name__ == "__main__":
    main()
