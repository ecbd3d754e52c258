"""Windows: local steps that run as one compiled program.

A step of a small model takes less time than its call from Python. A program of several steps has one call. On two
cores this saves a tenth to a quarter of the time of an MLP or a CNN on TensorFlow, and half the time of a step of
0.05 ms on JAX. A large step gains nothing, so a window has limits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import keras
import numpy as np

from choros.backends.batch_parts import parts
from choros.types import Batch

MOST = 16  # steps of a window
BYTES = 1 << 24  # most bytes of the batches of a window: the program copies them into one array
VALUES = 1 << 22  # most trainable values: the update of more values takes longer than all that a window saves


class SingleSteps(ABC):
    """Base of replicas: each step is a program, unless a backend compiles several; see ``Replica``."""

    @abstractmethod
    def step(self, batch: Batch) -> None:
        """Run one local training step."""

    @abstractmethod
    def look_ahead(self, momentum: float) -> None:
        """Apply Nesterov momentum after a step."""

    def window(self, batch: Batch, most: int) -> int:
        """Return how many steps on batches of this form one program makes, at most ``most``."""
        return 1

    def steps(self, batches: Sequence[Batch], window: int, momentum: float = 0.0) -> None:
        """Run one local training step for each batch."""
        for batch in batches:
            self.step(batch)
            if momentum:
                self.look_ahead(momentum)


def window_length(model: keras.Model, size: int, batch: Batch, most: int) -> int:
    """Return the number of steps of a window, before the backend has looked at the compiled step.

    A step of the user's own is left as it is: it may expect a call for each batch.

    Args:
        model: a compiled model that has been built.
        size: int. Number of its trainable values.
        batch: a batch with rows.
        most: int. Most steps of a window.

    Returns:
        An int of at least 1. 1: no window.
    """
    stock = getattr(model.train_step, "__func__", None) is keras.Model.train_step
    leaves = keras.tree.flatten(parts(batch))
    numbers = all(isinstance(leaf, np.ndarray) and leaf.dtype.kind in "fiub" for leaf in leaves)
    if not stock or model.run_eagerly or not numbers or size > VALUES:
        return 1
    nbytes: int = sum(leaf.nbytes for leaf in leaves)
    return max(min(most, BYTES // max(nbytes, 1)), 1)


def alike(batch: Batch) -> tuple[object, ...]:
    """Return the shapes and dtypes of a batch. Batches of one window have the same."""
    return tuple((leaf.shape, leaf.dtype) for leaf in keras.tree.flatten(parts(batch)))
