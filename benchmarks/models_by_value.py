"""Cost of sending a model to a worker: the pickle, the weights, and the memory that both take.

``python benchmarks/models_by_value.py --backend jax --megabytes 256`` prints JSON. The weights are frozen, so that a
step costs nothing that grows with them. With ``--trained`` they are trained: a step then costs what
``step_ms_per_mb`` gives, from fits of 5 steps and of 1 step, and ``ms_per_mb`` does not include it.

With ``--tables 16`` the weights are 16 variables, of which a worker copies one while the caller writes the next.

- ``pickle_ms``, ``unpickle_ms``: the model without weights.
- ``ms_per_mb``: time of a fit by one worker that has started, less its step and less the time of a model of 1 MB, for
  each MB of weights. A fit sends the weights and brings them back.
- ``sent_ms_per_mb``, ``back_ms_per_mb``: the parts of ``ms_per_mb`` until all workers have the model and are ready to
  train (``on_train_begin``), and after the last epoch has ended (the caller's model gets the weights).
- ``floor_ms_per_mb``: time to write as many bytes into a new anonymous file that processes can share, and to free it.
  ``ratio`` is the time of the fit over it.
- ``shared``: the most memory that the system had for such files during the fits, above that before them, in units of
  the weights. Nothing else on the machine should use such files meanwhile.
- ``caller``, ``worker``: the most memory of each process during the fit, above that before it (caller) or that of a
  worker with the small model (worker), in units of the weights. Pages of such files that a process has mapped count.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import threading
import time
from pathlib import Path
from typing import Any, Self

from common import arguments

SMALL = 1  # MB


class Shared:
    """Measure the most memory that files without a disk take on this machine, above that at the start: ``most``."""

    def __enter__(self) -> Self:
        self.before, self.most, self.ended = self.now(), 0, threading.Event()
        self.thread = threading.Thread(target=self.look)
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.thread.join()

    def look(self) -> None:
        """Look every 10 ms."""
        while not self.ended.wait(0.01):
            self.most = max(self.most, self.now() - self.before)

    @staticmethod
    def now() -> int:
        """Return the bytes."""
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Shmem:"))


def median(times: list[tuple[float, float, float]], part: int) -> float:
    """Return the median of one part of the times of fits."""
    return statistics.median(each[part] for each in times)


def main() -> None:
    """Measure, and print JSON."""
    options = arguments(
        __doc__ or "",
        megabytes={"type": int, "default": 256},
        trained={"action": "store_true"},
        tables={"type": int, "default": 1},
    )
    import keras
    import numpy as np

    import choros
    from choros.cluster.hardware import peak_memory
    from choros.comm.shm.segment import Segment
    from choros.training.model_io.serialization import pack_model

    trained, steps = options.trained, 5 if options.trained else 1

    def make(megabytes: int) -> Any:
        layers, tables, entered = keras.layers, options.tables, keras.Input((4,))
        kind = {"embeddings_initializer": "zeros", "trainable": trained}
        looked_up = [layers.Embedding(megabytes * 1024 // tables, 256, **kind)(entered) for _ in range(tables)]
        average = layers.GlobalAveragePooling1D()(layers.Add()(looked_up) if tables > 1 else looked_up[0])
        model = keras.Model(entered, layers.Dense(1)(average))
        model.compile("sgd", "mse")
        return model

    def timed(trainer: Any, steps: int) -> list[tuple[float, float, float]]:
        """Return the seconds of some fits of so many steps, after one that compiles: in all, sending, bringing back."""
        x, y = np.zeros((8 * steps, 4), "int32"), np.zeros((8 * steps, 1), "float32")
        trainer.fit(x, y, batch_size=8, verbose=0)
        times = []
        for _ in range(options.rounds or 5):
            marks = Marks()
            begun = time.perf_counter()
            trainer.fit(x, y, batch_size=8, verbose=0, callbacks=[marks])
            ended = time.perf_counter()
            times.append((ended - begun, marks.ready - begun, ended - marks.epoch))
        return times

    class Marks(keras.callbacks.Callback):
        """Times of a fit. Neither hook touches the weights."""

        ready = epoch = 0.0

        def on_train_begin(self, logs: Any = None) -> None:
            self.ready = time.perf_counter()

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.epoch = time.perf_counter()

    megabytes = 16 if options.quick else options.megabytes
    seconds: dict[int, list[tuple[float, float, float]]] = {}
    longer: dict[int, list[tuple[float, float, float]]] = {}
    peaks: dict[int, tuple[int, int]] = {}
    shared: dict[int, Shared] = {}
    for size in (SMALL, megabytes):
        model = make(size)
        with choros.WorkerPool(1) as pool:
            trainer = choros.Trainer(model, workers=1, pool=pool)
            timed(trainer, steps)  # the worker starts and compiles
            longer[size] = timed(trainer, steps)
            time.sleep(1)  # the worker frees the model of a job after it has told of its end
            Path("/proc/self/clear_refs").write_text("5")  # the most memory is counted anew
            before = peak_memory()
            with Shared() as shared[size]:
                seconds[size] = timed(trainer, 1)
            peaks[size] = peak_memory() - before, peak_memory(pool.start().pids[0])
    model = make(SMALL)
    begun = time.perf_counter()
    packed = pack_model(model)
    packing = time.perf_counter() - begun
    packed.unpack()
    unpacking = time.perf_counter() - begun - packing
    del model, trainer
    source = np.ones(megabytes << 18, "float32")
    floors = []
    for _ in range(options.rounds or 5):
        begun = time.perf_counter()
        with Segment.create(source.nbytes) as segment:
            segment.write(source)
        floors.append(time.perf_counter() - begun)
    floor = statistics.median(floors)
    fits, sent, back = ({size: median(times, part) for size, times in seconds.items()} for part in range(3))
    more = megabytes - SMALL
    step = 0.0
    if trained:
        slow = {size: median(times, 0) for size, times in longer.items()}
        step = max(slow[megabytes] - slow[SMALL] - fits[megabytes] + fits[SMALL], 0) / (steps - 1)
    cost = (fits[megabytes] - fits[SMALL] - step) / more
    result = {
        "megabytes": megabytes,
        "pickle_ms": round(1e3 * packing, 1),
        "unpickle_ms": round(1e3 * unpacking, 1),
        "fit_ms": {str(size): round(1e3 * each, 1) for size, each in fits.items()},
        "trained": trained,
        "tables": options.tables,
        "step_ms_per_mb": round(1e3 * step / more, 3),
        "ms_per_mb": round(1e3 * cost, 3),
        "sent_ms_per_mb": round(1e3 * (sent[megabytes] - sent[SMALL]) / more, 3),
        "back_ms_per_mb": round(1e3 * (back[megabytes] - back[SMALL]) / more, 3),
        "floor_ms_per_mb": round(1e3 * floor / megabytes, 3),
        "ratio": round(cost / (floor / megabytes), 2),
        "shared": round(shared[megabytes].most / (megabytes << 20), 2),
        "caller": round(peaks[megabytes][0] / (megabytes << 20), 2),
        "worker": round((peaks[megabytes][1] - peaks[SMALL][1]) / (more << 20), 2),
    }
    where = {"python": platform.python_version(), "cores": os.cpu_count(), "load": round(os.getloadavg()[0], 2)}
    head = {"benchmark": "models_by_value", "backend": options.backend, "quick": options.quick}
    print(json.dumps({**head, **where, **result}, indent=1))


if __name__ == "__main__":
    main()
