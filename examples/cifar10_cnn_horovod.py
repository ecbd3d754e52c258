"""Small colour images by ranks that each run this script, as keras_experiments' example for Horovod.

    choros run -n 2 examples/cifar10_cnn_horovod.py --epochs 3
    choros run -n 4 examples/cifar10_cnn_horovod.py --data cifar10.npz --epochs 50 --aug --checkpt cifar10.keras

--aug puts Keras' random layers in front of the network: each rank changes its own pictures, in the step. Without
--data the pictures are made up (see images.py); cifar10_cnn_horovod_tfqueue.py changes them ahead of the step instead.
"""

import argparse

import images
import keras

import choros.hvd as hvd

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--data", help="an .npz file of CIFAR-10; without it pictures are made up")
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--batch_size", type=int, default=32, help="of each rank")
parser.add_argument("--rate", type=float, default=1e-3, help="learning rate of one rank alone")
parser.add_argument("--warmup", type=float, default=1, help="epochs until the rate is that of all ranks")
parser.add_argument("--checkpt", help="a file for the best model so far, written by rank 0")
parser.add_argument("--aug", action="store_true", help="shift and flip the pictures")
options = parser.parse_args()

hvd.init()
keras.utils.set_random_seed(7 + hvd.rank())  # random layers differ by rank; the weights are broadcast
(x, y), (x_test, y_test) = images.coloured(options.data)
model = images.network()
if options.aug:
    layers = keras.layers
    changes = [layers.RandomFlip("horizontal"), layers.RandomTranslation(0.1, 0.1)]
    model = keras.Sequential([keras.Input(x.shape[1:]), *changes, model])
rate = options.rate * hvd.size()
optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(rate))
model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
    hvd.callbacks.LearningRateWarmupCallback(rate, warmup_epochs=options.warmup),
]
if options.checkpt and hvd.rank() == 0:
    callbacks.append(keras.callbacks.ModelCheckpoint(options.checkpt, save_best_only=True, monitor="val_loss"))
model.fit(
    hvd.shard(x, y, batch_size=options.batch_size),
    epochs=options.epochs,
    validation_data=hvd.shard(x_test, y_test, batch_size=options.batch_size, training=False),
    callbacks=callbacks,
    verbose=2 if hvd.rank() == 0 else 0,
)
loss, accuracy = model.evaluate(x_test, y_test, verbose=0)
print(f"rank {hvd.rank()} of {hvd.size()}: accuracy {accuracy:.4f}, loss {loss:.4f} on {len(x_test)} images")
if not options.data and options.epochs >= 3 and loss >= 1.2:
    raise SystemExit("the loss of made-up pictures should have fallen below 1.2 in three epochs")
