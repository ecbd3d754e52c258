"""The devices of Keras' backend, and logical devices that divide one CPU."""

from __future__ import annotations

import contextlib
import importlib
import operator
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from choros.backends.devices.device_names import Devices, device_names
from choros.errors import InvalidInputError

if TYPE_CHECKING:
    import keras

__all__ = [
    "Devices",
    "choose_devices",
    "device_of",
    "limit_threads",
    "list_devices",
    "logical_devices",
    "place_of",
    "scope",
]


def list_devices(kind: str | None = None) -> list[str]:
    """Return the names of the backend's devices in Keras' form.

    Args:
        kind: "cpu", "gpu" or "tpu". Defaults to accelerators if there are any, else the CPU.

    Returns:
        Names such as ``"gpu:0"``. PyTorch has one CPU device. It is listed once for each thread, or more often if
        ``logical_devices`` requested more. Each name stands for a part of the threads.

    Raises:
        InvalidInputError: the kind is none of these.

    Example:
        >>> list_devices("cpu")[0]
        'cpu:0'
    """
    if kind is not None and kind not in ("cpu", "gpu", "tpu"):
        raise InvalidInputError(f"kind={kind!r}: give 'cpu', 'gpu' or 'tpu'.")
    names: list[str] = _backend().names(kind)
    return names


def logical_devices(count: int) -> list[str]:
    """Divide the CPU into several logical devices, to try code for several GPUs. Call it before the backend is used.

    Args:
        count: number of devices, at least 1.

    Returns:
        The names of the devices.

    Raises:
        InvalidInputError: the backend is already in use and has fewer CPU devices, or the count is invalid.
    """
    requested, count = count, _number(count)
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise InvalidInputError(f"{requested!r} devices: give a whole number, 1 or more.")
    if not _backend().logical(count) and (available := len(list_devices("cpu"))) < count:
        raise InvalidInputError(
            f"The backend runs already, with {available} CPU devices: call logical_devices({count}) before the first "
            "model or array is made."
        )
    return [f"cpu:{number}" for number in range(count)]


def choose_devices(devices: Devices | None) -> list[str]:
    """Return the names of the selected devices in Keras' form.

    Args:
        devices: their number, or names or objects as in ``device_names``. None and -1 select all. If there is only a
            CPU that is not in use yet, it is divided into the requested number.

    Raises:
        InvalidInputError: a device does not exist, is named twice, or is of another process.
    """
    devices = _number(devices)
    if devices is None or isinstance(devices, int):
        if devices is not None and devices > 1:
            with contextlib.suppress(InvalidInputError):  # the error below lists the existing devices
                logical_devices(devices)
        available = list_devices()
        count = len(available) if devices in (None, -1) else int(devices)
        if isinstance(devices, bool) or not 0 <= count <= len(available):
            more = (
                f" Call choros.parallel.logical_devices({count}) first of all."
                if available[0].startswith("cpu") and count > len(available)
                else ""
            )
            raise InvalidInputError(f"devices={devices!r}: there are {len(available)} ({_listed(available)}).{more}")
        return available[:count]
    names = device_names(devices)
    for name in names:
        kind = name.partition(":")[0]
        available = list_devices(kind) if kind in ("cpu", "gpu", "tpu") else []
        if name not in available:
            needed = 1 + max((int(each.partition(":")[2]) for each in names if each.startswith("cpu:")), default=0)
            more = f" Call choros.parallel.logical_devices({needed}) first of all." if kind == "cpu" else ""
            there = list(dict.fromkeys([*list_devices(), *list_devices("cpu")]))
            raise InvalidInputError(f"There is no device {name!r}. This process has {_listed(there)}.{more}")
    if len(set(names)) < len(names):
        raise InvalidInputError(f"devices={names}: one is named twice.")
    return names


def _number(value: Any) -> Any:
    """Return a whole number of any library, such as ``np.int64(2)``, as an int; anything else unchanged."""
    if isinstance(value, bool):
        return value
    try:
        return operator.index(value)
    except TypeError:
        return value


def _listed(names: Sequence[str]) -> str:
    """Return the names of devices for an error, the first 16 of many."""
    more = f" and {len(names) - 16} more" if len(names) > 16 else ""
    return ", ".join(names[:16]) + more


def limit_threads(count: int) -> None:
    """Set the number of threads for computations that this thread starts. Only PyTorch supports this."""
    if "torch" in sys.modules:
        importlib.import_module("choros.backends.devices.torch").limit(count)


def scope(name: str) -> Any:
    """Return a context in which Keras creates tensors and computes on a device."""
    import keras

    is_torch_cpu = keras.backend.backend() == "torch" and name.startswith("cpu")  # PyTorch has one CPU device
    return keras.device("cpu" if is_torch_cpu else name)


def place_of(model: keras.Model) -> str | None:
    """Return the device of a built model's weights (PyTorch, TensorFlow); None if the model has no weights."""
    place: str | None = _backend().place_of(model)
    return place


def device_of(value: object) -> str:
    """Return the name of the device that has a backend's tensor, or of the first one."""
    name: str = _backend().device_of(value)
    return name


def _backend() -> Any:
    import keras

    return importlib.import_module(f"choros.backends.devices.{keras.backend.backend()}")
