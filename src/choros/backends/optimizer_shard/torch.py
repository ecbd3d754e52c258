"""A rank's share of the optimizer's update on PyTorch: the optimizer writes the weights and slots in shared memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import torch

from choros.backends.optimizer_shard.layout import Memory, Piece
from choros.backends.optimizer_shard.shard import OptimizerShard
from choros.cluster.hardware.array_threads import with_number
from choros.types import Array


class TorchOptimizerShard(OptimizerShard):
    """One rank's share of the optimizer's update on PyTorch; see ``OptimizerShard``.

    A layer may set a weight in a step without the optimizer, as ``SpectralNormalization`` does. PyTorch counts such
    writes for each tensor. The pieces are other tensors on the same memory, so the optimizer's writes do not count.
    """

    def __init__(self, replica: Any, rank: int, size: int, tries: bool = False) -> None:
        super().__init__(replica, rank, size, tries)
        original, copy = vars(self.original), vars(self.optimizer)
        copy.update({name: value for name, value in original.items() if isinstance(value, keras.Variable)})
        self._writes = 0
        lengths = [total.size for total in self.sums]
        if sum(lengths) <= replica._host.size:  # memory of the whole update, which has no use now
            ends = np.cumsum([0, *lengths]).tolist()
            self.sums = [replica._host[begin:end] for begin, end in itertools.pairwise(ends)]

    @staticmethod
    def on_host(replica: Any) -> bool:
        """Return whether the weights are in memory of this host; see ``OptimizerShard``."""
        return all(variable.value.device.type == "cpu" for variable in replica.trainable)

    def watch(self) -> None:
        """Begin to observe whether a step sets weights without the optimizer."""
        self._writes = self._count_writes()

    def sets_weights(self) -> bool:
        """Return whether a step has set weights without the optimizer."""
        return self._count_writes() != self._writes

    def _count_writes(self) -> int:
        return sum(variable.value._version for variable in self.replica.trainable)

    def _attach(self, memory: Memory) -> None:
        self._shared: list[Any] = []
        for field in self.layout.fields():
            views = field.views(memory)
            for variable in field.variables:
                if variable is not None:
                    variable.value.data = torch.from_numpy(views[id(variable)])
                    self._shared.append(variable)
        _place(self.variables, [piece.view(self.layout.weights, memory) for piece in self.pieces])
        for name, field in self.layout.slots.items():
            if self.pieces:
                _place(vars(self.optimizer)[name], [piece.view(field, memory) for piece in self.pieces])

    def _update(self, divisor: float, sum_group: Callable[[list[Piece]], None]) -> None:
        sum_group(self.pieces)
        gradients: list[Any] = []
        for total, piece, variable in zip(self.sums, self.pieces, self.variables, strict=True):
            with_number(np.divide, total, divisor, total)
            gradients.append(torch.from_numpy(total.reshape(piece.shape)).to(variable.value.dtype))
        with torch.no_grad():
            self.optimizer.apply(gradients, self.variables)

    def _detach(self) -> None:
        for variable in self._shared:
            variable.value.data = variable.value.data.clone()
        self._shared = []


def _place(variables: list[Any], views: list[Array | None]) -> None:
    """Let variables use the memory of arrays."""
    for variable, view in zip(variables, views, strict=True):
        if variable is not None and view is not None:
            variable._value = torch.nn.Parameter(torch.from_numpy(view), requires_grad=False)
