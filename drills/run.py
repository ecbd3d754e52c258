"""Drills: workers of real runs are killed, stopped or made to raise at random moments; all must come right.

python drills/run.py --backend jax --number 20 --seed 1

Each drill draws an algorithm, a worker, a moment and a way to fail. Then must hold: the run ends within its limit; of
workers that train together the weights are, bit by bit, those of a run without a failure, and each row counts once; of
workers that train alone the center holds each step once, and at most one window of the failed worker is missing in the
record; no process, file descriptor or shared memory is left. Prints JSON; ends with 1 where a drill went wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

BACKENDS = ("jax", "torch", "tensorflow")
SYNCHRONOUS = {"AllReduce": {}, "LocalSGD": {"window": 4}, "EASGD": {"window": 3}, "DiLoCo": {"window": 5}}
ASYNCHRONOUS = {"DOWNPOUR": {"window": 3}, "AEASGD": {"window": 4}, "DynSGD": {"window": 3}}
WAYS = ("kill", "stop", "raise")
EPOCHS, BATCHES, ROWS, WORKERS, RATE = 3, 60, 6, 2, 1 / 64
LIMIT, TIMEOUT, RESTARTS = 90.0, 3.0, 2  # seconds a drill may take, seconds after which a worker counts as hung


def mean_prediction(truth: Any, prediction: Any) -> Any:
    """A loss whose gradient is 1, so that a weight counts the steps."""
    import keras

    return keras.ops.mean(prediction, axis=-1) + 0 * keras.ops.mean(truth, axis=-1)


def model_of(together: bool) -> Any:
    """A model in which much differs by rank, or one whose weight counts the steps."""
    import keras

    keras.utils.set_random_seed(0)
    if together:
        inner = [keras.layers.Dense(8, "relu"), keras.layers.Dropout(0.3, seed=4), keras.layers.BatchNormalization()]
        model = keras.Sequential([keras.Input((4,)), *inner, keras.layers.Dense(1)])
        model.compile("adam", "mse", metrics=["mae"])
    else:
        layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
        model = keras.Sequential([keras.Input((1,)), layer])
        model.compile(keras.optimizers.SGD(RATE), mean_prediction)
    return model


def data_of(together: bool, flag: str, worker: int) -> Any:
    """Its batches."""
    import keras
    import numpy as np

    class Batches(keras.utils.PyDataset):  # type: ignore[misc]
        """Batches that take a moment; where a file appears, its worker raises, once."""

        def __len__(self) -> int:
            return BATCHES

        def __getitem__(self, index: int) -> Any:
            time.sleep(0.004)
            me = sys.argv[-2] if os.environ.get("CHOROS_WORKER") else os.environ.get("CHOROS_RANK")
            if me == str(worker) and os.path.exists(flag):
                os.unlink(flag)
                raise OSError("the file system was away for a moment")
            rng = np.random.default_rng(index)
            x = rng.normal(size=(ROWS, 4)).astype("float32") if together else np.ones((ROWS, 1), "float32")
            return x, np.ones((ROWS, 1), "float32")

    return Batches()


def harm(pool: Any, how: str, worker: int, flag: str) -> None:
    """Do a worker harm."""
    if how == "raise":
        Path(flag).touch()
    else:
        os.kill(pool.start().pids[worker], signal.SIGKILL if how == "kill" else signal.SIGSTOP)


def fit(name: str, pool: Any, flag: str, worker: int, moment: tuple[int, int, float] | None, how: str) -> Any:
    """One run, and what its callbacks saw: when harm was done, and when training had come as far again."""
    import keras

    import choros

    together = name in SYNCHRONOUS
    model = model_of(together)
    seen: dict[str, Any] = {"harmed": None, "back": None, "furthest": (-1, -1)}

    class Watch(keras.callbacks.Callback):  # type: ignore[misc]
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.epoch = epoch

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            at = (self.epoch, batch)
            if seen["harmed"] is None and moment is not None and at >= moment[:2]:
                seen["harmed"] = time.monotonic()
                threading.Timer(moment[2], harm, (pool, how, worker, flag)).start()
            elif together and seen["harmed"] and seen["back"] is None and at <= seen["furthest"]:
                seen["back"] = time.monotonic() - seen["harmed"]
            seen["furthest"] = max(at, seen["furthest"])

    settings = {**SYNCHRONOUS, **ASYNCHRONOUS}[name]
    algorithm = getattr(choros, name)(**settings)
    how_long = {"timeout": TIMEOUT, "first_timeout": 60.0}
    trainer = choros.Trainer(model, algorithm, workers=WORKERS, pool=pool, restarts=RESTARTS, **how_long)
    history = trainer.fit(data_of(together, flag, worker), epochs=EPOCHS, seed=3, verbose=0, callbacks=[Watch()])
    return model, history, seen


def wrong(name: str, model: Any, history: Any, uninterrupted: Any, failed: int, harmed: Collection[int]) -> list[str]:
    """Return the faults of the run.

    Args:
        name: of the algorithm.
        model: as it was trained.
        history: of the run.
        whole: a model that was trained without a failure, of workers that train together.
        failed: how many restarts there must be at least, of workers that train together.
        harmed: the workers that may have failed.
    """
    import numpy as np

    run, problems = history.run, []
    if any(restart.rank not in harmed for restart in run.restarts):
        named = [restart.rank for restart in run.restarts]
        problems.append(f"of the workers {sorted(harmed)} each may have failed, but the record names {named}")
    if name in SYNCHRONOUS and len(run.restarts) < failed:  # one that trains alone may have been done already
        problems.append(f"{failed} failures, but {len(run.restarts)} restarts in the record")
    rows, steps = EPOCHS * BATCHES * ROWS, EPOCHS * BATCHES  # each worker has a share of every batch
    if name in SYNCHRONOUS:
        pairs = zip(model.get_weights(), uninterrupted.get_weights(), strict=True)
        if not all(np.array_equal(pair, other) for pair, other in pairs):
            problems.append("the weights are not those of a run without a failure")
        if run.rows != rows:
            problems.append(f"{run.rows} rows in the record, not {rows}")
        return problems
    window = ASYNCHRONOUS[name]["window"]
    missing = len(run.restarts) * window * ROWS // WORKERS
    if not rows - missing <= run.rows <= rows:
        problems.append(f"{run.rows} rows in the record, not {rows} (or up to {missing} fewer)")
    if name == "DOWNPOUR":
        weight = float(np.asarray(model.get_weights()[0]).item())
        if weight != -RATE * WORKERS * steps:
            problems.append(f"the center holds {-weight / RATE:g} steps, not {WORKERS * steps}")
    meetings = WORKERS * -(-steps // window)
    if not meetings - len(run.restarts) <= run.exchanges <= meetings + len(run.restarts):
        problems.append(f"{run.exchanges} meetings, not {meetings}")
    return problems


def children() -> set[int]:
    """The processes that this one has started."""
    results: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that ended meanwhile
            results |= {int(pid) for pid in (task / "children").read_text().split()}
    return results


def left_behind(before: set[int], descriptors: int, pool: Any = None) -> list[str]:
    """Return what a run has left behind: processes, descriptors, shared memory."""
    deadline = time.monotonic() + 5.0
    while True:
        problems = []
        if more := children() - before - set(() if pool is None else pool.start().pids):
            problems.append(f"orphans: {sorted(more)}")
        if (now := len(os.listdir("/proc/self/fd"))) > descriptors:
            problems.append(f"{now - descriptors} descriptors more than before")
        if remaining := [name for name in os.listdir("/dev/shm") if "choros" in name]:
            problems.append(f"in shared memory: {remaining}")
        if not problems or time.monotonic() > deadline:
            return problems
        time.sleep(0.05)


def drill(number: int, seed: int, pool: Any, wholes: dict[str, Any], room: str) -> dict[str, Any]:
    """Run one drill, and return what was drawn, the outcome and the faults."""
    rng = random.Random(f"{seed}/{number}")
    name, how = rng.choice([*SYNCHRONOUS, *ASYNCHRONOUS]), rng.choice(WAYS)
    worker = rng.randrange(WORKERS)
    moment = (rng.randrange(EPOCHS), rng.randrange(BATCHES - 8), rng.uniform(0.0, 0.05))
    facts = {"number": number, "algorithm": name, "how": how, "worker": worker, "moment": moment}
    if name in SYNCHRONOUS and name not in wholes:
        wholes[name] = fit(name, pool, os.path.join(room, "none"), 0, None, how)[0]
    before, descriptors = children() - set(pool.start().pids), len(os.listdir("/proc/self/fd"))
    begun = time.monotonic()
    try:
        model, history, seen = fit(name, pool, os.path.join(room, f"flag-{number}"), worker, moment, how)
        failed = not (how == "raise" and os.path.exists(os.path.join(room, f"flag-{number}")))
        problems = wrong(name, model, history, wholes.get(name), int(failed), {worker})
        facts["restarts"] = len(history.run.restarts)
        facts["recovered"] = seen["back"]  # nobody waits for one that trains alone
        facts["blamed"] = [restart.rank for restart in history.run.restarts]
    except Exception as error:
        problems = [f"{type(error).__name__}: {error}".partition("\n")[0]]
    facts["seconds"] = time.monotonic() - begun
    for pid in pool.start().pids if how == "stop" else ():  # a worker that was done when it was stopped
        os.kill(pid, signal.SIGCONT)
    facts["wrong"] = problems + left_behind(before, descriptors, pool)
    return facts


def parser_of(text: str | None, number: int, kind: str = "how many drills") -> argparse.ArgumentParser:
    """Return a parser of the options that all drills have.

    Args:
        text: the docstring of the drills' file.
        number: the default of ``--number``.
        what: its help.
    """
    parser = argparse.ArgumentParser(description=(text or "").partition("\n")[0])
    parser.add_argument("--backend", choices=BACKENDS, default=os.environ.get("KERAS_BACKEND", "jax"))
    parser.add_argument("--number", type=int, default=number, help=kind)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, nargs="*", help="numbers of drills to repeat")
    return parser


def choose_backend(name: str) -> None:
    """Have Keras load a backend in this process, and TensorFlow only if it is the backend."""
    os.environ["KERAS_BACKEND"] = name
    if name != "tensorflow":
        sys.modules["tensorflow"] = None  # type: ignore[assignment]


def limited(seconds: float, drill: Callable[..., dict[str, Any]], *how: Any) -> dict[str, Any]:
    """Run a drill and print its facts. One that takes longer than the limit ends the process with a traceback."""
    faulthandler.dump_traceback_later(seconds, exit=True)
    facts = drill(*how)
    faulthandler.cancel_dump_traceback_later()
    print(json.dumps(facts), file=sys.stderr, flush=True)
    return facts


def report(options: argparse.Namespace, done: list[dict[str, Any]], **more: Any) -> int:
    """Print the results of drills as JSON; return 1 if one of them is wrong.

    Args:
        options: of ``parser_of``.
        done: the facts of each drill.
        **more: further results.
    """
    facts = {
        "backend": options.backend,
        "seed": options.seed,
        "drills": len(done),
        "wrong": [result for result in done if result["wrong"]],
        "algorithms": {
            name: sum(result["algorithm"] == name for result in done) for name in [*SYNCHRONOUS, *ASYNCHRONOUS]
        },
        "restarts": sum(result.get("restarts", 0) for result in done),
        "longest_seconds": max(result["seconds"] for result in done),
        **more,
    }
    print(json.dumps(facts, indent=1))
    return 1 if facts["wrong"] else 0


def main() -> int:
    """Run the drills, and print the results."""
    options = parser_of(__doc__, 70).parse_args()
    choose_backend(options.backend)
    import choros

    done: list[dict[str, Any]] = []
    wholes: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as room, choros.WorkerPool(WORKERS, echo=False) as pool:
        pool.start()
        numbers = options.only or range(options.number)
        done += [limited(LIMIT, drill, number, options.seed, pool, wholes, room) for number in numbers]
    back = sorted(result["recovered"] for result in done if result.get("recovered"))
    recovered = {
        "median": statistics.median(back) if back else None,
        "most": back[-1] if back else None,
        "of": len(back),
    }
    ways = {way: sum(result["how"] == way for result in done) for way in WAYS}
    return report(options, done, ways=ways, recovered_seconds=recovered)


if __name__ == "__main__":
    sys.exit(main())
