"""The AGN rule: each update is divided by the worker's number of steps, then added to the center."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from choros.algorithms.base import Algorithm, ExchangeInfo, Memory, Vector


@dataclass(frozen=True)
class AGN(Algorithm):
    """Accumulated gradient normalisation: DOWNPOUR whose contributions are the mean step, not the sum.

    ::

        m = (x_k - seen) / window,   c <- c + m,   x_k <- c

    Hermans, Spanakis, Moeckel 2017 (1710.02368), the paper's one update rule; equation "agn" of Hermans' thesis.
    **dist-keras called this one ADAG**, and lost the last window. A window of 1 is DOWNPOUR.
    Not good for few steps in all: the centre advances by one step for each window that is computed, which buys
    stability with many workers.

    Args:
        window: int. Optimizer steps between two meetings; 0 is one meeting an epoch.

    Example:
        >>> AGN().propose(5.0, 1.0, 8)
        0.5
    """

    mode: ClassVar[Literal["sync", "async"] | None] = "async"

    window: int = 8

    def propose(self, local: Vector, seen: Vector, window: int) -> Vector:
        """Return the mean step."""
        return (local - seen) / max(window, 1)

    def merge(self, centre: Vector, message: Vector, meeting: ExchangeInfo, memory: Memory) -> tuple[Vector, Memory]:
        """Add it."""
        return centre + meeting.workers * message, memory
