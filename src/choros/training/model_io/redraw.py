"""Redrawing of initial weights, so that each member of an ensemble starts from different weights."""

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
    """Draw the trainable variables of a model again, and reset its optimizer to the state before the first step.

    Each layer with trainable variables is created and built again from its configuration. All other variables keep
    their values: frozen layers, moving statistics, the statistics of an adapted ``Normalization``.

    Args:
        model: keras.Model, compiled and built.

    Raises:
        NotSerializableError: a layer cannot be created from its configuration, so its weights cannot be drawn.
    """
    for layer in _trainable_layers(model):
        try:
            with _configurable(layer) as scope, scope:
                redrawn = type(layer).from_config(layer.get_config())
                if not redrawn.built and (shapes := layer.get_build_config()):
                    redrawn.build_from_config(shapes)
            for variable, other in zip(layer._trainable_variables, redrawn._trainable_variables, strict=True):
                variable.assign(other)
        except Exception as error:  # a user's class may raise any exception
            raise _refusal(model, layer, error) from error
    optimizer = model.optimizer
    with _configurable(optimizer) as scope, scope:
        redrawn = type(optimizer).from_config(optimizer.get_config())
        redrawn.build(model.trainable_variables)
    for variable, other in zip(optimizer.variables, redrawn.variables, strict=True):
        variable.assign(other)


@lean()
def check_redraw(model: Any) -> None:
    """Refuse a model with a layer whose ``get_config`` fails.

    Raises:
        NotSerializableError: a layer has no configuration; the message names it.
    """
    for layer in _trainable_layers(model):
        try:
            with _configurable(layer), warnings.catch_warnings(action="ignore"):
                layer.get_config()
        except Exception as error:  # a user's class may raise any exception
            raise _refusal(model, layer, error) from error


def _trainable_layers(model: Any) -> list[Any]:
    """Return the layers that directly hold trainable variables."""
    return [layer for layer in model._flatten_layers() if layer.trainable and layer._trainable_variables]


def _refusal(model: Any, layer: Any, error: Exception) -> NotSerializableError:
    return NotSerializableError(
        f"Each member of an ensemble draws its weights anew, and of the model {model.name!r} {layer.name!r} cannot be "
        f"made again: {brief(error)}. Give {type(layer).__name__} a get_config() that says all that its __init__ "
        "takes, and an __init__ that takes what Keras adds (**kwargs)."
    )


@contextmanager
def _configurable(instance: Any) -> Iterator[Any]:
    """Replace the lambdas in an object by ``linear`` within this context, because Keras does not deserialize lambdas.

    Initial weights do not depend on them. Yield a scope in which Keras finds the classes and functions that the object
    holds.
    """
    import keras

    values = [*vars(instance).values(), *vars(getattr(instance, "inner_optimizer", instance)).values()]
    definitions = [value if isinstance(value, types.FunctionType) else type(value) for value in values]
    lambdas = {name: value for name, value in vars(instance).items() if getattr(value, "__name__", "") == "<lambda>"}
    vars(instance).update(dict.fromkeys(lambdas, keras.activations.linear))
    try:
        yield keras.saving.custom_object_scope(
            {
                name: definition
                for definition in definitions
                for name in (definition.__name__, keras.saving.get_registered_name(definition))
            }
        )
    finally:
        vars(instance).update(lambdas)
