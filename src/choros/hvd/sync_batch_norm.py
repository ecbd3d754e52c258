"""Batch normalization over the rows of all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import keras

from choros.comm.collectives import SUM
from choros.consistency.model_fingerprint import alike
from choros.hvd.collectives import allreduce
from choros.hvd.context import is_initialized, rank, size
from choros.hvd.unused_arguments import warn_of_unused

ops: ModuleType = keras.ops  # has no annotations: pyright would infer unions with None
_by_rows = [False]  # whether the ranks' gradients will be weighted by their rows


@contextmanager
def weighed(by_rows: bool) -> Iterator[None]:
    """Declare, within the context, whether gradients will be weighted by each rank's rows, as in ``fit``."""
    _by_rows.append(by_rows)
    try:
        yield
    finally:
        _by_rows.pop()


class SyncBatchNormalization(keras.layers.BatchNormalization):  # type: ignore[misc]
    """Keras' ``BatchNormalization`` with the mean and variance over all ranks' batches, exact also for unequal batches.

    Each rank's count, mean and variance are gathered and combined (Chan et al. 1983, equation 2.1), so a large mean
    costs no precision. Gradients are exact too: in ``fit`` those of the mean over all rows, in custom loops those of
    the mean of the ranks' losses. All ranks must train the layer at the same time, each with one row or more. It is
    saved as a plain ``BatchNormalization``.

    Args:
        **options: arguments of ``keras.layers.BatchNormalization``. ``fused``, which Keras 3 does not have, has no
            effect, and gives a warning.

    Example:
        >>> SyncBatchNormalization(momentum=0.9).get_config()["momentum"]
        0.9
    """

    def __init__(self, **options: Any) -> None:
        warn_of_unused("SyncBatchNormalization", "Keras 3 has no such form", fused=options.pop("fused", None))
        super().__init__(**options)
        if keras.backend.backend() == "tensorflow":
            self.supports_jit = False  # XLA cannot call back to the host there

    def _moments(self, inputs: object, mask: object) -> tuple[Any, Any]:
        moments: tuple[Any, Any] = super()._moments(inputs, mask)  # pyright: ignore[reportAssignmentType] - as of ops above
        mean, variance = moments
        if not is_initialized() or size() == 1:
            return mean, variance
        if mask is None:
            count = ops.cast(ops.size(inputs), mean.dtype) / mean.shape[-1]
        else:
            full_mask = ops.broadcast_to(ops.expand_dims(mask, -1), ops.shape(inputs))
            count = ops.sum(ops.cast(full_mask, mean.dtype)) / mean.shape[-1]
        local_moments = ops.concatenate([ops.reshape(count, (1,)), mean, variance])
        rows = ops.cast(ops.shape(inputs)[0], mean.dtype) if _by_rows[-1] else 1.0
        # The gradient of this rank's values sums over all ranks, each weighted by its rows. fit weights gradients by
        # rows again, so the values' gradient is divided by this rank's rows, and the result's is multiplied.
        # A sum with one row per rank replaces allgather: ranks with different batches need not trace at the same time.
        place = ops.expand_dims(ops.arange(size()) == rank(), -1)
        placed = ops.where(place, _scale_gradient(local_moments, 1.0 / rows), ops.zeros_like(local_moments))
        path: str = self.path  # pyright: ignore[reportAssignmentType] - None only before Keras builds the layer
        gathered = _scale_gradient(allreduce(placed, op=SUM, name=f"moments of {alike(path)}"), rows)
        counts = gathered[:, :1]
        means = gathered[:, 1 : 1 + mean.shape[-1]]
        variances = gathered[:, 1 + mean.shape[-1] :]
        total = ops.sum(counts)
        mean_all = ops.sum(counts * means, axis=0) / total
        spread = ops.sum(counts * (variances + ops.square(means - mean_all)), axis=0) / total
        return mean_all, spread


def _scale_gradient(x: object, factor: object) -> Any:
    """Return the same values, with the gradient multiplied by ``factor``."""
    constant = ops.stop_gradient(x)
    return constant + factor * (x - constant)


SyncBatchNormalization.__name__ = "BatchNormalization"  # so that saved files hold Keras' layer
SyncBatchNormalization.__qualname__ = "BatchNormalization"
SyncBatchNormalization.__module__ = "keras.layers"
