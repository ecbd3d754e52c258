"""CIFAR-10 by several workers and any algorithm, as keras_experiments' example with a parameter server.

    srun python examples/cifar10_cnn_distrib_slurm.py --epochs=4
    choros run -n 3 examples/cifar10_cnn_distrib_slurm.py --algorithm allreduce --epochs 50 --aug
    KERAS_BACKEND=torch python examples/cifar10_cnn_distrib_slurm.py --synthetic --workers 2 --epochs 3

Each rank of a job reads all data and trains its rows; without a job the workers of the Trainer do. With `downpour`,
`adag` (the default), `dynsgd`, `aeasgd` or `eamsgd` workers exchange asynchronously with a center: the parameter
server. Any launcher can start the ranks. cifar.py describes the sources of the pictures.
"""

import arguments
import cifar
import keras

import choros

parser = cifar.parser(__doc__, "of all workers together")
cifar.add_workers(parser)
parser.add_argument("--devices_per_worker", type=arguments.count, default=1)
options = cifar.parse(parser)

(x, y), test = cifar.load(options)
keras.utils.set_random_seed(7)
model = cifar.network()
model.compile(keras.optimizers.Adam(1e-3), "sparse_categorical_crossentropy", metrics=["accuracy"])
cifar.load_weights(options, model)
if options.aug:
    x, y = choros.prefetch((x, y), augment=keras.Sequential(cifar.changes())), None
trainer = cifar.trainer(model, options, options.devices_per_worker)
how = {"callbacks": cifar.checkpoints(options), "validation_data": test, "verbose": 2}
history = trainer.fit(x, y, options.batch_size, options.epochs, seed=1, **how)
cifar.report(trainer, test)
cifar.check(options, min(history.history["val_loss"]), 1.0, 3)  # it goes up and down
