"""The parts of a batch as Keras takes them, and a build without labels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras

from choros.types import Batch


def parts(batch: Batch) -> tuple[Any, ...]:
    """Return ``(x,)``, ``(x, y)`` or ``(x, y, sample_weight)``, the forms of a batch in Keras."""
    used = 3 if batch.sample_weight is not None else 2 if batch.y is not None else 1
    return (batch.x, batch.y, batch.sample_weight)[:used]


@contextmanager
def blind(model: keras.Model, batch: Batch) -> Iterator[bool]:
    """Temporarily remove losses and metrics that cannot be built because the batch has no y.

    Yields:
        bool: True if they were removed.
    """
    attributes = model.__dict__
    names = ("_compile_loss", "_compile_metrics")
    previous = {name: attributes[name] for name in names}
    missing = batch.y is None and any(part is not None and not part.built for part in previous.values())
    if missing:
        attributes.update(dict.fromkeys(names))
    try:
        yield missing
    finally:
        attributes.update(previous)
