"""The state of a training on the disk: whole files or none, and when they are written."""

from __future__ import annotations

from choros.checkpoints.policy import Checkpoint
from choros.checkpoints.store import Saved, Store

__all__ = ["Checkpoint", "Saved", "Store"]
