"""One replica on several JAX devices: one compiled program on a mesh, with the rows of a batch sharded.

The sharding of the input by rows does not change the result of a program. The loss, metrics, means of
BatchNormalization and masks of Dropout are those of the whole batch. JAX requires shards of equal length. The last
shards are therefore padded with zeros on the host, and the program first slices the real rows. XLA keeps the uneven
shards on their devices, and excludes the padding from every sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from choros.backends.devices.placement import RowShard
from choros.types import Array

_ROWS = "batch"


class MeshSharding:
    """A mesh of devices, and the sharding of a replica's variables and batches on it.

    Args:
        mesh: the devices.
        axis: the mesh axis along which rows are divided. With None or an unknown axis, rows are not divided.
    """

    def __init__(self, mesh: Mesh, axis: str | None = _ROWS) -> None:
        self.mesh = mesh
        self.everywhere = NamedSharding(mesh, PartitionSpec())
        self.parts = mesh.shape.get(axis, 1)
        self.divided = NamedSharding(mesh, PartitionSpec(axis)) if self.parts > 1 else self.everywhere

    @classmethod
    def over(cls, devices: Sequence[str]) -> MeshSharding:
        """Return a sharding in which each device has all weights and a share of the rows.

        Args:
            devices: names in Keras' form (``"cpu:0"``, ``"gpu:1"``).
        """
        return cls(Mesh(np.array([device(name) for name in devices]), (_ROWS,)))

    @classmethod
    def by(cls, distribution: Any) -> MeshSharding:
        """Return the sharding of a ``keras.distribution.ModelParallel``, under which the model was created."""
        return cls(distribution.device_mesh.backend_mesh, distribution.batch_dim_name)

    def of(self, value: Any) -> NamedSharding:
        """Return the sharding of a variable's value: the current one if it is on this mesh, else replicated."""
        sharding = getattr(value, "sharding", None)
        return sharding if isinstance(sharding, NamedSharding) and sharding.mesh == self.mesh else self.everywhere

    def place(self, values: list[Any]) -> list[Any]:
        """Place the values of variables on the mesh."""
        return [jax.device_put(value, self.of(value)) for value in values]

    def scatter(self, array: Array) -> Any:
        """Place an array of a batch on the devices, sharded by rows; pad the last shards to equal length."""
        rows = len(array)
        part_rows = max(-(-rows // self.parts), 1)
        if part_rows * self.parts == rows:
            return jax.device_put(array, self.divided)

        def part(index: tuple[slice, ...]) -> Array:
            start, stop, _ = index[0].indices(part_rows * self.parts)
            block = array[start:stop]
            filling = np.zeros((stop - start - len(block), *array.shape[1:]), array.dtype)
            return np.concatenate([block, filling]) if len(filling) else block

        # JAX annotates the index as one that may be None, which it never is.
        return jax.make_array_from_callback((part_rows * self.parts, *array.shape[1:]), self.divided, part)  # pyright: ignore[reportArgumentType]

    def lay(self, data: tuple[Any, ...]) -> ShardedBatch:
        """Place a batch of host arrays on the devices."""
        laid = ShardedBatch(jax.tree_util.tree_map(self.scatter, data))
        laid.rows = len(jax.tree_util.tree_leaves(data)[0])
        return laid

    def step(self, function: Callable[..., Any], donate: Any, out: Any) -> Callable[..., Any]:
        """Compile a function for the mesh. Its last argument is a batch of host arrays or a ``ShardedBatch``.

        Args:
            function: takes the parts of the state and a batch, as on one device. The batch has only the real rows.
            donate: indices of the arguments whose buffers XLA may reuse.
            out: shardings of the results; None to let XLA choose.
        """

        def cut(rows: int, data: object, *state: Any) -> Any:
            return function(*state, jax.tree_util.tree_map(lambda array: array[:rows], data))

        compiled = jax.jit(cut, static_argnums=0, donate_argnums=[number + 2 for number in donate], out_shardings=out)

        def run(*arguments: Any) -> Any:
            *state, data = arguments
            laid = data if isinstance(data, ShardedBatch) else self.lay(data)
            return compiled(laid.rows, tuple(laid), *state)

        return run


class ShardedBatch(tuple[Any, ...]):
    """A batch on the devices, padded to equal shards. ``rows`` is the number of real rows."""

    rows: int


def device(name: str) -> Any:
    """Return this process's device with the given name, which must exist."""
    kind, _, number = name.partition(":")
    return next(device for device in jax.local_devices(backend=kind) if device.id == int(number))


def devices_of(value: jax.Array) -> tuple[str, ...]:
    """Return the names of the devices that have an array, in the order of their numbers."""
    return tuple(f"{device.platform}:{device.id}" for device in sorted(value.devices(), key=attrgetter("id")))


def device_of(value: jax.Array) -> str:
    """Return the name of the first device that has an array."""
    return devices_of(value)[0]


def row_shards(value: jax.Array, rows: int) -> tuple[RowShard, ...]:
    """Return the devices' rows of an array of a batch; rows from ``rows`` on are padding."""
    shards = []
    for shard in value.addressable_shards:
        start, stop, _ = shard.index[0].indices(len(value))
        shards.append(RowShard(min(start, rows), min(stop, rows), devices_of(shard.data)[0]))
    return tuple(sorted(shards, key=lambda shard: (shard.start, shard.stop, shard.device)))


def names(kind: str | None) -> list[str]:
    """Return the names of this process's devices of a kind; by default those of JAX's default platform."""
    try:
        return [f"{device.platform}:{device.id}" for device in jax.local_devices(backend=kind)]
    except RuntimeError:
        return []


def logical(count: int) -> bool:
    """Divide the CPU into ``count`` devices; return False if JAX is already in use."""
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        return False
    return True
