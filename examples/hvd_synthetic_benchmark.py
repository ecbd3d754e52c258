"""Images per second of each rank and of all ranks, on noise, with the variation over iterations.

    choros run -n 2 examples/hvd_synthetic_benchmark.py
    choros run -n 8 examples/hvd_synthetic_benchmark.py --model ResNet50 --side 224 --batch-size 32 --batches 10

Compare it with one rank (``choros run -n 1``). Several ranks are slower than that because they exchange gradients and
share cores and memory. Measure on a machine without other load. JAX compiles for about a minute first.
"""

import argparse
import time

import arguments
import images
import keras
import numpy as np

import choros.hvd as hvd

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--model", type=arguments.application, default="ResNet50", help="a name in keras.applications")
parser.add_argument("--side", type=arguments.pixels, default=32, help="pixels; 224 for ImageNet")
parser.add_argument("--classes", type=arguments.count, default=1000)
parser.add_argument("--batch-size", type=arguments.count, default=8, help="of each rank")
parser.add_argument("--warmup", type=arguments.count, default=2, help="batches before anything is timed")
parser.add_argument("--batches", type=arguments.count, default=2, help="batches of an iteration")
parser.add_argument("--iterations", type=arguments.count, default=5)
parser.add_argument("--fp16", action="store_true", help="round gradients to half precision")
options = parser.parse_args()

hvd.init()
model = getattr(keras.applications, options.model)(
    weights=None, input_shape=(options.side, options.side, 3), classes=options.classes
)
optimizer = hvd.DistributedOptimizer(
    keras.optimizers.SGD(0.01 * hvd.size()), compression=hvd.Compression.fp16 if options.fp16 else hvd.Compression.none
)
model.compile(optimizer, "sparse_categorical_crossentropy")


class Timing(keras.callbacks.Callback):
    """Images a second of this rank in each epoch."""

    def __init__(self):
        super().__init__()
        self.rates = []

    def on_epoch_begin(self, epoch, logs=None):
        self.began = time.perf_counter()

    def on_epoch_end(self, epoch, logs=None):
        self.rates.append(options.batch_size * options.batches / (time.perf_counter() - self.began))
        if hvd.rank() == 0:
            print(f"iteration {epoch}: {self.rates[-1]:.1f} images/s a rank", flush=True)


def data(steps):
    return images.Synthetic(options.batch_size, options.side, options.classes, steps, hvd.rank())


if hvd.rank() == 0:
    parameters = f"{model.count_params():,} parameters"
    print(
        f"{options.model} ({parameters}), batch {options.batch_size}, {hvd.size()} ranks on {keras.backend.backend()}"
    )
timing, broadcast = Timing(), hvd.callbacks.BroadcastGlobalVariablesCallback(0)
model.fit(data(options.warmup), verbose=0, callbacks=[broadcast])
model.fit(data(options.batches), epochs=options.iterations, verbose=0, callbacks=[timing])

everyone = hvd.allgather(np.array(timing.rates)[None], name="rates")  # a row for each rank
total = everyone.sum(0)
if hvd.rank() == 0:
    for rank, rates in enumerate(everyone):
        print(f"rank {rank}: {rates.mean():.1f} +- {1.96 * rates.std():.1f} images/s")
    print(f"all {hvd.size()} ranks: {total.mean():.1f} +- {1.96 * total.std():.1f} images/s")
