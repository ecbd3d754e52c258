"""Training that continues from its last commit after an interrupt, by Horovod's elastic API.

    choros run -n 2 examples/hvd_elastic_mnist.py
    choros run -n 2 examples/hvd_elastic_mnist.py --interrupt 30      # return to a commit, continue
    choros run -n 4 --min-np 2 --blacklist-cooldown-range 5 60 examples/hvd_elastic_mnist.py    # kill -9 one of them
    choros run --min-np 2 --host-discovery-script ./hosts.sh examples/hvd_elastic_mnist.py      # hosts come and go

Every few batches the state (weights, optimizer, epoch, batch) is committed in memory. If a rank dies or hangs, the
others return to the last commit, all ranks get rank 0's state, and the function is called again. If ranks are added or
removed, the same happens at a commit, so no step is lost. --interrupt N makes a failure on all ranks after N batches.
"""

import argparse

import arguments
import images
import keras
import numpy as np

import choros.hvd as hvd

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--data", type=arguments.file, help="an .npz file of MNIST: see examples/images.py")
parser.add_argument("--epochs", type=arguments.count, default=4)
parser.add_argument("--batch-size", type=arguments.count, default=32, help="of each rank")
parser.add_argument("--commit", type=arguments.count, default=5, help="batches between two commits")
parser.add_argument("--interrupt", type=arguments.whole, default=0, metavar="N", help="after N batches, once; 0: never")
options = parser.parse_args()

hvd.init()
(x, y), (x_test, y_test) = images.load(options.data)
layers = keras.layers
model = keras.Sequential(
    [keras.Input(x.shape[1:]), layers.Flatten(), layers.Dense(128, "relu"), layers.Dense(10, "softmax")]
)
optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(1e-3 * hvd.size()))
model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
seen = 0  # batches of this process, those that were lost included


class Interrupt(keras.callbacks.Callback):
    """The failure of a collective, made."""

    def on_train_batch_end(self, batch, logs=None):
        global seen
        seen += 1
        if seen == options.interrupt:
            raise hvd.elastic.HorovodInternalError(f"made after {seen} batches")


@hvd.elastic.run
def train(state):
    everyone = options.batch_size * hvd.size()
    steps = len(x) // everyone
    while state.epoch < options.epochs:
        order = np.random.default_rng(state.epoch).permutation(len(x))[: steps * everyone]
        mine = order[hvd.rank() :: hvd.size()][state.batch * options.batch_size :]  # what this epoch has left
        if hvd.rank() == 0:
            print(f"epoch {state.epoch + 1} from batch {state.batch} of {steps}", flush=True)
        model.fit(
            x[mine],
            y[mine],
            batch_size=options.batch_size,
            shuffle=False,
            verbose=0,
            callbacks=[
                hvd.elastic.UpdateBatchStateCallback(state),
                hvd.elastic.UpdateEpochStateCallback(state),
                hvd.elastic.CommitStateCallback(state, batches_per_commit=options.commit),
                Interrupt(),
            ],
        )


def reset():
    """There may be more ranks now, or fewer: the rate, and how many of their batches the epoch has had."""
    model.optimizer.learning_rate = 1e-3 * hvd.size()
    state.batch, state.ranks = state.batch * state.ranks // hvd.size(), hvd.size()
    print(f"rank {hvd.rank()}: back to batch {state.batch}", flush=True)


state = hvd.elastic.KerasState(model, epoch=0, batch=0, ranks=hvd.size())
state.register_reset_callbacks([reset])
train(state)

steps = int(keras.ops.convert_to_numpy(model.optimizer.iterations))
if hvd.rank() == 0:
    loss, accuracy = model.evaluate(x_test, y_test, verbose=0)
    print(f"{steps} steps in the model, {seen} made; accuracy {accuracy:.3f}")
