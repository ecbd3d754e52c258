"""Small colour images by ranks that each run this script, changed in a thread of each while its step before runs.

    choros run -n 2 examples/cifar10_cnn_horovod_tfqueue.py --epochs 3 --timeline t.json
    choros run -n 4 examples/cifar10_cnn_horovod_tfqueue.py --data cifar10.npz --epochs 50

cifar10_cnn_horovod.py with ``choros.prefetch`` in the place of TensorFlow's queues. --timeline leaves a file for
ui.perfetto.dev, in which one sees how long each step waited for its batch. Without --data the pictures are made up.
"""

import argparse

import images
import keras

import choros
import choros.hvd as hvd

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--data", help="an .npz file of CIFAR-10; without it pictures are made up")
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--batch_size", type=int, default=32, help="of each rank")
parser.add_argument("--depth", type=int, default=4, help="batches that are ready at most")
parser.add_argument("--timeline", help="a file for the timeline")
options = parser.parse_args()

hvd.init()
if options.timeline:
    hvd.start_timeline(options.timeline)
(x, y), test = images.coloured(options.data)
keras.utils.set_random_seed(7)
model = images.network()
optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(1e-3 * hvd.size()))
model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
shift = keras.layers.RandomTranslation(0.1, 0.1, seed=hvd.rank())
augment = keras.Sequential([keras.layers.RandomFlip("horizontal", seed=hvd.rank()), shift])
callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()]
model.fit(
    hvd.shard(choros.prefetch((x, y), options.depth, augment), batch_size=options.batch_size),
    epochs=options.epochs,
    callbacks=callbacks,
    verbose=2 if hvd.rank() == 0 else 0,
)
loss, accuracy = model.evaluate(*test, verbose=0)
print(f"rank {hvd.rank()} of {hvd.size()}: accuracy {accuracy:.4f}, loss {loss:.4f} on {len(test[0])} images")
if options.timeline:
    hvd.stop_timeline()
if not options.data and options.epochs >= 3 and loss >= 1.2:
    raise SystemExit("the loss of made-up pictures should have fallen below 1.2 in three epochs")
