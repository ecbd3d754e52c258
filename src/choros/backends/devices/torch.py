"""PyTorch's devices. The CPU is one device; several replicas can share it, each with a part of the threads."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    import keras

_asked = [torch.get_num_threads()]


def names(kind: str | None) -> list[str]:
    """Return the names of the devices of a kind; by default GPUs, or the CPU if there are none.

    The number of CPU names is the number of threads, or the largest count passed to ``logical`` if that is greater.
    """
    if kind != "cpu" and torch.cuda.is_available():
        return [f"gpu:{number}" for number in range(torch.cuda.device_count())]
    return [f"cpu:{number}" for number in range(max(_asked))] if kind in (None, "cpu") else []


def logical(count: int) -> bool:
    """Divide the CPU into ``count`` parts; this always succeeds."""
    _asked.append(count)
    return True


def limit(count: int) -> None:
    """Set the number of threads for operations that this thread starts."""
    torch.set_num_threads(count)


def place_of(model: keras.Model) -> str | None:
    """Return the device of the model's weights; None if it has none."""
    for variable in model.variables:
        return device_of(variable.value)
    return None


def device_of(value: torch.Tensor) -> str:
    """Return the name of a tensor's device. The CPU is one device, ``"cpu:0"``."""
    device = value.device
    return f"gpu:{device.index or 0}" if device.type == "cuda" else f"{device.type}:0"
