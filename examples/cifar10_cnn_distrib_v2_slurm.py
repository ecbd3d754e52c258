"""Small colour images by several workers that each read their own slice from mapped files; keras_experiments' example.

    srun python examples/cifar10_cnn_distrib_v2_slurm.py --epochs=4
    choros run -n 3 examples/cifar10_cnn_distrib_v2_slurm.py --algorithm allreduce
    python examples/cifar10_cnn_distrib_v2_slurm.py --synthetic --workers 2

cifar10_cnn_distrib_slurm.py, but no process holds all pictures. Rank 0 writes them once to files that are not
compressed, in a folder that the hosts share; then each rank maps these files and reads the rows that it trains. Nothing
passes the chief: between the ranks go weights alone. In each epoch all rows are divided anew, and none is left out;
the original drew rows at random in each worker. cifar.py says where the pictures come from.
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
