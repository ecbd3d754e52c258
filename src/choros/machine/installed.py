"""Installed libraries, found without importing any of them."""

from __future__ import annotations

from importlib import metadata

from choros.backend_choice import named_backend

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
    """Return the backend that Keras would load, and in brackets what names it.

    Example:
        >>> keras_backend().endswith(")")
        True
    """
    name, place = named_backend()
    return f"{name} ({place})"
