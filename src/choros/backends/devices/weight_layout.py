"""The sharding of a model's weights over a worker's devices (JAX): Keras' layout map in a form that can be sent."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from choros.errors import InvalidInputError, counted

if TYPE_CHECKING:
    import keras


def describe(
    layout: keras.distribution.ModelParallel | Mapping[str, object] | None,
    devices: int,
    where: str = "in each worker, by devices_per_worker=",
) -> dict[str, Any]:
    """Return a layout as a dict for JSON.

    Args:
        layout: a ``keras.distribution.LayoutMap`` or ``ModelParallel``, whose patterns match whole paths of variables,
            as in Keras. Or a mapping from a regular expression, which matches any part of a variable's path, to "model"
            or None for each dimension; the mesh axis "model" then has all devices.
        devices: number of devices of each worker.
        where: the place of these devices, for errors.

    Returns:
        ``{"shape", "axes", "batch", "rules", "whole"}``. ``whole`` is true if patterns match whole paths.

    Raises:
        InvalidInputError: the layout is none of these, its mesh has another number of devices, a pattern is not a
            regular expression, or a rule's axes are not distinct axes of the mesh.

    Example:
        >>> describe({"dense/kernel": (None, "model")}, 2)["shape"]
        [1, 2]
    """
    import keras

    batch, whole = None, not isinstance(layout, Mapping) or isinstance(layout, keras.distribution.LayoutMap)
    if isinstance(layout, keras.distribution.ModelParallel):
        batch, layout = layout.batch_dim_name, layout._layout_map
    if isinstance(layout, keras.distribution.LayoutMap):
        mesh = layout.device_mesh
        shape, axes = [int(size) for size in mesh.shape], [str(name) for name in mesh.axis_names]
        rules = [(pattern, tensor_layout.axes) for pattern, tensor_layout in layout.items()]
    elif isinstance(layout, Mapping):
        shape, axes, rules = [1, devices], ["batch", "model"], list(layout.items())
    else:
        raise InvalidInputError(f"The layout is of type {type(layout).__name__}: give a keras.distribution.LayoutMap.")
    if math.prod(shape) != devices:
        needed = counted(math.prod(shape), "device")
        raise InvalidInputError(
            f"The layout's mesh is {' x '.join(map(str, shape))}, which takes {needed}, and there are {devices} "
            f"{where}: make these numbers equal."
        )
    plain = [[str(pattern), _axes_of(pattern, given, axes)] for pattern, given in rules]
    return {"shape": shape, "axes": axes, "batch": batch or axes[0], "rules": plain, "whole": whole}


def _axes_of(pattern: str, spec: Any, axes: list[str]) -> list[str | None]:
    """Return the axes of a rule, after a check of the rule alone."""
    try:
        re.compile(pattern)
    except (re.error, TypeError) as error:
        raise InvalidInputError(f"The layout's pattern {pattern!r} is not a regular expression: {error}.") from None
    if isinstance(spec, str) or not isinstance(spec, Iterable):
        raise InvalidInputError(
            f"The layout of {pattern!r} is {spec!r}: give a tuple of an axis of the mesh or None for each dimension, "
            f"such as (None, {axes[-1]!r})."
        )
    named = [None if axis is None else str(axis) for axis in spec]
    for axis in filter(None, named):
        if axis not in axes:
            raise InvalidInputError(f"The layout divides {pattern!r} along {axis!r}: the mesh has {', '.join(axes)}.")
        if named.count(axis) > 1:
            raise InvalidInputError(f"The layout divides {pattern!r} twice along {axis!r}: give None in one place.")
    return named


def _whole_path(layout: dict[str, Any], pattern: str) -> str:
    """Return the regular expression for whole paths. Keras matches a layout map's patterns by ``re.fullmatch``."""
    return pattern if layout["whole"] else f".*(?:{pattern}).*"


def _matches(layout: dict[str, Any], pattern: str, path: str) -> bool:
    return re.fullmatch(_whole_path(layout, pattern), path) is not None


