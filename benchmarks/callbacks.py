"""Cost of a callback of every batch: a step with it over one without, beside the same ratio in plain Keras.

``python benchmarks/callbacks.py --backend jax --model mlp`` prints JSON. Each round trains with and without the
callback, in turn first and last, on the same worker processes; a figure is the median of the rounds' ratios. "wall" is
the clock's time, "cpu" that of all processors in the caller and the workers, which other processes disturb less.

"plain" is the baseline: the same ratio (wall) in plain ``fit``, in a process with one core, as a rank has. "added" is
"wall" over "plain": what Choros adds to the cost that the callback has anyway.

Callbacks: ``pass`` does nothing; ``logger`` is as W&B's and MLflow's, it copies the logs and reads the learning rate;
``reader`` reads all weights at each batch, so it shows what is saved where nobody does; ``tqdm`` is tqdm's own, which
has to be installed. ``--callbacks pass tqdm`` measures these alone.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from common import arguments, cores, processor_seconds
from workloads import Workload

TARGET = 1.05
CALLBACKS = ("pass", "logger", "reader", "tqdm")


def main() -> None:
    """Measure, and print JSON."""
    options = arguments(
        __doc__ or "",
        model={"choices": ("mlp", "cnn"), "default": "mlp"},
        algorithm={"default": "allreduce"},
        workers={"type": int, "default": 2},
        epochs={"type": int, "default": 4},
        callbacks={"nargs": "+", "choices": CALLBACKS, "default": CALLBACKS[:3], "help": "those to measure"},
        plain={"action": "store_true", "help": "measure plain Keras alone"},
    )
    options.rounds = options.rounds or (1 if options.quick else 7)
    steps = 20 if options.quick else 100 if options.model == "mlp" else 30
    workload = Workload(options.model, 128 if options.model == "mlp" else 32, steps)
    if options.plain:
        os.sched_setaffinity(0, {max(cores())})
        print(json.dumps(measure_plain(options, workload)))
        return
    plain = run_plain(options)
    ratios, step_ms = measure_choros(options, workload)
    for name, ratio in plain.items():
        ratios[name] |= {"plain": ratio, "added": round(ratios[name]["wall"] / ratio, 3)}
    where = {"python": platform.python_version(), "cores": len(cores()), "load": round(os.getloadavg()[0], 2)}
    head = {"benchmark": "callbacks", "backend": options.backend, "quick": options.quick, "target": TARGET}
    more = {"model": options.model, "algorithm": options.algorithm, "step_ms": step_ms}
    print(json.dumps({**head, **where, **more, "ratios": ratios}, indent=1))


def callback_kinds(names: Sequence[str]) -> dict[str, Any]:
    """Return what makes the callbacks of these names."""
    import keras

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

    def tqdm_bar() -> Any:
        from tqdm.keras import TqdmCallback

        return TqdmCallback(verbose=2)  # with a bar of the batches

    kinds = dict(zip(CALLBACKS, (Nothing, Logger, Reader, tqdm_bar), strict=True))
    return {name: kinds[name] for name in names}


def measure_choros(options: Any, workload: Workload) -> tuple[dict[str, dict[str, float]], float]:
    """Train with and without each callback.

    Returns:
        The ratios of each callback, and the ms of a step without any.
    """
    import keras

    import choros

    x, y = workload.data(options.workers)
    model = workload.make()
    kinds = callback_kinds(options.callbacks)
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in kinds}
    seconds: list[float] = []
    with choros.WorkerPool(options.workers, threads=1) as pool:
        pids = pool.start().pids

        def fit(extra: list[Any]) -> dict[str, float]:
            marks: list[tuple[float, float]] = []

            class Mark(keras.callbacks.Callback):
                def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
                    marks.append((time.perf_counter(), time.process_time() + processor_seconds(pids)))

            trainer = choros.Trainer(model, options.algorithm, workers=options.workers, pool=pool)
            how = {"batch_size": workload.batch * options.workers, "epochs": options.epochs + 1, "verbose": 0}
            trainer.fit(x, y, callbacks=[Mark(), *extra], **how)
            wall = statistics.median(b[0] - a[0] for a, b in pairwise(marks))
            return {"wall": wall, "cpu": (marks[-1][1] - marks[0][1]) / options.epochs}

        for turn in range(options.rounds):
            for name, kind in kinds.items():
                with_it, without = in_turn(turn, fit, kind)
                seconds.append(without["wall"] / workload.steps)
                rounds[name].append({key: with_it[key] / without[key] for key in with_it})
    ratios = {
        name: {key: round(statistics.median(each[key] for each in ratios), 3) for key in ("wall", "cpu")}
        for name, ratios in rounds.items()
    }
    return ratios, round(1e3 * statistics.median(seconds), 2)


def run_plain(options: Any) -> dict[str, float]:
    """Run ``measure_plain`` in a process of its own."""
    command = [sys.executable, __file__, "--plain", "--backend", options.backend, "--model", options.model]
    command += ["--rounds", str(options.rounds), "--epochs", str(options.epochs), *["--quick"] * options.quick]
    command += ["--callbacks", *options.callbacks]
    flags = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
    environment = {**os.environ, "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    ratios: dict[str, float] = json.loads(done.stdout)
    return ratios


def measure_plain(options: Any, workload: Workload) -> dict[str, float]:
    """Train in this process, by Keras alone, on the rows of one worker.

    Returns:
        For each callback the median over rounds of a step's time with it over that without.
    """
    import keras

    x, y = workload.data(1)
    model = workload.make()

    def fit(extra: list[Any]) -> float:
        marks: list[float] = []
        mark = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: marks.append(time.perf_counter()))
        how = {"batch_size": workload.batch, "epochs": options.epochs + 1, "verbose": 0}
        model.fit(x, y, callbacks=[mark, *extra], **how)
        return statistics.median(after - before for before, after in pairwise(marks))

    kinds = callback_kinds(options.callbacks)
    rounds: dict[str, list[float]] = {name: [] for name in kinds}
    for turn in range(options.rounds):
        for name, kind in kinds.items():
            with_it, without = in_turn(turn, fit, kind)
            rounds[name].append(with_it / without)
    return {name: round(statistics.median(each), 3) for name, each in rounds.items()}


def in_turn(turn: int, fit: Any, kind: Any) -> tuple[Any, Any]:
    """Return what ``fit`` gives with a callback and without, the one first in odd turns and the other in even ones."""
    if turn % 2:
        with_it, without = fit([kind()]), fit([])
    else:
        without, with_it = fit([]), fit([kind()])
    return with_it, without


if __name__ == "__main__":
    main()
