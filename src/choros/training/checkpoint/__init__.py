"""Checkpoints of a training: their files, their schedule and the signals that request one."""

from __future__ import annotations

from choros.training.checkpoint.policy import Checkpoint
from choros.training.checkpoint.store import CheckpointStore, StoredCheckpoint

__all__ = ["Checkpoint", "CheckpointStore", "StoredCheckpoint"]
