"""Synchronous elastic averaging."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

from choros.algorithms.base import Algorithm, ExchangeInfo, Memory, Vector


@dataclass(frozen=True)
class EASGD(Algorithm):
    """Synchronous elastic averaging: workers train locally, and an elastic force ties them to a common center.

    ::

        x_k <- x_k + u(x_k)                                  window times
        c' = c + p alpha (mean_k x_k - c),  x_k' = x_k - alpha (x_k - c)

    Zhang, Choromanska, LeCun 2015 (1412.6651), equations 5 and 6, but the exchange comes after the local steps:
    with z = learning rate * curvature (here 1; z <= 1) it is stable iff (2 - z)(2 - p alpha) > 2 alpha (1 - z).
    dist-keras had a wrong sign, so the loss increased, and it used the mean instead of the sum.
    Not good for few steps: the center lags.

    Args:
        window: int. Optimizer steps between two exchanges; 0 is one exchange per epoch. Defaults to 8.
        alpha: float. The elastic force (the paper's learning rate * rho); None is 0.9 / workers. Defaults to None.

    Example:
        >>> EASGD(alpha=0.25).merge(1.0, 3.0, ExchangeInfo(workers=2), ())
        (2.0, ())
    """

    shows: ClassVar[Literal["before", "after"]] = "before"

    window: int = 8
    alpha: float | None = None

    def limit(self, workers: int, z: float) -> float:
        """Return the smallest alpha at which the exchange is unstable."""
        return 2 * (2 - z) / (workers * (2 - z) + 2 * (1 - z))

    def bound(self, workers: int, learning_rate: float, *, strict: bool = True) -> Self:
        """Set ``alpha=None`` to 0.9 / workers; refuse an alpha at which the exchange diverges."""
        bound = replace(self, alpha=0.9 / workers if self.alpha is None else self.alpha)
        if bound.force >= (limit := self.limit(workers, min(max(learning_rate, 0.0), 1.0))):
            bound.unstable(workers, learning_rate, f"give an alpha below {limit:.4g}, or None", strict)
        return bound

    def merge(self, center: Vector, message: Vector, info: ExchangeInfo, memory: Memory) -> tuple[Vector, Memory]:
        """Pull the center towards the workers."""
        return center + (info.workers * self.force) * (message - center), memory

    def adopt(self, local: Vector, shown: Vector) -> Vector:
        """Pull the worker towards the center."""
        return local - self.force * (local - shown)

    @property
    def force(self) -> float:
        """The alpha in use.

        Raises:
            ValueError: ``alpha`` is None because ``bound`` has not been called.
        """
        return self.refuse("alpha", "call bound first, or give a number") if self.alpha is None else self.alpha
