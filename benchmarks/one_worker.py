"""One worker under ``Trainer``, by several algorithms, against plain ``fit`` on the same core in the same seconds.

python benchmarks/one_worker.py --backend jax --algorithms allreduce aeasgd

Both train at the same time and share the core, so that whatever else the machine does meets both alike. A ratio is that
of the rows trained in a second of processor time; ``share`` is what Choros trained of all rows (0.5 is an equal part).
"""

import os
import statistics
import time
from pathlib import Path
from typing import Any

from common import Control, arguments, cores, emit
from workloads import Workload

USUAL = ["allreduce", "localsgd", "aeasgd", "eamsgd"]
TICK = os.sysconf("SC_CLK_TCK")


def processor_time(pid: int) -> float:
    """Seconds of processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICK


def beside(load: Workload, algorithm: str, core: int, pool: Any, seconds: float) -> tuple[float, float]:
    """Train by an algorithm while plain ``fit`` trains on the same core; ratio, and Choros' share of the rows."""
    import keras
    import numpy as np

    import choros

    marks: list[tuple[float, float]] = []

    class Mark(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            [pid] = pool.start().pids
            marks.append((time.perf_counter(), processor_time(pid)))
            self.model.stop_training = time.perf_counter() - marks[0][0] > seconds

    x, y = load.data()
    with Control(load, [core]) as control:
        [process] = control.processes
        process.stdin.write("on\n")
        process.stdin.flush()
        trainer = choros.Trainer(load.make(), algorithm, workers=1, pool=pool)
        trainer.fit(x, y, batch_size=load.batch, epochs=100_000, verbose=0, callbacks=[Mark()])
        process.kill()
        told = np.array([line.split() for line in process.stdout], float)
    (begun, used), (ended, used_then) = marks[0], marks[-1]
    plain_epochs = np.diff(np.interp([begun, ended], told[:, 0], np.arange(len(told))))[0]
    plain_used = np.diff(np.interp([begun, ended], told[:, 0], told[:, 1]))[0]
    epochs = len(marks) - 1
    ratio = (epochs / (used_then - used)) / (plain_epochs / plain_used)
    return float(ratio), float(epochs / (epochs + plain_epochs))


def main() -> None:
    options = arguments(__doc__, algorithms={"nargs": "+", "default": USUAL})
    load = Workload("mlp", 128, 10 if options.quick else 100, options.optimizer)
    rounds, seconds = options.rounds or (1 if options.quick else 3), 1.0 if options.quick else 8.0
    import choros

    core, *others = cores()
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in options.algorithms}
    os.sched_setaffinity(0, {core})  # the worker binds itself to what it finds
    with choros.WorkerPool(1, threads=1) as pool:
        pool.start()
        os.sched_setaffinity(0, others or {core})  # the caller of the one and the keeper of both stay out of the way
        for _ in range(rounds):
            for name in options.algorithms:
                found[name].append(beside(load, name, core, pool, seconds))
    figures = {
        name: {
            "ratio": round(statistics.median(ratio for ratio, _ in pairs), 3),
            "ratios": [round(ratio, 3) for ratio, _ in pairs],
            "share": round(statistics.median(share for _, share in pairs), 3),
        }
        for name, pairs in found.items()
    }
    emit("one_worker", options, 0.97, {"workload": load.json(), "workers": 1, "rounds": rounds, "algorithms": figures})


if __name__ == "__main__":
    main()
