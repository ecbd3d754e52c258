"""The optimizer's update divided among two workers, against a whole update in each; both against plain Keras.

Three models: 0.38 M values (batch 128 a worker), 2.6 M and 25 M (batch 32). ``--what speed`` gives the step of both
ways and its ratio to control. ``--what memory`` gives the memory of both workers (proportional set size) in the second
epoch, less that with a small model. Prints JSON.

    python benchmarks/shard_optimizer.py --backend jax --optimizer adam --what memory
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from common import arguments, compare, emit
from workloads import Workload

WAYS = {"whole": {"shard_optimizer": False}, "divided": {"shard_optimizer": True}}
MODELS = {"mlp": (128, 100), "wide": (32, 50), "huge": (32, 4)}  # batch of a worker, steps of an epoch
TARGET = 0.6  # of the memory of weights and slots


def proportional_mb(pids: list[int]) -> float:
    """Return the proportional set size of processes in MB: memory that processes share counts once."""
    total = 0
    for pid in pids:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total / 1000


def memory(workload: Workload, divided: bool) -> float:
    """Return the memory of two workers in MB while they train."""
    import keras

    import choros

    results: list[float] = []

    class Look(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            results.append(proportional_mb(pool.start().pids))

    with choros.WorkerPool(2) as pool:
        x, y = workload.data(2)
        trainer = choros.Trainer(workload.make(), workers=2, pool=pool, shard_optimizer=divided)
        trainer.fit(x, y, batch_size=2 * workload.batch, epochs=3, verbose=0, callbacks=[Look()])
    return results[1]


def main() -> None:
    options = arguments(
        __doc__,
        what={"choices": ["speed", "memory"], "default": "speed"},
        models={"nargs": "+", "choices": list(MODELS), "default": list(MODELS)},
    )
    result: dict[str, Any] = {}
    if options.what == "memory":
        small = {name: memory(Workload("mlp", 32, 4, options.optimizer), name == "divided") for name in WAYS}
        for model in options.models:
            load = Workload(model, 32, 4, options.optimizer)
            more = {name: memory(load, name == "divided") - small[name] for name in WAYS}
            result[model] = {**{f"{name}_mb": round(mb, 1) for name, mb in more.items()}}
            result[model]["ratio"] = round(more["divided"] / more["whole"], 3)
        head = {"benchmark": "shard_optimizer_memory", "backend": options.backend, "target": TARGET}
        print(json.dumps({**head, "small_mb": small, "models": result}, indent=1))
        return
    for model in options.models:
        batch, steps = MODELS[model]
        load = Workload(model, batch, 2 if options.quick else steps, options.optimizer)
        seconds, rounds = (1.0, 1) if options.quick else (12.0, options.rounds or 3)
        result = compare(load, WAYS, 2, rounds, seconds, options.as_run)
        step = {name: item["step_ms"] for name, item in result["algorithms"].items()}
        result["divided_to_whole"] = round(step["divided"] / step["whole"], 3)
        emit(f"shard_optimizer_{model}", options, 1.0, result)


if __name__ == "__main__":
    main()
