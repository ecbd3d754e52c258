"""Packages that a process of Choros' own is better off without while it imports others."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

BESIDE_KERAS = ("sklearn",)  # Keras loads it for its wrappers, where it is installed: 0.6 s, and scipy with it


@contextmanager
def absent(*names: str) -> Iterator[None]:
    """For a while, let packages that nothing has loaded be as if they were not installed.

    Args:
        names: str. Of packages; afterwards they can be imported as ever.

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
