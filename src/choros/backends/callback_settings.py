"""Settings: values that a training step reads and a callback may set, such as attributes of an optimizer.

Settings belong to optimizers, layers and losses. Weights are not settings. There are two kinds:

- Numbers: plain Python values that are attributes of an object, such as ``optimizer.momentum``, and lists, dicts and
  arrays of them. Also plain numbers that are globals of the user's functions.
- Variables: ``keras.Variable`` objects that the model does not track. Example: a loss holds the weight of a term.

An eager step uses a new value at once. A compiled step keeps the value that a number had when the step was traced. On
JAX this is also true for variables. Keras traces a step again for each new batch shape, such as a short last batch.
Workers trace for the same shapes, so every change is sent to them on all backends. Batch callbacks run while the ranks
compute the next gradients. A trace during that time does not use a value that such a callback sets.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

from choros.backends.host_values import host_value
from choros.backends.optimizers import held_optimizers, model_variables
from choros.backends.rowwise_parts import compiled_losses, of_keras
from choros.object_graph import attribute_names, children, global_names

Values = dict[str, Any]

_NUMBERS = (int, float, bool, str, type(None))
_LOCAL_ATTRIBUTES = frozenset(  # attributes that each process sets independently
    {"stop_training", "stop_evaluating", "stop_predicting", "built", "compiled", "training", "name"}
    | {"train_function", "test_function", "predict_function"}
)
_MAX_DEPTH, _MAX_OBJECTS = 4, 20_000  # depth and number of objects of the search for variables
_MAX_VARIABLE = 65_536  # most values of a variable that counts as a setting
_MAX_ITEMS = 4096  # most values of a list, dict or array that counts as a setting
_LIBRARIES = ("builtins", "keras", "numpy", "jax", "jaxlib", "torch", "tensorflow", "choros")
_NOT_PLAIN = object()  # the result of ``_plain`` for a value that is not a setting
_PARTS = (keras.regularizers.Regularizer, keras.constraints.Constraint)  # parts of layers that hold numbers


class Settings:
    """The settings of one model. Two copies of a model have the same names of settings.

    Args:
        model: keras.Model, compiled and built.

    Example:
        >>> import keras
        >>> model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        >>> model.compile("sgd", "mse", run_eagerly=True)
        >>> settings = Settings(model)
        >>> before = settings.read()
        >>> model.optimizer.momentum = 0.5
        >>> settings.changed(before)
        {'optimizer.momentum': 0.5}
    """

    def __init__(self, model: keras.Model) -> None:
        small = dict(_optimizers(model))  # objects whose numbers ``glance`` reads
        small |= {f"loss[{index}]": entry.loss for index, entry in enumerate(compiled_losses(model))}
        self._watched = [(vars(item), [name for name, _ in _numbers(item)]) for item in small.values()]
        layers = {f"layers[{index}]": layer for index, layer in enumerate(model._flatten_layers())}
        self._objects = {**small, **layers}
        for path, layer in layers.items():
            parts = {name: part for name, part in vars(layer).items() if isinstance(part, _PARTS)}
            self._objects |= {f"{path}.{name}": part for name, part in parts.items()}
        self.variables, self._globals = _untracked(model)
        self._functions = self._read_functions()

    def glance(self) -> list[Any]:
        """Return the values of all settings except those of layers, without names. It is fast enough for each batch."""
        values = [_plain(attributes.get(name)) for attributes, names in self._watched for name in names]
        values += [_plain(names.get(name)) for names, name in self._globals.values()]
        return [*values, *_values(self.variables).values()] if self.variables else values

    def read(self) -> Values:
        """Return the current value of each setting by name. Variables are given as nested lists."""
        values = {f"{path}.{name}": value for path, item in self._objects.items() for name, value in _numbers(item)}
        values |= {path: _plain(names.get(name)) for path, (names, name) in self._globals.items()}
        return values | _values(self.variables)

    def replaced_functions(self) -> list[str]:
        """Return the names of functions, such as a layer's activation, that were replaced since the last call.

        Workers keep the old functions, as a function cannot be sent as a value.
        """
        before, self._functions = self._functions, self._read_functions()
        return [path for path, function in self._functions.items() if before.get(path, function) is not function]

    def _read_functions(self) -> dict[str, Any]:
        kinds = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial)
        return {
            f"{path}.{name}": value
            for path, item in self._objects.items()
            for name, value in list(vars(item).items())
            if isinstance(value, kinds) and name[:1] != "_" and name not in _LOCAL_ATTRIBUTES
        }

    def to_begin_with(self, with_globals: bool) -> Values:
        """Return the values of all variables, for the start of training.

        The values in another process may differ, for example those of variables in an imported module.

        Args:
            with_globals: bool. Whether to return numbers among the globals of functions too. A rank that runs the
                user's script has numbers of its own.
        """
        numbers = {path: _plain(names.get(name)) for path, (names, name) in self._globals.items() if with_globals}
        return numbers | _values(self.variables)

    def changed(self, before: Values) -> Values:
        """Return the settings that differ from an earlier result of ``read``, including new ones."""
        now = self.read()
        return {name: value for name, value in now.items() if name not in before or _differ(before[name], value)}

    def write(self, values: Values) -> bool:
        """Set values that ``changed`` returned, for this or another copy of the model.

        Returns:
            Whether a setting has another value than before.
        """
        before = self.read()
        for name, value in values.items():
            if name in self.variables:
                self.variables[name].assign(np.asarray(value))
                continue
            if name in self._globals:
                names, key = self._globals[name]
                names[key] = value
                continue
            path, _, attribute = name.rpartition(".")
            if path in self._objects:
                holder = self._objects[path]
                setattr(holder, attribute, _as_before(getattr(holder, attribute, None), value))
        return bool(self.changed(before))


def _values(variables: dict[str, Any]) -> Values:
    return {name: host_value(variable).tolist() for name, variable in variables.items()}


def _differ(before: object, now: object) -> bool:
    """Return whether two values differ. Two values of NaN are equal."""
    return not (before == now or (before != before and now != now))


def _numbers(item: object) -> Iterator[tuple[str, Any]]:
    for name, value in list(vars(item).items()):
        if name[:1] == "_" or name in _LOCAL_ATTRIBUTES:
            continue
        plain = _plain(value)
        if plain is not _NOT_PLAIN:
            yield name, plain


def _plain(value: object, depth: int = 3) -> Any:
    """Return a number, or lists, dicts and arrays of numbers, as a JSON copy; ``_NOT_PLAIN`` for other values."""
    if type(value) in _NUMBERS:
        return value
    if isinstance(value, (np.number, np.bool_)):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist() if value.dtype.kind in "biuf" and value.size <= _MAX_ITEMS else _NOT_PLAIN
    if not depth or not isinstance(value, (list, tuple, dict)) or len(value) > _MAX_ITEMS:
        return _NOT_PLAIN
    if isinstance(value, tuple) and type(value) is not tuple:  # a subclass may not be constructed from its items
        return _NOT_PLAIN
    if isinstance(value, dict):
        parts = [_plain(item, depth - 1) for item in value.values()]
        named = all(isinstance(key, str) for key in value)
        return (
            dict(zip(value, parts, strict=True))
            if named and not any(item is _NOT_PLAIN for item in parts)
            else _NOT_PLAIN
        )
    parts = [_plain(item, depth - 1) for item in value]
    return _NOT_PLAIN if any(item is _NOT_PLAIN for item in parts) else parts


def _as_before(before: object, value: object) -> Any:
    """Convert a value from JSON to the type of the value that it replaces."""
    if isinstance(before, np.ndarray):
        return np.asarray(value, before.dtype)
    return tuple(value) if isinstance(before, tuple) and isinstance(value, list) else value


def _optimizers(model: keras.Model) -> Iterator[tuple[str, Any]]:
    for path, optimizer in {"optimizer": model.optimizer, **held_optimizers(model)}.items():
        yield path, optimizer
        if hasattr(optimizer, "inner_optimizer"):
            yield f"{path}.inner_optimizer", optimizer.inner_optimizer


def _untracked(model: keras.Model) -> tuple[dict[str, Any], dict[str, tuple[Values, str]]]:
    """Find variables that losses hold, and variables and numbers that user-defined methods use.

    The methods are those of user-defined losses, layers and models.

    Returns:
        Two dicts by name: the variables; and for each global number, the dict that holds it and its key.
    """
    known = {id(variable) for variable in [*model_variables(model), *model.metrics_variables]}
    roots: list[tuple[str, Any]] = []
    for index, entry in enumerate(compiled_losses(model)):
        roots.append((f"loss[{index}]", entry.loss))
    owners = [*model._flatten_layers(), *(entry.loss for entry in compiled_losses(model))]
    for base in dict.fromkeys(base for owner in owners for base in type(owner).__mro__ if not _of_a_library(base)):
        functions = {name: member for name, member in vars(base).items() if isinstance(member, types.FunctionType)}
        roots += [(f"{base.__qualname__}.{name}", functions[name]) for name in sorted(functions)]
    functions_by_name: dict[str, Any] = {}
    numbers: dict[str, tuple[Values, str]] = {}
    seen: set[int] = set()
    level = roots
    for _ in range(_MAX_DEPTH):
        further: list[tuple[str, Any]] = []
        for name, item in level:
            if id(item) in seen or len(seen) > _MAX_OBJECTS:
                continue
            seen.add(id(item))
            if isinstance(item, keras.Variable):
                if id(item) not in known and int(np.prod(item.shape)) <= _MAX_VARIABLE:
                    functions_by_name[name] = item
                continue
            if isinstance(item, types.FunctionType) and not _of_a_library(item):
                for owner, names, key in _used_names(item):
                    if type(names[key]) in _NUMBERS and key[:2] != "__":
                        numbers[f"{owner}.{key}"] = names, key
                    elif owner != item.__module__:  # ``_parts`` has those of the function's own module
                        further.append((f"{name} ({owner}.{key})", names[key]))
            further += [(f"{name}{part}", value) for part, value in _parts(item)]
        level = further
    return functions_by_name, numbers


def _used_names(function: types.FunctionType) -> Iterator[tuple[str, Values, str]]:
    """Yield the globals that a function uses, and the attributes of the user's modules among them (``module.RATE``).

    Yields:
        The name of the module, its dict and the key. An attribute is found by its name alone, so a few may not be used.
    """
    modules = [(function.__module__, function.__globals__, global_names(function))]
    attributes = attribute_names(function)
    seen: set[int] = set()
    while modules:
        owner, names, keys = modules.pop()
        for key in keys:
            yield owner, names, key
            module = names[key]
            if isinstance(module, types.ModuleType) and id(module) not in seen and not _is_library(module):
                seen.add(id(module))
                modules.append((module.__name__, vars(module), sorted(attributes & vars(module).keys())))


def _is_library(module: types.ModuleType) -> bool:
    package = module.__name__.partition(".")[0]
    return package in _LIBRARIES or package in sys.stdlib_module_names


def _parts(item: object) -> Iterator[tuple[str, Any]]:
    """Yield the name and value of each item of a container, function, loss or user-defined object."""
    if isinstance(item, (dict, list, tuple)):
        return children(item) if len(item) <= _MAX_ITEMS else iter(())
    if isinstance(item, types.FunctionType):
        return iter(()) if of_keras(item) else children(item)
    searched = isinstance(item, (types.MethodType, functools.partial, keras.Loss)) or _of_the_user(item)
    return children(item) if searched else iter(())


def _of_the_user(item: object) -> bool:
    """Return whether an object has a user-defined class and is not a layer, optimizer, metric, callback or module."""
    skipped = (keras.Layer, keras.Optimizer, keras.Metric, keras.callbacks.Callback, types.ModuleType, type)
    return not isinstance(item, skipped) and hasattr(item, "__dict__") and not _of_a_library(type(item))


def _of_a_library(kind: object) -> bool:
    """Return whether a class or a function belongs to a library."""
    return str(kind.__module__).partition(".")[0] in _LIBRARIES
