"""TensorFlow's devices; its CPU can be cut into logical ones before it is first used."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


def names(kind: str | None) -> list[str]:
    """The devices of a kind, accelerators first."""
    found = [] if kind == "cpu" else tf.config.list_logical_devices("GPU")
    if not found and kind in (None, "cpu"):
        found = tf.config.list_logical_devices("CPU")
    return [f"{each.device_type.lower()}:{each.name.rpartition(':')[2]}" for each in found]


def logical(count: int) -> bool:
    """Cut the CPU into that many devices; possible only before TensorFlow is first used."""
    cpu = tf.config.list_physical_devices("CPU")[0]
    try:
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * count)
    except RuntimeError:
        return False
    return True


def place_of(model: Any) -> str | None:
    """The device of the model's weights."""
    for variable in model.variables:
        kind, number = variable.value.device.split(":")[-2:]
        return f"{kind.lower()}:{number}"
    return None
