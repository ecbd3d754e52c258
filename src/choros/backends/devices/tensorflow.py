"""TensorFlow's devices. Its CPU can be divided into logical devices before the first use."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


def names(kind: str | None) -> list[str]:
    """Return the names of the devices of a kind; by default GPUs, or the CPU if there are none."""
    found = [] if kind == "cpu" else tf.config.list_logical_devices("GPU")
    if not found and kind in (None, "cpu"):
        found = tf.config.list_logical_devices("CPU")
    return [f"{each.device_type.lower()}:{each.name.rpartition(':')[2]}" for each in found]


def logical(count: int) -> bool:
    """Divide the CPU into ``count`` devices; return False if TensorFlow is already in use."""
    cpu = tf.config.list_physical_devices("CPU")[0]
    try:
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * count)
    except RuntimeError:
        return False
    return True


def place_of(model: Any) -> str | None:
    """Return the device of the model's weights; None if it has none."""
    for variable in model.variables:
        return device_of(variable.value)
    return None


def device_of(value: Any) -> str:
    """Return the name of the device of a tensor or variable."""
    dense = getattr(value, "flat_values", getattr(value, "values", value))  # a ragged or sparse tensor has no device
    kind, number = dense.device.split(":")[-2:]
    return f"{kind.lower()}:{number}"
