"""Versions of installed libraries, found without imports."""

from __future__ import annotations

from importlib import metadata

_OTHER_NAMES = {"tensorflow": ("tensorflow-cpu", "tensorflow-gpu", "tensorflow-macos")}


def version(name: str) -> str:
    """Return the installed version of a distribution, without importing it.

    Args:
        name: the distribution's name on PyPI, not the import name. "tensorflow" also finds its other distributions.

    Returns:
        The version, or "" if it is not installed.

    Example:
        >>> version("choros") != "", version("no_such_package")
        (True, '')
    """
    for distribution in (name, *_OTHER_NAMES.get(name, ())):
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return ""
