"""How a compiled model travels to a worker: as a ``.keras`` file, with its own classes beside it by value.

The file's bytes come from Keras itself. Classes and functions that are not Keras' own go by cloudpickle over the
parent's private pipe: by reference where a worker can import them, by value where they live in ``__main__``.
"""

from __future__ import annotations

import io
import json
import sys
import types
import zipfile
from collections.abc import Iterator
from typing import Any

from choros.errors import BadInput, NotSerializable, brief
from choros.training.lean import lean


@lean()
def pack_model(model: Any) -> tuple[bytes, bytes]:
    """Return the model as the bytes of a ``.keras`` file, and its custom objects as cloudpickle bytes.

    Raises:
        NotSerializable: Keras or cloudpickle cannot write the model or one of its objects; the message names it.
    """
    import cloudpickle

    try:
        _, (buffer,) = model.__reduce__()
        data: bytes = buffer.getvalue()
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            config = json.loads(archive.read("config.json"))
    except Exception as error:
        raise NotSerializable(
            f"The model {model.name!r} cannot be written as a .keras file, so it cannot travel to a worker: "
            f"{brief(error)}. Give each custom layer a get_config() and try model.save('m.keras')."
        ) from error
    if not config.get("compile_config") and not _compiles_itself(model):
        raise NotSerializable(
            f"What the model {model.name!r} was compiled with cannot be written down (get_compile_config() gives "
            "nothing). Use losses and metrics with a get_config(), or plain functions."
        )
    custom = dict(_custom_objects(config, model))
    try:
        blob: bytes = cloudpickle.dumps(custom)
    except Exception as error:
        raise NotSerializable(
            f"A custom object of the model ({', '.join(sorted(custom))}) cannot travel to a worker: {brief(error)}"
        ) from error
    return data, blob


@lean()
def unpack_model(data: bytes, custom: bytes) -> Any:
    """Return the compiled model that ``pack_model`` wrote."""
    import cloudpickle
    import keras

    with keras.saving.custom_object_scope(cloudpickle.loads(custom)):
        return keras.Model._unpickle_model(io.BytesIO(data))


@lean()
def fresh_clone(model: Any, custom: bytes) -> Any:
    """Return an untrained copy: same architecture and compilation, newly drawn weights.

    Args:
        model: the model.
        custom: its custom objects, as ``pack_model`` wrote them.
    """
    import cloudpickle
    import keras

    with keras.saving.custom_object_scope(cloudpickle.loads(custom)):
        clone = type(model).from_config(model.get_config())
        build_config = model.get_build_config()
        if not clone.built and build_config:
            clone.build_from_config(build_config)
        config = model.get_compile_config()
        if config is None:
            raise BadInput(
                f"The model {model.name!r} cannot be cloned: it was compiled with what has no configuration."
            )
        clone.compile_from_config(config)
    return clone


def _compiles_itself(model: Any) -> bool:
    import keras

    return type(model).compile_from_config is not keras.Model.compile_from_config


def _custom_objects(config: dict[str, Any], model: Any) -> Iterator[tuple[str, Any]]:
    """Find every class and function in a serialised model that is not Keras' own."""
    import keras

    live, twice = _live_objects(model)
    for module, name, registered in _names(config):
        if _of_keras(module):
            continue
        if name in twice:
            raise NotSerializable(
                f"The model {model.name!r} uses two different objects that are both called {name}, and its file tells "
                "them apart by that name only: give each a name of its own (for functions that a function makes: set "
                "their __name__)."
            )
        found = keras.saving.get_registered_object(registered) if registered else None
        if found is None and module in sys.modules:
            found = getattr(sys.modules[module], name, None)
        if found is None:
            found = live.get(name)
        if found is None:
            if module in (None, "builtins"):
                continue
            raise NotSerializable(
                f"The model uses {module}.{name}, which cannot be found by that name. Define it at the top level of "
                "a module or register it with keras.saving.register_keras_serializable()."
            )
        yield name, found
        if registered:
            yield registered, found


def _names(node: Any) -> Iterator[tuple[str | None, str, str | None]]:
    """Yield (module, name, registered name) of each serialised object in a config."""
    if isinstance(node, dict):
        name = node.get("class_name")
        if isinstance(name, str):
            if name == "function" and isinstance(node.get("config"), str):
                yield node.get("module"), node["config"], node.get("registered_name")
            elif not name.startswith("__"):
                yield node.get("module"), name, node.get("registered_name")
        for value in node.values():
            yield from _names(value)
    elif isinstance(node, list):
        for value in node:
            yield from _names(value)


def _live_objects(model: Any) -> tuple[dict[str, Any], set[str]]:
    """Map class and function names to the objects that the model really holds; and name those that are ambiguous."""
    found: dict[str, Any] = {}
    twice: set[str] = set()

    def keep(name: str, thing: Any) -> None:
        if not _of_keras(thing.__module__) and found.setdefault(name, thing) is not thing:
            twice.add(name)

    keep(type(model).__name__, type(model))
    compiled = [model.optimizer, *_flat(getattr(model, "loss", None))]
    compile_metrics = getattr(model, "_compile_metrics", None)
    for given in (
        getattr(compile_metrics, "_user_metrics", None),
        getattr(compile_metrics, "_user_weighted_metrics", None),
    ):
        compiled += list(_flat(given))
    for thing in [*model._flatten_layers(), *compiled]:
        if isinstance(thing, types.FunctionType):
            keep(thing.__name__, thing)
        elif not isinstance(thing, (str, type(None))):
            keep(type(thing).__name__, type(thing))
            for value in vars(thing).values():
                if isinstance(value, types.FunctionType):
                    keep(value.__name__, value)
    return found, twice


def _of_keras(module: Any) -> bool:
    return module == "keras" or str(module).startswith(("keras.", "keras_"))


def _flat(node: Any) -> Iterator[Any]:
    if isinstance(node, dict):
        for value in node.values():
            yield from _flat(value)
    elif isinstance(node, (list, tuple)):
        for value in node:
            yield from _flat(value)
    else:
        yield node
