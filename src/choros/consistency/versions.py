"""The versions on which a pickle depends, compared before a process reads it."""

from __future__ import annotations

import platform
from contextlib import suppress
from importlib import metadata

from choros.errors import InvalidInputError

_LIBRARIES = {"tensorflow": ("tensorflow", "tensorflow-cpu")}  # distributions that bring the backend


def versions() -> dict[str, str]:
    """Return the versions of Python and of the libraries on which a pickle depends."""
    import keras

    backend = keras.backend.backend()
    found = {"python": platform.python_version().rpartition(".")[0], "keras": keras.__version__, "backend": backend}
    for name in ("numpy", "cloudpickle", *_LIBRARIES.get(backend, (backend,))):
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def check_versions(theirs: dict[str, str]) -> None:
    """Refuse to read what a process with other versions wrote.

    Args:
        theirs: ``versions()`` of that process.

    Raises:
        InvalidInputError: says what differs, and on which host.
    """
    mine = versions()
    different = [name for name in theirs if theirs[name] != mine.get(name)]
    if different:
        both = ", ".join(f"{name} {mine.get(name, 'none')} here and {theirs[name]} there" for name in different)
        raise InvalidInputError(
            f"The worker on {platform.node()} and the process that called fit have different versions: {both} "
            "(here is the worker). A model travels between equal ones only: install the same on both."
        )
