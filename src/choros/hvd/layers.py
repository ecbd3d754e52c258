"""Batch normalisation over the rows of all ranks."""

from __future__ import annotations

from typing import Any

import keras
from keras import ops

from choros.hvd.collectives import allgather
from choros.hvd.context import is_initialized, size


class SyncBatchNormalization(keras.layers.BatchNormalization):  # type: ignore[misc]
    """Keras' ``BatchNormalization`` with mean and variance of the batches of all ranks, exact also where these differ.

    Each rank's count, mean and variance are gathered and combined (Chan et al. 1983, equation 2.1), so nothing is lost
    where the mean is large. All ranks train it at the same time, each with a row or more. It is saved as a plain
    ``BatchNormalization``.

    Args:
        **how: what ``keras.layers.BatchNormalization`` takes; ``fused``, which Keras 3 no longer has, is ignored.

    Example:
        >>> SyncBatchNormalization(momentum=0.9).get_config()["momentum"]
        0.9
    """

    def __init__(self, **how: Any) -> None:
        how.pop("fused", None)
        super().__init__(**how)
        if keras.backend.backend() == "tensorflow":
            self.supports_jit = False  # XLA cannot call back to the host there

    def _moments(self, inputs: Any, mask: Any) -> Any:
        mean, variance = super()._moments(inputs, mask)
        if not is_initialized() or size() == 1:
            return mean, variance
        if mask is None:
            count = ops.cast(ops.size(inputs), mean.dtype) / mean.shape[-1]
        else:
            broad = ops.broadcast_to(ops.expand_dims(mask, -1), ops.shape(inputs))
            count = ops.sum(ops.cast(broad, mean.dtype)) / mean.shape[-1]
        mine = ops.concatenate([ops.reshape(count, (1,)), mean, variance])
        everyone = allgather(ops.expand_dims(mine, 0), name=f"moments of {self.path}")
        counts, means, variances = (
            everyone[:, :1],
            everyone[:, 1 : 1 + mean.shape[-1]],
            everyone[:, 1 + mean.shape[-1] :],
        )
        total = ops.sum(counts)
        whole = ops.sum(counts * means, axis=0) / total
        spread = ops.sum(counts * (variances + ops.square(means - whole)), axis=0) / total
        return whole, spread


SyncBatchNormalization.__name__ = "BatchNormalization"  # the file is Keras' own
SyncBatchNormalization.__qualname__ = "BatchNormalization"
SyncBatchNormalization.__module__ = "keras.layers"
