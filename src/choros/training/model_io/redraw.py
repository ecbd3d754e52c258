"""Untrained copies of a model: members of an ensemble each draw weights of their own."""

from __future__ import annotations

import io
import types
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from choros.errors import NotSerializable, brief
from choros.pickling import ModelPickler
from choros.training.lean import lean


@lean()
def redraw(model: Any) -> None:
    """Draw the trainable variables of a model anew, as its layers' initializers say, and forget optimizers' states.

    All other weights stay: frozen layers, moving statistics, what ``Normalization`` was adapted to.

    Args:
        model: keras.Model, compiled and built.

    Raises:
        NotSerializable: the model cannot be made from its configuration, so nothing knows how to draw its weights.
    """
    with custom_objects(model):
        fresh = _made_again(model)
        drawn = [np.array(variable) for variable in fresh.trainable_variables]
        shapes = [tuple(variable.shape) for variable in model.trainable_variables]
        if [array.shape for array in drawn] != shapes:
            raise _refusal(model, f"its get_config() makes {len(drawn)} trainable variables of other shapes")
        for variable, value in zip(model.trainable_variables, drawn, strict=True):
            variable.assign(value)
        _forget_slots(model.optimizer, model.trainable_variables)


def check_redraw(model: Any) -> None:
    """Refuse a model that has no configuration from which another one could draw its weights.

    Raises:
        NotSerializable: it has none.
    """
    try:
        with lean(), warnings.catch_warnings(action="ignore"):
            model.get_config()
    except Exception as error:  # whatever a user's own class raises
        raise _refusal(model, brief(error)) from error


def _made_again(model: Any) -> Any:
    try:
        fresh = type(model).from_config(model.get_config())
        build_config = model.get_build_config()
        if not fresh.built and build_config:
            fresh.build_from_config(build_config)
    except Exception as error:  # whatever a user's own class raises
        raise _refusal(model, brief(error)) from error
    return fresh


def _refusal(model: Any, reason: str) -> NotSerializable:
    return NotSerializable(
        f"Each member of an ensemble draws its weights anew, and the model {model.name!r} cannot be made again from "
        f"its configuration: {reason}. Give {type(model).__name__} and its layers a get_config() that says all that "
        "they are made from."
    )


def _forget_slots(optimizer: Any, trained: list[Any]) -> None:
    """Set an optimizer's variables to what they are before the first step."""
    fresh = type(optimizer).from_config(optimizer.get_config())
    fresh.build(trained)
    for variable, other in zip(optimizer.variables, fresh.variables, strict=True):
        variable.assign(other)


@contextmanager
def custom_objects(model: Any) -> Iterator[None]:
    """For a while, let Keras find the classes and functions of a model by names that no two of them share.

    Keras writes a lambda as bare code, which loses the names that it uses, and other functions by a name that several
    of them may have.
    """
    import keras

    collector = _Collector(io.BytesIO())
    collector.dump_all(model)
    functions = {function: function.__name__ for function in collector.functions}
    scope: dict[str, Any] = {}
    for index, (function, name) in enumerate(functions.items()):
        function.__name__ = f"{name.strip('<>')}_{index}"
        scope[function.__name__] = function
    for kind in collector.classes:
        if scope.setdefault(kind.__name__, kind) is not kind:
            raise _refusal(model, f"two of its classes are called {kind.__name__}")
        scope[keras.saving.get_registered_name(kind)] = kind
    try:
        with keras.saving.custom_object_scope(scope):
            yield
    finally:
        for function, name in functions.items():
            function.__name__ = name


class _Collector(ModelPickler):
    """Collect the classes and functions of an object that are not Keras' own."""

    def __init__(self, file: Any) -> None:
        super().__init__(file)
        self.functions: dict[Any, None] = {}
        self.classes: dict[type, None] = {}

    def reducer_override(self, thing: Any) -> Any:
        """Look at an object; it is written as ever."""
        if isinstance(thing, types.FunctionType) and not _is_of_keras(thing.__module__):
            self.functions[thing] = None
        kind = thing if isinstance(thing, type) else type(thing)
        if issubclass(kind, self.bases) and not _is_of_keras(kind.__module__):
            self.classes[kind] = None
        return super().reducer_override(thing)

    @property
    def bases(self) -> tuple[type, ...]:
        """The classes whose objects a configuration names."""
        import keras

        return (
            self.saveable,
            keras.regularizers.Regularizer,
            keras.constraints.Constraint,
            keras.initializers.Initializer,
            keras.optimizers.schedules.LearningRateSchedule,
        )


def _is_of_keras(module: Any) -> bool:
    return module == "keras" or str(module).startswith(("keras.", "keras_"))
