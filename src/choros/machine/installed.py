"""What is installed here, found out without importing any of it."""

from __future__ import annotations

import json
import os
from importlib import metadata
from pathlib import Path

_OTHER_NAMES = {"tensorflow": ("tensorflow-cpu", "tensorflow-gpu", "tensorflow-macos")}


def version(name: str) -> str:
    """The version of a library as it is installed, under whichever name; the library is not imported.

    Args:
        name: as it is imported.

    Returns:
        The version, nothing where it is not installed.

    Example:
        >>> version("choros") != "", version("no_such_package")
        (True, '')
    """
    for known in (name, *_OTHER_NAMES.get(name, ())):
        try:
            return metadata.version(known)
        except metadata.PackageNotFoundError:
            continue
    return ""


def keras_backend() -> str:
    """The backend that Keras would take, as ``keras.src.backend.config`` finds it, and where it is said.

    Example:
        >>> keras_backend().endswith(")")
        True
    """
    if os.environ.get("KERAS_BACKEND"):
        return f"{os.environ['KERAS_BACKEND']} (KERAS_BACKEND)"
    path = Path(os.environ.get("KERAS_HOME") or Path.home() / ".keras") / "keras.json"
    try:
        return f"{json.loads(path.read_text())['backend']} ({path})"
    except (OSError, ValueError, KeyError, TypeError):
        return "tensorflow (Keras' default)"
