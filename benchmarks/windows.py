"""Steps of a window of 16 as one program, MLP 30-600-600-2, batch 128, against plain processes and windows of Keras.

Each algorithm runs on one and on two workers. Control is ``fit``, and ``fit`` with ``steps_per_execution=16``
(PyTorch has none). Both sides have the same ``jit_compile``.

python benchmarks/windows.py --backend tensorflow
"""

from dataclasses import replace

from common import arguments, compare, emit
from workloads import Workload

WINDOW = 16
TARGETS = {"jax": (1.08, 1.1), "torch": (1.8, 1.8), "tensorflow": (2.3, 2.3)}  # one worker, two workers


def main() -> None:
    options = arguments(__doc__, **{"jit-compile": {"action": "store_true"}})
    import choros

    load = Workload("mlp", 128, 10 if options.quick else 320, jit_compile=options.jit_compile)
    controls = {"fit": load}
    if options.backend != "torch":
        controls["fit_16"] = replace(load, steps_per_execution=WINDOW)
    rounds, seconds = options.rounds or (1 if options.quick else 2), 1.0 if options.quick else 10.0
    results, target = {}, {}
    for workers, bar in zip((1, 2), TARGETS[options.backend], strict=True):
        for control, plain in controls.items():
            algorithms = {"aeasgd": choros.AEASGD(window=WINDOW), "localsgd": choros.LocalSGD(window=WINDOW)}
            measured = compare(load, algorithms, workers, rounds, seconds, options.as_run, plain)
            for name, figures in measured["algorithms"].items():
                results[f"{name}, {workers} workers, against {control}"] = figures
                target[f"{name}, {workers} workers, against {control}"] = bar
    emit("windows", options, target, {"workload": load.json(), "rounds": rounds, "algorithms": results})


if __name__ == "__main__":
    main()
