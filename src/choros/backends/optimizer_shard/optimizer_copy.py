"""Copies of an optimizer for other variables: pieces of the weights, or small ones for a trial."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import keras

_NUMBERS = (bool, int, float, type(None))


def optimizer_copy(
    original: keras.optimizers.Optimizer,
    variables: list[keras.Variable],
    counterparts: list[Any],
    rate: float | None = None,
) -> Any:
    """Return a copy of a built optimizer for other variables, with its settings and exceptions from weight decay.

    Args:
        original: built.
        variables: those of the copy. The copy is not built if there are none.
        counterparts: for each of ``variables``, the variable of the original whose exceptions it gets.
        rate: learning rate. Defaults to the original's, or its schedule.
    """
    optimizer: Any = type(original).from_config(_config_of(original, rate))
    if variables:
        optimizer.build(variables)
    # Keras identifies the exceptions from weight decay by objects, here by those of the original.
    of_copy = {optimizer._var_key(part): other for part, other in zip(variables, counterparts, strict=True)}
    decays = lambda part: original._use_weight_decay(of_copy[optimizer._var_key(part)])  # noqa: E731 - an attribute
    vars(optimizer)["_use_weight_decay"] = decays
    decay = optimizer._apply_weight_decay
    # On PyTorch Keras cannot decay an empty list.
    vars(optimizer)["_apply_weight_decay"] = lambda parts: decay(parts) if any(map(decays, parts)) else None
    copy_numbers(original, optimizer)
    return optimizer


def variable_like(variable: Any, value: Any, trainable: bool = True) -> Any:
    """Return a keras.Variable with another value, and the names and constraint of a variable.

    Rules of an optimizer may depend on names. On TensorFlow an optimizer sees the name of the ``tf.Variable``.
    """
    with ExitStack() as scopes:
        for name in variable.path.split("/")[:-1]:
            scopes.enter_context(keras.name_scope(name))
        like: Any = keras.Variable(value, dtype=variable.dtype, trainable=trainable, name=variable.name)
    like._path, like.constraint = variable.path, variable.constraint
    return like


def copy_numbers(original: keras.optimizers.Optimizer, optimizer: Any) -> None:
    """Copy attributes that are numbers, such as ``momentum``: callbacks may have set them."""
    vars(optimizer).update({name: value for name, value in vars(original).items() if isinstance(value, _NUMBERS)})


def _config_of(optimizer: Any, rate: float | None) -> dict[str, Any]:
    """Return an optimizer's configuration, with its schedule itself: not all schedules can be serialized."""
    schedule, attributes = optimizer._learning_rate, vars(optimizer)
    if isinstance(schedule, keras.Variable):
        config = dict(optimizer.get_config())
        return config if rate is None else {**config, "learning_rate": rate}
    attributes["_learning_rate"] = keras.Variable(0.0)
    try:
        return {**optimizer.get_config(), "learning_rate": schedule if rate is None else rate}
    finally:
        attributes["_learning_rate"] = schedule
