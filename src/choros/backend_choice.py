"""The backend that Keras will load, and a choice of it where nothing names one that is installed.

Keras writes ``~/.keras/keras.json`` when it is first imported, and that file names TensorFlow whatever is installed. So
after ``pip install 'choros[jax]'`` a plain ``import keras`` fails. ``import choros`` therefore sets ``KERAS_BACKEND``
where exactly one backend is installed and nothing names an installed one. Where there is no such choice, the import of
Keras raises an error that says what to do. Nothing here imports a framework.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec

BACKENDS = ("jax", "torch", "tensorflow")
_OTHERS = ("numpy", "openvino")  # Keras runs on these too, but cannot train on them
_VARIABLE = "KERAS_BACKEND"

chosen = ""  # the backend that ``choose`` set in this process


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
    """Return the backend that a ``keras.json`` names, ``""`` where the file is missing, broken or names none."""
    if not os.path.isfile(path):
        return ""
    import json  # which costs more than all else here

    try:
        with open(path) as file:
            return str(json.load(file).get("backend") or "")
    except (OSError, ValueError, AttributeError):
        return ""


def named_backend() -> tuple[str, str]:
    """Return the backend that Keras will load, and the place that names it.

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
    """Return the backend that Keras will load with the place that names it, as text.

    Example:
        >>> keras_backend().endswith(")")
        True
    """
    name, place = named_backend()
    return f"{name} ({place})"


def is_installed(name: str) -> bool:
    """Tell if a module can be imported, without importing it.

    Example:
        >>> is_installed("json"), is_installed("no_such_module")
        (True, False)
    """
    try:
        spec = importlib.util.find_spec(name)
    except ValueError:  # a module without a spec that something put into sys.modules
        return True
    return spec is not None and spec.origin is not None  # else it is a mere directory of that name


def choose() -> None:
    """Set ``KERAS_BACKEND`` to the only backend that is installed, where nothing names an installed one.

    One line on stderr says so, once for a job: processes that this one starts inherit the variable, and of ranks that a
    launcher started only rank 0 says it. Where no choice can be made, ``import keras`` will raise ``NoBackendError``.
    A process that has imported Keras is left as it is.
    """
    global chosen
    if "keras" in sys.modules:
        return
    name, place = named_backend()
    if _is_usable(name):
        return
    present = [backend for backend in BACKENDS if is_installed(backend)]
    if place == _VARIABLE or len(present) != 1:
        _Guard.install()
        return
    chosen = os.environ[_VARIABLE] = present[0]
    if _is_first_rank() and sys.stderr is not None:
        also = f", and {place} names {name}, which is not installed" if os.path.sep in place else ""
        print(
            f"choros: {_VARIABLE} is not set{also}: Keras runs on {chosen}, the only backend that is installed.",
            file=sys.stderr,
        )


def problem() -> str:
    """Return the reason why Keras cannot be imported here and its remedy, ``""`` where its backend is installed."""
    present = [backend for backend in BACKENDS if is_installed(backend)]
    setting = " or ".join(f"{_VARIABLE}={backend}" for backend in present)
    install = "pip install 'choros[jax]' (or [torch], or [tensorflow])"
    here = f"in {sys.executable} on {os.uname().nodename}"
    name, place = named_backend()
    if _is_usable(name):
        return ""
    if place == _VARIABLE:
        if name not in (*BACKENDS, *_OTHERS):
            return f"{_VARIABLE} is {name!r}, which is no backend of Keras: set it to {', '.join(BACKENDS)}."
        brings = f"pip install 'choros[{name}]'" if name in BACKENDS else f"pip install {name}"
        instead = f", or set {setting}" if present else ""
        return f"{_VARIABLE} is {name!r}, but {name} is not installed {here}: {brings}{instead}."
    if not present:
        return f"No backend of Keras is installed {here}: {install}."
    several = " and ".join(present)
    return f"{several} are installed {here}, but Keras would load {name} ({place}), which is not: set {setting}."


def _is_usable(name: str) -> bool:
    return name in (*BACKENDS, *_OTHERS) and is_installed(name)


def _is_first_rank() -> bool:
    """Tell if this process speaks for its job: it is no task of Spark's, and rank 0 where a launcher started ranks."""
    if "pyspark.worker" in sys.modules or "pyspark.daemon" in sys.modules:
        return False
    from choros.cluster import Place
    from choros.errors import ChorosError

    try:
        return Place.here().rank == 0
    except ChorosError:  # the launcher's variables contradict each other, which what needs the place reports
        return True


class _Guard:
    """A finder for ``sys.meta_path`` that raises ``NoBackendError`` where Keras is imported without its backend."""

    @classmethod
    def install(cls) -> None:
        if not any(isinstance(finder, cls) for finder in sys.meta_path):
            sys.meta_path.insert(0, cls())

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname == "keras":
            choose()  # again, since a backend may have been installed in the meantime
            if reason := problem():
                from choros.errors import NoBackendError

                raise NoBackendError(reason)
        return None
