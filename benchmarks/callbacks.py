"""What a callback of every batch costs: the time of a step with it over that without, in fits that take turns.

``python benchmarks/callbacks.py --backend jax --model mlp`` prints JSON. Each round trains with and without the
callback, in turn first and last, on the same worker processes; a figure is the median of the rounds' ratios. "wall" is
the clock's time, "cpu" that of all processors in the caller and the workers, which other processes disturb less.

"own_ms" is the floor: the processor time of the callback itself in plain ``fit``, which Choros cannot save.

Callbacks: ``pass`` does nothing; ``logger`` is as W&B's and MLflow's, it copies the logs and reads the learning rate;
``reader`` reads all weights at each batch, so it shows what is saved where nobody does.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from itertools import pairwise
from typing import Any

from common import arguments, cores
from workloads import Workload

TARGET = 1.05


def main() -> None:
    """Measure, and print JSON."""
    options = arguments(
        __doc__ or "",
        model={"choices": ("mlp", "cnn"), "default": "mlp"},
        algorithm={"default": "allreduce"},
        workers={"type": int, "default": 2},
        epochs={"type": int, "default": 4},
    )
    import keras

    import choros

    class Nothing(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            pass

    class Logger(keras.callbacks.Callback):
        def on_train_begin(self, logs: Any = None) -> None:
            self.rows: list[dict[str, float]] = []

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            rate = float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate))
            self.rows.append({**(logs or {}), "rate": rate})

    class Reader(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.model.get_weights()

    steps = 20 if options.quick else 100 if options.model == "mlp" else 30
    workload = Workload(options.model, 128 if options.model == "mlp" else 32, steps)
    x, y = workload.data(options.workers)
    made = workload.make()
    kinds: dict[str, Any] = {"pass": Nothing, "logger": Logger, "reader": Reader}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in kinds}
    plain: list[float] = []
    with choros.WorkerPool(options.workers, threads=1) as pool:
        pids = pool.start().pids

        def fit(extra: list[Any]) -> dict[str, float]:
            marks: list[tuple[float, float]] = []

            class Mark(keras.callbacks.Callback):
                def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
                    marks.append((time.perf_counter(), time.process_time() + sum(map(used, pids))))

            trainer = choros.Trainer(made, options.algorithm, workers=options.workers, pool=pool)
            how = {"batch_size": workload.batch * options.workers, "epochs": options.epochs + 1, "verbose": 0}
            trainer.fit(x, y, callbacks=[Mark(), *extra], **how)
            wall = statistics.median(b[0] - a[0] for a, b in pairwise(marks))
            return {"wall": wall / steps, "cpu": (marks[-1][1] - marks[0][1]) / options.epochs / steps}

        for turn in range(options.rounds or (1 if options.quick else 7)):
            for name, kind in kinds.items():
                extra = [kind()]
                if turn % 2:
                    with_it, without = fit(extra), fit([])
                else:
                    without, with_it = fit([]), fit(extra)
                plain.append(without["wall"])
                found[name].append({key: with_it[key] / without[key] for key in with_it})
    own = {name: own_time(kind, made, x, y, workload.batch, steps) for name, kind in kinds.items()}
    result = {
        name: {key: round(statistics.median(each[key] for each in rounds), 3) for key in ("wall", "cpu")}
        for name, rounds in found.items()
    }
    where = {"python": platform.python_version(), "cores": len(cores()), "load": round(os.getloadavg()[0], 2)}
    head = {"benchmark": "callbacks", "backend": options.backend, "quick": options.quick, "target": TARGET}
    more = {"model": options.model, "algorithm": options.algorithm, "step_ms": round(1e3 * statistics.median(plain), 2)}
    print(json.dumps({**head, **where, **more, "ratios": result, "own_ms": own}, indent=1))


def own_time(kind: Any, model: Any, x: Any, y: Any, batch_size: int, steps: int) -> float:
    """Measure a callback in plain ``fit``: its processor time for each batch, in ms."""
    seconds: list[float] = []

    class Timed(kind):  # type: ignore[misc]
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            before = time.thread_time()
            super().on_train_batch_end(batch, logs)
            seconds.append(time.thread_time() - before)

    rows = slice(batch_size * steps)
    model.fit(x[rows], y[rows], batch_size=batch_size, epochs=1, verbose=0, callbacks=[Timed()])
    return round(1e3 * statistics.median(seconds), 3)


def used(pid: int) -> float:
    """Seconds of a processor that a process has used."""
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
