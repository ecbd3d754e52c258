"""The AGN rule: each update is divided by the worker's number of steps, then added to the center."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from choros.algorithms.base import Algorithm, ExchangeInfo, Memory, Vector


@dataclass(frozen=True)
class AGN(Algorithm):
    """Accumulated gradient normalization: DOWNPOUR whose updates are the mean of the steps, not their sum.

    ::

        m = (x_k - seen) / window,   c <- c + m,   x_k <- c

    Hermans, Spanakis, Moeckel 2017 (1710.02368), the paper's only update rule; equation "agn" of Hermans' thesis.
    **dist-keras called this rule ADAG**, and lost the last window. A window of 1 is DOWNPOUR.
    Not good for few steps in all: the center advances by one step per window. In return, training is stable with
    many workers.

    Args:
        window: int. Optimizer steps between two exchanges; 0 is one exchange per epoch. Defaults to 8.

    Example:
        >>> AGN().propose(5.0, 1.0, 8)
        0.5
    """

    mode: ClassVar[Literal["sync", "async"] | None] = "async"

    window: int = 8

    def propose(self, local: Vector, seen: Vector, window: int) -> Vector:
        """Return the mean of the worker's steps since the last exchange."""
        return (local - seen) / max(window, 1)

    def merge(self, center: Vector, message: Vector, info: ExchangeInfo, memory: Memory) -> tuple[Vector, Memory]:
        """Add the update to the center."""
        return center + info.workers * message, memory
