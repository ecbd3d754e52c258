"""``hvd.DistributedOptimizer`` in ``fit`` on two ranks against independent plain Keras, and a small ``hvd.allreduce``.

``mlp`` and ``cnn``: two ranks of ``choros run`` and two control processes take turns on the same cores (see
``common.py``). ``latency``: 1 KB by ``hvd.allreduce``, from numpy and from this backend's tensors; in every round, in
turn, also the bare sum of the group, which knows no names and compares nothing. Medians, of the slower rank.

    python benchmarks/hvd.py --backend jax --what mlp cnn latency
"""

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from typing import Any

from common import LONG_TURN, TURN, Control, arguments, cores, emit, median, ratio, taking_turns
from workloads import Workload

RANKS = 2
TARGETS = {"mlp": 0.80, "cnn": 0.93}
LATENCY = 0.1  # ms


def start(task: dict[str, Any]) -> subprocess.Popen:
    """The ranks, each a process of this file with a task."""
    command = [sys.executable, "-m", "choros", "run", "-n", str(RANKS), "--threads", "1"]
    return subprocess.Popen([*command, __file__, "--child", json.dumps(task)], stdout=subprocess.PIPE, text=True)


def next_line(ranks: subprocess.Popen) -> list[Any]:
    """The next line of any rank, ``[RANK] word JSON``, as (word, value)."""
    line = ranks.stdout.readline()
    if not line:
        raise SystemExit("a rank failed")
    _, word, value = line.split(" ", 2)
    return [word, json.loads(value)]


def say(word: str, value: Any) -> None:
    print(word, json.dumps(value), flush=True)


def fit(workload: Workload, seconds: float, turn: float) -> dict[str, float]:
    """Train by two ranks while control trains on the same cores, in turns."""
    control = Control(workload, cores()[:RANKS])
    ranks = start({"workload": workload.json(), "seconds": seconds})
    pids = [value for _, value in (next_line(ranks) for _ in range(RANKS))]
    control.start()
    ends: list[float] = []
    try:
        with taking_turns(pids, [process.pid for process in control.processes], turn=turn) as turns:
            while (message := next_line(ranks))[0] == "end":
                ends.append(message[1])
    finally:
        times = control.end()
        ranks.send_signal(signal.SIGTERM)
        ranks.communicate()
    return ratio(ends, times, workload.steps, turns)


def fit_as_rank(workload: dict[str, Any], seconds: float) -> None:
    say("pid", os.getpid())
    import keras

    import choros.hvd as hvd

    hvd.init()
    load = Workload(**workload)
    model, (x, y) = load.make(), load.data()
    hvd.DistributedOptimizer(model.optimizer)
    ends: list[float] = []

    class Watch(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if hvd.rank() == 0:
                ends.append(time.perf_counter())
                say("end", ends[-1])
                self.model.stop_training = ends[-1] - ends[0] > seconds

    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), Watch()]
    model.fit(x, y, batch_size=load.batch, epochs=100_000, verbose=0, callbacks=callbacks)
    if hvd.rank() == 0:
        say("done", None)
    time.sleep(60)  # until control has ended too, and this is ended


def latency_as_rank(rounds: int) -> None:
    import keras
    import numpy as np

    import choros.hvd as hvd

    hvd.init()
    array, group = np.ones(256, "float32"), hvd.global_process_set.collectives.group
    tensor = keras.ops.convert_to_tensor(array)
    ways = {
        "group": lambda: group.sum(array),
        "numpy": lambda: hvd.allreduce(array, name="numpy"),
        "tensor": lambda: hvd.allreduce(tensor, name="tensor"),
    }
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, call in ways.items():
            group.barrier()
            begin = time.perf_counter()
            call()
            taken[name].append(time.perf_counter() - begin)
    slower = {name: np.max(hvd.allgather(np.array(times)[None]), axis=0).tolist() for name, times in taken.items()}
    if hvd.rank() == 0:
        say("medians", {name: 1e3 * statistics.median(times[rounds // 10 :]) for name, times in slower.items()})


def latency(rounds: int) -> dict[str, Any]:
    """Milliseconds of a call, and how many bare sums of the group that is."""
    ranks = start({"rounds": rounds})
    _, actual = next_line(ranks)
    ranks.communicate()
    result: dict[str, Any] = {"bytes": 1024, "rounds": rounds, "target": LATENCY, "group_ms": round(actual["group"], 4)}
    for name in ("numpy", "tensor"):
        sums = round(actual[name] / actual["group"], 1)
        result[name] = {"ms": round(actual[name], 4), "sums": sums, "reached": actual[name] < LATENCY}
    return result


def main() -> None:
    kind = {"nargs": "+", "default": [*TARGETS, "latency"], "choices": [*TARGETS, "latency"]}
    options = arguments(__doc__, what=kind, child={"help": "for its own ranks"})
    if options.child:
        task = json.loads(options.child)
        if "workload" in task:
            fit_as_rank(**task)
        else:
            latency_as_rank(**task)
        return
    if len(cores()) < RANKS:
        raise SystemExit(f"{RANKS} cores are needed; this process may use {len(cores())}")
    os.sched_setaffinity(0, cores()[:RANKS])
    quick, actual, result = options.quick, {name: [] for name in options.what if name in TARGETS}, {}
    loads = {
        "mlp": (Workload("mlp", 128, 10 if quick else 1000), 25.0),
        "cnn": (Workload("cnn", 32, 3 if quick else 100), 40.0),
    }
    rounds, turn = options.rounds or (1 if quick else 3), LONG_TURN if options.as_run else TURN
    for _ in range(rounds):
        for name, runs in actual.items():
            load, seconds = loads[name]
            seconds = max(seconds, 4 * turn) if options.as_run else seconds
            runs.append(fit(load, 3.0 if quick else seconds, turn))
    result["algorithms"] = {name: {key: median(runs, key) for key in runs[0]} for name, runs in actual.items()}
    for name, runs in actual.items():
        result["algorithms"][name]["ratios"] = [round(run["ratio"], 3) for run in runs]
    if "latency" in options.what:
        result["latency"] = latency(300 if quick else 3000)
    emit("hvd", options, TARGETS, {"ranks": RANKS, "rounds": rounds, **result})


if __name__ == "__main__":
    main()
