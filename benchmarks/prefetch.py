"""``choros.prefetch`` against none: real PNGs are decoded on one core for as long as the other core computes.

One worker with two cores and one thread to compute. A batch is decoded from PNGs, cut from the two photographs that
come with scikit-learn; how many are decoded is set so that decoding a batch takes as long as its step. Both
ways take turns, run by run; the ratio is that of their samples a second, ``waiting`` the share of time spent waiting.

    python benchmarks/prefetch.py --backend jax

On JAX a step only starts its computation, so plain training decodes the next batch meanwhile too, if nobody asks
for the step's result. ``--each-batch`` has a callback that does, as those that show or log each batch do.
"""

import io
import statistics
import time
from typing import Any

from common import arguments, emit
from workloads import Workload

TARGET = 1.7
SIDE, SEEN = 160, 32  # of a square in the photograph, and of what the model sees


def pngs(count: int) -> list[bytes]:
    """Photographs cut into squares, as PNGs."""
    import numpy as np
    from PIL import Image
    from sklearn.datasets import load_sample_images

    rng, result = np.random.default_rng(0), []
    photographs = load_sample_images().images
    for number in range(count):
        photograph = photographs[number % len(photographs)]
        top, left = (int(rng.integers(0, length - SIDE)) for length in photograph.shape[:2])
        file = io.BytesIO()
        Image.fromarray(photograph[top : top + SIDE, left : left + SIDE]).save(file, "png")
        result.append(file.getvalue())
    return result


def rows(load: Workload, decoded: int) -> Any:
    """Batches for each of which so many PNGs are decoded, as many for each row as can be."""
    import keras
    import numpy as np
    from PIL import Image

    class Photographs(keras.utils.PyDataset):
        def __init__(self) -> None:
            super().__init__()
            self.files = pngs(load.batch * 4)

        def __len__(self) -> int:
            return load.steps

        def __getitem__(self, index: int) -> tuple[Any, Any]:
            x = np.empty((load.batch, SEEN, SEEN, 3), "float32")
            for row in range(load.batch):
                for _ in range(decoded // load.batch + (row < decoded % load.batch)):
                    square = Image.open(io.BytesIO(self.files[(index + row) % len(self.files)]))
                    x[row] = np.asarray(square.resize((SEEN, SEEN)))
            return x / 255, np.arange(load.batch) % 10

    return Photographs()


def main() -> None:
    asks = {"action": "store_true", "help": "with a callback that gets each batch's logs"}
    options = arguments(__doc__, **{"each-batch": asks})
    import keras

    import choros

    load = Workload("cnn", 32, 6 if options.quick else 60)
    rounds = options.rounds or (1 if options.quick else 5)
    pool = choros.WorkerPool(1, threads=1, echo=False)

    def run(data: Any) -> Any:
        model = load.make()
        requested = [keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: logs["loss"])]
        callbacks = requested if options.each_batch else []
        trainer = choros.Trainer(model, "single", workers=1, pool=pool)
        return trainer.fit(data, epochs=2, verbose=0, callbacks=callbacks).run

    plain = rows(load, load.batch)
    begun = time.perf_counter()
    for index in range(10):
        plain[index]
    decoding = (time.perf_counter() - begun) / 10
    stats = run(plain).workers[0]
    step = stats.seconds * (1 - stats.waiting) / stats.steps
    decoded = max(load.batch, round(load.batch * step / decoding))
    taken: dict[str, list[Any]] = {"without": [], "with": []}
    for _ in range(rounds):
        taken["without"].append(run(rows(load, decoded)))
        taken["with"].append(run(choros.prefetch(rows(load, decoded))))
    pool.close()
    ratios = [b.samples_per_second / a.samples_per_second for a, b in zip(*taken.values(), strict=True)]
    figures = {
        "ratio": round(statistics.median(ratios), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
        "each_batch": options.each_batch,
        "step_ms": round(1e3 * step, 2),
        "decoding_ms": round(1e3 * decoding * decoded / load.batch, 2),
        "waiting": {name: round(statistics.median(run.waiting for run in runs), 3) for name, runs in taken.items()},
    }
    emit("prefetch", options, TARGET, {"rounds": rounds, "algorithms": {"prefetch": figures}})


if __name__ == "__main__":
    main()
