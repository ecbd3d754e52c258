"""Names of devices in Keras' form (``"gpu:0"``), from names of TensorFlow and from objects of the frameworks."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Sequence
from typing import Protocol, TypeAlias, runtime_checkable

from choros.cluster import Place
from choros.errors import InvalidInputError


@runtime_checkable
class SpecWithText(Protocol):
    """A device that gives its name: ``tf.DeviceSpec``."""

    def to_string(self) -> str:
        """Return the name."""
        ...


@runtime_checkable
class SpecWithIndex(Protocol):
    """A device with the attributes of a ``tf.DeviceSpec``."""

    @property
    def device_type(self) -> str:
        """The kind, such as "GPU"."""
        ...

    @property
    def device_index(self) -> int | None:
        """The number; None for the first one."""
        ...


@runtime_checkable
class LogicalDevice(Protocol):
    """A device that ``tf.config`` lists."""

    @property
    def device_type(self) -> str:
        """The kind, such as "GPU"."""
        ...

    @property
    def name(self) -> str:
        """The name, such as "/device:GPU:0"."""
        ...


@runtime_checkable
class JaxDevice(Protocol):
    """A ``jax.Device``."""

    @property
    def platform(self) -> str:
        """The kind, such as "gpu"."""
        ...

    @property
    def id(self) -> int:
        """The number."""
        ...


@runtime_checkable
class TorchDevice(Protocol):
    """A ``torch.device``."""

    @property
    def type(self) -> str:
        """The kind, such as "cuda"."""
        ...

    @property
    def index(self) -> int | None:
        """The number; None for the first one."""
        ...


Device: TypeAlias = str | SpecWithText | SpecWithIndex | LogicalDevice | JaxDevice | TorchDevice
Devices: TypeAlias = int | Device | Sequence[Device]

_NAME = re.compile(
    r"/?(?:job:(?P<job>\w+)/)?(?:replica:(?P<replica>\d+)/)?(?:task:(?P<task>\d+)/)?(?:(?:physical_)?device:)?"
    r"(?P<kind>(?!(?:job|replica|task|device|physical_device)\b)[a-z]\w*(?<!\d))(?::(?P<number>\d+|\*))?",
    re.ASCII,
)
# A name that ends before the device.
_PROCESS = re.compile(r"/?(?=[jrt])(?:job:\w+(?:/|$))?(?:replica:\d+(?:/|$))?(?:task:\d+(?:/|$))?", re.ASCII)
_KINDS = {"cuda": "gpu", "rocm": "gpu"}  # as PyTorch and JAX name them


def device_names(devices: Device | Iterable[Device]) -> list[str]:
    """Return the names of devices of this process in Keras' form.

    Args:
        devices: one or several. A name is Keras' (``"gpu:0"``), PyTorch's (``"cuda:0"``) or TensorFlow's, also a full
            one (``"/job:worker/task:1/device:GPU:0"``), whose task must be this process. An object has ``to_string()``
            or ``device_type`` and ``device_index`` (``tf.DeviceSpec``), or is a ``jax.Device``, a ``torch.device`` or a
            device that ``tf.config`` lists. Without a number it is the first device of its kind.

    Raises:
        InvalidInputError: something is not a name of a device, or a name is of another process.

    Example:
        >>> device_names(["/job:localhost/replica:0/task:0/device:CPU:1", "/gpu:0", "cuda:1", "cpu"])
        ['cpu:1', 'gpu:0', 'gpu:1', 'cpu:0']
    """
    if isinstance(devices, str) and devices.strip().isdecimal():
        raise InvalidInputError(
            f"{devices!r} is not a name of a device of this process: give {int(devices)} without quotes for so many "
            "devices, or a name such as 'gpu:0'."
        )
    if isinstance(devices, str) or not isinstance(devices, Iterable):
        texts = [_text(devices)]
    else:
        texts = [_text(device) for device in devices]
    matches = [_match(text) for text in texts]
    tasks = {
        (match["job"] or "worker", int(match["replica"] or 0), int(match["task"] or 0)): text
        for match, text in zip(matches, texts, strict=True)
        if int(match["replica"] or 0) or (match["task"] is not None and match["job"] != "localhost")
    }
    if len(tasks) > 1:
        raise InvalidInputError(
            f"The devices {', '.join(tasks.values())} are of several processes: give the devices of this process. "
            "choros.Trainer trains with several processes."
        )
    for (job, replica, task), text in tasks.items():
        _check_task(job, replica, task, text)
    return [
        f"{_KINDS.get(match['kind'], match['kind'])}:{int((match['number'] or '0').replace('*', '0'))}"
        for match in matches
    ]


def _text(device: Device) -> str:
    """Return the name of a device."""
    if isinstance(device, str):
        return device
    if isinstance(device, SpecWithText):
        return device.to_string()
    if isinstance(device, SpecWithIndex):
        return f"{device.device_type}:{device.device_index or 0}"
    if isinstance(device, LogicalDevice):
        return device.name
    if isinstance(device, JaxDevice):
        return f"{device.platform}:{device.id}"
    if isinstance(device, TorchDevice):
        return f"{device.type}:{device.index or 0}"
    raise InvalidInputError(
        f"{device!r} of type {type(device).__name__} is not a device: give a name such as 'gpu:0', a tf.DeviceSpec, a "
        "jax.Device or a torch.device."
    )


def _match(text: str) -> re.Match[str]:
    name = text.strip().lower()
    match = _NAME.fullmatch(name)
    if match is None and _PROCESS.fullmatch(name):
        raise InvalidInputError(
            f"{text!r} names a process, and no device of it: give a device too, as in "
            f"'{text.strip().rstrip('/')}/device:GPU:0', or 'gpu:0' for one of this process."
        )
    if match is None:
        raise InvalidInputError(
            f"{text!r} is not a name of a device of this process: give one such as 'gpu:0', '/device:GPU:0' or "
            "'/job:worker/task:1/device:GPU:0'."
        )
    return match


def _check_task(job: str, replica: int, task: int, text: str) -> None:
    """Refuse the name of a device of another process. A process without a launcher may have any task."""
    place = Place.here()
    if place.launcher == "tf_config":
        own_task = json.loads(os.environ["TF_CONFIG"])["task"]
        this_task = f"{own_task['type']} {own_task['index']}"
        matches = (own_task["type"].lower(), int(own_task["index"])) == (job, task)
    else:
        this_task, matches = f"rank {place.rank}", job != "ps" and (place.size == 1 or task == place.rank)
    if replica or not matches:
        raise InvalidInputError(
            f"The device {text} is of another process; this one is {this_task}. Give the devices of this process, "
            "such as '/device:GPU:0'."
        )
