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
    installed = {"python": platform.python_version().rpartition(".")[0], "keras": keras.__version__, "backend": backend}
    for name in ("numpy", "cloudpickle", *_LIBRARIES.get(backend, (backend,))):
        with suppress(metadata.PackageNotFoundError):
            installed[name] = metadata.version(name)
    return installed


def check_versions(remote: dict[str, str]) -> None:
    """Refuse to read data of a process with other versions.

    Args:
        remote: dict. ``versions()`` of that process.

    Raises:
        InvalidInputError: a version differs; the message names the libraries and this host.
    """
    local = versions()
    different = [name for name in remote if remote[name] != local.get(name)]
    if different:
        differences = ", ".join(f"{name} {local.get(name, 'none')} here and {remote[name]} there" for name in different)
        raise InvalidInputError(
            f"The worker on {platform.node()} and the process that called fit have different versions: {differences} "
            "(here is the worker). A model can be sent only between equal versions: install the same on both."
        )
