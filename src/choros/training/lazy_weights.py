"""Weights that are fetched when a callback first touches them, and not before.

While callbacks run, the model, its layers, its variables and the optimizer's have a class of their own, a subclass
that differs in one thing: the first access to anything but a few names that need no weights restores all classes and
fetches the weights, and then goes on as always. The objects stay the same, so it makes no difference by which
reference a callback reaches them. What goes past these objects cannot be seen so: see ``holds_tensors``.
"""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import repeat
from typing import Any

import numpy as np

from choros.backends.optimizers import model_variables
from choros.object_graph import children
from choros.types import Array

# Attributes that need no weights.
_OF_MODELS = frozenset({"stop_training", "optimizer", "name", "history", "compiled", "built", "metrics_names"})
_OF_LAYERS = frozenset({"name", "built", "trainable"})
_OF_VARIABLES = frozenset({"name", "path", "shape", "dtype", "trainable", "ndim"})
_PLAIN = frozenset(  # special methods that say nothing of weights
    {"__new__", "__init__", "__init_subclass__", "__subclasshook__", "__class_getitem__", "__getattribute__"}
    | {"__getattr__", "__setattr__", "__delattr__", "__del__", "__hash__", "__class__"}
)
_DEPTH, _MOST = 5, 20_000  # how far, and through how many objects, ``holds_tensors`` looks


class LazyWeights:
    """The weights of one model while callbacks run.

    Args:
        model: keras.Model, built and compiled.
        touch: is called once in each ``armed`` block in which weights are touched, before they are.

    Attributes:
        stays: bool. Whether the classes stay from one ``armed`` block to the next one: nothing else uses the model
            meanwhile. What does so all the same restores them, and fetches nothing. Defaults to False.
        rate: the variable of the optimizer's learning rate; None where it has a schedule.
        rate_used: bool. Whether the last ``armed`` block used that variable, and so may have changed it.

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

    def __init__(self, model: Any, touch: Callable[[], None]) -> None:
        self.model, self.touch = model, touch
        self._armed = self._inside = self.passing = self.rate_used = self.stays = False
        self.rate: Any = None
        self._rate_value: Any = None  # the backend's array that was read last
        self._rate_array: Any = None  # its copy on the host
        self._classes: dict[type, type] = {}
        self._objects: list[Any] = []
        self._own: list[type] = []  # of each object
        self._lazy: list[type] = []  # the subclass that it has while callbacks run

    @contextmanager
    def armed(self) -> Iterator[None]:
        """Have the first access to weights in this block call ``touch``."""
        self.arm()
        try:
            yield
        finally:
            self.rest()

    def arm(self) -> None:
        """Have the first access to weights from now on call ``touch``."""
        if not self._objects:
            self.collect()
        if not self._armed:
            self._set_classes(self._lazy)
        self._armed = self._inside = True
        self.rate_used = False

    def rest(self) -> None:
        """End what ``arm`` began."""
        self._inside = False
        if not self.stays:
            self.disarm()

    def disarm(self) -> None:
        """Restore all classes."""
        if self._armed:
            self._armed = False
            self._set_classes(self._own)

    @property
    def watches_rate(self) -> bool:
        """True if the optimizer's learning rate is the watched variable; False after a callback has replaced it."""
        optimizer = vars(self._attributes()["optimizer"])
        own = vars(optimizer["inner_optimizer"]) if "inner_optimizer" in optimizer else optimizer
        return self.rate is not None and own.get("_learning_rate") is self.rate

    @property
    def stopped(self) -> bool:
        """The model's ``stop_training``, read without the lazy class, which would cost time after each batch."""
        return bool(self._attributes()["stop_training"])

    def _attributes(self) -> dict[str, Any]:
        """Return the model's own attributes; the look at them is no touch."""
        attributes: dict[str, Any] = object.__getattribute__(self.model, "__dict__")
        return attributes

    def _set_classes(self, classes: list[type]) -> None:
        """Give each object its class; without a loop in Python, as it is done twice a batch."""
        deque(map(object.__setattr__, self._objects, repeat("__class__"), classes), maxlen=0)

    def spring(self) -> None:
        """Restore all classes and fetch, the latter in an ``armed`` block; nothing where another access did so."""
        if self._armed:
            self.disarm()
            if self._inside:
                self.touch()

    def collect(self) -> None:
        """Find the objects whose use tells that weights are touched, once more where callbacks may have added some."""
        import keras

        self.disarm()
        variables = [*model_variables(self.model), *self.model.metrics_variables]
        rate = self.model.optimizer.learning_rate  # the caller's value; a change of it is sent to the workers
        layers = [layer for layer in self.model._flatten_layers() if layer is not self.model]
        groups = (
            ([self.model], _OF_MODELS),
            (layers, _OF_LAYERS),
            ([variable for variable in variables if variable is not rate], _OF_VARIABLES),
        )
        unique = {id(each): (each, names) for objects, names in groups for each in objects}
        self._objects = [each for each, _ in unique.values()]
        self._own = [type(each) for each in self._objects]
        self._lazy = [self._class_of(type(each), names) for each, names in unique.values()]
        self.rate = rate if isinstance(rate, keras.Variable) else None
        if self.rate is not None:
            self._objects.append(rate)
            self._own.append(type(rate))
            self._lazy.append(self._watched_class(type(rate)))

    def _watched_class(self, own: type) -> type:
        """Return the subclass of the learning rate's class that notes each use, and needs no weights."""
        import keras

        lazy: LazyWeights = self
        plainly: Any = own.__getattribute__
        set_plainly: Any = own.__setattr__

        def __getattribute__(self: Any, name: str) -> Any:
            if name == "__class__":
                return own
            lazy.rate_used = lazy.rate_used or name not in _OF_VARIABLES
            return plainly(self, name)

        def __setattr__(self: Any, name: str, value: Any) -> None:
            lazy.rate_used = True
            set_plainly(self, name, value)

        def __array__(self: Any, dtype: Any = None) -> Array:
            lazy.rate_used = True
            value = vars(self)["_value"]
            if value is not lazy._rate_value:
                lazy._rate_value, lazy._rate_array = value, np.array(value)
            return np.array(lazy._rate_array, dtype=dtype)

        body = {"__getattribute__": __getattribute__, "__setattr__": __setattr__, "__module__": own.__module__}
        if keras.backend.backend() == "jax":  # whose arrays are immutable: loggers read the rate after each batch
            body["__array__"] = __array__
        return types.new_class(own.__name__, (own,), exec_body=lambda room: room.update(body))

    def _class_of(self, own: type, names: frozenset[str]) -> type:
        if own not in self._classes:
            self._classes[own] = self._make(own, names)
        return self._classes[own]

    def _make(self, own: type, names: frozenset[str]) -> type:
        """Make the subclass of a class whose use calls ``touch``."""
        lazy: LazyWeights = self
        plainly: Any = own.__getattribute__

        def __getattribute__(self: Any, name: str) -> Any:
            if name == "__class__":
                return own
            if name == "jax_state_sync":  # Keras' ``Callback.model`` calls it; no loop of Keras' has this model's state
                return lambda: None
            if lazy.passing or name in names:
                before, lazy.passing = lazy.passing, True
                try:
                    return plainly(self, name)
                finally:
                    lazy.passing = before
            lazy.spring()
            return getattr(self, name)

        def __setattr__(self: Any, name: str, value: Any) -> None:
            if name == "stop_training":
                object.__getattribute__(self, "__dict__")[name] = value
                return
            lazy.spring()
            setattr(self, name, value)

        def __delattr__(self: Any, name: str) -> None:
            lazy.spring()
            delattr(self, name)

        body: dict[str, Any] = {
            "__getattribute__": __getattribute__,
            "__setattr__": __setattr__,
            "__delattr__": __delattr__,
            "__module__": own.__module__,
            "__qualname__": own.__qualname__,
        }
        for name in dir(own):
            if not (name.startswith("__") and name.endswith("__")) or name in _PLAIN:
                continue
            plain = next(vars(base)[name] for base in own.__mro__ if name in vars(base))
            # The interpreter looks special methods up on the class, and so past ``__getattribute__``.
            if isinstance(plain, types.FunctionType) or name in ("__repr__", "__reduce_ex__", "__reduce__"):
                body[name] = self._forward(own, name)
        return types.new_class(own.__name__, (own,), exec_body=lambda room: room.update(body))

    def _forward(self, own: type, name: str) -> Callable[..., Any]:
        """Return a special method that fetches, and then is what it was."""

        def method(this: Any, *args: Any, **how: Any) -> Any:
            if not self.passing:
                self.spring()
            return getattr(own, name)(this, *args, **how)

        return method


