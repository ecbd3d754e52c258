"""The classes and functions of a model that are not Keras' own, found by the names that its file gives them."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from choros.errors import NotSerializable


def custom_objects(config: dict[str, Any], model: Any) -> Iterator[tuple[str, Any]]:
    """Find every class and function in a serialised model that is not Keras' own."""
    import keras

    live, twice = _named(model)
    for module, name, registered in _names(config):
        if of_keras(module):
            continue
        if name in twice:
            raise NotSerializable(
                f"The model {model.name!r} uses two different objects that are both called {name}, and its file tells "
                "them apart by that name only: give each a name of its own."
            )
        found = keras.saving.get_registered_object(registered) if registered else None
        if found is None and module in sys.modules:
            found = getattr(sys.modules[module], name, None)
        if found is None:
            found = live.get(name)
        if found is None:
            if module in (None, "builtins"):
                continue
            raise NotSerializable(
                f"The model uses {module}.{name}, which cannot be found by that name. Define it at the top level of "
                "a module or register it with keras.saving.register_keras_serializable()."
            )
        yield name, found
        if registered:
            yield registered, found


def _names(node: Any) -> Iterator[tuple[str | None, str, str | None]]:
    """Yield (module, name, registered name) of each serialised object in a config."""
    if isinstance(node, dict):
        name = node.get("class_name")
        if isinstance(name, str):
            if name == "function" and isinstance(node.get("config"), str):
                yield node.get("module"), node["config"], node.get("registered_name")
            elif not name.startswith("__"):
                yield node.get("module"), name, node.get("registered_name")
        for value in node.values():
            yield from _names(value)
    elif isinstance(node, list):
        for value in node:
            yield from _names(value)


def _named(model: Any) -> tuple[dict[str, Any], set[str]]:
    """Map names to the classes and functions that the model really holds; and tell which names are ambiguous."""
    found: dict[str, Any] = {}
    objects = list(_held(model))
    return found, {thing.__name__ for thing in objects if found.setdefault(thing.__name__, thing) is not thing}


def _held(model: Any) -> Iterator[Any]:
    """Yield the classes and functions of a model, and of all that it holds, that are not Keras' own."""
    waiting, seen = [model], set[int]()
    while waiting:
        thing = waiting.pop(0)
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, types.FunctionType):
            if not of_keras(thing.__module__):
                yield thing
        elif isinstance(thing, dict):
            waiting += thing.values()
        elif isinstance(thing, (list, tuple)):
            waiting += thing
        elif isinstance(thing, kinds()):
            if not of_keras(type(thing).__module__):
                yield type(thing)
            waiting += [value for name, value in vars(thing).items() if name not in ("build", "quantize")]
            waiting += getattr(thing, "_layers", [])


@functools.cache
def kinds() -> tuple[type, ...]:
    """Return the classes of Keras whose objects a configuration speaks of."""
    import keras

    return (
        keras.layers.Layer,
        keras.losses.Loss,
        keras.metrics.Metric,
        keras.optimizers.Optimizer,
        keras.optimizers.schedules.LearningRateSchedule,
        keras.regularizers.Regularizer,
        keras.constraints.Constraint,
        keras.initializers.Initializer,
    )


@contextmanager
def distinct(model: Any) -> Iterator[None]:
    """For a while, give a name of its own to each function of a model.

    Keras writes a lambda down as bare code, which loses the names that it uses, and tells other functions apart by a
    name that several may share, or one of them and one of Keras' own.
    """
    functions = {id(f): f for f in _held(model) if isinstance(f, types.FunctionType)}
    names = {key: function.__name__ for key, function in functions.items()}
    for index, function in enumerate(functions.values()):
        function.__name__ = f"{function.__name__.strip('<>')}_{index}"
    try:
        yield
    finally:
        for key, function in functions.items():
            function.__name__ = names[key]


def of_keras(module: Any) -> bool:
    """Tell whether a module is Keras'."""
    return module == "keras" or str(module).startswith(("keras.", "keras_"))
