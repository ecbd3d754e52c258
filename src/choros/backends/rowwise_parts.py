"""Parts of a model that are Keras' own and known to treat each row by itself, so that they need no trial."""

from __future__ import annotations

import os
from typing import Any

import keras
import numpy as np

NOTHING = object()
TRIED = {"Dice", "Tversky", "dice", "tversky"}  # Keras' losses over the whole batch, unless an axis is given
AXES = ("axis", "axes", "attention_axes")  # of a layer's input
# What takes one number of each row as it is. Another layer would take the axis of the rows for that of the features.
FLAT = {"Embedding", "Flatten", "Functional", "Identity", "InputLayer", "Model", "Rescaling", "Reshape", "Sequential"}


def compiled_losses(model: Any) -> list[Any]:
    """Keras' own list of the compiled losses (named tuples), which may be changed in place; empty until built."""
    entries: list[Any] | None = None if model._compile_loss is None else model._compile_loss._flat_losses
    return [] if entries is None else entries


def model_divisor(model: Any) -> tuple[Any, bool]:
    """The model's method ``loss_divisor``, or None; and True where it declares ``loss_divisor = None``: a sum."""
    divisor = getattr(model, "loss_divisor", NOTHING)
    return (divisor, False) if callable(divisor) else (None, divisor is None)


def plain(model: Any) -> bool:
    """Tell whether all that makes the loss is Keras' own and known to treat each row by itself.

    A loss of an output of shape (rows,) is not looked at here: ``choros.backends.loss_exactness.mixed_rows`` tries it.
    """
    if model_divisor(model) != (None, False):
        return False
    steps = ("train_step", "compute_loss", "call", "__call__")
    if not all(of_keras(getattr(type(model), name, None)) for name in steps):
        return False
    losses, layers = compiled_losses(model), model._flatten_layers()
    if not all(known(entry.loss) for entry in losses):
        return False
    if any(layer.activity_regularizer is not None for layer in layers):  # divides by rows, a loss may by weights
        return False
    if len(losses) > 1 and any(getattr(layer, "mask_zero", False) or _masks(layer) for layer in layers):
        return False
    return all(_plain_operation(operation) for operation in _operations(model))


def known(loss: Any) -> bool:
    """Tell whether a loss is Keras' own, and made of each row by itself where an output has two axes or more."""
    if getattr(loss, "axis", -1) != -1 or getattr(loss, "_fn_kwargs", {}).get("axis", -1) != -1:
        return False
    wrapped = type(loss).__name__ == "LossFunctionWrapper"
    home = str(getattr(loss.fn if wrapped else type(loss), "__module__", ""))
    return home.split(".")[0] == "keras" and name_of(loss) not in TRIED


def name_of(loss: Any) -> str:
    """Return the class' name, or the function's where Keras has wrapped one."""
    function = getattr(loss, "fn", None)
    wrapped = type(loss).__name__ == "LossFunctionWrapper" and function is not None
    return str(getattr(function, "__name__", "")) if wrapped else type(loss).__name__


def title(loss: Any) -> str:
    """Return a loss' name for messages; of a lambda, which has none, with its file and line.

    Example:
        >>> title(keras.losses.MeanSquaredError())
        "'mean_squared_error'"
    """
    code = getattr(getattr(loss, "fn", loss), "__code__", None)
    name = getattr(loss, "name", None) or getattr(loss, "__name__", loss)
    if code is None or code.co_name != "<lambda>":
        return repr(name)
    return f"{name!r} (the lambda in {os.path.basename(code.co_filename)}, line {code.co_firstlineno})"


def flat(outputs: Any) -> bool:
    """Tell whether one of a model's outputs has the axis of the rows alone, which Keras then takes for the last axis.

    Args:
        outputs: nested; tensors, symbolic ones or arrays.
    """
    return any(len(each.shape) < 2 for each in keras.tree.flatten(outputs) if each is not None)


def flat_outputs(model: Any) -> bool | None:
    """Return the same of a model's outputs; None where only a call tells what they are."""
    outputs = getattr(model, "outputs", None) if of_keras(getattr(type(model), "call", None)) else None
    return flat(outputs) if outputs else None


def of_keras(part: Any) -> bool:
    """Tell whether a class or a function is Keras' own; None counts as such."""
    return part is None or str(getattr(part, "__module__", "")).partition(".")[0] == "keras"


def _masks(layer: Any) -> bool:
    return isinstance(layer, keras.layers.Masking)


def _operations(model: Any) -> list[Any]:
    layers = list(model._flatten_layers())
    nested = [each for layer in layers for each in getattr(layer, "operations", None) or []]
    return [layer for layer in layers if layer is not model] + nested


def _plain_operation(operation: Any) -> bool:
    if not isinstance(operation, keras.Layer) or isinstance(operation, keras.layers.Lambda):
        return False
    if not of_keras(type(operation)) or not of_keras(type(operation).call):
        return False
    if _crosses_rows(operation):
        return False
    functions = [getattr(operation, name, None) for name in ("activation", "activity_regularizer", "cell")]
    return all(part is None or of_keras(part) or of_keras(type(part)) for part in functions)


def _crosses_rows(layer: Any) -> bool:
    """Return whether an axis of a layer is, or may be, that of the rows, also where it counts from the end."""
    ranks = {len(tensor.shape) for node in layer._inbound_nodes for tensor in node.input_tensors}
    if min(ranks, default=2) < 2 and type(layer).__name__ not in FLAT:
        return True
    if _contracts_rows(getattr(layer, "equation", None)):
        return True
    given = [getattr(layer, name, None) for name in AXES]
    axes = {int(axis) for each in given if each is not None for axis in np.atleast_1d(each)}
    if ranks:
        return any(axis % rank == 0 for axis in axes for rank in ranks if rank)
    return 0 in axes or any(axis < -1 for axis in axes)  # a layer inside another: its input is not known


def _contracts_rows(equation: Any) -> bool:
    """Return whether the first axis of an ``EinsumDense`` is not the first of what it gives."""
    return isinstance(equation, str) and equation[:1] != equation.partition("->")[2].strip()[:1]
