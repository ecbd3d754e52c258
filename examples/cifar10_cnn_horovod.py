"""CIFAR-10 by ranks with ``choros.hvd``, as keras_experiments' example for Horovod.

    choros run -n 4 examples/cifar10_cnn_horovod.py --epochs=4 --aug
    choros run -n 2 examples/cifar10_cnn_horovod.py --synthetic --epochs 3
    mpiexec -n 4 python examples/cifar10_cnn_horovod.py --epochs 50 --aug --checkpt cifar10.keras

--aug puts Keras' random layers in front of the network, so each rank augments its pictures within the step.
cifar10_cnn_horovod_tfqueue.py augments them before the step. cifar.py describes the sources of the pictures.
"""

import os

import arguments
import cifar
import keras

import choros.hvd as hvd

parser = cifar.parser(__doc__, "of each rank", 32)
parser.add_argument("--rate", type=arguments.positive, default=1e-3, help="learning rate of one rank alone")
parser.add_argument("--warmup", type=arguments.number, default=1, help="epochs until the rate is that of all ranks")
parser.add_argument("--nranks_per_gpu", type=arguments.count, default=1, help="more than 1 lets ranks share a GPU")
options = cifar.parse(parser)
if options.nranks_per_gpu > 1:
    os.environ["CHOROS_SHARE_GPUS"] = "1"  # as choros run --share-gpus

hvd.init()
keras.utils.set_random_seed(7 + hvd.rank())  # random layers differ by rank; the weights are broadcast
(x, y), (x_test, y_test) = cifar.load(options)
model = cifar.network()
if options.aug:
    model = keras.Sequential([keras.Input(x.shape[1:]), *cifar.changes(), model])
rate = options.rate * hvd.size()
optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(rate))
model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
cifar.load_weights(options, model)
callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
    hvd.callbacks.LearningRateWarmupCallback(rate, warmup_epochs=options.warmup),
]
callbacks += cifar.checkpoints(options)
model.fit(
    hvd.shard(x, y, per_rank_batch_size=options.batch_size),
    epochs=options.epochs,
    validation_data=hvd.shard(x_test, y_test, per_rank_batch_size=options.batch_size, training=False),
    callbacks=callbacks,
    verbose=2 if hvd.rank() == 0 else 0,
)
loss, accuracy = model.evaluate(x_test, y_test, verbose=0)
print(f"rank {hvd.rank()} of {hvd.size()}: accuracy {accuracy:.4f}, loss {loss:.4f} on {len(x_test)} images")
cifar.check(options, loss, 1.2, 3)
