"""Copies of an optimizer for other variables: pieces of the weights, or small ones for a trial."""

from __future__ import annotations

from contextlib import ExitStack
from functools import cache
from typing import Any

import keras
import numpy as np

from choros.backends.rowwise_parts import of_keras

_NUMBERS = (bool, int, float, type(None))
_NOT_PLAIN = object()
_LOCAL = frozenset({"name", "built"})


def optimizer_copy(
    original: keras.optimizers.Optimizer,
    variables: list[keras.Variable],
    counterparts: list[Any],
    config: dict[str, Any] | None = None,
) -> Any:
    """Return a copy of a built optimizer for other variables, with its settings and exceptions from weight decay.

    Args:
        original: built.
        variables: those of the copy. The copy is not built if there are none.
        counterparts: for each of ``variables``, the variable of the original whose exceptions it gets.
        config: entries of the configuration that replace the original's.

    Raises:
        ValueError: or any other error of the class, which does not accept its own configuration.
    """
    replaced = config or {}
    entries = {name: replaced.get(name, value) for name, value in _config_of(original).items()}
    optimizer: Any = type(original).from_config(entries)
    settings = plain_attributes(original)
    settings |= {name: value for name, value in replaced.items() if name in settings}
    vars(optimizer).update(settings)
    if variables:
        optimizer.build(variables)
        _add_slots(optimizer, original, counterparts)
    # Keras identifies the exceptions from weight decay by objects, here by those of the original.
    of_copy = {optimizer._var_key(part): other for part, other in zip(variables, counterparts, strict=True)}
    decays = lambda part: original._use_weight_decay(of_copy[optimizer._var_key(part)])  # noqa: E731 - an attribute
    vars(optimizer)["_use_weight_decay"] = decays
    decay = optimizer._apply_weight_decay
    # On PyTorch Keras cannot decay an empty list.
    vars(optimizer)["_apply_weight_decay"] = lambda parts: decay(parts) if any(map(decays, parts)) else None
    vars(optimizer).update(settings)
    return optimizer


def slot_lists(optimizer: keras.optimizers.Optimizer) -> dict[str, list[Any]]:
    """Return the slots of a built optimizer by the attribute that holds them: one for each variable, or None.

    Example:
        >>> import keras
        >>> optimizer, variable = keras.optimizers.SGD(momentum=0.9), keras.Variable([1.0, 2.0])
        >>> optimizer.build([variable])
        >>> list(slot_lists(optimizer))
        ['momentums']
    """
    trainable = optimizer._trainable_variables
    others = {id(value) for value in vars(optimizer).values() if isinstance(value, keras.Variable)}  # such as counters
    others |= {id(variable) for variable in trainable}
    lists: dict[str, list[Any]] = {}
    for name, value in vars(optimizer).items():
        if not isinstance(value, list) or len(value) != len(trainable):
            continue
        variables = [item for item in value if item is not None]
        if variables and all(isinstance(item, keras.Variable) and id(item) not in others for item in variables):
            lists[name] = list(value)
    return lists


def plain_attributes(optimizer: keras.optimizers.Optimizer) -> dict[str, Any]:
    """Return copies of the attributes that callbacks may set, such as ``momentum``.

    They are the numbers, and for a class of the user also text, arrays, and lists, dicts and sets of these.
    """
    attributes = vars(optimizer).items()
    settings = {name: value for name, value in attributes if isinstance(value, _NUMBERS) and name not in _LOCAL}
    if not of_keras(type(optimizer)):
        copies = {name: _plain(value) for name, value in attributes if name not in _base_attributes()}
        settings |= {name: value for name, value in copies.items() if value is not _NOT_PLAIN}
    return settings


def unknown_attribute(optimizer: Any) -> str:
    """Return the name of an attribute that a copy cannot get, such as another optimizer; "" if there is none.

    Args:
        optimizer: built.
    """
    slots = slot_lists(optimizer)
    attributes: dict[str, Any] = vars(optimizer)
    for name, value in attributes.items():
        known = name in _base_attributes() or name in slots or name.startswith("_self_")  # TensorFlow's
        if not known and not isinstance(value, keras.Variable) and _plain(value) is _NOT_PLAIN:
            return name
    return ""


def are_equal(left: object, right: object) -> bool:
    """Return whether two plain values are equal; two NaN are."""
    if isinstance(left, np.ndarray) or isinstance(right, np.ndarray):
        return type(left) is type(right) and np.array_equal(np.asarray(left), np.asarray(right))
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        return len(left) == len(right) and all(map(are_equal, left, right))
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(are_equal(value, right[key]) for key, value in left.items())
    return bool(left == right or (left != left and right != right))


def _plain(value: Any) -> Any:
    """Return a copy of a value that consists of numbers and text; ``_NOT_PLAIN`` for any other value."""
    if isinstance(value, (*_NUMBERS, str, bytes, np.generic)):
        return value
    if isinstance(value, np.ndarray):
        return value.copy() if value.dtype.kind in "biufSU" else _NOT_PLAIN
    if isinstance(value, dict):
        items = {key: _plain(item) for key, item in value.items()}
        return items if all(item is not _NOT_PLAIN for item in (*items, *items.values())) else _NOT_PLAIN
    for kind in (list, tuple, set, frozenset):
        if isinstance(value, kind) and (kind is not tuple or type(value) is tuple):  # not a named tuple
            parts = [_plain(item) for item in value]
            return _NOT_PLAIN if any(part is _NOT_PLAIN for part in parts) else kind(parts)
    return _NOT_PLAIN


@cache
def _base_attributes() -> frozenset[str]:
    """Return the names of the attributes that each optimizer of Keras has."""
    optimizer = keras.optimizers.Optimizer(0.1, name="base", use_ema=True, gradient_accumulation_steps=2)
    variable = keras.Variable(np.zeros(1, "float32"), name="base")
    optimizer.exclude_from_weight_decay([variable], ["base"])
    optimizer.build([variable])
    return frozenset(vars(optimizer))


def _add_slots(optimizer: Any, original: Any, counterparts: list[Any]) -> None:
    """Add slots that the original has and the copy has not: a setting has changed since the original was built."""
    slots = slot_lists(optimizer)
    places = {id(variable): index for index, variable in enumerate(original._trainable_variables)}
    indices = [places[id(variable)] for variable in counterparts]
    for name, variables in slot_lists(original).items():
        if name not in slots:
            pairs = zip(optimizer._trainable_variables, [variables[index] for index in indices], strict=True)
            added = [
                None if like is None else optimizer.add_variable(part.shape, dtype=like.dtype) for part, like in pairs
            ]
            vars(optimizer)[name] = added


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


def _config_of(optimizer: Any) -> dict[str, Any]:
    """Return an optimizer's configuration, with its schedule itself: not all schedules can be serialized."""
    schedule, attributes = optimizer._learning_rate, vars(optimizer)
    if isinstance(schedule, keras.Variable):
        config = optimizer.get_config()
    else:
        attributes["_learning_rate"] = keras.Variable(0.0, name="learning_rate")
        try:
            config = {**optimizer.get_config(), "learning_rate": schedule}
        finally:
            attributes["_learning_rate"] = schedule
    # A callback may have set a number of numpy, which Keras' classes refuse.
    return {name: value.item() if isinstance(value, np.generic) else value for name, value in config.items()}
