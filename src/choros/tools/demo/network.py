"""The networks of the demo: a CNN for images, and the network of dist-keras' notebooks for tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

NETWORK = "Dense 600 relu, Dropout 0.2, Dense 600 relu, Dense softmax"
CNN = "Conv 32 3x3 relu, MaxPool, Conv 64 3x3 relu, MaxPool, Dropout 0.25, Dense 64 relu, Dense softmax"
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
    inner = [layers.Dense(600, activation="relu"), layers.Dropout(0.2), layers.Dense(600, activation="relu")]
    return _compiled([keras.Input((features,)), *inner], classes, seed, ())


def build_for(shape: Sequence[int], classes: int, seed: int) -> Any:
    """Return the compiled network for rows of a shape, with the accuracy as a metric: the CNN for images.

    Args:
        shape: (height, width, channels) of images, or (features,).
        classes: int. Number of classes.
        seed: int. The same seed gives the same weights.
    """
    import keras

    layers = keras.layers
    if len(shape) == 1:
        inner = [layers.Dense(600, activation="relu"), layers.Dropout(0.2), layers.Dense(600, activation="relu")]
    else:
        inner = [layers.Conv2D(32, 3, activation="relu"), layers.MaxPooling2D()]
        inner += [layers.Conv2D(64, 3, activation="relu"), layers.MaxPooling2D()]
        inner += [layers.Dropout(0.25), layers.Flatten(), layers.Dense(64, activation="relu")]
    return _compiled([keras.Input(tuple(shape)), *inner], classes, seed, ("accuracy",))


def _compiled(parts: list[Any], classes: int, seed: int, metrics: Sequence[str]) -> Any:
    """Return the parts and an output for the classes as a compiled model, with the weights of a seed."""
    import keras

    model = keras.Sequential([*parts, keras.layers.Dense(classes, activation="softmax")], name="demo")
    _draw_weights(model, seed)
    model.compile(keras.optimizers.Adam(1e-3), "sparse_categorical_crossentropy", metrics=list(metrics) or None)
    return model


def restart(model: Any, seed: int) -> None:
    """Set the weights of a trained network to those of a seed, and the variables of its optimizer to zeros.

    It then trains like a new network of ``build_for``, but its compiled steps are used again.
    """
    _draw_weights(model, seed)
    for variable in model.optimizer.variables:
        if variable.name != "learning_rate":
            variable.assign(np.zeros(variable.shape, variable.dtype))


def _draw_weights(model: Any, seed: int) -> None:
    draw = np.random.default_rng(seed)
    for variable in model.trainable_variables:
        *field, inputs, outputs = variable.shape if len(variable.shape) > 1 else (1, 1)
        limit = np.sqrt(6.0 / (np.prod(field) * (inputs + outputs))) if len(variable.shape) > 1 else 0.0
        variable.assign(draw.uniform(-limit, limit, variable.shape).astype("float32"))
