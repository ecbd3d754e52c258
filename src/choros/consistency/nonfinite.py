"""The first number that is not finite: reported once, by the rank whose own it was."""

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
    """The place where a rank's numbers first were not finite; -1 where they are."""

    rank: int
    host: str
    lost_epoch: int
    lost_step: int


class NonFiniteDetector:
    """Looks at what a rank brings to the others.

    Nothing is searched: four values are looked at where the vector is in this process anyway. Of gradients under
    loss scaling only the loss counts, as the optimizer leaves out a step of which they are not finite.

    Args:
        tally: called for the record that takes down where it was.
        workers: int. How many train.
        optimizer: the model's.
        held: called for this rank's weights as they are.

    Attributes:
        over: bool. Whether it was told, here or (what came from others was not finite) there.
    """

    def __init__(
        self,
        tally: Callable[[], LossRecord],
        workers: int,
        optimizer: keras.optimizers.Optimizer,
        held: Callable[[], Array],
    ) -> None:
        self.tally, self.workers, self.held = tally, workers, held
        self.scaled = hasattr(optimizer, "inner_optimizer")
        self.over = False

    def gradient(self, gradients: Array, loss: float, epoch: int, step: int) -> None:
        """Check this rank's gradients before they are summed.

        Args:
            gradients: flat array, weighted by what the loss divides by.
            loss: float. The loss, or a number that is finite where the loss is.
            epoch: int. From 0.
            step: int. Within the epoch, from 0.
        """
        self.note(self.look(gradients, loss), epoch, step)

    def look(self, gradients: Array, loss: float) -> str | None:
        """Return the name of what is not finite in gradients that may yet be dropped; None where all is finite.

        It is "" where an earlier sum was not finite: who brought that has told.

        Args:
            gradients: as ``gradient`` has them.
            loss: the same.
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
        """Take down what ``look`` returned of gradients that count."""
        if name:
            self.report(name, epoch, step)
        self.over = self.over or name is not None

    def weights(self, local: Array, epoch: int, step: int | None) -> None:
        """Look at this rank's weights, before it meets the others."""
        if not self.over and not _finite(local):
            self.report("a weight", epoch, step)

    def met(self, local: Array) -> None:
        """Look at what this rank goes on with after a meeting."""
        self.over = self.over or not _finite(local)

    def loss(self, loss: object, epoch: int) -> None:
        """Check the loss of an epoch without an earlier report."""
        if isinstance(loss, float) and not math.isfinite(loss) and self.tally().lost_epoch < 0:
            self.report("the loss" if self.workers == 1 else "the loss of all ranks", epoch, None)

    def report(self, quantity: str, epoch: int, step: int | None) -> None:
        """Take it down, and say it on stderr."""
        self.over = True
        tally = self.tally()
        tally.lost_epoch, tally.lost_step = epoch, -1 if step is None else step
        where = "" if step is None else f", step {step + 1}"
        logger.warning(
            f"rank {tally.rank} of {self.workers} on {tally.host}: {quantity} is not finite, first seen "
            f"in epoch {epoch + 1}{where}. Training continues, but all weights that follow are not finite, on all "
            f"ranks: look at that rank's rows, lower the learning rate or clip (clipnorm=); "
            "keras.callbacks.TerminateOnNaN ends such a run. This warning appears once."
        )


def _finite(vector: Array) -> bool:
    """Return whether the first value, the last and two between are finite, which takes a microsecond."""
    value, last = vector.item, vector.size - 1
    return last < 0 or math.isfinite(value(0) + value(last // 3) + value(last - last // 3) + value(last))
