"""The mean of the gradients at every step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from choros.algorithms.base import Algorithm


@dataclass(frozen=True)
class AllReduce(Algorithm):
    """Synchronous SGD: gradients are averaged at every step, so the result is that of one process with the whole batch.

    ::

        g = sum_r n_r g_r / sum_r n_r          n_r: the divisor in the loss of rank r
        x <- x + u(x, g)                       the compiled optimizer's step, the same on every rank

    Chen et al. 2016 (1604.00981), without backup workers; Horovod and DDP do the same. dist-keras had no such rule.
    Not good where the network is slow or the workers differ in speed, because every step waits for the slowest
    worker. Use ``LocalSGD`` or ``AEASGD`` there.

    Example:
        >>> AllReduce().level, AllReduce().window
        ('gradients', 1)
    """

    level: ClassVar[Literal["parameters", "gradients"]] = "gradients"

    def __post_init__(self) -> None:
        """Refuse any window but 1: gradients are averaged at every step."""
        super().__post_init__()
        if self.window != 1:
            self.refuse("window", "gradients are summed at every step: leave it at 1, or use LocalSGD for a window")
