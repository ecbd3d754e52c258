"""Fingerprint of a model before training: its layers' classes and settings, without random values."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
import re
import types
import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from choros.backends.hide_tensorflow import lean

if TYPE_CHECKING:
    import keras

_VARYING_SETTINGS = (
    "seed",
    "module",
    "registered_name",
    "shared_object_id",
    "build_config",
)  # differ between processes or directories
_SKIPPED_SETTINGS = ("name", "inner_optimizer")
_MAX_VALUE_TEXT = 200  # characters of a value in an error message
LayerSettings = list[Any]
Json = Any  # None, a number or text, or lists and dicts of them


def alike(name: str) -> str:
    """Return a name without the numbers of Keras, which are higher on a rank that has made another model before.

    Example:
        >>> alike("sequential_25/batch_normalization_1"), alike("resnet50")
        ('sequential/batch_normalization', 'resnet50')
    """
    return re.sub(r"_\d+(?=/|$)", "", name)


def layers_of(model: keras.Model) -> list[LayerSettings]:
    """Return class and settings of a model and of each of its layers, as plain JSON, the model first.

    The same code gives the same result in every process: names that Keras draws and seeds are left out. A part without
    ``get_config`` is represented by its class, its parts, and its attributes with the names of its arguments.

    Args:
        model: keras.Model.
    """
    layers: list[LayerSettings] = []
    seen: set[int] = set()

    def add_layer(part: keras.Layer, extra: dict[str, Any]) -> None:
        if id(part) in seen:
            return
        seen.add(id(part))
        values = {"trainable": part.trainable} if _is_composed(part) else settings(part)
        layers.append([type(part).__name__, values | extra])
        for child, inputs in _child_layers(part):
            add_layer(child, inputs)

    add_layer(model, {})
    plain: list[LayerSettings] = json.loads(json.dumps(layers))
    return plain


def digest_of(layers: list[LayerSettings]) -> str:
    """Return a digest of a result of ``layers_of``."""
    return hashlib.blake2b(json.dumps(layers, sort_keys=True).encode(), digest_size=8).hexdigest()


def first_difference(layers: Sequence[LayerSettings], other_layers: Sequence[LayerSettings]) -> str:
    """Return a description of the first difference of two results of ``layers_of``, or "".

    Only settings in both results are compared: another version of Keras may have more settings.

    Example:
        >>> first_difference([["Net", {}], ["Dense", {"units": 3}]], [["Net", {}], ["Dense", {"units": 4}]])
        'layer 1 (Dense): units 3 and 4'
    """
    for number, ((layer_class, values), (other_class, other_values)) in enumerate(
        zip(layers, other_layers, strict=False)
    ):
        where = f"layer {number}" if number else "model"
        if layer_class != other_class:
            return f"{where}: {layer_class} and {other_class}"
        for name in [name for name in values if name in other_values]:
            if values[name] != other_values[name]:
                return f"{where} ({layer_class}): {name} {short(values[name])} and {short(other_values[name])}"
    return "" if len(layers) == len(other_layers) else f"{len(layers) - 1} and {len(other_layers) - 1} layers"


def short(value: object) -> str:
    """Return the representation of a value, shortened for an error message."""
    text = repr(value)
    return text if len(text) <= _MAX_VALUE_TEXT else text[:_MAX_VALUE_TEXT] + "..."


def settings(part: Any) -> dict[str, Any]:
    """Return the settings of a Keras object as plain JSON.

    If its ``get_config`` raises, its attributes with the names of its arguments are used.
    """
    try:
        with lean(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Keras warns of a lambda, as if it were to be saved
            config = dict(part.get_config())
    except Exception:  # whatever a user's own get_config raises
        config = _argument_attributes(part)
    plain = {}
    for name, value in config.items():
        if name not in (*_VARYING_SETTINGS, *_SKIPPED_SETTINGS):
            attribute = getattr(part, name, None)
            plain[name] = _plain(attribute if _is_lambda(attribute) else value)
    return plain


def _argument_attributes(part: object) -> dict[str, Any]:
    """Return the attributes that an object has under the names of its arguments: numbers, texts, arrays, functions."""
    kinds = (str, bool, int, float, list, tuple, dict, np.generic, np.ndarray, types.FunctionType)
    with contextlib.suppress(TypeError, ValueError):
        names = inspect.signature(type(part).__init__).parameters
        return {name: value for name, value in vars(part).items() if name in names and isinstance(value, kinds)}
    return {}


def named(part: object) -> Json:
    """Return a loss, a metric or a structure of them as plain JSON that a reader recognises."""
    if part is None or isinstance(part, str | bool | int | float):
        return part
    if isinstance(part, dict):
        return {str(name): named(item) for name, item in part.items()}
    if isinstance(part, list | tuple):
        return [named(item) for item in part]
    if hasattr(part, "get_config"):
        return f"{type(part).__name__}({', '.join(f'{name}={value}' for name, value in settings(part).items())})"
    return _plain(part)


def _is_composed(part: keras.Layer) -> bool:
    """Return whether an object's parts, which have their own settings, describe it completely."""
    import keras

    return isinstance(part, keras.Sequential) or (isinstance(part, keras.Model) and hasattr(part, "operations"))


