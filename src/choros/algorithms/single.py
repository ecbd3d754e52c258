"""Plain training by one worker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from choros.algorithms.base import Algorithm


@dataclass(frozen=True)
class Single(Algorithm):
    """One worker, plain Keras: the baseline that the others are measured against.

    ::

        x <- x + u(x)                the compiled optimizer's step u, over all batches

    dist-keras' SingleTrainer swallowed an AttributeError after the first batch of each epoch, so it trained on that
    batch only. Not good for more work than one core or device can do.

    Example:
        >>> Single().mode is None
        True
    """

    mode: ClassVar[Literal["sync", "async"] | None] = None
