"""Weights that are fetched when a callback first touches them, and not before.

While callbacks run, the class of the model, its layers, its variables and the optimizer's variables is replaced by a
subclass. A few attributes need no weights. The first access to any other one restores all classes, fetches the weights
and then proceeds as usual. The objects stay the same, so any reference to them works. Access to weights past these
objects is not noticed: see ``holds_tensors``.
"""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import repeat
from typing import TYPE_CHECKING, Any

import numpy as np

from choros.backends.optimizers import model_variables
from choros.object_graph import children
from choros.types import Array

if TYPE_CHECKING:
    import keras

# Attributes that need no weights.
_MODEL_ATTRIBUTES = frozenset(  # the variables of metrics and of the optimizer are watched
    {"stop_training", "optimizer", "name", "history", "compiled", "built", "metrics", "metrics_names"}
)
_LAYER_ATTRIBUTES = frozenset({"name", "built", "trainable"})
_VARIABLE_ATTRIBUTES = frozenset({"name", "path", "shape", "dtype", "trainable", "ndim"})
_PLAIN_METHODS = frozenset(  # special methods that read no weights
    {"__new__", "__init__", "__init_subclass__", "__subclasshook__", "__class_getitem__", "__getattribute__"}
    | {"__getattr__", "__setattr__", "__delattr__", "__del__", "__hash__", "__class__"}
)
_MAX_LEVELS, _MAX_OBJECTS = 5, 20_000  # limits of the search in ``holds_tensors``


