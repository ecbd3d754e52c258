"""The network of dist-keras' notebooks, which every algorithm of the demo trains."""

from __future__ import annotations

from typing import Any

import numpy as np

NETWORK = "Dense 600 relu, Dropout 0.2, Dense 600 relu, Dense softmax"
OPTIMIZER = "Adam, learning rate 0.001"


def build(features: int, classes: int, seed: int) -> Any:
    """Return the compiled network with initial weights drawn from the seed.

    Kernels are uniform in +-sqrt(6 / (inputs + outputs)) (Glorot and Bengio 2010, equation 16, Keras' default). Biases
    are 0. numpy draws the weights, so that they are equal on every backend.

    Args:
        features: int. Number of features.
        classes: int. Number of classes.
        seed: int. The same seed gives the same weights.

    Returns:
        A ``keras.Model`` for inputs of shape (rows, features) and class indices.
    """
    import keras

    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((features,)),
            layers.Dense(600, activation="relu"),
            layers.Dropout(0.2),
            layers.Dense(600, activation="relu"),
            layers.Dense(classes, activation="softmax"),
        ],
        name="demo",
    )
    draw = np.random.default_rng(seed)
    for variable in model.trainable_variables:
        limit = np.sqrt(6.0 / sum(variable.shape)) if len(variable.shape) == 2 else 0.0
        variable.assign(draw.uniform(-limit, limit, variable.shape).astype("float32"))
    model.compile(keras.optimizers.Adam(1e-3), "sparse_categorical_crossentropy")
    return model
