"""The differences of two models before they train: their layers' classes and settings, without what is drawn."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
import re
import types
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from choros.backends.hide_tensorflow import lean

_DRAWN = ("seed", "module", "registered_name", "shared_object_id", "build_config")  # by each process, or where it ran
_NOT_OWN = ("name", "inner_optimizer")
_LONG = 200  # letters of what one rank was told, in an error
Told = list[Any]


def alike(name: str) -> str:
    """A name without the numbers that Keras gives: a rank that has made another model before has higher ones.

    Example:
        >>> alike("sequential_25/batch_normalization_1"), alike("resnet50")
        ('sequential/batch_normalization', 'resnet50')
    """
    return re.sub(r"_\d+(?=/|$)", "", name)


def layers_of(model: Any) -> list[Told]:
    """Return class and settings of a model and of each of its layers, as plain JSON, the model first.

    Of the same code it is the same in every process: names that Keras draws and seeds are left out. A part without a
    ``get_config`` is its class, what it holds, and its attributes with the names of its arguments.

    Args:
        model: keras.Model.
    """
    found: list[Told] = []
    seen: set[int] = set()

    def visit(thing: Any, more: dict[str, Any]) -> None:
        if id(thing) in seen:
            return
        seen.add(id(thing))
        own = {"trainable": thing.trainable} if _is_composed(thing) else settings(thing)
        found.append([type(thing).__name__, own | more])
        for child, inputs in _inside(thing):
            visit(child, inputs)

    visit(model, {})
    plain: list[Told] = json.loads(json.dumps(found))
    return plain


def digest_of(layers: list[Told]) -> str:
    """Return what tells two results of ``layers_of`` apart."""
    return hashlib.blake2b(json.dumps(layers, sort_keys=True).encode(), digest_size=8).hexdigest()


def first_difference(mine: Sequence[Told], others: Sequence[Told]) -> str:
    """Say where two results of ``layers_of`` begin to differ, and by what; "" where they do not.

    Settings are compared that both tell: another version of Keras may know more of them.

    Example:
        >>> first_difference([["Net", {}], ["Dense", {"units": 3}]], [["Net", {}], ["Dense", {"units": 4}]])
        'layer 1 (Dense): units 3 and 4'
    """
    for number, ((kind, own), (theirs, its)) in enumerate(zip(mine, others, strict=False)):
        where = f"layer {number}" if number else "model"
        if kind != theirs:
            return f"{where}: {kind} and {theirs}"
        for name in [name for name in own if name in its]:
            if own[name] != its[name]:
                return f"{where} ({kind}): {name} {short(own[name])} and {short(its[name])}"
    return "" if len(mine) == len(others) else f"{len(mine) - 1} and {len(others) - 1} layers"


def short(told: Any) -> str:
    """Return what one rank was told, of a length for an error."""
    text = repr(told)
    return text if len(text) <= _LONG else text[:_LONG] + "..."


def settings(thing: Any) -> dict[str, Any]:
    """Return what an object of Keras was made with, as what JSON can hold.

    Where its ``get_config`` raises, what it holds under the names of its arguments is compared instead.
    """
    try:
        with lean(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Keras warns of a lambda, as if it were to be saved
            config = dict(thing.get_config())
    except Exception:  # whatever a user's own get_config raises
        config = _given(thing)
    found = {}
    for name, value in config.items():
        if name not in (*_DRAWN, *_NOT_OWN):
            own = getattr(thing, name, None)
            found[name] = _plain(own if _is_lambda(own) else value)
    return found


def _given(thing: Any) -> dict[str, Any]:
    """Return the attributes that an object has under the names of its arguments: numbers, texts, arrays, functions."""
    kinds = (str, bool, int, float, list, tuple, dict, np.generic, np.ndarray, types.FunctionType)
    with contextlib.suppress(TypeError, ValueError):
        names = inspect.signature(type(thing).__init__).parameters
        return {name: value for name, value in vars(thing).items() if name in names and isinstance(value, kinds)}
    return {}


def named(part: Any) -> Any:
    """Return a loss, a metric or a structure of them as plain JSON that a reader recognises."""
    if part is None or isinstance(part, str | bool | int | float):
        return part
    if isinstance(part, dict):
        return {str(name): named(each) for name, each in part.items()}
    if isinstance(part, list | tuple):
        return [named(each) for each in part]
    if hasattr(part, "get_config"):
        return f"{type(part).__name__}({', '.join(f'{name}={value}' for name, value in settings(part).items())})"
    return _plain(part)


def _is_composed(thing: Any) -> bool:
    """Return whether an object is described completely by its parts, which have settings of their own."""
    import keras

    return isinstance(thing, keras.Sequential) or (isinstance(thing, keras.Model) and hasattr(thing, "operations"))


def _inside(thing: Any) -> Iterator[tuple[Any, dict[str, Any]]]:
    """The parts of a model or layer, each with what it is applied to where that is known."""
    import keras

    if isinstance(thing, keras.Sequential):
        yield from ((layer, {}) for layer in thing.layers)
    elif _is_composed(thing):
        places = {id(operation): place for place, operation in enumerate(thing.operations)}
        for operation in thing.operations:
            if not isinstance(operation, keras.layers.InputLayer):
                yield operation, {"applied to": _applied(operation, places)}
    elif not type(thing).__module__.startswith("keras.") and hasattr(thing, "_flatten_layers"):
        yield from ((layer, {}) for layer in thing._flatten_layers(include_self=False, recursive=False))


def _applied(operation: Any, places: dict[int, int]) -> list[Any]:
    """For each call of an operation in a functional model: its other arguments, and what its tensors come from."""
    calls = []
    for node in operation._inbound_nodes:
        origins = [tensor._keras_history for tensor in node.arguments.keras_tensors]
        if origins and all(id(origin.operation) in places for origin in origins):
            given = (node.arguments.args, node.arguments.kwargs)
            calls.append([_plain(given), [[places[id(one.operation)], one.tensor_index] for one in origins]])
    return calls


def _is_lambda(value: Any) -> bool:
    return isinstance(value, types.FunctionType) and value.__name__ == "<lambda>"


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, dict):
        if value.get("class_name") == "__lambda__" or list(value) == ["value"]:
            return "lambda"  # as Keras writes one, whose bytes hold the path of its file
        kept = {str(name): each for name, each in value.items() if name not in _DRAWN}
        return {
            name: alike(each) if name == "name" and isinstance(each, str) else _plain(each)
            for name, each in kept.items()
        }
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, set | frozenset):
        return sorted((_plain(each) for each in value), key=json.dumps)
    if isinstance(value, np.ndarray):
        return [list(value.shape), hashlib.blake2b(value.tobytes(), digest_size=8).hexdigest()]
    if _is_lambda(value):
        return _code(value)
    return getattr(value, "__name__", type(value).__name__)


def _code(function: Any) -> str:
    """A digest of what a function does, which does not depend on where its file lies."""
    told = json.dumps(_instructions(function.__code__))
    return f"lambda {hashlib.blake2b(told.encode(), digest_size=4).hexdigest()}"


def _instructions(part: Any) -> Any:
    if isinstance(part, types.CodeType):
        return [part.co_code.hex(), part.co_names, [_instructions(each) for each in part.co_consts]]
    if isinstance(part, tuple):
        return [_instructions(each) for each in part]
    return sorted(map(repr, part)) if isinstance(part, frozenset) else repr(part)
