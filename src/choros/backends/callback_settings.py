"""Values other than weights that a training step reads and a callback may set, as of optimizers, layers and losses.

There are two kinds:

- Numbers: plain Python values that are attributes of an object, such as ``optimizer.momentum``, and lists, dicts and
  arrays of them. Also plain numbers that are globals of the user's functions.
- Variables: ``keras.Variable`` objects that the model does not track, such as the weight of a term, held by a loss.

A step that runs as Python uses a new value at once. A compiled step uses the value that it had when it was traced: this
is so for numbers, and on JAX also for variables. Keras traces a step again for each new batch shape, such as a short
last batch. Workers trace for the same shapes, so every change is sent to them on all backends. Callbacks of a batch run
while ranks calculate the next gradients, so a trace in that time does not use what they set.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

from choros.backends.optimizers import held_optimizers, model_variables
from choros.backends.rowwise_parts import compiled_losses, of_keras
from choros.object_graph import children, global_names

Values = dict[str, Any]

_NUMBERS = (int, float, bool, str, type(None))
_KEPT = frozenset(  # what each process sets for itself
    {"stop_training", "built", "compiled", "training", "name", "train_function", "test_function", "predict_function"}
)
_DEPTH, _MOST = 4, 20_000  # how far, and through how many objects, variables are looked for
_LARGEST = 65_536  # values of one variable; larger ones are no settings
_LONGEST = 4096  # of a list, dict or array
_OTHER = object()
_PARTS = (keras.regularizers.Regularizer, keras.constraints.Constraint)  # of layers, with numbers of their own


class Settings:
    """The settings of one model. Two copies of a model give the same names.

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

    def __init__(self, model: Any) -> None:
        small = dict(_optimizers(model))  # objects of which ``glance`` reads the numbers
        small |= {f"loss[{place}]": entry.loss for place, entry in enumerate(compiled_losses(model))}
        self._watched = [(vars(each), [name for name, _ in _numbers(each)]) for each in small.values()]
        layers = {f"layers[{place}]": layer for place, layer in enumerate(model._flatten_layers())}
        self._objects = {**small, **layers}
        for place, layer in layers.items():
            parts = {name: part for name, part in vars(layer).items() if isinstance(part, _PARTS)}
            self._objects |= {f"{place}.{name}": part for name, part in parts.items()}
        self.variables, self._globals = _untracked(model)
        self._functions = self._read_functions()

    def glance(self) -> list[Any]:
        """Return the values of all but layers, without names: cheap enough for each batch."""
        values = [_plain(attributes.get(name)) for attributes, names in self._watched for name in names]
        values += [_plain(names.get(name)) for names, name in self._globals.values()]
        return [*values, *_values(self.variables).values()] if self.variables else values

    def read(self) -> Values:
        """Return the present values by name: numbers, and nested lists for variables."""
        values = {f"{place}.{name}": value for place, each in self._objects.items() for name, value in _numbers(each)}
        values |= {place: _plain(names.get(name)) for place, (names, name) in self._globals.items()}
        return values | _values(self.variables)

    def replaced_functions(self) -> list[str]:
        """Return the places of functions, such as a layer's activation, that are others than when this was last asked.

        Workers keep theirs: a function cannot travel as a value.
        """
        before, self._functions = self._functions, self._read_functions()
        return [place for place, function in self._functions.items() if before.get(place, function) is not function]

    def _read_functions(self) -> dict[str, Any]:
        kinds = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial)
        return {
            f"{place}.{name}": value
            for place, each in self._objects.items()
            for name, value in list(vars(each).items())
            if isinstance(value, kinds) and name[:1] != "_" and name not in _KEPT
        }

    def to_begin_with(self) -> Values:
        """Return the values of all variables: another process may have others, as those of an imported module."""
        return _values(self.variables)

    def changed(self, before: Values) -> Values:
        """Return what differs now from what ``read`` gave before; a value that is new is a change too."""
        now = self.read()
        return {name: value for name, value in now.items() if name not in before or _differ(before[name], value)}

    def write(self, values: Values) -> None:
        """Set values that ``changed`` gave, in this or in another copy of the model."""
        for name, value in values.items():
            if name in self.variables:
                self.variables[name].assign(np.asarray(value))
                continue
            if name in self._globals:
                names, key = self._globals[name]
                names[key] = value
                continue
            place, _, attribute = name.rpartition(".")
            if place in self._objects:
                holder = self._objects[place]
                setattr(holder, attribute, _as_before(getattr(holder, attribute, None), value))


def _values(variables: dict[str, Any]) -> Values:
    return {name: np.asarray(keras.ops.convert_to_numpy(each)).tolist() for name, each in variables.items()}


def _differ(before: Any, now: Any) -> bool:
    """Tell whether two values differ; not a number is equal to itself."""
    return not (before == now or (before != before and now != now))


