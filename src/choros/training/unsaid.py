"""What a model's ``.keras`` file does not say: attributes set after construction, losses without a configuration.

The file is read back where the model is, and whatever differs between the two travels beside it. So a worker trains
the model as it is, and what cannot be brought over is refused before any worker starts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from choros.errors import NotSerializable
from choros.training.objects import kinds, of_keras

_SIMPLE = (type(None), bool, int, float, complex, str, bytes, np.generic, np.dtype, enum.Enum, types.SimpleNamespace)
_FUNCTIONS = (types.FunctionType, types.MethodType)
_TRACKED = ("_self_", "_modules")  # where TensorFlow and PyTorch keep a second list of what a model has
_DECAY = "exclude_from_weight_decay"
_UNWRITTEN = {"_fn_kwargs"}  # arguments of Keras' own losses and metrics: Huber's get_config() leaves delta out
_MISSING = object()


class Unsaid(NamedTuple):
    """One difference: where it is, as steps from the model, and what the given model has there."""

    path: tuple[Any, ...]
    value: Any

    def __str__(self) -> str:
        """Return it as a person would write it."""
        return "model" + "".join(f"[{step!r}]" if isinstance(step, int) else f".{step}" for step in self.path)


def unsaid(model: Any, again: Any) -> list[Unsaid]:
    """Return what ``model`` has and ``again``, read back from its file, has not or has otherwise.

    Args:
        model: the model that was given.
        again: what its file makes.

    Raises:
        NotSerializable: a difference that cannot travel; the message says which and what to do.
    """
    found = list(_differences(model, again, (), set(), model))
    _check_weights(model, again)
    return found


def say(model: Any, said: list[Unsaid]) -> None:
    """Give a model that was read back what its file did not say."""
    for (*way, last), value in said:
        thing: Any = model
        for step in way:
            thing = thing[step] if isinstance(thing, (list, tuple, dict)) else _attributes(thing)[step]
        if last == _DECAY:
            thing.exclude_from_weight_decay(var_list=[model.trainable_variables[index] for index in value])
        else:
            setattr(thing, str(last), value)


def _differences(mine: Any, its: Any, path: tuple[Any, ...], seen: set[int], model: Any) -> Iterator[Unsaid]:
    """Walk two objects of Keras, and those that they hold, side by side."""
    import keras

    if id(mine) in seen:
        return
    seen.add(id(mine))
    theirs, kept = _attributes(its), _kept()
    names = _own_names(mine, theirs) - kept
    for name, value in _attributes(mine).items():
        there = theirs.get(name, _MISSING)
        if isinstance(value, _FUNCTIONS) and callable(getattr(type(mine), name, None)):
            if name not in kept and (there is _MISSING or mine is its):
                raise NotSerializable(
                    f"{Unsaid((*path, name), value)} was replaced on the object itself, which cannot travel to a "
                    f"worker: define {name} in a subclass of {type(mine).__name__}."
                )
        elif _plain(value):
            if name in names and not _same(value, there):
                yield Unsaid((*path, name), _bare(value))
        elif name in names and there is _MISSING and any(_kin(value, value)):
            raise NotSerializable(
                f"{Unsaid((*path, name), value)} was set on the object after it was made, and holds layers, metrics or "
                f"the like, which its file has not: make them in the __init__ of {type(mine).__name__}, or what "
                "compile is given in compile_from_config, from what get_compile_config gives."
            )
        elif not name.startswith(_TRACKED):
            for step, one, other in _kin(value, there):
                yield from _differences(one, other, (*path, name, *step), seen, model)
    if isinstance(mine, keras.optimizers.Optimizer) and mine.weight_decay is not None:
        undecayed = [i for i, weight in enumerate(model.trainable_variables) if not mine._use_weight_decay(weight)]
        if undecayed:
            yield Unsaid((*path, _DECAY), undecayed)


def _attributes(thing: Any) -> dict[str, Any]:
    return getattr(thing, "__dict__", {})


def _own_names(thing: Any, there: dict[str, Any]) -> frozenset[str]:
    """Return the attributes that are a user's own: new ones of any object, and of its classes those that Keras has not.

    Private ones count where the user's code has their names.
    """
    public = {name for name in vars(thing) if not name.startswith("_")}
    if of_keras(type(thing).__module__):
        return frozenset({*(public - there.keys()), *(_UNWRITTEN & vars(thing).keys())})
    used = {
        name
        for base in type(thing).__mro__
        if not of_keras(base.__module__)
        for function in vars(base).values()
        for name in _names_in(inspect.unwrap(getattr(function, "fget", None) or function))
    }
    return frozenset(public | used)


@functools.cache
def _kept() -> frozenset[str]:
    """Return the attributes that Keras itself keeps in a model's or a layer's own dictionary."""
    import keras

    by_fit = ("history", "optimizer", "stop_training", "stop_evaluating", "stop_predicting")
    return frozenset((*vars(keras.Model(name="bare")), *by_fit))


def _names_in(function: Any) -> Iterator[str]:
    codes = [getattr(function, "__code__", None)]
    while codes:
        code = codes.pop()
        if code is not None:
            yield from code.co_names
            codes += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]


def _kin(value: Any, there: Any, step: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any, Any]]:
    """Yield the pairs of Keras objects of one type in two attributes: the values, or what they are lists of."""
    import keras

    if isinstance(value, keras.initializers.Initializer):
        return  # it has done its work, with numbers of its own
    if isinstance(value, kinds()):
        if type(value) is type(there):
            yield step, value, there
    elif isinstance(value, (list, tuple)) and isinstance(there, (list, tuple)) and len(value) == len(there):
        for index, (mine, its) in enumerate(zip(value, there, strict=True)):
            yield from _kin(mine, its, (*step, index))
    elif isinstance(value, dict) and isinstance(there, dict) and value.keys() == there.keys():
        for name in value:
            yield from _kin(value[name], there[name], (*step, name))


def _plain(value: Any) -> bool:
    """Tell whether a value is data, or a function, and nothing that Keras keeps track of."""
    import keras

    if isinstance(value, (keras.Variable, keras.KerasTensor)):
        return False
    if isinstance(value, (*_SIMPLE, types.FunctionType)) or dataclasses.is_dataclass(value):
        return True
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(map(_plain, value))
    if isinstance(value, dict):
        return all(map(_plain, value)) and all(map(_plain, value.values()))
    return isinstance(value, np.ndarray) or bool(keras.ops.is_tensor(value))


def _bare(value: Any) -> Any:
    """Return a plain value without what Keras wraps around containers to keep track of them."""
    for kind in (list, set, dict):
        if isinstance(value, kind) and type(value) is not kind:
            value = kind(value)
    if isinstance(value, dict):
        return {key: _bare(inner) for key, inner in value.items()}
    return [_bare(inner) for inner in value] if isinstance(value, list) else value


def _cells(function: Any) -> list[Any]:
    """Return what a function has from where it was made; of what is no plain value, as a layer, the kind."""
    values = []
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # it is empty
            values.append(cell.cell_contents)
    return [value if _plain(value) else type(value) for value in values]


def _same(value: Any, there: Any) -> bool:
    """Tell whether two plain values are equal; functions are by what they do."""
    import keras

    if value is there:
        return True
    if isinstance(value, types.FunctionType) and isinstance(there, types.FunctionType):
        made = [(function.__code__, function.__defaults__) for function in (value, there)]
        return made[0] == made[1] and all(map(_same, _cells(value), _cells(there)))
    if isinstance(value, (list, tuple)) and isinstance(there, (list, tuple)):
        return len(value) == len(there) and all(map(_same, value, there))
    if isinstance(value, dict) and isinstance(there, dict):
        return value.keys() == there.keys() and all(_same(value[key], there[key]) for key in value)
    if isinstance(value, np.ndarray) or keras.ops.is_tensor(value):
        if not (isinstance(there, np.ndarray) or keras.ops.is_tensor(there)):
            return False
        one, other = keras.ops.convert_to_numpy(value), keras.ops.convert_to_numpy(there)
        return one.dtype == other.dtype and np.array_equal(one, other, equal_nan=one.dtype.kind in "fc")
    try:
        return bool(value == there) or bool(value != value and there != there)
    except Exception:
        return False


def _check_weights(model: Any, again: Any) -> None:
    """Refuse a model whose variables are not those that its file makes."""
    tell: list[tuple[str, Callable[[Any], Any]]] = [
        ("shape", lambda v: tuple(v.shape)),
        ("dtype", lambda v: str(v.dtype)),
        ("trainable", lambda v: v.trainable),
        ("regularizer", lambda v: type(v.regularizer).__name__),
        ("constraint", lambda v: type(v.constraint).__name__),
    ]
    for one, other in zip(model._flatten_layers(), again._flatten_layers(), strict=False):
        counts = [len(layer.variables) - len(layer.metrics_variables) for layer in (one, other)]
        if counts[0] != counts[1] and not one._layers:
            raise NotSerializable(
                f"The layer {one.name!r} of the model {model.name!r} has {counts[0]} variables, and read back from the "
                f"model's own file {counts[1]}: get_config() must say all that it is made from, and what it was made "
                "from must not be changed after it was built."
            )
    mine, its = list(model.weights), list(again.weights)
    if len(mine) != len(its):
        raise NotSerializable(
            f"The model {model.name!r} has {len(mine)} weights, and read back from its own file {len(its)}: "
            "get_config() must say all that its layers are made from."
        )
    for one, other in zip(mine, its, strict=True):
        for what, of in tell:
            if of(one) != of(other):
                raise NotSerializable(
                    f"The weight {one.path} of the model {model.name!r} has {what} {of(one)}, and read back from the "
                    f"model's own file {of(other)}: set it through its layer before the layer is built, or train what "
                    "keras.models.load_model makes of its file."
                )
