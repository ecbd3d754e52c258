"""Train for half an hour with four workers: memory, open files and threads stay what they were.

    python drills/soak.py --minutes 30

Half of the time is one long ``fit`` by AEASGD, half many short ones by AllReduce, in one pool, each of its own
model. Every few seconds the caller and each worker are looked at (Linux: proportional memory, descriptors, threads).
The last third is compared with the second, by medians; the first is left out, since caches fill. Prints JSON.
"""

import argparse
import json
import os
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import Any

WORKERS, EACH = 4, 5.0
MORE = {"mb": 0.02, "descriptors": 0.0, "threads": 0.0}  # what may come to it


def facts(pid: int) -> dict[str, float]:
    """Return the memory (MB), descriptors and threads of a process."""
    place = Path(f"/proc/{pid}")
    lines = (place / "smaps_rollup").read_text().splitlines()
    pss = next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    values = [os.readlink(each) for each in (place / "fd").iterdir() if each.is_symlink()]
    return {"mb": pss / 1024, "descriptors": len(values), "threads": len(list((place / "task").iterdir()))}


def children(pid: int) -> list[int]:
    """The processes that one has started, and those that these have."""
    results = []
    for each in Path(f"/proc/{pid}/task").iterdir():
        for child in map(int, (each / "children").read_text().split()):
            results += [child, *children(child)]
    return results


class Watch(threading.Thread):
    """Looks every few seconds at this process and its workers."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.over, self.seen = threading.Event(), list[tuple[str, dict[int, dict[str, float]]]]()
        self.stage = ""

    def run(self) -> None:
        while not self.over.wait(EACH):
            results = {}
            for pid in (os.getpid(), *children(os.getpid())):
                try:
                    results[pid] = facts(pid)
                except OSError:
                    continue
            self.seen.append((self.stage, results))

    def verdict(self, stage: str) -> dict[str, Any]:
        """Compare the last third of a stage with the one before."""
        seen = [result for name, result in self.seen if name == stage]
        third = len(seen) // 3
        values: dict[str, Any] = {"looks": len(seen), "flat": third > 2}
        for kind, more in MORE.items():
            rows = []
            for pid in sorted(set.intersection(*(set(result) for result in seen))):
                parts = seen[third : 2 * third], seen[2 * third :]
                before, after = (statistics.median(result[pid][kind] for result in part) for part in parts)
                rows.append([round(before, 1), round(after, 1)])
                values["flat"] &= after <= before * (1 + more)
            values[kind] = rows
        return values


def model_of(width: int) -> Any:
    import keras

    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(width, "relu"), keras.layers.Dense(2, "softmax")])
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--minutes", type=float, default=30.0, help="ten at least: until then caches fill (default: 30)"
    )
    options = parser.parse_args()
    import keras
    import numpy as np

    import choros

    rng = np.random.default_rng(0)
    x = rng.normal(size=(20_000, 64)).astype("float32")
    y = (x[:, :8].sum(1) > 0).astype("int32")
    watch, half = Watch(), options.minutes * 30
    fits = 0
    with choros.WorkerPool(WORKERS, echo=False) as pool:
        watch.start()
        watch.stage = "one long fit"
        ends = time.monotonic() + half

        class Stop(keras.callbacks.Callback):
            def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
                self.model.stop_training = time.monotonic() > ends

        trainer = choros.Trainer(model_of(256), choros.AEASGD(window=16), workers=WORKERS, pool=pool)
        long = trainer.fit(x, y, epochs=10**6, batch_size=256, verbose=0, callbacks=[Stop()])
        watch.stage = "many fits"
        ends = time.monotonic() + half
        while time.monotonic() < ends:
            choros.Trainer(model_of(256), workers=WORKERS, pool=pool).fit(x, y, epochs=2, batch_size=256, verbose=0)
            fits += 1
        watch.stage = ""
        watch.over.set()
        watch.join()
    result = {stage: watch.verdict(stage) for stage in ("one long fit", "many fits")}
    flat = all(each["flat"] for each in result.values())
    print(json.dumps({"minutes": options.minutes, "epochs": len(long.epoch), "fits": fits, "flat": flat, **result}))
    return 0 if flat else 1


if __name__ == "__main__":
    sys.exit(main())