class LazyWeights:
    """The weights of one model while callbacks run.

    Args:
        model: keras.Model, built and compiled.
        touch: called once in each ``armed`` block in which weights are touched, before the access.

    Attributes:
        stays: bool. Whether the classes stay replaced between two ``armed`` blocks, because no other code uses the
            model. An access between blocks restores the classes, and fetches nothing. Defaults to False.
        rate: the variable of the optimizer's learning rate; None if it follows a schedule.
        rate_used: bool. Whether the last ``armed`` block used that variable, so it may have changed it.

    Example:
        >>> import keras
        >>> model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        >>> model.compile("sgd", "mse")
        >>> lazy = LazyWeights(model, lambda: print("fetched"))
        >>> with lazy.armed():
        ...     name, rate = model.name, model.optimizer.learning_rate
        >>> with lazy.armed():
        ...     weights = model.get_weights()
        fetched
    """

    def __init__(self, model: keras.Model, touch: Callable[[], None]) -> None:
        self.model, self.touch = model, touch
        self._armed = self._inside = self.rate_used = self.stays = False
        self.passing = False  # True while an attribute is read that needs no weights: what it reads needs none either
        self.rate: object = None
        self._rate_value: object = None  # the backend's array that was read last
        self._rate_array: object = None  # its copy on the host
        self._classes: dict[type, type] = {}
        self._objects: list[Any] = []
        self._original_classes: list[type] = []  # the class of each object
        self._lazy: list[type] = []  # the subclass of each object while callbacks run

    @contextmanager
    def armed(self) -> Iterator[None]:
        """Call ``touch`` at the first access to weights in this block."""
        self.arm()
        try:
            yield
        finally:
            self.rest()

    def arm(self) -> None:
        """Replace the classes: the first access to weights from now on calls ``touch``."""
        if not self._objects:
            self.collect()
        if not self._armed:
            self._set_classes(self._lazy)
        self._armed = self._inside = True
        self.rate_used = False

    def rest(self) -> None:
        """End the block that ``arm`` began; restore the classes unless ``stays`` is set."""
        self._inside = False
        if not self.stays:
            self.disarm()

    def disarm(self) -> None:
        """Restore all classes."""
        if self._armed:
            self._armed = False
            self._set_classes(self._original_classes)

    @property
    def inside(self) -> bool:
        """True from ``arm`` to ``rest``."""
        return self._inside

    @property
    def watches_rate(self) -> bool:
        """True if the optimizer's learning rate is the watched variable; False after a callback has replaced it."""
        optimizer = vars(self._attributes()["optimizer"])
        attributes = vars(optimizer["inner_optimizer"]) if "inner_optimizer" in optimizer else optimizer
        return self.rate is not None and attributes.get("_learning_rate") is self.rate

    @property
    def stopped(self) -> bool:
        """The model's ``stop_training``, read past the replaced class, which would be slow after each batch."""
        return bool(self._attributes()["stop_training"])

    def _attributes(self) -> dict[str, Any]:
        """Return the model's ``__dict__`` without calling ``touch``."""
        attributes: dict[str, Any] = object.__getattribute__(self.model, "__dict__")
        return attributes

    def _set_classes(self, classes: list[type]) -> None:
        """Set the class of each object. No Python loop, because this runs twice per batch."""
        deque(map(object.__setattr__, self._objects, repeat("__class__"), classes), maxlen=0)

    def trigger(self) -> None:
        """Restore all classes and, in an ``armed`` block, call ``touch``. Do nothing if an earlier access did so."""
        if self._armed:
            self.disarm()
            if self._inside:
                self.touch()

    def collect(self) -> None:
        """Find the objects whose use counts as an access to weights. Call it again if callbacks may have added some."""
        import keras

        self.disarm()
        variables = [*model_variables(self.model), *self.model.metrics_variables]
        rate = self.model.optimizer.learning_rate  # held here, not fetched; a change of it is sent to the workers
        layers = [layer for layer in self.model._flatten_layers() if layer is not self.model]
        groups = (
            ([self.model], _MODEL_ATTRIBUTES),
            (layers, _LAYER_ATTRIBUTES),
            ([variable for variable in variables if variable is not rate], _VARIABLE_ATTRIBUTES),
        )
        unique = {id(item): (item, names) for objects, names in groups for item in objects}
        self._objects = [item for item, _ in unique.values()]
        self._original_classes = [type(item) for item in self._objects]
        self._lazy = [self._class_of(type(item), names) for item, names in unique.values()]
        self.rate = rate if isinstance(rate, keras.Variable) else None
        if self.rate is not None:
            self._objects.append(rate)
            self._original_classes.append(type(rate))
            self._lazy.append(self._watched_class(type(rate)))

    def _watched_class(self, base: type) -> type:
        """Return the subclass of the learning rate's class that records each use. It fetches no weights."""
        import keras

        lazy: LazyWeights = self
        get_attribute: Any = base.__getattribute__
        set_attribute: Any = base.__setattr__

        def __getattribute__(self: Any, name: str) -> Any:
            if name == "__class__":
                return base
            lazy.rate_used = lazy.rate_used or name not in _VARIABLE_ATTRIBUTES
            return get_attribute(self, name)

        def __setattr__(self: Any, name: str, value: Any) -> None:
            lazy.rate_used = True
            set_attribute(self, name, value)

        def __array__(self: Any, dtype: np.typing.DTypeLike | None = None) -> Array:
            lazy.rate_used = True
            value = vars(self)["_value"]
            if value is not lazy._rate_value:
                lazy._rate_value, lazy._rate_array = value, np.array(value)
            return np.array(lazy._rate_array, dtype=dtype)

        body = {"__getattribute__": __getattribute__, "__setattr__": __setattr__, "__module__": base.__module__}
        if keras.backend.backend() == "jax":  # loggers read the rate after each batch; immutable arrays can be cached
            body["__array__"] = __array__
        return types.new_class(base.__name__, (base,), exec_body=lambda namespace: namespace.update(body))

    def _class_of(self, base: type, names: frozenset[str]) -> type:
        if base not in self._classes:
            self._classes[base] = self._make(base, names)
        return self._classes[base]

    def _make(self, base: type, names: frozenset[str]) -> type:
        """Make the subclass of a class whose use calls ``touch``."""
        lazy: LazyWeights = self
        get_attribute: Any = base.__getattribute__

        def __getattribute__(self: Any, name: str) -> Any:
            if name == "__class__":
                return base
            # Keras' ``Callback.model`` calls it. No loop of Keras holds state of this model, so nothing is synced.
            if name == "jax_state_sync":
                return lambda: None
            if lazy.passing or name in names:
                was_passing, lazy.passing = lazy.passing, True
                try:
                    return get_attribute(self, name)
                finally:
                    lazy.passing = was_passing
            lazy.trigger()
            return getattr(self, name)

        def __setattr__(self: object, name: str, value: object) -> None:
            if name in ("stop_training", "history"):  # keras.callbacks.History sets the latter at each epoch's end
                object.__getattribute__(self, "__dict__")[name] = value
                return
            lazy.trigger()
            setattr(self, name, value)

        def __delattr__(self: object, name: str) -> None:
            lazy.trigger()
            delattr(self, name)

        body: dict[str, Any] = {
            "__getattribute__": __getattribute__,
            "__setattr__": __setattr__,
            "__delattr__": __delattr__,
            "__module__": base.__module__,
            "__qualname__": base.__qualname__,
        }
        for name in dir(base):
            if not (name.startswith("__") and name.endswith("__")) or name in _PLAIN_METHODS:
                continue
            plain = next(vars(base)[name] for base in base.__mro__ if name in vars(base))
            # The interpreter looks special methods up on the class, so ``__getattribute__`` does not see them.
            if isinstance(plain, types.FunctionType) or name in ("__repr__", "__reduce_ex__", "__reduce__"):
                body[name] = self._forward(base, name)
        return types.new_class(base.__name__, (base,), exec_body=lambda namespace: namespace.update(body))

    def _forward(self, base: type, name: str) -> Callable[..., Any]:
        """Return a special method that calls ``trigger`` and then the original method."""

        def method(instance: object, *args: Any, **kwargs: Any) -> Any:
            if not self.passing:
                self.trigger()
            return getattr(base, name)(instance, *args, **kwargs)

        return method


