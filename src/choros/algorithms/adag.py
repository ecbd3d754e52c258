"""The ADAG rule: an update counts less the further the center has moved since the worker last read it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from choros.algorithms.base import TINY, Algorithm, ExchangeInfo, Memory, Vector


@dataclass(frozen=True)
class ADAG(Algorithm):
    """DOWNPOUR damped by distance: an update counts less the further the center moved since the last pull.

    ::

        m = x_k - seen,   c <- c + m / (||c - c_seen||^2 / eta + 1),   x_k <- c

    Hermans 2017 (thesis, On Scalable Deep Learning and Parallelizing Gradient Descent), equation "adag", with the
    norm as written there. The parameter server keeps c_seen (algorithm 2). dist-keras shipped this rule, elementwise,
    as "Experimental", and gave the name ADAG to AGN.
    Not good for huge models: the server keeps one vector per worker and merges whole vectors, not blocks.

    Args:
        window: int. Optimizer steps between two exchanges; 0 is one exchange per epoch. Defaults to 8.
        eta: float. The squared distance that halves an update; None, our addition, takes ||m||^2. Defaults to None.
        divide: bool. Whether an update is also divided by its number of steps, as in AGN. Defaults to False.

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
        """Refuse ``eta=0``, which would divide by zero."""
        super().__post_init__()
        if self.eta == 0:
            self.refuse("eta", "give a number above 0, or None")

    def start(self, center: Vector, workers: int = 1) -> Memory:
        """Return the center as each worker last saw it: one vector per worker."""
        return tuple(1 * center for _ in range(workers))

    def replaced(self, center: Vector, memory: Memory) -> Memory:
        """Return the new center for each worker, which adopts it at the next exchange."""
        return self.start(center, len(memory))

    def propose(self, local: Vector, seen: Vector, window: int) -> Vector:
        """Return the worker's update, divided by the number of steps if ``divide`` is set."""
        return (local - seen) / (max(window, 1) if self.divide else 1)

    def merge(self, center: Vector, message: Vector, info: ExchangeInfo, memory: Memory) -> tuple[Vector, Memory]:
        """Add the damped update to the center and remember the center that the sender gets."""
        moved = ((center - memory[info.sender]) ** 2).sum()
        eta = (message**2).sum() + TINY if self.eta is None else self.eta + TINY
        new = center + info.workers * message * (eta / (moved + eta))
        return new, (*memory[: info.sender], new, *memory[info.sender + 1 :])
