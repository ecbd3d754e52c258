"""The mean of the models, once per epoch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from choros.algorithms.base import Algorithm


@dataclass(frozen=True)
class Averaging(Algorithm):
    """Parameter mixing: workers train one epoch locally, then all continue from the mean of their models.

    ::

        c <- sum_k n_k x_k / sum_k n_k          n_k: the rows that worker k trained since the last exchange
        x_k <- c

    Parameter mixing, McDonald, Hall and Mann 2010 (NAACL, N10-1069), figure 3 (iterative parameter mixing).
    dist-keras' AveragingTrainer never cleared its buffer, so epoch e returned mean + b(e-1)/n (workers
    constantly at 1 and 3 gave 2, 3, 3.5, 3.75 instead of 2). It did not weight by rows.
    Not good for many workers or long epochs: the mean of models that have diverged far from each other is poor.

    Args:
        window: int. Optimizer steps between two exchanges; 0, the default, is one exchange per epoch.

    Example:
        >>> Averaging().window, Averaging().weighted
        (0, True)
    """

    weighted: ClassVar[bool] = True

    window: int = 0