def holds_tensors(callback: keras.callbacks.Callback, model: keras.Model) -> bool:
    """Return whether a callback may reach weights past the model's objects.

    A callback can hold PyTorch parameters, TensorFlow variables, or TensorFlow functions, which hold the variables that
    they use. Another model of the same layers has such a function once it has predicted. The search covers the
    callback's attributes, the closures of its functions and the globals that these name. For such a callback the
    weights are loaded before each of its hooks. JAX arrays never change, so on JAX the result is False.

    Args:
        callback: keras.callbacks.Callback.
        model: keras.Model. The owner of the weights.
    """
    import keras

    if keras.backend.backend() == "torch":
        from choros.backends.torch import weights_detector
    elif keras.backend.backend() == "tensorflow":
        from choros.backends.tensorflow import weights_detector
    else:
        return False
    detects = weights_detector(model)

    watched = {id(layer) for layer in model._flatten_layers()}
    variables = {id(variable) for variable in model_variables(model)}

    def reads_past(item: keras.Model) -> bool:
        """Return whether a compiled function of another model may read the weights of shared layers."""
        return id(item) not in watched and any(id(variable) in variables for variable in item.variables)

    keras_types = (keras.Layer, keras.Variable, keras.Optimizer, keras.Loss)
    skipped = (str, bytes, int, float, complex, bool, type(None), type, types.ModuleType)
    level, visited = [callback], {id(callback)}
    for _ in range(_MAX_LEVELS):
        next_level = []
        for item in level:
            if isinstance(item, keras.Model) and reads_past(item):
                return True
            if isinstance(item, skipped) or (isinstance(item, keras_types) and item is not callback):
                continue
            if detects(item):
                return True
            hooks = _hooks(item) if isinstance(item, keras.callbacks.Callback) else []
            for part in [*(part for _, part in children(item)), *hooks]:
                if id(part) not in visited:
                    visited.add(id(part))
                    next_level.append(part)
        if len(visited) > _MAX_OBJECTS:
            return True
        level = next_level
    return False


def _hooks(callback: keras.callbacks.Callback) -> list[types.FunctionType]:
    """Return the functions of a callback's classes, without those of Keras."""
    classes = [base for base in type(callback).__mro__ if not base.__module__.startswith("keras.")]
    return [value for base in classes for value in vars(base).values() if isinstance(value, types.FunctionType)]
