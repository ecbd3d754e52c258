"""Contexts that hide packages from an import that would load them without need."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def lean_keras_import() -> Iterator[None]:
    """Make the import of Keras fast within the context: without unneeded packages and garbage collection.

    Keras loads some packages only because they are installed. Workers do not use them: scikit-learn for Keras' wrappers
    (0.6 s, with scipy), matplotlib for its plots (0.3 s) and, on other backends, JAX for ``OrbaxCheckpoint`` (0.5 s).
    Callbacks run in the caller's process. Collections during the import cost a fifth of its time and find nothing. The
    imported objects are exempt from later collections. If Keras is loaded already, nothing changes.
    """
    if "keras" in sys.modules:
        yield
        return
    other = () if os.environ.get("KERAS_BACKEND", "jax") == "jax" else ("jax",)
    collects = gc.isenabled()
    gc.disable()
    try:
        with absent("sklearn", "matplotlib", *other):
            yield
    finally:
        if collects:
            if "keras" in sys.modules:
                gc.freeze()
            gc.enable()


@contextmanager
def absent(*names: str) -> Iterator[None]:
    """Make packages appear as not installed within the context, unless they are loaded already.

    Args:
        names: str. Names of packages. After the context they can be imported as before.

    Example:
        >>> with absent("this_is_not_there"):
        ...     "this_is_not_there" in sys.modules
        True
        >>> "this_is_not_there" in sys.modules
        False
    """
    hidden = [name for name in names if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]
