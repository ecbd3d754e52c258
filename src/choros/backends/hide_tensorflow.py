"""Keras without TensorFlow, where nothing needs it: Keras loads it, where it is installed, to ask for its types."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def lean() -> Iterator[None]:
    """For a while, let Keras take TensorFlow as absent, if nothing has loaded it yet.

    To write a model down and to set a seed Keras asks whether TensorFlow is there by loading it, which takes 3 s and
    200 MB. What nothing has loaded has made no object whose type could matter, and draws no numbers.

    Example:
        >>> with lean():
        ...     "ready"
        'ready'
    """
    import keras  # noqa: F401 - which brings what is looked for

    lazy: Any = getattr(sys.modules.get("keras.src.utils.module_utils"), "tensorflow", None)
    if "tensorflow" in sys.modules or getattr(lazy, "_available", True) is not None:
        yield
        return
    lazy._available = False
    try:
        yield
    finally:
        lazy._available = None
