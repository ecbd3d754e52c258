"""CIFAR-10 by ranks with ``choros.hvd``; a thread of each rank reads the next batches during a step.

    choros run -n 4 examples/cifar10_cnn_horovod_tfqueue.py --aug --checkpt
    choros run -n 2 examples/cifar10_cnn_horovod_tfqueue.py --synthetic --aug --epochs 3 --timeline t.json

As cifar10_cnn_horovod.py, with ``choros.prefetch`` instead of TensorFlow's queues. With --aug the thread augments the
pictures. --timeline writes a file for ui.perfetto.dev, which shows how long each step waited for its batch. cifar.py
describes the sources of the pictures.
"""

import os

import arguments
import cifar
import keras

import choros
import choros.hvd as hvd

parser = cifar.parser(__doc__, "of each rank", 32)
parser.add_argument("--depth", type=arguments.count, default=4, help="batches that are ready at most")
parser.add_argument("--timeline", help="a file for the timeline")
parser.add_argument("--nranks_per_gpu", type=arguments.count, default=1, help="more than 1 lets ranks share a GPU")
options = cifar.parse(parser)
if options.nranks_per_gpu > 1:
    os.environ["CHOROS_SHARE_GPUS"] = "1"  # as choros run --share-gpus

hvd.init()
if options.timeline:
    hvd.start_timeline(options.timeline)
(x, y), test = cifar.load(options)
keras.utils.set_random_seed(7)
model = cifar.network()
optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(1e-3 * hvd.size()))
model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
cifar.load_weights(options, model)
augment = keras.Sequential(cifar.changes(seed=hvd.rank())) if options.aug else None
callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()]
callbacks += cifar.checkpoints(options)
model.fit(
    hvd.shard(choros.prefetch((x, y), options.depth, augment), per_rank_batch_size=options.batch_size),
    epochs=options.epochs,
    validation_data=hvd.shard(*test, per_rank_batch_size=options.batch_size, training=False),
    callbacks=callbacks,
    verbose=2 if hvd.rank() == 0 else 0,
)
loss, accuracy = model.evaluate(*test, verbose=0)
print(f"rank {hvd.rank()} of {hvd.size()}: accuracy {accuracy:.4f}, loss {loss:.4f} on {len(test[0])} images")
if options.timeline:
    hvd.stop_timeline()
cifar.check(options, loss, 1.2, 3)
