"""The mean of the models, every few steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from choros.algorithms.base import Algorithm


@dataclass(frozen=True)
class LocalSGD(Algorithm):
    """Periodic averaging: workers make ``window`` local steps, then all continue from the mean of their models.

    ::

        x_k <- x_k + u(x_k)                     window times
        c   <- sum_k n_k x_k / sum_k n_k        n_k: the rows that worker k trained since the last exchange
        x_k <- c

    Stich 2018 (1805.09767), algorithm 1, with the weights n_k of McMahan et al. 2016 (1602.05629), algorithm 1.
    dist-keras had it only as AveragingTrainer, which exchanged once per epoch and was wrong (see ``Averaging``).
    Not good for workers of very unequal speed: each exchange waits for the slowest worker.

    Args:
        window: int. Optimizer steps between two exchanges; 0 is one exchange per epoch. Defaults to 8.

    Example:
        >>> LocalSGD(window=16).adopt(3.0, 2.0)
        2.0
    """

    weighted: ClassVar[bool] = True

    window: int = 8
