"""The names and shapes of a model's inputs and outputs, and the columns of its predictions in Spark."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from choros.errors import InvalidInputError
from choros.spark.feature_columns import Columns
from choros.types import Array

if TYPE_CHECKING:
    import keras

Named = list[tuple[str, tuple[int | None, ...]]]
KINDS = ("classification", "regression", "raw")
_CLASSES = re.compile("crossentropy|categorical|hinge|nll", re.IGNORECASE)


@dataclass(frozen=True)
class Output:
    """One output of a model, and the columns of its predictions.

    Attributes:
        kind: "classes" (a value for each class), "two" (one value for the second of two classes), "value" (one number)
            or "vector".
        logits: bool. Whether the values of classes are logits, which are converted to probabilities.
        prediction, probability, raw: str. Names of columns, "" for none.
    """

    kind: str
    logits: bool
    prediction: str
    probability: str
    raw: str

    def columns(self, found: Array) -> dict[str, Array]:
        """Return the columns by name for the model's values of shape (rows, ...).

        Example:
            >>> Output("classes", False, "p", "", "").columns(np.array([[0.1, 0.9]]))
            {'p': array([1.])}
        """
        values = found.reshape(len(found), -1)
        made: dict[str, Array] = {}
        if self.kind == "value":
            made[self.prediction] = values[:, 0].astype("float64")
        elif self.kind == "two":
            second = values[:, 0].astype("float64")
            raw = np.stack([-second, second], axis=1)
            second = 1 / (1 + np.exp(-second)) if self.logits else second
            made[self.prediction] = (second >= 0.5).astype("float64")
            made[self.probability] = np.stack([1 - second, second], axis=1)
            if self.logits:
                made[self.raw] = raw
        elif self.kind == "classes":
            made[self.prediction] = values.argmax(axis=1).astype("float64")
            made[self.probability] = softmax(values.astype("float64")) if self.logits else values
            if self.logits:
                made[self.raw] = values
        else:
            made[self.raw] = values
        return {name: column for name, column in made.items() if name}

    def names(self) -> list[tuple[str, bool]]:
        """Return pairs of the name of each column and whether it is a vector."""
        columns = [(self.prediction, False)] if self.kind != "vector" else []
        if self.kind in ("two", "classes"):
            columns.append((self.probability, True))
        if self.kind == "vector" or (self.logits and self.kind != "value"):
            columns.append((self.raw, True))
        return [(name, vector) for name, vector in columns if name]


def softmax(values: Array) -> Array:
    """Return the softmax of each row.

    Example:
        >>> softmax(np.zeros((1, 2))).tolist()
        [[0.5, 0.5]]
    """
    raised = np.exp(values - values.max(axis=1, keepdims=True))
    shares: Array = raised / raised.sum(axis=1, keepdims=True)
    return shares


def inputs_of(model: keras.Model) -> Named | None:
    """Return the names and row shapes of a model's inputs; None if they are unknown."""
    try:
        return [(str(tensor.name), tuple(tensor.shape[1:])) for tensor in model.inputs]
    except (AttributeError, TypeError, ValueError):  # raised by Keras if the model is not built
        return None


def outputs_of(model: keras.Model) -> Named | None:
    """Return the names and row shapes of a model's outputs; None if they are unknown."""
    try:
        names = list(getattr(model, "output_names", None) or [tensor.name for tensor in model.outputs])
        structure = getattr(model, "_outputs_struct", None)
        if isinstance(structure, dict) and len(structure) == len(names):  # losses and targets use the keys of the dict
            names = sorted(structure)
        return [(str(name), tuple(tensor.shape[1:])) for name, tensor in zip(names, model.outputs, strict=True)]
    except (AttributeError, TypeError, ValueError):
        return None


