"""Horovod's learning rate callbacks, with the momentum correction of Goyal et al. 2017."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from choros.argument_checks import check_flag, check_number, check_whole
from choros.backends import inner_optimizer
from choros.backends.host_values import host_value
from choros.console import write_line
from choros.hvd.context import rank, size
from choros.object_text import call_text


class LearningRateScheduleCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Callback that multiplies the initial learning rate in epochs ``start_epoch`` to ``end_epoch - 1``.

    It does not change the rate in other epochs.

    With momentum correction the velocity is scaled by new rate / old rate when the rate changes (Goyal et al. 2017,
    Accurate, Large Minibatch SGD, remark 2). This applies to optimizers whose velocity contains the rate (SGD,
    RMSprop). It follows the paper also with Nesterov momentum, and works in compiled steps.

    Args:
        initial_lr: float. The rate that is multiplied.
        multiplier: float m, for m ** (epoch - start_epoch), or a function of the epoch.
        start_epoch: int. Defaults to 0.
        end_epoch: int. The first epoch that the callback no longer changes. Defaults to None, no end.
        staircase: bool. True (default): once per epoch; always with a float multiplier. False: every batch, at
            epoch + batch / steps.
        momentum_correction: bool. Defaults to True.
        steps_per_epoch: int. Batches of an epoch; needed if Keras does not know them and ``staircase`` is False.

    Raises:
        InvalidInputError: an argument is not a valid number.
        ValueError: the optimizer's rate is a schedule; the steps are unknown.

    Example:
        >>> halving = LearningRateScheduleCallback(0.1, 0.5)
        >>> [round(halving.rate(epoch), 4) for epoch in range(3)]
        [0.1, 0.05, 0.025]
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        self.initial_lr = check_number("initial_lr", initial_lr, "the learning rate that is multiplied, 0 or more")
        check_number("start_epoch", start_epoch)
        if end_epoch is not None:
            check_number("end_epoch", end_epoch)
        if steps_per_epoch is not None:
            check_whole("steps_per_epoch", steps_per_epoch, 1, "batches")
        self.start_epoch, self.end_epoch, self.steps_per_epoch = start_epoch, end_epoch, steps_per_epoch
        self.staircase = check_flag("staircase", staircase)
        self.momentum_correction = check_flag("momentum_correction", momentum_correction)
        self._multiplier = multiplier
        self.multiplier: Callable[[float], float]
        if callable(multiplier):
            self.multiplier = multiplier
        else:
            remedy = "a finite number of 0 or more, or a function of the epoch"
            self.staircase, factor = True, check_number("multiplier", multiplier, remedy)
            self.multiplier = lambda epoch: float(factor ** (epoch - start_epoch))
        self.epoch = 0

    def __repr__(self) -> str:
        return call_text(
            self,
            self.initial_lr,
            self._multiplier,
            start_epoch=self.start_epoch,
            end_epoch=self.end_epoch,
            staircase=self.staircase,
            momentum_correction=self.momentum_correction,
            steps_per_epoch=self.steps_per_epoch,
        )

    def rate(self, epoch: float) -> float:
        """Return the learning rate at an epoch, which may be fractional."""
        return self.initial_lr * self.multiplier(epoch)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Check that the rate can be set and the steps are known."""
        if not isinstance(inner_optimizer(self.model.optimizer)._learning_rate, keras.Variable):
            raise ValueError(
                f"{type(self).__name__} sets the learning rate, but that of the optimizer is a schedule: give the "
                "optimizer a number."
            )
        if not self.staircase and not (self.steps_per_epoch or self.params.get("steps")):
            raise ValueError("How many batches an epoch has is not known here: give steps_per_epoch.")

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Record the epoch."""
        self.epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Set the rate: at the first batch of an epoch, or at every batch if ``staircase`` is False."""
        if self.epoch < self.start_epoch or (self.end_epoch is not None and self.epoch >= self.end_epoch):
            return
        if not self.staircase:
            self._set(self.rate(self.epoch + batch / (self.steps_per_epoch or self.params["steps"])))
        elif batch == 0:
            self._set(self.rate(self.epoch))

    def _set(self, new: float) -> None:
        optimizer = inner_optimizer(self.model.optimizer)
        if hasattr(self.model, "jax_state_sync"):
            self.model.jax_state_sync()  # so that the changes below go into the state of the next step
        old = _rate(optimizer)
        if new == old:
            return
        optimizer.learning_rate = new
        if self.momentum_correction and old and getattr(optimizer, "momentum", None):
            for velocity in getattr(optimizer, "momentums", None) or getattr(optimizer, "_momentums", None) or []:
                if velocity is not None:
                    velocity.assign(velocity * (new / old))

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Add the rate to the logs."""
        if logs is not None:
            logs["lr"] = _rate(inner_optimizer(self.model.optimizer))


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Callback that raises the rate from ``initial_lr / size`` to ``initial_lr`` in ``warmup_epochs``, at every batch.

    At step b of epoch e, with n ranks and s steps in an epoch, the rate is ``initial_lr / n * (1 + (e + (b + 1) / s) *
    (n - 1) / warmup_epochs)`` (Goyal et al. 2017, section 2.2).

    Args:
        initial_lr: float. The rate for all ranks: that of one rank times the number of ranks.
        warmup_epochs: float. Defaults to 5.
        momentum_correction: bool. Defaults to True.
        steps_per_epoch: int. See ``LearningRateScheduleCallback``.
        verbose: int. 1: rank 0 prints a line at the end of the warm-up. Defaults to 0.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: float = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        check_number("warmup_epochs", warmup_epochs)

        def warm(epoch: float) -> float:
            steps = self.steps_per_epoch or self.params["steps"]
            ranks = size()
            return 1 / ranks * ((epoch + 1 / steps) * (ranks - 1) / warmup_epochs + 1)

        super().__init__(initial_lr, warm, 0, int(warmup_epochs), False, momentum_correction, steps_per_epoch)
        self.verbose, self._warmup_epochs = verbose, warmup_epochs

    def __repr__(self) -> str:
        return call_text(
            self,
            self.initial_lr,
            warmup_epochs=self._warmup_epochs,
            momentum_correction=self.momentum_correction,
            steps_per_epoch=self.steps_per_epoch,
            verbose=self.verbose,
        )

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Add the rate to the logs; if ``verbose``, print a line at the end of the warm-up."""
        super().on_epoch_end(epoch, logs)
        if self.end_epoch is not None and epoch == self.end_epoch - 1 and self.verbose and rank() == 0:
            rate = _rate(inner_optimizer(self.model.optimizer))
            write_line(f"\nEpoch {epoch + 1}: the warmup of the learning rate ends at {rate:g}.")


def _rate(optimizer: keras.optimizers.Optimizer) -> float:
    return float(host_value(optimizer.learning_rate))
