"""Detection of the first number that is not finite. Each rank that computes such numbers itself reports it once."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import numpy as np

from choros.types import Array

if TYPE_CHECKING:
    import keras

logger = logging.getLogger(__name__)


class LossRecord(Protocol):
    """The position at which a rank's numbers first were not finite; -1 if they are finite."""

    rank: int
    host: str
    lost_epoch: int
    lost_step: int


class NonFiniteDetector:
    """Detector of numbers that are not finite in the gradients or weights that a rank exchanges.

    Gradients under loss scaling are not checked, because the optimizer skips a step whose gradients are not finite.
    Only the loss is checked then.

    Args:
        stats: returns the record that stores the position.
        workers: int. Number of workers.
        optimizer: the optimizer of the model.
        held: returns this rank's current weights.

    Attributes:
        over: bool. Whether this rank has reported, or has received numbers that are not finite from another rank.
    """

    def __init__(
        self,
        stats: Callable[[], LossRecord],
        workers: int,
        optimizer: keras.optimizers.Optimizer,
        held: Callable[[], Array],
    ) -> None:
        self.stats, self.workers, self.held = stats, workers, held
        self.scaled = hasattr(optimizer, "inner_optimizer")
        self.over = False

    def gradient(self, gradients: Array, loss: float, epoch: int, step: int) -> None:
        """Check this rank's gradients before they are summed.

        Args:
            gradients: flat array, weighted by the divisor of the loss.
            loss: float. The loss, or a number that is finite if the loss is.
            epoch: int. Counted from 0.
            step: int. Counted from 0 within the epoch.
        """
        self.note(self.check(gradients, loss), epoch, step)

    def check(self, gradients: Array, loss: float) -> str | None:
        """Return the name of the quantity that is not finite, for gradients that may still be dropped.

        Args:
            gradients: as in ``gradient``.
            loss: as in ``gradient``.

        Returns:
            None if all values are finite. "" if an earlier sum was not finite; the rank that computed it reports it.
        """
        if self.over:
            return None
        finite_loss = math.isfinite(loss)
        if finite_loss and (self.scaled or _finite(gradients)):
            return None
        if np.isfinite(self.held()).all():
            return "a gradient" if finite_loss else "the loss"
        return ""

    def note(self, name: str | None, epoch: int, step: int) -> None:
        """Record the result of ``check`` for gradients that are used."""
        if name:
            self.report(name, epoch, step)
        self.over = self.over or name is not None

    def weights(self, local: Array, epoch: int, step: int | None) -> None:
        """Check this rank's weights before an exchange."""
        if not self.over and not _finite(local):
            self.report("a weight", epoch, step)

    def exchanged(self, local: Array) -> None:
        """Check the weights with which this rank continues after an exchange."""
        self.over = self.over or not _finite(local)

    def loss(self, loss: object, epoch: int) -> None:
        """Check the loss of an epoch without an earlier report."""
        if isinstance(loss, float) and not math.isfinite(loss) and self.stats().lost_epoch < 0:
            self.report("the loss" if self.workers == 1 else "the loss of all ranks", epoch, None)

    def report(self, quantity: str, epoch: int, step: int | None) -> None:
        """Record the position, and log a warning."""
        self.over = True
        stats = self.stats()
        stats.lost_epoch, stats.lost_step = epoch, -1 if step is None else step
        where = "" if step is None else f", step {step + 1}"
        logger.warning(
            f"rank {stats.rank} of {self.workers} on {stats.host}: {quantity} is not finite, first seen "
            f"in epoch {epoch + 1}{where}. Training continues, but all weights that follow are not finite, on all "
            "ranks: look at that rank's rows, lower the learning rate or clip (clipnorm=); "
            "keras.callbacks.TerminateOnNaN ends such a run."
        )


def _finite(vector: Array) -> bool:
    """Return whether the first value, the last and two between are finite, which takes a microsecond."""
    value, last = vector.item, vector.size - 1
    return last < 0 or math.isfinite(value(0) + value(last // 3) + value(last - last // 3) + value(last))
