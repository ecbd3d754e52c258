"""The DynSGD rule: an update counts less the staler the worker is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from choros.algorithms.base import Algorithm, ExchangeInfo, Memory, Vector


@dataclass(frozen=True)
class DynSGD(Algorithm):
    """DOWNPOUR divided by staleness: the more merges by others since the pull, the less a contribution counts.

    ::

        m = x_k - seen,   c <- c + m / (s + 1),   x_k <- c          s: merges by others since x_k was pulled

    The staleness-aware rule of Zhang, Gupta, Lian, Liu 2015 (1511.05950), a rate divided by the staleness, which
    dist-keras shipped under the name of Jiang et al. 2017 (SIGMOD; theirs also keeps versions of the centre).
    dist-keras counted outside its lock, so that ticks were lost, and lost the last window.
    Among p equal workers s is p - 1 on average, so that the centre moves at one worker's pace.
    Not good for workers of very unequal speed: what the slow ones saw hardly counts.

    Args:
        window: int. Optimizer steps between two meetings; 0 is one meeting an epoch.

    Example:
        >>> DynSGD().merge(1.0, 3.0, ExchangeInfo(staleness=2), ())
        (2.0, ())
    """

    mode: ClassVar[Literal["sync", "async"] | None] = "async"

    window: int = 8

    def propose(self, local: Vector, seen: Vector, window: int) -> Vector:
        """Return what was learnt."""
        return local - seen

    def merge(self, centre: Vector, message: Vector, meeting: ExchangeInfo, memory: Memory) -> tuple[Vector, Memory]:
        """Add it, divided by staleness + 1."""
        return centre + meeting.workers * message / (meeting.staleness + 1), memory