def _child_layers(part: keras.Layer) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield the parts of a model or layer, each with the inputs of its calls if they are known."""
    import keras

    if isinstance(part, keras.Sequential):
        yield from ((layer, {}) for layer in part.layers)
    elif _is_composed(part):
        places = {id(operation): place for place, operation in enumerate(part.operations)}
        for operation in part.operations:
            if not isinstance(operation, keras.layers.InputLayer):
                yield operation, {"applied to": _call_inputs(operation, places)}
    elif not type(part).__module__.startswith("keras.") and hasattr(part, "_flatten_layers"):
        yield from ((layer, {}) for layer in part._flatten_layers(include_self=False, recursive=False))


def _call_inputs(operation: keras.Operation, places: dict[int, int]) -> list[Any]:
    """Return, for each call of an operation in a functional model, its arguments and the origins of its tensors."""
    calls = []
    for node in operation._inbound_nodes:
        origins = [tensor._keras_history for tensor in node.arguments.keras_tensors]
        if origins and all(id(origin.operation) in places for origin in origins):
            arguments = (node.arguments.args, node.arguments.kwargs)
            calls.append(
                [_plain(arguments), [[places[id(origin.operation)], origin.tensor_index] for origin in origins]]
            )
    return calls


def _is_lambda(value: object) -> bool:
    return isinstance(value, types.FunctionType) and value.__name__ == "<lambda>"


def _plain(value: Any) -> Json:
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, dict):
        if value.get("class_name") == "__lambda__" or list(value) == ["value"]:
            return "lambda"  # as Keras writes one, whose bytes hold the path of its file
        items = {str(name): item for name, item in value.items() if name not in _VARYING_SETTINGS}
        return {
            name: alike(item) if name == "name" and isinstance(item, str) else _plain(item)
            for name, item in items.items()
        }
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted((_plain(item) for item in value), key=json.dumps)
    if isinstance(value, np.ndarray):
        return [list(value.shape), hashlib.blake2b(value.tobytes(), digest_size=8).hexdigest()]
    if _is_lambda(value):
        return _code(value)
    return getattr(value, "__name__", type(value).__name__)


def _code(function: types.FunctionType) -> str:
    """Return a digest of a function's instructions, independent of the path of its file."""
    instructions = json.dumps(_instructions(function.__code__))
    return f"lambda {hashlib.blake2b(instructions.encode(), digest_size=4).hexdigest()}"


def _instructions(part: object) -> object:
    if isinstance(part, types.CodeType):
        return [part.co_code.hex(), part.co_names, [_instructions(constant) for constant in part.co_consts]]
    if isinstance(part, tuple):
        return [_instructions(constant) for constant in part]
    return sorted(map(repr, part)) if isinstance(part, frozenset) else repr(part)
