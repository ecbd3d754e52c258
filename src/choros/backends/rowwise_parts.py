"""Detection of the parts of Keras that process each row independently. They need no trial of the loss."""

from __future__ import annotations

import os
from typing import Any

import keras
import numpy as np

NOTHING = object()
TRIED = {"Dice", "Tversky", "dice", "tversky"}  # losses of Keras over the whole batch, unless an axis is given
AXES = ("axis", "axes", "attention_axes")  # arguments that name an axis of a layer's input
# Layers that accept an input of shape (rows,). Other layers would take the axis of the rows for that of the features.
FLAT = {"Embedding", "Flatten", "Functional", "Identity", "InputLayer", "Model", "Rescaling", "Reshape", "Sequential"}


def compiled_losses(model: keras.Model) -> list[Any]:
    """Return Keras' list of compiled losses (named tuples); empty until built. It may be changed in place."""
    entries: list[Any] | None = None if model._compile_loss is None else model._compile_loss._flat_losses
    return [] if entries is None else entries


def model_divisor(model: keras.Model) -> tuple[Any, bool]:
    """Return the model's method ``loss_divisor`` or None; and True if it declares a sum (``loss_divisor = None``)."""
    divisor = getattr(model, "loss_divisor", NOTHING)
    return (divisor, False) if callable(divisor) else (None, divisor is None)


def plain(model: keras.Model) -> bool:
    """Return whether all parts of the loss are Keras' own and process each row independently.

    Outputs of shape (rows,) are not checked here; ``choros.backends.loss_exactness.mixed_rows`` tries their losses.
    """
    if model_divisor(model) != (None, False):
        return False
    steps = ("train_step", "compute_loss", "call", "__call__")
    if not all(of_keras(getattr(type(model), name, None)) for name in steps):
        return False
    losses, layers = compiled_losses(model), model._flatten_layers()
    if not all(known(entry.loss) for entry in losses):
        return False
    if any(layer.activity_regularizer is not None for layer in layers):  # divides by rows; a loss may divide by weights
        return False
    if len(losses) > 1 and any(getattr(layer, "mask_zero", False) or _masks(layer) for layer in layers):
        return False
    return all(_plain_operation(operation) for operation in _operations(model))


def known(loss: Any) -> bool:
    """Return whether a loss is Keras' own and has one value for each row of an output with two axes or more."""
    if getattr(loss, "axis", -1) != -1 or getattr(loss, "_fn_kwargs", {}).get("axis", -1) != -1:
        return False
    wrapped = type(loss).__name__ == "LossFunctionWrapper"
    home = str(getattr(loss.fn if wrapped else type(loss), "__module__", ""))
    return home.split(".")[0] == "keras" and name_of(loss) not in TRIED


def name_of(loss: object) -> str:
    """Return the name of the loss's class, or of the function that Keras has wrapped in it."""
    function = getattr(loss, "fn", None)
    wrapped = type(loss).__name__ == "LossFunctionWrapper" and function is not None
    return str(getattr(function, "__name__", "")) if wrapped else type(loss).__name__


def title(loss: object) -> str:
    """Return the name of a loss for messages; for a lambda, add its file and line.

    Example:
        >>> title(keras.losses.MeanSquaredError())
        "'mean_squared_error'"
    """
    code = getattr(getattr(loss, "fn", loss), "__code__", None)
    name = getattr(loss, "name", None) or getattr(loss, "__name__", loss)
    if code is None or code.co_name != "<lambda>":
        return repr(name)
    return f"{name!r} (the lambda in {os.path.basename(code.co_filename)}, line {code.co_firstlineno})"


def flat(outputs: object) -> bool:
    """Return whether an output of a model has the shape (rows,). Its last axis is then the axis of the rows.

    Args:
        outputs: nested tensors, symbolic tensors or arrays.
    """
    return any(len(output.shape) < 2 for output in keras.tree.flatten(outputs) if output is not None)


def flat_outputs(model: keras.Model) -> bool | None:
    """Return ``flat`` of a model's outputs; None if their shapes are known only after a call."""
    outputs = getattr(model, "outputs", None) if of_keras(getattr(type(model), "call", None)) else None
    return flat(outputs) if outputs else None


def of_keras(part: object) -> bool:
    """Return whether a class or function belongs to Keras; True for None."""
    return part is None or str(getattr(part, "__module__", "")).partition(".")[0] == "keras"


def _masks(layer: keras.Layer) -> bool:
    return isinstance(layer, keras.layers.Masking)


def _operations(model: keras.Model) -> list[Any]:
    layers = list(model._flatten_layers())
    nested = [operation for layer in layers for operation in getattr(layer, "operations", None) or []]
    return [layer for layer in layers if layer is not model] + nested


def _plain_operation(operation: object) -> bool:
    if not isinstance(operation, keras.Layer) or isinstance(operation, keras.layers.Lambda):
        return False
    if not of_keras(type(operation)) or not of_keras(type(operation).call):
        return False
    if _crosses_rows(operation):
        return False
    functions = [getattr(operation, name, None) for name in ("activation", "activity_regularizer", "cell")]
    return all(part is None or of_keras(part) or of_keras(type(part)) for part in functions)


def _crosses_rows(layer: keras.Layer) -> bool:
    """Return whether an axis of a layer is, or may be, the axis of the rows. Negative axes are included."""
    ranks = {len(tensor.shape) for node in layer._inbound_nodes for tensor in node.input_tensors}
    if min(ranks, default=2) < 2 and type(layer).__name__ not in FLAT:
        return True
    if _contracts_rows(getattr(layer, "equation", None)):
        return True
    axis_options = [getattr(layer, name, None) for name in AXES]
    axes = {int(axis) for option in axis_options if option is not None for axis in np.atleast_1d(option)}
    if ranks:
        return any(axis % rank == 0 for axis in axes for rank in ranks if rank)
    return 0 in axes or any(axis < -1 for axis in axes)  # a layer inside another layer: its input rank is unknown


def _contracts_rows(equation: object) -> bool:
    """Return whether the first input axis of an ``EinsumDense`` is not its first output axis."""
    return isinstance(equation, str) and equation[:1] != equation.partition("->")[2].strip()[:1]
