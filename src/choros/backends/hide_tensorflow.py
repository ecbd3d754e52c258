"""A context that prevents Keras from importing TensorFlow only to check for TensorFlow's types."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def lean() -> Iterator[None]:
    """Temporarily make Keras treat TensorFlow as absent, if it has not been imported yet.

    To serialize a model or set a seed, Keras imports TensorFlow if it is installed. This takes 3 s and 200 MB. It is
    unnecessary before the first import: no object has a type of TensorFlow, and no generator of it is in use.

    Example:
        >>> with lean():
        ...     "ready"
        'ready'
    """
    import keras  # noqa: F401 - imports keras.src.utils.module_utils

    lazy: Any = getattr(sys.modules.get("keras.src.utils.module_utils"), "tensorflow", None)
    if "tensorflow" in sys.modules or getattr(lazy, "_available", True) is not None:
        yield
        return
    lazy._available = False
    try:
        yield
    finally:
        lazy._available = None
