"""One replica over several devices of JAX: one compiled program, its rows divided, XLA's own sums between.

A program whose input is divided by rows means the same as on one device, whatever it computes: the loss, its metrics,
BatchNormalization's means and a Dropout's masks are those of the whole batch. What JAX asks for is that all parts are
equally long, so the last are filled with zeros on the host, and inside the program the first thing is to take the
real rows: XLA then keeps the uneven parts where they are, and leaves the filling out of every sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from choros.errors import BadInput
from choros.types import Array

_ROWS = "batch"


class Spread:
    """A mesh of devices, and how a replica's variables and batches lie on it.

    Args:
        mesh: the devices.
        axis: the mesh's axis along which a batch's rows are divided; None, or one it has not, divides nothing.
    """

    def __init__(self, mesh: Mesh, axis: str | None = _ROWS) -> None:
        self.mesh = mesh
        self.everywhere = NamedSharding(mesh, PartitionSpec())
        self.parts = mesh.shape.get(axis, 1)
        self.divided = NamedSharding(mesh, PartitionSpec(axis)) if self.parts > 1 else self.everywhere

    @classmethod
    def over(cls, devices: Sequence[str]) -> Spread:
        """Each device has all weights, and its share of the rows.

        Args:
            devices: names as Keras' (``"cpu:0"``, ``"gpu:1"``).
        """
        return cls(Mesh(np.array([device(name) for name in devices]), (_ROWS,)))

    @classmethod
    def by(cls, distribution: Any) -> Spread:
        """As a ``keras.distribution.ModelParallel`` lays them: the model was made with it in force."""
        return cls(distribution.device_mesh.backend_mesh, distribution.batch_dim_name)

    def of(self, value: Any) -> NamedSharding:
        """How a variable's value lies: as it does if that is on this mesh (a layout put it there), else everywhere."""
        own = getattr(value, "sharding", None)
        return own if isinstance(own, NamedSharding) and own.mesh == self.mesh else self.everywhere

    def place(self, values: list[Any]) -> list[Any]:
        """The values of variables on the mesh."""
        return [jax.device_put(value, self.of(value)) for value in values]

    def scatter(self, array: Array) -> Any:
        """A batch's array on the devices, to each its own rows alone; the last ones filled up to equal lengths."""
        rows = len(array)
        each = max(-(-rows // self.parts), 1)
        if each * self.parts == rows:
            return jax.device_put(array, self.divided)

        def part(index: tuple[slice, ...]) -> Array:
            start, stop, _ = index[0].indices(each * self.parts)
            mine = array[start:stop]
            filling = np.zeros((stop - start - len(mine), *array.shape[1:]), array.dtype)
            return np.concatenate([mine, filling]) if len(filling) else mine

        return jax.make_array_from_callback((each * self.parts, *array.shape[1:]), self.divided, part)

    def step(self, function: Callable[..., Any], donate: Any, out: Any) -> Callable[..., Any]:
        """The function compiled for the mesh, its last argument being a batch of host arrays.

        Args:
            function: takes the state's parts and a batch, as on one device.
            donate: the arguments that it may overwrite.
            out: shardings of what it returns, None where XLA may choose.
        """

        def cut(rows: int, data: Any, *state: Any) -> Any:
            return function(*state, jax.tree_util.tree_map(lambda array: array[:rows], data))

        compiled = jax.jit(cut, static_argnums=0, donate_argnums=[number + 2 for number in donate], out_shardings=out)

        def run(*given: Any) -> Any:
            *state, data = given
            rows = len(jax.tree_util.tree_leaves(data)[0])
            return compiled(rows, jax.tree_util.tree_map(self.scatter, data), *state)

        return run


def device(name: str) -> Any:
    """JAX's device of such a name.

    Raises:
        BadInput: there is none.
    """
    kind, _, number = name.lower().partition(":")
    try:
        return {each.id: each for each in jax.devices(kind)}[int(number or 0)]
    except (KeyError, ValueError, RuntimeError):
        raise BadInput(f"There is no device {name!r}: JAX has {', '.join(names(None))}.") from None


def names(kind: str | None) -> list[str]:
    """The devices of a kind, accelerators first."""
    try:
        return [f"{each.platform}:{each.id}" for each in jax.devices(kind)]
    except RuntimeError:
        return []


def scope(name: str) -> str:
    """What Keras calls the device."""
    return name


def place_of(model: Any) -> str | None:
    """The device of the model's weights."""
    for variable in model.variables:
        each = next(iter(variable.value.devices()))
        return f"{each.platform}:{each.id}"
    return None


def logical(count: int) -> None:
    """Cut the CPU into that many devices; possible only before JAX is first used.

    Raises:
        BadInput: JAX has been used, and has another number.
    """
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        if len(jax.devices("cpu")) < count:
            raise BadInput(
                f"JAX runs already, with {len(jax.devices('cpu'))} CPU devices: call logical_devices({count}) before "
                "the first model or array is made."
            ) from None
