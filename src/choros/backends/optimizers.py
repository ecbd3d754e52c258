"""Held optimizers: the optimizers of a model besides the compiled one, such as in a GAN; and their variables."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, NoReturn

import keras

from choros.backends.host_values import to_host
from choros.errors import InvalidInputError, brief

_ADVICE = "Build it before fit, with the variables that it trains: model.{name}.build(variables)."


def held_optimizers(model: keras.Model) -> dict[str, Any]:
    """Return the optimizers besides the compiled one, by their names such as ``g_optimizer`` or ``optimizers[1]``.

    The attributes of the model and of user-defined layers are searched, with their lists, tuples and dicts. An
    optimizer inside another one is not listed.

    Args:
        model: a compiled model.
    """
    compiled = model.optimizer
    seen = {id(compiled), id(getattr(compiled, "inner_optimizer", compiled))}
    optimizers: dict[str, Any] = {}
    for layer in model._flatten_layers():
        if layer is not model and type(layer).__module__.partition(".")[0] == "keras":
            continue
        for name, value in list(vars(layer).items()):
            if name.startswith("_self_"):  # attributes in which TensorFlow tracks objects
                continue
            for path, optimizer in _optimizers(value, name if layer is model else f"{layer.name}.{name}", seen):
                seen.add(id(getattr(optimizer, "inner_optimizer", optimizer)))
                optimizers[path] = optimizer
    inner = {id(getattr(optimizer, "inner_optimizer", None)) for optimizer in optimizers.values()}
    return {path: optimizer for path, optimizer in optimizers.items() if id(optimizer) not in inner}


def _optimizers(value: object, path: str, seen: set[int]) -> Iterator[tuple[str, Any]]:
    if isinstance(value, keras.optimizers.Optimizer):
        if id(value) not in seen:
            seen.add(id(value))
            yield path, value
    elif isinstance(value, (dict, list, tuple)) and id(value) not in seen:
        seen.add(id(value))
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in list(items):
            yield from _optimizers(item, f"{path}[{key!r}]", seen)


def held_variables(model: keras.Model) -> list[Any]:
    """Return the variables of the built held optimizers, without duplicates."""
    variables = (v for optimizer in held_optimizers(model).values() if optimizer.built for v in optimizer.variables)
    return list({id(variable): variable for variable in variables}.values())


def optimizer_variables(model: keras.Model) -> list[Any]:
    """Return ``optimizer.variables``, then the variables of the held optimizers, without duplicates."""
    variables = [*model.optimizer.variables, *held_variables(model)]
    return list({id(variable): variable for variable in variables}.values())


def model_variables(model: keras.Model) -> list[Any]:
    """Return ``model.variables``, then the other variables of its optimizers. This is the order of ``snapshot``."""
    variables = [*model.variables, *optimizer_variables(model)]
    return list({id(variable): variable for variable in variables}.values())


def learning_rates(model: keras.Model) -> list[Any]:
    """Return the learning rates of built held optimizers, if they are variables."""
    rates = [
        getattr(
            getattr(optimizer, "inner_optimizer", optimizer), "learning_rate", None
        )  # a MultiOptimizer has no learning rate
        for optimizer in held_optimizers(model).values()
        if optimizer.built
    ]
    return [rate for rate in rates if isinstance(rate, keras.Variable)]


def build_held(model: keras.Model, data: object) -> None:
    """Build the held optimizers that are not built yet, for the variables that a ``train_step`` passes to them.

    The step runs once on the data, with optimizers that do not update. Other changes of the step are undone. On JAX
    this function does nothing: there an optimizer that is not built cannot take a step, also in plain Keras.

    Args:
        model: compiled and built.
        data: a batch as ``fit`` passes it, of numpy arrays or tensors.

    Raises:
        InvalidInputError: the step fails. The message contains the name of the optimizer.
    """
    unbuilt = [path for path, optimizer in held_optimizers(model).items() if not optimizer.built]
    if not unbuilt or keras.backend.backend() == "jax":
        return
    variables = model_variables(model)
    before = to_host(variables)
    optimizers = [model.optimizer, *held_optimizers(model).values()]
    try:
        with ExitStack() as stack:
            stack.enter_context(_eagerly())
            for optimizer in optimizers:
                stack.enter_context(_replaced(optimizer, "apply", _building(optimizer)))
            model.train_step(keras.tree.map_structure(_tensor, data))
    except Exception as error:
        raise InvalidInputError(
            f"Model {model.name!r} holds an optimizer, {unbuilt[0]!r}, that is not built, and the trial of a step that "
            f"would build it failed: {brief(error)}. {_ADVICE.format(name=unbuilt[0])}"
        ) from error
    finally:
        for variable, value in zip(variables, before, strict=True):
            variable.assign(value)


@contextmanager
def unbuilt_refused(model: keras.Model) -> Iterator[None]:
    """Temporarily refuse to build held optimizers: their variables would be missing in checkpoints and results."""
    with ExitStack() as stack:
        for path, optimizer in held_optimizers(model).items():
            if not optimizer.built:
                stack.enter_context(_replaced(optimizer, "build", _refusal(model.name, path)))
        yield


def _refusal(model: str, path: str) -> Callable[..., NoReturn]:
    def build(*arguments: object) -> NoReturn:
        raise InvalidInputError(
            f"Model {model!r} uses its optimizer {path!r} for the first time in the middle of training, and it is "
            f"not built yet: its variables would be lost. {_ADVICE.format(name=path)}"
        )

    return build


def _building(optimizer: keras.optimizers.Optimizer) -> Callable[..., None]:
    def apply(grads: Any, trainable_variables: Any = None) -> None:
        if not optimizer.built:
            with keras.name_scope(optimizer.name):
                optimizer.build(list(trainable_variables))

    return apply


@contextmanager
def _replaced(container: object, name: str, value: object) -> Iterator[None]:
    """Temporarily replace an attribute in the ``__dict__`` of an object."""
    attributes = vars(container)
    before = [attributes[name]] if name in attributes else []
    attributes[name] = value
    try:
        yield
    finally:
        attributes.pop(name, None)
        for item in before:
            attributes[name] = item


def _eagerly() -> AbstractContextManager[None]:
    """Temporarily run compiled functions eagerly, so that no trace keeps the optimizers of the trial."""
    manager: AbstractContextManager[None]
    if keras.backend.backend() == "tensorflow":
        from choros.backends import tensorflow

        manager = tensorflow.eagerly()
    else:
        from choros.backends import torch

        manager = torch.eagerly()
    return manager


def _tensor(array: Any) -> Any:
    if array is None or keras.ops.is_tensor(array):
        return array
    wide = array.dtype.kind == "f" and array.dtype.itemsize > 2
    return keras.ops.convert_to_tensor(array.astype(keras.config.floatx()) if wide else array)
