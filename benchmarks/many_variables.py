"""The first fit of a model with many small variables: two new workers, against plain Keras in one process.

Each fit is in a new process, by turns. Prints JSON: seconds of the first ``fit`` of 3 steps, medians over the rounds,
and the ratio to plain ``model.fit``. ``--layers`` blocks of a Dense layer and BatchNormalization have 4 variables each.

    python benchmarks/many_variables.py --backend jax --layers 40 --algorithm localsgd
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time

from common import arguments, of_child


def seconds(options: argparse.Namespace, kind: str) -> float:
    """Return the seconds of a first fit in a new process."""
    return float(of_child(kind)[-1])


def first_fit(options: argparse.Namespace) -> None:
    """Train once, and print the seconds."""
    import keras
    import numpy as np

    import choros

    parts: list[keras.layers.Layer] = []
    for _ in range(options.layers):
        parts += [keras.layers.Dense(options.width, "relu"), keras.layers.BatchNormalization()]
    model = keras.Sequential([keras.Input((32,)), *parts, keras.layers.Dense(1)])
    model.compile("adam", "mse")
    x = np.zeros((96, 32), "float32")
    begun = time.perf_counter()
    if options.child == "plain":
        model.fit(x, x[:, 0], batch_size=32, verbose=0)
    else:
        choros.Trainer(model, options.algorithm, workers=2).fit(x, x[:, 0], batch_size=32, verbose=0)
    print(time.perf_counter() - begun)


def main() -> None:
    """Measure, and print JSON."""
    number = {"type": int}
    options = arguments(
        __doc__ or "",
        layers={**number, "default": 40},
        width={**number, "default": 32},
        algorithm={"default": "allreduce"},
        child={"default": ""},
    )
    if options.child:
        first_fit(options)
        return
    if options.quick:
        sys.argv += ["--layers", "2"]
    times: dict[str, list[float]] = {"plain": [], "workers": []}
    for _ in range(1 if options.quick else options.rounds or 3):
        for kind, several in times.items():
            several.append(seconds(options, kind))
    middle = {kind: round(statistics.median(several), 2) for kind, several in times.items()}
    head = {"benchmark": "many_variables", "backend": options.backend, "algorithm": options.algorithm}
    facts = {"layers": options.layers, "variables": 4 * options.layers + 2, "cores": os.cpu_count()}
    load = round(os.getloadavg()[0], 2)
    print(
        json.dumps(
            {**head, **facts, "load": load, "seconds": middle, "ratio": round(middle["workers"] / middle["plain"], 2)},
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
