"""The DiLoCo rule: the mean of the updates is the gradient of an outer Nesterov step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from choros.algorithms.base import Algorithm, ExchangeInfo, Memory, Vector


@dataclass(frozen=True)
class DiLoCo(Algorithm):
    """LocalSGD with an outer Nesterov step on the mean of the updates: for very rare exchanges.

    ::

        m = mean_k (x_k - c),   u <- mu u + m,   c <- c + rate (m + mu u),   x_k <- c

    Douillard et al. 2023 (2311.08105), algorithm 1; exactly torch.optim.SGD(nesterov=True) on -m. The inner
    optimizer is the compiled one (in the paper: AdamW); each worker keeps its slots. Published after dist-keras.
    Stable, on quadratics whose inner steps contract, iff rate < (2 + 2 mu) / (1 + 2 mu).
    Not good with short windows and few steps, because the outer momentum overshoots. Use LocalSGD there.

    Args:
        window: int. Steps between two exchanges (the paper: 500); 0 is one exchange per epoch. Defaults to 100.
        outer_rate: float. The outer learning rate. Defaults to 0.7.
        outer_momentum: float. mu, below 1. Defaults to 0.9.

    Example:
        >>> DiLoCo(outer_rate=1.0, outer_momentum=0.0).merge(1.0, 2.0, ExchangeInfo(workers=4), (0.0,))
        (3.0, (2.0,))
    """

    window: int = 100
    outer_rate: float = 0.7
    outer_momentum: float = 0.9

    def bound(self, workers: int, learning_rate: float, *, strict: bool = True) -> Self:
        """Refuse an outer step that diverges."""
        mu, limit = self.outer_momentum, (2 + 2 * self.outer_momentum) / (1 + 2 * self.outer_momentum)
        if mu >= 1 or self.outer_rate >= limit:
            remedy = f"give an outer_momentum below 1 and an outer_rate below {limit:.4g}"
            self.unstable(workers, learning_rate, remedy, strict)
        return self

    def start(self, center: Vector, workers: int = 1) -> Memory:
        """Return the outer velocity, zero."""
        return (0 * center,)

    def propose(self, local: Vector, seen: Vector, window: int) -> Vector:
        """Return the worker's update since the last exchange."""
        return local - seen

    def merge(self, center: Vector, message: Vector, info: ExchangeInfo, memory: Memory) -> tuple[Vector, Memory]:
        """Apply the outer step to the center."""
        velocity = self.outer_momentum * memory[0] + message
        return center + self.outer_rate * (message + self.outer_momentum * velocity), (velocity,)
