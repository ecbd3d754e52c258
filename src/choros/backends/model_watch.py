"""Detection of Python state that a recorded step of a model does not see.

A recorded step contains the tensor operations of a step, but none of its Python code. Numbers that the code read are
constants of the record. ``ModelWatch`` answers two questions: is all code of the step Keras' own, so that the record
does the same as the code? And has an attribute changed since?
"""

from __future__ import annotations

import functools
import itertools
import operator
import threading
import types
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

from choros.object_graph import children

_LIBRARIES = frozenset(
    {"keras", "torch", "jax", "jaxlib", "tensorflow"}
    | {"numpy", "builtins", "collections", "optree", "functools", "threading", "weakref", "inspect"}
    | {"abc", "types", "typing", type(threading.Lock()).__module__}
)
_UNSUITABLE = frozenset({"Lambda", "TorchModuleWrapper", "JaxLayer", "FlaxLayer", "TFSMLayer"})  # run other code
_IGNORED = frozenset(  # attributes that no step reads, that a step sets itself, or that Keras sets around each loop
    {"training", "history", "_eval_epoch_iterator", "train_function", "test_function", "predict_function"}
    | {"stop_training", "stop_evaluating", "stop_predicting", "_losses", "_loss_ids"}
)
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")  # of a torch.nn.Module
_WATCHED: tuple[type, ...] = (
    *(keras.Operation, keras.Optimizer, keras.Loss, keras.Metric, keras.optimizers.schedules.LearningRateSchedule),
    *(keras.regularizers.Regularizer, keras.constraints.Constraint, keras.random.SeedGenerator, keras.Variable),
)
_MAX_OBJECTS = 200_000
_MISSING = object()

Names = dict[str, Any]


class ModelWatch:
    """The attributes that a training step of a model reads, and whether they have changed.

    They are the attributes of layers, variables, losses, metrics and of the optimizer, and the items of their lists and
    dicts. Two values are equal if they are one object. A call takes 10 to 20 ns for each value.

    A model whose layers have arrays as public attributes counts as foreign, as these may be changed in place. Not seen:
    a method of a class of Keras that is replaced during training, and changes of lists that are private to a layer.

    Args:
        model: keras.Model, compiled and built.

    Attributes:
        foreign: str. A path to code that is not Keras' own, such as ``"model._optimizer"``; "" if there is none.
            Also "" before the first call of ``changed``.
        changes: int. How often ``changed`` has found a difference.

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
        self.changes, self.foreign = 0, ""
        self._model = model
        self._attributes: list[Names] = []
        self._before: list[Names] = []
        self._views: list[Any] = []  # live views of the attributes and of the lists and dicts among them
        self._lengths: list[int] = []
        self._values: list[Any] = []  # kept alive, so that no new object has the identity of an old one
        self._keywords: list[Names] = []  # of functions with fixed arguments
        self._hooks: list[Names] = []
        self._tensors: list[Any] = []
        self._settings: tuple[Any, ...] = ()

    def changed(self) -> bool:
        """Return whether an attribute has changed since the last call. The first call searches the model."""
        if not self._attributes:
            self._search()
            self._remember()
            return False
        if self._same():
            return False
        different = (
            self._settings != _settings()
            or self._hooked()
            or any(
                now.get(name, _MISSING) is not before.get(name, _MISSING)
                for now, before in zip(self._attributes, self._before, strict=True)
                for name in (now.keys() | before.keys()) - _IGNORED
            )
            or not self._same_values(len(self._attributes))
        )
        if different:
            self.changes += 1
            self._search()
        self._remember()
        return different

    def _search(self) -> None:
        """Find the objects whose attributes count."""
        self.foreign, watched = _search(self._model)
        self._keywords = [item.keywords for item in watched if isinstance(item, functools.partial)]
        self._attributes = [vars(item) for item in watched]
        self._hooks = [names[hooks] for names in self._attributes for hooks in _HOOKS if hooks in names]
        tensors = [item._value for item in watched if isinstance(item, keras.Variable)]
        self._tensors = [tensor for tensor in tensors if hasattr(tensor, "_backward_hooks")]  # PyTorch's
        if self._hooked() or any(self._hooks):
            self.foreign = self.foreign or "a hook"

    def _remember(self) -> None:
        self._before = [dict(names) for names in self._attributes]
        containers = [
            value
            for names in self._attributes
            for name, value in names.items()
            if isinstance(value, (list, dict)) and (_HOOKS[0] not in names or name[:1] != "_")  # private: of a layer
        ]
        containers += [*self._hooks, *self._keywords]
        self._views = [names.values() for names in self._attributes]
        self._views += [value.values() if isinstance(value, dict) else value for value in containers]
        self._lengths = list(map(len, self._views))
        self._values = list(itertools.chain.from_iterable(self._views))
        self._settings = _settings()

    def _same(self) -> bool:
        return self._same_values(0) and self._settings == _settings() and not self._hooked()

    def _same_values(self, first: int) -> bool:
        """Return whether all values are the objects of before, from the view with this number on."""
        views, lengths, values = self._views, self._lengths, self._values
        if first:
            views, lengths, values = views[first:], lengths[first:], values[sum(lengths[:first]) :]
        if list(map(len, views)) != lengths:
            return False
        return all(map(operator.is_, itertools.chain.from_iterable(views), values))

    def _hooked(self) -> bool:
        """Return whether a tensor of PyTorch has a hook."""
        return any(tensor._backward_hooks or tensor._post_accumulate_grad_hooks for tensor in self._tensors)


def _settings() -> tuple[Any, ...]:
    return keras.config.epsilon(), keras.config.floatx()


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
            if _is_foreign(item):
                foreign.append(path)
            continue
        if isinstance(item, np.ndarray):
            if item.ndim and "._" not in path[path.rfind(".") :]:  # somebody may change it in place
                foreign.append(path)
            continue
        if _is_leaf(item):
            continue
        if not _of_keras(type(item)):
            foreign.append(path)
            continue
        fixed = isinstance(item, keras.Variable) and not item.trainable  # a step reads its value only
        if isinstance(item, (*_WATCHED, functools.partial)) and not fixed:
            watched.append(item)
        skipped = "._value" if isinstance(item, keras.Variable) else ""
        parts = [(part, child) for part, child in children(item) if part != skipped and "initializer" not in part]
        stack += [(path + part, child) for part, child in parts]
    foreign += [method for kind in {type(item) for item in watched} for method in _replaced_methods(kind)]
    foreign += [f"more than {_MAX_OBJECTS} objects"] if stack else []
    return foreign[0] if foreign else "", watched


def _is_leaf(item: object) -> bool:
    """Return whether a step does not use what an object references."""
    if isinstance(item, (keras.KerasTensor, types.ModuleType, types.BuiltinFunctionType)):
        return True
    # Choros adds attributes to models and optimizers for ``fit``. The step does not use them.
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
            if isinstance(member, types.FunctionType) and _is_foreign(member):
                yield f"{base.__name__}.{name}"


def _is_foreign(item: object) -> bool:
    """Return whether a function or class is neither of a library nor of Choros."""
    return _library(item) not in {*_LIBRARIES, "choros"}


def _library(item: object) -> str:
    """Return the first part of the name of the module whose code a function, or the class of an object, has.

    ``functools.wraps`` copies ``__module__`` to a function of another module. The globals show where its code is.
    """
    if isinstance(item, types.FunctionType):
        return str(item.__globals__.get("__name__")).partition(".")[0]
    return str(getattr(item, "__module__", "")).partition(".")[0]
