"""Rules that only old names mean: workers find them, and nobody else is offered them."""

from __future__ import annotations

from dataclasses import dataclass

from choros.algorithms.base import ExchangeInfo, Memory, Vector
from choros.algorithms.easgd import EASGD


@dataclass(frozen=True)
class MeanEASGD(EASGD):
    """EASGD whose centre moves by the mean of the forces, c' = c + alpha (mean_k x_k - c): dist-keras' rule, mended.

    For ``choros.spark.distkeras``; with many workers the centre is slower than EASGD's, and alpha may be larger.
    """

    def limit(self, workers: int, z: float) -> float:
        """Return the alpha from which on it is unstable: the mean is one worker to it."""
        return super().limit(1, z)

    def merge(self, centre: Vector, message: Vector, meeting: ExchangeInfo, memory: Memory) -> tuple[Vector, Memory]:
        """Pull the centre towards the mean."""
        return centre + self.force * (message - centre), memory
