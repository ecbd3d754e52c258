"""How a compiled model travels to a worker: as a ``.keras`` file, with its own classes beside it by value.

The file's bytes come from Keras itself. Classes and functions that are not Keras' own go by cloudpickle over the
parent's private pipe: by reference where a worker can import them, by value where they live in ``__main__``; and so
does what the file does not say (``choros.training.unsaid``).
"""

from __future__ import annotations

import gc
import io
import json
import random
import sys
import warnings
import zipfile
from typing import Any

import numpy as np

from choros.errors import BadInput, NotSerializable, brief
from choros.training.lean import is_lean, lean
from choros.training.objects import custom_objects, distinct
from choros.training.unsaid import say, unsaid

_LARGE = 20_000_000  # parameters


@lean()
def pack_model(model: Any) -> tuple[bytes, bytes]:
    """Return the model as the bytes of a ``.keras`` file, and as cloudpickle bytes what the file has not.

    It is read back here, as a worker will, but for a large one in which all is Keras' own: that takes seconds.

    Raises:
        NotSerializable: Keras or cloudpickle cannot write the model or one of its objects, or what was written makes
            another model; the message says what.
    """
    with distinct(model):
        data, config = _write(model)
        custom = dict(custom_objects(config, model))
    read = custom or model.count_params() <= _LARGE
    said = unsaid(model, _read_back(model, data, custom) if read else model)
    gc.collect()  # a second model should not stay
    try:
        return data, _dumps({"objects": custom, "unsaid": said, "lean": is_lean()}, model)
    except NotSerializable:
        raise
    except Exception as error:
        names = ", ".join(sorted([*custom, *map(str, said)]))
        raise NotSerializable(
            f"What the model {model.name!r} uses ({names}) cannot travel to a worker: {brief(error)}. Make it "
            "inside the function that uses it, or put the function into a module that workers can import."
        ) from error


def _write(model: Any) -> tuple[bytes, dict[str, Any]]:
    """Return the bytes of the model's file, and the configuration in it."""
    try:
        _, (buffer,) = model.__reduce__()
        data: bytes = buffer.getvalue()
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            config: dict[str, Any] = json.loads(archive.read("config.json"))
    except Exception as error:
        raise NotSerializable(
            f"The model {model.name!r} cannot be written as a .keras file, so it cannot travel to a worker: "
            f"{brief(error)}. Give each layer of your own a get_config(), write a function around what else is called "
            "(functools.partial, a bound method, an object with __call__), and try model.save('m.keras')."
        ) from error
    if not config.get("compile_config") and not _compiles_itself(model):
        raise NotSerializable(
            f"What the model {model.name!r} was compiled with cannot be written down (get_compile_config() gives "
            "nothing). Use losses and metrics with a get_config(), or plain functions."
        )
    return data, config


def _read_back(model: Any, data: bytes, custom: dict[str, Any]) -> Any:
    """Read the model's file, and leave no trace: neither in random numbers nor in the names of things to come."""
    state = random.getstate(), np.random.get_state()
    names: Any = sys.modules["keras.src.backend.common.global_state"].get_global_attribute("object_name_uids", {})
    before = dict(names)
    try:
        return _read(data, custom)
    except Exception as error:
        raise NotSerializable(
            f"The model {model.name!r} can be written as a .keras file, but not be read back, so no worker could have "
            f"it: {brief(error)}. Each class of yours needs a get_config() with all that its __init__ wants, and an "
            "__init__ that takes what Keras adds (**kwargs, for super().__init__); then try keras.models.load_model."
        ) from error
    finally:
        random.setstate(state[0])
        np.random.set_state(state[1])
        names.clear()
        names.update(before)


def _read(data: bytes, custom: dict[str, Any]) -> Any:
    import keras

    with keras.saving.custom_object_scope(custom), warnings.catch_warnings(action="ignore"):  # they were heard before
        return keras.Model._unpickle_model(io.BytesIO(data))


def _dumps(thing: Any, model: Any) -> bytes:
    """Write by cloudpickle; a layer or a variable of the model itself would arrive as a second one, and is refused."""
    import cloudpickle

    own = {id(part): part for part in [*model._flatten_layers(), *model.variables]}

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        def reducer_override(self, part: Any) -> Any:
            if id(part) in own:
                raise NotSerializable(
                    f"A function of the model {model.name!r} uses the model's own {getattr(part, 'path', part.name)}, "
                    "by a name from outside: in a worker that would be a copy which training does not change. Put "
                    "it into a layer's call with add_loss, or into the model's train_step."
                )
            return super().reducer_override(part)

    buffer = io.BytesIO()
    Pickler(buffer).dump(thing)
    return buffer.getvalue()


def pack_code(thing: Any) -> bytes | None:
    """Return a thing of the user's by value, such as callbacks; None where it cannot travel."""
    import cloudpickle

    try:
        found: bytes = cloudpickle.dumps(thing)
    except Exception:  # whatever its own __reduce__ raises
        return None
    return found


def unpack_code(data: bytes) -> Any:
    """Return what ``pack_code`` wrote, by a caller of one's own."""
    import cloudpickle

    return cloudpickle.loads(data)


def unpack_model(data: bytes, custom: bytes) -> Any:
    """Return the compiled model that ``pack_model`` wrote."""
    import cloudpickle

    beside = cloudpickle.loads(custom)
    with lean(beside["lean"]):
        model = _read(data, beside["objects"])
        say(model, beside["unsaid"])
    return model


@lean()
def fresh_clone(model: Any, custom: bytes) -> Any:
    """Return an untrained copy: same architecture and compilation, trainable variables newly drawn.

    All other weights are those of the model: frozen layers, moving statistics, what ``Normalization`` was adapted to.

    Args:
        model: the built model.
        custom: what its file has not, as ``pack_model`` wrote it.

    Raises:
        BadInput: the model was compiled with what has no configuration.
    """
    import cloudpickle
    import keras

    beside = cloudpickle.loads(custom)
    with distinct(model), keras.saving.custom_object_scope(beside["objects"]):
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
    say(clone, beside["unsaid"])
    _take_untrained(model, clone)
    return clone


def _take_untrained(model: Any, clone: Any) -> None:
    """Give a clone all weights of the model but the trainable ones; seed states stay as they are drawn."""
    import keras

    drawn = [np.array(keras.ops.convert_to_numpy(variable)) for variable in clone.trainable_variables]
    for layer, copy in zip(model._flatten_layers(), clone._flatten_layers(), strict=True):
        store: dict[str, Any] = {}
        layer.save_own_variables(store)
        if store:  # by the layer's own method, as Normalization derives constants from what it loads
            copy.load_own_variables({name: keras.ops.convert_to_numpy(value) for name, value in store.items()})
    pairs = zip(model.non_trainable_weights, clone.non_trainable_weights, strict=True)
    for variable, copy in pairs:  # a layer with LoRA has loaded another kernel than it has
        copy.assign(variable)
    for variable, value in zip(clone.trainable_variables, drawn, strict=True):
        variable.assign(value)


def _compiles_itself(model: Any) -> bool:
    import keras

    return type(model).compile_from_config is not keras.Model.compile_from_config
