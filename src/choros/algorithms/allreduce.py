"""The mean of the gradients at every step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from choros.algorithms.base import Algorithm


@dataclass(frozen=True)
class AllReduce(Algorithm):
    """Gradients are averaged at every step: exactly one process with the whole batch, only faster.

    ::

        g = sum_r n_r g_r / sum_r n_r          n_r: what rank r's loss divided by
        x <- x + u(x, g)                       the compiled optimizer's step, the same on every rank

    Synchronous SGD without backup workers, Chen et al. 2016 (1604.00981); what Horovod does.
    dist-keras had nothing like it. Not good where the network is slow or the workers are of unequal speed:
    every step waits for the slowest; take ``LocalSGD`` or ``AEASGD`` there.

    Example:
        >>> AllReduce().level, AllReduce().window
        ('gradients', 1)
    """

    level: ClassVar[Literal["parameters", "gradients"]] = "gradients"

    def __post_init__(self) -> None:
        """Refuse a window: gradients meet at every step."""
        super().__post_init__()
        if self.window != 1:
            self.refuse("window", "gradients meet at every step, so leave it at 1, or take LocalSGD for a window")
