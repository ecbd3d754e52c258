"""Many devices in one process: ``make_parallel`` and the other names of keras_experiments, on Keras 3.

from choros.parallel import make_parallel

parallel = make_parallel(model, devices=4)
parallel.compile("adam", "mse")
parallel.fit(x, y, batch_size=256)
parallel.save("model.keras")  # saves the serial model
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from choros.backends.devices import Devices, device_of, list_devices, logical_devices
from choros.backends.devices.placement import Placement, RowShard, VariablePlacement
from choros.backends.optimizers import model_variables
from choros.console import write_line
from choros.errors import InvalidInputError, warn_without_effect
from choros.parallel.multi_gpu_model import ModelMGPU, check_serial_model, chosen, warn_of_unused

if TYPE_CHECKING:
    import keras

__all__ = [
    "ModelMGPU",
    "get_available_gpus",
    "list_devices",
    "logical_devices",
    "make_parallel",
    "multi_gpu_model",
    "print_mgpu_modelsummary",
    "print_placement",
]


def make_parallel(
    serial_model: keras.Model,
    gdev_list: Devices | None = None,
    ps_device: str = "/cpu:0",
    usenccl: bool = False,
    initsync: bool = True,
    syncopt: bool = False,
    enqueue: bool = False,
    model_class: Any = ModelMGPU,
    *,
    devices: Devices | None = None,
) -> keras.Model:
    """Return the model over several devices; for fewer than two devices, the serial model itself.

    Args:
        serial_model: a ``keras.Model``.
        gdev_list: the devices, or their number. A device is a name (``"gpu:0"``, ``"/gpu:0"``, or a full one of this
            process: ``"/job:worker/task:1/device:GPU:0"``), a ``tf.DeviceSpec`` or an object with ``to_string()`` or
            ``device_type`` and ``device_index``, a ``jax.Device``, or a ``torch.device``. Defaults to all devices.
        ps_device: str, as in ``ModelMGPU``.
        usenccl: bool, as in ``ModelMGPU``.
        initsync: bool, as in ``ModelMGPU``.
        syncopt: bool, as in ``ModelMGPU``.
        enqueue: bool, as in ``ModelMGPU``.
        model_class: the class to make, called with these keyword arguments. Defaults to ``ModelMGPU``.
        devices: another name of ``gdev_list``.

    Raises:
        InvalidInputError: ``serial_model`` is not a model, a device does not exist or is of another process, or both
            names are given.

    Example:
        >>> import keras
        >>> serial = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        >>> make_parallel(serial, devices=1) is serial
        True
    """
    check_serial_model(serial_model)
    warn_of_unused(ps_device, usenccl, initsync, syncopt)
    names = chosen(gdev_list, devices)
    if len(names) < 2:
        return serial_model
    return model_class(
        serial_model=serial_model,
        gdev_list=names,
        ps_device=ps_device,
        usenccl=usenccl,
        initsync=initsync,
        syncopt=syncopt,
        enqueue=enqueue,
    )


def multi_gpu_model(
    model: keras.Model, gpus: int | Sequence[int] | None = None, cpu_merge: bool = True, cpu_relocation: bool = False
) -> keras.Model:
    """Return the model over several devices, under the name of a function of older versions of Keras.

    Args:
        model: a ``keras.Model``.
        gpus: the number of GPUs, or a list of their numbers. Defaults to all.
        cpu_merge: without effect: outputs are joined on the host. False gives a warning.
        cpu_relocation: without effect: weights are made on the host. True gives a warning.
    """
    warn_without_effect(
        "multi_gpu_model",
        "outputs are joined and weights are made on the host",
        cpu_merge=not cpu_merge,
        cpu_relocation=cpu_relocation,
    )
    if gpus is None or not isinstance(gpus, Iterable):
        return make_parallel(model, gpus)
    kind = list_devices()[0].partition(":")[0]
    return make_parallel(model, [f"{kind}:{number}" for number in gpus])


def get_available_gpus(ngpus: int = -1, list_type: str = "name_str") -> list[Any]:
    """Return the list of GPUs.

    Args:
        ngpus: int. The largest number to return. Defaults to -1, all.
        list_type: "name_str" (default) for names, "int_id" for numbers.

    Raises:
        InvalidInputError: ``list_type`` is something else.

    Example:
        >>> get_available_gpus(0)
        []
    """
    if list_type not in ("name_str", "int_id"):
        raise InvalidInputError(f"list_type={list_type!r}: give 'name_str' or 'int_id'.")
    names = list_devices("gpu")
    names = names if ngpus < 0 else names[:ngpus]
    return names if list_type == "name_str" else [int(name.partition(":")[2]) for name in names]


def print_mgpu_modelsummary(mgpu_model: Any) -> None:
    """Print the devices of a model, and its summary with nested models."""
    if isinstance(mgpu_model, ModelMGPU):
        write_line(str(mgpu_model))
        mgpu_model = mgpu_model.serial
    mgpu_model.summary(expand_nested=True)


def print_placement(mgpu_model: ModelMGPU | keras.Model, x: object, y: object = None) -> None:
    """Print the device of each variable, and of each device's rows of a batch. Nothing is trained.

    Args:
        mgpu_model: a compiled ``ModelMGPU``, or a ``keras.Model``.
        x: arrays or nested arrays of a batch, as for ``train_on_batch``.
        y: arrays or nested arrays of its labels. Defaults to None.

    Example:
        >>> import keras, numpy as np
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, name="dense")], name="serial")
        >>> print_placement(make_parallel(model, ["cpu:0"]), np.ones((6, 4)))  # doctest: +SKIP
        variable serial/dense/kernel, shape (4, 1): cpu:0
        variable serial/dense/bias, shape (1,): cpu:0
        rows 0 to 5 of 6: cpu:0
    """
    import keras

    if isinstance(mgpu_model, ModelMGPU):
        write_line(str(mgpu_model.placement(x, y)))
        return
    leaf = keras.ops.convert_to_tensor(keras.tree.flatten(x)[0])
    variables = [
        VariablePlacement(variable.path, tuple(variable.shape), (device_of(variable.value),))
        for variable in model_variables(mgpu_model)
    ]
    write_line(str(Placement(tuple(variables), (RowShard(0, len(leaf), device_of(leaf)),))))
