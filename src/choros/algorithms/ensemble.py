"""Independent models, averaged only when they predict."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from choros.algorithms.base import Algorithm


@dataclass(frozen=True)
class Ensemble(Algorithm):
    """Every worker trains its own fresh model on its own shard; the prediction is their mean.

    ::

        x_k <- x_k + u(x_k)          for k of p workers, on disjoint shards, from p different starts
        y(input) = 1/p sum_k y(x_k, input)

    Hansen and Salamon 1990 (Neural Network Ensembles, IEEE PAMI 12), with the mean of the probabilities as the vote.
    dist-keras' EnsembleTrainer raised AttributeError always (it read fields that nobody set).
    Not good where data is short (each member sees 1/p of it) or where one small model must be served.

    Example:
        >>> Ensemble().mode is None
        True
    """

    mode: ClassVar[Literal["sync", "async"] | None] = None
