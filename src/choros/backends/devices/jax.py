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

from choros.types import Array

_ROWS = "batch"


class MeshSharding:
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
    def over(cls, devices: Sequence[str]) -> MeshSharding:
        """Each device has all weights, and its share of the rows.

        Args:
            devices: names as Keras' (``"cpu:0"``, ``"gpu:1"``).
        """
        return cls(Mesh(np.array([device(name) for name in devices]), (_ROWS,)))

    @classmethod
    def by(cls, distribution: Any) -> MeshSharding:
        """As a ``keras.distribution.ModelParallel`` lays them: the model was made with it in force."""
        return cls(distribution.device_mesh.backend_mesh, distribution.batch_dim_name)

    def of(self, value: Any) -> NamedSharding:
        """Return the sharding of a variable's value: its own if it is on this mesh (by a layout), else replicated."""
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

    def lay(self, data: tuple[Any, ...]) -> ShardedBatch:
        """A batch of host arrays on the devices."""
        laid = ShardedBatch(jax.tree_util.tree_map(self.scatter, data))
        laid.rows = len(jax.tree_util.tree_leaves(data)[0])
        return laid

    def step(self, function: Callable[..., Any], donate: Any, out: Any) -> Callable[..., Any]:
        """The function compiled for the mesh, its last argument being a batch of host arrays, or ``ShardedBatch``.

        Args:
            function: takes the state's parts and a batch, as on one device, of which it sees the real rows alone.
            donate: the arguments that it may overwrite.
            out: shardings of what it returns, None where XLA may choose.
        """

        def cut(rows: int, data: Any, *state: Any) -> Any:
            return function(*state, jax.tree_util.tree_map(lambda array: array[:rows], data))

        compiled = jax.jit(cut, static_argnums=0, donate_argnums=[number + 2 for number in donate], out_shardings=out)

        def run(*given: Any) -> Any:
            *state, data = given
            laid = data if isinstance(data, ShardedBatch) else self.lay(data)
            return compiled(laid.rows, tuple(laid), *state)

        return run


class ShardedBatch(tuple[Any, ...]):
    """A batch that lies on the devices, filled up to equal parts; ``rows`` of it are real."""

    rows: int


def device(name: str) -> Any:
    """This process' device of such a name, which is there."""
    kind, _, number = name.partition(":")
    return next(each for each in jax.local_devices(backend=kind) if each.id == int(number))


def names(kind: str | None) -> list[str]:
    """This process' devices of a kind, accelerators first; where JAX knows of other processes, there are more."""
    try:
        return [f"{each.platform}:{each.id}" for each in jax.local_devices(backend=kind)]
    except RuntimeError:
        return []


def logical(count: int) -> bool:
    """Cut the CPU into that many devices; possible only before JAX is first used."""
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        return False
    return True
