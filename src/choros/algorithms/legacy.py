"""Rules that only old names refer to: workers can look them up, but they are not listed."""

from __future__ import annotations

from dataclasses import dataclass

from choros.algorithms.base import ExchangeInfo, Memory, Vector
from choros.algorithms.easgd import EASGD


@dataclass(frozen=True)
class MeanEASGD(EASGD):
    """EASGD whose center moves by the mean of the forces: c' = c + alpha (mean_k x_k - c).

    This is dist-keras' rule, corrected, for ``choros.spark.distkeras``. With many workers the center moves slower
    than in EASGD, and alpha may be larger.
    """

    def limit(self, workers: int, z: float) -> float:
        """Return the smallest alpha at which the exchange is unstable: that of EASGD with one worker."""
        return super().limit(1, z)

    def merge(self, center: Vector, message: Vector, info: ExchangeInfo, memory: Memory) -> tuple[Vector, Memory]:
        """Pull the center towards the mean of the workers."""
        return center + self.force * (message - center), memory