def _numbers(each: Any) -> Iterator[tuple[str, Any]]:
    for name, value in list(vars(each).items()):
        if name[:1] == "_" or name in _KEPT:
            continue
        plain = _plain(value)
        if plain is not _OTHER:
            yield name, plain


def _plain(value: Any, depth: int = 3) -> Any:
    """Return a copy of a number, or of lists, dicts and arrays of numbers, as JSON has them; else ``_OTHER``."""
    if type(value) in _NUMBERS:
        return value
    if isinstance(value, (np.number, np.bool_)):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist() if value.dtype.kind in "biuf" and value.size <= _LONGEST else _OTHER
    if not depth or not isinstance(value, (list, tuple, dict)) or len(value) > _LONGEST:
        return _OTHER
    if isinstance(value, tuple) and type(value) is not tuple:  # it could not be made again of its parts
        return _OTHER
    if isinstance(value, dict):
        parts = [_plain(each, depth - 1) for each in value.values()]
        named = all(isinstance(key, str) for key in value)
        return dict(zip(value, parts, strict=True)) if named and not any(each is _OTHER for each in parts) else _OTHER
    parts = [_plain(each, depth - 1) for each in value]
    return _OTHER if any(each is _OTHER for each in parts) else parts


def _as_before(before: Any, value: Any) -> Any:
    """Return a value that travelled as JSON in the type of the one that it replaces."""
    if isinstance(before, np.ndarray):
        return np.asarray(value, before.dtype)
    return tuple(value) if isinstance(before, tuple) and isinstance(value, list) else value


def _optimizers(model: Any) -> Iterator[tuple[str, Any]]:
    for place, optimizer in {"optimizer": model.optimizer, **held_optimizers(model)}.items():
        yield place, optimizer
        if hasattr(optimizer, "inner_optimizer"):
            yield f"{place}.inner_optimizer", optimizer.inner_optimizer


def _untracked(model: Any) -> tuple[dict[str, Any], dict[str, tuple[Values, str]]]:
    """Return by name what losses hold, or functions of the user's losses, layers and model use.

    Returns:
        The variables; and of numbers in globals of these functions the dict that holds each, and its key there.
    """
    known = {id(variable) for variable in [*model_variables(model), *model.metrics_variables]}
    roots: list[tuple[str, Any]] = []
    for place, entry in enumerate(compiled_losses(model)):
        roots.append((f"loss[{place}]", entry.loss))
    owners = [*model._flatten_layers(), *(entry.loss for entry in compiled_losses(model))]
    for base in dict.fromkeys(base for owner in owners for base in type(owner).__mro__ if not _of_a_library(base)):
        functions = {name: each for name, each in vars(base).items() if isinstance(each, types.FunctionType)}
        roots += [(f"{base.__qualname__}.{name}", functions[name]) for name in sorted(functions)]
    found: dict[str, Any] = {}
    numbers: dict[str, tuple[Values, str]] = {}
    seen: set[int] = set()
    level = roots
    for _ in range(_DEPTH):
        further: list[tuple[str, Any]] = []
        for name, each in level:
            if id(each) in seen or len(seen) > _MOST:
                continue
            seen.add(id(each))
            if isinstance(each, keras.Variable):
                if id(each) not in known and int(np.prod(each.shape)) <= _LARGEST:
                    found[name] = each
                continue
            if isinstance(each, types.FunctionType) and not _of_a_library(each):
                names = each.__globals__
                held = [key for key in global_names(each) if type(names[key]) in _NUMBERS and key[:2] != "__"]
                numbers |= {f"{each.__module__}.{key}": (names, key) for key in held}
            further += [(f"{name}{part}", value) for part, value in _parts(each)]
        level = further
    return found, numbers


def _parts(each: Any) -> Iterator[tuple[str, Any]]:
    """Yield what a container, a function, a loss or an object of the user's own holds, each with its place."""
    if isinstance(each, (dict, list, tuple)):
        return children(each) if len(each) <= _LONGEST else iter(())
    if isinstance(each, types.FunctionType):
        return iter(()) if of_keras(each) else children(each)
    searched = isinstance(each, (types.MethodType, functools.partial, keras.Loss)) or _of_the_user(each)
    return children(each) if searched else iter(())


def _of_the_user(each: Any) -> bool:
    """Tell whether an object is of a class of the user's own, and no part of a model."""
    skipped = (keras.Layer, keras.Optimizer, keras.Metric, keras.callbacks.Callback, types.ModuleType, type)
    return not isinstance(each, skipped) and hasattr(each, "__dict__") and not _of_a_library(type(each))


def _of_a_library(kind: Any) -> bool:
    """Tell whether a class or a function is of a library."""
    libraries = ("builtins", "keras", "numpy", "jax", "jaxlib", "torch", "tensorflow", "choros")
    return str(kind.__module__).partition(".")[0] in libraries
