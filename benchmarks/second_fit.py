"""First and second ``fit`` of a process: two workers of a Trainer, against plain Keras in one process.

Each pair of fits is in a new process, by turns. The clock of the first fit starts before ``Trainer(...)``. Prints JSON:
seconds, medians over the rounds, and how much longer a Trainer takes than plain ``model.fit``.

    python benchmarks/second_fit.py --backend jax --algorithm allreduce
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time

from common import arguments, of_child

KINDS = ("plain", "trainer", "pool")


def seconds(kind: str) -> list[float]:
    """Return the seconds of the fits of a new process."""
    return [float(word) for word in of_child(kind)[-2:]]


def two_fits(options: argparse.Namespace) -> None:
    """Train twice, and print the seconds of each fit."""
    import keras
    import numpy as np

    import choros

    layers = [keras.layers.Dense(350, "relu"), keras.layers.Dense(256, "relu"), keras.layers.Dense(10, "softmax")]
    model = keras.Sequential([keras.Input((784,)), *layers])
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    x = np.random.default_rng(0).normal(size=(2048, 784)).astype("float32")
    y = np.random.default_rng(1).integers(0, 10, 2048)
    pool = choros.WorkerPool(2) if options.child == "pool" else None
    for _ in range(2):
        begun = time.perf_counter()
        if options.child == "plain":
            model.fit(x, y, batch_size=256, verbose=0)
        else:
            choros.Trainer(model, options.algorithm, workers=2, pool=pool).fit(x, y, batch_size=256, verbose=0)
        print(time.perf_counter() - begun)


def main() -> None:
    """Measure, and print JSON."""
    options = arguments(__doc__ or "", threads=None, algorithm={"default": "allreduce"}, child={"default": ""})
    if options.child:
        two_fits(options)
        return
    runs: dict[str, list[list[float]]] = {kind: [] for kind in KINDS}
    for _ in range(1 if options.quick else options.rounds or 5):
        for kind in KINDS:
            runs[kind].append(seconds(kind))
    medians = {kind: [statistics.median(fits) for fits in zip(*of_kind, strict=True)] for kind, of_kind in runs.items()}
    first, second = (
        {kind: round(medians[kind][fit] - medians["plain"][fit], 3) for kind in KINDS[1:]} for fit in range(2)
    )
    head = {"benchmark": "second_fit", "backend": options.backend, "algorithm": options.algorithm}
    facts = {"cores": os.cpu_count(), "load": round(os.getloadavg()[0], 2), "seconds": medians}
    ratio = {kind: round(medians[kind][1] / medians["plain"][1], 2) for kind in KINDS[1:]}
    print(
        json.dumps(
            {**head, **facts, "first_minus_plain": first, "second_minus_plain": second, "ratio": ratio}, indent=1
        )
    )


if __name__ == "__main__":
    main()
