"""The DOWNPOUR rule: updates are added to the center."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from choros.algorithms.base import TINY, Algorithm, ExchangeInfo, Memory, Vector


@dataclass(frozen=True)
class DOWNPOUR(Algorithm):
    """Asynchronous SGD: each worker adds its update to the center and continues from the center.

    ::

        m = x_k - seen,   c <- c + m,   x_k <- c
        with adagrad:     G <- G + m^2,   c <- c + gamma m / sqrt(G)         for each parameter

    Dean et al. 2012 (Large Scale Distributed Deep Networks, NIPS 25), section 4.1, including Adagrad at the center.
    dist-keras kept the Adagrad state in the workers, so it was lost with them; it also lost the last window.
    Not good for many workers or long windows: p * window steps add up as if they were one. This acts like
    momentum and diverges. Use AGN, DynSGD or ADAG there.

    Args:
        window: int. Optimizer steps between two exchanges; 0 is one exchange per epoch. Defaults to 8.
        adagrad: bool. Whether the center has an Adagrad rate for each parameter. Defaults to False.
        gamma: float. Adagrad's rate, the length of a parameter's first step; used only with adagrad. Defaults to 0.01.

    Example:
        >>> algorithm = DOWNPOUR()
        >>> algorithm.merge(1.0, algorithm.propose(3.0, 1.0, 8), ExchangeInfo(), ())
        (3.0, ())
    """

    mode: ClassVar[Literal["sync", "async"] | None] = "async"

    window: int = 8
    adagrad: bool = False
    gamma: float = 0.01

    def unused(self) -> dict[str, str]:
        """Return ``gamma`` if it was given without ``adagrad``."""
        if self.adagrad or self.gamma == type(self).gamma:
            return super().unused()
        return {**super().unused(), "gamma": "it is the rate of Adagrad, which adagrad=True selects"}

    def start(self, center: Vector, workers: int = 1) -> Memory:
        """Return the accumulated squares, zero; nothing without ``adagrad``."""
        return (0 * center,) if self.adagrad else ()

    def propose(self, local: Vector, seen: Vector, window: int) -> Vector:
        """Return the worker's update since the last exchange."""
        return local - seen

    def merge(self, center: Vector, message: Vector, info: ExchangeInfo, memory: Memory) -> tuple[Vector, Memory]:
        """Add the update to the center."""
        learnt = info.workers * message
        if not self.adagrad:
            return center + learnt, memory
        squares = memory[0] + learnt**2
        return center + self.gamma * learnt / (squares + TINY) ** 0.5, (squares,)
