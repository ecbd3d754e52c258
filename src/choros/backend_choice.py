"""The backend that Keras will load, and its choice if no setting names an installed one.

Keras writes ``~/.keras/keras.json`` at its first import, and that file names TensorFlow, even if it is not installed.
So after ``pip install 'choros[jax]'`` a plain ``import keras`` fails. ``import choros`` therefore sets
``KERAS_BACKEND`` if exactly one backend is installed and no setting names an installed one. The import of Keras prints
this choice; if there was none, it raises an error with the remedy. This module imports no framework.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec

logger = logging.getLogger(__name__)

BACKENDS = ("jax", "torch", "tensorflow")
WITHOUT_TRAINING = ("numpy", "openvino")  # Keras runs on these too, but cannot train on them
_VARIABLE = "KERAS_BACKEND"

chosen = ""  # the backend that ``choose`` set in this process
_notice = ""  # the line on this choice, until it is printed


def config_path() -> str:
    """Return the path of the ``keras.json`` that Keras reads, by Keras' rules.

    Example:
        >>> config_path().endswith("keras.json")
        True
    """
    folder = os.environ.get("KERAS_HOME")
    if folder is None:
        home = os.path.expanduser("~")
        folder = os.path.join(home if os.access(home, os.W_OK) else "/tmp", ".keras")
    return os.path.expanduser(os.path.join(folder, "keras.json"))


def backend_of_file(path: str) -> str:
    """Return the backend that a ``keras.json`` names, or ``""`` if the file is missing, broken or names none."""
    if not os.path.isfile(path):
        return ""
    import json  # imported here, as it costs more time than the rest of this module

    try:
        with open(path) as file:
            return str(json.load(file).get("backend") or "")
    except (OSError, ValueError, AttributeError):
        return ""


def named_backend() -> tuple[str, str]:
    """Return the backend that Keras will load, and the setting that names it.

    Returns:
        The name, such as ``"jax"``, and ``"KERAS_BACKEND"``, the path of a ``keras.json`` or ``"Keras' default"``.

    Example:
        >>> import unittest.mock
        >>> with unittest.mock.patch.dict(os.environ, {"KERAS_BACKEND": "torch"}):
        ...     named_backend()
        ('torch', 'KERAS_BACKEND')
    """
    if os.environ.get(_VARIABLE):
        return os.environ[_VARIABLE], _VARIABLE
    path = config_path()
    name = backend_of_file(path)
    return (name, path) if name else ("tensorflow", "Keras' default")


def keras_backend() -> str:
    """Return the backend that Keras will load with its origin, as text: the setting, or that none other is installed.

    Example:
        >>> keras_backend().endswith(")")
        True
    """
    name, source = named_backend()
    return f"{name} ({'the only installed backend' if name == chosen else source})"


def is_installed(name: str) -> bool:
    """Return whether a module can be imported, without importing it.

    Example:
        >>> is_installed("json"), is_installed("no_such_module")
        (True, False)
    """
    try:
        spec = importlib.util.find_spec(name)
    except ValueError:  # the module is in sys.modules without a spec
        return True
    return spec is not None and spec.origin is not None  # without an origin it is only a directory of that name


def choose() -> None:
    """Set ``KERAS_BACKEND`` to the only installed backend, unless a setting names an installed one.

    ``import keras`` will then call ``announce``. If no choice is possible, it will raise ``NoBackendError``. If Keras
    is imported already, nothing changes.
    """
    global chosen, _notice
    if "keras" in sys.modules:
        return
    name, source = named_backend()
    if _is_usable(name):
        return
    _KerasFinder.install()
    present = [backend for backend in BACKENDS if is_installed(backend)]
    if source == _VARIABLE or len(present) != 1:
        return
    chosen = os.environ[_VARIABLE] = present[0]
    unusable_setting = f", and {source} names {name}, which is not installed" if os.path.sep in source else ""
    _notice = f"{_VARIABLE} is not set{unusable_setting}: Keras runs on {chosen}, the only backend that is installed."


def announce() -> None:
    """Print the choice that ``choose`` has made, if any, on stderr.

    Called where Keras is imported, and before processes are started that will import it. The line appears once for a
    job: child processes inherit the variable, and of a launcher's ranks only rank 0 prints.
    """
    global _notice
    notice, _notice = _notice, ""
    if notice and os.environ.get(_VARIABLE) == chosen and _is_first_rank() and sys.stderr is not None:
        logger.info(notice)


def problem() -> str:
    """Return the reason why Keras cannot be imported here and its remedy, or ``""`` if its backend is installed."""
    present = [backend for backend in BACKENDS if is_installed(backend)]
    setting = " or ".join(f"{_VARIABLE}={backend}" for backend in present)
    install = "pip install 'choros[jax]' (or [torch], or [tensorflow])"
    location = f"in {sys.executable} on {os.uname().nodename}"
    name, source = named_backend()
    if _is_usable(name):
        return ""
    if source == _VARIABLE:
        if name not in (*BACKENDS, *WITHOUT_TRAINING):
            return f"{_VARIABLE} is {name!r}, which is not a backend of Keras: set it to {', '.join(BACKENDS)}."
        command = f"pip install 'choros[{name}]'" if name in BACKENDS else f"pip install {name}"
        alternative = f", or set {setting}" if present else ""
        return f"{_VARIABLE} is {name!r}, but {name} is not installed {location}: {command}{alternative}."
    if not present:
        return f"No backend of Keras is installed {location}: {install}."
    installed = " and ".join(present)
    return f"{installed} are installed {location}, but Keras would load {name} ({source}), which is not: set {setting}."


def _is_usable(name: str) -> bool:
    return name in (*BACKENDS, *WITHOUT_TRAINING) and is_installed(name)


def _is_first_rank() -> bool:
    """Return whether this process prints for its job: it is rank 0 or the only process, and not a Spark task."""
    if "pyspark.worker" in sys.modules or "pyspark.daemon" in sys.modules:
        return False
    from choros.cluster import Place
    from choros.errors import ChorosError

    try:
        return Place.here().rank == 0
    except ChorosError:  # the launcher's variables contradict each other; code that needs the place raises this error
        return True


class _KerasFinder:
    """A finder for ``sys.meta_path``: an import of Keras prints the choice, or raises ``NoBackendError``."""

    @classmethod
    def install(cls) -> None:
        if not any(isinstance(finder, cls) for finder in sys.meta_path):
            sys.meta_path.insert(0, cls())

    def find_spec(self, fullname: str, path: object, target: object = None) -> ModuleSpec | None:
        if fullname == "keras":
            choose()  # again, because a backend may have been installed since
            if reason := problem():
                from choros.errors import NoBackendError

                raise NoBackendError(reason)
            announce()
        return None
