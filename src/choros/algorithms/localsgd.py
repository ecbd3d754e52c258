"""The mean of the models, every few steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from choros.algorithms.base import Algorithm


@dataclass(frozen=True)
class LocalSGD(Algorithm):
    """Workers make ``window`` steps apart, then all go on from the mean: AllReduce with fewer meetings.

    ::

        x_k <- x_k + u(x_k)                     window times
        c   <- sum_k n_k x_k / sum_k n_k        n_k: the rows that worker k trained since the last meeting
        x_k <- c

    Stich 2018 (1805.09767), algorithm 1; the weights are McMahan et al. 2016 (1602.05629),
    algorithm 1. dist-keras had it only as AveragingTrainer, an epoch at a time and wrong.
    Not good for workers of very unequal speed: all wait at each meeting for the slowest.

    Args:
        window: int. Optimizer steps between two meetings; 0 is one meeting an epoch.

    Example:
        >>> LocalSGD(window=16).adopt(3.0, 2.0)
        2.0
    """

    weighted: ClassVar[bool] = True

    window: int = 8
