"""Cost of sending a model to a worker: the pickle, the weights, and the memory that both take.

``python benchmarks/models_by_value.py --backend jax --megabytes 256`` prints JSON. The weights are frozen, so that a
step costs nothing that grows with them.

- ``pickle_ms``, ``unpickle_ms``: the model without weights.
- ``ms_per_mb``: time of a fit by one worker that has started, less that of a model of 1 MB, for each MB of weights. A
  fit sends the weights and brings them back.
- ``copy_ms_per_mb``: time of one copy of as many bytes into memory that this process has; ``fresh_ms_per_mb``: into
  memory that the system has to give first. A worker needs the weights in fresh memory, and so does the segment that
  both processes share: the floor is two fresh copies and two others. ``ratio`` is the time of the fit over it.
- ``caller``, ``worker``: the most memory of each process during the fit, above that before it (caller) or that of a
  worker with the small model (worker), in units of the weights. Shared memory counts in both.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from pathlib import Path
from typing import Any

from common import arguments

SMALL = 1  # MB


def main() -> None:
    """Measure, and print JSON."""
    options = arguments(__doc__ or "", megabytes={"type": int, "default": 256})
    import keras
    import numpy as np

    import choros
    from choros.machine import peak_memory
    from choros.training.model_io.serialization import pack_model

    def make(megabytes: int) -> Any:
        table = keras.layers.Embedding(megabytes * 1024, 256, embeddings_initializer="zeros", trainable=False)
        average = keras.layers.GlobalAveragePooling1D()
        model = keras.Sequential([keras.Input((4,)), table, average, keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        return model

    x, y = np.zeros((8, 4), "int32"), np.zeros((8, 1), "float32")
    megabytes = 16 if options.quick else options.megabytes
    seconds: dict[int, list[float]] = {}
    peaks: dict[int, tuple[int, int]] = {}
    for size in (SMALL, megabytes):
        model = make(size)
        with choros.WorkerPool(1) as pool:
            trainer = choros.Trainer(model, workers=1, pool=pool)
            trainer.fit(x, y, batch_size=8, verbose=0)  # the worker starts and compiles
            Path("/proc/self/clear_refs").write_text("5")  # the most memory is counted anew
            before = peak_memory()
            times = seconds[size] = []
            for _ in range(options.rounds or 5):
                begun = time.perf_counter()
                trainer.fit(x, y, batch_size=8, verbose=0)
                times.append(time.perf_counter() - begun)
            peaks[size] = peak_memory() - before, peak_memory(pool.start().pids[0])
    model = make(SMALL)
    begun = time.perf_counter()
    packed = pack_model(model)
    packing = time.perf_counter() - begun
    packed.unpack()
    unpacking = time.perf_counter() - begun - packing
    del model, trainer
    source = np.ones(megabytes << 18, "float32")
    fresh = []
    for _ in range(options.rounds or 5):
        begun = time.perf_counter()
        target = np.empty_like(source)
        target[:] = source
        fresh.append(time.perf_counter() - begun)
        begun = time.perf_counter()
        target[:] = source
        copy = time.perf_counter() - begun
        del target
    floor = 2 * (statistics.median(fresh) + copy)
    fits = {size: statistics.median(times) for size, times in seconds.items()}
    more = megabytes - SMALL
    result = {
        "megabytes": megabytes,
        "pickle_ms": round(1e3 * packing, 1),
        "unpickle_ms": round(1e3 * unpacking, 1),
        "fit_ms": {str(size): round(1e3 * each, 1) for size, each in fits.items()},
        "ms_per_mb": round(1e3 * (fits[megabytes] - fits[SMALL]) / more, 3),
        "copy_ms_per_mb": round(1e3 * copy / megabytes, 3),
        "fresh_ms_per_mb": round(1e3 * statistics.median(fresh) / megabytes, 3),
        "ratio": round((fits[megabytes] - fits[SMALL]) / more / (floor / megabytes), 2),
        "caller": round(peaks[megabytes][0] / (megabytes << 20), 2),
        "worker": round((peaks[megabytes][1] - peaks[SMALL][1]) / (more << 20), 2),
    }
    where = {"python": platform.python_version(), "cores": os.cpu_count(), "load": round(os.getloadavg()[0], 2)}
    head = {"benchmark": "models_by_value", "backend": options.backend, "quick": options.quick}
    print(json.dumps({**head, **where, **result}, indent=1))


if __name__ == "__main__":
    main()
