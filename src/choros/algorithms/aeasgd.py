"""Elastic averaging, each worker in its own time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from choros.algorithms.easgd import EASGD


@dataclass(frozen=True)
class AEASGD(EASGD):
    """EASGD without waiting: each worker meets the centre when its own window is full. A good first choice.

    ::

        x_k <- x_k + u(x_k)                                     window times
        e = alpha (x_k - c),   x_k <- x_k - e,   c <- c + e     one atomic exchange

    Zhang, Choromanska, LeCun 2015 (1412.6651), algorithm 1, but the exchange comes after the local steps. With
    z = learning rate * curvature, here taken as 1, that is stable iff 0 <= alpha <= (4 - 2z)/(4 - 3z) (the
    paper's order, its section 4: (4 - 2z)/(4 - z)). x_k + c is conserved by an exchange.
    dist-keras had alpha = 0.5 for any number of workers, pulled and committed in two requests between which the
    centre moved, lost the last window, and explained rho the wrong way round: a *lower* alpha explores more.
    Not good for few steps in all, or for very many workers: alpha shrinks with their number.

    Args:
        window: int. Optimizer steps between two meetings; 0 is one meeting an epoch.
        alpha: float. The elastic force (the paper's learning rate * rho); None is 0.9 / workers.

    Example:
        >>> AEASGD().bound(workers=4, learning_rate=0.01).alpha
        0.225
        >>> AEASGD(alpha=0.25).adopt(3.0, 1.0)
        2.5
    """

    mode: ClassVar[Literal["sync", "async"] | None] = "async"

    def limit(self, workers: int, z: float) -> float:
        """Return the alpha above which workers that come in turn diverge."""
        return (4 - 2 * z) / (4 - 3 * z)