def holds_tensors(callback: Any, model: Any) -> bool:
    """Tell whether a callback may reach weights past the model's own objects.

    PyTorch's parameters and TensorFlow's variables can be kept, and TensorFlow's functions keep those that they use: a
    callback that holds one, in its attributes, in what its functions close over or in globals that they name, has the
    weights fetched at every batch. JAX's arrays are values, which never change.

    Args:
        callback: keras.callbacks.Callback.
        model: keras.Model, whose weights they are.
    """
    import keras

    if keras.backend.backend() == "torch":
        from choros.backends.torch import weights_detector
    elif keras.backend.backend() == "tensorflow":
        from choros.backends.tensorflow import weights_detector
    else:
        return False
    holds = weights_detector(model)

    known = (keras.Layer, keras.Variable, keras.Optimizer, keras.Loss)
    skipped = (str, bytes, int, float, complex, bool, type(None), type, types.ModuleType)
    level, seen = [callback], {id(callback)}
    for _ in range(_DEPTH):
        further = []
        for each in level:
            if isinstance(each, skipped) or (isinstance(each, known) and each is not callback):
                continue
            if holds(each):
                return True
            hooks = _hooks(each) if isinstance(each, keras.callbacks.Callback) else []
            for part in [*(part for _, part in children(each)), *hooks]:
                if id(part) not in seen:
                    seen.add(id(part))
                    further.append(part)
        if len(seen) > _MOST:
            return True
        level = further
    return False


def _hooks(callback: Any) -> list[types.FunctionType]:
    """Return the functions of a callback's classes, but for those of Keras."""
    classes = [base for base in type(callback).__mro__ if not base.__module__.startswith("keras.")]
    return [value for base in classes for value in vars(base).values() if isinstance(value, types.FunctionType)]