def classed(columns: Columns, model: keras.Model) -> Columns:
    """Return the columns with the number of classes, for labels that are class indices of a sparse loss.

    Args:
        columns: a result of ``normalise`` with the model's outputs.
        model: a compiled keras.Model.
    """
    from choros.backends.driver_model import pairs

    outputs, y = outputs_of(model) or [], columns.y
    if isinstance(y, list):  # a dict of losses has the names of outputs as keys
        y = {name: target for (name, _), target in zip(outputs, y, strict=False)} if isinstance(model.loss, dict) else y
    if isinstance(y, dict):
        sizes = {y[name]: shape for name, shape in outputs if name in y}
    else:
        sizes = {target: shape for target, (_, shape) in zip(y if isinstance(y, list) else [y], outputs, strict=False)}
    leaves = dict(columns.leaves)
    for loss, name in pairs(model.loss, y):
        shape = sizes.get(name)
        if shape and shape[-1] and _takes_numbers(loss):
            leaves[name] = replace(leaves[name], classes=shape[-1], ignored=getattr(loss, "ignore_class", None))
    return replace(columns, leaves=leaves)


def _takes_numbers(loss: object) -> bool:
    import keras

    name, of_keras = "sparse_categorical_crossentropy", keras.losses.SparseCategoricalCrossentropy
    known = type(loss) is of_keras and getattr(loss, "axis", -1) == -1
    return known or loss == name or loss is keras.losses.sparse_categorical_crossentropy


def features_of(model: keras.Model, features: object) -> Any:
    """Return the features in the structure of the model's inputs: a list becomes a dict if the inputs are a dict."""
    structure = getattr(model, "_inputs_struct", None)
    inputs = inputs_of(model)
    if (
        isinstance(structure, dict)
        and isinstance(features, (list, tuple))
        and inputs
        and len(features) == len(inputs) > 1
    ):
        return dict(zip(structure, features, strict=True))
    return features


def describe(
    model: keras.Model, task: str, prediction: object, probability: object, raw: object, outputs: Named | None = None
) -> list[Output]:
    """Return a description of each output of a model.

    Args:
        model: keras.Model, compiled or not.
        task: "auto", or one of ``KINDS`` for all outputs.
        prediction: name of a column. With several outputs, the name of each output is appended. Or a dict from the
            outputs' names to columns. "" omits the column.
        probability: the same.
        raw: the same.
        outputs: names and row shapes of the outputs. Defaults to those of the model.

    Raises:
        InvalidInputError: there is no such task.
    """
    if task not in ("auto", *KINDS):
        raise InvalidInputError(f"task={task!r}: give 'auto', {', '.join(map(repr, KINDS))}.")
    outputs = outputs or outputs_of(model) or [("", (None,))]
    made = []
    for number, (name, shape) in enumerate(outputs):
        loss = _loss(model, number, name)
        logits = bool(getattr(loss, "from_logits", False))
        names = [_column(column, name, len(outputs)) for column in (prediction, probability, raw)]
        units = int(np.prod([size or 1 for size in shape])) if shape else 1
        made.append(Output(_kind(model, number, task, loss, shape, units), logits, *names))
    return made


def _kind(model: keras.Model, number: int, task: str, loss: object, shape: tuple[int | None, ...], units: int) -> str:
    if task == "auto":
        loss_name = str(getattr(loss, "name", None) or getattr(loss, "__name__", None) or loss or "")
        activation = _activation(model, number)
        classes = (
            bool(_CLASSES.search(loss_name)) or activation == "softmax" or (activation == "sigmoid" and units == 1)
        )
        task = "classification" if classes else "regression"
    if task == "raw" or len(shape) > 1:
        return "vector"
    if task == "classification":
        return "two" if units == 1 else "classes"
    return "value" if units == 1 else "vector"


def _activation(model: keras.Model, number: int) -> str:
    try:
        operation = model.outputs[number]._keras_history.operation
        return str(getattr(getattr(operation, "activation", operation), "__name__", ""))
    except (AttributeError, IndexError, TypeError, ValueError):
        return ""


def _loss(model: keras.Model, number: int, name: str) -> Any:
    loss = getattr(model, "loss", None)
    if isinstance(loss, dict):
        return loss.get(name)
    if isinstance(loss, (list, tuple)):
        return loss[number] if number < len(loss) else None
    return loss


def _column(requested: object, name: str, several: int) -> str:
    if isinstance(requested, dict):
        return str(requested.get(name, ""))
    return f"{requested}_{name}" if requested and several > 1 else str(requested or "")
