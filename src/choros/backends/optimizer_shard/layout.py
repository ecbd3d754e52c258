"""The memory of a divided optimizer: weights and slots that the ranks of a host share, and each rank's pieces of them.

If the optimizer treats all values alike, all weights form one vector, and a rank's piece is a range of it. Otherwise a
piece is a whole variable, so that norms over a variable, constraints and exceptions from weight decay stay right.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from choros.backends import inner_optimizer
from choros.backends.optimizer_shard.independence import dtype_of, treats_alike
from choros.backends.optimizer_shard.optimizer_copy import slot_lists
from choros.types import Array

_ALIGNMENT = 256  # bytes: a multiple of XLA's 64 and of the size of every dtype
_CUT = 64  # values: pieces of the vector begin at multiples of it, so that no two ranks write to one cache line

Memory = Callable[[np.typing.DTypeLike, int, int], Array]  # (dtype, count, offset in bytes) to a flat array


@dataclass(frozen=True)
class Field:
    """Variables that lie one after another: the weights, or the slots of one kind.

    Attributes:
        variables: tuple of keras.Variable. None where a weight has no such slot.
        offsets: tuple of int. Of each variable, in bytes from the beginning of the memory.
    """

    variables: tuple[Any, ...]
    offsets: tuple[int, ...]

    def views(self, memory: Memory) -> dict[int, Array]:
        """Return the array of each variable in the memory, by the ``id`` of the variable."""
        pairs = zip(self.variables, self.offsets, strict=True)
        return {id(v): _view(memory, v, offset) for v, offset in pairs if v is not None}


@dataclass(frozen=True)
class Piece:
    """A part of the weights that one rank updates.

    Attributes:
        index: int. The variable; of a range of the vector the first variable, for its dtype.
        shape: tuple of int. That of the variable, or (values,) of a range.
        start: int, optional. The range's first value in the vector; None for a variable.
        inputs: tuple of (slice of the gradient vector, slice of the flat piece).
    """

    index: int
    shape: tuple[int, ...]
    start: int | None
    inputs: tuple[tuple[slice, slice], ...]

    def view(self, field: Field, memory: Memory) -> Array | None:
        """Return the piece's values of a field, in the shared memory; None if its variable has no such slot."""
        variable = field.variables[self.index]
        if variable is None:
            return None
        if self.start is None:
            return _view(memory, variable, field.offsets[self.index])
        dtype = dtype_of(variable)
        return memory(dtype, self.shape[0], field.offsets[0] + self.start * dtype.itemsize)


@dataclass(frozen=True)
class SharedLayout:
    """The layout of the shared memory.

    Attributes:
        weights: Field.
        slots: dict of Field by the name of the optimizer's attribute, such as ``_momentums``.
        nbytes: int. Bytes of the memory.
        piece: int, optional. Values of a piece of the vector of all weights; None if the pieces are variables.
        count: int. Pieces of each rank, if they are parts of the vector.
    """

    weights: Field
    slots: dict[str, Field]
    nbytes: int
    piece: int | None
    count: int

    @classmethod
    def of(
        cls, model: keras.Model, trainable: list[Any], size: int, block: int | None = None, tries: bool = False
    ) -> SharedLayout:
        """Return the layout for a model whose optimizer can be divided (``obstacle``).

        Args:
            model: built and compiled.
            trainable: its trainable variables.
            size: int. Number of ranks.
            block: most values of a piece of the vector. Defaults to one piece for each rank.
            tries: whether a trial decides about an optimizer of the user (``independent_unit``).
        """
        optimizer = inner_optimizer(model.optimizer)
        lists = {"": trainable, **slot_lists(optimizer)}
        alike = treats_alike(optimizer, trainable, tries)
        fields: dict[str, Field] = {}
        piece, count, end = None, 0, 0
        for name, variables in lists.items():
            offsets: list[int] = []
            begin = end
            for variable in variables:
                offsets.append(end)
                end += -(-_nbytes(variable) // _ALIGNMENT) * _ALIGNMENT if variable is not None else 0
            fields[name] = Field(tuple(variables), tuple(offsets))
            if alike:
                itemsize = dtype_of(trainable[0]).itemsize
                values = (end - begin) // itemsize
                count = 1 if block is None else -(-values // (size * block))
                piece = -(-values // (size * count * _CUT)) * _CUT
                end = begin + size * count * piece * itemsize  # so that all pieces have the same length
        weights = fields.pop("")
        return cls(weights, fields, end, piece, count)

    def fields(self) -> list[Field]:
        """Return all fields: the weights, then the slots."""
        return [self.weights, *self.slots.values()]

    def pieces(self, slices: list[slice], rank: int, size: int) -> list[Piece]:
        """Return a rank's pieces.

        Args:
            slices: of each variable in the gradient vector, which has no gaps.
            rank: int.
            size: int. Number of ranks.
        """
        if self.piece is None:
            return [_whole(self.weights.variables[i], i, slices[i]) for i in _dealt(slices, size)[rank]]
        first = rank * self.count
        pieces = [self._range(slices, number * self.piece, self.piece) for number in range(first, first + self.count)]
        return [piece for piece in pieces if piece.inputs]

    def _range(self, slices: list[slice], begin: int, length: int) -> Piece:
        """Return the piece of ``length`` values of the vector from ``begin``."""
        itemsize = dtype_of(self.weights.variables[0]).itemsize
        inputs: list[tuple[slice, slice]] = []
        for where, offset in zip(slices, self.weights.offsets, strict=True):
            first = offset // itemsize
            low, high = max(first, begin), min(first + where.stop - where.start, begin + length)
            if low < high:
                shift = where.start - first
                inputs.append((slice(low + shift, high + shift), slice(low - begin, high - begin)))
        return Piece(0, (length,), begin, tuple(inputs))


def _whole(variable: Any, index: int, where: slice) -> Piece:
    return Piece(index, tuple(variable.shape), None, ((where, slice(0, where.stop - where.start)),))


def _dealt(slices: list[slice], size: int) -> list[list[int]]:
    """Deal variables to ranks, the largest first, each to the rank with the fewest values."""
    lengths = [where.stop - where.start for where in slices]
    loads, dealt = [0] * size, [list[int]() for _ in range(size)]
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        rank = loads.index(min(loads))
        loads[rank] += lengths[index]
        dealt[rank].append(index)
    return [sorted(indices) for indices in dealt]


def _nbytes(variable: Any) -> int:
    return int(math.prod(variable.shape) * dtype_of(variable).itemsize)


def _view(memory: Memory, variable: Any, offset: int) -> Array:
    return memory(dtype_of(variable), math.prod(variable.shape), offset).reshape(tuple(variable.shape))
