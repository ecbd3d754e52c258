"""The loss scale of a divided update."""

from __future__ import annotations

from typing import TYPE_CHECKING

import keras
import numpy as np

if TYPE_CHECKING:
    from choros.backends.base import BaseReplica


class LossScale:
    """The scale of a ``LossScaleOptimizer``, which all ranks change alike.

    The ranks divide the update of the inner optimizer, whose gradients are divided by the scale. If a gradient is not
    finite, all ranks halve the scale, and the step changes nothing else.

    Args:
        replica: a built replica whose optimizer is a ``keras.optimizers.LossScaleOptimizer``.
    """

    def __init__(self, replica: BaseReplica) -> None:
        self.replica = replica
        self.optimizer: keras.optimizers.LossScaleOptimizer = replica.model.optimizer

    @property
    def factor(self) -> float:
        """The number by which the loss is multiplied."""
        return float(self.replica._values([self.optimizer.dynamic_scale])[0])

    def count_finite(self) -> None:
        """Count a step with finite gradients; the last of ``dynamic_growth_steps`` doubles the scale."""
        counter = self.optimizer.step_counter
        count = int(self.replica._values([counter])[0]) + 1
        if count == self.optimizer.dynamic_growth_steps:
            self._set(self.factor * 2)
        else:
            self.replica._assign([counter], [np.asarray(count)])

    def halve(self) -> None:
        """Halve the scale after a step whose gradients are not finite."""
        self._set(self.factor / 2)

    def _set(self, factor: float) -> None:
        variables = [self.optimizer.step_counter, self.optimizer.dynamic_scale]
        self.replica._assign(variables, [np.asarray(0), np.asarray(factor, "float32")])
