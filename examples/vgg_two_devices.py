"""A VGG with model and data parallelism (JAX): two workers divide the rows, and two devices of each the weights.

    KERAS_BACKEND=jax python examples/vgg_two_devices.py --synthetic
    KERAS_BACKEND=jax python examples/vgg_two_devices.py --network VGG16 --download --epochs 30

keras_experiments put one half of VGG-16 on each of a rank's two GPUs, by explicit code, with Horovod between the ranks.
Here a layout names the dimension of each weight that is divided, ``jax.sharding`` divides the computation, and workers
can exchange by any algorithm. By default the network is a small VGG. cifar.py describes the sources of the pictures.
"""

import arguments
import cifar
import keras

import choros

parser = cifar.parser(__doc__, "of all workers together", checkpt=False)
parser.add_argument("--network", choices=["small", "VGG16", "VGG19"], default="small")
parser.add_argument("--algorithm", type=arguments.algorithm, default="allreduce")
parser.add_argument("--workers", type=arguments.count, default=2)
parser.add_argument("--devices", type=arguments.count, default=2, help="of each worker")
options = cifar.parse(parser)


def small():
    """Three blocks of VGG's kind, of few filters."""
    layers = keras.layers
    parts = [keras.Input((32, 32, 3))]
    for block, filters in enumerate((8, 16, 32), 1):
        for number in (1, 2):
            name = f"block{block}_conv{number}"
            parts.append(layers.Conv2D(filters, 3, padding="same", activation="relu", name=name))
        parts.append(layers.MaxPooling2D(name=f"block{block}_pool"))
    parts += [layers.Flatten(name="flatten"), layers.Dense(128, "relu", name="fc1")]
    return keras.Sequential([*parts, layers.Dense(10, "softmax", name="predictions")])


LAYOUT = {  # filters and units are divided; the last layer is everybody's
    "block.*/kernel": (None, None, None, "model"),
    "block.*/bias": ("model",),
    "fc.*/kernel": (None, "model"),
    "fc.*/bias": ("model",),
}
keras.utils.set_random_seed(7)
if options.network == "small":
    model = small()
else:
    model = getattr(keras.applications, options.network)(weights=None, input_shape=(32, 32, 3), classes=10)
model.compile(keras.optimizers.Adam(1e-3), "sparse_categorical_crossentropy", metrics=["accuracy"])
(x, y), test = cifar.load(options)
with choros.Trainer(
    model, options.algorithm, options.workers, devices_per_worker=options.devices, layout=LAYOUT
) as trainer:
    trainer.fit(x, y, options.batch_size, options.epochs, validation_data=test, verbose=2, seed=1)
loss, accuracy = trainer.evaluate(*test, verbose=0)
print(f"accuracy {accuracy:.4f}, loss {loss:.4f} on {len(test[0])} images")
cifar.check(options, loss, 1.5, 3)
