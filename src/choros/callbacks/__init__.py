"""Keras callbacks for any ``fit``: of a Trainer, of ``choros.hvd`` (which has more callbacks) and of plain Keras."""

from __future__ import annotations

from choros.callbacks.embedding import TensorBoardEmbedding
from choros.callbacks.profile import Profile
from choros.callbacks.run_metrics import RunMetrics
from choros.callbacks.time_limit import BeforeTimeLimit
from choros.callbacks.timing import BatchTiming, SamplesPerSec

__all__ = ["BatchTiming", "BeforeTimeLimit", "Profile", "RunMetrics", "SamplesPerSec", "TensorBoardEmbedding"]
