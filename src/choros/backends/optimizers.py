"""The optimizers that a model holds besides the compiled one, as a GAN does: where they are, and their variables."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, NoReturn

import keras

from choros.errors import InvalidInputError, brief

_ADVICE = "Build it before fit, with the variables that it trains: model.{name}.build(variables)."


def held_optimizers(model: Any) -> dict[str, Any]:
    """Return the optimizers besides the compiled one, by where they are, as ``g_optimizer`` or ``optimizers[1]``.

    They are attributes of the model or of a layer of the user's own, or in lists and dictionaries there. An optimizer
    inside another one is not listed.

    Args:
        model: compiled.
    """
    compiled = model.optimizer
    seen = {id(compiled), id(getattr(compiled, "inner_optimizer", compiled))}
    found: dict[str, Any] = {}
    for layer in model._flatten_layers():
        if layer is not model and type(layer).__module__.partition(".")[0] == "keras":
            continue
        for name, value in list(vars(layer).items()):
            if name.startswith("_self_"):  # TensorFlow's own list of what it tracks
                continue
            for place, optimizer in _optimizers(value, name if layer is model else f"{layer.name}.{name}", seen):
                seen.add(id(getattr(optimizer, "inner_optimizer", optimizer)))
                found[place] = optimizer
    inner = {id(getattr(each, "inner_optimizer", None)) for each in found.values()}
    return {place: each for place, each in found.items() if id(each) not in inner}


def _optimizers(value: Any, place: str, seen: set[int]) -> Iterator[tuple[str, Any]]:
    if isinstance(value, keras.optimizers.Optimizer):
        if id(value) not in seen:
            seen.add(id(value))
            yield place, value
    elif isinstance(value, (dict, list, tuple)) and id(value) not in seen:
        seen.add(id(value))
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, each in list(items):
            yield from _optimizers(each, f"{place}[{key!r}]", seen)


def held_variables(model: Any) -> list[Any]:
    """Return the variables of the held optimizers that are built, each once."""
    variables = (v for each in held_optimizers(model).values() if each.built for v in each.variables)
    return list({id(variable): variable for variable in variables}.values())


def optimizer_variables(model: Any) -> list[Any]:
    """Return ``optimizer.variables``, then those of the other optimizers that the model holds."""
    variables = [*model.optimizer.variables, *held_variables(model)]
    return list({id(variable): variable for variable in variables}.values())


def model_variables(model: Any) -> list[Any]:
    """Return ``model.variables``, then those of its optimizers that are not among them: the order of ``snapshot``."""
    variables = [*model.variables, *optimizer_variables(model)]
    return list({id(variable): variable for variable in variables}.values())


def learning_rates(model: Any) -> list[Any]:
    """Return the learning rates of the held, built optimizers that are variables."""
    rates = [
        getattr(getattr(each, "inner_optimizer", each), "learning_rate", None)  # a MultiOptimizer has none
        for each in held_optimizers(model).values()
        if each.built
    ]
    return [rate for rate in rates if isinstance(rate, keras.Variable)]


def build_held(model: Any, data: Any) -> None:
    """Build the held optimizers that are not built yet, for the variables that a ``train_step`` gives to them.

    The step is tried on the data, with optimizers that update nothing. What else it changes is put back. On JAX an
    optimizer that is not built cannot take a step, in plain Keras either; it is left as it is.

    Args:
        model: compiled and built.
        data: a batch as ``fit`` passes it: numpy arrays or tensors.

    Raises:
        InvalidInputError: the step fails; with the name of the optimizer.
    """
    unbuilt = [place for place, each in held_optimizers(model).items() if not each.built]
    if not unbuilt or keras.backend.backend() == "jax":
        return
    variables = model_variables(model)
    before = [keras.ops.convert_to_numpy(variable).copy() for variable in variables]
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
def unbuilt_refused(model: Any) -> Iterator[None]:
    """For a while, refuse by name to build held optimizers: their variables would be in no checkpoint or result."""
    with ExitStack() as stack:
        for place, optimizer in held_optimizers(model).items():
            if not optimizer.built:
                stack.enter_context(_replaced(optimizer, "build", _refusal(model.name, place)))
        yield


def _refusal(model: str, place: str) -> Callable[..., NoReturn]:
    def build(*arguments: object) -> NoReturn:
        raise InvalidInputError(
            f"Model {model!r} uses its optimizer {place!r} for the first time in the middle of training, and it is "
            f"not built yet: its variables would be lost. {_ADVICE.format(name=place)}"
        )

    return build


def _building(optimizer: Any) -> Callable[..., None]:
    def apply(grads: Any, trainable_variables: Any = None) -> None:
        if not optimizer.built:
            with keras.name_scope(optimizer.name):
                optimizer.build(list(trainable_variables))

    return apply


@contextmanager
def _replaced(thing: Any, name: str, value: Any) -> Iterator[None]:
    """For a while, have another value as an object's own attribute."""
    mine = vars(thing)
    before = [mine[name]] if name in mine else []
    mine[name] = value
    try:
        yield
    finally:
        mine.pop(name, None)
        for each in before:
            mine[name] = each


def _eagerly() -> AbstractContextManager[None]:
    """Run compiled functions eagerly for a while, so that none keeps the trial's optimizers."""
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
