"""The uncertainty of a network: by random weights, by dropout in predictions, and by an ensemble; two workers.

    KERAS_BACKEND=torch python examples/uncertainty.py
    python examples/uncertainty.py --data mnist.npz --epochs 20

Three ways to a distribution of predictions instead of one:

- a variational layer draws new weights for each batch and learns their variance (Blundell et al. 2015, Weight
  Uncertainty in Neural Networks; outputs are drawn instead of weights, as in Kingma et al. 2015);
- Monte-Carlo dropout predicts many times with dropout on (Gal and Ghahramani 2016);
- an ensemble trains each worker's own network (Lakshminarayanan et al. 2017), here ``choros.Ensemble``.

For each it prints the accuracy, the expected calibration error (15 bins: Guo et al. 2017, On Calibration of Modern
Neural Networks, eq. 3), and the entropy of the predictions for digits and for noise; that for noise should be larger.
"""

import argparse

import arguments
import images
import keras
import numpy as np

import choros

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--data", type=arguments.file, help="an .npz file of MNIST; without it scikit-learn's digits")
parser.add_argument("--epochs", type=arguments.count, default=15)
parser.add_argument(
    "--samples", type=arguments.count, default=20, help="predictions of the variational layer and of dropout"
)
parser.add_argument("--workers", type=arguments.count, default=2)
options = parser.parse_args()

(x, y), (x_test, y_test) = images.load(options.data)
x, x_test = (part.reshape(len(part), -1) for part in (x, x_test))
noise = np.random.default_rng(1).random(x_test.shape, "float32")


@keras.saving.register_keras_serializable("uncertainty")
class VariationalDense(keras.layers.Layer):
    """A dense layer of normally distributed weights, their prior being N(0, 1)."""

    def __init__(self, units, rows, **kwargs):
        super().__init__(**kwargs)
        self.units, self.rows = units, rows
        self.seeds = keras.random.SeedGenerator()

    def build(self, shape):
        shape = shape[-1], self.units
        self.mean = self.add_weight(shape=shape, initializer="glorot_uniform", name="mean")
        self.rho = self.add_weight(shape=shape, initializer=keras.initializers.Constant(-4.0), name="rho")
        self.bias = self.add_weight(shape=(self.units,), initializer="zeros", name="bias")

    def call(self, inputs):
        ops, spread = keras.ops, keras.ops.softplus(self.rho)
        apart = (ops.square(spread) + ops.square(self.mean) - 1) / 2 - ops.log(spread)
        self.add_loss(ops.sum(apart) / self.rows)  # the divergence from the prior, once for all rows
        middle, variance = inputs @ self.mean, ops.square(inputs) @ ops.square(spread)
        draw = keras.random.normal(ops.shape(middle), seed=self.seeds)
        return middle + draw * ops.sqrt(variance + 1e-8) + self.bias

    def get_config(self):
        return {**super().get_config(), "units": self.units, "rows": self.rows}


def network(*middle):
    """A classifier with these layers in it."""
    keras.utils.set_random_seed(5)
    model = keras.Sequential([keras.Input(x.shape[1:]), *middle, keras.layers.Dense(10, "softmax")])
    model.compile(keras.optimizers.Adam(2e-3), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def train(model, algorithm):
    """Train by two workers; the trainer then has the model, or the ensemble's."""
    trainer = choros.Trainer(model, algorithm, options.workers)
    trainer.fit(x, y, batch_size=64, epochs=options.epochs, verbose=0, seed=3)
    return trainer


def drawn(model):
    """Predictions with what is random drawn anew."""

    def predict(rows):
        draws = [model(rows, training=True) for _ in range(options.samples)]
        return np.mean([keras.ops.convert_to_numpy(draw) for draw in draws], axis=0)

    return predict


def calibration_error(probabilities, labels, bins=15):
    """Mean distance of confidence from accuracy, over equal bins of confidence."""
    sure, right = probabilities.max(1), probabilities.argmax(1) == labels
    place = np.minimum((sure * bins).astype(int), bins - 1)
    return sum(abs(sure[place == b].sum() - right[place == b].sum()) for b in range(bins)) / len(labels)


def entropy(probabilities):
    """Of the mean prediction, in nats."""
    return float(-(probabilities * np.log(probabilities + 1e-12)).sum(1).mean())


dense, dropout = keras.layers.Dense, keras.layers.Dropout
ways = {
    "variational": (network(VariationalDense(128, len(x)), keras.layers.ReLU()), choros.LocalSGD(window=4)),
    "MC dropout": (network(dense(256, "relu"), dropout(0.5)), choros.AllReduce()),
    "ensemble": (network(dense(128, "relu")), choros.Ensemble()),
}
for name, (model, algorithm) in ways.items():
    trainer = train(model, algorithm)
    predict = drawn(model) if name != "ensemble" else lambda rows, trainer=trainer: trainer.predict(rows, verbose=0)
    probabilities, unsure = predict(x_test), entropy(predict(noise))
    accuracy, error = (probabilities.argmax(1) == y_test).mean(), calibration_error(probabilities, y_test)
    told = f"entropy {entropy(probabilities):.3f}, of noise {unsure:.3f}"
    print(f"{name}: accuracy {accuracy:.4f}, calibration error {error:.4f}, {told}", flush=True)
    if options.epochs >= 15 and (accuracy < 0.9 or error > 0.15):
        raise SystemExit("an accuracy of 0.9 and a calibration error below 0.15 were expected")
