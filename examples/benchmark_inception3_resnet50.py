"""Images per second of InceptionV3 or ResNet-50 on the devices of one process, on noise; keras_experiments' benchmark.

    KERAS_BACKEND=torch python examples/benchmark_inception3_resnet50.py -a resnet50 -g 2 -b 16 -e 3
    python examples/benchmark_inception3_resnet50.py -a inception3 -g 4 -b 32 -e 5 --side 299 --steps 100

-g is the number of devices, -b the number of images of each per step. The script prints the median of the epochs
without the first, which compiles. Compare it with -g 1 on the same machine. By default the images are small:
InceptionV3 needs at least 75 pixels.
"""

import argparse
import statistics
import time

import arguments
import images
import keras

from choros.parallel import logical_devices, make_parallel

NETWORKS = {"inception3": (keras.applications.InceptionV3, 75), "resnet50": (keras.applications.ResNet50, 32)}
parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("-a", "--arch", choices=NETWORKS, default="resnet50")
parser.add_argument("-g", "--gpus", type=arguments.count, default=1, help="devices; a CPU is cut into as many")
parser.add_argument("-b", "--batch_size", type=arguments.count, default=8, help="images of each device")
parser.add_argument("-e", "--epochs", type=arguments.count, default=3, help="the first is left out")
parser.add_argument("--steps", type=arguments.count, default=4, help="of an epoch")
parser.add_argument("--side", type=arguments.count, help="pixels; 224 or 299 for ImageNet")
options = parser.parse_args()
network, least = NETWORKS[options.arch]
side = options.side or least
if side < least:
    parser.error(f"argument --side: must be a whole number of {least} or more for {options.arch}, got {side}")
if options.gpus > 1:
    logical_devices(options.gpus)


class Clock(keras.callbacks.Callback):
    """When each epoch ended."""

    ends = ()

    def on_epoch_end(self, epoch, logs=None):
        self.ends = *self.ends, time.perf_counter()


keras.utils.set_random_seed(7)
serial = network(weights=None, input_shape=(side, side, 3), classes=1000)
model = make_parallel(serial, options.gpus)
model.compile(keras.optimizers.SGD(0.01), "sparse_categorical_crossentropy")
whole, clock = options.batch_size * options.gpus, Clock()
data = images.Synthetic(whole, side, 1000, options.steps)
about = f"{options.arch} ({serial.count_params():,} parameters), {side} pixels"
print(f"{about}, {options.gpus} devices, {whole} images a step")
history = model.fit(data, epochs=max(options.epochs, 2), callbacks=[clock], verbose=2)
took = [end - begin for begin, end in zip(clock.ends, clock.ends[1:], strict=False)]
print(f"{whole * options.steps / statistics.median(took):.1f} images/s (median of {len(took)} epochs)")
if history.history["loss"][-1] != history.history["loss"][-1]:
    raise SystemExit("the loss is not a number")
