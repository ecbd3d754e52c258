"""Checkpoints of a training: their files, their schedule and the signals that request one."""

from __future__ import annotations

from choros.training.checkpoint.policy import Checkpoint
from choros.training.checkpoint.store import Saved, Store

__all__ = ["Checkpoint", "Saved", "Store"]
