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

    dist-keras' SingleTrainer swallowed an AttributeError after the first batch of each epoch and so trained on
    that batch alone. Not good for more than one core's or device's worth of work.

    Example:
        >>> Single().mode is None
        True
    """

    mode: ClassVar[Literal["sync", "async"] | None] = None
