"""The DOWNPOUR rule: updates are added to the center."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from choros.algorithms.base import TINY, Algorithm, ExchangeInfo, Memory, Vector


@dataclass(frozen=True)
class DOWNPOUR(Algorithm):
    """Each worker adds what it learnt to the centre in its own time and goes on from the centre.

    ::

        m = x_k - seen,   c <- c + m,   x_k <- c
        with adagrad:     G <- G + m^2,   c <- c + gamma m / sqrt(G)         for each parameter

    Dean et al. 2012 (Large Scale Distributed Deep Networks, NIPS 25), section 4.1; Adagrad at the centre is
    theirs. dist-keras kept Adagrad in the workers, whose state was lost with them, and lost the last window.
    Not good for many workers or long windows: p * window steps add up as if they were one, which acts like
    momentum and diverges; take AGN, DynSGD or ADAG there.

    Args:
        window: int. Optimizer steps between two meetings; 0 is one meeting an epoch.
        adagrad: bool. Whether the centre has an Adagrad rate for each parameter.
        gamma: float. Adagrad's rate, the length of a parameter's first step; without adagrad unused.

    Example:
        >>> algorithm = DOWNPOUR()
        >>> algorithm.merge(1.0, algorithm.propose(3.0, 1.0, 8), ExchangeInfo(), ())
        (3.0, ())
    """

    mode: ClassVar[Literal["sync", "async"] | None] = "async"

    window: int = 8
    adagrad: bool = False
    gamma: float = 0.01

    def start(self, centre: Vector, workers: int = 1) -> Memory:
        """Return the accumulated squares."""
        return (0 * centre,) if self.adagrad else ()

    def propose(self, local: Vector, seen: Vector, window: int) -> Vector:
        """Return what was learnt."""
        return local - seen

    def merge(self, centre: Vector, message: Vector, meeting: ExchangeInfo, memory: Memory) -> tuple[Vector, Memory]:
        """Add it."""
        learnt = meeting.workers * message
        if not self.adagrad:
            return centre + learnt, memory
        squares = memory[0] + learnt**2
        return centre + self.gamma * learnt / (squares + TINY) ** 0.5, (squares,)
