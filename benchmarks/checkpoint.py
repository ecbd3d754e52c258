"""Measure the cost of checkpoints: CPU time in their code over all CPU time, from the end of the first epoch on.

python benchmarks/checkpoint.py --backend jax --every 30 --seconds 100
"""

import json
import os
import platform
import tempfile
import time
from datetime import timedelta

from common import arguments, processor_seconds
from workloads import Workload

BAR = 0.02


def measure(name: str, load: Workload, every: float, seconds: float) -> dict[str, object]:
    import keras

    import choros

    model, begun = load.make(), [0.0, 0.0, 0.0]

    class Watch(keras.callbacks.Callback):
        def now(self) -> float:
            return processor_seconds([os.getpid(), *trainer._local.pool.start().pids])

        def on_epoch_end(self, epoch: int, logs: object = None) -> None:
            if epoch == 0:
                begun[:2] = self.now(), time.monotonic()
            elif time.monotonic() - begun[1] > seconds:
                self.model.stop_training = True
                begun[2] = self.now() - begun[0]

    with tempfile.TemporaryDirectory() as room:
        trainer = choros.Trainer(model, name, workers=2, echo=False)
        saved = choros.Checkpoint(room, every=timedelta(seconds=every))
        numbers: list[int] = []
        save = saved.store.save

        def count(facts, arrays):  # type: ignore[no-untyped-def]
            numbers.append(sum(array.nbytes for array in arrays))
            return save(facts, arrays)

        saved.store.save = count  # type: ignore[method-assign]
        batch = load.batch * 2
        x, y = load.data(2)
        run = trainer.fit(x, y, batch_size=batch, epochs=100_000, verbose=0, checkpoint=saved, callbacks=[Watch()]).run
    return {
        "share": run.keeping / begun[2],
        "checkpoints": len(numbers),
        "bytes": numbers[-1],
        "processor_seconds_keeping": run.keeping,
        "processor_seconds": begun[2],
    }


def main() -> None:
    options = arguments(
        __doc__,
        every={"type": float, "default": 30.0},
        seconds={"type": float, "default": 100.0},
        algorithms={"nargs": "+", "default": ["allreduce", "localsgd", "aeasgd"]},
    )
    every, seconds = (1.0, 3.0) if options.quick else (options.every, options.seconds)
    load = Workload("mlp", 128, 20 if options.quick else 200, options.optimizer)
    results = {name: measure(name, load, every, seconds) for name in options.algorithms}
    facts = {"benchmark": "checkpoint", "backend": options.backend, "every": every, "bar": BAR, "workers": 2}
    facts |= {"workload": load.json(), "host": platform.machine(), "cores": os.cpu_count(), "results": results}
    print(json.dumps(facts, indent=1))


if __name__ == "__main__":
    main()
