"""The DynSGD rule: an update counts less the staler the worker is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from choros.algorithms.base import Algorithm, ExchangeInfo, Memory, Vector


@dataclass(frozen=True)
class DynSGD(Algorithm):
    """DOWNPOUR divided by staleness: the more merges by other workers since the pull, the less an update counts.

    ::

        m = x_k - seen,   c <- c + m / (s + 1),   x_k <- c          s: merges by other workers since the pull

    The staleness-aware rule of Zhang, Gupta, Lian, Liu 2015 (1511.05950): a rate divided by the staleness.
    dist-keras shipped it under the name of Jiang et al. 2017 (SIGMOD), whose rule also keeps versions of the center.
    dist-keras counted outside its lock, so counts were lost; it also lost the last window.
    Among p equal workers s is p - 1 on average, so the center moves as fast as one worker does.
    Not good for workers of very unequal speed: the updates of slow workers hardly count.

    Args:
        window: int. Optimizer steps between two exchanges; 0 is one exchange per epoch. Defaults to 8.

    Example:
        >>> DynSGD().merge(1.0, 3.0, ExchangeInfo(staleness=2), ())
        (2.0, ())
    """

    mode: ClassVar[Literal["sync", "async"] | None] = "async"

    window: int = 8

    def propose(self, local: Vector, seen: Vector, window: int) -> Vector:
        """Return the worker's update since the last exchange."""
        return local - seen

    def merge(self, center: Vector, message: Vector, info: ExchangeInfo, memory: Memory) -> tuple[Vector, Memory]:
        """Add the update, divided by staleness + 1, to the center."""
        return center + info.workers * message / (info.staleness + 1), memory
