"""Keras callbacks for any ``fit``: a Trainer's, Horovod's (whose own are in ``hvd``) and plain Keras'."""

from __future__ import annotations

from choros.callbacks.timing import BatchTiming, SamplesPerSec

__all__ = ["BatchTiming", "SamplesPerSec"]
