"""The divisor of a loss. It is the weight with which the ranks' gradients add up to the gradient of one process.

Let ``L = sum(l) / n`` be the loss of one global batch. Its parts have the losses ``L_r = sum_r(l) / n_r``. Then

    grad L = sum_r(n_r * grad L_r) / sum_r(n_r)

so each rank sends ``[n_r * g_r ..., n_r]``. ``n`` follows Keras' ``reduction``:

- ``sum_over_batch_size`` and ``mean``: the number of rows, or of valid entries if there is a mask.
- ``mean_with_sample_weight``: the sum of the weights.
- ``sum``: gradients are added without weights.

Terms that do not depend on the rows (weight regularizers) are equal on all ranks, so the weights do not change them.

A loss may declare its divisor. A compiled loss has a method ``divisor(y_true, y_pred, sample_weight)``. A model has a
method ``loss_divisor(x, y, y_pred, sample_weight)`` for the whole loss of its step (see ``docs/algorithms.md``).
Without a declaration, a user-defined ``train_step`` or ``compute_loss`` and the terms of ``add_loss`` count as means
over rows. ``choros.backends.loss_trial`` tests this before training.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras.src.backend.common.masking import get_keras_mask

from choros.backends.loss_exactness import DECLARED, WEIGHTED, check_together, declared, kind, refuse_sum
from choros.backends.rowwise_parts import compiled_losses, model_divisor
from choros.errors import InexactLossError
from choros.types import Array

TINY = 1e-20  # weight of a batch that is fully masked: negligible beside other ranks, but no division by 0


def exact_loss(batch_losses: Array, *, sums: bool = False, by_batch: bool = False) -> float:
    """Return the mean of the exact losses of all batches, as one process logs it.

    Args:
        batch_losses: an array of shape (batches, 3), summed over the ranks: n * loss, n, rows.
        sums: True if the loss is summed over ranks instead of averaged. Defaults to False.
        by_batch: True for a mean over batches that is not weighted by their rows. Defaults to False.

    Returns:
        The loss; 0.0 if there are no rows.

    Example:
        >>> import numpy as np
        >>> exact_loss(np.array([[6.0, 3.0, 3.0], [4.0, 1.0, 1.0]]))
        2.5
    """
    weight = np.ones(len(batch_losses)) if sums else np.maximum(batch_losses[:, 1], 1e-300)
    rows = batch_losses[:, 2] > 0 if by_batch else batch_losses[:, 2]
    return float((batch_losses[:, 0] / weight * rows).sum() / rows.sum()) if rows.any() else 0.0


class LossWeightTracker:
    """A context that records the divisor of the compiled loss while a step runs or is traced.

    Enter it around the step. Inside it, after the loss was computed, ``divisor(rows)`` returns a number. If the divisor
    depends on the data (a mask, weights), it returns a tensor of the backend.

    Args:
        model: the compiled and built model.
        workers: number of workers that train.
    """

    def __init__(self, model: Any, workers: int = 1) -> None:
        self.model = model
        self.workers = workers
        self._losses = compiled_losses(model)
        self._plain = list(self._losses)
        self._kinds: list[str] = []
        self._refusal: InexactLossError | None = None
        self._seen: list[Any] = []
        self._terms = 0
        self._fixed = sum(1 for v in model.trainable_variables if v.regularizer is not None)
        self._declared, self._adds = model_divisor(model)
        self._restore: Callable[[], None] = lambda: None
        if self._declared is not None or self._adds:
            return
        try:
            losses = [entry.loss for entry in self._plain]
            self._kinds = [kind(loss) for loss in losses]
            check_together(self._kinds, losses)
        except InexactLossError as refusal:
            self._refusal = refusal  # raised by the first reduced step only: other algorithms need no divisor

    def refuse(self, why: InexactLossError | None) -> None:
        """Store an error that the first reduced step raises; an earlier error has priority."""
        self._refusal = self._refusal or why

    @property
    def refusal(self) -> InexactLossError | None:
        """The error that reduced steps raise; None if there is none."""
        return self._refusal

    @property
    def sums(self) -> bool:
        """True if the ranks' losses and gradients are added without weights."""
        return self._adds or self._kinds == ["sum"]

    def __enter__(self) -> LossWeightTracker:
        self._seen = []
        self._terms = 0
        if self._declared is not None:
            self._restore = self._listen()
            return self
        self._losses[:] = [entry._replace(loss=self._watch(entry.loss)) for entry in self._plain]
        return self

    def __exit__(self, *error: object) -> None:
        self._restore()
        self._restore = lambda: None
        self._losses[:] = self._plain
        self._seen = []

    def divisor(self, rows: int, data: tuple[Any, ...] = (), *, strict: bool = True) -> Any:
        """Return the divisor of the last step's loss, in the same unit on all ranks.

        Args:
            rows: number of rows of the batch. It is the result if there is no mask and no weight.
            data: the batch, ``(x, y, sample_weight)`` or a shorter tuple. It is used if the model declares its divisor
                and its ``train_step`` does not call ``compute_loss``.
            strict: False for evaluation, which uses rows if there is no exact divisor. Defaults to True.

        Raises:
            InexactLossError: no weights make the ranks' gradients add up to that of one process. Only with ``strict``
                and several workers.
        """
        refusal = self._refusal or self._mixed()
        if refusal is not None and strict and self.workers > 1:
            raise refusal
        if self.sums:
            return 1.0
        if self._declared is not None:
            x, y, weight = (*data, None, None, None)[:3]
            divisor = self._seen[0] if self._seen else _scalar(self._declared(x, y, None, weight))
            return keras.ops.maximum(divisor, TINY)
        divisor = None if refusal is not None or not self._seen else self._seen[0]
        return float(rows) if divisor is None else keras.ops.maximum(divisor, TINY)

    def _mixed(self) -> InexactLossError | None:
        """Return an error if the terms of the last step's loss have different divisors, else None."""
        if self._adds:
            return None
        if self.sums:
            return refuse_sum(self.model) if self._terms else None
        if all(n is None for n in self._seen):
            return None
        if len(self._seen) > 1:
            return InexactLossError(
                f"Model {self.model.name!r} computes several losses, of which one at least divides by mask entries or "
                "weights: only where all divide by rows is AllReduce exact. Use another algorithm."
            )
        if self._terms > self._fixed:
            return InexactLossError(
                f"The loss of model {self.model.name!r} divides by mask entries or weights, and its add_loss or "
                "activity regulariser by rows: AllReduce cannot weigh both. Use another algorithm."
            )
        return None

    def _listen(self) -> Callable[[], None]:
        """Record the declared divisor in each call of ``compute_loss``; return a function that ends the recording."""
        attributes = vars(self.model)
        plain, before = self.model.compute_loss, attributes.get("compute_loss")

        def recording_loss(
            x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, *more: Any, **others: Any
        ) -> Any:
            assert self._declared is not None  # noqa: S101 - for the type checker
            self._seen.append(_scalar(self._declared(x, y, y_pred, sample_weight)))
            return plain(x, y, y_pred, sample_weight, *more, **others)

        def restore() -> None:
            if before is None:
                attributes.pop("compute_loss", None)
            else:
                attributes["compute_loss"] = before

        attributes["compute_loss"] = recording_loss
        return restore

    def _watch(self, loss: Any) -> Any:
        """Wrap a loss to record its divisor: from its masks, and from the sample weights if its reduction uses them."""

        def watched(y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
            masks = [get_keras_mask(y_pred)]
            plain, own = loss.call, vars(loss).get("call")

            def call(true: Any, pred: Any) -> Any:
                values = plain(true, pred)
                masks.append(get_keras_mask(values))
                return values

            loss.call = call
            try:
                value = loss(y_true, y_pred, sample_weight)
            finally:
                if own is None:
                    del loss.call
                else:
                    loss.call = own
            if kind(loss) == DECLARED:
                self._seen.append(_scalar(declared(loss)(y_true, y_pred, sample_weight)))
                self._terms = len(self.model.losses)
                return value
            weights = sample_weight if loss.reduction == WEIGHTED else None
            self._seen.append(_count([mask for mask in masks if mask is not None], weights))
            if self.sums or self._seen[-1] is not None:
                self._terms = len(self.model.losses)
            return value

        return watched


def _scalar(divisor: Any) -> Any:
    """Convert a declared divisor to a float32 scalar without a gradient."""
    return keras.ops.stop_gradient(keras.ops.cast(keras.ops.sum(keras.ops.convert_to_tensor(divisor)), "float32"))


def _count(masks: list[Any], weights: Any) -> Any:
    """Return the sum of the weights of valid entries; None if the divisor is a fixed multiple of the rows."""
    if not masks and weights is None:
        return None
    total: Any = None
    for mask in masks:
        total = mask if total is None else keras.ops.logical_and(total, mask)
    if total is not None:
        total = keras.ops.cast(total, "float32")
    if weights is not None:
        weights = keras.ops.cast(weights, "float32")
        if total is None:
            total = weights
        elif len(total.shape) < len(weights.shape):  # as Keras aligns (rows,) with (rows, 1)
            total = keras.ops.multiply(keras.ops.expand_dims(total, -1), weights)
        elif len(total.shape) > len(weights.shape):
            total = keras.ops.multiply(total, keras.ops.expand_dims(weights, -1))
        else:
            total = keras.ops.multiply(total, weights)
    return keras.ops.stop_gradient(keras.ops.sum(total))
