"""The mean of the models, once an epoch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from choros.algorithms.base import Algorithm


@dataclass(frozen=True)
class Averaging(Algorithm):
    """Workers train an epoch apart, then all go on from the mean of their models.

    ::

        c <- sum_k n_k x_k / sum_k n_k          n_k: the rows that worker k trained since the last meeting
        x_k <- c

    Parameter mixing, McDonald, Hall and Mann 2010 (NAACL, N10-1069), figure 3 (iterative parameter mixing).
    dist-keras' AveragingTrainer never cleared its buffer, so that epoch e returned mean + b(e-1)/n (workers
    constantly at 1 and 3 gave 2, 3, 3.5, 3.75 instead of 2), and did not weight by rows.
    Not good for many workers or long epochs: models that have gone far apart have a poor mean.

    Args:
        window: int. Optimizer steps between two meetings; 0, the default, is one meeting an epoch.

    Example:
        >>> Averaging().window, Averaging().weighted
        (0, True)
    """

    weighted: ClassVar[bool] = True

    window: int = 0