def check_layout(layout: dict[str, Any], model: keras.Model) -> None:
    """Refuse a layout that does not fit a built model.

    Raises:
        InvalidInputError: a pattern matches nothing, two patterns match one variable, the number of dimensions differs,
            or the size of an axis does not divide a dimension.
    """
    outputs = [f"{layer.path}/output" for layer in model._flatten_layers()]
    for pattern, axes in layout["rules"]:
        matched = [variable for variable in model.variables if _matches(layout, pattern, variable.path)]
        if not matched and not any(_matches(layout, pattern, path) for path in outputs):
            part = any(
                re.search(pattern, path) for path in [*outputs, *(variable.path for variable in model.variables)]
            )
            raise InvalidInputError(
                f"The layout's pattern {pattern!r} matches no variable of {model.name!r}: they are "
                f"{', '.join(variable.path for variable in model.variables[:8])} ..."
                + (f" A LayoutMap's pattern matches whole paths: '.*{pattern}'." if part else "")
            )
        for variable in matched:
            others = [other for other, _ in layout["rules"] if _matches(layout, other, variable.path)]
            if len(others) > 1:
                raise InvalidInputError(
                    f"The layout's patterns {', '.join(map(repr, others))} match one variable, {variable.path}: "
                    "leave one."
                )
            _check_shape(layout, variable.path, tuple(variable.shape), axes)


def _check_shape(layout: dict[str, Any], path: str, shape: tuple[int, ...], axes: Sequence[str | None]) -> None:
    """Refuse to divide a variable of this shape along these axes of the mesh, if its parts would be unequal."""
    if len(axes) != len(shape):
        raise InvalidInputError(
            f"The layout of {path} has {len(axes)} dimensions, {tuple(axes)}, and the variable has the shape {shape}: "
            "give an axis of the mesh or None for each dimension."
        )
    sizes = dict(zip(layout["axes"], layout["shape"], strict=True))
    for size, axis in zip(shape, axes, strict=True):
        if axis is not None and size % sizes[axis]:
            raise InvalidInputError(
                f"The layout divides {path}, of the shape {shape}, along {axis!r}, which has the size {sizes[axis]}, "
                f"and {size} is not a multiple of {sizes[axis]}: give None for this dimension, or change the layer or "
                f"the mesh so that the size of {axis!r} divides it."
            )


def say_mesh(workers: int, devices: list[int], layout: dict[str, Any] | None, model: keras.Model) -> str:
    """Return a line of text about the devices of the workers and the division of weights and rows among them."""
    device_text = (
        f"{counted(devices[0], 'device')} each" if len(set(devices)) == 1 else f"{', '.join(map(str, devices))} devices"
    )
    line = f"{counted(workers, 'worker')}, {device_text}"
    if layout is None:
        return f"{line}: every device has all weights, and its share of the worker's rows"
    mesh = ", ".join(f"{axis} {size}" for axis, size in zip(layout["axes"], layout["shape"], strict=True))
    divided = [
        variable
        for variable in model.variables
        if any(_matches(layout, pattern, variable.path) and any(axes) for pattern, axes in layout["rules"])
    ]
    count = sum(math.prod(variable.shape) for variable in divided)
    share = f"{count / max(model.count_params(), 1):.0%} of the values"
    return f"{line}, mesh {mesh}: {len(divided)} of {len(model.variables)} variables divided ({share})"


@contextmanager
def laid_out(layout: dict[str, Any] | None) -> Iterator[keras.distribution.ModelParallel | None]:
    """Temporarily create models under a layout; yield Keras' distribution, or None without a layout.

    The slots of an optimizer are divided as their weights are, also those of an unpickled optimizer. A variable that
    the layout does not fit is refused before it has a value.
    """
    if layout is None:
        yield None
        return
    import keras

    mesh = keras.distribution.DeviceMesh(
        tuple(layout["shape"]), tuple(layout["axes"]), keras.distribution.list_devices()[: math.prod(layout["shape"])]
    )
    rules = keras.distribution.LayoutMap(mesh)
    for pattern, axes in layout["rules"]:
        rules[_whole_path(layout, pattern)] = tuple(axes)
    given = layout
    divided: dict[str, tuple[tuple[int, ...], Any]] = {}  # by the begin of the slots' names: shape and layout

    class Distribution(keras.distribution.ModelParallel):  # type: ignore[misc]
        def get_variable_layout(self, variable: Any) -> Any:
            placed, shape = super().get_variable_layout(variable), tuple(variable.shape)
            if any(placed.axes):
                _check_shape(given, variable.path, shape, placed.axes)
                divided[variable.path.replace("/", "_") + "_"] = shape, placed
                return placed
            name = variable.path.rpartition("/")[2]
            alike = [begin for begin in divided if name.startswith(begin) and divided[begin][0] == shape]
            return divided[max(alike, key=len)][1] if alike else placed

    before = keras.distribution.distribution()
    distribution = Distribution(layout_map=rules, batch_dim_name=layout["batch"], auto_shard_dataset=False)
    keras.distribution.set_distribution(distribution)
    try:
        yield distribution
    finally:
        keras.distribution.set_distribution(before)
