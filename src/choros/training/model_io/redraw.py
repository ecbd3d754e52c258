"""Weights drawn anew: each member of an ensemble trains from weights of its own."""

from __future__ import annotations

import types
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from choros.backends.hide_tensorflow import lean
from choros.errors import NotSerializableError, brief


@lean()
def redraw(model: Any) -> None:
    """Draw the trainable variables of a model anew, and set its optimizer to what it is before the first step.

    Each layer that has such variables is made and built once more from its configuration. All other weights stay:
    frozen layers, moving statistics, what ``Normalization`` was adapted to.

    Args:
        model: keras.Model, compiled and built.

    Raises:
        NotSerializableError: a layer cannot be made from its configuration, so nothing knows how to draw its weights.
    """
    for layer in _drawing(model):
        try:
            with _configurable(layer) as scope, scope:
                fresh = type(layer).from_config(layer.get_config())
                if not fresh.built and (shapes := layer.get_build_config()):
                    fresh.build_from_config(shapes)
            for variable, other in zip(layer._trainable_variables, fresh._trainable_variables, strict=True):
                variable.assign(other)
        except Exception as error:  # whatever a user's own class raises
            raise _refusal(model, layer, error) from error
    optimizer = model.optimizer
    with _configurable(optimizer) as scope, scope:
        fresh = type(optimizer).from_config(optimizer.get_config())
        fresh.build(model.trainable_variables)
    for variable, other in zip(optimizer.variables, fresh.variables, strict=True):
        variable.assign(other)


@lean()
def check_redraw(model: Any) -> None:
    """Refuse a model with a layer that has no configuration.

    Raises:
        NotSerializableError: names the layer.
    """
    for layer in _drawing(model):
        try:
            with _configurable(layer), warnings.catch_warnings(action="ignore"):
                layer.get_config()
        except Exception as error:  # whatever a user's own class raises
            raise _refusal(model, layer, error) from error


def _drawing(model: Any) -> list[Any]:
    """Return the layers that have trainable variables of their own."""
    return [layer for layer in model._flatten_layers() if layer.trainable and layer._trainable_variables]


def _refusal(model: Any, layer: Any, error: Exception) -> NotSerializableError:
    return NotSerializableError(
        f"Each member of an ensemble draws its weights anew, and of the model {model.name!r} {layer.name!r} cannot be "
        f"made again: {brief(error)}. Give {type(layer).__name__} a get_config() that says all that its __init__ "
        "takes, and an __init__ that takes what Keras adds (**kwargs)."
    )


@contextmanager
def _configurable(thing: Any) -> Iterator[Any]:
    """For a while, have no lambda in an object, which weights do not depend on and Keras does not read back.

    Gives a scope in which Keras finds the classes and functions that the object holds.
    """
    import keras

    held = [*vars(thing).values(), *vars(getattr(thing, "inner_optimizer", thing)).values()]
    kinds = [value if isinstance(value, types.FunctionType) else type(value) for value in held]
    lambdas = {name: value for name, value in vars(thing).items() if getattr(value, "__name__", "") == "<lambda>"}
    vars(thing).update(dict.fromkeys(lambdas, keras.activations.linear))
    try:
        yield keras.saving.custom_object_scope(
            {name: kind for kind in kinds for name in (kind.__name__, keras.saving.get_registered_name(kind))}
        )
    finally:
        vars(thing).update(lambdas)
