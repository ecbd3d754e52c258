"""PyTorch's devices. Its CPU is one device, of which several replicas take a part of the threads each."""

from __future__ import annotations

from typing import Any

import torch

_asked = [torch.get_num_threads()]


def names(kind: str | None) -> list[str]:
    """The devices of a kind, accelerators first; of the CPU as many as it has threads, or as were asked for."""
    if kind != "cpu" and torch.cuda.is_available():
        return [f"gpu:{number}" for number in range(torch.cuda.device_count())]
    return [f"cpu:{number}" for number in range(max(_asked))] if kind in (None, "cpu") else []


def logical(count: int) -> bool:
    """Take the CPU in so many parts."""
    _asked.append(count)
    return True


def limit(count: int) -> None:
    """Have operations that this thread starts use so many threads."""
    torch.set_num_threads(count)


def place_of(model: Any) -> str | None:
    """The device of the model's weights."""
    for variable in model.variables:
        device = variable.value.device
        return f"gpu:{device.index or 0}" if device.type == "cuda" else f"{device.type}:0"
    return None
