"""Keras callbacks for any ``fit``: a Trainer's, Horovod's (whose own are in ``hvd``) and plain Keras'."""

from __future__ import annotations

from choros.callbacks.embedding import TensorBoardEmbedding
from choros.callbacks.profile import Profile
from choros.callbacks.time_limit import BeforeTimeLimit
from choros.callbacks.timing import BatchTiming, SamplesPerSec

__all__ = ["BatchTiming", "BeforeTimeLimit", "Profile", "SamplesPerSec", "TensorBoardEmbedding"]
