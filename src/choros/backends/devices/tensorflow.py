"""TensorFlow's devices. Its CPU can be divided into logical devices before the first use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import tensorflow as tf

if TYPE_CHECKING:
    import keras


def names(kind: str | None) -> list[str]:
    """Return the names of the devices of a kind; by default GPUs, or the CPU if there are none."""
    devices = [] if kind == "cpu" else tf.config.list_logical_devices("GPU")
    if not devices and kind in (None, "cpu"):
        devices = tf.config.list_logical_devices("CPU")
    return [f"{device.device_type.lower()}:{device.name.rpartition(':')[2]}" for device in devices]


def logical(count: int) -> bool:
    """Divide the CPU into ``count`` devices; return False if TensorFlow is already in use."""
    cpu = tf.config.list_physical_devices("CPU")[0]
    try:
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * count)
    except RuntimeError:
        return False
    return True


def place_of(model: keras.Model) -> str | None:
    """Return the device of the model's weights; None if it has none."""
    for variable in model.variables:
        return device_of(variable.value)
    return None


def device_of(value: Any) -> str:
    """Return the name of the device of a tensor or variable."""
    dense = getattr(value, "flat_values", getattr(value, "values", value))  # a ragged or sparse tensor has no device
    kind, number = dense.device.split(":")[-2:]
    return f"{kind.lower()}:{number}"
