"""Keras without TensorFlow, where nothing needs it: Keras loads it, where it is installed, to ask for its types."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


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
    import keras

    utils = getattr(getattr(keras, "src", None), "utils", None)
    lazy = getattr(getattr(utils, "module_utils", None), "tensorflow", None)
    if "tensorflow" in sys.modules or getattr(lazy, "_available", True) is not None:
        yield
        return
    assert lazy is not None  # noqa: S101 - for the type checker
    lazy._available = False
    try:
        yield
    finally:
        lazy._available = None
