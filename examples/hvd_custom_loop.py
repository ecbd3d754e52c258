"""A custom training loop on each backend, without Keras' ``fit``.

    KERAS_BACKEND=jax choros run -n 2 examples/hvd_custom_loop.py
    KERAS_BACKEND=torch choros run -n 2 examples/hvd_custom_loop.py
    KERAS_BACKEND=tensorflow choros run -n 2 examples/hvd_custom_loop.py

On JAX the step is one ``jax.jit`` with ``optimizer.stateless_apply`` inside; on PyTorch ``optimizer.apply`` after
``backward``; on TensorFlow one ``tf.function`` with a DistributedGradientTape and the plain optimizer. In such a loop
the gradients of all ranks have equal weight, so give all ranks batches of the same size, and equally many.
"""

import argparse

import arguments
import images
import keras
import numpy as np

import choros.hvd as hvd


def jax_loop(model, optimizer, loss_of):
    """Return the step, and what brings its state into the model."""
    import jax

    hvd.DistributedOptimizer(optimizer)

    def forward(trained, others, x, y):
        predicted, others = model.stateless_call(trained, others, x, training=True)
        return loss_of(y, predicted), others

    @jax.jit
    def compiled(state, x, y):
        trained, others, slots = state
        (loss, others), gradients = jax.value_and_grad(forward, has_aux=True)(trained, others, x, y)
        trained, slots = optimizer.stateless_apply(slots, gradients, trained)  # the ranks meet in here
        return loss, (trained, others, slots)

    variables = model.trainable_variables, model.non_trainable_variables, optimizer.variables
    state = tuple([v.value for v in part] for part in variables)

    def step(x, y):
        nonlocal state
        loss, state = compiled(state, x, y)
        return loss

    def finish():
        for part, values in zip(variables, state, strict=True):
            for variable, value in zip(part, values, strict=True):
                variable.assign(value)

    return step, finish


def torch_loop(model, optimizer, loss_of):
    """Return the step, and nothing else to do."""
    import torch

    hvd.DistributedOptimizer(optimizer)

    def step(x, y):
        model.zero_grad()
        loss = loss_of(keras.ops.convert_to_tensor(y), model(x, training=True))
        loss.backward()
        with torch.no_grad():
            optimizer.apply([v.value.grad for v in model.trainable_variables], model.trainable_variables)
        return loss.detach()

    return step, lambda: None


def tensorflow_loop(model, optimizer, loss_of):
    """Return the step, and nothing else to do."""
    import tensorflow as tf

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True))
        gradients = hvd.DistributedGradientTape(tape).gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)  # plain: the tape has reduced
        return loss

    return step, lambda: None


parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--data", type=arguments.file, help="an .npz file of MNIST: see examples/images.py")
parser.add_argument("--epochs", type=arguments.count, default=4)
parser.add_argument("--batch-size", type=arguments.count, default=32, help="of each rank")
parser.add_argument("--rate", type=arguments.positive, default=1e-3, help="learning rate of one rank alone")
options = parser.parse_args()

hvd.init()
(x, y), (x_test, y_test) = images.load(options.data)
layers = keras.layers
model = keras.Sequential(
    [keras.Input(x.shape[1:]), layers.Flatten(), layers.Dense(128, "relu"), layers.Dense(10, "softmax")]
)
optimizer = keras.optimizers.Adam(options.rate * hvd.size())
optimizer.build(model.trainable_variables)
hvd.broadcast_variables([*model.variables, *optimizer.variables], root_rank=0)

loops = {"jax": jax_loop, "torch": torch_loop, "tensorflow": tensorflow_loop}
loss_of = keras.losses.SparseCategoricalCrossentropy()
step, finish = loops[keras.backend.backend()](model, optimizer, loss_of)

everyone = options.batch_size * hvd.size()
for epoch in range(options.epochs):
    order = np.random.default_rng(epoch).permutation(len(x))  # the same on every rank
    losses = []
    for begin in range(0, len(x) - everyone + 1, everyone):
        rows = order[begin : begin + everyone][hvd.rank() :: hvd.size()]
        losses.append(step(x[rows], y[rows]))
    mean = hvd.allreduce(np.mean([float(loss) for loss in losses]), name="loss")
    if hvd.rank() == 0:
        print(f"epoch {epoch + 1}: loss {mean:.4f} over {hvd.size()} ranks", flush=True)
finish()

mine = slice(hvd.rank(), None, hvd.size())  # each rank tests its own part
predicted = keras.ops.convert_to_numpy(model(x_test[mine], training=False)).argmax(-1)
right, rows = hvd.allreduce(np.array([(predicted == y_test[mine]).sum(), len(predicted)]), op=hvd.Sum)
weights = sum(float(np.abs(w).sum()) for w in model.get_weights())
print(f"rank {hvd.rank()} of {hvd.size()}: accuracy {right / rows:.3f}, the weights sum to {weights:.6f}")
