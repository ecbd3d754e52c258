"""CIFAR-10 by workers that each read their rows from mapped files, as keras_experiments' example.

    srun python examples/cifar10_cnn_distrib_v2_slurm.py --epochs=4
    choros run -n 3 examples/cifar10_cnn_distrib_v2_slurm.py --algorithm allreduce
    python examples/cifar10_cnn_distrib_v2_slurm.py --synthetic --workers 2

As cifar10_cnn_distrib_slurm.py, but no process has all pictures in memory. Rank 0 writes them once to uncompressed
files, in a folder that the hosts share. Then each rank maps these files and reads the rows that it trains. Ranks send
each other only weights. Each epoch has another division of all rows; the original drew random rows in each worker.
cifar.py describes the sources of the pictures.
"""

import cifar
import keras

import choros

parser = cifar.parser(__doc__, "of all workers together")
cifar.add_workers(parser)
parser.add_argument("--maps", help="the folder of the mapped files, which all hosts share; next to Keras' data sets")
options = cifar.parse(parser)

(x, y), test = cifar.mapped(options)
rows = len(x)
keras.utils.set_random_seed(7)
model = cifar.network()
model.compile(keras.optimizers.Adam(1e-3), "sparse_categorical_crossentropy", metrics=["accuracy"])
cifar.load_weights(options, model)
if options.aug:
    x, y = choros.prefetch((x, y), augment=keras.Sequential(cifar.changes())), None
trainer = cifar.trainer(model, options)
how = {"callbacks": cifar.checkpoints(options), "validation_data": test, "verbose": 2}
history = trainer.fit(x, y, options.batch_size, options.epochs, seed=1, **how)
for worker in history.run.workers:
    cifar.say(f"worker {worker.rank} on {worker.host}: read {worker.rows // options.epochs} of {rows} rows an epoch")
cifar.report(trainer, test)
cifar.check(options, min(history.history["val_loss"]), 1.0, 3)
