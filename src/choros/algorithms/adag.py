"""The ADAG rule: an update counts less the more often the center has changed since the worker last read it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from choros.algorithms.base import TINY, Algorithm, ExchangeInfo, Memory, Vector


@dataclass(frozen=True)
class ADAG(Algorithm):
    """DOWNPOUR damped by distance: a contribution counts less the further the centre moved since it was pulled.

    ::

        m = x_k - seen,   c <- c + m / (||c - c_seen||^2 / eta + 1),   x_k <- c

    Hermans 2017 (thesis, On Scalable Deep Learning and Parallelizing Gradient Descent), equation "adag", with the
    norm as it is written there; c_seen is kept at the centre (algorithm 2). dist-keras shipped this, elementwise,
    as "Experimental", and gave its name to AGN.
    Not good for huge models: the centre remembers a vector for each worker, and takes it whole, not by blocks.

    Args:
        window: int. Optimizer steps between two meetings; 0 is one meeting an epoch.
        eta: float. The squared distance that halves a contribution; None is its own squared length ||m||^2, ours.
        divide: bool. Whether a contribution is also divided by its steps, as in AGN.

    Example:
        >>> ADAG(divide=True).propose(5.0, 1.0, 8)
        0.5
    """

    mode: ClassVar[Literal["sync", "async"] | None] = "async"
    elementwise: ClassVar[bool] = False

    window: int = 8
    eta: float | None = None
    divide: bool = False

    def __post_init__(self) -> None:
        """Refuse an eta that would divide by nothing."""
        super().__post_init__()
        if self.eta == 0:
            self.refuse("eta", "give a number above 0, or None")

    def start(self, centre: Vector, workers: int = 1) -> Memory:
        """Return the centre as each worker saw it last."""
        return tuple(1 * centre for _ in range(workers))

    def replaced(self, centre: Vector, memory: Memory) -> Memory:
        """Return the new centre for each worker: it takes that one at its next exchange."""
        return self.start(centre, len(memory))

    def propose(self, local: Vector, seen: Vector, window: int) -> Vector:
        """Return what was learnt."""
        return (local - seen) / (max(window, 1) if self.divide else 1)

    def merge(self, centre: Vector, message: Vector, meeting: ExchangeInfo, memory: Memory) -> tuple[Vector, Memory]:
        """Add it, damped, and remember what the sender is shown."""
        moved = ((centre - memory[meeting.sender]) ** 2).sum()
        eta = (message**2).sum() + TINY if self.eta is None else self.eta + TINY
        new = centre + meeting.workers * message * (eta / (moved + eta))
        return new, (*memory[: meeting.sender], new, *memory[meeting.sender + 1 :])
