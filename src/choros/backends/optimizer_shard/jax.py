"""A rank's share of the optimizer's update on JAX.

XLA reads the shared memory in place, because it is aligned to 64 bytes, and never writes to it. So the compiled update
writes to arrays of this process, as long as this rank's pieces, which are then copied to the shared memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

from choros.backends.optimizer_shard.layout import Memory, Piece
from choros.backends.optimizer_shard.shard import OptimizerShard
from choros.errors import InvalidInputError
from choros.types import Array


class JaxOptimizerShard(OptimizerShard):
    """One rank's share of the optimizer's update on JAX; see ``OptimizerShard``.

    A step cannot set weights without the optimizer: it is a function, and its new weights are not used.
    """

    block = 1 << 19  # values; a copy follows each call, while the new values are in the cache
    needs_first_step = False

    def __init__(self, replica: Any, rank: int, size: int, tries: bool = False) -> None:
        super().__init__(replica, rank, size, tries)
        # Only the shapes and dtypes of these variables are used: each call of the update gets all values.
        for variable in [*self.variables, *self.optimizer.variables]:
            variable._value = None
        # XLA writes a result to the memory of a donated argument. Otherwise each step would get new pages of memory,
        # which takes longer than the update of a large piece.
        self._compiled = jax.jit(self._trace, donate_argnums=(4,), keep_unused=True)
        self._scratch: Any = None
        shapes = [piece.shape for group in self.groups[:1] for piece in group]
        self._gradients = [jax.device_put(total.reshape(shape)) for total, shape in zip(self.sums, shapes, strict=True)]
        self._groups: list[_Group] = []
        places = {id(variable): index for index, variable in enumerate(replica.model.optimizer.variables)}
        original, copy = vars(self.original), vars(self.optimizer)
        at = {id(copy[name]): places[id(original[name])] for name in copy if isinstance(copy[name], keras.Variable)}
        # For each variable of the copied optimizer: its index among those of the original if it is a scalar, such as
        # the step counter; None for a slot.
        self._scalar_indices = [at.get(id(variable)) for variable in self.optimizer.variables]

    def _trace(
        self, slots: list[Any], weights: list[Any], gradients: list[Any], divisor: Any, scratch: Any
    ) -> tuple[Any, Any]:
        mean = [gradient / divisor for gradient in gradients]
        new: tuple[Any, Any] = self.optimizer.stateless_apply(slots, mean, weights)
        return new

    @staticmethod
    def on_host(replica: Any) -> bool:
        """Return whether the weights are in memory of this host; see ``OptimizerShard``."""
        on_cpu = replica.spread is None and jax.default_backend() == "cpu"
        return bool(on_cpu and replica._compiles)

    def watch(self) -> None:
        """Do nothing: no step sets weights without the optimizer."""

    def _attach(self, memory: Memory) -> None:
        replica: Any = self.replica
        self.views: dict[int, Array] = {}
        for field in self.layout.fields():
            self.views |= field.views(memory)
        for number, part in ((0, replica.trainable), (2, replica.model.optimizer.variables)):
            for index, variable in enumerate(part):
                if id(variable) in self.views:
                    # The variable of the model gets the same array: its old one would stay in memory.
                    replica._state[number][index] = variable._value = _in_place(self.views[id(variable)])
        self._groups = [_Group.of(self, group, memory) for group in self.groups]

    def _update(self, divisor: float, sum_group: Callable[[list[Piece]], None]) -> None:
        replica: Any = self.replica
        state = replica._state[2]
        scale = np.asarray(divisor, replica.dtype)
        new: list[Any] = []
        for group, pieces in zip(self._groups, self.groups, strict=True):
            sum_group(pieces)
            arrays = zip(group.slot_arrays, self._scalar_indices, strict=True)
            slots = [array if number is None else state[number] for array, number in arrays]
            if self._scratch is None:
                every = [*group.weight_arrays, *group.slot_arrays]
                self._scratch = [None if array is None else jnp.zeros_like(array) for array in every]
            weights, new = self._compiled(slots, group.weight_arrays, self._gradients, scale, self._scratch)
            results = [*weights, *new]
            for view, value in zip(group.views, results, strict=True):
                if view is not None:
                    np.copyto(view, np.asarray(value))
            pairs = zip(group.views, results, strict=True)
            self._scratch = [None if view is None else value for view, value in pairs]
        for number, value in zip(self._scalar_indices, new, strict=True):  # all groups have computed the same numbers
            if number is not None:
                state[number] = value

    def write(self, variable: Any, array: Array) -> bool:
        """Set a variable that is in the shared memory; return False for any other variable."""
        view = self.views.get(id(variable))
        if view is not None:
            np.copyto(view, np.asarray(array).reshape(view.shape), casting="unsafe")
        return view is not None

    def must_detach(self, rank_gradients: list[Array]) -> bool:
        """Return False: on JAX a variable without a gradient gets zeros."""
        return False

    def take_settings(self) -> None:
        """Do nothing: a compiled update keeps the numbers that it was traced with, as in Keras."""

    def _detach(self) -> None:
        from choros.backends.jax import copied

        replica: Any = self.replica
        for number, part in ((0, replica.trainable), (2, replica.model.optimizer.variables)):
            for index, variable in enumerate(part):
                if id(variable) in self.views:
                    replica._state[number][index] = variable._value = copied(self.views[id(variable)])
        self.views, self._groups = {}, []
        replica.idle_shard = self  # with its compiled update, for the next fit of an equal model


@dataclass
class _Group:
    """The shared memory of the pieces that one call updates.

    Attributes:
        views: numpy arrays of the weights, then of the slots in the order of the optimizer's variables; None for a
            variable that is a number.
        weight_arrays, slot_arrays: JAX arrays on the same memory.
    """

    views: list[Array | None]
    weight_arrays: list[jax.Array]
    slot_arrays: list[jax.Array | None]

    @classmethod
    def of(cls, shard: JaxOptimizerShard, pieces: list[Piece], memory: Memory) -> _Group:
        weights = [piece.view(shard.layout.weights, memory) for piece in pieces]
        by_slot: dict[int, Array | None] = {}
        for name, field in shard.layout.slots.items():
            slots = zip(vars(shard.optimizer)[name], pieces, strict=True)
            by_slot |= {id(slot): piece.view(field, memory) for slot, piece in slots if slot is not None}
        views = [by_slot.get(id(variable)) for variable in shard.optimizer.variables]
        slot_arrays = [None if view is None else _in_place(view) for view in views]
        return cls([*weights, *views], [_in_place(view) for view in weights], slot_arrays)


def _in_place(view: Array | None) -> jax.Array:
    """Return a JAX array that uses the memory of an array.

    Raises:
        InvalidInputError: this version of JAX copies the array. It does not promise to use aligned memory in place.
    """
    array: jax.Array = jax.device_put(view)
    if view is None or (view.size and array.unsafe_buffer_pointer() != view.ctypes.data):
        raise InvalidInputError(
            f"Workers cannot share weights, because JAX {jax.__version__} copies memory of the host: give "
            "Trainer(shard_optimizer=False)."
        )
    return array
