"""Asynchronous elastic averaging."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from choros.algorithms.easgd import EASGD


@dataclass(frozen=True)
class AEASGD(EASGD):
    """Asynchronous EASGD: each worker exchanges with the center after each of its windows. Suits unequal speeds.

    ::

        x_k <- x_k + u(x_k)                                     window times
        e = alpha (x_k - c),   x_k <- x_k - e,   c <- c + e     one atomic exchange

    Zhang, Choromanska, LeCun 2015 (1412.6651), algorithm 1, but the exchange comes after the local steps. With
    z = learning rate * curvature (curvature taken as 1) it is stable iff 0 <= alpha <= (4 - 2z)/(4 - 3z). For the
    paper's order, section 4 gives (4 - 2z)/(4 - z). An exchange conserves x_k + c.
    dist-keras used alpha = 0.5 for any number of workers. It pulled and committed in two requests, between which the
    center moved. It lost the last window, and described rho in reverse: a *lower* alpha explores more.
    Not good for few steps in all, or for very many workers: alpha shrinks with their number.

    Args:
        window: int. Optimizer steps between two exchanges; 0 is one exchange per epoch. Defaults to 8.
        alpha: float. The elastic force (the paper's learning rate * rho); None is 0.9 / workers. Defaults to None.

    Example:
        >>> AEASGD().bound(workers=4, learning_rate=0.01).alpha
        0.225
        >>> AEASGD(alpha=0.25).adopt(3.0, 1.0)
        2.5
    """

    mode: ClassVar[Literal["sync", "async"] | None] = "async"

    def limit(self, workers: int, z: float) -> float:
        """Return the alpha above which workers that exchange one after another diverge."""
        return (4 - 2 * z) / (4 - 3 * z)
