"""Independent models whose predictions are averaged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from choros.algorithms.base import Algorithm


@dataclass(frozen=True)
class Ensemble(Algorithm):
    """Independent training of one fresh model per worker, on separate shards; predictions are averaged.

    ::

        x_k <- x_k + u(x_k)          for k of p workers, on disjoint shards, from p different starts
        y(input) = 1/p sum_k y(x_k, input)

    Hansen and Salamon 1990 (Neural Network Ensembles, IEEE PAMI 12), with the mean of the probabilities as the vote.
    dist-keras' EnsembleTrainer always raised AttributeError, because it read fields that were never set.
    Not good where data is scarce (each member sees 1/p of it) or where one small model must be served.

    Example:
        >>> Ensemble().mode is None
        True
    """

    mode: ClassVar[Literal["sync", "async"] | None] = None
