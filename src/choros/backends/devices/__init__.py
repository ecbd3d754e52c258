"""The devices that Keras' backend computes on, and several of one CPU."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Sequence
from typing import Any

from choros.errors import InvalidInputError

__all__ = ["choose_devices", "limit_threads", "list_devices", "logical_devices", "place_of", "scope"]


def list_devices(kind: str | None = None) -> list[str]:
    """The devices that the backend computes on, as Keras names them.

    Args:
        kind: "cpu", "gpu" or "tpu"; by default accelerators where there are any, else the CPU's.

    Returns:
        Names such as ``"gpu:0"``. On PyTorch the CPU, one device to it, is listed as often as it has threads or
        ``logical_devices`` was asked for: each stands for a part of the threads.

    Example:
        >>> list_devices("cpu")[0]
        'cpu:0'
    """
    if kind is not None and kind not in ("cpu", "gpu", "tpu"):
        raise InvalidInputError(f"kind={kind!r}: give 'cpu', 'gpu' or 'tpu'.")
    names: list[str] = _backend().names(kind)
    return names


def logical_devices(count: int) -> list[str]:
    """Cut the CPU into several devices, before the backend is first used: to try what is meant for GPUs.

    Args:
        count: how many.

    Returns:
        Their names.

    Raises:
        InvalidInputError: the backend has been used already, and has fewer.
    """
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise InvalidInputError(f"{count!r} devices: give a whole number, 1 or more.")
    if not _backend().logical(count) and (there := len(list_devices("cpu"))) < count:
        raise InvalidInputError(
            f"The backend runs already, with {there} CPU devices: call logical_devices({count}) before the first model "
            "or array is made."
        )
    return [f"cpu:{number}" for number in range(count)]


def choose_devices(devices: int | Sequence[str] | None) -> list[str]:
    """The devices that are meant, as Keras names them.

    Args:
        devices: how many (-1: all that there are; where there is only a CPU that was not used yet, it is cut into as
            many), or their names, also as TensorFlow writes them (``"/gpu:1"``, ``"/device:GPU:1"``); None is all.

    Raises:
        InvalidInputError: one of them is not there, or is named twice.
    """
    if devices is None or isinstance(devices, int):
        if devices is not None and devices > 1:
            with contextlib.suppress(InvalidInputError):  # the next lines say what there is
                logical_devices(devices)
        there = list_devices()
        count = len(there) if devices in (None, -1) else int(devices)
        if isinstance(devices, bool) or not 0 <= count <= len(there):
            more = f" Call choros.parallel.logical_devices({count}) first of all." if there[0].startswith("cpu") else ""
            raise InvalidInputError(f"devices={devices!r}: there are {len(there)} ({', '.join(there)}).{more}")
        return there[:count]
    names = [str(one).lower().removeprefix("/").removeprefix("device:").replace("cuda", "gpu") for one in devices]
    names = [name if ":" in name else f"{name}:0" for name in names]
    for name in names:
        kind = name.partition(":")[0]
        there = list_devices(kind) if kind in ("cpu", "gpu", "tpu") else []
        if name not in there:
            more = f" Call choros.parallel.logical_devices({len(names)}) first of all." if kind == "cpu" else ""
            raise InvalidInputError(
                f"There is no device {name!r}: {', '.join(there) or 'there are none of its kind'}.{more}"
            )
    if len(set(names)) < len(names):
        raise InvalidInputError(f"devices={names}: one is named twice.")
    return names


def limit_threads(count: int) -> None:
    """Have this thread compute with so many threads, where the backend can tell its threads apart (PyTorch)."""
    if "torch" in sys.modules:
        importlib.import_module("choros.backends.devices.torch").limit(count)


def scope(name: str) -> Any:
    """A context in which Keras makes and computes things on a device."""
    import keras

    one = keras.backend.backend() == "torch" and name.startswith("cpu")  # whose parts are only threads
    return keras.device("cpu" if one else name)


def place_of(model: Any) -> str | None:
    """The device on which a built model's weights lie (PyTorch, TensorFlow); None where it has none."""
    place: str | None = _backend().place_of(model)
    return place


def _backend() -> Any:
    import keras

    return importlib.import_module(f"choros.backends.devices.{keras.backend.backend()}")
