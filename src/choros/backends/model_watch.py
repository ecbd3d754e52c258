"""Detection of Python state that a recorded step of a model does not see.

A recorded step contains the tensor operations of a step, but none of its Python code. Numbers that the code read are
constants of the record. ``ModelWatch`` answers two questions: is all code of the step Keras' own, so that the record
does the same as the code? And has an attribute changed since?
"""

from __future__ import annotations

import operator
import threading
import types
from collections.abc import Iterator
from typing import Any

import keras

from choros.object_graph import children

_LIBRARIES = frozenset(
    {"keras", "torch", "jax", "jaxlib", "tensorflow"}
    | {"numpy", "builtins", "collections", "optree", "functools", "threading", "weakref", "inspect"}
    | {"abc", "types", "typing", type(threading.Lock()).__module__}
)
_UNSUITABLE = frozenset({"Lambda", "TorchModuleWrapper", "JaxLayer", "FlaxLayer", "TFSMLayer"})  # run other code
_IGNORED = frozenset(  # attributes that no step reads, or that Keras sets around each loop
    {"training", "history", "_eval_epoch_iterator", "train_function", "test_function", "predict_function"}
    | {"stop_training", "stop_evaluating", "stop_predicting"}
)
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")  # of a torch.nn.Module
_WATCHED: tuple[type, ...] = (
    *(keras.Layer, keras.Optimizer, keras.Loss, keras.Metric, keras.optimizers.schedules.LearningRateSchedule),
    *(keras.regularizers.Regularizer, keras.constraints.Constraint, keras.random.SeedGenerator),
)
_MAX_OBJECTS = 200_000
_MAX_ITEMS = 64  # most items of a container whose items are compared
_MISSING = object()


class ModelWatch:
    """The attributes that the training step of a model reads, as they were when they were last compared.

    Args:
        model: keras.Model, compiled and built.

    Attributes:
        foreign: str. A path to code that is not Keras' own, such as ``"optimizer.schedule"``; "" if there is none.
        changes: int. How often ``changed`` found a difference.

    Example:
        >>> import keras
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.Dropout(0.5)])
        >>> model.compile("sgd", "mse", run_eagerly=True)
        >>> watch = ModelWatch(model)
        >>> watch.changed()
        False
        >>> model.layers[1].rate = 0.1
        >>> watch.changed(), watch.changed()
        (True, False)
    """

    def __init__(self, model: keras.Model) -> None:
        self.changes = 0
        self.foreign, watched = _search(model)
        self._attributes = [vars(item) for item in watched]
        self._hooks = [names[hook] for names in self._attributes for hook in _HOOKS if hook in names]
        if not self.foreign and any(self._hooks):
            self.foreign = "a hook of a module"
        self._containers: list[Any] = []
        for names in self._attributes:
            self._containers += [value for key, value in names.items() if key not in _HOOKS and _comparable(value)]
        self._values = [list(names.values()) for names in self._attributes]
        self._items = [_items(container) for container in self._containers]
        self._names = [dict(names) for names in self._attributes]

    def changed(self) -> bool:
        """Return whether an attribute has changed since the last call. A call takes about 1 us for each object."""
        if self._same():
            return False
        different = any(self._hooks) or any(
            now.get(name, _MISSING) is not before.get(name, _MISSING)
            for now, before in zip(self._attributes, self._names, strict=True)
            for name in (now.keys() | before.keys()) - _IGNORED
        )
        different = different or any(
            not _equal(_items(container), items) for container, items in zip(self._containers, self._items, strict=True)
        )
        self._values = [list(names.values()) for names in self._attributes]
        self._items = [_items(container) for container in self._containers]
        self._names = [dict(names) for names in self._attributes]
        self.changes += different
        return different

    def _same(self) -> bool:
        """Return whether all attributes and items are the same objects as before. The old ones are kept alive."""
        for names, values in zip(self._attributes, self._values, strict=True):
            if len(names) != len(values) or not all(map(operator.is_, names.values(), values)):
                return False
        for container, items in zip(self._containers, self._items, strict=True):
            if not _equal(_items(container), items):
                return False
        return not any(self._hooks)


def _equal(now: list[Any], before: list[Any]) -> bool:
    return len(now) == len(before) and all(map(operator.is_, now, before))


def _items(container: Any) -> list[Any]:
    return [*container.keys(), *container.values()] if isinstance(container, dict) else list(container)


def _comparable(value: object) -> bool:
    """Return whether a value is a small list or dict of values that a step may read, and not of layers or variables."""
    if not isinstance(value, (list, dict)) or not 0 < len(value) <= _MAX_ITEMS:
        return False
    return not any(isinstance(item, (keras.Variable, keras.Layer, keras.KerasTensor)) for item in _items(value))


def _search(model: keras.Model) -> tuple[str, list[Any]]:
    """Search all objects that a model references.

    Returns:
        The path to an object with code that is not Keras' own, or ""; and the objects whose attributes count.
    """
    stack: list[tuple[str, Any]] = [("model", model)]
    seen: set[int] = set()
    watched: list[Any] = []
    foreign: list[str] = []
    while stack and len(seen) < _MAX_OBJECTS:
        path, item = stack.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, (type, types.FunctionType)):
            if _library(item) not in {*_LIBRARIES, "choros"}:
                foreign.append(path)
            continue
        if _is_leaf(item):
            continue
        if not _of_keras(type(item)):
            foreign.append(path)
            continue
        if isinstance(item, _WATCHED):
            watched.append(item)
        stack += [(path + part, child) for part, child in children(item)]
    foreign += [method for kind in {type(item) for item in watched} for method in _replaced_methods(kind)]
    foreign += [f"more than {_MAX_OBJECTS} objects"] if stack else []
    return foreign[0] if foreign else "", watched


def _is_leaf(item: object) -> bool:
    """Return whether what an object references has no part in a step."""
    if isinstance(item, (keras.Variable, keras.KerasTensor, types.ModuleType, types.BuiltinFunctionType)):
        return True
    # What Choros attaches to a model or an optimizer stands in for a method of ``fit``, and has no part in the step.
    return _library(item) == "choros" and not isinstance(item, _WATCHED)


def _of_keras(kind: type) -> bool:
    """Return whether a class is of Keras or of a library, and does not run code of others."""
    library, *modules = kind.__module__.split(".")
    if library not in _LIBRARIES or kind.__name__ in _UNSUITABLE:
        return False
    return library != "keras" or modules[:1] == ["src"]  # a class may say that it is of ``keras.layers``


def _replaced_methods(kind: type) -> Iterator[str]:
    """Yield the methods of a class of Keras that somebody has replaced."""
    for base in kind.__mro__:
        for name, member in vars(base).items():
            if isinstance(member, types.FunctionType) and _library(member) not in {*_LIBRARIES, "choros"}:
                yield f"{base.__name__}.{name}"


def _library(item: object) -> str:
    """Return the first part of the name of the module of a function or class."""
    return str(getattr(item, "__module__", "")).partition(".")[0]
